"""`orbax.checkpoint.type_handlers`: the kinds of leaves, and who saves them.

Orbax's own handlers may be made and registered: their leaves are saved here in any case. Another
handler writes files of its own for each leaf, which has no counterpart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np

from .args import ArrayRestoreArgs
from .args import RestoreArgs as RestoreArgs
from .args import SaveArgs as SaveArgs
from .own_handlers import to_path
from .refusals import check_options, not_covered, refusing

LEAF_TYPES = (
    "holdfast.checkpoint.register_leaf_type saves a type of your own by arrays, numbers and texts"
)


class TypeHandler:
    """The base of handlers of leaves."""


class _Standard(TypeHandler):
    """A handler of Orbax's own. How bytes lie in files is of no effect."""

    options: ClassVar[str] = "metadata_key ocdbt_process_id"

    def __init__(self, *args: Any, **options: Any) -> None:
        check_options(type(self).__name__, options, self.options)
        for name, value in options.items():
            setattr(self, name, value)


class ArrayHandler(_Standard):
    """jax.Array."""

    options = (
        "metadata_key primary_host replica_id use_replica_parallel"
        " min_slice_bytes_for_replica_parallel max_replicas_for_replica_parallel"
        " enable_write_sharding_file array_metadata_store enable_replica_parallel_separate_folder"
        " dispatcher callback"
    )


class SingleReplicaArrayHandler(ArrayHandler):
    """jax.Array. What is replicated is read once by each host, and not broadcast."""

    options = (
        f"{ArrayHandler.options} replica_axis_index primary_replica_id broadcast_memory_limit_bytes"
        " broadcast_memory_scaling_factor"
    )


class NumpyHandler(_Standard):
    """np.ndarray."""

    options = f"{_Standard.options} deepcopy_host_arrays"


class ScalarHandler(_Standard):
    """Python's numbers, and numpy's."""


class StringHandler(_Standard):
    """Texts."""

    options = "filename"


@dataclass(kw_only=True)
class ParamInfo:
    """What is known of a leaf in a folder: what handlers of leaves are given by Orbax.

    Nothing here makes or reads one; how bytes lie in files is of no effect.
    """

    name: str
    parent_dir: Any
    path: Any = None
    keypath: Any = None
    skip_deserialize: bool | None = None
    byte_limiter: Any = None
    device_host_byte_limiter: Any = None
    is_ocdbt_checkpoint: bool | None = None
    use_compression: bool | None = True
    use_zarr3: bool | None = False
    ocdbt_target_data_file_size: int | None = None
    ts_context: Any = None
    value_typestr: str | None = None
    enable_pinned_host_transfer: bool = False
    raise_array_data_missing_error: bool = True
    write_shape: Any = None
    is_prioritized_key_fn: Any = None

    def __post_init__(self) -> None:
        self.path = self.parent_dir / self.name if self.path is None else self.path


@dataclass
class SingleReplicaArrayRestoreArgs(ArrayRestoreArgs):
    """Restores a jax.Array with a sharding; `single_replica_sharding` has no effect."""

    single_replica_sharding: Any = None


_SAVED = {
    int: ScalarHandler,
    float: ScalarHandler,
    bytes: ScalarHandler,
    np.number: ScalarHandler,
    np.ndarray: NumpyHandler,
    jax.Array: ArrayHandler,
    str: StringHandler,
}


_ORBAX = frozenset({*_SAVED.values(), SingleReplicaArrayHandler})


def register_type_handler(
    ty: Any, handler: Any, func: Callable[[Any], bool] | None = None, override: bool = False
) -> None:
    """Takes one of Orbax's own handlers for a type that is saved in any case, to no effect.

    Raises ValueError without `override`, as Orbax does; NotImplementedError for another handler, a
    subclass of one of Orbax's too, whose methods would never be called.
    """
    if type(handler) not in _ORBAX or not has_type_handler(ty):
        raise not_covered(f"type_handlers.register_type_handler({ty!r})", LEAF_TYPES)
    if not override:
        raise ValueError(f'A type handler for "{ty}" is already registered.')


def get_type_handler(ty: Any) -> TypeHandler:
    """Returns a handler of a type. Raises ValueError where leaves of it are not saved."""
    for known, handler in _SAVED.items():
        if isinstance(ty, type) and issubclass(ty, known):
            return handler()
    raise ValueError(f"leaves of {ty} are not saved; register a handler for them")


def has_type_handler(ty: Any) -> bool:
    """Says whether leaves of a type are saved."""
    return isinstance(ty, type) and issubclass(ty, tuple(_SAVED))


def supported_types() -> list[Any]:
    """Returns the types of leaves, that of PLACEHOLDER among them."""
    return [*_SAVED, type(...)]


def is_supported_type(value: Any, pytree_metadata_options: Any = None) -> bool:
    """Says whether a value is a leaf."""
    return isinstance(value, tuple(_SAVED))


def is_ocdbt_checkpoint(path: Any) -> bool:
    """Says whether a folder holds an item of Orbax's in the files of OCDBT."""
    return bool((to_path(path) / "manifest.ocdbt").exists())


def register_standard_handlers_with_options(**options: Any) -> None:
    """Does nothing: how bytes lie in files is holdfast's own affair."""


REFUSED = (
    "TypeHandlerRegistry check_input_arguments create_type_handler_registry"
    " get_cast_tspec_deserialize get_cast_tspec_serialize get_json_tspec_read get_json_tspec_write"
    " get_ts_context is_supported_aggregation_type is_supported_empty_value"
    " merge_ocdbt_per_process_files"
)
__getattr__ = refusing(__name__, LEAF_TYPES, REFUSED)
