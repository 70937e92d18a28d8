"""Work that nobody waits for: deleting packs, sweeping. One thread while there is any, none otherwise."""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable

KEPT_FAILURES = 16  # the next manager sweeps what more there is
_log = logging.getLogger(__name__)


class Cleaner:
    """Does jobs one after the other, in a daemon thread that ends with the last. Thread-safe.

    A job that fails is logged, not raised, and tried once more when the next job comes.
    """

    def __init__(self) -> None:
        self._jobs: collections.deque[tuple[str, Callable[[], object]]] = collections.deque()
        self._news = threading.Condition()
        self._failed: list[tuple[str, Callable[[], object]]] = []
        self._runs = False

    def put(self, what: str, job: Callable[[], object]) -> None:
        """Adds a job; `what` names it in the log."""
        with self._news:
            self._jobs.extend([*self._failed, (what, job)])
            self._failed.clear()
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name="holdfast-cleaner", daemon=True).start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Blocks until no job is left; returns whether that is so."""
        with self._news:
            return self._news.wait_for(lambda: not self._runs, timeout_s)

    def drop(self) -> None:
        """Forgets the jobs that have not begun: the next manager sweeps."""
        with self._news:
            self._jobs.clear()

    def _run(self) -> None:
        while True:
            with self._news:
                if not self._jobs:
                    self._runs = False
                    self._news.notify_all()
                    return
                what, job = self._jobs.popleft()
            try:
                job()
            except Exception as error:
                _log.warning("%s failed, it is tried again later: %s", what, error)
                with self._news:
                    self._failed = [*self._failed, (what, job)][-KEPT_FAILURES:]


__all__ = ["Cleaner"]
