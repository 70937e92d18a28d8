"""Jobs of `restartable.py`, whose processes outlive attempts: who is to die where, and what they
noted.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.support.running_logs import whole_lines


class Death(NamedTuple):
    """Where a process is to die: "join", "restore", "step" or "save", at a step or later."""

    process: int
    where: str
    step: int = 0


class Restartable:
    """A job of `restartable.py` in a folder, and what its processes noted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def order(self, *groups: Sequence[Death]) -> None:
        """Has processes die; those of a group at once, after those of the groups before."""
        for number, deaths in enumerate(groups):
            for process, where, step in deaths:
                (self.folder / f"kill-{number:03}-{process}-{where}-{step}").touch()

    def notes(self, what: str) -> list[dict[str, Any]]:
        """Returns the lines of one kind."""
        lines = map(json.loads, whole_lines(self.folder / "log"))
        return [note for note in lines if note["what"] == what]

    def results(self) -> set[float]:
        """Returns what training has come to."""
        return {note["result"] for note in self.notes("ended")}

    def expect_of_any_size(self) -> float:
        """Returns what a job that is of any size comes to, at the last step that a file says."""
        weights = np.zeros(12, np.int32)
        for _ in range(int((self.folder / "last").read_text())):
            weights = 3 * weights + np.sum(weights, dtype=np.int32) + weights[::-1] + np.int32(1)
        return float(weights[0])

    def pids(self, attempt: int) -> dict[int, int]:
        """Returns the processes that have called `train` in an attempt, by their numbers."""
        notes = [note for note in self.notes("train") if note["attempt"] == attempt]
        return {note["process"]: note["pid"] for note in notes}

    def wait_for_attempt(self, attempt: int, count: int) -> None:
        """Waits until so many processes train in an attempt, and have saved a step there."""
        deadline = time.monotonic() + 120
        while not self._has_saved(attempt, count):
            assert time.monotonic() < deadline, f"attempt {attempt} does not train"
            time.sleep(0.05)

    def _has_saved(self, attempt: int, count: int) -> bool:
        if len(self.pids(attempt)) < count:
            return False
        return any(note["attempt"] == attempt for note in self.notes("saved"))

    def end_soon(self) -> None:
        """Has the job end after some more steps."""
        step = max(note["step"] for note in self.notes("saved"))
        told = self.folder / "last.new"
        told.write_text(str(step + 100))
        told.rename(self.folder / "last")

    def check_no_step_lost(self) -> None:
        """Sees that each attempt begins at the last step of the one before."""
        saved = [(note["attempt"], note["step"]) for note in self.notes("saved")]
        for note in self.notes("begins"):
            before = [step for attempt, step in saved if attempt < note["attempt"]]
            assert note["step"] == max(before, default=0), note

    def check_steps(self) -> None:
        """Sees that each attempt begins at the last step that was saved, or later."""
        saved = [(note["attempt"], note["step"]) for note in self.notes("saved")]
        for note in self.notes("begins"):
            before = [step for attempt, step in saved if attempt < note["attempt"]]
            assert note["step"] >= max(before, default=0)

    def lives(self) -> list[int]:
        """Returns how many processes there were of each number."""
        notes = self.notes("train")
        pids = [{note["pid"] for note in notes if note["process"] == each} for each in range(3)]
        return list(map(len, pids))
