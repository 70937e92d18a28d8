"""`orbax.checkpoint.version`."""

# Of the Orbax whose names these are: programs compare it.
__version__ = "0.12.0"
