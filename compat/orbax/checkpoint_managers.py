"""`orbax.checkpoint.checkpoint_managers`: the manager, and policies of saving and keeping."""

# ruff: noqa: F401, F403
from .checkpoint_manager import AbstractCheckpointManager, CheckpointManager
from .options import CheckpointManagerOptions
from .roots import policies as preservation_policy
from .roots import policies as save_decision_policy
from .roots.policies import *
