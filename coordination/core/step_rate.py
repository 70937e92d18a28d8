"""How fast the steps of one process follow each other, and since when they do not. Pure."""

from __future__ import annotations

from collections import deque

WINDOW_S = 10.0
"""Over which steps per second are counted."""

_LEAST_SPAN_S = 5.0  # of the reports that a usual rate is taken from
_SPACING_S = 0.25  # between reports that are kept: a loop may report a thousand steps a second


class StepRate:
    """The steps that one process has reported.

    `usual` is the fastest rate of a window so far, in steps per second; 0 until there is one.
    """

    __slots__ = ("_points", "moved_at", "usual")

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque()
        self.moved_at: float | None = None  # when the step last changed
        self.usual = 0.0

    def note(self, step: int, now: float) -> None:
        """Notes a report. A step below the last one begins anew: the process went back."""
        points = self._points
        if points and step == points[-1][1]:
            return
        if points and step < points[-1][1]:
            points.clear()
        self.moved_at = now
        if len(points) > 1 and now - points[-2][0] < _SPACING_S:
            points[-1] = (now, step)
        else:
            points.append((now, step))
        while len(points) > 2 and now - points[1][0] >= WINDOW_S:
            points.popleft()
        first_at, first = points[0]
        if now - first_at >= _LEAST_SPAN_S:
            self.usual = max(self.usual, (step - first) / (now - first_at))

    def per_second(self, now: float) -> float:
        """Returns the steps per second of the last reports, down to 0 while none comes."""
        if len(self._points) < 2:
            return 0.0
        first_at, first = self._points[0]
        last_at, last = self._points[-1]
        silent_s = now - last_at
        spacing_s = (last_at - first_at) / (len(self._points) - 1)
        end = last_at if silent_s <= spacing_s else now
        return (last - first) / max(end - first_at, _SPACING_S)
