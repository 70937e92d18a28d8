"""Lives of a job: a policy, a program and what happens, drawn by a seed, run, made short."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from holdfast.launch import RestartPolicy
from holdfast.launch.supervisor.engine import supervise
from holdfast.launch.supervisor.job import Job, Tick

from ..campaign import shortened
from .engine import FakeEngine
from .happenings import (
    AskToStop,
    EndCoordinator,
    Exit,
    FailStart,
    Hang,
    Happens,
    Late,
    Leave,
    Linger,
    Notice,
    React,
    Room,
    TakeRoom,
    TellAgain,
    Withdraw,
)
from .invariants import INVARIANTS
from .program import Program, shown
from .trace import Recorder, Step, Trace

Values = TypeVar("Values", RestartPolicy, Program)

MOST_HAPPENINGS = 6
JOINED_S = 2.0
MOST_PROCESSES = 4
MOMENTS = 3
SHORTEN_S = 20.0
LAST_STEPS = 12  # shown of a trace


@dataclass(frozen=True)
class Life:
    """A job, and all that happens to it."""

    happenings: tuple[Happens, ...] = ()
    policy: RestartPolicy = field(default=RestartPolicy())
    program: Program = field(default=Program())
    processes: int = 3
    least: int = 1
    room: int = MOST_PROCESSES  # for so many processes, to begin with
    seed: int = 0  # of all that takes time

    def __str__(self) -> str:
        happenings = [f"        {each!r}," for each in self.happenings]
        rest = [
            f"    {each.name}={shown(getattr(self, each.name))},"
            for each in fields(self)[1:]
            if getattr(self, each.name) != each.default
        ]
        return "\n".join(["Life(", "    (", *happenings, "    ),", *rest, ")"])


class Divergence(AssertionError):
    """Says which rules a life breaks."""

    def __init__(self, life: Life, rules: tuple[str, ...], told: str, steps: list[Step]) -> None:
        super().__init__(f"{', '.join(rules)}: {told}\n{life}\n{_before(steps, told)}")
        self.life = life
        self.rules = rules


def _before(steps: list[Step], told: str) -> str:
    """Returns the steps before the one that is told of; without Ticks that nobody has wanted."""
    lines: list[str] = []
    for step in steps:
        if not isinstance(step.event, Tick) or step.after is not step.before:
            lines.append(str(step))
        if str(step) in told:
            break
    return "\n".join(lines[-LAST_STEPS:])


# --- Drawing


class Lots(random.Random):
    """Draws a life. What happens to it meets at a few moments."""

    def __init__(self, seed: int) -> None:
        super().__init__(f"life {seed}")
        self._moments = [0.0]

    def spread(self, longest_s: float) -> None:
        """Chooses the moments of attempts that take so long."""
        self._moments = [self.uniform(0.0, longest_s) for _ in range(MOMENTS)]

    def moment(self) -> float:
        """Returns the seconds from the start of an attempt."""
        return round(self.choice(self._moments) + self.choice([0.0, 0.1, 1.0, 4.0]), 1)

    def attempt(self) -> int:
        """Returns the number of an attempt."""
        return self.choice([1, 1, 1, 1, 2, 3])

    def process(self) -> int:
        """Returns the number of a process."""
        return self.randrange(MOST_PROCESSES)


def life_of(seed: int) -> Life:
    """Returns the life of a seed."""
    lots = Lots(seed)
    processes = lots.choice([1, 2, 2, 3, 3, MOST_PROCESSES])
    least = lots.choice([1, 1, lots.randint(1, processes)])
    program = _program(lots, processes)
    lots.spread(JOINED_S + program.steps * program.step_s)
    drawn = [lots.choice(DRAWN)(lots) for _ in range(lots.randint(1, MOST_HAPPENINGS))]
    return Life(
        tuple(happening for happenings in drawn for happening in happenings),
        RestartPolicy(**{name: lots.choice(values) for name, values in POLICIES.items()}),
        program,
        processes,
        least=least,
        room=lots.choice([least, MOST_PROCESSES, MOST_PROCESSES]),
        seed=seed,
    )


def _program(lots: Lots, processes: int) -> Program:
    strangers: list[int] = []
    if lots.random() < 0.2:
        strangers = sorted(lots.sample(range(processes), lots.randint(1, processes)))
    drawn = {name: lots.choice(values) for name, values in PROGRAMS.items()}
    return Program(**drawn, strangers=tuple(strangers))


POLICIES: dict[str, tuple[Any, ...]] = {
    "max_failures": (0, 1, 2, 3),
    "max_preemptions": (0, 1, 2, 3),
    "max_startup_failures": (0, 1, 2),
    "max_startup_timeouts": (0, 0, 1),
    "attempts_without_progress": (1, 2, 3, 3, 9),
    "startup_timeout_s": (10.0, 60.0, 600.0),
    "preemption_grace_s": (5.0, 30.0, 120.0),
    "grace_s": (0.5, 2.0, 5.0, 10.0),
    "commit_grace_s": (1.0, 8.0, 60.0, 600.0),
    "rejoin_timeout_s": (0.5, 2.0, 10.0),
    "backoff_s": (0.0, 0.5, 1.0, 5.0),
    "backoff_cap_s": (2.0, 60.0),
    "backoff_jitter": (0.0, 0.25, 1.0),
    "grow_after_s": (0.0, 5.0, 30.0),
    "stall_timeout_s": (math.inf, math.inf, 8.0, 30.0),
}

PROGRAMS: dict[str, tuple[Any, ...]] = {
    "steps": (6, 12, 30),
    "step_s": (0.3, 1.0, 3.0),
    "save_every": (0, 1, 2, 3, 5),
    "write_s": (0.2, 1.0, 4.0, 15.0),
    "commit_s": (0.1, 1.0, 4.0, 15.0),
    "shutdown_s": (0.1, 1.0, 8.0),
    "leaves_with": (75, 75, 0),
    "patience_s": (math.inf, 0.3, 3.0),
    "says_done": (False, True),
    "echoes": (False, True),
    "outlives": (False, True),
}


Drawn = tuple[Happens, ...]


def _exit(lots: Lots) -> Drawn:
    code = lots.choice([1, 1, 3, -9, -9, -11, -15, 0, 75, 93, 124])
    return (Exit(lots.attempt(), lots.moment(), lots.process(), code),)


def _deaths(lots: Lots) -> Drawn:
    """Two processes, one soon after the other."""
    attempt = lots.attempt()
    at_s = lots.moment()
    first, second = lots.sample(range(MOST_PROCESSES), 2)
    after_s = lots.choice([0.0, 0.1, 2.0])
    return (
        Exit(attempt, at_s, first, lots.choice([1, -9, 75])),
        Exit(attempt, at_s + after_s, second, lots.choice([1, -9, 93, 75, 124])),
    )


def _leave(lots: Lots) -> Drawn:
    code = lots.choice([0, 1, 75, 93, 93])
    shutdown_s = lots.choice([0.1, 1.0, 4.0, 20.0])
    return (Leave(lots.attempt(), lots.moment(), lots.process(), code, shutdown_s),)


def _notice(lots: Lots) -> Drawn:
    delivered = lots.random() < 0.5
    deadline_s = lots.choice([None, None, 1.0, 10.0, 40.0])
    source = lots.choice("ab")
    attempt = lots.attempt()
    at_s = lots.moment()
    process = lots.choice([None, lots.process()])
    notice = Notice(attempt, at_s, source, deadline_s, delivered, process=process)
    if lots.random() < 0.4:
        after_s = at_s + lots.choice([1.0, 3.0, 10.0])
        return (notice, Withdraw(attempt, after_s, source, delivered))
    return (notice,)


def _one_host(lots: Lots) -> Drawn:
    """A notice for one process, and something about when all have left their loops."""
    attempt = lots.attempt()
    at_s = lots.moment()
    process = lots.randrange(3)
    deadline_s = lots.choice([None, 40.0])
    delivered = lots.random() < 0.5
    notice = Notice(attempt, at_s, "d", deadline_s, delivered, process=process)
    then_s = at_s + lots.choice([0.2, 1.0, 2.0, 4.0, 6.0])
    then: Happens = lots.choice(
        [
            Exit(attempt, then_s, lots.process(), lots.choice([0, 1, -9, 75, 93])),
            Notice(attempt, then_s, "e", delivered=delivered, process=lots.process()),
            Withdraw(attempt, then_s, "d"),
            AskToStop(attempt, then_s),
            Hang(attempt, then_s, lots.process(), silent=False),
            EndCoordinator(attempt, then_s),
        ]
    )
    return (notice, then) if lots.random() < 0.7 else (notice,)


def _fail_leaving(lots: Lots) -> Drawn:
    """A process fails while all save and leave."""
    attempt = lots.attempt()
    at_s = lots.moment()
    then_s = at_s + lots.choice([0.5, 2.0, 6.0])
    deadline_s = lots.choice([None, 10.0, 20.0])
    code = lots.choice([1, -9, 93])
    return (Notice(attempt, at_s, "c", deadline_s), Exit(attempt, then_s, lots.process(), code))


def _fail_start(lots: Lots) -> Drawn:
    where = lots.choice(["at once", "while waiting", "at launch", "half"])
    return (FailStart(lots.attempt(), 0.0, where, lots.random() < 0.2),)


def _linger(lots: Lots) -> Drawn:
    attempt = lots.attempt()
    process = lots.process()
    lingers = Linger(attempt, 0.0, process, lots.choice([3.0, 11.0, 30.0]))
    return (lingers, Exit(attempt, lots.moment(), (process + 1) % MOST_PROCESSES, 1))


def _room(lots: Lots) -> Drawn:
    processes = lots.choice([0, 1, 2, 3, MOST_PROCESSES, MOST_PROCESSES])
    return (Room(lots.attempt(), lots.moment(), processes),)


def _grow(lots: Lots) -> Drawn:
    """Something happens around the time at which there is more room."""
    attempt = lots.attempt()
    at_s = lots.moment()
    process = lots.randrange(2)
    then_s = at_s + lots.choice([-1.0, 0.2, 1.0, 4.0])
    source = f"process {process} (preempted)"
    then = lots.choice(
        [
            Exit(attempt, then_s, process, lots.choice([0, 0, 1, -9, 75, 93])),
            Notice(attempt, then_s, source, lots.choice([None, 1.0, 10.0]), delivered=True),
            AskToStop(attempt, then_s),
        ]
    )
    few = lots.choice([1, 2, 3])
    return (Room(attempt, 0.0, few), Room(attempt, at_s, MOST_PROCESSES), then)


def _resize(lots: Lots) -> Drawn:
    """There is room for more or fewer, and something happens about when all have left their loops,
    or the others are back.
    """
    attempt = lots.attempt()
    at_s = lots.moment()
    then_s = at_s + lots.choice([0.2, 1.0, 2.0, 4.0, 6.0])
    process = lots.process()
    then: Happens = lots.choice(
        [
            Exit(attempt, then_s, process, lots.choice([0, 1, -9, 75, 93])),
            Exit(attempt + 1, then_s - at_s, process, lots.choice([1, -9, 75, 93])),
            Notice(attempt, then_s, "f", delivered=lots.random() < 0.5, process=process),
            Notice(attempt + 1, then_s - at_s, "f", lots.choice([None, 20.0]), process=process),
            Hang(lots.choice([attempt, attempt + 1]), then_s - at_s, process),
            Room(attempt, then_s, lots.choice([1, 2, 3, MOST_PROCESSES])),
            EndCoordinator(attempt, then_s),
            AskToStop(attempt, then_s),
        ]
    )
    first = Room(attempt, 0.0, lots.choice([1, 2, 3, MOST_PROCESSES]))
    return (first, Room(attempt, at_s, lots.choice([1, 2, 3, MOST_PROCESSES])), then)


def _take_room(lots: Lots) -> Drawn:
    """A process dies for which there is no room any more, and something else happens."""
    attempt = lots.attempt()
    at_s = lots.moment()
    few = lots.choice([1, 2, 3])
    dies = Exit(attempt, at_s, lots.process(), lots.choice([1, -9]))
    then_s = lots.choice([0.2, 1.0, 2.0, 4.0])
    then: Happens = lots.choice(
        [
            Exit(attempt, at_s + 0.1, lots.process(), -9),
            Exit(
                attempt + lots.choice([1, 2]), then_s, lots.process(), lots.choice([0, 1, 75, 93])
            ),
            Notice(attempt + lots.choice([1, 2]), then_s, "g", process=lots.process()),
            Hang(attempt + lots.choice([0, 1, 2]), then_s, lots.process()),
            Room(attempt + lots.choice([1, 2]), then_s, MOST_PROCESSES),
            AskToStop(attempt + 1, then_s),
        ]
    )
    return (TakeRoom(attempt, 0.0, few), dies, then)


def _end_twice(lots: Lots) -> Drawn:
    """A process fails, and something else comes while the attempt is ended."""
    attempt = lots.attempt()
    at_s = lots.moment()
    then_s = at_s + lots.choice([0.1, 0.5, 2.0, 6.0])
    then = lots.choice([AskToStop(attempt, then_s), EndCoordinator(attempt, then_s)])
    return (Exit(attempt, at_s, lots.process(), 1), then)


def _hang(lots: Lots) -> Drawn:
    return (Hang(lots.attempt(), lots.moment(), lots.process(), lots.random() < 0.5),)


def _react(lots: Lots) -> Drawn:
    code = lots.choice([None, 0, 1, 75, 93])
    after_s = lots.choice([0.0, 0.2, 1.0, 4.0])
    return (React(lots.attempt(), 0.0, lots.process(), code, after_s),)


def _late(lots: Lots) -> Drawn:
    return (Late(lots.attempt(), 0.0, lots.process(), lots.choice([1.0, 5.0])),)


def _end_coordinator(lots: Lots) -> Drawn:
    return (EndCoordinator(lots.attempt(), lots.moment()),)


def _ask_to_stop(lots: Lots) -> Drawn:
    return (AskToStop(lots.attempt(), lots.moment()),)


def _tell_again(lots: Lots) -> Drawn:
    return (TellAgain(lots.choice([1, 2, 2, 3]), lots.moment(), lots.randrange(100)),)


DRAWN: tuple[Callable[[Lots], Drawn], ...] = (
    _exit,
    _exit,
    _deaths,
    _leave,
    _notice,
    _notice,
    _one_host,
    _one_host,
    _fail_leaving,
    _fail_start,
    _linger,
    _room,
    _grow,
    _resize,
    _resize,
    _take_room,
    _end_twice,
    _hang,
    _react,
    _late,
    _end_coordinator,
    _ask_to_stop,
    _tell_again,
)

# --- Running


def trace_of(life: Life) -> Trace:
    """Runs a job to its end, in virtual time. Raises Divergence where it has none."""
    engine = FakeEngine(life.policy, life.program, life.room, life.happenings, seed=life.seed)
    recorder = Recorder(engine.seen, engine.clock)
    job = Job("job", life.least, life.processes, life.policy)
    try:
        result = supervise(job, engine, on_decision=recorder.on_decision, clock=engine.clock)
    except AssertionError as error:
        told = f"{type(error).__name__}: {error}"
        raise Divergence(life, ("jobs_end",), told, recorder.steps) from error
    assert engine.closed == 1
    return Trace(recorder.steps, result)


def run_life(life: Life) -> None:
    """Runs a life. Raises Divergence where it breaks a rule."""
    trace = trace_of(life)
    broken = {rule.__name__: next(rule(trace), None) for rule in INVARIANTS}
    told = {name: first for name, first in broken.items() if first is not None}
    if told:
        raise Divergence(life, tuple(told), "; ".join(told.values()), trace.steps)


def divergence_of(life: Life) -> Divergence | None:
    """Returns which rules a life breaks, None where none."""
    try:
        run_life(life)
    except Divergence as divergence:
        return divergence
    return None


# --- Shortening


def shortest(divergence: Divergence) -> Divergence:
    """Returns the divergence of a life that is as short and as plain as it goes."""
    return shortened(divergence, lambda best: map(_same(best), _shorter(best.life)), SHORTEN_S)


def _same(divergence: Divergence) -> Callable[[Life], Divergence | None]:
    """Returns what finds the divergence of another life that breaks one of the same rules."""

    def find(life: Life) -> Divergence | None:
        found = divergence_of(life)
        return found if found is not None and set(found.rules) & set(divergence.rules) else None

    return find


def _shorter(life: Life) -> Iterator[Life]:
    for place in range(len(life.happenings)):
        left = life.happenings[:place] + life.happenings[place + 1 :]
        yield replace(life, happenings=left)
    if life.processes > 1:
        fewer = life.processes - 1
        yield replace(life, processes=fewer, least=min(fewer, life.least))
    for policy in _plainer(life.policy):
        yield replace(life, policy=policy)
    for program in _plainer(life.program):
        yield replace(life, program=program)


def _plainer(value: Values) -> Iterator[Values]:
    """Yields the value with one field each as by default."""
    for each in fields(value):
        plain: Any = each.default
        if getattr(value, each.name) != plain:
            yield replace(value, **{each.name: plain})
