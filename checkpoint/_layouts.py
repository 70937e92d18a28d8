"""The seam between a checkpoint and the layout it is stored in: holdfast's own, Orbax's, or a plain safetensors folder.

A `Place` is a folder in a store. A `Layout` recognises a checkpoint in a place and opens it as a `Source`; a `Source` shows the items of
one checkpoint as trees of `Leaf`s and reads any part of any leaf. Nothing above this seam knows files of other people's layouts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np

from ._storage import Entry, Storage

Index: TypeAlias = tuple[slice, ...]
SMALL_FILE_BYTES = 256 << 20  # other people's metadata: one JSON file for a whole tree


@dataclass(frozen=True)
class Place:
    """A folder in a store: `name` is relative to the store's root, "" for the root itself."""

    storage: Storage
    name: str = ""

    def __truediv__(self, name: str) -> Place:
        return Place(self.storage, f"{self.name}/{name}" if self.name else name)

    def __str__(self) -> str:
        return f"{self.storage.root.rstrip('/')}/{self.name}".rstrip("/") or "/"

    @property
    def basename(self) -> str:
        """Is the last part of the name."""
        return str(self).rsplit("/", 1)[-1]

    def names(self) -> dict[str, Entry]:
        """Returns what is in the folder, by its name there; folders end in `/`. Empty for a missing folder."""
        skip = len(self.name) + 1 if self.name else 0
        return {entry.name[skip:]: entry for entry in self.storage.list(self.name)}

    def fetch(self, name: str, limit_bytes: int = SMALL_FILE_BYTES) -> bytes:
        """Returns a small file; raises FileNotFoundError or OverflowError."""
        return self.storage.fetch((self / name).name, limit_bytes)

    def read(self, name: str, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fills `buffers` with bytes of a file, from `offset` on; returns how many there were."""
        return self.storage.read((self / name).name, offset, buffers)


@dataclass(frozen=True)
class Leaf:
    """One array or value of a tree, as stored.

    `path` are its keys as text and `name` is how the layout calls it. `kind` is "array", "numpy", "scalar" (a Python number) or "string".
    `shape` and `dtype` are what a reader gets; for a typed PRNG key those of its key data, and `prng` is the implementation. `chunks` is
    the shape of the stored pieces, where the layout has such.
    """

    path: tuple[str, ...]
    name: str
    kind: str
    shape: tuple[int, ...] = ()
    dtype: np.dtype[Any] = field(default_factory=lambda: np.dtype(object))
    prng: str | None = None
    value: Any = None
    chunks: tuple[int, ...] | None = None
    sharding: Any = None

    @property
    def nbytes(self) -> int:
        """Is the size of the whole leaf in memory."""
        return math.prod(self.shape) * self.dtype.itemsize if self.kind != "string" else len(self.value or "")

    @property
    def text(self) -> str:
        """Is the path as messages show it."""
        return ".".join(self.path)


@dataclass(frozen=True)
class Part:
    """A part of a leaf to be read: `index` is a tuple of slices, one an axis, each with a start and a stop and without a step."""

    leaf: Leaf
    index: Index

    @property
    def shape(self) -> tuple[int, ...]:
        """Is the shape of the part."""
        return tuple(axis.stop - axis.start for axis in self.index)

    @property
    def nbytes(self) -> int:
        """Is the size of the part in memory."""
        return math.prod(self.shape) * self.leaf.dtype.itemsize


@dataclass(frozen=True)
class Info:
    """What a checkpoint says about itself. Times are Unix seconds; `items` are kinds by item name: "tree", "json" or "unknown"."""

    layout: str
    path: str
    items: Mapping[str, str]
    step: int | None = None
    started_s: float | None = None
    finished_s: float | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    metadata: Any = None


class Source(Protocol):
    """Is one opened checkpoint of some layout. All calls block; `read` may be called from several threads."""

    @property
    def info(self) -> Info: ...

    def tree(self, item: str) -> Any:
        """Returns an item's tree: containers as stored, with a `Leaf` for each array or value, None and empty containers as they are.

        Raises StepNotFound for an item that is not there, Corrupt naming the file that is missing or damaged.
        """

    def read(self, item: str, parts: Sequence[Part], buffers: Sequence[np.ndarray]) -> None:
        """Fills each buffer (C-contiguous, of the part's shape and dtype) with its part. Raises Corrupt naming file and leaf."""

    def json(self, item: str) -> Any:
        """Returns the value of an item of kind "json"."""


class Layout(Protocol):
    """Is what one layout needs to be read: how a checkpoint of it looks, and how a root of steps does."""

    name: str

    def recognises(self, place: Place, names: Mapping[str, Entry]) -> bool:
        """Tells whether `place`, which holds `names`, is a finished checkpoint of this layout."""

    def open(self, place: Place) -> Source:
        """Opens a checkpoint that `recognises` has accepted; raises Corrupt or HostileCheckpoint where it cannot be."""

    def step_of(self, name: str) -> int | None:
        """Returns the step that a folder's name stands for in a root, None where it stands for none."""


def whole(leaf: Leaf) -> Part:
    """Returns the part that is all of a leaf."""
    return Part(leaf, tuple(slice(0, size) for size in leaf.shape))


def map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    """Returns a tree of the same dicts, lists and (named) tuples with `function` of everything that is none of these."""
    if isinstance(tree, dict):
        return {key: map_tree(function, value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [map_tree(function, value) for value in tree]
    if isinstance(tree, tuple):
        values = [map_tree(function, value) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, (type, Leaf)):
        fields = {f.name: map_tree(function, getattr(tree, f.name)) for f in dataclasses.fields(tree)}
        return dataclasses.replace(tree, **fields)
    return function(tree)


def leaves_of(tree: Any) -> list[Leaf]:
    """Returns the leaves of a tree in order."""
    found: list[Leaf] = []
    map_tree(lambda value: found.append(value) if isinstance(value, Leaf) else None, tree)
    return found


__all__ = ["Index", "Info", "Layout", "Leaf", "Part", "Place", "Source", "leaves_of", "map_tree", "whole"]
