"""Roots of several pasts, and which steps each of them has beside its neighbours."""

from __future__ import annotations

import functools
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from holdfast.checkpoint import CheckpointManager, Options
from holdfast.checkpoint.storage.path import open_storage

from .strangers import STRANGE, STRANGERS, tree_of

NAMED = "ckpt_{:04d}"


@dataclass(frozen=True)
class Past:
    """How a root has come about: its own steps, Orbax's by the folders' names, and how it calls
    what.
    """

    make: Callable[[Path], object]
    own: tuple[int, ...]
    orbax: Mapping[int, str] = field(default_factory=dict)
    left: tuple[int, ...] = ()
    step_format: str = "{:d}"
    noted: str = ""

    def name_of(self, step: int) -> str:
        return self.step_format.format(step)

    def step_in(self, name: str, layout: str) -> int | None:
        """Returns the step that a folder in a layout is, by the rule of docs/from-orbax.md."""
        digits = re.search(r"(?<![0-9])[0-9]{1,18}\Z", name)
        if digits is None:
            return None
        step = int(digits[0])
        if self.name_of(step) == name and layout in ("holdfast", "orbax"):
            return step
        is_called_so = name[: digits.start()] in ("", self.noted)
        return step if is_called_so and layout == "orbax" else None


def _save(root: Path, *steps: int, step_format: str | None = None) -> None:
    with CheckpointManager(root, options=Options(step_format=step_format)) as manager:
        for step in steps:
            manager.save(step, tree_of(step))
            manager.wait_until_finished()


def _orbax(root: Path, *steps: int, prefix: str | None = None) -> None:
    options = ocp.CheckpointManagerOptions(step_prefix=prefix)
    with ocp.CheckpointManager(root, options=options) as manager:
        for step in steps:
            manager.save(step, args=ocp.args.StandardSave(tree_of(step)))


def _migrated(root: Path, prefix: str | None = None) -> None:
    _orbax(root, 1, prefix=prefix)
    _save(root, 2, 3)


def _gone_back(root: Path) -> None:
    with CheckpointManager(root) as manager:
        for step in (1, 2, 3):
            manager.save(step, tree_of(step))
            manager.wait_until_finished()
        manager.restore(1)
        manager.save(2, tree_of(2))


PASTS: Mapping[str, Past] = {
    "steps": Past(lambda root: _save(root, 1, 2, 3), (1, 2, 3)),
    "one step": Past(lambda root: _save(root, 1), (1,)),
    "named": Past(
        lambda root: _save(root, 1, 2, 3, step_format=NAMED), (1, 2, 3), step_format=NAMED
    ),
    "gone back": Past(_gone_back, (1, 2, 3), left=(3,)),
    "migrated": Past(_migrated, (2, 3), {1: "1"}),
    "migrated by a prefix": Past(
        lambda root: _migrated(root, "checkpoint"), (2, 3), {1: "checkpoint_1"}, noted="checkpoint_"
    ),
    "orbax": Past(lambda root: _orbax(root, 1, 2), (), {1: "1", 2: "2"}),
    "empty": Past(lambda root: root.mkdir(), ()),
}


@functools.cache
def _made(past: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="root-"))
    PASTS[past].make(folder / "root")
    return folder / "root"


@dataclass(frozen=True)
class Neighbour:
    """A stranger, the folder of the site that it lies in, and its name there."""

    stranger: str
    place: str
    name: str


PLACES = ("root", "root", "root", "step", "item", "beside", "inside")


@dataclass(frozen=True)
class Site:
    """A root and its neighbours, on disk or below a `url`: `steps` are all that it has, with the
    values, `foreign` is what others have put there. With `has_whole` a checkpoint of Orbax's lies
    in the root itself.
    """

    folder: Path
    past: Past
    steps: Mapping[int, float]
    foreign: Mapping[str, object]
    has_whole: bool = False
    url: str = ""

    @property
    def root(self) -> Any:
        return Url(f"{self.url}/root") if self.url else self.folder / "root"

    @property
    def out(self) -> Path:
        """Where commands write to."""
        return self.folder / "out"

    @property
    def latest(self) -> int | None:
        return max(self.steps.keys() - {*self.past.left}, default=None)

    @classmethod
    def make(cls, folder: Path, past: str, neighbours: Sequence[Neighbour]) -> Site:
        """Makes a root with neighbours in an empty folder."""
        of = PASTS[past]
        root = folder / "root"
        shutil.copytree(_made(past), root, symlinks=True)
        own = look(folder)
        steps = {step: float(step) for step in [*of.orbax, *of.own]}
        has_whole = False
        ours: list[str] = []
        for each in neighbours:
            place = _place(root, of, each.place)
            if not _put(each, folder / "staged", place, of):
                continue
            stranger = STRANGERS[each.stranger]
            if place == root and stranger.whole:
                has_whole |= stranger.layout == "orbax"
            elif place == root:
                step = of.step_in(each.name, stranger.layout)
                if step is not None:
                    steps.setdefault(step, STRANGE)
                if step is not None and stranger.layout == "holdfast":
                    ours.append(f"root/{each.name}/")
        found = look(folder)
        foreign = {
            name: what
            for name, what in found.items()
            if name not in own and not f"{name}/".startswith(tuple(ours))
        }
        return cls(folder, of, steps, foreign, has_whole=has_whole)

    def in_a_bucket(self) -> Site:
        """Returns the same site with its root in a bucket, where only files are."""
        there = replace(self, url=f"memory://{secrets.token_hex(8)}")
        storage = open_storage(there.root)
        root = self.folder / "root"
        for path in sorted(root.rglob("*")):
            if path.is_file() and not path.is_symlink():
                name = path.relative_to(root).as_posix()
                data = path.read_bytes()
                storage.write(name, len(data), [(0, [memoryview(data)])])
        shutil.rmtree(root)
        return there

    def look(self) -> dict[str, object]:
        """Returns all that is there: see `look`."""
        found = look(self.folder)
        if self.url:
            storage = open_storage(self.root)
            names = [entry.name for entry in storage.list("", recursive=True)]
            found |= {f"root/{name}": storage.fetch(name, 1 << 24) for name in names}
        return found


class Url(str):
    """A URL with the `/` of a path."""

    __slots__ = ()

    def __truediv__(self, name: str) -> Url:
        return Url(f"{self}/{name}")


def _put(neighbour: Neighbour, staged: Path, place: Path, past: Past) -> bool:
    """Puts a neighbour into a place; returns whether it has gone there: over nothing, and no link
    or half a step of ours under a step's name.
    """
    stranger = STRANGERS[neighbour.stranger]
    is_steps = past.step_in(neighbour.name, "holdfast") is not None
    if stranger.layout in ("link", "packs") and is_steps:
        return False
    staged.mkdir()
    try:
        stranger.put(staged / neighbour.name)
        new = look(staged)
        there = look(place) if place.is_dir() else {}
        both = new.keys() & there.keys()
        clash = [name for name in both if (new[name], there[name]) != (None, None)]
        if clash:
            return False
        shutil.copytree(staged, place, symlinks=True, dirs_exist_ok=True)
        return True
    finally:
        shutil.rmtree(staged)


def _place(root: Path, past: Past, place: str) -> Path:
    """Returns the folder of a place; the root where there is no such place."""
    step = root / past.name_of(past.own[0]) if past.own else root
    return {
        "root": root,
        "step": step,
        "item": step / "state" if past.own else root,
        "beside": root.parent,
        "inside": root / ".holdfast",
    }[place]


def look(folder: Path) -> dict[str, object]:
    """Returns all that is below a folder, by its name there: what a link points to, the bytes of a
    file, None of a folder.
    """
    found: dict[str, object] = {}
    for path, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            each = Path(path, name)
            key = os.fspath(each.relative_to(folder))
            if each.is_symlink():
                found[key] = ("a link to", os.readlink(each))
            else:
                found[key] = None if each.is_dir() else each.read_bytes()
    return found
