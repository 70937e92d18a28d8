"""An operation whose store fails: nothing wrong may come of it, and nothing may be lost."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from holdfast.coordination import HoldfastError

from .faults import FAULTS
from .operations import Broken, Delete, List, Look, Operation, Restore, Save, alike
from .policies import Saved
from .site import Raised, Site
from .world import Begun, Place, World

# What says nothing about a step, so that none may be passed over for it.
ENOUGH_FILES = 30  # that a process alone may open besides: no call needs as many
NO_DAMAGE = {"ENOSPC", "EMFILE", "memory", "ENOENT", "ESTALE"}


@contextlib.contextmanager
def few_descriptors(count: int) -> Iterator[None]:
    """Lets this process open so many more files, and no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(map(int, os.listdir("/proc/self/fd"))) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    # What this process was started with may leave numbers free below the highest.
    held = [*iter(one_more, None)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most + count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for file in held:
            os.close(file)


def one_more() -> int | None:
    """Returns one more descriptor of this process; None where it may have no more."""
    with contextlib.suppress(OSError):
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    return None


@dataclass(frozen=True)
class Faulty:
    """Does an operation while calls of the store fail: of a `verb`, `times` of them in a row.

    With the verb "open" a process alone may open `place` more files, and no more.
    """

    inner: Operation
    verb: str
    error: str
    place: int
    times: int = 1
    after: bool = False

    def run(self, site: Site) -> list[Any]:
        site.settle()
        # What a process in a group runs into may end its neighbours' threads too.
        if self.verb == "open" and site.settings.processes == 1:
            with few_descriptors(self.place):
                found = self.inner.run(site)
            hits = int(self.place < ENOUGH_FILES)
            site.has_failed |= bool(hits)
            site.is_whole &= not hits
            return [hits, *found]
        FAULTS.arm(self.verb, self.error, place=self.place, times=self.times, after=self.after)
        try:
            found = self.inner.run(site)
        finally:
            hits = FAULTS.hits
            FAULTS.disarm()
        if hits:
            site.has_failed = True
            # A link is one way of two: without it the bytes are written.
            site.is_whole = site.is_whole and self.verb == "link"
        return [hits, *found]

    def judge(self, world: World, site: Site, found: list[Any]) -> Iterator[World]:
        hits, *answers = found
        if not hits:
            for ended in world.ended():
                yield from self.inner.judge(ended, site, answers)
            return
        for answer in answers:
            own = (HoldfastError, MemoryError) if self.error == "memory" else HoldfastError
            if isinstance(answer, Raised) and not isinstance(answer.error, own):
                raise Broken(f"this is no error of holdfast's: {answer!r}")
        for ended in world.ended():
            yield from self._judged(ended, site, answers)

    def _judged(self, world: World, site: Site, answers: list[Any]) -> Iterator[World]:
        failed = [answer for answer in answers if isinstance(answer, Raised)]
        match self.inner:
            case Save():
                yield from self._save_judged(self.inner, world, site, answers)
            case Delete() if failed:
                alike(answers)
                yield world
                if self.inner.step in world.all_steps:
                    yield from world.without(self.inner.step)
            case Delete() if self.inner.step not in world.all_steps and alike(answers) is None:
                # What cannot be looked at may be there, and is deleted.
                yield world
            case Restore():
                yield from self._restore_judged(self.inner, world, site, answers)
            case List() | Look() if failed:
                yield world
            case _:
                yield from self.inner.judge(world, site, answers)

    def _save_judged(
        self, inner: Save, world: World, site: Site, answers: list[Any]
    ) -> Iterator[World]:
        failed = [answer for answer in answers if isinstance(answer, Raised)]
        if not failed and not answers[0]:
            yield from inner.judge(world, site, answers)
            return
        for now in world.seen():
            for place in now.places(inner.step, is_local=False, overwrite=inner.overwrite):
                yield from self._placed(inner, now, place, site, failed=failed)
            if not failed and inner.is_due(now, site, is_local=True) is not False:
                yield from self._local(inner, now, site)

    def _local(self, inner: Save, world: World, site: Site) -> Iterator[World]:
        saved = Saved(inner.number, site.clock.true_s, clock=site.times_set)
        for place in world.places(inner.step, is_local=True, overwrite=inner.overwrite):
            if isinstance(place, Place):
                begun = Begun(inner.step, saved, is_local=True, place=place)
                yield from world.begins(inner.step, place).committed(begun)

    def _placed(
        self, inner: Save, world: World, place: Place | str, site: Site, *, failed: list[Raised]
    ) -> Iterator[World]:
        started = world.started(inner.step, site.clock.true_s)
        if isinstance(place, str):
            if any(answer.kind == place for answer in failed):
                yield from (world, started)
            return
        # Of the steps that the keep policy lets go some may stay: they are tried again.
        saved = Saved(inner.number, site.clock.true_s, clock=site.times_set)
        begun = Begun(inner.step, saved, is_local=False, place=place)
        after = started.begins(inner.step, place)
        if not failed:
            yield from after.committed(begun, keeps_all=True)
            return
        if any(answer.kind == "StepExists" for answer in failed):
            # Of a step that cannot be looked at, nothing says that it may be written.
            yield world
            return
        marked = after.branched(inner.step, place)
        for known in (world, started, after):
            yield replace(known, sure=marked.sure)
        if place.is_branch:
            # What it would have left is marked, or not.
            yield replace(marked, local=after.local)
        if any(answer.kind == "CommitUnknown" for answer in failed):
            for there in marked.committed(begun, keeps_all=True):
                # Its branch begins with the next save that is there.
                unheard = marked.left - world.left
                unlisted = marked.unlisted | {inner.step}
                yield replace(there, restored=marked.restored, unheard=unheard, unlisted=unlisted)

    def _restore_judged(
        self, inner: Restore, world: World, site: Site, answers: list[Any]
    ) -> Iterator[World]:
        yield from inner.judge(world, site, answers)
        if all(isinstance(answer, Raised) for answer in answers):
            yield world
            return
        if self.error in NO_DAMAGE or not site.settings.fallback:
            return
        # What cannot be read for good is passed over as what is damaged.
        doubtful = {
            step: replace(saved, doubtful=saved.doubtful | {"state"})
            for step, saved in world.steps.items()
        }
        for told in inner.judge(replace(world, steps=doubtful), site, answers):
            yield replace(told, steps=world.steps)
