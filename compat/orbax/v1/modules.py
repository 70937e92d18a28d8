"""The modules of v1 that are not files here, and the names that are refused."""

from __future__ import annotations

import holdfast.compat.orbax.roots.policies as policies
import holdfast.compat.orbax.roots.step_names as step_names

from ..metadata import to_shape_dtype_struct
from ..refusals import make_module
from ..trees.nested import merge_trees
from . import registry, training
from .checkpointables import (
    CheckpointableHandler,
    PathAwaitingCreation,
    StatefulCheckpointable,
    register_handler,
)
from .checkpoints import InvalidLayoutError
from .results import RootMetadata, StepMetadata

OWN_FILES = "register a handler for all checkpoints: handlers.register_handler(cls)"
TYPES = "it is a name for annotations: numpy's and jax's types stand for it"

arrays = make_module(
    "v1.arrays",
    refused="AbstractArray AbstractScalar AbstractShardedArray ArrayLike DType Scalar Shape",
    reason=TYPES,
    to_shape_dtype_struct=to_shape_dtype_struct,
)
errors = make_module(
    "v1.errors",
    refused="DeletionInProgressError DeletionRecoveryError",
    reason="a deletion here is done when it returns",
    InvalidLayoutError=InvalidLayoutError,
)
handlers = make_module(
    "v1.handlers",
    refused="ProtoHandler orbax",
    reason=OWN_FILES,
    AbstractCheckpointable=object,
    Checkpointable=object,
    CheckpointableHandler=CheckpointableHandler,
    StatefulCheckpointable=StatefulCheckpointable,
    CheckpointableHandlerRegistry=registry.CheckpointableHandlerRegistry,
    JsonHandler=registry.JsonHandler,
    PyTreeHandler=registry.PyTreeHandler,
    global_registry=registry.global_registry,
    local_registry=registry.local_registry,
    register_handler=register_handler,
)
path = make_module(
    "v1.path",
    refused="Path PathLike",
    reason="pathlib.Path, str and URLs are paths",
    step=make_module(
        "v1.path.step",
        NameFormat=step_names.NameFormat,
        composite_name_format=step_names.composite_name_format,
        standard_name_format=step_names.standard_name_format,
    ),
    PathAwaitingCreation=PathAwaitingCreation,
)
tree = make_module(
    "v1.tree",
    refused="AbstractLeaf JsonType Leaf PyTree PyTreeKey PyTreeKeyPath PyTreeOf",
    reason="these are names for annotations; jax.tree_util works on trees",
    merge=merge_trees,
)


def _add_names() -> None:
    by_step = make_module(
        "v1.training.errors",
        StepAlreadyExistsError=training.StepAlreadyExistsError,
        StepNotFoundError=training.StepNotFoundError,
    )
    pathways = make_module(
        "v1.training.pathways",
        refused="Snapshotter",
        reason="keep snapshots with holdfast.checkpoint",
    )
    vars(training).update(
        errors=by_step,
        pathways=pathways,
        save_decision_policies=policies,
        preservation_policies=policies,
        CheckpointMetadata=StepMetadata,
        RootMetadata=RootMetadata,
    )


_add_names()
