"""`orbax.checkpoint.metadata`: what is known of a checkpoint without reading it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from holdfast.checkpoint import Structure

from .refusals import METADATA, refuse, refusing
from .trees.shardings import NamedShardingMetadata as NamedShardingMetadata
from .trees.shardings import ShardingMetadata as ShardingMetadata
from .trees.shardings import SingleDeviceShardingMetadata as SingleDeviceShardingMetadata
from .trees.shardings import describe_sharding, sharding_of


@dataclass(frozen=True)
class Metadata:
    """What is known of a leaf; `name` is its path."""

    name: str
    directory: Any


@dataclass(frozen=True)
class StorageMetadata:
    """How an array lies in a checkpoint: in chunks of its shards' shape."""

    chunk_shape: tuple[int, ...] | None
    write_shape: tuple[int, ...] | None = None
    zarr_metadata: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class ArrayMetadata(Metadata):
    """An array. Serves as a target.

    `sharding` is a ShardingMetadata, None where the saved one does not fit this job's devices.
    """

    shape: tuple[int, ...]
    sharding: Any
    dtype: Any
    storage: Any = None


@dataclass(frozen=True)
class ScalarMetadata(Metadata):
    """A Python number, of the numpy dtype that it would have."""

    shape: tuple[int, ...] = ()
    sharding: Any = None
    dtype: Any = None
    storage: Any = None


@dataclass(frozen=True)
class StringMetadata(Metadata):
    """A text."""


@dataclass
class StepMetadata:
    """What is known of a step. Times are Unix nanoseconds."""

    item_handlers: Any = None
    item_metadata: Any = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    performance_metrics: Any = None
    init_timestamp_nsecs: int | None = None
    commit_timestamp_nsecs: int | None = None
    custom_metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class RootMetadata:
    """What was given for a root: `CheckpointManager(metadata=...)`, of holdfast's or Orbax's."""

    internal_metadata: Mapping[str, Any] = field(default_factory=dict)
    custom_metadata: Mapping[str, Any] = field(default_factory=dict)


class TreeMetadata(Mapping[Any, Any]):
    """The metadata of a tree item: a pytree and a mapping of its `tree`."""

    def __init__(self, tree: Any, custom_metadata: Any = None) -> None:
        self.tree = tree
        self.custom_metadata = custom_metadata

    def __getitem__(self, key: Any) -> Any:
        return self.tree[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tree)

    def __len__(self) -> int:
        return len(self.tree)

    def __repr__(self) -> str:
        return f"TreeMetadata({self.tree!r})"


def _children(node: TreeMetadata) -> tuple[Any, Any]:
    # Those of the tree itself: a leaf has the path that it has there.
    children, treedef = jax.tree_util.tree_flatten_with_path(
        node.tree, is_leaf=lambda child: child is not node.tree
    )
    one_leaf = jax.tree_util.FlattenedIndexKey(0)
    keyed = [(path[0] if path else one_leaf, child) for path, child in children]
    return keyed, (treedef, node.custom_metadata)


jax.tree_util.register_pytree_with_keys(
    TreeMetadata,
    _children,
    lambda about, children: TreeMetadata(about[0].unflatten(children), about[1]),
)


def leaf_metadata(name: str, leaf: Any, directory: Any) -> Any:
    """Returns the metadata of a leaf of a structure."""
    if isinstance(leaf, str | bytes):
        return StringMetadata(name, directory)
    if isinstance(leaf, bool | int | float | complex):
        return ScalarMetadata(name, directory, dtype=np.asarray(leaf).dtype)
    storage = StorageMetadata(chunk_shape=shard_shape_of(leaf))
    return ArrayMetadata(
        name,
        directory,
        leaf.shape,
        describe_sharding(leaf.sharding),
        dtype=leaf.dtype,
        storage=storage,
    )


def shard_shape_of(leaf: Any) -> Any:
    """Returns the shape of the shards of an array of a structure."""
    return leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)


def to_shape_dtype_struct(
    arr: Any, dtype: Any = None, scalar_dtype: Any = None, support_format: bool = False
) -> Any:
    """Returns an array, or the metadata of a leaf, as jax.ShapeDtypeStruct; a number as it is."""
    refuse("to_shape_dtype_struct", "pass shardings", support_format=support_format)
    if isinstance(arr, StringMetadata):
        return ""
    if not hasattr(arr, "shape"):
        return arr if scalar_dtype is None else scalar_dtype(arr)
    sharding = sharding_of(getattr(arr, "sharding", None))  # numpy's arrays have none
    dtype = dtype or arr.dtype
    return jax.ShapeDtypeStruct(arr.shape, dtype, sharding=sharding)  # type: ignore[no-untyped-call]


def nanoseconds(time_s: float | None) -> int | None:
    """Returns a time as Orbax counts it."""
    return None if time_s is None else int(time_s * 1e9)


# Where the metadata of single items is kept in that of their step.
ITEMS = "orbax_item_metadata"
LEFT_OUT = "orbax_items_left_out"


def with_item_metadata(metadata: Any, args: Mapping[str, Any]) -> Any:
    """Returns a step's metadata to save, with that of the items whose arguments have some, and with
    the items that have None for their arguments.
    """
    own = {name: getattr(each, "custom_metadata", None) for name, each in args.items()}
    given = {name: about for name, about in own.items() if about is not None}
    left_out = sorted(name for name, each in args.items() if each is None)
    ours: dict[str, Any] = {ITEMS: given} if given else {}
    if left_out:
        ours |= {LEFT_OUT: left_out}
    return with_text_keys({**(metadata or {}), **ours} if ours else metadata)


def with_text_keys(value: Any) -> Any:
    """Returns a value as JSON, whose keys are text; what is no JSON as it is."""
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        return json.loads(json.dumps(value, default=np.generic.item))
    return value


def custom_metadata_of(saved: Structure) -> dict[str, Any]:
    """Returns the metadata that was given for a step."""
    own = (ITEMS, LEFT_OUT)
    return {name: about for name, about in (saved.metadata or {}).items() if name not in own}


def left_out_of(saved: Structure) -> list[str]:
    """Returns the items that were left out of a step by None: it restores them as that."""
    return list((saved.metadata or {}).get(LEFT_OUT, []))


def item_metadata_of(saved: Structure, item: str) -> Any:
    """Returns the metadata that was given for an item, None where there was none."""
    return (saved.metadata or {}).get(ITEMS, {}).get(item)


def step_metadata(saved: Structure, item_metadata: Any) -> StepMetadata:
    """Returns the metadata of a step in Orbax's words."""
    return StepMetadata(
        item_handlers={name: item.kind for name, item in saved.items.items()},
        item_metadata=item_metadata,
        metrics=dict(saved.metrics),
        init_timestamp_nsecs=nanoseconds(saved.started_s),
        commit_timestamp_nsecs=nanoseconds(saved.finished_s),
        custom_metadata=custom_metadata_of(saved),
    )


REFUSED = "MetadataStore get_step_metadata metadata_store tree value"
__getattr__ = refusing(__name__, METADATA, REFUSED)
