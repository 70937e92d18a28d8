"""How fast the steps of one process follow each other, and since when they do not. Pure."""

from __future__ import annotations

from collections import deque

from ..limits import RATE_WINDOW_S

_LEAST_STEPS = 4  # that tell the pace of a loop which stands before its first window is over
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
        while len(points) > 2 and now - points[1][0] >= RATE_WINDOW_S:
            points.popleft()
        first_at, first = points[0]
        if now - first_at >= _LEAST_SPAN_S:
            self.usual = max(self.usual, (step - first) / (now - first_at))

    def per_second(self, now: float) -> float:
        """Returns the steps per second of the last ten seconds, 0 where none came in them.

        Of steps that take longer, those of the time of three.
        """
        if len(self._points) < 2:
            return 0.0
        first_at, _ = self._points[0]
        last_at, last = self._points[-1]
        spacing_s = (last_at - first_at) / (len(self._points) - 1)
        # The next report is not due yet: the time since the last one says nothing.
        end = last_at if now - last_at <= spacing_s else now
        begin = max(first_at, end - max(RATE_WINDOW_S, 3 * spacing_s))
        if begin >= last_at:
            return 0.0
        return (last - self._step_at(begin)) / max(end - begin, _SPACING_S)

    def usual_per_second(self, now: float) -> float:
        """Returns the fastest rate of a window so far; of a loop that stands before there was one,
        the mean of its steps. 0 where neither is known.
        """
        if self.usual or not self._points or now - self._points[-1][0] <= RATE_WINDOW_S:
            return self.usual
        first_at, first = self._points[0]
        last_at, last = self._points[-1]
        if last - first < _LEAST_STEPS:
            return 0.0
        return (last - first) / max(last_at - first_at, _SPACING_S)

    def _step_at(self, at: float) -> float:
        """Returns how far the process was at a time after its first report."""
        before = self._points[0]
        after = self._points[-1]
        for point in self._points:
            if point[0] > at:
                after = point
                break
            before = point
        if before is after:
            return before[1]
        share = (at - before[0]) / (after[0] - before[0])
        return before[1] + share * (after[1] - before[1])
