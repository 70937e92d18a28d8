"""The pure state machine and its snapshot: no socket, thread, lock or clock."""
