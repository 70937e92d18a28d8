"""The lanes that a step may be saved by: durably into the store, or onto the hosts."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod

from holdfast.coordination import HoldfastError
from holdfast.multihost.instruments import seconds

from .errors import SaveFailed, error_text
from .format.limits import check_step, is_step
from .local_tier.local_steps import LocalSteps
from .memory.budget import USE
from .saving.async_saver import AsyncSaver, SaveHandle, tell_besides
from .saving.save import StepSaver
from .saving.stager import OneSave, SaveOrder, SaveStager
from .scheduling.scheduler import SaveScheduler
from .step_catalog import StepCatalog
from .steps.lineage import Position
from .steps.opening import claim_root


class Lane(ABC):
    """One way to save steps. In a group every process asks its lanes in the same order.

    Methods are for the manager's thread; saves run on the thread of `saver`. `scheduler` says when
    the lane saves.
    """

    _has_claim = True  # or needs none; else the next save takes it

    def __init__(
        self,
        catalog: StepCatalog,
        runner: StepSaver | LocalSteps,
        saver: AsyncSaver,
        scheduler: SaveScheduler,
    ) -> None:
        self._catalog = catalog
        self._state = catalog.state
        self._group = catalog.root.group
        self._runner = runner
        self._saver = saver
        self.scheduler = scheduler
        self._stager = SaveStager(runner.root, runner.history)
        self._counter = 0

    @abstractmethod
    def wants(self, step: int) -> bool:
        """Says whether the lane is to save a step, alike on every process. It may propose a step to
        them all.
        """

    @abstractmethod
    def _place_of(self, order: SaveOrder) -> Position:
        """Returns where the step of an order stands. Raises StepExists, StepOutOfOrder."""

    def started(self, step: int) -> None:
        """Notes that this lane, or one that is asked before it, saves a step."""
        self.scheduler.started(step)

    def save(self, order: SaveOrder) -> SaveHandle:
        """Starts a save; returns when the caller may donate or overwrite its arrays.

        Raises what is wrong with it, and after that an earlier save's error.
        """
        called_s = time.perf_counter()
        save = self._next_save(order)
        earlier: HoldfastError | None = None
        try:
            with self._saver.preparing(save):
                with self._state.waiting():
                    self._saver.join_before(order, save.waits)
                save.begin()
                is_last = self.scheduler.is_preempted
                earlier = self._take_error()
                step = check_step(order.step)
                place = self._place_of(order)
                # Before what may fail on one process alone: all know the same.
                self._state.order.begun(place)
                save.stand(place, may_miss=not is_last)
                leaving = self.scheduler.leaving(step, save.timeout_s)
                self._stager.stage(save, order, leaving)
        except BaseException as error:
            if earlier is not None:
                tell_besides(error, f"an earlier save failed: {error_text(earlier)}")
            # The other processes have begun this save, and their schedulers know it.
            if self._group.count > 1:
                self.started(order.step)
            raise
        self.started(step)
        handle = self._saver.begin(save)
        handle.on_commit(lambda _: self._committed(save, is_last=is_last))
        # The machine of a process that leaves is taken: it reports its part before all else.
        if self._group.index in leaving and not save.own_bytes:
            self.join()
        waited_s = save.waits.seconds
        blocked_s = max(0.0, time.perf_counter() - called_s - waited_s)
        self._count(step, blocked_s, waited_s)
        seconds(f"{save.kind}/blocked", blocked_s)
        seconds(f"{save.kind}/waited", waited_s)
        # Only now: every process begins the same saves, whenever it hears of a failure.
        if earlier is not None:
            earlier.add_note(f"the save of step {step} was begun nevertheless")
            raise earlier
        return handle

    def _next_save(self, order: SaveOrder) -> OneSave:
        # Before all that can fail: the next save has the same number on all processes.
        self._counter += 1
        if not self._has_claim:
            claim_root(self._catalog.root)
            self._has_claim = True
        step = order.step if is_step(order.step) else 0
        return self._runner.new_save(self._counter, step)

    def _committed(self, save: OneSave, *, is_last: bool) -> None:
        """Notes that a step is there. On the saving thread."""
        self.scheduler.note_saved(time.monotonic() - save.began)
        if is_last:
            self.scheduler.note_last_committed()

    def _count(self, step: int, blocked_s: float, waited_s: float) -> None:
        """Counts the time of a call of `save`, in which it waited for the program's own arrays."""
        self.scheduler.note_blocked(blocked_s)

    def _take_error(self, *, missed: bool = False) -> HoldfastError | None:
        return self._saver.take_error(missed=missed)

    def raise_error(self, *, missed: bool = False) -> None:
        """Raises the error of the last save, once; that of a miss with `missed` alone. Does not
        block.
        """
        error = self._take_error(missed=missed)
        if error is not None:
            raise error

    def join(self, timeout_s: float | None = None) -> None:
        """Waits for the save in flight, without `timeout_s` for its own time. Raises TimeoutError
        after `timeout_s`.
        """
        with self._state.waiting():
            self._saver.join(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Lets the saving thread end after the save in flight; may wait for it, at most for
        `timeout_s`.
        """
        self._saver.close()
        self.scheduler.close()


class DurableLane(Lane):
    """Saves steps into the store. Where `policy_decides` is false it saves all that it is asked."""

    def __init__(
        self,
        catalog: StepCatalog,
        scheduler: SaveScheduler,
        *,
        policy_decides: bool,
    ) -> None:
        runner = StepSaver(catalog.root, catalog.state)
        super().__init__(catalog, runner, AsyncSaver(runner), scheduler)
        self._policy_decides = policy_decides
        self._has_claim = catalog.root.listing.has_claim

    def wants(self, step: int) -> bool:
        """Says whether a step is due. Without a policy one that is no step is too, to fail."""
        # The other processes may have begun a save at this call: they hear then why it fails.
        if not self._policy_decides and not is_step(step):
            return True
        step = check_step(step)
        if self.scheduler.needs_end(step):
            # All processes know it then, and answer alike.
            with contextlib.suppress(SaveFailed):
                self.join()
        return bool(self.scheduler.reason(step, busy=self._saver.busy()))

    def _place_of(self, order: SaveOrder) -> Position:
        return self._catalog.place_of(order.step, overwrite=order.overwrite)

    def _count(self, step: int, blocked_s: float, waited_s: float) -> None:
        super()._count(step, blocked_s, waited_s)
        statistics = self._state.statistics
        statistics.add(save_blocked_s=blocked_s, save_waited_s=waited_s)
        self._group.report(
            step=step,
            save_blocked_s=statistics.save_blocked_s,
            save_waited_s=statistics.save_waited_s,
            checkpoint_peak_bytes=USE.peak_bytes,
        )

    def close(self, timeout_s: float) -> None:
        """Lets the saving thread end after the save in flight; waits for nothing."""
        self._has_claim = False  # it is given up with the lane: another save takes it again
        super().close(timeout_s)


class LocalLane(Lane):
    """Saves on the hosts the steps that the store does not get."""

    def __init__(self, catalog: StepCatalog, tier: LocalSteps, scheduler: SaveScheduler) -> None:
        super().__init__(catalog, tier, tier.saver, scheduler)
        self._tier = tier

    def wants(self, step: int) -> bool:
        """Says whether a step is due that the store has not, or has left behind, or is about to."""
        index = self._state.index
        is_left = step in index.left_behind() or self._state.order.may_go_back(step)
        is_there = step in index and not is_left
        off = self._tier.off
        if is_there or (off and self._group.count == 1):
            return False
        # A tier that is off counts as busy: the processes of a group may learn of it at different
        # steps, and all have to ask.
        busy = self._saver.busy() or bool(off)
        return bool(self.scheduler.reason(step, busy=busy))

    def _place_of(self, order: SaveOrder) -> Position:
        return self._catalog.local_place_of(order.step, overwrite=order.overwrite)

    def _committed(self, save: OneSave, *, is_last: bool) -> None:
        super()._committed(save, is_last=is_last)
        place = save.place
        if place.is_branch:
            # The primary has marked these, of the store: it has told all from which step on.
            left = [step for step in self._catalog.known_steps() if step > place.base]
            self._state.index.leave_marked(left)
        self._state.order.saved(place)
        self._state.report()

    def _take_error(self, *, missed: bool = False) -> HoldfastError | None:
        failed = self._saver.take_error()
        return failed if self._tier.is_strict else None

    def close(self, timeout_s: float) -> None:
        """Waits for the save in flight, and closes the tier."""
        with contextlib.suppress(TimeoutError):
            self._saver.join(timeout_s)
        super().close(timeout_s)
        self._tier.close()
