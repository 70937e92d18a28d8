"""What may happen to a job, beside what its processes do by themselves."""

from __future__ import annotations

from dataclasses import dataclass

from .engine import FakeEngine
from .gang import Gang, Worker


@dataclass(frozen=True)
class Happens:
    """Something in an attempt, so many seconds after it was launched."""

    attempt: int
    at_s: float

    @property
    def is_outside(self) -> bool:
        """Whether the seconds count from the asking for the attempt."""
        return False

    def happen(self, engine: FakeEngine) -> None:
        """Does it."""

    def fails(self, where: str) -> bool | None:
        """Returns whether a start fails for good there, None where it does not fail."""
        return None


@dataclass(frozen=True)
class Outside(Happens):
    """Something so many seconds after the attempt was asked for."""

    @property
    def is_outside(self) -> bool:
        return True


@dataclass(frozen=True)
class ToProcess(Happens):
    """Something that happens to a process, where it lives."""

    process: int

    def happen(self, engine: FakeEngine) -> None:
        found = engine.worker(self.process)
        if found is not None:
            self.hit(*found)

    def hit(self, gang: Gang, worker: Worker) -> None:
        """Does it to the process."""
        raise NotImplementedError


@dataclass(frozen=True)
class Exit(ToProcess):
    """A process ends at once."""

    code: int

    def hit(self, gang: Gang, worker: Worker) -> None:
        gang.end(worker, self.code)


@dataclass(frozen=True)
class Leave(ToProcess):
    """A process goes to its shutdown, and ends after it."""

    code: int
    shutdown_s: float

    def hit(self, gang: Gang, worker: Worker) -> None:
        gang.leave(worker, self.code, self.shutdown_s)


@dataclass(frozen=True)
class Hang(ToProcess):
    """A process does nothing any more, and minds no SIGTERM."""

    silent: bool = False

    def hit(self, gang: Gang, worker: Worker) -> None:
        gang.hang(worker, silent=self.silent)


@dataclass(frozen=True)
class React(ToProcess):
    """From now on a process ends so long after SIGTERM with a code, or minds none (None)."""

    code: int | None
    after_s: float = 0.0

    def hit(self, gang: Gang, worker: Worker) -> None:
        worker.reacts = True
        worker.reaction = None if self.code is None else (self.code, self.after_s)


@dataclass(frozen=True)
class Linger(ToProcess):
    """SIGKILL takes so long to end a process."""

    for_s: float

    def hit(self, gang: Gang, worker: Worker) -> None:
        worker.lingers_s = self.for_s


@dataclass(frozen=True)
class Late(ToProcess):
    """The end of a process is reported so much later."""

    for_s: float

    def hit(self, gang: Gang, worker: Worker) -> None:
        worker.late_s = self.for_s


@dataclass(frozen=True)
class EndCoordinator(Happens):
    """The coordinator ends."""

    def happen(self, engine: FakeEngine) -> None:
        engine.end_coordinator()


@dataclass(frozen=True)
class Notice(Outside):
    """Machines are to be given back."""

    source: str
    deadline_s: float | None = None
    delivered: bool = False
    process: int | None = None  # it is for that one's machine alone

    def happen(self, engine: FakeEngine) -> None:
        who = frozenset() if self.process is None else frozenset({self.process})
        engine.notice(self.source, self.deadline_s, who, delivered=self.delivered)


@dataclass(frozen=True)
class Withdraw(Outside):
    """A notice holds no more."""

    source: str
    delivered: bool = False

    def happen(self, engine: FakeEngine) -> None:
        engine.withdraw(self.source, delivered=self.delivered)


@dataclass(frozen=True)
class Room(Outside):
    """There is room for so many processes from now on."""

    processes: int

    def happen(self, engine: FakeEngine) -> None:
        engine.set_room(self.processes)


@dataclass(frozen=True)
class TakeRoom(Outside):
    """From now on others take what the job gives back, but for the places of so many processes."""

    processes: int

    def happen(self, engine: FakeEngine) -> None:
        engine.take_room(self.processes)


@dataclass(frozen=True)
class AskToStop(Outside):
    """The supervisor is asked to stop."""

    def happen(self, engine: FakeEngine) -> None:
        engine.stop()


@dataclass(frozen=True)
class TellAgain(Outside):
    """An event of an earlier attempt comes late; or an answer, once more."""

    index: int

    def happen(self, engine: FakeEngine) -> None:
        engine.tell_again(self.index)


@dataclass(frozen=True)
class FailStart(Outside):
    """The attempt does not start."""

    where: str  # "at once", "while waiting", "at launch" or "half"
    final: bool = False

    def fails(self, where: str) -> bool | None:
        return self.final if where == self.where else None
