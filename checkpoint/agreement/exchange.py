"""One exchange among all processes of a group: each reports, the primary decides, all hear it.

All processes agree on an error in the same way: that of the first process that failed
(`first_failed`), of which each makes what it raises (`AgreedError.here`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from holdfast.multihost import Group

from .messages import Message, SentError


class Failing(Protocol):
    """A report that may have an error."""

    @property
    def error(self) -> SentError | None: ...


R = TypeVar("R", bound=Failing)
M = TypeVar("M", bound=Message)
D = TypeVar("D", bound=Message)


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
    report: M,
    decide: Callable[[list[M]], D],
    decision: type[D],
    *,
    timeout_s: float,
) -> D:
    """Returns on all processes what `decide` makes of their reports at the primary. Blocks.

    Raises BarrierTimeout, ProcessLost.
    """
    gathered = group.gather(f"{name}/report", report.to_bytes(), timeout_s=timeout_s)
    told = None
    if gathered is not None:
        told = decide([type(report).from_bytes(data) for data in gathered]).to_bytes()
    return decision.from_bytes(group.broadcast(f"{name}/answer", told, timeout_s=timeout_s))


# --- whether any process failed


@dataclass(frozen=True)
class Outcome(Message):
    """How one process's part ended."""

    process: int
    error: SentError | None = None


def raise_of_any(group: Group, name: str, own: Exception | None, timeout_s: float) -> None:
    """Raises, on all processes, the error of the first that failed; returns where none did. Blocks.

    A process that failed raises its own error. Raises BarrierTimeout, ProcessLost.
    """

    def decide(outcomes: list[Outcome]) -> Outcome:
        return first_failed(outcomes) or Outcome(0)

    mine = Outcome(group.index, None if own is None else SentError.of(own))
    agreed = exchange(group, name, mine, decide, Outcome, timeout_s=timeout_s)
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
class Answer(Message):
    """What the primary answers to a question: a value, or its error."""

    question: str = ""
    value: Any = None
    error: SentError | None = None


def ask_primary(
    group: Group, name: str, answer: Callable[[], Any], timeout_s: float, *, question: str = ""
) -> Any:
    """Returns what `answer` returns at the primary, in JSON types, on every process; dataclasses by
    the names of their fields. Blocks.

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
