"""Runs processes on one machine: their environment, output, signals and coordinator."""
