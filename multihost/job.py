"""The job that this process belongs to, as far as it knows: one value.

What is kept beside it is the process's, whatever job it is in: its watchdogs, what is called before
it leaves a job, and what an attempt has left behind.

A part of the job (ids, health, vitals, preemption, ...) stands in a wing above. It is put here by
its own module and asked for by its class, so that nothing here has to know it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from .spec import ProcessSpec

P = TypeVar("P")


class AttemptOver(BaseException):
    """The attempt is over, and this process is to be in the next one.

    It is raised once, in `run_restartable`'s thread, and is not to be caught.
    """


class Job:
    """What this process has of its job: `initialize()`'s client and spec, and one part of a class.

    Looking a part up takes no lock. Whoever makes one that must not be made twice holds `lock`.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.client: Any = None
        self.spec: ProcessSpec | None = None
        self._why_over = ""  # a launcher has said it, to a thread of `run_restartable`
        self._restartable: int | None = None  # the thread that outlives the attempt
        self._parts: dict[type, Any] = {}
        self._at_end: list[weakref.WeakMethod[Callable[[], None]]] = []

    def join(self, client: Any, spec: ProcessSpec | None = None) -> None:
        """Makes `client` the one that this room's functions use, and `spec` this process's."""
        self.client = client
        self.spec = spec

    def leave(self) -> None:
        """Goes back to jax.distributed's own client."""
        self.client = None
        self.spec = None

    def put(self, value: Any) -> None:
        """Keeps a part, in the place of an earlier one of its class."""
        self._parts[type(value)] = value

    def get(self, kind: type[P]) -> P | None:
        """Returns the part of a class, None where there is none."""
        kept: P | None = self._parts.get(kind)
        return kept

    def ensure(self, kind: type[P]) -> P:
        """Returns the part of a class, and makes an empty one where there is none."""
        part = self._parts.get(kind)
        if part is None:
            # One step for the interpreter: of two threads that make one, both get the same.
            part = self._parts.setdefault(kind, kind())
        result: P = part
        return result

    def take(self, kind: type[P]) -> P | None:
        """Removes the part of a class and returns it."""
        removed: P | None = self._parts.pop(kind, None)
        return removed

    def close(self, kind: type[Any]) -> None:
        """Removes the part of a class and closes it, where there is one."""
        part = self.take(kind)
        if part is not None:
            part.close()

    def outlive(self) -> None:
        """Has the calling thread be the one that outlives the attempt."""
        self._restartable = threading.get_ident()

    def note_over(self, why: str) -> None:
        """Notes that a launcher has ended the attempt."""
        self._why_over = why

    def raise_if_over(self) -> None:
        """Raises AttemptOver, once and in the thread that outlives it, when the attempt is over."""
        if self._why_over and threading.get_ident() == self._restartable:
            why = self._why_over
            self._why_over = ""
            raise AttemptOver(why)

    def at_end(self, close: Callable[[], None]) -> None:
        """Has a method called when this process leaves the attempt, if its object is there."""
        self._at_end = [known for known in self._at_end if known() is not None]
        self._at_end.append(weakref.WeakMethod(close))

    def end(self) -> None:
        """Calls what `at_end` was given, the latest first."""
        for known in reversed(self._at_end):
            close = known()
            if close is not None:
                close()


class ClearedCache(Protocol):
    """A cache of `functools`, as far as it is needed here."""

    def cache_clear(self) -> None:
        """Empties the cache."""


_before_leaving: list[Callable[[float], None]] = []


def settle_before_leaving(settle: Callable[[float], None]) -> None:
    """Has a function called with the seconds that it has, before this process leaves its job in
    order: it waits for what still needs the others.
    """
    _before_leaving.append(settle)


def settle_all(timeout_s: float) -> None:
    """Calls what `settle_before_leaving` was given."""
    for settle in _before_leaving:
        settle(timeout_s)


C = TypeVar("C", bound=ClearedCache)
_of_backends: list[ClearedCache] = []


def clear_with_attempt(cache: C) -> C:
    """Has a module's cache emptied with the attempt's backends: it holds devices, meshes or
    programs, and the sockets of a backend stay open as long as anything holds one of its devices.
    """
    _of_backends.append(cache)
    return cache


def clear_caches() -> None:
    """Empties what `clear_with_attempt` was given."""
    for cache in _of_backends:
        cache.cache_clear()


_job = Job()


def current_job() -> Job:
    """Returns the job of this process; an empty one before it has joined."""
    return _job


def forget_job() -> Job:
    """Begins an empty job, as a forked child does, and returns the one that was."""
    global _job  # noqa: PLW0603 - the one global
    job = _job
    _job = Job()
    return job
