"""`orbax.checkpoint.experimental`."""

from . import v1  # noqa: F401
from .refusals import make_module

_LOCAL = (
    "holdfast.checkpoint.CheckpointManager(local=Local(...)) keeps copies on the hosts:"
    " docs/local-tier.md"
)
emergency = make_module("experimental.emergency", _LOCAL)
tiering_service = make_module("experimental.tiering_service", _LOCAL)
model_surgery = make_module(
    "experimental.model_surgery",
    "holdfast.checkpoint.load(path, like, rename=...) fits a checkpoint to another tree",
)
