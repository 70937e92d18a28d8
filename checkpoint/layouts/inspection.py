"""Structures: what a checkpoint of any layout holds, from its metadata alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
from jax.sharding import NamedSharding

from ..arrays.sharding import spec_of_axes
from ..errors import CheckpointError, Corrupt, TreeMismatch
from ..format.record import ItemRecord, LeafRecord
from ..format.tree import paused_gc, rebuild
from ..notebook import html_table, shown_bytes
from ..restoring.match import HostShapeDtypeStruct, saved_sharding
from ..restoring.per_process import PerProcessSelection, leaves_of_process
from .base import CheckpointReader

_MOST_ROWS = 100  # of a table in a notebook


@dataclass(frozen=True, repr=False)
class ItemStructure:
    """One item. `kind` is "tree", "json" or "files".

    `tree`, of a tree item, is what `like` accepts; `nbytes` is the size of its arrays. The tree's
    leaves are `jax.ShapeDtypeStruct`s, with the saved shardings where they can be made on this
    job's devices, and Python values, which the record itself holds. What was saved as numpy comes
    back as numpy, though its leaf is a ShapeDtypeStruct too. `error` says what is damaged, where a
    tree cannot be described: it has no `tree` then.
    """

    kind: str
    tree: Any = None
    nbytes: int = 0
    error: CheckpointError | None = None

    def __repr__(self) -> str:
        return f"<ItemStructure: {self._what()}>"

    def _repr_html_(self) -> str:
        rows: dict[str, object] = {"kind": self.kind}
        if self.error is not None:
            rows["damage"] = self.error
        elif self.kind == "tree":
            leaves = jax.tree_util.tree_leaves_with_path(self.tree)
            rows["size"] = shown_bytes(self.nbytes)
            rows |= {
                jax.tree_util.keystr(path, simple=True, separator="."): leaf
                for path, leaf in leaves[:_MOST_ROWS]
            }
            if len(leaves) > _MOST_ROWS:
                rows["..."] = f"{len(leaves) - _MOST_ROWS} more leaves"
        return html_table("ItemStructure", rows)

    def _what(self) -> str:
        """Returns the kind, and of a tree how many leaves and bytes it has."""
        if self.error is not None:
            return f"damaged {self.kind}"
        if self.kind != "tree":
            return self.kind
        count = len(jax.tree_util.tree_leaves(self.tree))
        return f"tree of {count} leaves, {shown_bytes(self.nbytes)}"


@dataclass(frozen=True, repr=False)
class Structure:
    """What a checkpoint holds: `items` by name, and what it says of itself.

    Times are Unix seconds; `layout` is "holdfast", "orbax", ...
    """

    path: str
    layout: str
    items: Mapping[str, ItemStructure]
    step: int | None
    started_s: float | None
    finished_s: float | None
    metrics: Mapping[str, Any]
    metadata: Any

    def __repr__(self) -> str:
        items = ", ".join(f"{name}: {item._what()}" for name, item in self.items.items())
        step = "" if self.step is None else f", step {self.step}"
        return f"<Structure of {self.path!r} ({self.layout}{step}): {items}>"

    def _repr_html_(self) -> str:
        rows: dict[str, object] = {"path": self.path, "layout": self.layout, "step": self.step}
        rows |= {f"item {name}": item._what() for name, item in self.items.items()}
        rows |= {f"metric {name}": value for name, value in self.metrics.items()}
        if self.metadata is not None:
            rows["metadata"] = self.metadata
        return html_table("Structure", rows)


def structure_of(checkpoint: CheckpointReader) -> Structure:
    """Returns the structure of an opened checkpoint; reads metadata alone.

    A damaged item is described as one. Raises Corrupt, which names a damaged file, where no item is
    whole.
    """
    info = checkpoint.info
    with paused_gc():
        items = {name: _item(checkpoint, name, kind) for name, kind in info.items.items()}
    errors = [item.error for item in items.values() if item.error is not None]
    if errors and len(errors) == len(items):
        raise errors[0]
    return Structure(
        info.path,
        info.layout,
        items,
        info.step,
        started_s=info.started_s,
        finished_s=info.finished_s,
        metrics=info.metrics,
        metadata=info.metadata,
    )


def _item(checkpoint: CheckpointReader, name: str, kind: str) -> ItemStructure:
    if kind != "tree":
        return ItemStructure(kind)
    try:
        return _tree_item(checkpoint.item(name))
    except Corrupt as error:
        return ItemStructure(kind, error=error)


def _tree_item(item: ItemRecord) -> ItemStructure:
    if any(leaf.per_process for leaf in item.leaves):
        item = leaves_of_process(item, PerProcessSelection.of(None, None))
    shardings: dict[int, Any] = {}  # by the description's identity: leaves share them
    structs: dict[Any, Any] = {}
    tree = rebuild(item.tree, [_describe(leaf, shardings, structs) for leaf in item.leaves])
    return ItemStructure("tree", tree, sum(leaf.nbytes for leaf in item.leaves))


def _describe(leaf: LeafRecord, shardings: dict[int, Any], structs: dict[Any, Any]) -> Any:
    """Returns the description of an array; equal ones are one object."""
    if leaf.grid is None:
        return leaf.value
    key = (leaf.kind, leaf.shape, leaf.dtype, leaf.impl, id(leaf.sharding), leaf.weak)
    if key not in structs:
        structs[key] = _make_struct(leaf, shardings)
    return structs[key]


def _make_struct(leaf: LeafRecord, shardings: dict[int, Any]) -> Any:
    dtype = leaf.numpy_dtype
    # jax would narrow 64 bits.
    if leaf.kind in ("numpy", "scalar") or jax.dtypes.canonicalize_dtype(dtype) != dtype:
        return HostShapeDtypeStruct(leaf.shape, dtype)  # type: ignore[no-untyped-call]
    if id(leaf.sharding) not in shardings:
        shardings[id(leaf.sharding)] = _sharding_here(leaf)
    sharding = shardings[id(leaf.sharding)]
    if leaf.kind != "key":
        return jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
            leaf.shape, dtype, sharding=sharding, weak_type=leaf.weak
        )
    return _make_key_struct(leaf, sharding)


def _make_key_struct(leaf: LeafRecord, sharding: Any) -> Any:
    try:
        key_dtype = _key_dtype(leaf.impl)
    except ValueError:  # an implementation that this process does not have: its data are there
        return HostShapeDtypeStruct(leaf.shape, leaf.numpy_dtype)  # type: ignore[no-untyped-call]
    keys = leaf.shape[:-1]
    if isinstance(sharding, NamedSharding):  # that of their data has one axis more
        sharding = sharding.update(spec=spec_of_axes(sharding, len(keys)))
    return jax.ShapeDtypeStruct(keys, key_dtype, sharding=sharding)  # type: ignore[no-untyped-call]


def _sharding_here(leaf: LeafRecord) -> Any:
    try:
        return saved_sharding(leaf)
    except TreeMismatch:  # it is of other devices
        return None


@lru_cache
def _key_dtype(impl: str) -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype
