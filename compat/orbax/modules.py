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
    future,
    handlers,
    metadata,
    options,
    type_handlers,
    v1,
)
from .handling import items, standard
from .handling import registry as registry_lib
from .refusals import make_module, stand_in
from .roots import policies, step_names, testing
from .trees import flat as trees
from .trees import nested, transforms
from .trees.shardings import construct_maximal_shardings
from .trees.shardings import fully_replicated_host_local_array_to_global_array as replicate

OWN_HANDLER = (
    "give handlers of your own by item, CheckpointManager(item_handlers={...}), or register their"
    " arguments: args.register_with_handler"
)
BYTES = "leave it out: how bytes lie in files is holdfast's own affair"
PATHS = "leave it out: steps are folders with plain numbers, found by manager.all_steps()"
METADATA = "manager.metadata(step), or holdfast.checkpoint.structure(path)"
EMERGENCY = (
    "holdfast.checkpoint.CheckpointManager(local=Local(...)) keeps copies on the hosts:"
    " docs/local-tier.md"
)
SURGERY = "holdfast.checkpoint.load(path, like, rename=...) fits a checkpoint to another tree"
TESTING = "it serves Orbax's own tests"
PRIVATE = (
    "what lies below _src is Orbax's own affair: use the name that orbax.checkpoint has for it"
)
PATHWAYS = (
    "holdfast.multihost.is_pathways_backend() says where a program runs; a save needs nothing more"
)

# Names of `orbax.checkpoint` itself.
REFUSED: Mapping[str, str] = {
    "BasePyTreeCheckpointHandler": OWN_HANDLER,
    "CompositeOptions": OWN_HANDLER,
    "ProtoCheckpointHandler": "save message.SerializeToString() as a leaf",
}
# Modules of `orbax.checkpoint`: their refused names, and why.
MODULES: Mapping[str, tuple[str, str]] = {
    "abstract_checkpoint_manager": ("", ""),
    "aggregate_handlers": ("AggregateHandler MsgpackHandler get_aggregate_handler", BYTES),
    "arrays": ("Index Shape", "jax.sharding says how an array is sharded"),
    "checkpoint_managers": ("", ""),
    "logging": (
        (
            "AbstractLogger CloudLogger CloudLoggerOptions CompositeLogger StandardLogger"
            " step_statistics"
        ),
        "manager.statistics() of holdfast's counts",
    ),
    "multihost": ("is_cloud_pathways_persistence_enabled", PATHWAYS),
    "msgpack_utils": ("msgpack_restore msgpack_serialize", "flax.serialization has both"),
    "path": ("atomicity atomicity_defaults atomicity_types deleter format_utils", PATHS),
    "pathways": ("", PATHWAYS),
    "serialization": (
        "async_deserialize async_serialize get_ts_context tensorstore_utils ts_utils",
        BYTES,
    ),
    "step": ("all_temporary_paths build_step_metadatas MetadataT", PATHS),
    "test_utils": ("", TESTING),
    "testing": ("", TESTING),
    "transform_utils": ("MultiValueFn ValueFn", "it is a name for annotations"),
    "tree": (
        ("JsonType PyTree PyTreeKey PyTreeOf PyTreePath tree_difference tree_trim"),
        "jax.tree_util and flax.traverse_util do this",
    ),
    "utils": (
        (
            "all_leaves_are_placeholders get_tmp_directory is_gcs_path is_scalar"
            " is_supported_aggregation_type leaf_is_placeholder leaf_placeholder"
            " name_from_leaf_placeholder pytree_structure register_ts_spec_for_serialization"
            " should_skip_device_sync"
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
            "CompositeResults ProtoCheckpointHandler ProtoRestoreArgs ProtoSaveArgs"
            " handler_registration"
        ),
        OWN_HANDLER,
    ),
    metadata: (
        ("MetadataStore get_step_metadata metadata_store tree value"),
        METADATA,
    ),
    checkpoint_manager: (
        (
            "CheckpointInfo ProtoCheckpointHandler METADATA_ITEM_NAME"
            " RESERVED_ITEM_NAMES deserialize_root_metadata determine_default_item_mode_from_args"
            " is_async_checkpointer serialize_root_metadata"
        ),
        METADATA,
    ),
    type_handlers: (
        (
            "TypeHandlerRegistry check_input_arguments create_type_handler_registry"
            " get_cast_tspec_deserialize get_cast_tspec_serialize get_json_tspec_read"
            " get_json_tspec_write get_ts_context is_supported_aggregation_type"
            " is_supported_empty_value merge_ocdbt_per_process_files"
        ),
        type_handlers.LEAF_TYPES,
    ),
    checkpoint_utils: (
        "STANDARD_ARRAY_TYPES get_snapshot_dir_from_step_dir restore_args_from_target",
        PATHS,
    ),
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
    registries = (
        registry_lib.CheckpointHandlerRegistry,
        registry_lib.DefaultCheckpointHandlerRegistry,
    )
    face.update({each.__name__: each for each in registries})
    vars(handlers).update(
        {each.__name__: each for each in registries},
        create_default_handler_registry=registry_lib.create_default_handler_registry,
    )
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
        registry_lib.CheckpointHandlerRegistry,
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
    face["Future"] = future.Future
    emergency = make_module("experimental.emergency", reason=EMERGENCY)
    surgery = make_module("experimental.model_surgery", reason=SURGERY)
    tiering = make_module("experimental.tiering_service", reason=EMERGENCY)
    face["experimental"] = make_module(
        "experimental",
        v1=v1,
        emergency=emergency,
        model_surgery=surgery,
        tiering_service=tiering,
    )
    face["version"] = make_module("version", __version__=face["__version__"])
    face["_src"] = _private(face)
    vars(v1)["_src"] = make_module("experimental.v1._src", reason=PRIVATE)


def _private(face: Mapping[str, Any]) -> Any:
    """Returns `_src`, out of which programs import: what is public too, and stand-ins."""

    def below(name: str, **names: Any) -> Any:
        return make_module(f"_src.{name}", reason=PRIVATE, **names)

    sharding = below("arrays.sharding", construct_maximal_shardings=construct_maximal_shardings)
    return make_module(
        "_src",
        reason=PRIVATE,
        arrays=below("arrays", sharding=sharding),
        checkpoint_managers=below(
            "checkpoint_managers",
            policy_checkpoint_info=policies,
            preservation_policy=policies,
            save_decision_policy=policies,
        ),
        multihost=below(
            "multihost", multihost=face["multihost"], multislice=face["multihost"].multislice
        ),
        path=below("path", step=step_names),
    )


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
    nested_trees = _public(nested)
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
    if module == "utils":
        durations = {
            "TMP_DIR_SUFFIX": step_names.TMP_DIR_SUFFIX,
            "record_saved_duration": checkpoint_utils.record_saved_duration,
            "sync_global_devices": multihost.sync_global_processes,
            "fully_replicated_host_local_array_to_global_array": replicate,
        }
        processes = (
            "broadcast_one_to_all",
            "is_pathways_backend",
            "is_primary_host",
            "reached_preemption",
            "sync_global_processes",
        )
        shared = {name: getattr(multihost, name) for name in processes}
        return struct | steps | durations | flat | shared | _steps() | nested_trees
    if module == "tree":
        return struct | flat | nested_trees | {"merge_trees": nested.merge_trees}
    if module == "transform_utils":
        return _transforms() | {"RestoreArgs": args.RestoreArgs}
    if module == "multihost":
        slices: dict[str, Any] = {name: getattr(multihost, name) for name in multihost.__all__}
        return slices | {"multislice": make_module("multihost.multislice", **slices)}
    if module == "abstract_checkpoint_manager":
        return abstract
    if module == "arrays":
        return struct | {"construct_maximal_shardings": construct_maximal_shardings}
    if module == "step":
        return steps | _public(step_names)
    if module == "path":
        return {"step": step_names}
    if module == "test_utils":
        return _public(testing)
    return {}


def _public(module: Any) -> dict[str, Any]:
    """Returns the names that a module of this package defines for users."""
    return {name: getattr(module, name) for name in module.__all__}


def _steps() -> dict[str, Any]:
    """Returns what `utils` has of the names of steps."""
    names = (
        "checkpoint_steps_paths",
        "get_save_directory",
        "is_checkpoint_finalized",
        "is_tmp_checkpoint",
        "step_from_checkpoint_name",
        "tmp_checkpoints",
    )
    return {name: getattr(step_names, name) for name in names}


def _transforms() -> dict[str, Any]:
    """Returns what turns one tree into another."""
    return {
        "RestoreTransform": transforms.RestoreTransform,
        "Transform": transforms.Transform,
        "apply_transformations": transforms.apply_transformations,
        "intersect_trees": trees.intersect_trees,
        "merge_trees": trees.merge_trees,
    }
