"""Every name of `orbax.checkpoint`: what `holdfast.compat.orbax` gives when it is asked for one."""

# ruff: noqa: F401
from typing import Any

import jax.experimental.array_serialization  # programs use it, as Orbax imports it

from . import (
    _src,
    abstract_checkpoint_manager,
    args,
    arrays,
    checkpoint_manager,
    checkpoint_managers,
    checkpoint_utils,
    checkpointers,
    experimental,
    future,
    handlers,
    metadata,
    multihost,
    options,
    path,
    step,
    test_utils,
    transform_utils,
    tree,
    type_handlers,
    utils,
    v1,
    version,
)
from . import args as checkpoint_args
from . import event_names as _event_names  # listens from here on
from .args import ArrayRestoreArgs, CheckpointHandler, RestoreArgs, SaveArgs
from .checkpoint_manager import AbstractCheckpointManager, CheckpointManager
from .checkpointers import (
    AbstractCheckpointer,
    AsyncCheckpointer,
    Checkpointer,
    PyTreeCheckpointer,
    StandardCheckpointer,
)
from .future import Future
from .handling.items import PLACEHOLDER
from .handling.registry import CheckpointHandlerRegistry, DefaultCheckpointHandlerRegistry
from .handling.standard import (
    ArrayCheckpointHandler,
    CompositeCheckpointHandler,
    JaxRandomKeyCheckpointHandler,
    JsonCheckpointHandler,
    NumpyRandomKeyCheckpointHandler,
    PyTreeCheckpointHandler,
    StandardCheckpointHandler,
)
from .options import AsyncOptions, CheckpointManagerOptions
from .own_handlers import AsyncCheckpointHandler
from .refusals import OWN_HANDLER, PATHWAYS, TESTING, make_module, stand_in
from .transform_utils import RestoreTransform, Transform, apply_transformations
from .trees.flat import merge_trees
from .version import __version__

__all__ = [
    "PLACEHOLDER",
    "AbstractCheckpointManager",
    "AbstractCheckpointer",
    "ArrayCheckpointHandler",
    "ArrayRestoreArgs",
    "AsyncCheckpointHandler",
    "AsyncCheckpointer",
    "AsyncOptions",
    "CheckpointHandler",
    "CheckpointManager",
    "CheckpointManagerOptions",
    "Checkpointer",
    "CompositeCheckpointHandler",
    "JaxRandomKeyCheckpointHandler",
    "JsonCheckpointHandler",
    "NumpyRandomKeyCheckpointHandler",
    "PyTreeCheckpointHandler",
    "PyTreeCheckpointer",
    "RestoreArgs",
    "SaveArgs",
    "StandardCheckpointHandler",
    "StandardCheckpointer",
    "args",
    "checkpoint_manager",
    "checkpoint_utils",
    "checkpointers",
    "future",
    "handlers",
    "metadata",
    "options",
    "type_handlers",
    "v1",
]

_BYTES = "leave it out: how bytes lie in files is holdfast's own affair"
REFUSED = {
    "BasePyTreeCheckpointHandler": OWN_HANDLER,
    "CompositeOptions": OWN_HANDLER,
    "ProtoCheckpointHandler": "save message.SerializeToString() as a leaf",
}
REFUSED_MODULES = {
    "aggregate_handlers": _BYTES,
    "logging": "manager.statistics() of holdfast's counts",
    "msgpack_utils": "flax.serialization has both",
    "pathways": PATHWAYS,
    "serialization": _BYTES,
    "testing": TESTING,
}
globals().update({name: make_module(name, why) for name, why in REFUSED_MODULES.items()})


def __getattr__(name: str) -> Any:
    if name not in REFUSED:
        raise AttributeError(
            f"holdfast.compat.orbax has no {name!r}, and neither has orbax.checkpoint;"
            " docs/from-orbax.md lists every name"
        )
    return stand_in("orbax.checkpoint", name, REFUSED[name])
