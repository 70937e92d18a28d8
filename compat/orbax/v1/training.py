"""`orbax.checkpoint.v1.training`: many steps of one root."""

# ruff: noqa: F401
from ..refusals import make_module
from ..roots import policies as preservation_policies
from ..roots import policies as save_decision_policies
from . import errors
from .checkpointer import Checkpointer
from .results import RootMetadata
from .results import StepMetadata as CheckpointMetadata

pathways = make_module("v1.training.pathways", "keep snapshots with holdfast.checkpoint")
