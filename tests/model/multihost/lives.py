"""Lives of a job, run, judged by the rules, and made short."""

from __future__ import annotations

import contextlib
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ..campaign import shortened
from .calls import TIME_S, Ask, Call, Die, Increment, Notify, Return
from .coordinator import Coordinator
from .life import Life, Step, shown
from .machine import Ticker
from .network import Cable
from .rules import Case, distinct, ends_well, in_time, one_answer_a_step, one_change
from .running import START, Record, Run

SHORTEN_S = 120.0
MOST_VOID = 3  # tries of a life that say nothing
TRIES = 3  # of a life that may diverge, since threads do not run alike twice


class Divergence(AssertionError):
    """Says which rules a life broke."""

    def __init__(self, life: Life, broken: list[str]) -> None:
        super().__init__("\n".join([*broken, str(life)]))
        self.life = life


def broken_rules(life: Life, record: Record) -> Iterator[str]:
    """Yields which rules the answers of a life break. Pure."""
    yield from record.broken
    for number, step in enumerate(life.steps):
        if isinstance(step.call, Die | Return):
            continue
        case = _case(life, record, number, step.call)
        for what in step.call.judge(case, number):
            yield f"call {number}, {shown(step.call)}: {what}"
    everybody = tuple(range(life.processes))
    ends = range(len(life.steps), len(life.steps) + 3)
    for number in (START, *life.first(Return).values(), *ends):
        case = Case(everybody, record.told[number], TIME_S, calls_s=4 * TIME_S)
        for what in (*in_time(case), *ends_well(case)):
            yield f"{'end' if number in ends else 'joining'}: {what}"
    yield from _over_the_life(life, record)


def _case(life: Life, record: Record, number: int, call: Call) -> Case:
    members = call.members(life.processes)
    deaths = life.first(Die)
    gone = life.gone(number)
    dying = frozenset(each for each, died in deaths.items() if died > number)
    return Case(
        members,
        record.told[number],
        call.timeout_s,
        gone=gone,
        dying=dying,
        absent=frozenset(call.absent) - gone,
        calls_s=call.calls_s,
    )


def _over_the_life(life: Life, record: Record) -> Iterator[str]:
    answers: dict[int, list[tuple[int, bool]]] = defaultdict(list)
    counts: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    attempts: dict[str, int] = defaultdict(int)
    deaths = life.first(Die)
    for number, step in enumerate(life.steps):
        for process, told in record.told[number].items():
            # A dead process is left out of an agreement: what it was told before binds nobody.
            counts_here = number > deaths.get(process, START)
            if isinstance(step.call, Ask) and told.error is None and counts_here:
                answers[process] += told.value
            if isinstance(step.call, Increment):
                attempts[step.call.key] += 1
            if isinstance(step.call, Increment) and told.error is None:
                counts[step.call.key][process].append(told.value)
    for process, told in record.told[len(life.steps)].items():
        answers[process] += told.value or []
    yield from one_answer_a_step(answers)
    if not any(isinstance(step.call, Notify) and step.call.withdrawal for step in life.steps):
        yield from one_change(answers)
    for key, of_key in counts.items():
        yield from distinct(key, of_key, attempts[key])


def run_life(life: Life) -> bool:
    """Lives a life. Raises Divergence where it breaks a rule; returns False where the machine was
    too busy to say.
    """
    with contextlib.ExitStack() as stack:
        ticker = stack.enter_context(Ticker())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="model-")))
        coordinator = stack.enter_context(Coordinator(life.processes, folder))
        cables = [stack.enter_context(Cable(coordinator.address)) for _ in range(life.processes)]
        coordinator.serve(cables)
        run = Run(life, coordinator, cables)
        run.live()
    broken = list(broken_rules(life, run.record))
    if broken and ticker.stood_still:
        return False
    if broken:
        raise Divergence(life, broken)
    return True


def divergence_of(life: Life, tries: int = 1) -> Divergence | None:
    """Returns which rules a life breaks, None where it keeps them each time."""
    try:
        lived = 0
        for _ in range(tries + MOST_VOID):
            lived += run_life(life)
            if lived >= tries:
                break
    except Divergence as divergence:
        return divergence
    return None


# --- Shortening


def shortest(divergence: Divergence) -> Divergence:
    """Returns the divergence of a life that is as short as it goes."""
    return shortened(
        divergence,
        lambda best: (divergence_of(life, TRIES) for life in _shorter(best.life)),
        SHORTEN_S,
    )


def _shorter(life: Life) -> Iterator[Life]:
    steps = life.steps
    for size in (4, 2, 1):
        for start in range(0, len(steps), size):
            left = steps[:start] + steps[start + size :]
            if len(left) < len(steps):
                yield replace(life, steps=left)
    for place, step in enumerate(steps):
        for plainer in _plainer(step):
            yield replace(life, steps=(*steps[:place], plainer, *steps[place + 1 :]))
    if life.shift:
        yield replace(life, shift=0)


def _plainer(step: Step) -> Iterator[Step]:
    if step.late_s:
        yield replace(step, late_s=())
    for place in range(len(step.faults)):
        yield replace(step, faults=step.faults[:place] + step.faults[place + 1 :])
