"""How far a job was over time: a bounded number of points, however long it runs. Pure."""

from __future__ import annotations

from typing import NamedTuple

from holdfast.proto import session_pb2

from .summary import fastest


class Sample(NamedTuple):
    """How far a job was at one time; -1 where that is not known."""

    unix_s: float
    step: int
    steps_per_second: float
    saved_step: int


def sample(status: session_pb2.StatusResponse, unix_s: float) -> Sample:
    """Returns the furthest step, the pace and the last saved step of a job."""
    steps = [task.progress.step for task in status.tasks if task.progress.HasField("step")]
    saved = [
        task.progress.saved_step for task in status.tasks if task.progress.HasField("saved_step")
    ]
    pace = round(fastest(status), 3)
    return Sample(round(unix_s, 1), max(steps, default=-1), pace, max(saved, default=-1))


class StepCurve:
    """At most `most` samples, and the last one: when they are more, every second one goes, and
    later ones are as far apart.
    """

    def __init__(self, most: int = 900) -> None:
        self._most = most
        self._distance_s = 0.0
        self._kept: list[Sample] = []
        self._last: Sample | None = None

    def add(self, new: Sample) -> None:
        """Adds a sample, later than all before it."""
        self._last = new
        if self._kept and new.unix_s - self._kept[-1].unix_s < self._distance_s:
            return
        self._kept.append(new)
        if len(self._kept) > self._most:
            length_s = new.unix_s - self._kept[0].unix_s
            self._kept = self._kept[::2]
            self._distance_s = length_s / self._most * 2

    def samples(self) -> list[Sample]:
        """Returns the samples, the earliest first."""
        return [
            *self._kept,
            *([self._last] if self._last is not None and self._last != self._kept[-1] else []),
        ]
