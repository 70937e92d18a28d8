"""A worker that does jobs in the background: deletions and sweeps."""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

from ..storage.threads import Latch, start_thread

_log = logging.getLogger(__name__)
KEPT_FAILURES = 16  # jobs of a worker; what more there is the next manager sweeps


class _Job(NamedTuple):
    what: str
    do: Callable[[], object]


class BackgroundWorker:
    """Does jobs one after the other, in a daemon thread that ends with the last. Thread-safe.

    A job that fails is logged, not raised, and tried once more when the next job comes.
    """

    def __init__(self) -> None:
        self._jobs: collections.deque[_Job] = collections.deque()
        self._lock = threading.Lock()
        self._failed: list[_Job] = []
        self._running = False
        self._idle: Latch | None = None  # None: no job was put since the last ended

    def put(self, what: str, job: Callable[[], object]) -> None:
        """Adds a job; `what` names it in the log."""
        with self._lock:
            self._idle = self._idle or Latch()
            self._jobs.extend([*self._failed, _Job(what, job)])
            self._failed.clear()
        self._start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Blocks until no job is left; returns whether that is so."""
        self._start()
        idle = self._idle
        return idle is None or idle.wait(timeout_s)

    def drop(self) -> None:
        """Forgets the jobs that have not begun: the next manager sweeps."""
        with self._lock:
            self._jobs.clear()

    def _start(self) -> None:
        """Starts the thread where there is none for the jobs; after an interrupt of `put` too."""
        if self._jobs and not self._running:
            try:
                start_thread(self._run_on_thread)
            except RuntimeError:  # an interpreter that ends starts none
                self._run()

    def _run_on_thread(self) -> None:
        threading.current_thread().name = "holdfast-background"
        self._run()

    def _run(self) -> None:
        with self._lock:
            if self._running:
                return
            self._running = True
        while (job := self._take()) is not None:
            try:
                job.do()
            except Exception as error:
                _log.warning("%s failed, it is tried again later: %s", job.what, error)
                with self._lock:
                    self._failed = [*self._failed, job][-KEPT_FAILURES:]

    def _take(self) -> _Job | None:
        with self._lock:
            if self._jobs:
                return self._jobs.popleft()
            self._running = False
            if self._idle is not None:
                self._idle.set()
                self._idle = None
            return None
