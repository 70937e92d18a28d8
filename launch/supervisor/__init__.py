"""Decides when a job starts, restarts and ends."""
