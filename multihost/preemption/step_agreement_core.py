"""The core of a sync point: from which step on does a change hold, alike for every process?

No I/O, threads or clocks.

The problem. A change (a preemption notice, its withdrawal, "save soon") comes to one process at a
moment that is a different training step in every process. All must act on it at one step. A process
cannot take an answer back: once it got "not yet" for step s, it has gone on into step s, whose
device collectives may need every other process to come along.

The protocol. A change is written into one log, shared by all: rounds 0, 1, 2, ... (the first to
write a round has it). For each round:

1. Somebody announces round r. Every process learns of it in a background thread; main threads may
   be deep inside a device collective.
2. On learning of it, a process *freezes*: it publishes its floor, the highest step that it has
   answered (NEVER if none), and until the round is decided it holds back answers about steps above
   its floor. Steps at or below it can still be answered at once.
3. When the floors of all processes are there, the round takes effect at step max(floors) + 1. That
   number is written once, the first writer has it, and everybody reads it.
4. Every process appends (step, value) to its log and goes on answering: at step s holds the last
   change that takes effect at or below s.

It answers alike. Let p answer about s knowing a rounds, and q about the same s knowing b > a
rounds. Take a round r with a <= r < b. When p answered, it had not decided r: either it had not
frozen for r yet, so its floor for r, published later, is at least s; or it had, and then it
answered only because s was not above that floor. Both ways the round takes effect at a step above
s, so it does not change q's answer. The floors of one process never fall, so the log's steps never
fall either, and "the last change at or below s" is well defined.

It does not block for ever. A process that holds back waits only for other processes' background
threads to publish floors, never for their main threads; so a process in step s's collective,
waiting for one that holds back at step s, is not part of a cycle: the floor of the first is
published meanwhile. A process that is known to be dead is left out, as it will not answer anything
any more.

It does not overtake. Whoever asks about a step at or above the one decided gets the change: no
process passes it, even one that asks only every 7 steps; the change holds for it at the first step
that it asks about from there on.

This differs from the sync point in TSL (the C++ library under jaxlib:
tsl/distributed_runtime/preemption), from which the idea of max + 1 comes, in that an answer holds
from a step on instead of at one exact step, and that a change can follow a change.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

# The floor of a process that has answered about no step yet: below every step, negative ones
# included.
NEVER = -(2**62)
# Changes that a log knows for certain. At twice as many it forgets the first ones.
KEPT_CHANGES = 1024


@dataclass(frozen=True)
class Change:
    """One decided round: `value` holds from `step` on, until a later change."""

    step: int
    value: str


def agreed_step(floors: Iterable[int]) -> int:
    """Returns the step from which a round holds, given the floors of all processes."""
    return max(floors) + 1


class StepLog:
    """One process's view of the log: what it has answered, and what was decided. Not thread-safe.

    About a step before the KEPT_CHANGES last changes it answers that nothing changed there, with
    the value that held after it. What it has forgotten depends only on the steps that it was asked
    about, so that processes that ask about the same ones forget alike.
    """

    def __init__(self) -> None:
        self.floor = NEVER
        self.frozen = False
        self._first = 0  # the round of the first change
        self._changes: list[Change] = []
        self._before = Change(NEVER, "")  # the last that was forgotten
        self._fired: set[int] = set()

    @property
    def round(self) -> int:
        """The number of the next round."""
        return self._first + len(self._changes)

    @property
    def latest(self) -> str:
        """The value of the last decided round, at whatever step it begins to hold; "" for none."""
        return self._changes[-1].value if self._changes else ""

    def skip_to(self, round: int) -> None:
        """Leaves out rounds before `round`: this process came too late for them.

        What they decided holds no more.
        """
        self._first = round - len(self._changes)

    def freeze(self) -> int:
        """Holds answers above the floor back until the next `decide`, and returns the floor.

        May be called again.
        """
        self.frozen = True
        return self.floor

    def thaw(self) -> None:
        """Answers again, although no round was decided: none is under way, or nobody follows the
        log any more.
        """
        self.frozen = False

    def decide(self, step: int, value: str) -> None:
        """Appends the next round's outcome and answers again."""
        assert self.frozen and step > self.floor, (
            f"a round decided for step {step}, at or below the published floor {self.floor}"
        )
        self._changes.append(Change(step, value))
        self.frozen = False

    def may_answer(self, step: int) -> bool:
        """Returns whether `step` can be answered now."""
        return not self.frozen or step <= self.floor

    def answer(self, step: int) -> Answer:
        """Returns what holds at `step`, and remembers that it was asked.

        Only where `may_answer(step)`.
        """
        assert self.may_answer(step)
        if not self._changes:
            self.floor = max(self.floor, step)
            return _NOTHING
        begun = (change for change in reversed(self._changes) if change.step <= step)
        last = next(begun, self._before)
        if step > self.floor:
            has_changed = last.step > self.floor
            self.floor = step
            if has_changed:
                self._fired.add(step)
                self._forget()
        return Answer(last.value, step in self._fired)

    def _forget(self) -> None:
        # Up to the floor, and no further: those changes are the same ones in every process.
        known = bisect_right(self._changes, self.floor, key=lambda change: change.step)
        if known > 2 * KEPT_CHANGES:
            gone = known - KEPT_CHANGES
            self._before = self._changes[gone - 1]
            self._first += gone
            del self._changes[:gone]
            self._fired = {step for step in self._fired if step > self._before.step}


@dataclass(frozen=True)
class Answer:
    """What holds at a step, and whether some change took effect since the step asked before."""

    value: str
    changed: bool


_NOTHING = Answer("", False)
