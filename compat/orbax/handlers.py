"""`orbax.checkpoint.handlers`: Orbax's own handlers, and what handlers of one's own are made of."""

# ruff: noqa: F401
from . import args
from .args import (
    CheckpointHandler,
    get_registered_args_cls,
    get_registered_handler_cls,
    has_registered_args,
    register_with_handler,
)
from .handling.registry import (
    CheckpointHandlerRegistry,
    DefaultCheckpointHandlerRegistry,
    create_default_handler_registry,
)
from .handling.standard import (
    ArrayCheckpointHandler,
    CompositeCheckpointHandler,
    JaxRandomKeyCheckpointHandler,
    JsonCheckpointHandler,
    NumpyRandomKeyCheckpointHandler,
    PyTreeCheckpointHandler,
    StandardCheckpointHandler,
)
from .own_handlers import AsyncCheckpointHandler
from .refusals import OWN_HANDLER, refusing

ArraySaveArgs = args.ArraySave
ArrayRestoreArgs = args.ArrayRestore
CompositeArgs = args.Composite
JaxRandomKeySaveArgs = args.JaxRandomKeySave
JaxRandomKeyRestoreArgs = args.JaxRandomKeyRestore
JsonSaveArgs = args.JsonSave
JsonRestoreArgs = args.JsonRestore
NumpyRandomKeySaveArgs = args.NumpyRandomKeySave
NumpyRandomKeyRestoreArgs = args.NumpyRandomKeyRestore
PyTreeSaveArgs = args.PyTreeSave
PyTreeRestoreArgs = args.PyTreeRestore
StandardSaveArgs = args.StandardSave
StandardRestoreArgs = args.StandardRestore

REFUSED = (
    "CompositeResults ProtoCheckpointHandler ProtoRestoreArgs ProtoSaveArgs handler_registration"
)
__getattr__ = refusing(__name__, OWN_HANDLER, REFUSED)
