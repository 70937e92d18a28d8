"""The processes of a job as a group: ids, barriers, collectives, slices."""
