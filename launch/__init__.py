"""Starts and restarts the processes of a job: this machine, Ray, Slurm."""
