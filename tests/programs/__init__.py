"""Whole programs, as people write them, in every ending: README.md says how to add one."""
