"""`orbax.checkpoint.v1.handlers`: handlers of one's own, and their registries."""

# ruff: noqa: F401
from ..refusals import refusing
from .checkpointables import CheckpointableHandler, StatefulCheckpointable, register_handler
from .registry import (
    CheckpointableHandlerRegistry,
    JsonHandler,
    PyTreeHandler,
    global_registry,
    local_registry,
)

Checkpointable = AbstractCheckpointable = object

REFUSED = "ProtoHandler orbax"
__getattr__ = refusing(
    __name__, "register a handler for all checkpoints: handlers.register_handler(cls)", REFUSED
)
