"""Rules of the sync point taken back, each of which a promise misses."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple

from tests.model.promise import edited


class Mutation(NamedTuple):
    """A rule that is taken back: in `function`, `text` becomes `instead`. The search `found_in`
    misses it, by one of the promises in `breaks`.
    """

    name: str
    function: str  # module:qualified name, below holdfast.multihost.preemption
    text: str
    instead: str
    found_in: str
    breaks: tuple[str, ...]

    def applied(self) -> AbstractContextManager[None]:
        """Has the sync point go without the rule."""
        name, _, path = self.function.partition(":")
        module = f"holdfast.multihost.preemption.{name}"
        return edited(module, path, self.text, self.instead, takers=("holdfast.multihost",))


CORE = "step_agreement_core"
SHELL = "step_agreement:SyncPoint"
DEAD = "one that answers dies"
MUTATIONS = [
    Mutation(
        "answers above the floor wait",
        f"{CORE}:StepLog.may_answer",
        "return not self.frozen or step <= self.floor",
        "return True",
        "a notice",
        breaks=("AHEAD", "ALIKE"),
    ),
    Mutation(
        "a round holds beyond every answer",
        f"{CORE}:agreed_step",
        "max(floors) + 1",
        "max(floors)",
        "a notice",
        breaks=("AHEAD",),
    ),
    Mutation(
        "a floor is the highest answer",
        f"{CORE}:StepLog.freeze",
        "return self.floor",
        "return NEVER",
        "a notice",
        breaks=("AHEAD",),
    ),
    Mutation(
        "the first to write a round has it",
        f"{SHELL}.propose",
        "if self._group_client.insert(change, announcement.encode()):",
        "if self._group_client.insert(change, announcement.encode()) or True:",
        "two notices",
        breaks=("ONE LOG", "ALIKE", "HEARD"),
    ),
    Mutation(
        "the dead are left out",
        f"{SHELL}._gather",
        " - set(self._lost())",
        "",
        DEAD,
        breaks=("ENDS",),
    ),
    Mutation(
        "all who live have a floor",
        f"{SHELL}._gather",
        "missing = sorted(set(self.tasks) - set(floors) - set(self._lost()))",
        "missing = []",
        "a notice",
        breaks=("AHEAD", "ALIKE"),
    ),
    Mutation(
        "another takes over",
        f"{SHELL}._gathers",
        "return self.process_id in first or self.process_id in others[:take_overs]",
        "return self.process_id == announcer",
        "the announcer dies",
        breaks=("ENDS",),
    ),
    Mutation(
        "no answer before the past is known",
        f"{SHELL}.__init__",
        "self._log.freeze()",
        "pass",
        "one comes late",
        breaks=("ALIKE", "AHEAD"),
    ),
    Mutation(
        "who comes late hears the last change",
        f"{SHELL}._catch_up",
        "self._skip(group_client)",
        "pass",
        "one comes late, and two notices",
        breaks=("ALIKE", "ONE LOG"),
    ),
    Mutation(
        "a round's keys stay until all have read them",
        f"{SHELL}._round",
        'group_client.delete(f"{self.folder}/{number - 1}")',
        'group_client.delete(f"{self.folder}/{number}")',
        "one comes late, and two notices",
        breaks=("ENDS", "ALIKE", "ONE LOG"),
    ),
    Mutation(
        "who leaves in a round says so",
        f"{SHELL}._end",
        "and (leaves or self._follower.is_alive())",
        "and self._follower.is_alive()",
        "one leaves in a round",
        breaks=("ENDS",),
    ),
    Mutation(
        "who has left is not waited for",
        f"{SHELL}._gather",
        "missing = [task for task in missing if task not in left]",
        "pass",
        "one leaves, and a notice",
        breaks=("ENDS",),
    ),
    Mutation(
        "the last that leaves takes all along",
        f"{SHELL}._wake",
        "group_client.delete_after(self.folder, len(self.tasks))",
        "pass",
        "all leave",
        breaks=("TIDY",),
    ),
]
