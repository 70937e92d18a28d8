"""`orbax.checkpoint.abstract_checkpoint_manager`."""

from .checkpoint_manager import AbstractCheckpointManager  # noqa: F401
