"""One exchange among all processes of a group: each reports, the primary decides, all hear it.

Every message is a class that knows its bytes: JSON by name. An error travels as a SentError, and
all processes agree on one in the same way: that of the first process that failed (`first_failed`),
of which each makes what it raises (`AgreedError.here`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, Self, TypeVar

from holdfast.coordination import HoldfastError
from holdfast.multihost import Group

from ..errors import SENT_ERRORS, CheckpointError


def to_json_bytes(fields: Mapping[str, Any]) -> bytes:
    """Returns compact JSON."""
    return json.dumps(fields, separators=(",", ":")).encode()


@dataclass(frozen=True)
class SentError:
    """An error on its way to another process. No pickle crosses between processes."""

    kind: str
    message: str
    fields: Mapping[str, int | str] = field(default_factory=dict)

    @classmethod
    def of(cls, error: Exception) -> Self:
        """Takes the kind, the sentence and, of our own errors, the facts."""
        if not isinstance(error, HoldfastError):
            facts = {"passes": True} if isinstance(error, OSError) else {}
            return cls(type(error).__name__, str(error), facts)
        fields = {
            name: value
            for name, value in vars(error).items()
            if isinstance(value, int | str) and not name.startswith("_")
        }
        return cls(type(error).__name__, error.message, fields)

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | None) -> Self | None:
        """Reads what `asdict` made; None is no error."""
        return None if data is None else cls(**data)

    @property
    def text(self) -> str:
        """Kind and sentence, as part of a message."""
        return f"{self.kind}: {self.message}"

    def rebuilt(
        self, *, unknown: type[HoldfastError] = CheckpointError, start: str = "", **facts: Any
    ) -> HoldfastError:
        """Returns the error, of its own kind or of `unknown`; its sentence begins with `start`."""
        kind = SENT_ERRORS.get(self.kind)
        sentence = self.text if kind is None else self.message
        made = kind or unknown
        known = {
            name: value
            for name, value in {**self.fields, **facts}.items()
            if hasattr(made, name) and value is not None
        }
        return made(start + sentence, **known)


@dataclass(frozen=True)
class AgreedError:
    """The error of one process that all processes raise."""

    process: int
    error: SentError

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | None) -> Self | None:
        """Reads what `asdict` made; None is no error."""
        return None if data is None else cls(data["process"], SentError(**data["error"]))

    def here(self, index: int, own: Exception | None) -> Exception:
        """Returns what process `index` raises: its own error where that is of the agreed kind."""
        if own is not None and (self.process == index or type(own).__name__ == self.error.kind):
            if isinstance(own, CheckpointError):
                own.process = index
            return own
        # An error that knows its process names it in its sentence already.
        start = "" if "process" in self.error.fields else f"process {self.process}: "
        error = self.error.rebuilt(start=start, process=self.process)
        error.__cause__ = own
        return error


class Failing(Protocol):
    """A report that may have an error."""

    @property
    def error(self) -> SentError | None: ...


R = TypeVar("R", bound=Failing)


def first_failed(
    reports: Sequence[R], comes_later: Callable[[R], bool] = lambda report: False
) -> R | None:
    """Returns the report whose error all processes raise, or None: the first that has an error.

    A report that `comes_later` gives way to any other.
    """
    failed = [report for report in reports if report.error is not None]
    return min(failed, key=comes_later, default=None)


def exchange(
    group: Group,
    name: str,
    report: bytes,
    decide: Callable[[list[bytes]], bytes],
    timeout_s: float,
) -> bytes:
    """Returns on all processes what `decide` makes of their reports at the primary. Blocks.

    Raises BarrierTimeout, ProcessLost.
    """
    gathered = group.gather(f"{name}/report", report, timeout_s=timeout_s)
    decision = None if gathered is None else decide(gathered)
    return group.broadcast(f"{name}/answer", decision, timeout_s=timeout_s)


# --- whether any process failed


@dataclass(frozen=True)
class Outcome:
    """How one process's part ended."""

    process: int
    error: SentError | None = None

    def to_bytes(self) -> bytes:
        """Returns JSON by name."""
        return to_json_bytes(asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Reads what `to_bytes` wrote."""
        body = json.loads(data)
        return cls(body["process"], SentError.from_json(body["error"]))


def raise_of_any(group: Group, name: str, own: Exception | None, timeout_s: float) -> None:
    """Raises, on all processes, the error of the first that failed; returns where none did. Blocks.

    A process that failed raises its own error. Raises BarrierTimeout, ProcessLost.
    """

    def decide(reports: list[bytes]) -> bytes:
        outcomes = [Outcome.from_bytes(data) for data in reports]
        return (first_failed(outcomes) or Outcome(0)).to_bytes()

    mine = Outcome(group.index, None if own is None else SentError.of(own))
    agreed = Outcome.from_bytes(exchange(group, name, mine.to_bytes(), decide, timeout_s))
    if own is not None:
        raise own
    if agreed.error is not None:
        # The sentence is the same on all processes: it says itself which process failed.
        raise agreed.error.rebuilt()


# --- a question to the primary


class Answering(Protocol):
    """What the primary says, and the question that it answers."""

    @property
    def question(self) -> str: ...


A = TypeVar("A", bound=Answering)


def hear(
    group: Group, name: str, question: str, parse: Callable[[bytes], A], timeout_s: float
) -> A:
    """Returns what the primary answers to a question, off the primary. Blocks.

    An answer to another question is passed over: this process did not come to ask that one.
    """
    end_s = time.monotonic() + timeout_s
    while True:
        remaining_s = max(0.001, end_s - time.monotonic())
        answer = parse(group.broadcast(name, None, timeout_s=remaining_s))
        if answer.question == question:
            return answer


@dataclass(frozen=True)
class Answer:
    """What the primary answers to a question: a JSON value, or its error."""

    question: str = ""
    value: Any = None
    error: SentError | None = None

    def to_bytes(self) -> bytes:
        """Returns JSON by name."""
        error = None if self.error is None else asdict(self.error)
        return to_json_bytes({"question": self.question, "value": self.value, "error": error})

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Reads what `to_bytes` wrote."""
        body = json.loads(data)
        return cls(body["question"], body["value"], SentError.from_json(body["error"]))


def ask_primary(
    group: Group, name: str, answer: Callable[[], Any], timeout_s: float, *, question: str = ""
) -> Any:
    """Returns what `answer` returns at the primary, in JSON types, on every process. Blocks.

    Questions of one name tell themselves apart by `question`, which is alike on all processes.
    Raises on every process what `answer` raises there, with `process=0` on the others.
    """
    if group.index:
        heard = hear(group, name, question, Answer.from_bytes, timeout_s)
        if heard.error is not None:
            raise heard.error.rebuilt(process=0)
        return heard.value
    try:
        value = answer()
    except Exception as error:
        sent = Answer(question, error=SentError.of(error))
        group.broadcast(name, sent.to_bytes(), timeout_s=timeout_s)
        raise
    # The primary takes its own answer off the wire too: tuples and keys are alike everywhere.
    told = group.broadcast(name, Answer(question, value).to_bytes(), timeout_s=timeout_s)
    return Answer.from_bytes(told).value
