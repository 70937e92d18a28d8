"""Every name of `orbax.checkpoint`: what `holdfast.compat.orbax` gives when it is asked for one."""

import jax.experimental.array_serialization  # noqa: F401 (programs use it, as Orbax imports it)

from . import (
    args,
    checkpoint_manager,
    checkpoint_utils,
    checkpointers,
    future,
    handlers,
    metadata,
    modules,
    options,
    type_handlers,
    v1,
)
from .args import ArrayRestoreArgs, RestoreArgs, SaveArgs
from .checkpoint_manager import AbstractCheckpointManager, CheckpointManager
from .checkpointers import (
    AbstractCheckpointer,
    AsyncCheckpointer,
    Checkpointer,
    PyTreeCheckpointer,
    StandardCheckpointer,
)
from .handlers import AsyncCheckpointHandler, CheckpointHandler
from .handling.items import PLACEHOLDER
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

# Of the Orbax whose names these are: programs compare it.
__version__ = "0.12.0"

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

modules.add_modules(__name__)
