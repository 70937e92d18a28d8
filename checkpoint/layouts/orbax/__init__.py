"""Orbax's checkpoints, read and written."""
