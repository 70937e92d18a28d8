"""The live view of `holdfast run` on a terminal: one row a process under the lines that scroll
by.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from rich.live import Live
from rich.table import Table

from holdfast.multihost import Preempted

from .supervisor.job import PREEMPTED, Decision, Job, State
from .workers.coordinator import ProcessProgress
from .workers.output import ConsoleOutput, Output

_WINDOW_S = 10.0  # over which steps per second are counted


class LiveView(ConsoleOutput):
    """Prints lines as ConsoleOutput does, above a table of the processes: state, step, steps per
    second, last save. A context manager.

    `progress` returns what the processes last reported. All methods may be called from any thread.
    """

    def __init__(
        self,
        stdout: TextIO,
        stderr: TextIO,
        num_processes: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(stdout, stderr, num_processes)
        self.progress: Callable[[], tuple[ProcessProgress, ...]] = lambda: ()
        self._clock = clock
        self._job: Job | None = None
        self._seen: dict[int, deque[tuple[float, int]]] = {}
        self._saved_at: tuple[int, float] = (-1, 0.0)
        self._live = Live(
            console=self.console, get_renderable=self.table, refresh_per_second=4, transient=True
        )

    def observe(self, before: Job, decision: Decision) -> None:
        """Records a decision of the supervisor."""
        if decision.job.attempt != before.attempt:
            self._seen = {}
        self._job = decision.job

    def table(self) -> Table:
        """Returns the table as of now."""
        job, now = self._job, self._clock()
        table = Table(title=self._title(job, now), title_justify="left", box=None, pad_edge=False)
        for column in ("process", "state", "step", "steps/s", "saved"):
            table.add_column(column, justify="left" if column == "state" else "right")
        reports = {report.process: report for report in self.progress()}
        for process in range(job.num_processes if job else 0):
            assert job is not None
            report = reports.get(process)
            step, saved = (report.step, report.saved_step) if report else (-1, -1)
            rate = self._rate(process, step, now)
            table.add_row(
                str(process),
                _state(job, process),
                _number(step),
                f"{rate:.1f}" if rate else "-",
                _number(saved),
            )
        return table

    def _title(self, job: Job | None, now: float) -> str:
        if job is None:
            return ""
        if job.saved_step != self._saved_at[0]:
            self._saved_at = job.saved_step, now
        saved = (
            f", step {job.saved_step} saved {now - self._saved_at[1]:.0f} s ago"
            if job.saved_step >= 0
            else ""
        )
        return f"{job.job_id}: {job.state}, attempt {job.attempt}{saved}"

    def _rate(self, process: int, step: int, now: float) -> float:
        seen = self._seen.setdefault(process, deque())
        if step >= 0 and (not seen or seen[-1][1] != step):
            seen.append((now, step))
        while len(seen) > 2 and now - seen[0][0] > _WINDOW_S:
            seen.popleft()
        (first_s, first), (_, last) = (seen[0], seen[-1]) if seen else ((now, 0), (now, 0))
        return (last - first) / (now - first_s) if now > first_s else 0.0

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()


def _state(job: Job, process: int) -> str:
    if process in job.exit_codes:
        code = job.exit_codes[process]
        return (
            "done"
            if code == 0
            else (
                "preempted"
                if code == PREEMPTED
                else f"signal {-code}"
                if code < 0
                else f"exit {code}"
            )
        )
    return (
        "saving"
        if job.state in (State.PREEMPTING, State.RESIZING)
        else "ending"
        if job.state is State.RESTARTING
        else "running"
    )


def _number(value: int) -> str:
    return str(value) if value >= 0 else "-"


def reporter(output: Output, *, first_attempt: int) -> Callable[[Job, Decision], None]:
    """Returns a function that writes each change of state that is not the ordinary course to
    `output`, with its reason.
    """

    def report(before: Job, decision: Decision) -> None:
        if isinstance(output, LiveView):
            output.observe(before, decision)
        ordinary = (
            {State.SCHEDULING, State.RUNNING, State.FINISHED}
            if decision.job.attempt <= first_attempt
            else set()
        )
        after = decision.job
        if after.state is not before.state and after.state not in ordinary:
            what = (
                "preempted" if after.final and isinstance(after.error, Preempted) else after.state
            )
            output.say(f"{what}: {decision.reason}")

    return report
