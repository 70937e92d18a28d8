"""Save and keep policies, and what each has to say by the documentation alone.

A rule is written here once more, as plainly as it goes, and shares no code with its policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from holdfast.checkpoint import (
    AnyOf,
    AtSteps,
    EveryNSeconds,
    EveryNSteps,
    FirstSave,
    KeepAll,
    KeepAnyOf,
    KeepBest,
    KeepClosestTo,
    KeepEvery,
    KeepEverySeconds,
    KeepLast,
    KeepLatestFor,
    KeepPolicy,
    OnPreemption,
    SavePolicy,
)

HOUR_S = 3600.0
LATEST_S = 2.25 * HOUR_S  # no two saves of a life are just so far apart
HARMED_RECORD = "its record"  # in place of an item's name


@dataclass(frozen=True)
class Saved:
    """A step that is there. `number` says what is in it, `at_s` when its save began, by a clock
    that is right, `harmed` which of its items cannot be read, `doubtful` which perhaps cannot.

    `clock` counts the times that the clock of the processes had been set by then. A `nameless` one
    has a record that does not say whose it is.
    """

    number: int
    at_s: float
    harmed: frozenset[str] = field(default_factory=frozenset)
    doubtful: frozenset[str] = field(default_factory=frozenset)
    clock: int = 0
    has_metrics: bool = True
    nameless: bool = False

    @property
    def loss(self) -> float | None:
        return loss_of(self.number) if self.has_metrics else None


def loss_of(number: int) -> float | None:
    """Returns the metric that a save is given: some have none, one has NaN."""
    if number % 7 == 0:
        return None
    return float("nan") if number % 11 == 0 else float(number % 5)


# --- Saving

# (step, the newest step saved or begun, seconds since then) -> whether it is to be saved
Wants = Callable[[int, int | None, float], bool]
SAVE: dict[str, tuple[SavePolicy | None, Wants]] = {
    "always": (None, lambda step, last, elapsed_s: True),
    "even": (EveryNSteps(2), lambda step, last, elapsed_s: step % 2 == 0),
    "named": (AtSteps({1, 2, 5}), lambda step, last, elapsed_s: step in {1, 2, 5}),
    "first": (FirstSave(), lambda step, last, elapsed_s: last is None),
    "hourly": (
        EveryNSeconds(HOUR_S),
        lambda step, last, elapsed_s: elapsed_s >= HOUR_S,
    ),
    "never": (OnPreemption(), lambda step, last, elapsed_s: False),
    "even or hourly": (
        AnyOf(EveryNSteps(2), EveryNSeconds(HOUR_S)),
        lambda step, last, elapsed_s: step % 2 == 0 or elapsed_s >= HOUR_S,
    ),
}

# --- Keeping

Steps = Mapping[int, Saved]
Keeps = Callable[[Steps], set[int]]


def _last(count: int) -> Keeps:
    return lambda steps: set(sorted(steps)[-count:])


def _best(steps: Steps) -> set[int]:
    if all(saved.loss is None for saved in steps.values()):
        return set(steps)
    scored = [
        (saved.loss, -step)
        for step, saved in steps.items()
        if saved.loss is not None and saved.loss == saved.loss
    ]
    return {-step for _, step in sorted(scored)[:1]}


def _closest_to_threes(steps: Steps) -> set[int]:
    kept = set()
    for multiple in range(0, 1000, 3):
        near = [step for step in steps if -1.5 <= step - multiple < 1.5]
        kept |= set(sorted(near, key=lambda step: (abs(step - multiple), -step))[:1])
    return kept


def _last_hours(steps: Steps) -> set[int]:
    newest_s = max((saved.at_s for saved in steps.values()), default=0.0)
    return {step for step, saved in steps.items() if saved.at_s >= newest_s - LATEST_S}


def _hourly(steps: Steps) -> set[int]:
    kept: set[int] = set()
    last_s = float("-inf")
    for step in sorted(steps):
        if steps[step].at_s >= last_s + HOUR_S:
            kept.add(step)
            last_s = steps[step].at_s
    return kept


def _threes(steps: Steps) -> set[int]:
    return {step for step in steps if step % 3 == 0}


KEEP: dict[str, tuple[KeepPolicy, Keeps]] = {
    "all": (KeepAll(), set),
    "last": (KeepLast(1), _last(1)),
    "last three": (KeepLast(3), _last(3)),
    "threes": (KeepEvery(3), _threes),
    "closest": (KeepClosestTo(3), _closest_to_threes),
    "best": (KeepBest(1, "loss"), _best),
    "last hours": (KeepLatestFor(LATEST_S), _last_hours),
    "hourly": (KeepEverySeconds(HOUR_S), _hourly),
    "last or threes": (
        KeepAnyOf(KeepLast(1), KeepEvery(3)),
        lambda steps: _last(1)(steps) | _threes(steps),
    ),
}
BY_CLOCK = {"last hours", "hourly"}


def must_stay(name: str, steps: Steps) -> set[int]:
    """Returns the steps that a keep policy may not delete: the newest is always one."""
    kept = set.intersection(*(KEEP[name][1](known) for known in _readings(steps)))
    if name in BY_CLOCK and _was_set(steps):
        # Of a clock that was set between two lives nothing says which of its times was right.
        now = steps[max(steps)].clock
        kept = {step for step in kept if steps[step].clock == now and name != "hourly"}
    return kept | {max(steps, default=0)} & set(steps)


def may_stay(name: str, steps: Steps) -> set[int]:
    """Returns the steps that a keep policy need not delete.

    Where times contradict the order of steps it may take any step for a young one.
    """
    if name in BY_CLOCK and _was_set(steps):
        return set(steps)
    readings = _readings(steps)
    kept = set.union(*(KEEP[name][1](known) for known in readings))
    kept |= {max(known) for known in readings if known}
    return kept | {max(steps, default=0)} & set(steps) | unreadable(steps)


def unreadable(steps: Steps) -> set[int]:
    """Returns the steps whose records are damaged, or perhaps are."""
    return {step for step, saved in steps.items() if HARMED_RECORD in saved.harmed | saved.doubtful}


def _readings(steps: Steps) -> list[Steps]:
    """Returns what a policy may know: of a damaged record its metrics, from before, or nothing."""
    damaged = unreadable(steps)
    return [
        steps,
        {step: saved for step, saved in steps.items() if step not in damaged},
    ]


def _was_set(steps: Steps) -> bool:
    """Says whether times do not tell the order of steps: a clock was set, or the job went back."""
    times_s = [steps[step].at_s for step in sorted(steps)]
    return len({saved.clock for saved in steps.values()}) > 1 or times_s != sorted(times_s)
