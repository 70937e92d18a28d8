"""The live view of `holdfast run` on a terminal: a row a process, below the processes' lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self, TextIO

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from holdfast.coordination.diagnosis.summary import show_rate
from holdfast.proto import session_pb2

from .supervisor.job import DONE, PREEMPTED, Job, State
from .workers.output import ConsoleOutput


class LiveView(ConsoleOutput):
    """Prints lines as ConsoleOutput does, above a table of the processes. A context manager.

    The table has state, step, steps per second and the last save. All methods may be called from
    any thread.
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
        self._tasks: Callable[[], Sequence[session_pb2.TaskStatus]] = lambda: ()
        self._clock = clock
        self._job: Job | None = None
        self._saved_at: tuple[int, float] = (-1, 0.0)
        self._live = _Frames(self)

    def follow(self, tasks: Callable[[], Sequence[session_pb2.TaskStatus]]) -> None:
        """Takes the function that returns the processes as they were told last."""
        self._tasks = tasks

    def observe(self, job: Job) -> None:
        """Takes the job after each decision of the supervisor."""
        self._job = job

    def frame(self) -> Group:
        """Returns the job's line and the table, as of now."""
        now = self._clock()
        # A title of the table would be broken at the table's width.
        return Group(Text(self._title(self._job, now), style="italic"), self._table(self._job))

    def _table(self, job: Job | None) -> Table:
        table = Table(box=None, pad_edge=False)
        for column in ("process", "state", "step", "steps/s", "saved"):
            table.add_column(column, justify="left" if column == "state" else "right")
        if job is not None:
            tasks = {task.task_id: task for task in self._tasks()}
            for process in range(job.num_processes):
                table.add_row(str(process), _state(job, process), *_steps(tasks.get(process)))
        return table

    def _title(self, job: Job | None, now: float) -> str:
        if job is None:
            return ""
        if job.saved_step != self._saved_at[0]:
            self._saved_at = (job.saved_step, now)
        saved = ""
        if job.saved_step >= 0:
            saved = f", step {job.saved_step} saved {now - self._saved_at[1]:.0f} s ago"
        return f"{job.job_id}: {job.state}, attempt {job.attempt}{saved}"

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
        self.close()


class _Frames(Live):
    """Draws the table, and leaves frames out where the terminal is stopped."""

    def __init__(self, view: LiveView) -> None:
        self._view = view
        super().__init__(
            console=view.console, get_renderable=view.frame, refresh_per_second=4, transient=True
        )

    def refresh(self) -> None:
        if not self._view.stalled:
            super().refresh()


def _steps(task: session_pb2.TaskStatus | None) -> tuple[str, str, str]:
    """Returns the step of a process, its rate, and the step that it has saved."""
    if task is None or not task.progress.HasField("step"):
        return "-", "-", "-"
    progress = task.progress
    saved = str(progress.saved_step) if progress.HasField("saved_step") else "-"
    return str(progress.step), show_rate(task.steps_per_second), saved


def _state(job: Job, process: int) -> str:
    code = job.exit_codes.get(process)
    if code is not None:
        return _ending(code)
    if job.state is State.PREEMPTING:
        return "saving"
    return "ending" if job.state is State.RESTARTING else "running"


def _ending(code: int) -> str:
    if code < 0:
        return f"signal {-code}"
    return {DONE: "done", PREEMPTED: "preempted"}.get(code, f"exit {code}")
