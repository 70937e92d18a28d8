"""Steps in the memory or on the disks of the hosts, with copies on their peers."""
