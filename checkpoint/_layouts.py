"""The seam between a checkpoint and the layout it is stored in: holdfast's own, Orbax's, or a plain safetensors folder.

A `Place` is a folder in a store. A `Layout` recognises a checkpoint in a place and opens it as a `Source`; a `Source` describes its items
as our own record does (`ItemRecord`: a tree and its leaves) and fills any region of any leaf. Nothing above this seam, neither restore nor
the command line, knows files of other people's layouts.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ._engine import SAVED
from ._errors import Corrupt, StepGone, StepNotFound, TreeMismatch
from ._plan import Grid
from ._reader import ItemReader, Target
from ._record import ItemRecord, LeafRecord, Record
from ._rename import Names, checked
from ._restore import Filler, Report, read_json, read_record, restore_tree, verify_step
from ._storage import Entry, Storage
from ._stores import open_store
from ._tree import describe, escape
from ._writer import join

log = logging.getLogger("holdfast.checkpoint")
SMALL_FILE_BYTES = 256 << 20  # other people's metadata: one JSON file for a whole tree
RECORD_NAME = "checkpoint.json"
_USUAL_ITEMS = ("state", "default", "pytree")


@dataclass(frozen=True)
class Place:
    """A folder in a store: `name` is relative to the store's root, "" for the root itself."""

    storage: Storage
    name: str = ""

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> Place:
        """Returns the place that a path or URL means, in the store of its parent folder."""
        parent, name = _split(os.fspath(path))
        return cls(open_store(parent)[0], name)

    def __truediv__(self, name: str) -> Place:
        return Place(self.storage, join(self.name, name))

    def __str__(self) -> str:
        return join(self.storage.root, self.name)

    @property
    def basename(self) -> str:
        """Is the last part of the name."""
        return str(self).rstrip("/").rsplit("/", 1)[-1]

    def names(self) -> dict[str, Entry]:
        """Returns what is in the folder, by its name there; folders end in `/`. Empty for a missing folder."""
        skip = len(self.name) + 1 if self.name else 0
        return {entry.name[skip:]: entry for entry in self.storage.list(self.name)}

    def fetch(self, name: str, limit_bytes: int = SMALL_FILE_BYTES) -> bytes:
        """Returns a small file; raises Corrupt where it is missing or too large to be one."""
        path = f"{self}/{name}"
        try:
            return self.storage.fetch(join(self.name, name), limit_bytes)
        except FileNotFoundError:
            raise Corrupt(f"{path} is missing", path=path, file=path) from None
        except OverflowError as error:
            raise Corrupt(f"{path} is no metadata file: {error}", path=path, file=path) from None

    def read(self, name: str, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fills `buffers` with bytes of a file, from `offset` on; returns how many there were."""
        return self.storage.read(join(self.name, name), offset, buffers)


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
    """Is one opened checkpoint of some layout. All calls block and may come from several threads."""

    @property
    def info(self) -> Info: ...

    def item(self, name: str) -> ItemRecord:
        """Describes a tree item. Raises StepNotFound for one that is not there, Corrupt naming the file that is missing or damaged."""

    def reader(self, name: str) -> Filler:
        """Returns what fills regions of an item's leaves; it raises Corrupt naming file and leaf."""

    def json(self, name: str) -> Any:
        """Returns the value of an item of kind "json"."""

    def verify(self) -> Report:
        """Reads everything and checks it as well as the layout allows; raises Corrupt naming file and leaf."""


class Layout(Protocol):
    """Is what one layout needs to be read: how a checkpoint of it looks, and how a root of steps does."""

    name: str

    def recognises(self, place: Place, names: Mapping[str, Entry]) -> bool:
        """Tells whether `place`, which holds `names`, is a finished checkpoint of this layout."""

    def open(self, place: Place) -> Source:
        """Opens a checkpoint that `recognises` has accepted; raises Corrupt or HostileCheckpoint where it cannot be."""

    def step_of(self, name: str) -> int | None:
        """Returns the step that a folder's name stands for in a root, None where it stands for none."""


class HoldfastLayout:
    """Is our own layout: a folder with a record."""

    name = "holdfast"

    def recognises(self, place: Place, names: Mapping[str, Entry]) -> bool:
        return RECORD_NAME in names

    def open(self, place: Place) -> HoldfastSource:
        return HoldfastSource(place)

    def step_of(self, name: str) -> int | None:
        return int(name) if name.isascii() and name.isdigit() and (name == "0" or name[0] != "0") and len(name) <= 18 else None


class HoldfastSource:
    """Is one of our own checkpoints."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.record: Record = read_record(place.storage, place.name)
        items = {name: item.kind for name, item in self.record.items.items()}
        times = (self.record.started_s, self.record.finished_s)
        self.info = Info("holdfast", str(place), items, self.record.step, *times, self.record.metrics, self.record.metadata)

    def item(self, name: str) -> ItemRecord:
        found: ItemRecord = find(self.info, self.record.items, name)
        return found

    def reader(self, name: str) -> Filler:
        return ItemReader(self._place.storage, self._place.name, self.item(name))

    def json(self, name: str) -> Any:
        return read_json(self._place.storage, self._place.name, self.record, name)

    def verify(self) -> Report:
        return verify_step(self._place.storage, self._place.name, self.record)


def _split(path: str) -> tuple[str, str]:
    """Returns the parent folder of a path or URL, and the last part; what follows a `?` in a URL stays with the folder."""
    if "://" not in path:
        parent, _, name = os.path.abspath(path).rpartition("/")
        return parent or "/", name
    url, mark, query = path.partition("?")
    parent, _, name = url.rstrip("/").rpartition("/")
    return f"{parent}{mark}{query}", name


def find(info: Info, items: Mapping[str, Any], name: str) -> Any:
    """Returns items[name]; raises StepNotFound saying which items there are."""
    if name not in items:
        known = ", ".join(sorted(info.items)) or "none"
        raise StepNotFound(f"{info.path} has no item '{name}'; it has: {known}", path=info.path, step=info.step)
    return items[name]


def array_record(path: str, kind: str, shape: tuple[int, ...], dtype: str, *, impl: str = "", sharding: Any = None) -> LeafRecord:
    """Returns the record of an array that is stored in one piece, as far as our reader is concerned."""
    return LeafRecord(path, kind, dtype, shape, impl, sharding, Grid(shape, shape, shape))


def layouts() -> list[Layout]:
    """Returns the layouts that are known, ours first: a folder is what the first of them recognises."""
    from ._orbax_read import OrbaxLayout  # imports tensorstore
    from ._safetensors import SafetensorsLayout

    return [HoldfastLayout(), OrbaxLayout(), SafetensorsLayout()]


def recognise(place: Place) -> Source | None:
    """Opens the checkpoint in a place, or returns None where there is none that is finished."""
    names = place.names()
    for layout in layouts():
        if layout.recognises(place, names):
            return layout.open(place)
    return None


def find_steps(storage: Storage, *, foreign_only: bool = False) -> dict[int, tuple[str, Layout]]:
    """Returns the finished steps of a root, ascending: the folder's name and its layout. Ours come before another's of the same number."""
    found: dict[int, tuple[str, Layout]] = {}
    for entry in storage.list(""):
        name = entry.name[:-1]
        if not entry.name.endswith("/") or not name[-1:].isdigit():
            continue
        place = Place(storage, name)
        names = place.names()
        if RECORD_NAME in names and foreign_only:
            continue
        for layout in [HoldfastLayout()] if RECORD_NAME in names else layouts()[1:]:
            step = layout.step_of(name)
            if step is not None and layout.recognises(place, names):
                if step not in found or layout.name == "holdfast":
                    found[step] = (name, layout)
                break
    return dict(sorted(found.items()))


class ForeignSteps:
    """Is the steps of a root that are in other people's layouts, by their folders' names, as they were when the root was opened."""

    def __init__(self, storage: Storage, folders: Mapping[int, str]) -> None:
        self._storage, self._folders = storage, dict(folders)

    def __iter__(self) -> Iterator[int]:
        return iter(self._folders)

    def __contains__(self, step: object) -> bool:
        return step in self._folders

    def open(self, step: int) -> Source:
        """Opens one; raises StepNotFound, or StepGone where it was there before."""
        if step not in self._folders:
            raise StepNotFound(f"there is no step {step} in {self._storage.root}", path=self._storage.root, step=step)
        source = recognise(Place(self._storage, self._folders[step]))
        if source is None:
            place = Place(self._storage, self._folders[step])
            raise StepGone(f"{place} was there when the root was opened and is gone", path=str(place), step=step)
        return source


def open_source(path: str | os.PathLike[str], step: int | None = None, *, wrap: Callable[[Storage], Storage] | None = None) -> Source:
    """Opens the checkpoint in the folder `path`, or, where that is a root, its step `step` (None: the latest).

    `wrap` may put a store of its own in front of the one that `path` means: to count, or to fail.
    Raises StepNotFound saying what is there instead, Corrupt, HostileCheckpoint.
    """
    folder, file = _split(os.fspath(path))
    if file.endswith(".safetensors"):
        from ._safetensors import SafetensorsSource

        storage = open_store(folder)[0]
        return SafetensorsSource(Place(wrap(storage) if wrap else storage), file)
    storage = open_store(path)[0]
    storage = wrap(storage) if wrap else storage
    source = recognise(Place(storage)) if step is None else None
    if source is not None:
        return source
    steps = find_steps(storage)
    if not steps or (step is not None and step not in steps):
        raise StepNotFound(_nothing(storage, step, list(steps)), path=storage.root, step=step)
    name, layout = steps[max(steps) if step is None else step]
    if step is None:
        log.info("%s is a root of %d steps: taking the latest, %s", storage.root, len(steps), join(storage.root, name))
    return layout.open(Place(storage, name))


def _nothing(storage: Storage, step: int | None, steps: Sequence[int]) -> str:
    if steps:
        return f"{storage.root} has no step {step}; it has {', '.join(map(str, steps[-10:]))}"
    entries = storage.list("")
    if not entries:
        exists = "://" not in storage.root and os.path.isdir(storage.root)
        return f"{storage.root} is empty: no checkpoint was saved there" if exists else f"there is nothing at {storage.root}"
    tmp = [entry.name for entry in entries if ".orbax-checkpoint-tmp" in entry.name]
    if tmp:
        return f"{storage.root} has no finished checkpoint: {tmp[0]} was never completed by Orbax"
    shown = ", ".join([entry.name for entry in entries[:4]] + ["..."] * (len(entries) > 4))
    return f"{storage.root} is no checkpoint that holdfast knows (its own, Orbax's, safetensors); it holds {shown}"


def pick_item(info: Info, item: str) -> str:
    """Returns the item that `item` means: itself, or, for the usual name, the one tree there is or another usual name."""
    if item in info.items or item != "state":
        return item
    trees = [name for name, kind in info.items.items() if kind == "tree"]
    for name in _USUAL_ITEMS:
        if name in trees:
            return name
    if len(trees) == 1:
        return trees[0]
    known = ", ".join(info.items) or "none"
    raise StepNotFound(f"{info.path} has no item '{item}'; it has: {known}. Name one with item=...", path=info.path)


def restore_source(
    source: Source,
    item: str = "state",
    like: Any = None,
    *,
    partial: bool | Callable[[str], bool] = False,
    cast: bool = False,
    types: Sequence[type] = (),
    rename: Names = None,
) -> Any:
    """Restores one item of any layout; the arguments mean what they mean for `CheckpointManager.restore`.

    `rename` turns the path of a stored leaf into the path that it has in `like`: a mapping, rules of (pattern, replacement) or a function.
    """
    item = pick_item(source.info, item)
    if source.info.items.get(item) == "json":
        return source.json(item)
    stored = found = source.item(item)
    if rename is not None:
        found = renamed(found, rename)
    if like is not None and like is not SAVED:
        found = _spelled_like(found, like)
    reader = source.reader(item)
    if found is not stored:
        reader = RenamedReader(reader, found, stored)
    try:
        return restore_tree(reader, found, like, partial=partial, cast=cast, types=types)
    except TreeMismatch as error:
        error.path = error.path or source.info.path
        raise


class RenamedReader:
    """Fills leaves that go by other paths than the stored ones."""

    def __init__(self, reader: Filler, renamed: ItemRecord, stored: ItemRecord) -> None:
        self._reader = reader
        self._stored = {new.path: old for new, old in zip(renamed.leaves, stored.leaves, strict=True)}

    def fill(self, targets: Sequence[Target], allocate: Callable[[int], Any]) -> None:
        """Gives every target its array: see `ItemReader.fill`."""
        inner = [Target(self._stored[target.leaf.path], target.region) for target in targets]
        self._reader.fill(inner, allocate)
        for target, filled in zip(targets, inner, strict=True):
            target.array = filled.array


def renamed(item: ItemRecord, names: Names) -> ItemRecord:
    """Returns the item with other paths, its leaves in the same order; its tree becomes a flat dict of them."""
    new = checked(names, [leaf.path for leaf in item.leaves])
    leaves = tuple(replace(leaf, path=new[leaf.path]) for leaf in item.leaves)
    tree = {"kind": "dict", "keys": list(new.values()), "nodes": list(range(len(leaves)))}
    return ItemRecord(item.name, item.kind, item.files, tree, leaves)


def _spelled_like(item: ItemRecord, like: Any) -> ItemRecord:
    """Lets flat names with dots match a flat `like` too, whose paths have the dots escaped."""
    wanted = set(describe(like)[1])
    if any(leaf.path in wanted for leaf in item.leaves):
        return item
    spelled = tuple(replace(leaf, path=escape(leaf.path)) for leaf in item.leaves)
    return replace(item, leaves=spelled) if any(leaf.path in wanted for leaf in spelled) else item


def verify_by_reading(source: Source, files: int) -> Report:
    """Reads every leaf of a source once, in bounded memory: what can be done where a layout keeps no checksums of its own."""
    from ._restore import allocate

    leaves = total = 0
    for name, kind in source.info.items.items():
        if kind == "json":
            source.json(name)
        if kind != "tree":
            continue
        reader, batch = source.reader(name), []
        arrays = [leaf for leaf in source.item(name).leaves if leaf.grid is not None]
        for leaf in arrays:
            batch.append(Target(leaf, tuple((0, size) for size in leaf.shape)))
            if sum(target.nbytes for target in batch) > SMALL_FILE_BYTES or leaf is arrays[-1]:
                reader.fill(batch, allocate)
                batch = []
        leaves += len(source.item(name).leaves)
        total += sum(leaf.nbytes for leaf in arrays)
    return Report(source.info.path, source.info.step or 0, files, leaves, total)


__all__ = [
    "RECORD_NAME",
    "ForeignSteps",
    "HoldfastLayout",
    "HoldfastSource",
    "Info",
    "Layout",
    "Place",
    "RenamedReader",
    "Source",
    "array_record",
    "find",
    "find_steps",
    "layouts",
    "open_source",
    "pick_item",
    "recognise",
    "renamed",
    "restore_source",
    "verify_by_reading",
]
