"""When to save and what to keep: values, and decisions that return their reason.

A save policy answers `wants(context)` with the sentence that says why, or "" for no. A keep policy
answers `keeps(steps)` with the steps that must stay. Neither reads a clock or a disk: what they
need is in their arguments, so every process of a job decides alike; to a keep policy it is as late
as the newest step. Anything with the same verb serves: subclassing is not needed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Protocol, SupportsFloat, TypeVar

T = TypeVar("T")
CLOCK_SLACK_S = 60.0  # by which two managers' clocks may differ without a contradiction


@dataclass(frozen=True)
class SaveCosts:
    """What saves cost in this lane, and how often the job fails, as the primary has measured it.

    `blocked_s` is how long a usual save holds the program (None: none was measured yet), `save_s`
    how long it takes until the step is there. The job has failed `failures` times in `run_s`
    seconds.
    """

    blocked_s: float | None = None
    save_s: float = 0.0
    failures: int = 0
    run_s: float = 0.0


@dataclass(frozen=True)
class PolicyContext:
    """What a save policy decides by: the step asked about, the newest saved or started one, seconds
    since that save, the preemption notice, what saves cost.

    `elapsed_s` is 0 wherever a clock may not be asked: in a group only the primary's clock counts,
    and its answer reaches all as a sync point.
    """

    step: int
    last_step: int | None = None
    elapsed_s: float = 0.0
    preempted: bool = False
    costs: SaveCosts = SaveCosts()


@dataclass(frozen=True)
class StepFacts:
    """What a keep policy decides by: a committed step with its metrics, and when its save began, in
    Unix seconds (None: not known). Times of one `writer`, a manager, are of one clock that never
    jumps; those of two may contradict each other.
    """

    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    started_s: float | None = None
    writer: str = ""


class SavePolicy(Protocol):
    """Says whether a step is to be saved. One verb; must be a pure function of `context`."""

    def wants(self, context: PolicyContext) -> str:
        """Returns why this step is to be saved, or "" if it is not."""
        ...


class KeepPolicy(Protocol):
    """Says which steps stay. One verb; must be a pure function of `steps`, which ascend. The newest
    step stays whatever it says.
    """

    def keeps(self, steps: Sequence[StepFacts]) -> set[int]:
        """Returns the steps that must stay."""
        ...


def check_save_policy(policy: object) -> None:
    """Raises TypeError, with the right spelling, unless it is a save policy."""
    _check_argument("save_policy", policy, "wants", "EveryNSteps")


def check_keep_policy(policy: object) -> None:
    """Raises TypeError, with the right spelling, unless it is a keep policy."""
    _check_argument("keep_policy", policy, "keeps", "KeepLast")


def _check_argument(name: str, policy: object, verb: str, example: str) -> None:
    number = policy if type(policy) is int else 3
    advice = f"write {name}={example}({number}), or pass an object with a method `{verb}`"
    _check_policy(f"{name}={_shown(policy)}", policy, verb, f"{name}={policy!r}", advice)


def _check_inner(kind: str, policies: Iterable[object], verb: str, example: str) -> None:
    advice = f"write {kind}({example}(3), ...), with a policy for each argument"
    for policy in policies:
        _check_policy(f"{kind}({_shown(policy)})", policy, verb, f"{kind}: {policy!r}", advice)


def _check_policy(given: str, policy: object, verb: str, named: str, advice: str) -> None:
    """Raises TypeError unless it is a policy with this verb; `given` and `named` say which it is,
    where it is one of the other kind and where it is none.
    """
    # A class has the verb too, and is no policy yet.
    if callable(getattr(policy, verb, None)) and not isinstance(policy, type):
        return
    if verb == "wants" and callable(getattr(policy, "keeps", None)):
        raise TypeError(
            f"{given} says which steps stay, and not when to save: write"
            f" keep_policy={_shown(policy)}, and save_policy=EveryNSteps(100)"
        )
    if verb == "keeps" and callable(getattr(policy, "wants", None)):
        raise TypeError(
            f"{given} says when to save, and not which steps stay: write"
            f" save_policy={_shown(policy)}, and keep_policy=KeepLast(3)"
        )
    raise TypeError(f"{named} is no policy: {advice}")


def _shown(policy: object) -> str:
    return f"{policy.__name__}(...)" if isinstance(policy, type) else repr(policy)


@dataclass(frozen=True)
class _Counted:
    n: int

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not hasattr(self.n, "__index__"):
            raise TypeError(f"{name}: n is a whole number, as in {name}(3), found {self.n!r}")
        need_positive(name, "n", self.n)
        # A Python int: numpy's wrap around, or have no -n.
        object.__setattr__(self, "n", operator.index(self.n))


@dataclass(frozen=True)
class _Timed:
    seconds: float

    def __post_init__(self) -> None:
        need_positive(type(self).__name__, "seconds", self.seconds)


@dataclass(frozen=True)
class EveryNSteps(_Counted):
    """Saves steps 0, n, 2n, ..."""

    def wants(self, context: PolicyContext) -> str:
        """Returns a reason at each multiple of `n`."""
        if context.step % self.n:
            return ""
        return f"step {context.step} is a multiple of {self.n}"


@dataclass(frozen=True)
class EveryNSeconds(_Timed):
    """Saves when `seconds` have passed since the last save began, by the primary's clock."""

    uses_clock: ClassVar[bool] = True

    def wants(self, context: PolicyContext) -> str:
        """Returns a reason once the time has passed."""
        if context.elapsed_s < self.seconds:
            return ""
        return f"{context.elapsed_s:.1f} s since the last save, of {self.seconds:g} s"


@dataclass(frozen=True, init=False, repr=False)
class AtSteps:
    """Saves the steps that it names: `AtSteps({10, 100, 1000})`."""

    steps: frozenset[int]

    def __init__(self, steps: Iterable[int]) -> None:
        if not isinstance(steps, Iterable):
            raise TypeError(f"AtSteps: expected several steps, as in AtSteps([{steps!r}])")
        named = list(steps)
        for step in named:
            if not hasattr(step, "__index__"):
                raise TypeError(f"AtSteps: steps are whole numbers, found {step!r}")
        object.__setattr__(self, "steps", frozenset(map(operator.index, named)))

    def wants(self, context: PolicyContext) -> str:
        """Returns a reason at the named steps."""
        return f"step {context.step} is named" if context.step in self.steps else ""

    def __repr__(self) -> str:
        return f"AtSteps({sorted(self.steps)})"


@dataclass(frozen=True)
class OnPreemption:
    """Saves at the step at which the whole job agreed to stop. In a group every manager does so,
    whatever its policy.
    """

    def wants(self, context: PolicyContext) -> str:
        """Returns a reason once the preemption sync point is reached, until the step is saved."""
        is_due = context.preempted and context.last_step != context.step
        return "the job is preempted" if is_due else ""


@dataclass(frozen=True)
class FirstSave:
    """Saves the first step that is asked about, where the root has none yet."""

    def wants(self, context: PolicyContext) -> str:
        """Returns a reason until a step is saved."""
        return "no step is saved yet" if context.last_step is None else ""


@dataclass(frozen=True, init=False)
class AnyOf:
    """Saves when any of its policies does."""

    policies: tuple[SavePolicy, ...]

    def __init__(self, *policies: SavePolicy) -> None:
        _check_inner("AnyOf", policies, "wants", "EveryNSteps")
        object.__setattr__(self, "policies", policies)

    def wants(self, context: PolicyContext) -> str:
        """Returns the first reason among its policies."""
        return next((reason for policy in self.policies if (reason := policy.wants(context))), "")


@dataclass(frozen=True)
class KeepLast(_Counted):
    """Keeps the newest `n` steps."""

    def keeps(self, steps: Sequence[StepFacts]) -> set[int]:
        """Returns the newest `n`."""
        return {facts.step for facts in steps[-self.n :]}


@dataclass(frozen=True)
class KeepEvery(_Counted):
    """Keeps the multiples of `n`."""

    def keeps(self, steps: Sequence[StepFacts]) -> set[int]:
        """Returns the multiples of `n`."""
        return {facts.step for facts in steps if facts.step % self.n == 0}


@dataclass(frozen=True)
class KeepClosestTo(_Counted):
    """Keeps, for each multiple of `n`, the step closest to it, of equals the newer: for steps that
    are saved by the clock.
    """

    def keeps(self, steps: Sequence[StepFacts]) -> set[int]:
        """Returns the closest step to each multiple that is some step's nearest."""
        closest: dict[int, int] = {}
        for step in (facts.step for facts in steps):
            multiple = (step + self.n // 2) // self.n * self.n
            if abs(step - multiple) <= abs(closest.get(multiple, math.inf) - multiple):
                closest[multiple] = step
        return set(closest.values())


def contradicted_steps(steps: Sequence[StepFacts]) -> set[int]:
    """Returns those of ascending steps whose time says nothing: one of another manager, of a higher
    step, is earlier, or one of a lower step later.

    A clock was wrong then, or the job went back to an older step. Which one, nothing says.
    """
    return _overtaken(steps, 1) | _overtaken(steps[::-1], -1)


def _overtaken(steps: Sequence[StepFacts], sign: int) -> set[int]:
    """Returns the steps that come after one of another manager, and not by their times."""
    overtaken = set[int]()
    latest: dict[str, float] = {}  # of the two managers with the latest times so far
    for facts in steps:
        if facts.started_s is None:
            continue
        time_s = sign * facts.started_s
        others = [latest_s for writer, latest_s in latest.items() if writer != facts.writer]
        if max(others, default=-math.inf) > time_s + CLOCK_SLACK_S:
            overtaken.add(facts.step)
        latest[facts.writer] = max(time_s, latest.get(facts.writer, -math.inf))
        if len(latest) > 2:
            del latest[min(latest, key=latest.__getitem__)]
    return overtaken


@dataclass(frozen=True)
class KeepLatestFor(_Timed):
    """Keeps the steps whose saves began at most `seconds` before that of the newest in time, and
    those whose time is not known, or contradicts that of another manager (the clock jumped, or the
    job went back to an older step).
    """

    def keeps(self, steps: Sequence[StepFacts]) -> set[int]:
        """Returns the steps of the last `seconds`."""
        kept = contradicted_steps(steps)
        times_s = {
            facts.step: facts.started_s
            for facts in steps
            if facts.started_s is not None and facts.step not in kept
        }
        newest_s = max(times_s.values(), default=0.0)
        kept |= {facts.step for facts in steps if facts.started_s is None}
        return kept | {step for step, at_s in times_s.items() if at_s >= newest_s - self.seconds}


@dataclass(frozen=True)
class KeepEverySeconds(_Timed):
    """Keeps the oldest step, and each whose save began at least `seconds` after that of the one
    kept before it.

    A step stays whose time is not known, or contradicts that of another manager. What it keeps once
    it keeps for good: of the steps in between none is needed.
    """

    def keeps(self, steps: Sequence[StepFacts]) -> set[int]:
        """Returns steps that far apart."""
        kept = contradicted_steps(steps)
        last_s = -math.inf
        for facts in steps:
            if facts.step in kept:
                continue
            if facts.started_s is None:
                kept.add(facts.step)
            elif facts.started_s >= last_s + self.seconds:
                kept.add(facts.step)
                last_s = facts.started_s
        return kept


@dataclass(frozen=True)
class KeepBest(_Counted):
    """Keeps the `n` steps whose `metric` is best; of equals the newer. A step without the metric,
    or with NaN, is never among them.

    Where no step at all has the metric, every step stays: its name may be mistyped.
    """

    metric: str
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode not in ("min", "max"):
            raise ValueError(f'KeepBest: mode is "min" or "max", not {self.mode!r}')

    def keeps(self, steps: Sequence[StepFacts]) -> set[int]:
        """Returns the best `n`, or all where none can be judged."""
        if not any(self.metric in facts.metrics for facts in steps):
            return {facts.step for facts in steps}
        return set(self.ranked(steps)[: self.n])

    def ranked(self, steps: Sequence[StepFacts]) -> list[int]:
        """Returns the steps that have the metric, best first."""
        sign = 1 if self.mode == "min" else -1
        scored = [
            (sign * facts.metrics[self.metric], -facts.step)
            for facts in steps
            if not math.isnan(facts.metrics.get(self.metric, math.nan))
        ]
        return [-step for _, step in sorted(scored)]


@dataclass(frozen=True)
class KeepAll:
    """Keeps every step."""

    def keeps(self, steps: Sequence[StepFacts]) -> set[int]:
        """Returns all steps."""
        return {facts.step for facts in steps}


@dataclass(frozen=True, init=False)
class KeepAnyOf:
    """Keeps what any of its policies keeps."""

    policies: tuple[KeepPolicy, ...]

    def __init__(self, *policies: KeepPolicy) -> None:
        _check_inner("KeepAnyOf", policies, "keeps", "KeepLast")
        object.__setattr__(self, "policies", policies)

    def keeps(self, steps: Sequence[StepFacts]) -> set[int]:
        """Returns the union of what its policies keep."""
        return set().union(*(policy.keeps(steps) for policy in self.policies))


def to_delete(
    policy: KeepPolicy,
    steps: Sequence[StepFacts],
    *,
    left_behind: Collection[int] = (),
) -> list[int]:
    """Returns the steps that `policy` lets go unless a reader holds them, oldest first: never the
    newest.

    Those that were `left_behind` are not among the steps that the policy is asked about. They stay
    until there is a step at or above their number that was not left, and go first then, unless the
    policy keeps all.
    """
    ascending = sorted(steps, key=lambda each: each.step)
    line = [facts for facts in ascending if facts.step not in left_behind]
    numbers = [facts.step for facts in line]
    newest = max(numbers, default=-1)
    overtaken: list[int] = []
    if not _those_in(policy, KeepAll):
        overtaken = [
            facts.step for facts in ascending if facts.step in left_behind and facts.step <= newest
        ]
    stay = policy.keeps(line) | {newest}
    return [step for step in [*overtaken, *numbers] if step not in stay]


def _and_inner(policy: SavePolicy | KeepPolicy | None) -> Iterator[object]:
    """Yields a policy, and those that are in it, at any depth."""
    yield policy
    if isinstance(policy, AnyOf | KeepAnyOf):
        for inner in policy.policies:
            yield from _and_inner(inner)


def _those_in(policy: SavePolicy | KeepPolicy | None, kind: type[T]) -> list[T]:
    return [each for each in _and_inner(policy) if isinstance(each, kind)]


def best_rule(
    policy: KeepPolicy,
    metric: str | None = None,
    mode: Literal["min", "max"] | None = None,
) -> KeepBest | None:
    """Returns what "best" means for `best_step()`: what the KeepBest inside a keep policy says,
    that of the metric, unless given. None where no metric is known.
    """
    rules = (rule for rule in _those_in(policy, KeepBest) if metric in (None, rule.metric))
    rule = next(rules, None) or (KeepBest(1, metric) if metric else None)
    return replace(rule, mode=mode) if rule and mode else rule


def best_by_metric(policy: KeepPolicy, steps: Sequence[StepFacts]) -> dict[str, int]:
    """Returns the best step by each metric that a KeepBest in `policy` judges by."""
    ranked = {rule.metric: rule.ranked(steps) for rule in _those_in(policy, KeepBest)}
    return {metric: best_first[0] for metric, best_first in ranked.items() if best_first}


def unknown_metrics(policy: KeepPolicy, steps: Sequence[StepFacts]) -> list[str]:
    """Returns a sentence for each KeepBest in `policy` whose metric none of the steps has."""
    rules = _those_in(policy, KeepBest)
    if not rules:
        return []
    known = sorted({name for facts in steps for name in facts.metrics})
    found = f"they have {', '.join(map(repr, known))}" if known else "they have none at all"
    return [
        f"{rule} keeps every step: none of {len(steps)} has the metric {rule.metric!r}, {found};"
        f" write a metric that they have, or pass metrics={{{rule.metric!r}: ...}} to `save`"
        for rule in rules
        if rule.metric not in known
    ]


def need_positive(policy: str, name: str, value: object) -> None:
    """Raises TypeError or ValueError, which name the policy, unless a value is above 0."""
    if not isinstance(value, SupportsFloat):
        raise TypeError(f"{policy}: {name} is a number, found {value!r}")
    if isinstance(value, bool) or not float(value) > 0:
        raise ValueError(f"{policy}: {name} must be above 0, found {value!r}")


def uses_clock(policy: SavePolicy) -> bool:
    """Says whether a policy's answer rests on a clock; a policy of the caller's own says so with a
    true attribute `uses_clock`.
    """
    return any(getattr(each, "uses_clock", False) for each in _and_inner(policy))


def asks_preemption(policy: SavePolicy | None) -> bool:
    """Says whether OnPreemption is part of a policy."""
    return bool(_those_in(policy, OnPreemption))
