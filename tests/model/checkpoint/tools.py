"""Others at the same root: commands, copies, conversions, and a second manager."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner

from holdfast.checkpoint import (
    CheckpointManager,
    Options,
    iterate_steps,
    load,
    save,
    wait_for_new_step,
)
from holdfast.cli.entry import main
from holdfast.multihost import Solo

from .contents import CASTS, Pair, differs, items_of, reading_of
from .operations import Broken, alike, attempted
from .policies import HARMED_RECORD, Saved
from .site import Raised, Site
from .world import Begun, Place, World

WHOLE = 0
NOTHING_THERE = 3
DAMAGED = 4


def command(*arguments: object) -> int:
    """Runs a command; returns its exit code. Raises Broken for a traceback."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise Broken(f"{arguments}: {result.exception!r}") from result.exception
    return result.exit_code


def _is_damaged(saved: Saved) -> bool | None:
    """Says whether a step cannot be read as a whole, None where it perhaps can."""
    if saved.harmed:
        return True
    return None if saved.doubtful else False


@dataclass(frozen=True)
class Verify:
    """Reads every byte of every step."""

    def run(self, site: Site) -> list[Any]:
        site.settle()
        return [command("verify", site.url, "--all")]

    def judge(self, world: World, site: Site, found: list[Any]) -> Iterator[World]:
        for now in world.ended():
            damaged = {_is_damaged(saved) for saved in now.steps.values()}
            if not now.steps:
                allowed = {NOTHING_THERE}
            elif True in damaged:
                allowed = {DAMAGED}
            else:
                allowed = {WHOLE, DAMAGED} if None in damaged else {WHOLE}
            if found[0] in allowed:
                yield now


@dataclass(frozen=True)
class Prune:
    """Deletes all steps but the last so many; nothing where there is damage."""

    last: int

    def run(self, site: Site) -> list[Any]:
        site.settle()
        if not site.is_whole:
            return [None]
        code = command("prune", site.url, "--keep", f"last:{self.last}")
        # The processes of a group know what they did; one alone looks.
        site.each(lambda rank, manager: manager.reload())
        return [code]

    def judge(self, world: World, site: Site, found: list[Any]) -> Iterator[World]:
        for now in world.ended():
            if found[0] is None:
                yield now
            elif found[0] == (WHOLE if now.steps else NOTHING_THERE):
                newest = max(now.line, default=-1)
                stay = sorted(now.line)[-self.last :]
                stay += [step for step in now.left_now if step > newest]
                steps = {step: now.steps[step] for step in sorted(stay)}
                yield replace(now, steps=steps, left=now.left & set(steps))


@dataclass(frozen=True)
class Sweep:
    """Deletes what dead writers left: nothing that anybody would miss."""

    def run(self, site: Site) -> list[Any]:
        site.settle()
        return [command("sweep", site.url)]

    def judge(self, world: World, site: Site, found: list[Any]) -> Iterator[World]:
        if found[0] == WHOLE:
            yield from world.ended()


# --- Copies


def _look_at(site: Site, root: Path, **words: Any) -> list[Any]:
    """Returns the steps of another root, and its newest value, restored as it is."""

    def look() -> list[Any]:
        with CheckpointManager(root, **words) as manager:
            steps = manager.all_steps()
            items = dict.fromkeys(items_of(site.settings, 0, 0))
            return [
                steps,
                manager.restore(items=items, types=(Pair,)) if steps else None,
            ]

    return [attempted(look)]


def _is_copy(answer: Any, world: World, site: Site) -> bool:
    """Says whether the steps of a copy are those of the world, its newest among them."""
    line = world.line
    if isinstance(answer, Raised):
        # Where all were left behind none is the newest.
        return bool(world.steps) and (not line or _is_damaged(line[max(line)]) is not False)
    listed, newest = answer
    if listed != sorted(world.steps):
        return False
    return not world.steps or (bool(line) and not _difference(site, line[max(line)].number, newest))


def _difference(site: Site, number: int, found: Any) -> str:
    """Returns how items that were read without a `like` differ from what was saved."""
    settings = replace(site.settings, read="nothing", per_process=False)
    items = items_of(settings, number, 0)
    expected = {}
    for name in items:
        # Files and iterators come back as what they are made of: read elsewhere in a life.
        if name in ("tokenizer", "data"):
            found = {**found, name: None}
            expected[name] = None
        else:
            expected[name] = reading_of(settings, name, number, 0).expected
    return differs(expected, found)


@dataclass(frozen=True)
class Copy:
    """Copies the root, by `holdfast cp` or as `cp -r` does, and opens the copy."""

    by_shell: bool

    def run(self, site: Site) -> list[Any]:
        site.settle()
        if site.has_shares or (self.by_shell and not site.has_files):
            return [None, None]
        target = site.folder / "copy"
        shutil.rmtree(target, ignore_errors=True)
        if self.by_shell:
            shutil.copytree(site.root, target, symlinks=True)
            code = WHOLE
        else:
            code = command("cp", site.url, target)
            if not target.exists():
                return [code, [[], None]]
        local = site.local(0) if self.by_shell else None
        policy = {"save_policy": site.save_policy, "local": local}
        return [code, *_look_at(site, target, **policy)]

    def judge(self, world: World, site: Site, found: list[Any]) -> Iterator[World]:
        code, answer = found
        for now in world.ended():
            if code is None:
                yield now
                continue
            damaged = {_is_damaged(saved) for saved in now.steps.values()}
            if self.by_shell:
                if _is_copy(answer, now, site):
                    yield now
            elif None in damaged or self._fits(now, code, answer, site):
                yield now

    def _fits(self, world: World, code: int, answer: Any, site: Site) -> bool:
        whole = {step: saved for step, saved in world.steps.items() if not saved.harmed}
        if not world.steps:
            return code == NOTHING_THERE
        expected = WHOLE if whole == world.steps else DAMAGED
        # A record that is in another step's folder is refused before it is read.
        is_alien = any(HARMED_RECORD in saved.harmed for saved in world.steps.values())
        copied = replace(world, steps=whole)
        return (code == expected or is_alien) and _is_copy(answer, copied, site)


@dataclass(frozen=True)
class Convert:
    """Writes a step into a root of its own, as holdfast lays it out or another."""

    step: int
    to: str

    def run(self, site: Site) -> list[Any]:
        site.settle()
        if site.has_shares:
            return [None, None]
        target = site.folder / "converted"
        shutil.rmtree(target, ignore_errors=True)
        words = ["--step", self.step, "--to", self.to]
        code = command("convert", site.url, target, *words)
        if code != WHOLE or self.to != "holdfast":
            return [code, None]
        items = dict.fromkeys(items_of(site.settings, 0, 0))
        return [code, attempted(partial(load, target, items=items, types=(Pair,)))]

    def judge(self, world: World, site: Site, found: list[Any]) -> Iterator[World]:
        code, answer = found
        for now in world.ended():
            saved = now.steps.get(self.step)
            if code is None or self._fits(saved, code, answer, site):
                yield now

    def _fits(self, saved: Saved | None, code: int, answer: Any, site: Site) -> bool:
        if saved is None:
            return code == NOTHING_THERE
        if saved.harmed:
            return code == DAMAGED
        if code != WHOLE:
            # Other layouts have no place for some items.
            return self.to != "holdfast" or _is_damaged(saved) is None
        return self.to != "holdfast" or not _difference(site, saved.number, answer)


@dataclass(frozen=True)
class CopyOver:
    """Copies a step and then another to one folder, both laid out as safetensors: there no checksum
    tells files of equal size apart. What the last command says is whole, is of the other step.
    """

    step: int
    other: int

    def run(self, site: Site) -> list[Any]:
        site.settle()
        if site.has_shares:
            return [False]
        folders = [site.folder / "one", site.folder / "other"]
        target = site.folder / "copy"
        for folder in (*folders, target):
            shutil.rmtree(folder, ignore_errors=True)
        for folder, step in zip(folders, (self.step, self.other), strict=True):
            words = ["--step", step, "--to", "safetensors"]
            if command("convert", site.url, folder, *words) != WHOLE:
                return [False]
        code = WHOLE
        for folder in folders:
            code = command("cp", folder, target)
        return [code == WHOLE and _contents(target) != _contents(folders[1])]

    def judge(self, world: World, site: Site, found: list[Any]) -> Iterator[World]:
        if not found[0]:
            yield from world.ended()


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


# --- A second writer


@dataclass(frozen=True)
class SaveTwice:
    """Two writers save contents to one path in Orbax's layout, at once. One of them does, and its
    numbers lie there.
    """

    numbers: tuple[int, int]

    def run(self, site: Site) -> list[Any]:
        target = site.folder / "orbax"
        shutil.rmtree(target, ignore_errors=True)
        meeting = threading.Barrier(2)

        def write(number: int) -> None:
            tree = {f"leaf {place}": np.full(100, number) for place in range(8)}
            meeting.wait()
            save(target, tree, layout="orbax", group=Solo())

        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(attempted, partial(write, number)) for number in self.numbers]
            told = [future.result() for future in futures]
        there = attempted(lambda: load(target))
        return [[each.kind if isinstance(each, Raised) else each for each in told], there]

    def judge(self, world: World, site: Site, found: list[Any]) -> Iterator[World]:
        told, there = found
        saved = [number for number, each in zip(self.numbers, told, strict=True) if each is None]
        if isinstance(there, Raised) or len(saved) != 1 or "StepExists" not in told:
            return
        if all((leaf == saved[0]).all() for leaf in there.values()):
            yield from world.ended()


# --- A second manager


@dataclass(frozen=True)
class Rival:
    """Another manager, of another process, saves content `number` as a step, and goes. It may have
    restored a step before, `back`.
    """

    step: int
    number: int
    overwrite: bool = False
    back: int | None = None

    def run(self, site: Site) -> list[Any]:
        site.settle()
        if site.settings.local is not None or site.has_shares:
            return [None]
        options = Options(
            per_process=None,
            step_format=site.settings.step_format,
            out_of_order=site.settings.out_of_order,
        )

        def save_alone() -> bool:
            with CheckpointManager(site.url, options=options) as manager:
                if self.back is not None:
                    items = dict.fromkeys(items_of(site.settings, 0, 0))
                    manager.restore(self.back, items=items, types=(Pair,))
                manager.save(
                    self.step,
                    items=items_of(site.settings, self.number, 0),
                    metadata={"number": self.number},
                    dtype=CASTS[site.settings.dtype],
                    overwrite=self.overwrite,
                )
            return True

        found = [attempted(save_alone)]
        site.each(lambda rank, manager: manager.reload())
        return found

    def judge(self, world: World, site: Site, found: list[Any]) -> Iterator[World]:
        answer = alike(found)
        now_s = site.clock.true_s
        saved = Saved(self.number, now_s, clock=site.times_set, has_metrics=False)
        for now in world.ended():
            if answer is None:
                yield now
                continue
            if self.back is not None and not self._restores(now):
                # Nothing was saved; which error it is, Restore finds out.
                if answer is not True:
                    yield now
                continue
            restored = frozenset() if self.back is None else frozenset({self.back})
            other = replace(now, restored=restored, own=frozenset(), passed=frozenset())
            other = replace(other, settings=replace(now.settings, keep_policy="all"))
            for place in other.places(self.step, is_local=False, overwrite=self.overwrite):
                if isinstance(place, str) and answer == place:
                    yield now
                elif not isinstance(place, str) and answer is True:
                    yield from self._saved(now, other, place, saved)

    def _saved(self, world: World, other: World, place: Place, saved: Saved) -> Iterator[World]:
        begun = Begun(self.step, saved, is_local=False, place=place)
        for after in other.committed(begun):
            yield replace(world, steps=after.steps, left=after.left, bases=after.bases)

    def _restores(self, world: World) -> bool:
        saved = world.steps.get(self.back or 0)
        return saved is not None and not saved.harmed and not saved.doubtful


# --- Those who wait for steps


@dataclass(frozen=True)
class Watch:
    """Asks, as an evaluator does that knows a step, for a newer one, and for all newer ones."""

    after: int | None

    def run(self, site: Site) -> list[Any]:
        site.settle()
        newest = attempted(lambda: wait_for_new_step(site.url, self.after, timeout_s=0))
        each = iterate_steps(
            site.url, after=self.after, timeout_s=0, hold_s=0, skip_to_newest=False
        )
        return [newest, attempted(lambda: list(each))]

    def judge(self, world: World, site: Site, found: list[Any]) -> Iterator[World]:
        newest, each = found
        for now in world.ended():
            for floor in self._floors(now):
                newer = [step for step in sorted(now.line) if floor is None or step > floor]
                if newest == max(newer, default=None) and each == newer:
                    yield now
                    break

    def _floors(self, world: World) -> set[int | None]:
        """Returns the steps above which there may be new ones: that which is known, or where it was
        left behind the base of what left it, which may have been left too.
        """
        if self.after is None or self.after in world.line or self.after not in world.bases:
            return {self.after}
        floors: set[int | None] = set()
        at = world.bases[self.after]
        while at not in floors:
            floors.add(at)
            at = min(at, world.bases.get(at, at))
        return floors
