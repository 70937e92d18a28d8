"""Jobs of `restartable.py`, whose processes outlive attempts: who is to die where, and what they
noted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple


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
        lines = (self.folder / "log").read_text().splitlines()
        return [note for note in map(json.loads, lines) if note["what"] == what]

    def results(self) -> set[float]:
        """Returns what training has come to."""
        return {note["result"] for note in self.notes("ended")}

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
