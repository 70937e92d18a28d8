"""Decides whether to save now: the save policy, the preemption sync point, and what one process
alone can know, agreed on by all.

In a group only the primary's clock and load count. When they ask for a save, the primary proposes
one; the sync point makes it hold from one step on, ahead of all, and each process answers True at
the first step it asks about from there on.
"""

from __future__ import annotations

import logging
import time

from holdfast.coordination import CoordinationError
from holdfast.multihost import Group, agree_on_step, preempted_processes, reached_preemption
from holdfast.multihost.group.group import runtime_indices
from holdfast.multihost.liveness.vitals import note_step
from holdfast.multihost.preemption.preemption import ask_sync_point, has_notice

from ..agreement.exchange import ask_primary
from ..format.limits import is_step
from ..policy import PolicyContext, SaveCosts, SavePolicy, asks_preemption, uses_clock
from .costs import CostMeter

_log = logging.getLogger(__name__)


class SaveScheduler:
    """Answers `should_save` alike on every process. For the thread that trains, but for what is
    noted of a save's end. `last_step` is the newest that the root has.

    Once the job is preempted every step is due, until one is committed: a program that never asks
    whether it is to stop goes on then as if there were no notice. A lane whose saves are no last
    ones does not heed notices.
    """

    def __init__(
        self,
        policy: SavePolicy | None,
        group: Group,
        name: str,
        *,
        skips: bool,
        last_step: int | None = None,
        heeds_notices: bool = True,
    ) -> None:
        self._policy = policy
        self._group = group
        self._name = name
        self._skips = skips
        self._heeds_notices = heeds_notices
        self._asks_preemption = group.count > 1 or asks_preemption(policy)
        self._last_step = last_step
        self._last_s = time.monotonic()
        self._preempted_step: int | None = None
        self._last_begun = False  # a save since the notice, whose end is not known yet
        self._last_committed = False
        self._due = ""
        self._proposed = False
        self._meter = CostMeter()
        self._by_clock = policy is not None and uses_clock(policy)
        agrees = group.count > 1 and (skips or self._by_clock)
        self._agreement = agree_on_step(group, name) if agrees else None

    def count_anew(self) -> None:
        """Notes, on every process at once, that the program may go back to an earlier step."""
        if self._agreement is not None:
            self._agreement.count_anew()

    def started(self, step: int) -> None:
        """Notes that a save of `step` begins. One that is no step fails, and is not noted."""
        if not is_step(step):
            return
        if self._due and self._group.index == 0:
            _log.info("step %d is saved: %s", step, self._due)
        self._last_step = step
        self._last_s = time.monotonic()
        self._due = ""
        self._proposed = False
        self._last_begun = self.is_preempted

    def note_blocked(self, seconds: float) -> None:
        """Notes how long a save has held the program."""
        if self._by_clock:
            self._meter.note_blocked(seconds)

    def note_saved(self, seconds: float) -> None:
        """Notes how long a save took until it was there. On any thread; may block."""
        if self._by_clock and self._group.index == 0:
            self._meter.note_saved(seconds)

    def note_last_committed(self) -> None:
        """Notes that a save is committed that began since the job is preempted. On any thread."""
        self._last_committed = True

    def preempted(self, step: int) -> bool:
        """Asks the preemption sync point; from then on `reason` does so too."""
        self._asks_preemption = True
        return self._note_preempted(step, reached_preemption(step))

    def stops_at(self, step: int) -> bool:
        """Says whether a step is the last one, or after it. Alike on every process."""
        if not self._heeds_notices:
            return False
        if self._asks_preemption:
            return self._note_preempted(step, ask_sync_point(step))
        # Alone there is nothing to agree on. A question here would raise the floor of one that the
        # program asks with numbers of its own.
        note_step(step)
        return self._note_preempted(step, has_notice())

    def _note_preempted(self, step: int, preempted: bool) -> bool:
        if preempted:
            self._preempted_step = step
        else:
            self._preempted_step = None
            self._last_begun = False
            self._last_committed = False
        return preempted

    @property
    def is_preempted(self) -> bool:
        """Whether the next save is the last: the preemption sync point was reached, and no step is
        committed since. In a group it is asked where no save is in flight.
        """
        return self._preempted_step is not None and not self._last_committed

    def needs_end(self, step: int) -> bool:
        """Says whether the answer for a step goes by how the save in flight ends."""
        return self._last_begun and self._last_step != step

    def leaving(self, step: int, timeout_s: float) -> frozenset[int]:
        """Returns the ranks that leave behind this step, alike on every process; asks the primary
        where the job is preempted here.

        They are those with a preemption notice of their own. Where these are more than half, the
        rest would take too long to write what all hold, and nobody is returned.
        """
        if self._group.count == 1 or self._preempted_step != step:
            return frozenset()
        name = f"{self._name}/leaving/{step}"
        return frozenset(ask_primary(self._group, name, self._noticed_ranks, timeout_s))

    def _noticed_ranks(self) -> list[int]:
        try:
            noticed = preempted_processes()
        except CoordinationError as error:
            _log.warning(
                "whose machine is taken is not known, the save is planned as ever: %s", error
            )
            return []
        ranks = [
            rank for rank, process in enumerate(runtime_indices(self._group)) if process in noticed
        ]
        return ranks if 2 * len(ranks) <= self._group.count else []

    def reason(self, step: int, *, busy: bool) -> str:
        """Returns why `step` is to be saved, or ""; `busy` says whether a save of this process is
        in flight.
        """
        preempted = self.stops_at(step) and not self._last_committed
        if preempted and self._last_step != step:
            return "the job is preempted"
        if self._agreement is None:
            self._due = self._reason_by_clock(step, preempted)
            return "" if self._skips and busy else self._due
        # No clock: here all processes have to give one answer.
        wanted = self._policy_reason(step, 0.0, preempted)
        if self._group.index == 0 and not self._proposed:
            by_clock = self._reason_by_clock(step, preempted)
            self._due = self._due or by_clock or (wanted if self._skips else "")
            has_to_wait = busy if self._skips else bool(wanted)
            if self._due and not has_to_wait:
                self._propose()
        agreed = "all agreed to save here" if self._agreement.reached(step) else ""
        if self._skips:
            return agreed
        return wanted or agreed

    def _reason_by_clock(self, step: int, preempted: bool) -> str:
        return self._policy_reason(step, time.monotonic() - self._last_s, preempted)

    def _policy_reason(self, step: int, elapsed_s: float, preempted: bool) -> str:
        if self._policy is None:
            return "there is no save policy: every call saves"
        costs = self._meter.costs if self._by_clock else SaveCosts()
        context = PolicyContext(step, self._last_step, elapsed_s, preempted, costs)
        return self._policy.wants(context)

    def _propose(self) -> None:
        assert self._agreement is not None
        try:
            self._agreement.propose("save")
            self._proposed = True
        except CoordinationError as error:
            _log.warning(
                "a save that is due could not be proposed, it is tried again at the next step: %s",
                error,
            )

    def close(self) -> None:
        """Leaves the agreement on a step: those who still ask go on without this process."""
        if self._agreement is not None:
            self._agreement.leave()
