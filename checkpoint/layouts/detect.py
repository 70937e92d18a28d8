"""Which layouts there are, and which of them a folder is in: holdfast's own, Orbax's, or plain safetensors.

See `_source.py` for what a layout is to the rooms above.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import StepGone, StepNotFound, TreeMismatch
from ..format.record import ItemRecord
from ..format.rename import Names
from ..format.tree import describe, escape
from ..restoring.match import SAVED
from ..restoring.restore import RestoreOptions, restore_tree
from ..storage.base import Storage
from ..storage.path import StorePath, join, open_storage, split
from ..storage.tombstone import RECORD_NAME
from .base import CheckpointLayout, CheckpointReader, Info, RenamedReader, renamed
from .holdfast import HoldfastLayout

log = logging.getLogger("holdfast.checkpoint")

_USUAL_ITEMS = ("state", "default", "pytree")


def layouts() -> list[CheckpointLayout]:
    """Returns the layouts that are known, ours first: a folder is what the first of them recognises."""
    from .orbax.read import OrbaxLayout  # imports tensorstore
    from .safetensors import SafetensorsLayout

    return [HoldfastLayout(), OrbaxLayout(), SafetensorsLayout()]


def recognise(place: StorePath) -> CheckpointReader | None:
    """Opens the checkpoint in a place, or returns None where there is none that is finished."""
    names = place.names()
    for layout in layouts():
        if layout.recognises(place, names):
            return layout.open(place)
    return None


def find_steps(storage: Storage, *, foreign_only: bool = False) -> dict[int, tuple[str, CheckpointLayout]]:
    """Returns the finished steps of a root, ascending: the folder's name and its layout. Ours come before another's of the same number."""
    found: dict[int, tuple[str, CheckpointLayout]] = {}
    for entry in storage.list(""):
        name = entry.name[:-1]
        if not entry.name.endswith("/") or not name[-1:].isdigit():
            continue
        place = StorePath(storage, name)
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


def find_foreign_steps(storage: Storage) -> dict[int, str]:
    """Returns the finished steps of a root that are in other people's layouts: the folders' names."""
    return {step: name for step, (name, _) in find_steps(storage, foreign_only=True).items()}


class ForeignSteps:
    """Is the steps of a root that are in other people's layouts, by their folders' names, as they were when the root was opened."""

    def __init__(self, storage: Storage, folders: Mapping[int, str]) -> None:
        self._storage, self._folders = storage, dict(folders)

    def __iter__(self) -> Iterator[int]:
        return iter(self._folders)

    def __contains__(self, step: object) -> bool:
        return step in self._folders

    def open(self, step: int) -> CheckpointReader:
        """Opens one; raises StepNotFound, or StepGone where it was there before."""
        if step not in self._folders:
            raise StepNotFound(f"there is no step {step} in {self._storage.root}", path=self._storage.root, step=step)
        source = recognise(StorePath(self._storage, self._folders[step]))
        if source is None:
            place = StorePath(self._storage, self._folders[step])
            raise StepGone(f"{place} was there when the root was opened and is gone", path=str(place), step=step)
        return source


def open_source(
    path: str | os.PathLike[str], step: int | None = None, *, wrap: Callable[[Storage], Storage] | None = None
) -> CheckpointReader:
    """Opens the checkpoint in the folder `path`, or, where that is a root, its step `step` (None: the latest).

    `wrap` may put a store of its own in front of the one that `path` means: to count, or to fail.
    Raises StepNotFound saying what is there instead, Corrupt, HostileCheckpoint.
    """
    folder, file = split(os.fspath(path))
    if file.endswith(".safetensors"):
        from .safetensors import SafetensorsSource

        storage = open_storage(folder)
        return SafetensorsSource(StorePath(wrap(storage) if wrap else storage), file)
    storage = open_storage(path)
    storage = wrap(storage) if wrap else storage
    source = recognise(StorePath(storage)) if step is None else None
    if source is not None:
        return source
    steps = find_steps(storage)
    if not steps or (step is not None and step not in steps):
        raise StepNotFound(nothing_at(storage, step, list(steps)), path=storage.root, step=step)
    name, layout = steps[max(steps) if step is None else step]
    if step is None:
        log.info("%s is a root of %d steps: taking the latest, %s", storage.root, len(steps), join(storage.root, name))
    return layout.open(StorePath(storage, name))


def nothing_at(storage: Storage, step: int | None = None, steps: Sequence[int] = ()) -> str:
    """Returns a sentence that says why there is no checkpoint in a place, and what is there instead."""
    if steps:
        return f"{storage.root} has no step {step}; it has {', '.join(map(str, steps[-10:]))}"
    if "://" not in storage.root and os.path.isfile(storage.root):
        return f"{storage.root} is a file and no checkpoint: expected a folder, or a file that ends in .safetensors"
    entries = storage.list("")
    if not entries:
        exists = "://" not in storage.root and os.path.isdir(storage.root)
        return (
            f"{storage.root} is empty: no checkpoint was saved there" if exists else f"there is nothing at {storage.root}{_above(storage)}"
        )
    tmp = [entry.name for entry in entries if ".orbax-checkpoint-tmp" in entry.name]
    if tmp:
        return f"{storage.root} has no finished checkpoint: {tmp[0]} was never completed by Orbax"
    shown = _some([entry.name for entry in entries])
    return f"{storage.root} is no checkpoint that holdfast knows (its own, Orbax's, safetensors); it holds {shown}"


def _above(storage: Storage) -> str:
    """Returns what the folder above a missing one holds: most often the path was mistyped."""
    folder = os.path.dirname(storage.root)
    if "://" in storage.root or not os.path.isdir(folder):
        return ""
    return f"; {folder} holds {_some(sorted(os.listdir(folder)) or ['nothing'])}"


def _some(names: Sequence[str]) -> str:
    return ", ".join([*names[:4], *["..."] * (len(names) > 4)])


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
    source: CheckpointReader,
    item: str = "state",
    like: Any = None,
    how: RestoreOptions | None = None,
    *,
    rename: Names = None,
) -> Any:
    """Restores one item of any layout; what `how` says of reading once or of one process's copies is for our own.

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
    how = replace(how or RestoreOptions(), read_once=False, host_memory_bytes=None)
    try:
        return restore_tree(reader, found, like, how)
    except TreeMismatch as error:
        error.path = error.path or source.info.path
        raise


def _spelled_like(item: ItemRecord, like: Any) -> ItemRecord:
    """Lets flat names with dots match a flat `like` too, whose paths have the dots escaped."""
    wanted = set(describe(like)[1])
    if any(leaf.path in wanted for leaf in item.leaves):
        return item
    spelled = tuple(replace(leaf, path=escape(leaf.path)) for leaf in item.leaves)
    return replace(item, leaves=spelled) if any(leaf.path in wanted for leaf in spelled) else item
