"""What happens to the files of a root behind holdfast's back."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.checkpoint.storage.tombstone import RECORD_NAME, body_of, sealed

from .policies import HARMED_RECORD, Saved
from .site import Site
from .world import World


@dataclass(frozen=True)
class Harm:
    """Harms a file of a step, the `which`th of its folder, after the save under way.

    `how` is "flip" (its last byte), "cut" (its end), "lose", or "link" (to where it is moved).
    """

    step: int
    which: int
    how: str

    def run(self, site: Site) -> list[Any]:
        site.settle()
        files = site.files_of(self.step)
        if not files:
            return []
        path = files[self.which % len(files)]
        if path.is_symlink():  # what is behind it is not the root's any more
            return []
        is_record = path.name == RECORD_NAME
        # Without its record there is no step: that is a deletion by hand.
        if (is_record and self.how == "lose") or not path.stat().st_size:
            return []
        site.is_whole = False
        hit = _hit(site, path, self.how)
        _harm(path, self.how, site)
        return hit

    def judge(self, world: World, site: Site, found: list[Any]) -> Iterator[World]:
        for after in world.ended():
            steps = dict(after.steps)
            for step, item in found:
                if step in steps:
                    steps[step] = _harmed(steps[step], item, after, self.how)
            yield replace(after, steps=steps)


def _harmed(saved: Saved, item: str, world: World, how: str) -> Saved:
    # A file of an incremental save may have bytes that no step needs, and of a file not all is
    # read where some leaves are wanted, and nothing where no leaf has a byte.
    settings = world.settings
    doubtful = item != HARMED_RECORD and (
        settings.incremental != "no"
        or settings.read == "partial"
        or settings.items == "empty"
        or how == "link"
    )
    if doubtful or how == "link":
        return replace(saved, doubtful=saved.doubtful | {item})
    return replace(saved, harmed=saved.harmed | {item})


def _hit(site: Site, path: Path, how: str) -> list[Any]:
    """Returns the (step, item) pairs whose file this is, also by another name."""
    number = path.stat().st_ino
    by_name = how in ("lose", "link")
    hit = []
    for step in site.listed():
        for each in site.files_of(step):
            if each == path or (not by_name and each.stat().st_ino == number):
                is_record = each.name == RECORD_NAME
                hit.append((step, HARMED_RECORD if is_record else each.parent.name))
    return hit


def _harm(path: Path, how: str, site: Site) -> None:
    match how:
        case "flip":
            data = bytearray(path.read_bytes())
            # The last byte of a record is a line feed.
            place = -2 if path.name == RECORD_NAME else -1
            data[place] ^= 0x01
            _write_in_place(path, data)
        case "cut":
            _write_in_place(path, path.read_bytes()[:-1])
        case "lose":
            path.unlink()
        case "link":
            moved = site.folder / f"moved-{len(site.foreign)}"
            shutil.move(path, moved)
            path.symlink_to(moved)
            site.foreign[moved] = moved.read_bytes()


def _write_in_place(path: Path, data: bytes | bytearray) -> None:
    with open(path, "r+b") as file:
        file.write(data)
        file.truncate()


def _forge_writer(record: dict[str, Any]) -> bool:
    # As long as the id of a writer, which becomes a name.
    record["writer"] = "../../xy00000001"
    return True


def _forge_shardings(record: dict[str, Any], description: dict[str, Any]) -> bool:
    """Describes the sharding of all arrays on devices; says whether there are some."""
    shardings = record["items"].get("state", {}).get("shardings", [])
    of_devices = [place for place, each in enumerate(shardings) if each is not None]
    for place in of_devices:
        shardings[place] = description
    return bool(of_devices)


MANY_AXES = {"axes": ["a"], "sizes": [1], "devices": [0], "spec": [["a"], [], [], []]}
NO_NAMES = {"axes": [1], "sizes": ["1"], "devices": [[]], "spec": [3]}
# Each says whether it could.
FORGERIES: dict[str, Callable[[dict[str, Any]], bool]] = {
    "a writer above the root": _forge_writer,
    "a sharding of too many axes": partial(_forge_shardings, description=MANY_AXES),
    "a mesh without names": partial(_forge_shardings, description=NO_NAMES),
}


@dataclass(frozen=True)
class Forge:
    """Writes other things into the record of a step, with a checksum that is right."""

    step: int
    how: str

    def run(self, site: Site) -> list[Any]:
        site.settle()
        path = site.root / site.step_name(self.step) / RECORD_NAME
        data = path.read_bytes() if path.exists() else b""
        if not data or data != sealed(body_of(data)):
            return [False]
        record = json.loads(body_of(data) + b"}")
        if not FORGERIES[self.how](record):
            return [False]
        site.is_whole = False
        body = json.dumps(record, separators=(",", ":")).encode()[:-1]
        _write_in_place(path, sealed(body))
        return [True]

    def judge(self, world: World, site: Site, found: list[Any]) -> Iterator[World]:
        for after in world.ended():
            steps = dict(after.steps)
            if found[0] and self.step in steps:
                saved = steps[self.step]
                harmed = saved.harmed | {HARMED_RECORD}
                nameless = saved.nameless or self.how == "a writer above the root"
                steps[self.step] = replace(saved, harmed=harmed, nameless=nameless)
            yield replace(after, steps=steps)


@dataclass(frozen=True)
class CopyStep:
    """Copies the folder of a step to the name of another, as `cp -r` does."""

    step: int
    to: int

    def run(self, site: Site) -> list[Any]:
        site.settle()
        source = site.root / site.step_name(self.step)
        target = site.root / site.step_name(self.to)
        if target.exists() or not (source / RECORD_NAME).exists():
            return [False]
        site.is_whole = False
        shutil.copytree(source, target, symlinks=True)
        # The processes of a group know what they did; one alone looks.
        site.each(lambda rank, manager: manager.reload())
        return [True]

    def judge(self, world: World, site: Site, found: list[Any]) -> Iterator[World]:
        for after in world.ended():
            if not found[0]:
                yield after
            if not found[0] or self.step not in after.steps:
                continue
            # A record of step 0 may stand in every folder.
            harmed = frozenset({HARMED_RECORD} if self.step else ())
            copied = after.steps[self.step]
            copy = replace(copied, harmed=copied.harmed | harmed)
            left = after.left - {self.to}
            yield replace(after, steps={**after.steps, self.to: copy}, left=left)


@dataclass(frozen=True)
class Litter:
    """Puts a stranger's file into the root, or into a step's folder. It stays for good."""

    step: int | None
    name: str

    def run(self, site: Site) -> list[Any]:
        site.settle()
        folder = site.root if self.step is None else site.root / site.step_name(self.step)
        path = folder / self.name
        if not folder.exists() or path.exists():
            return []
        os.makedirs(path.parent, exist_ok=True)
        path.write_text("mine")
        site.foreign[path] = b"mine"
        return []

    def judge(self, world: World, site: Site, found: list[Any]) -> Iterator[World]:
        yield from world.ended()


@dataclass(frozen=True)
class HarmHost:
    """Harms one file of the parts that a host has, the `which`th of them, at most one a step."""

    rank: int
    which: int

    def run(self, site: Site) -> list[Any]:
        site.settle()
        folder = site.folder / f"host{self.rank % site.settings.processes}"
        files = [path for path in sorted(folder.rglob("*.safetensors")) if path.stat().st_size]
        if not files:
            return [None]
        path = files[self.which % len(files)]
        # <path>/<run>/<opening>/<step>-<save id>/...
        name = path.relative_to(folder).parts[2]
        if name in site.harmed_parts:
            return [None]
        site.harmed_parts.add(name)
        _harm(path, "flip", site)
        return [int(name.partition("-")[0])]

    def judge(self, world: World, site: Site, found: list[Any]) -> Iterator[World]:
        step = found[0]
        for after in world.ended():
            saved = after.local.get(step)
            # Where there are several hosts, another one has a copy.
            if saved is None or site.settings.processes > 1:
                yield after
                continue
            # The files may be those of an older save of that step.
            doubtful = replace(saved, doubtful=saved.doubtful | {"state"})
            yield replace(after, local={**after.local, step: doubtful})
