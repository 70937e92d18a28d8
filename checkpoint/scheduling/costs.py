"""What saves of one lane have cost, and how often the job has failed, as it is measured."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque

from holdfast.multihost.group.history import JobHistory, job_history

from ..policy import SaveCosts

USUAL_OF = 8  # the newest saves, of whose costs the median counts
ASK_S = 60.0  # between two questions how often the job has failed


class CostMeter:
    """Measures saves for a policy that goes by their costs. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocked_s: deque[float] = deque(maxlen=USUAL_OF)
        self._save_s: deque[float] = deque(maxlen=USUAL_OF)
        self._asked_s = -ASK_S
        self._history = JobHistory(0, 0.0)
        self._heard_s = time.monotonic()

    def note_blocked(self, seconds: float) -> None:
        """Notes how long a call of `save` has held the program."""
        with self._lock:
            self._blocked_s.append(seconds)

    def note_saved(self, seconds: float) -> None:
        """Notes how long a save took until it was there. Asks the coordinator, at times, how often
        the job has failed: blocks then.
        """
        now = time.monotonic()
        with self._lock:
            self._save_s.append(seconds)
            if now - self._asked_s < ASK_S:
                return
            self._asked_s = now
        history = job_history()
        with self._lock:
            if history is not None:
                self._history = history
                self._heard_s = now

    @property
    def costs(self) -> SaveCosts:
        """What is known now."""
        now = time.monotonic()
        with self._lock:
            history = self._history
            run_s = history.run_s + now - self._heard_s
            if not self._save_s or not self._blocked_s:
                return SaveCosts(failures=history.failures, run_s=run_s)
            return SaveCosts(
                blocked_s=statistics.median(self._blocked_s),
                save_s=statistics.median(self._save_s),
                failures=history.failures,
                run_s=run_s,
            )
