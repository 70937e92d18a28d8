"""A save that waits for other processes: the log says after a minute for whom, and its error too.

A call of `save` that only one process makes is the mistake that waits longest.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Self

from holdfast.coordination import BarrierTimeout
from holdfast.multihost import Group
from holdfast.multihost.group.late import AwaitedSave, who_is_late

from ..storage.threads import Latch, start_thread
from .save_protocol import SaveKey

_log = logging.getLogger(__name__)

LATE_S = 60.0
"""After so long the log says for whom a save waits."""

NOT_CALLED = "not called"
"""What is said of a process that has not begun the save."""


class LateWatch:
    """Watches over the wait for the reports of the others, from its entry to its exit.

    It asks nobody for a save whose stages are not reported.
    """

    def __init__(self, group: Group, key: SaveKey, awaited: AwaitedSave, *, asks: bool) -> None:
        self._group = group
        self._key = key
        self._awaited = awaited
        self._asks = asks and group.count > 1
        self._over = Latch()

    def __enter__(self) -> Self:
        if self._asks:
            # A thread of its own: the one that saves stands in the wait.
            with contextlib.suppress(RuntimeError):  # an interpreter that ends starts none
                start_thread(self._watch)
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()

    def _watch(self) -> None:
        if self._over.wait(LATE_S):
            return
        if late := self._who("late"):
            _log.warning("step %d waits: %s", self._key.step, late)

    def _who(self, when: str) -> str:
        return who_is_late(self._group, self._awaited, f"{self._key.save_id}/{when}")

    def explain(self, error: BarrierTimeout, timeout_s: float) -> str:
        """Returns why the wait was in vain, and what to do. Blocks for at most 20 s."""
        if not self._asks:
            return error.message
        late = self._who("over")
        if NOT_CALLED in late:
            return f"{late}; call save on every process, not on one alone"
        longer = f"raise save_timeout_s={timeout_s:g} if it needs longer"
        if late:
            return f"{late}; {longer}"
        missing = ", ".join(map(str, error.missing)) or "of unknown number"
        return (
            f"process {missing} did not report within {timeout_s:g} s: call save on every process,"
            f" or {longer}"
        )
