"""What engines share that replace a process: the others outlive the attempt, and join the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from holdfast.proto import session_pb2

from ..supervisor.engine import start_failed
from ..supervisor.job import Event, Exited, Progressed, Rejoin, RestartPolicy, renumbered
from ..workers.output import Output
from .base import NOT_STARTED, BaseEngine

FOR_EVER_S = 1e8  # where a limit has to be a number
MOST_LOOKS = 4
"""At so many processes that are late: each takes up to 6 s."""


class AttemptCoordinator(Protocol):
    """The coordinator of one attempt, wherever it runs."""

    @property
    def address(self) -> str:
        """HOST:PORT, or unix:PATH."""

    def end_attempt(self, following: session_pb2.NextAttempt) -> None:
        """Says to those that outlive its attempt where the next one is; takes at most 1 s."""

    def close(self) -> None:
        """Ends it."""


class ReplacingEngine(BaseEngine):
    """Keeps the processes that outlive an attempt, and its coordinator until all of them are in the
    next one. An engine adds where coordinators and processes run.
    """

    replaces = True

    def __init__(self, output: Output, policy: RestartPolicy) -> None:
        super().__init__(output, policy)
        self._num_processes = 0  # of the attempt
        self._lives: dict[int, int] = {}  # the attempt that each process was started for
        self._gone: dict[int, int] = {}  # exit codes of the latest lives that have ended
        self._pids: dict[int, int] = {}  # of the processes of the attempt before
        self._coordinator: AttemptCoordinator | None = None
        # Of attempts that processes outlive, until these are in the one that runs.
        self._older: list[AttemptCoordinator] = []

    @property
    def _staying(self) -> frozenset[int]:
        """The processes of this attempt that have outlived one."""
        lives = self._lives.items()
        outlived = frozenset(process for process, life in lives if life < self._attempt)
        return outlived.intersection(range(self._num_processes))

    def _leave_attempt(self, numbers_before: Sequence[int] = ()) -> None:
        """Keeps the coordinator of the attempt that is over for those that stay, and knows them by
        their new numbers.
        """
        assert self._coordinator is not None
        self._older.append(self._coordinator)
        self._close_watch()
        self._pids |= {task.task_id: task.pid for task in self._status.tasks if task.pid}
        if numbers_before:
            self._lives = renumbered(self._lives, numbers_before)
            self._gone = renumbered(self._gone, numbers_before)
            self._pids = renumbered(self._pids, numbers_before)

    def _hand_over(self, action: Rejoin) -> None:
        """Says to those that stay where the attempt is that has begun: its watch is open."""
        assert self._coordinator is not None
        for process in sorted(self._staying & self._gone.keys()):  # it ended beside this
            assert self._watch is not None
            self._watch.report_exit(process, self._gone[process])
        following = session_pb2.NextAttempt(
            attempt=action.attempt,
            coordinator=self._coordinator.address,
            staying=sorted(map(action.number_before, action.staying - action.going)),
            saving=sorted(map(action.number_before, action.saving)),
            why=f"attempt {action.attempt - 1} is over: {action.why}",
            num_processes=action.num_processes,
            startup_timeout_s=min(self._policy.startup_timeout_s, FOR_EVER_S),
            places={
                action.number_before(process): place
                for process, place in self._places(action.num_processes).items()
            },
        )
        # One that is on its way to an attempt between finds out there, and has to where its number
        # was another one before that.
        numbers = action.numbers_before
        is_same = numbers == tuple(range(len(numbers)))
        for older in self._older if is_same else self._older[-1:]:
            older.end_attempt(following)

    def _places(self, num_processes: int) -> Mapping[int, session_pb2.Place]:
        """Returns who those are that stay, where that may change."""
        return {}

    def _dismiss(self) -> None:
        if self._coordinator is not None:
            self._coordinator.end_attempt(session_pb2.NextAttempt(why="no process stays"))

    def _begin_lives(self, processes: frozenset[int]) -> None:
        """Counts processes as started for this attempt: from here on, earlier ends are no news."""
        self._lives |= dict.fromkeys(processes, self._attempt)
        for process in processes:
            self._gone.pop(process, None)

    def _start_ordered(self) -> None:
        """Starts the processes of the attempt that are still to start."""
        raise NotImplementedError

    def _start_later(self, attempt: int) -> list[Event]:
        """Starts them, once there is room, unless the attempt is over by then."""
        if attempt != self._attempt:
            return []
        try:
            self._start_ordered()
        except Exception as error:
            self._call_off(None, NOT_STARTED)
            return [start_failed(attempt, error)]
        return []

    def _say_late(self, attempt: int, process: int, place: str) -> None:
        """Says where a process is that was to be in an attempt, and is replaced."""
        where = place or "code that cannot be seen"
        text = f"process {process} did not come to attempt {attempt}: it is in {where}"
        self._output.say(text)
        self.note(text)

    def _report_exit(self, event: Exited) -> None:
        if self._lives.get(event.process) != event.life:
            return  # it has been replaced
        self._gone[event.process] = event.code
        super()._report_exit(event)

    def _close_older(self) -> None:
        while self._older:
            self._older.pop().close()

    def _close_coordinators(self) -> None:
        self._close_watch()
        self._close_older()
        if self._coordinator is not None:
            self._coordinator.close()
            self._coordinator = None

    def events(self, timeout_s: float | None) -> Sequence[Event]:
        """Returns the next event, at the latest after `timeout_s`."""
        seen = super().events(timeout_s)
        if self._older and any(map(self._all_are_back, seen)):
            self._close_older()
        return seen

    def _all_are_back(self, event: Event) -> bool:
        if not isinstance(event, Progressed) or event.attempt != self._attempt:
            return False
        return self._staying <= event.saves.keys()
