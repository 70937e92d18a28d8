"""Rules of the coordinator's core taken back, each of which a promise misses."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple

from tests.model.promise import edited

from .world import FAULTS, Bounds


class Mutation(NamedTuple):
    """A rule that is taken back: in `function`, `text` becomes `instead`; `breaks` names the
    promises that miss it.
    """

    name: str
    function: str  # module:qualified name, below holdfast.coordination.core
    text: str
    instead: str
    breaks: tuple[str, ...]
    bounds: Bounds = Bounds(1, FAULTS, 1)

    def applied(self) -> AbstractContextManager[None]:
        """Has the core go without the rule."""
        name, _, path = self.function.partition(":")
        return edited(f"holdfast.coordination.core.{name}", path, self.text, self.instead)


MUTATIONS = [
    Mutation(
        "all have to come",
        "barriers:Barriers._enter",
        "if len(barrier.arrived) == len(barrier.participants):",
        "if len(barrier.arrived) >= len(barrier.participants) - 1:",
        ("COMPLETE",),
    ),
    Mutation(
        "a result stays",
        "barriers:Barriers._replay",
        "self._answer(finished.outcome, arrival.call)",
        "arrival.call.succeed(finished.outcome.counter)",
        ("ALIKE", "COMPLETE"),
    ),
    Mutation(
        "a death fails what needs it",
        "machine:Machine._fail_needy",
        "self.barriers.fail_lost(task.task_id, now)",
        "pass",
        ("DEATH",),
    ),
    Mutation(
        "a death answers who is alive",
        "machine:Machine._fail_needy",
        "self.liveness.resolve()",
        "pass",
        ("LIVING SOON",),
    ),
    Mutation(
        "a barrier's time is over",
        "barriers:Barrier.expire",
        "self.owner.time_out(self, now)",
        "pass",
        ("BOUNDED",),
    ),
    Mutation(
        "a result is in the journal",
        "journal_codec:drain",
        "rows += _barrier_rows(str(key), machine, wall_offset_s)",
        "pass",
        ("ALIKE",),
        bounds=Bounds(1, frozenset({"break", "restart", "late"}), 3),
    ),
    Mutation(
        "an instance follows the one before",
        "barriers:Barriers._next",
        "**self._left_by(finished),",
        "",
        ("COMPLETE",),
        bounds=Bounds(2, frozenset({"break"}), 1),
    ),
]
