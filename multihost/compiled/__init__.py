"""Compiled programs, kept on each host for the runs to come."""
