"""The job that this process belongs to, as far as it knows: one value, and the only global.

A part of the job (ids, health, vitals, preemption, ...) stands in a wing above. It is put here by
its own module and asked for by its class, so that nothing here has to know it.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

from .spec import ProcessSpec

P = TypeVar("P")


class Job:
    """What this process has of its job: `initialize()`'s client and spec, and one part of a class.

    Looking a part up takes no lock. Whoever makes one that must not be made twice holds `lock`.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.client: Any = None
        self.spec: ProcessSpec | None = None
        self._parts: dict[type, Any] = {}

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
