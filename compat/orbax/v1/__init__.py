"""`from holdfast.compat.orbax import v1 as ocp` stands where `orbax.checkpoint.v1` stood."""

from ..refusals import PRIVATE, make_module
from . import arrays, errors, handlers, multihost, options, partial, path, training, tree
from .checkpointables import CheckpointableHandler, StatefulCheckpointable
from .checkpoints import (
    PLACEHOLDER,
    checkpointables_metadata,
    delete,
    delete_async,
    is_orbax_checkpoint,
    load,
    load_async,
    load_checkpointables,
    load_checkpointables_async,
    metadata,
    save,
    save_async,
    save_checkpointables,
    save_checkpointables_async,
)
from .options import Context
from .results import AsyncResponse, CheckpointMetadata

save_pytree = save
save_pytree_async = save_async
load_pytree = load
load_pytree_async = load_async
pytree_metadata = metadata
Checkpointable = AbstractCheckpointable = PyTreeMetadata = object
_src = make_module("experimental.v1._src", PRIVATE)

__all__ = [
    "PLACEHOLDER",
    "AbstractCheckpointable",
    "AsyncResponse",
    "CheckpointMetadata",
    "Checkpointable",
    "CheckpointableHandler",
    "Context",
    "PyTreeMetadata",
    "StatefulCheckpointable",
    "arrays",
    "checkpointables_metadata",
    "delete",
    "delete_async",
    "errors",
    "handlers",
    "is_orbax_checkpoint",
    "load",
    "load_async",
    "load_checkpointables",
    "load_checkpointables_async",
    "load_pytree",
    "load_pytree_async",
    "metadata",
    "multihost",
    "options",
    "partial",
    "path",
    "pytree_metadata",
    "save",
    "save_async",
    "save_checkpointables",
    "save_checkpointables_async",
    "save_pytree",
    "save_pytree_async",
    "training",
    "tree",
]
