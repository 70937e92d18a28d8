"""What docs/guarantees.md, docs/coordinator-inside.md and the docstrings promise of the calls of a
job. Pure: what the processes were told is held against it.

1. No call is beyond its time.
2. Each error is one of holdfast's. Calls of a Group raise BarrierTimeout, ProcessLost or
   CoordinatorLost.
3. A client rides through outages shorter than the heartbeat timeout. So a call that all of its
   processes make in time ends well, whatever the network and the coordinator did meanwhile; an
   increment alone may say that its answer was lost.
4. Nobody who lives is lost, and no error says so.
5. A call that a process does not make, or cannot make any more, fails in all that wait for it. The
   error names that process; or the coordinator, where the call's whole time was an outage.
6. A call has one outcome, and one value, for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.coordination import (
    BarrierTimeout,
    CoordinationError,
    CoordinatorLost,
    HoldfastError,
    ProcessLost,
)
from holdfast.coordination.client.session import ANSWER_GRACE_S

SLACK_S = ANSWER_GRACE_S + 1.5
"""A client waits for ANSWER_GRACE_S longer than a call's own time for the answer that names who was
missing, and a second for what is pushed about a death; and this machine is busy.
"""
OUTAGE_S = 3.0  # of two faults in a row
SPREAD_S = 1.0  # how much less than its time a call's processes are apart that surely meet


@dataclass(frozen=True)
class Told:
    """What a process was told by one call, and when, on one clock."""

    value: Any = None
    error: BaseException | None = None
    began_s: float = 0.0
    ended_s: float = 0.0

    def __str__(self) -> str:
        if self.error is None:
            return repr(self.value)
        return _shown(self.error)


@dataclass(frozen=True)
class Case:
    """One call of several processes, and what each was told. `gone` are the processes of the job
    that had died before, `dying` those that died later, `absent` those that live and made no call.
    """

    members: tuple[int, ...]
    told: Mapping[int, Told]
    timeout_s: float
    gone: frozenset[int] = frozenset()
    dying: frozenset[int] = frozenset()
    absent: frozenset[int] = frozenset()
    calls_s: float | None = None  # for all that each makes, where it makes several in a row

    @property
    def lacking(self) -> frozenset[int]:
        """Those who should make the call, and do not."""
        return self.gone.intersection(self.members) | self.absent

    @property
    def meets(self) -> bool:
        """Whether all who make it do so well within its time."""
        began_s = [told.began_s for told in self.told.values()]
        spread_s = max(began_s, default=0.0) - min(began_s, default=0.0)
        return spread_s <= self.timeout_s - SPREAD_S

    def errors(self) -> Iterator[tuple[int, BaseException]]:
        """Yields who was told an error, and which."""
        for process, told in self.told.items():
            if told.error is not None:
                yield process, told.error

    def values(self) -> dict[int, Any]:
        """Returns the values, of those who got one."""
        return {process: told.value for process, told in self.told.items() if told.error is None}


def in_time(case: Case) -> Iterator[str]:
    """Rule 1."""
    calls_s = case.timeout_s if case.calls_s is None else case.calls_s
    for process, told in case.told.items():
        took_s = told.ended_s - told.began_s
        if took_s > calls_s + SLACK_S:
            yield f"process {process} waited for {took_s:.1f} s; its time is {calls_s:g} s"


def typed(case: Case, *kinds: type[BaseException]) -> Iterator[str]:
    """Rule 2."""
    expected = kinds or (BarrierTimeout, ProcessLost, CoordinatorLost)
    for process, error in case.errors():
        if not isinstance(error, expected):
            yield f"process {process} was told a {type(error).__name__}: {error}"


def nobody_is_lost(case: Case) -> Iterator[str]:
    """Rule 4."""
    for process, error in case.errors():
        lost = error.process if isinstance(error, ProcessLost) else None
        if lost is not None and lost not in case.gone | case.dying:
            yield f"process {process} was told that process {lost}, which lives, is lost: {error}"


def ends_well(case: Case, *, but: type[HoldfastError] | None = None) -> Iterator[str]:
    """Rule 3, for a call that waits for all its processes."""
    for process, error in case.errors():
        if but is None or not isinstance(error, but):
            yield f"all made the call, and process {process} was told {_shown(error)}"


def fails(case: Case) -> Iterator[str]:
    """Rule 5."""
    lacking = sorted(case.lacking)
    for process, value in case.values().items():
        yield f"processes {lacking} did not make the call, and process {process} got {value!r}"
    for process, error in case.errors():
        if case.timeout_s < OUTAGE_S and isinstance(error, CoordinatorLost):
            continue
        if not named_by(error) & case.lacking:
            yield f"process {process} was told {_shown(error)}, which names none of {lacking}"


def all_missing_are_named(case: Case) -> Iterator[str]:
    """Rule 5, of a BarrierTimeout: it names every process that is missing."""
    for process, error in case.errors():
        if isinstance(error, BarrierTimeout) and not case.absent <= named_by(error):
            absent = sorted(case.absent)
            yield f"process {process} was told {_shown(error)}, which does not name all of {absent}"


def meets_or_fails(case: Case) -> Iterator[str]:
    """Rules 3, 5 and 6, for a call that waits for all its processes."""
    if case.lacking:
        yield from fails(case)
        yield from all_missing_are_named(case)
    elif case.meets:
        yield from ends_well(case)
    elif case.values() and list(case.errors()):
        yield "it ended well for some, and failed for others"


def alike(case: Case) -> Iterator[str]:
    """Rule 6."""
    values = case.values()
    if len({repr(value) for value in values.values()}) > 1:
        yield f"the processes got different values: {values}"


def named_by(error: BaseException) -> frozenset[int]:
    """Returns the processes that an error names."""
    if isinstance(error, BarrierTimeout):
        return frozenset(error.missing)
    if isinstance(error, ProcessLost) and error.process is not None:
        return frozenset([error.process])
    return frozenset()


def one_answer_a_step(answers: Mapping[int, list[tuple[int, bool]]]) -> Iterator[str]:
    """Rule 6, of `reached_preemption`: the same step, the same answer, whoever asks and when."""
    known: dict[int, tuple[int, bool]] = {}
    for process, told in answers.items():
        for step, reached in told:
            other, before = known.setdefault(step, (process, reached))
            if before != reached:
                yield (
                    f"at step {step} process {other} was told {before}, process {process} {reached}"
                )


def one_change(answers: Mapping[int, list[tuple[int, bool]]]) -> Iterator[str]:
    """Of a notice that stands: nobody passes the agreed step, and nobody is told false after it."""
    told = [answer for of_one in answers.values() for answer in of_one]
    reached = [step for step, value in told if value]
    not_yet = [step for step, value in told if not value]
    if reached and not_yet and min(reached) <= max(not_yet):
        yield f"step {min(reached)} was reached, step {max(not_yet)} not yet: {dict(answers)}"


def distinct(name: str, numbers: Mapping[int, list[int]], attempts: int) -> Iterator[str]:
    """Of increments of one key by 1: no number twice, none beyond the number of attempts."""
    told = sorted(number for of_one in numbers.values() for number in of_one)
    if len(set(told)) < len(told):
        yield f"increments of {name!r} were told one number twice: {dict(numbers)}"
    if told and not 1 <= told[0] <= told[-1] <= attempts:
        yield f"{attempts} increments of {name!r} were told {told}"
    for process, of_one in numbers.items():
        if of_one != sorted(of_one):
            yield f"increments of {name!r} by process {process} fell: {of_one}"


def _shown(error: BaseException) -> str:
    code = f" ({error.code})" if isinstance(error, CoordinationError) else ""
    return f"{type(error).__name__}{code}: {error}"
