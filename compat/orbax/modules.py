"""The modules of Orbax's that are not files here, and the names that are refused, with reasons."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from holdfast import multihost

from . import (
    args,
    checkpoint_manager,
    checkpoint_utils,
    checkpointers,
    handlers,
    items,
    metadata,
    options,
    policies,
    v1,
)
from .handling import standard
from .refusals import make_module, stand_in
from .trees import flat as trees
from .trees import transforms

OWN_HANDLER = (
    "give handlers of your own by item, CheckpointManager(item_handlers={...}), or register their"
    " arguments: args.register_with_handler"
)
BYTES = "leave it out: how bytes lie in files is holdfast's own affair"
PATHS = "leave it out: steps are folders with plain numbers, found by manager.all_steps()"
METADATA = "manager.metadata(step), or holdfast.checkpoint.structure(path)"
FUTURES = (
    "save returns when the arrays may be reused; manager.wait_until_finished() waits for the commit"
)
TESTING = "it serves Orbax's own tests"
PATHWAYS = (
    "holdfast.multihost.is_pathways_backend() says where a program runs; a save needs nothing more"
)

# Names of `orbax.checkpoint` itself.
REFUSED: Mapping[str, str] = {
    "BasePyTreeCheckpointHandler": OWN_HANDLER,
    "CheckpointHandlerRegistry": OWN_HANDLER,
    "CompositeOptions": OWN_HANDLER,
    "DefaultCheckpointHandlerRegistry": OWN_HANDLER,
    "Future": FUTURES,
    "ProtoCheckpointHandler": "save message.SerializeToString() as a leaf",
}
# Modules of `orbax.checkpoint`: their refused names, and why.
MODULES: Mapping[str, tuple[str, str]] = {
    "abstract_checkpoint_manager": ("", ""),
    "aggregate_handlers": ("AggregateHandler MsgpackHandler get_aggregate_handler", BYTES),
    "arrays": (
        "Index Shape construct_maximal_shardings",
        "jax.sharding says how an array is sharded",
    ),
    "checkpoint_managers": ("", ""),
    "future": ("ChainedFuture CommitFutureAwaitingContractedSignals Future NoopFuture", FUTURES),
    "logging": (
        "AbstractLogger CompositeLogger StandardLogger step_statistics",
        "manager.statistics() of holdfast's counts",
    ),
    "multihost": ("is_cloud_pathways_persistence_enabled", PATHWAYS),
    "msgpack_utils": ("msgpack_restore msgpack_serialize", "flax.serialization has both"),
    "path": ("atomicity atomicity_defaults atomicity_types deleter format_utils step", PATHS),
    "pathways": ("", PATHWAYS),
    "serialization": (
        "async_deserialize async_serialize get_ts_context tensorstore_utils ts_utils",
        BYTES,
    ),
    "step": (
        (
            "ALLOWED_STEP_NAME_PATTERN TMP_DIR_STEP_PATTERN NameFormat Metadata"
            " MetadataT all_temporary_paths build_step_metadatas build_step_path"
            " composite_name_format find_step_path get_save_directory is_path_finalized"
            " is_path_temporary is_standard_name_format is_tmp_checkpoint latest_step_metadata"
            " maybe_find_step_metadata single_host_load_and_broadcast_name_format"
            " standard_name_format step_metadata_of_checkpoint_path step_prefix_with_underscore"
            " checkpoint_steps_paths is_checkpoint_finalized step_from_checkpoint_name"
            " tmp_checkpoints"
        ),
        PATHS,
    ),
    "test_utils": ("", TESTING),
    "transform_utils": ("MultiValueFn ValueFn", "it is a name for annotations"),
    "tree": (
        (
            "JsonType PyTree PyTreeKey PyTreeOf PyTreePath deserialize_tree serialize_tree"
            " tree_difference tree_trim"
        ),
        "jax.tree_util and flax.traverse_util do this",
    ),
    "type_handlers": (
        (
            "ArrayHandler NumpyHandler ParamInfo ScalarHandler SingleReplicaArrayHandler"
            " SingleReplicaArrayRestoreArgs StringHandler TypeHandler TypeHandlerRegistry"
            " check_input_arguments create_type_handler_registry get_cast_tspec_deserialize"
            " get_cast_tspec_serialize get_json_tspec_read get_json_tspec_write get_ts_context"
            " get_type_handler has_type_handler is_ocdbt_checkpoint is_supported_empty_value"
            " is_supported_type merge_ocdbt_per_process_files"
            " register_standard_handlers_with_options register_type_handler supported_types"
        ),
        "leaves are arrays, numbers and texts; turn other values into them before saving",
    ),
    "utils": (
        (
            "all_leaves_are_placeholders checkpoint_steps_paths deserialize_tree"
            " from_flattened_with_keypath fully_replicated_host_local_array_to_global_array"
            " get_save_directory is_checkpoint_finalized is_gcs_path is_scalar is_tmp_checkpoint"
            " leaf_is_placeholder leaf_placeholder name_from_leaf_placeholder pytree_structure"
            " serialize_tree step_from_checkpoint_name tmp_checkpoints"
        ),
        "use holdfast's manager for steps, and jax.tree_util for trees",
    ),
}
# Names in modules that are files here.
REFUSED_IN: Mapping[Any, tuple[str, str]] = {
    args: (
        "ProtoRestore ProtoSave",
        OWN_HANDLER,
    ),
    handlers: (
        (
            "CheckpointHandlerRegistry CompositeResults DefaultCheckpointHandlerRegistry"
            " ProtoCheckpointHandler ProtoRestoreArgs ProtoSaveArgs create_default_handler_registry"
            " handler_registration"
        ),
        OWN_HANDLER,
    ),
    metadata: (
        (
            "MetadataStore NamedShardingMetadata ShardingMetadata SingleDeviceShardingMetadata"
            " StorageMetadata get_step_metadata metadata_store tree value"
        ),
        METADATA,
    ),
    checkpoint_manager: (
        (
            "CheckpointHandlerRegistry CheckpointInfo ProtoCheckpointHandler METADATA_ITEM_NAME"
            " RESERVED_ITEM_NAMES deserialize_root_metadata determine_default_item_mode_from_args"
            " is_async_checkpointer serialize_root_metadata"
        ),
        METADATA,
    ),
    checkpoint_utils: ("STANDARD_ARRAY_TYPES get_snapshot_dir_from_step_dir", PATHS),
}


def add_modules(package: str) -> None:
    """Adds to the face what has no file: modules, other modules' names, and stand-ins."""
    face = vars(sys.modules[package])
    for module, (names, reason) in REFUSED_IN.items():
        of = f"orbax.checkpoint.{module.__name__.rpartition('.')[2]}"
        vars(module).update({name: stand_in(of, name, reason) for name in names.split()})
    vars(handlers).update(_handler_args())
    of_orbax = {name for name in vars(standard) if name.endswith("CheckpointHandler")}
    vars(handlers).update({name: vars(standard)[name] for name in of_orbax})
    vars(checkpoint_utils)["PLACEHOLDER"] = items.PLACEHOLDER
    offered: tuple[type, ...] = (
        options.FileOptions,
        options.MultiprocessingOptions,
        standard.CompositeCheckpointHandler,
        standard.JsonCheckpointHandler,
        handlers.CheckpointHandler,
        checkpointers.AbstractCheckpointer,
        checkpointers.AsyncCheckpointer,
        checkpointers.Checkpointer,
        args.CheckpointArgs,
    )
    vars(checkpoint_manager).update(
        {each.__name__: each for each in offered}, DEFAULT_ITEM_NAME=items.DEFAULT_ITEM
    )
    face.update(
        {name: stand_in("orbax.checkpoint", name, reason) for name, reason in REFUSED.items()}
    )
    face.update(_transforms())
    del face["intersect_trees"]  # Orbax has it in its module alone
    for name, (names, reason) in MODULES.items():
        face[name] = make_module(name, refused=names, reason=reason, **_covered(name))
    face["checkpoint_args"] = args
    registry = (
        "register_with_handler",
        "get_registered_args_cls",
        "get_registered_handler_cls",
        "has_registered_args",
    )
    vars(args).update(
        {name: getattr(handlers, name) for name in registry},
        CheckpointHandler=handlers.CheckpointHandler,
    )
    face["experimental"] = make_module("experimental", v1=v1)


def _handler_args() -> dict[str, Any]:
    """Returns the arguments under the names that `handlers` has for them."""
    kinds = ("Array", "JaxRandomKey", "Json", "NumpyRandomKey", "PyTree", "Standard")
    names = [f"{kind}{verb}" for kind in kinds for verb in ("Save", "Restore")]
    return {f"{name}Args": getattr(args, name) for name in names} | {
        "ArrayRestoreArgs": args.ArrayRestore,
        "CompositeArgs": args.Composite,
    }


def _covered(module: str) -> dict[str, Any]:
    """Returns what a module without a file of its own has to offer."""
    struct = {"to_shape_dtype_struct": metadata.to_shape_dtype_struct}
    flat = {name: getattr(trees, name) for name in trees.__all__}
    abstract = {"AbstractCheckpointManager": checkpoint_manager.AbstractCheckpointManager}
    steps = {
        "checkpoint_steps": checkpoint_utils.checkpoint_steps,
        "any_checkpoint_step": checkpoint_utils.any_checkpoint_step,
    }
    if module == "checkpoint_managers":
        names = {
            name: value
            for name, value in vars(policies).items()
            if isinstance(value, type) and value.__module__ == policies.__name__
        }
        managers = {
            "CheckpointManager": checkpoint_manager.CheckpointManager,
            "CheckpointManagerOptions": options.CheckpointManagerOptions,
            "preservation_policy": policies,
            "save_decision_policy": policies,
        }
        return names | managers | abstract
    if module == "type_handlers":
        return {
            "SaveArgs": args.SaveArgs,
            "RestoreArgs": args.RestoreArgs,
            "ArrayRestoreArgs": args.ArrayRestoreArgs,
        }
    if module == "utils":
        durations = {
            "TMP_DIR_SUFFIX": checkpoint_utils.TMP_DIR_SUFFIX,
            "record_saved_duration": checkpoint_utils.record_saved_duration,
            "sync_global_devices": multihost.sync_global_processes,
        }
        processes = (
            "broadcast_one_to_all",
            "is_pathways_backend",
            "is_primary_host",
            "reached_preemption",
            "sync_global_processes",
        )
        shared = {name: getattr(multihost, name) for name in processes}
        return struct | steps | durations | flat | shared
    if module == "tree":
        return struct | flat
    if module == "transform_utils":
        return _transforms() | {"RestoreArgs": args.RestoreArgs}
    if module == "multihost":
        return {name: getattr(multihost, name) for name in multihost.__all__}
    if module == "abstract_checkpoint_manager":
        return abstract
    if module == "arrays":
        return struct
    if module == "step":
        return steps | {"TMP_DIR_SUFFIX": checkpoint_utils.TMP_DIR_SUFFIX}
    return {}


def _transforms() -> dict[str, Any]:
    """Returns what turns one tree into another."""
    return {
        "RestoreTransform": transforms.RestoreTransform,
        "Transform": transforms.Transform,
        "apply_transformations": transforms.apply_transformations,
        "intersect_trees": trees.intersect_trees,
        "merge_trees": trees.merge_trees,
    }
