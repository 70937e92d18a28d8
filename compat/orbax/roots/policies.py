"""Orbax's policies of saving and keeping, and how holdfast's manager asks them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax

from holdfast.checkpoint import AnyOf, PolicyContext, StepFacts
from holdfast.checkpoint.policy import SavePolicy

Infos: TypeAlias = Sequence[Any]


@dataclass
class PolicyCheckpointInfo:
    """A step as policies see it."""

    step: int
    metrics: Any = None
    time: Any = None  # a datetime


@dataclass(kw_only=True)
class DecisionContext:
    """What a policy of saving may know besides the steps."""

    is_saving_in_progress: bool
    reached_preemption: bool
    multiprocessing_options: Any = None


@dataclass(kw_only=True)
class PreservationContext:
    """What a policy of keeping may know besides the steps: nothing."""


@runtime_checkable
class SaveDecisionPolicy(Protocol):
    """Says when to save."""

    def should_save(
        self, step: Any, previous_steps: Sequence[Any], *, context: DecisionContext
    ) -> bool:
        """Returns whether to save `step`."""
        ...


@runtime_checkable
class PreservationPolicy(Protocol):
    """Says what to keep."""

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: PreservationContext
    ) -> Sequence[bool]:
        """Returns for each step whether it stays."""
        ...


@dataclass
class FixedIntervalPolicy:
    """Saves the multiples of `interval`. Raises ValueError for 0."""

    interval: int

    def __post_init__(self) -> None:
        _check_interval("FixedIntervalPolicy: interval", self.interval)

    def should_save(
        self, step: Any, previous_steps: Sequence[Any], *, context: DecisionContext
    ) -> bool:
        return bool(step.step % self.interval == 0)


@dataclass
class SpecificStepsPolicy:
    """Saves the steps that it names."""

    steps: Container[int]

    def should_save(
        self, step: Any, previous_steps: Sequence[Any], *, context: DecisionContext
    ) -> bool:
        return step.step in self.steps


@dataclass(kw_only=True)
class ContinuousCheckpointingPolicy:
    """Saves when no save is in flight, and `minimum_interval_secs` have passed since the last."""

    minimum_interval_secs: int | None = None
    uses_clock = True  # in a group the primary's answer counts

    def should_save(
        self, step: Any, previous_steps: Sequence[Any], *, context: DecisionContext
    ) -> bool:
        if context.is_saving_in_progress:
            return False
        if not previous_steps or self.minimum_interval_secs is None:
            return True
        return bool(
            _utc(step.time) - _utc(previous_steps[-1].time)
            >= timedelta(seconds=self.minimum_interval_secs)
        )


class PreemptionCheckpointingPolicy:
    """Saves when the job is preempted."""

    def should_save(
        self, step: Any, previous_steps: Sequence[Any], *, context: DecisionContext
    ) -> bool:
        return context.reached_preemption


class InitialSavePolicy:
    """Saves when there is no step yet."""

    def should_save(
        self, step: Any, previous_steps: Sequence[Any], *, context: DecisionContext
    ) -> bool:
        return not previous_steps


@dataclass
class ShouldSaveFn:
    """Saves when the function of the step and the last one says so."""

    function: Callable[[int, int | None], bool]

    def should_save(
        self, step: Any, previous_steps: Sequence[Any], *, context: DecisionContext
    ) -> bool:
        return bool(self.function(step.step, previous_steps[-1].step if previous_steps else None))


@dataclass
class AnySavePolicy:
    """Saves when any of its policies does."""

    policies: Sequence[Any]

    def should_save(
        self, step: Any, previous_steps: Sequence[Any], *, context: DecisionContext
    ) -> bool:
        return any(
            policy.should_save(step, previous_steps=previous_steps, context=context)
            for policy in self.policies
        )


class _Preserves:
    """A policy of keeping that chooses among the steps."""

    asks_for_metrics = False

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: PreservationContext
    ) -> Sequence[bool]:
        """Returns for each step whether it stays."""
        kept = {info.step for info in self._kept(checkpoints)}
        return [info.step in kept for info in checkpoints]

    def _kept(self, infos: Infos) -> Infos:
        raise NotImplementedError


def _newest(infos: Infos, most: int | None) -> Infos:
    """Returns the last of them; None: all."""
    # Not infos[-most:], which is all of them for 0.
    return infos if most is None else infos[max(0, len(infos) - most) :]


@dataclass
class PreserveAll(_Preserves):
    """Keeps every step."""

    def _kept(self, infos: Infos) -> Infos:
        return infos


@dataclass
class LatestN(_Preserves):
    """Keeps the newest `n` steps; None: all."""

    n: int | None = None

    def _kept(self, infos: Infos) -> Infos:
        return _newest(infos, self.n)


@dataclass
class EveryNSeconds(_Preserves):
    """Keeps steps whose saves began at least so far apart."""

    interval_secs: int

    def _kept(self, infos: Infos) -> Infos:
        kept: list[Any] = []
        for info in infos:
            apart = timedelta(seconds=self.interval_secs)
            if not kept or _utc(info.time) - _utc(kept[-1].time) >= apart:
                kept.append(info)
        return kept


@dataclass
class LatestDuration(_Preserves):
    """Keeps the steps of the last `duration`."""

    duration: timedelta

    def _kept(self, infos: Infos) -> Infos:
        return [info for info in infos if datetime.now(UTC) - _utc(info.time) <= self.duration]


@dataclass
class EveryNSteps(_Preserves):
    """Keeps multiples of `interval_steps`, or, not exact, steps at least so far apart.

    Of them it keeps the newest `max_to_keep`. Raises ValueError for an interval of 0.
    """

    interval_steps: int
    exact_interval: bool = True
    max_to_keep: int | None = None

    def __post_init__(self) -> None:
        _check_interval("EveryNSteps: interval_steps", self.interval_steps)

    def _kept(self, infos: Infos) -> Infos:
        chosen: list[Any] = []
        for info in infos:
            if self.exact_interval:
                wanted = info.step % self.interval_steps == 0
            else:
                wanted = not chosen or info.step - chosen[-1].step >= self.interval_steps
            if wanted:
                chosen.append(info)
        return _newest(chosen, self.max_to_keep)


@dataclass
class EveryNStepsClosest(_Preserves):
    """Keeps the step closest to each multiple of `interval_steps` (of two the later), and the last.

    Of them it keeps the newest `max_to_keep`. Raises ValueError for an interval of 0.
    """

    interval_steps: int
    max_to_keep: int | None = None

    def __post_init__(self) -> None:
        _check_interval("EveryNStepsClosest: interval_steps", self.interval_steps)

    def _kept(self, infos: Infos) -> Infos:
        closest: dict[int, int] = {}
        for info in infos:
            step = info.step
            multiple = round(step / self.interval_steps) * self.interval_steps
            if multiple not in closest or abs(step - multiple) <= abs(closest[multiple] - multiple):
                closest[multiple] = step
        chosen = [info for info in infos if info.step in closest.values() or info is infos[-1]]
        return _newest(chosen, self.max_to_keep)


def _check_interval(what: str, interval: int) -> None:
    if interval == 0:
        raise ValueError(f"{what} is 0, and no step is a multiple of it; give 1 or more")


def _utc(time: datetime) -> datetime:
    """Returns a time with its zone; one without it is local."""
    return time.astimezone(UTC)


class CustomSteps(_Preserves):
    """Keeps the steps that it names."""

    def __init__(self, steps: Sequence[int]) -> None:
        self._steps = frozenset(steps)

    def _kept(self, infos: Infos) -> Infos:
        return [info for info in infos if info.step in self._steps]


@dataclass(kw_only=True)
class BestN(_Preserves):
    """Keeps the `n` steps whose metric is highest (`reverse`: lowest).

    Those without metrics stay too, unless told otherwise.
    """

    get_metric_fn: Callable[[Any], float]
    reverse: bool = False
    n: int | None = None
    keep_checkpoints_without_metrics: bool = True
    asks_for_metrics = True

    def _kept(self, infos: Infos) -> Infos:
        if self.n is None or len(infos) <= self.n:
            return infos
        ranked = sorted(
            (info for info in infos if info.metrics),
            key=lambda info: self.get_metric_fn(info.metrics),
            reverse=self.reverse,
        )
        stays = self.keep_checkpoints_without_metrics and self.n > 0
        without = [info for info in infos if stays and not info.metrics]
        return [*without, *_newest(ranked, self.n)]


@dataclass
class AnyPreservationPolicy:
    """Keeps what any of its policies keeps."""

    policies: Sequence[Any]

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: PreservationContext
    ) -> Sequence[bool]:
        answers = [policy.should_preserve(checkpoints, context=context) for policy in self.policies]
        if not answers:
            return [False] * len(checkpoints)
        return [any(each) for each in zip(*answers, strict=True)]


def keeps_all(policy: Any) -> bool:
    """Says whether a policy of keeping is known to let no step go."""
    if isinstance(policy, AnyPreservationPolicy):
        return any(map(keeps_all, policy.policies))
    newest = isinstance(policy, LatestN) and policy.n is None
    return newest or isinstance(policy, PreserveAll)


def asks_for_metrics(policy: Any) -> bool:
    """Says whether a policy of keeping may look at metrics: all but those that say they do not."""
    if isinstance(policy, AnyPreservationPolicy):
        return any(map(asks_for_metrics, policy.policies))
    return bool(getattr(policy, "asks_for_metrics", True))


def asking(policy: Any, *given: Any) -> SavePolicy:
    """Returns what asks a policy of saving, with the rest of an AskToSave.

    Of several each is asked for itself: one without a clock has one answer in a group.
    """
    if isinstance(policy, AnySavePolicy):
        return AnyOf(*(asking(each, *given) for each in policy.policies))
    return AskToSave(policy, *given)


def _uses_clock(policy: Any) -> bool:
    """Says whether a policy asks a clock, or one that it holds, as a program's own may."""
    held = jax.tree.leaves(getattr(policy, "__dict__", {}))
    inner = [each for each in held if hasattr(each, "should_save") and not hasattr(each, "save")]
    return getattr(policy, "uses_clock", False) or any(map(_uses_clock, inner))


@dataclass
class AskToSave:
    """A save policy of holdfast's that asks one of Orbax's.

    `previous()` lists the steps, `saving()` returns whether a save is in flight. `processes` is
    handed on to it.
    """

    policy: Any
    previous: Callable[[], Sequence[PolicyCheckpointInfo]]
    saving: Callable[[], bool]
    processes: Any

    @functools.cached_property
    def uses_clock(self) -> bool:
        """Whether a clock is part of the answer."""
        return _uses_clock(self.policy)

    def wants(self, context: PolicyContext) -> str:
        """Returns the policy's name where it wants the step."""
        if self.uses_clock and context.elapsed_s == 0.0:
            return ""  # no clock may be asked: all processes have to give one answer
        step = PolicyCheckpointInfo(context.step, None, datetime.now(UTC))
        about = DecisionContext(
            is_saving_in_progress=self.saving(),
            reached_preemption=context.preempted,
            multiprocessing_options=self.processes,
        )
        wanted = self.policy.should_save(step, previous_steps=self.previous(), context=about)
        return f"{type(self.policy).__name__} wants step {context.step}" if wanted else ""


@dataclass
class AskToKeep:
    """A keep policy of holdfast's that asks one of Orbax's.

    The newest step stays whatever the policy answers. `put_aside(step)` is called before a step is
    let go, and says whether it may be. `unwritten` has metrics that no step holds.
    """

    policy: Any
    put_aside: Callable[[int], bool] = lambda step: True
    unwritten: Mapping[int, Any] = field(default_factory=dict)

    def keeps(self, steps: Sequence[StepFacts]) -> set[int]:
        """Returns the steps that stay."""
        times = [datetime.fromtimestamp(facts.started_s or 0.0, UTC) for facts in steps]
        infos = [
            PolicyCheckpointInfo(
                facts.step, dict(facts.metrics) or self.unwritten.get(facts.step) or None, time
            )
            for facts, time in zip(steps, times, strict=True)
        ]
        flags = self.policy.should_preserve(infos, context=PreservationContext())
        kept = {info.step for info, stays in zip(infos, flags, strict=True) if stays}
        newest = {info.step for info in infos[-1:]}
        others = sorted({info.step for info in infos} - kept - newest)
        return kept | newest | {step for step in others if not self.put_aside(step)}
