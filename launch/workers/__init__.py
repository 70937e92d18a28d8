"""Runs the processes of a job on one machine: their environment, output, signals and
coordinator.
"""
