"""Lives drawn by a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import fields, replace

from .calls import (
    WAYS,
    Agree,
    Ask,
    Barrier,
    Block,
    Broadcast,
    Call,
    Cancel,
    Die,
    Gather,
    Increment,
    Live,
    Look,
    Notices,
    Notify,
    Race,
    Report,
    Return,
    Shelf,
    Sync,
)
from .coordinator import FULL, MOMENTS
from .life import Life, Step
from .network import HARMS, Fault

LENGTH = 12  # calls of a life, at most


def life_of(seed: int) -> Life:
    """Returns the life of a seed."""
    rng = random.Random(f"life {seed}")
    processes = rng.choice([2, 2, 3, 4])
    count = rng.randint(LENGTH // 2, LENGTH)
    calls = [_call(rng, processes) for _ in range(count)]
    if rng.random() < 0.4:
        _insert_death(rng, calls, processes)
    # Who has no journal for a while may not die then.
    harms = (*HARMS, *rng.choice([MOMENTS, MOMENTS, (FULL,)]))
    steps = tuple(_step(rng, call, processes, harms) for call in calls)
    return Life(processes, rng.choice([0, 1]), rng.random() < 0.3, steps)


def _insert_death(rng: random.Random, calls: list[Call], processes: int) -> None:
    who = (rng.randrange(processes),)
    dies = rng.randrange(2, len(calls))
    calls.insert(dies, Die(who, how=rng.choice(WAYS)))
    if rng.random() < 0.5:
        # The others work with it again once they have asked who lives.
        returns = rng.randrange(dies + 1, len(calls) + 1)
        calls[returns:] = [Return(who), Live(), *map(_anew, calls[returns:])]


def _anew(call: Call) -> Call:
    """Returns a call under a name that nobody has used: who is new has counted no call."""
    if isinstance(call, Sync | Barrier | Gather | Broadcast):
        return replace(call, name=f"anew {call.name}")
    return call


def _step(rng: random.Random, call: Call, processes: int, harms: Sequence[str]) -> Step:
    count = rng.choices([0, 1, 2], [60, 30, 10])[0]
    faults = tuple(_fault(rng, processes, harms) for _ in range(count))
    late_s = tuple(rng.choice([0.0, 0.0, 0.01, 0.1]) for _ in range(processes))
    return Step(call, faults, late_s if any(late_s) else ())


def _fault(rng: random.Random, processes: int, harms: Sequence[str]) -> Fault:
    harm = rng.choice(harms)
    lasts_s = rng.choices([0.0, 0.02, 0.1, 0.3, 1.2], [3, 3, 3, 3, 1])[0]
    return Fault(rng.randrange(processes), harm, lasts_s)


def _call(rng: random.Random, processes: int) -> Call:
    kinds = list(DRAWN)
    kind = rng.choices(kinds, [DRAWN[each][0] for each in kinds])[0]
    return DRAWN[kind][1](rng, processes)


def _group_call(kind: type[Call]) -> Callable[[random.Random, int], Call]:
    def draw(rng: random.Random, processes: int) -> Call:
        only = None
        if processes > 2 and rng.random() < 0.3:
            only = tuple(sorted(rng.sample(range(processes), rng.randint(2, processes))))
        call = kind(only)
        if "name" in {each.name for each in fields(kind)}:
            call = replace(call, name=rng.choice("ab"))  # type: ignore[call-arg]
        if rng.random() < 0.1:
            call = replace(call, absent=(rng.choice(call.members(processes)),))
        return call

    return draw


def _block(rng: random.Random, processes: int) -> Call:
    return Block(raising=rng.choice([None, None, rng.randrange(processes)]))


def _notify(rng: random.Random, processes: int) -> Call:
    only = rng.choice([None, (rng.randrange(processes),), (rng.randrange(processes),)])
    return Notify(only, withdrawal=rng.random() < 0.2)


# Each with its weight.
DRAWN: dict[type[Call], tuple[int, Callable[[random.Random, int], Call]]] = {
    Sync: (4, _group_call(Sync)),
    Barrier: (6, _group_call(Barrier)),
    Gather: (5, _group_call(Gather)),
    Broadcast: (5, _group_call(Broadcast)),
    Live: (5, _group_call(Live)),
    Block: (3, _block),
    Increment: (5, lambda rng, processes: Increment(key=rng.choice("cd"))),
    Race: (3, lambda rng, processes: Race()),
    Shelf: (2, lambda rng, processes: Shelf()),
    Ask: (8, lambda rng, processes: Ask(stride=rng.choice([1, 1, 3]))),
    Notify: (3, _notify),
    Notices: (1, lambda rng, processes: Notices()),
    Agree: (2, lambda rng, processes: Agree(proposer=rng.randrange(processes))),
    Cancel: (1, lambda rng, processes: Cancel(canceller=rng.randrange(processes))),
    Report: (3, lambda rng, processes: Report()),
    Look: (2, lambda rng, processes: Look()),
}
