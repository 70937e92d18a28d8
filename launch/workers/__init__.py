"""The processes of a job on one machine."""
