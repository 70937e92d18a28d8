"""Runs the processes of a job as Ray actors."""
