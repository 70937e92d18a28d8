"""Lives of a root: settings and operations, drawn by a seed, run beside the model, made short."""

from __future__ import annotations

import contextlib
import gc
import random
import signal
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ..campaign import shortened
from .damage import FORGERIES, CopyStep, Forge, Harm, HarmHost, Litter
from .faults import ERRORS, FOR_EVER, VERBS
from .faulty import Faulty
from .operations import (
    CALLED_BACK,
    Broken,
    Cancel,
    Delete,
    GoBack,
    Keep,
    List,
    Look,
    Operation,
    Pass,
    Reload,
    Reopen,
    Restore,
    Save,
    SaveAndCall,
    SaveAndChange,
    SetClock,
    Wait,
    explained,
)
from .policies import HOUR_S, KEEP
from .refused import SaveThroughLink
from .settings import Settings, plainer, settings_of, shown
from .site import Site, descriptors, opened_site, threads
from .tools import Convert, Copy, CopyOver, Prune, Rival, SaveTwice, Sweep, Verify, Watch
from .world import World

LENGTH = 14  # operations of a life, at most
STEPS = 8
YEAR_S = 365 * 24 * HOUR_S
SHOWN = 500  # characters of an answer
MOST_WORLDS = 512
CALL_S = 25.0  # for one operation
SHORTEN_S = 60.0
SETTLE_S = 2.0  # in which what a life had open is closed


@dataclass(frozen=True)
class Life:
    """A root's settings, and what is done to it."""

    settings: Settings
    operations: tuple[Operation, ...]

    def __str__(self) -> str:
        lines = [f"        {shown(operation)}," for operation in self.operations]
        return "\n".join(["Life(", f"    {self.settings!r},", "    (", *lines, "    ),", ")"])


class Divergence(AssertionError):
    """Says at which operation the face and its model part."""

    def __init__(self, life: Life, place: int, told: str) -> None:
        super().__init__(f"{told}\n{life}\nat operation {place + 1}")
        self.life = life
        self.place = place


# --- Drawing


def life_of(seed: int) -> Life:
    """Returns the life of a seed: the first ones have settings of the covering rows."""
    rng = random.Random(f"life {seed}")
    count = rng.randint(LENGTH // 2, LENGTH)
    return Life(settings_of(seed), tuple(_drawn(rng) for _ in range(count)))


def _drawn(rng: random.Random) -> Operation:
    kinds = list(DRAWN)
    kind = rng.choices(kinds, [DRAWN[each][0] for each in kinds])[0]
    return DRAWN[kind][1](rng)


def _save(rng: random.Random) -> Save:
    return Save(
        rng.randrange(STEPS),
        rng.randint(1, 30),
        overwrite=rng.random() < 0.2,
        force=rng.random() < 0.2,
        waits=rng.random() < 0.7,
    )


def _restore(rng: random.Random) -> Operation:
    return Restore(rng.choice([None, None, rng.randrange(STEPS)]))


def _go_back(rng: random.Random) -> Operation:
    steps = tuple(rng.randrange(STEPS) for _ in range(rng.choice([1, 1, 2, 3])))
    return GoBack(steps, replace(_save(rng), overwrite=rng.random() < 0.1, force=True))


def _harm(rng: random.Random) -> Operation:
    how = rng.choice(["flip", "cut", "lose", "link"])
    return Harm(rng.randrange(STEPS), rng.randrange(8), how)


def _litter(rng: random.Random) -> Operation:
    # The last is nearly called as a pack is; one of a dead writer would be a sweep's.
    names = ["notes.txt", "state/notes.txt", "state/00000-00000-notes.safetensors"]
    return Litter(rng.choice([None, rng.randrange(STEPS)]), rng.choice(names))


def _faulty(rng: random.Random) -> Operation:
    inner = rng.choice([_save, _save, _restore, _restore, _delete, lambda rng: List()])(rng)
    if isinstance(inner, Save):
        inner = replace(inner, waits=True)
    return Faulty(
        inner,
        rng.choice([*VERBS, "open"]),
        rng.choice(ERRORS),
        place=rng.choice([0, 0, 1, 2, 3, 5]),
        times=rng.choice([1, 1, 2, FOR_EVER]),
        after=rng.random() < 0.3,
    )


def _delete(rng: random.Random) -> Operation:
    return Delete(rng.randrange(STEPS))


def _convert(rng: random.Random) -> Operation:
    to = rng.choices(["holdfast", "safetensors", "orbax"], [6, 3, 1])[0]
    return Convert(rng.randrange(STEPS), to)


def _rival(rng: random.Random) -> Operation:
    back = rng.choice([None, rng.randrange(STEPS)])
    return Rival(rng.randrange(STEPS), rng.randint(1, 30), rng.random() < 0.3, back)


def _watch(rng: random.Random) -> Operation:
    return Watch(rng.choice([None, rng.randrange(STEPS), rng.randrange(STEPS)]))


def _save_and_call(rng: random.Random) -> Operation:
    return SaveAndCall(rng.randrange(STEPS), rng.randint(1, 30), rng.choice(list(CALLED_BACK)))


def _save_through_link(rng: random.Random) -> Operation:
    return SaveThroughLink(rng.randrange(STEPS), rng.randint(1, 30))


def _save_and_change(rng: random.Random) -> Operation:
    return SaveAndChange(rng.randrange(STEPS), rng.randint(1, 30))


# Each with its weight.
DRAWN: dict[type[Operation], tuple[int, Callable[[random.Random], Operation]]] = {
    Save: (24, _save),
    Restore: (12, _restore),
    GoBack: (8, _go_back),
    List: (6, lambda rng: List()),
    Look: (4, lambda rng: Look(rng.randrange(STEPS))),
    Wait: (2, lambda rng: Wait()),
    Delete: (4, _delete),
    Reload: (2, lambda rng: Reload()),
    Reopen: (4, lambda rng: Reopen()),
    Keep: (1, lambda rng: Keep(rng.choice(list(KEEP)))),
    Pass: (3, lambda rng: Pass(rng.choice([HOUR_S / 2, HOUR_S, 3 * HOUR_S]))),
    Cancel: (3, lambda rng: Cancel(rng.randrange(STEPS), rng.randint(1, 30))),
    Harm: (3, _harm),
    Forge: (1, lambda rng: Forge(rng.randrange(STEPS), rng.choice(list(FORGERIES)))),
    SaveAndCall: (1, _save_and_call),
    SaveAndChange: (1, _save_and_change),
    SaveThroughLink: (1, _save_through_link),
    HarmHost: (2, lambda rng: HarmHost(rng.randrange(3), rng.randrange(8))),
    Faulty: (6, _faulty),
    CopyStep: (1, lambda rng: CopyStep(rng.randrange(STEPS), rng.randrange(STEPS))),
    Litter: (1, _litter),
    Verify: (1, lambda rng: Verify()),
    Prune: (1, lambda rng: Prune(rng.randint(1, 3))),
    Sweep: (1, lambda rng: Sweep()),
    Copy: (1, lambda rng: Copy(rng.random() < 0.5)),
    Convert: (1, _convert),
    CopyOver: (1, lambda rng: CopyOver(rng.randrange(STEPS), rng.randrange(STEPS))),
    SaveTwice: (1, lambda rng: SaveTwice((1, 2))),
    Rival: (2, _rival),
    Watch: (3, _watch),
    SetClock: (1, lambda rng: SetClock(rng.choice([-YEAR_S, YEAR_S]))),
}

# --- Running


def run_life(life: Life) -> None:
    """Lives a life beside its model. Raises Divergence where they part."""
    leaks = _live(life)
    # Libraries begin what they keep for good at their first use: a leak is there again.
    if leaks and (leaks := _live(life)):
        raise Divergence(life, len(life.operations), "; ".join(leaks))


def _live(life: Life) -> list[str]:
    """Lives a life; returns what it has left open."""
    descriptors_before = descriptors()
    threads_before = threads()
    with opened_site(life.settings) as site:
        worlds = [World(life.settings).opened(0.0)]
        for place, operation in enumerate((*life.operations, Reopen())):
            worlds = _step(life, place, operation, site, worlds=worlds)
    gc.collect()
    return [
        *_grown("descriptors", descriptors, descriptors_before),
        *_grown("threads", threads, threads_before),
    ]


def _grown(what: str, count: Callable[[], int], before: int) -> list[str]:
    """Returns a sentence where more of something is there than before, and stays."""
    end_s = time.monotonic() + SETTLE_S
    while (now := count()) > before and time.monotonic() < end_s:
        time.sleep(0.01)
    return [f"{now} {what}, {before} before"] if now > before else []


def _step(
    life: Life, place: int, operation: Operation, site: Site, *, worlds: list[World]
) -> list[World]:
    """Returns the worlds that are left after an operation."""
    try:
        with _bounded():
            found = operation.run(site)
        left: list[World] = []
        for world in worlds:
            left += [each for each in operation.judge(world, site, found) if each not in left]
    except Exception as error:
        raise Divergence(life, place, f"{type(error).__name__}: {error}") from error
    assert len(left) < MOST_WORLDS, f"{len(left)} worlds: the model knows too little\n{life}"
    if left:
        return left
    told = [
        f"answered: {str(found)[:SHOWN]}",
        *(f"the steps were {world}" for world in worlds),
    ]
    raise Divergence(life, place, "\n".join([*told, explained(operation, worlds, site, found)]))


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """Raises Broken in the main thread where the block takes too long."""

    def ring(number: int, frame: types.FrameType | None) -> None:
        raise Broken(f"no answer within {CALL_S:g} s")

    former = signal.signal(signal.SIGALRM, ring)
    left_s, _ = signal.setitimer(signal.ITIMER_REAL, CALL_S)
    try:
        yield
    finally:
        # The clock is the test's own limit's: it goes on where it was stopped.
        signal.signal(signal.SIGALRM, former)
        signal.setitimer(signal.ITIMER_REAL, left_s)


# --- Shortening


def shortest(divergence: Divergence) -> Divergence:
    """Returns the divergence of a life that is as short and as plain as it goes."""
    return shortened(
        divergence,
        lambda best: map(divergence_of, _shorter(best.life, best.place)),
        SHORTEN_S,
    )


def divergence_of(life: Life) -> Divergence | None:
    """Returns where a life and its model part, None where nowhere."""
    try:
        run_life(life)
    except Divergence as divergence:
        return divergence
    return None


def _shorter(life: Life, place: int) -> Iterator[Life]:
    operations = life.operations
    if place + 1 < len(operations):
        yield replace(life, operations=operations[: place + 1])
    for size in (4, 2, 1):
        for start in range(0, len(operations), size):
            left = operations[:start] + operations[start + size :]
            if len(left) < len(operations):
                yield replace(life, operations=left)
    for settings in plainer(life.settings):
        yield replace(life, settings=settings)
