"""What runs the processes of a job: this machine, Slurm, Ray."""
