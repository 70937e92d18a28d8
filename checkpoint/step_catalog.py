"""The steps of a root as its manager shows them: the store's, other libraries' and the hosts'."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from .agreement.exchange import ask_primary
from .errors import CheckpointError, StepExists, StepNotFound, StepOutOfOrder, naming_path
from .format.record import SeenRecord
from .format.step_folders import find_newest, has_record
from .layouts.base import CheckpointInfo, CheckpointReader
from .layouts.detect import OTHER_LAYOUTS, ForeignSteps, identify, stands_there
from .layouts.holdfast import HoldfastCheckpoint
from .layouts.inspection import Structure, structure_of
from .local_tier.local_steps import LocalSteps
from .local_tier.parts import StepHead
from .saving.save import RootState
from .steps.holds import letting_go
from .steps.index import StepIndex
from .steps.left_behind import NOTHING, left_among, read_marks
from .steps.lineage import Position
from .steps.opening import OpenRoot, OtherLayouts, list_root, look_at_steps
from .steps.refusals import why_no_steps
from .storage.path import join
from .storage.retries import until
from .storage.tombstone import RECORD_NAME

_log = logging.getLogger(__name__)
MOST_NAMED = 16  # steps, in a message
LOOK_S = 10.0  # for the store to say, before a save, whether it has the step


@dataclass(frozen=True)
class StepCatalog:
    """Lists, describes and deletes the steps of a root. For one thread at a time.

    In a group every process calls the same, in the same order.
    """

    root: OpenRoot
    state: RootState
    foreign: ForeignSteps
    tier: LocalSteps | None
    seen: SeenRecord = field(default_factory=SeenRecord)

    @property
    def _index(self) -> StepIndex:
        return self.state.index

    # --- which steps there are

    def look(self, end_s: float = math.inf) -> tuple[list[int], list[int]]:
        """Returns the steps of the store, and those of them that were left behind, by a look at it
        until `end_s` by the monotonic clock.
        """
        layouts = OtherLayouts(lambda *_: self.foreign.folders(), identify)
        with naming_path(self.root.where):
            found = look_at_steps(until(self.root.storage, end_s), layouts, self._index.names)
            unlisted = self._unlisted(max(found.steps, default=-1))
        left = (self._index.left_behind() & {*unlisted}) | {*found.left_behind}
        return [*found.steps, *unlisted, *self.foreign], sorted(left)

    def _unlisted(self, newest: int) -> list[int]:
        """Returns the steps newer than all listed ones that are there, though a store does not list
        them yet. A manager's last save is one of its steps, whatever a listing shows.
        """
        storage = self.root.storage
        if storage.posix is not None:
            return []
        newer = [step for step in self._index.steps() if step > newest]
        return [step for step in newer if has_record(storage, self._index.folder(step))]

    def known_steps(self) -> list[int]:
        """Returns the steps of the store that are known without a look at it, ascending."""
        return sorted([*self._index.steps(), *self.foreign])

    def _known_alike(self) -> tuple[list[int], list[int]]:
        """Returns what `look` does, in a group what all processes know alike."""
        if self.root.group.count == 1:
            return self.look()
        return self.known_steps(), self.left_steps()

    def local_steps(self) -> list[int]:
        """Returns the steps of the hosts, ascending."""
        return [] if self.tier is None else self.tier.steps()

    def all_steps(self) -> list[int]:
        """Returns the steps of store and hosts, ascending; of the store in a group what all
        processes know alike.
        """
        durable, _ = self._known_alike()
        return sorted({*durable, *self.local_steps()})

    def left_steps(self) -> list[int]:
        """Returns the known steps that were left behind, ascending."""
        return sorted(self._index.left_behind() & {*self.known_steps()})

    def latest_step(self) -> int | None:
        """Returns the newest step of store and hosts that was not left behind."""
        is_alone = self.root.group.count == 1
        is_folder = self.root.storage.posix is not None
        durable = self._newest_in_folder() if is_alone and is_folder else self.line()
        return max([*durable, *self.local_steps()], default=None)

    def line(self) -> list[int]:
        """Returns the steps of the store that were not left behind, ascending; in a group what all
        processes know alike.
        """
        steps, left = self._known_alike()
        return sorted({*steps} - {*left})

    def _newest_in_folder(self) -> list[int]:
        """Returns the newest step of a folder, and of other libraries', that was not left behind;
        without a look at the older ones.
        """
        storage = self.root.storage
        with naming_path(self.root.where):
            marks = read_marks(storage)

            def counts(step: int, folder: str) -> bool:
                return not left_among(storage, {step: folder}, marks, identify)

            own = find_newest(storage, self._index.names, counts)
            others = [step for step, name in self.foreign.folders().items() if counts(step, name)]
        return others if own is None else [own, *others]

    def has(self, step: int) -> bool:
        """Says whether the store has a step, in whatever layout. One that was left behind gives way
        to a local step of its number.
        """
        if step in self._index.left_behind() and step in self.local_steps():
            return False
        with naming_path(self.path_of(step)):
            return step in self.foreign or self._index.exists(step)

    def reload(self) -> None:
        """Lists the store, at the primary, and the hosts again. Blocks."""
        listing = list_root(self.root, OTHER_LAYOUTS)
        self._index.adopt(listing.steps)
        self._index.adopt_left(listing.left_behind)
        self.foreign.adopt(listing.foreign)
        if self.tier is not None:
            self.tier.survey()

    # --- where a save stands

    def place_of(self, step: int, *, overwrite: bool) -> Position:
        """Returns where a durable save stands among the steps. Raises StepExists for a step that it
        may not replace, StepOutOfOrder.
        """
        if step in self.foreign:
            raise StepExists(
                f"step {step} of {self.root.where} was written by another library; save another"
                " step",
                step=step,
            )
        is_left = step in self._index.left_behind()
        was_passed_over = step in self._index.passed_over()
        try:
            place = self.local_place_of(step, overwrite=overwrite, may_replace=was_passed_over)
        except StepOutOfOrder:
            if not is_left and self._is_known_to_exist(step):
                raise self._exists_already(step) from None
            raise
        replaces = overwrite or was_passed_over
        if not replaces and self._is_known_to_exist(step):
            if not (place.is_branch or is_left):
                raise self._exists_already(step)
            replaces = True
        return replace(place, replaces=replaces)

    def local_place_of(
        self, step: int, *, overwrite: bool = False, may_replace: bool = False
    ) -> Position:
        """Returns where a save stands among the steps, see `StepOrder.place`."""
        newest = self._newest_known(step)
        return self.state.order.place(step, newest, overwrite=overwrite, may_replace=may_replace)

    def _newest_known(self, saved: int) -> int:
        """Returns the newest step that is known, for the save of another one: a local step of its
        number is replaced by it.
        """
        steps = self.known_steps()
        left = self._index.left_behind()
        if self.root.group.count == 1 and self.state.order.has_restored:
            # What others have saved meanwhile counts where the program has gone back. It is rare.
            try:
                steps, found = self.look(time.monotonic() + self._look_s)
                left = {*found}
            except CheckpointError as error:
                _log.warning("the newest step is the newest of those that are known: %s", error)
        local = [step for step in self.local_steps() if step != saved]
        return max({*steps} - {*left} | {*local}, default=NOTHING)

    def _exists_already(self, step: int) -> StepExists:
        where = self.root.where
        return StepExists(
            f"step {step} is already in {where}; nothing was written. To replace it, pass"
            f" overwrite=True; to let it stay, save only `if manager.latest_step() != {step}`",
            step=step,
            path=where,
        )

    @property
    def _look_s(self) -> float:
        return min(LOOK_S, self.root.options.save_timeout_s)

    def _is_known_to_exist(self, step: int) -> bool:
        """Says whether a step is there, by one look that does not hold up training for long.

        Where that fails, what this process knows counts, and the commit decides.
        """
        try:
            return self._index.exists(step, end_s=time.monotonic() + self._look_s)
        except OSError as error:
            _log.warning("%s: its commit says whether it is there: %s", self.path_of(step), error)
            return step in self._index

    def is_there(self, step: int) -> bool:
        """Says whether the store has a step that was not left behind, by one look for all
        processes. Blocks.
        """

        def look() -> bool:
            return step not in self._index.left_behind() and self._is_known_to_exist(step)

        name = f"{self.root.messages}/there/{step}"
        timeout_s = self.root.options.save_timeout_s
        return bool(ask_primary(self.root.group, name, look, timeout_s))

    # --- one step

    def path_of(self, step: int) -> str:
        """Returns where the store has a step, as messages show it."""
        return join(self.root.where, self._index.folder(step))

    def is_local(self, step: int) -> bool:
        """Says whether the hosts have a step, and the store has not."""
        return step in self.local_steps() and not self.has(step)

    @contextlib.contextmanager
    def looking_for(self, step: int) -> Iterator[None]:
        """Raises errors of the store as CheckpointErrors, and tells of a step that is not there
        which are.
        """
        path = self.path_of(step)
        try:
            with naming_path(path):
                yield
        except StepNotFound as error:
            if error.path != join(path, RECORD_NAME):  # the step is there, an item is not
                raise
            raise self.not_found(step) from error

    def not_found(self, step: int) -> StepNotFound:
        """Returns the error of a step that is not there, with those that are, or the nearest."""
        steps = self.all_steps()
        shown = str(steps)
        if len(steps) > MOST_NAMED:
            nearest = sorted(steps, key=lambda found: abs(found - step))[:MOST_NAMED]
            shown = f"{len(steps):,} steps, the nearest {sorted(nearest)}"
        stranger = stands_there(self.root.storage, step)
        which = f", which has {shown}" if steps else why_no_steps(self.root.storage)
        which = which or ", which has none"
        return StepNotFound(
            f"there is no step {step} in {self.root.where}{which}{stranger}",
            step=step,
            path=self.path_of(step),
        )

    @contextlib.contextmanager
    def _opened(self, step: int) -> Iterator[CheckpointReader]:
        with self.looking_for(step):
            if step in self.foreign:
                yield self.foreign.open(step)
            else:
                storage = self.root.storage
                folder = self._index.folder(step)
                record = self.seen.show(storage, folder)
                yield HoldfastCheckpoint(storage, folder, record)

    def facts(self, step: int) -> CheckpointInfo | StepHead:
        """Returns what holds metrics and metadata of a step. Raises StepNotFound, Corrupt."""
        if self.tier is not None and self.is_local(step):
            return self.tier.head(step)
        with self._opened(step) as checkpoint:
            return checkpoint.info

    def structure(self, step: int) -> Structure:
        """Returns what a step holds. Raises StepNotFound, Corrupt."""
        tier = self.tier
        if tier is not None and not self.has(step) and not self._is_found_in_store(step):
            return tier.structure(step)
        with self._opened(step) as checkpoint:
            return structure_of(checkpoint)

    def is_on_hosts(self, step: int) -> bool:
        """Says whether a step is one of the hosts', if it is there: the store has none that is
        known. A process that did not hear how a local save ended says so with all others.
        """
        return self.tier is not None and not self.has(step)

    def _is_found_in_store(self, step: int) -> bool:
        """Says whether the store has a step after all, by one look for all processes: two looks
        around a commit would send some to the hosts, which wait there for the others.
        """
        group = self.root.group
        if group.index and step not in self.local_steps() and self._is_stored(step):
            return True  # the outcome of its save was not heard here, and all others read the store
        name = f"{self.root.messages}/stored/{step}"
        timeout_s = self.root.options.restore_timeout_s
        return bool(ask_primary(group, name, lambda: self._is_stored(step), timeout_s))

    def _is_stored(self, step: int) -> bool:
        with naming_path(self.path_of(step)):
            return has_record(self.root.storage, self._index.folder(step))

    def delete(self, step: int) -> None:
        """Deletes a step from store and hosts. Blocks. Raises StepNotFound, CheckpointError, on
        every process.
        """
        if step in self.foreign:
            raise CheckpointError(
                f"step {step} of {self.root.where} was written by another library; holdfast deletes"
                " only its own",
                step=step,
            )
        if self.state.history is not None:
            self.state.history.forget()
        group = self.root.group
        # A name for each step: a process that deletes one alone, waits in vain and is out of step
        # then, is so for that step alone.
        name = f"{self.root.messages}/delete/{step}"
        timeout_s = self.root.options.save_timeout_s
        end_s = time.monotonic() + timeout_s
        is_durable, is_last = ask_primary(
            group, name, lambda: self._find(step, end_s), timeout_s, question="find"
        )
        if is_last:
            self._roll_back(step, end_s, timeout_s)
        if not is_durable:
            return
        # Where it stays, it stays on all: their lists are alike.
        ask_primary(group, name, lambda: self._remove(step, end_s), timeout_s, question="delete")
        if group.index:
            self._index.remove([step])
        self.state.report()
        self.state.worker.wait(timeout_s)

    def delete_unheld(self, steps: Sequence[int]) -> list[int]:
        """Deletes those of some steps that no reader holds, as a keep policy does; returns them, on
        every process alike. Blocks. Raises CheckpointError.
        """
        root = self.root

        def choose() -> list[int]:
            with naming_path(root.where):
                return marks.enter_context(letting_go(root.storage, steps, root.writer.id))

        with contextlib.ExitStack() as marks:
            going: list[int] = ask_primary(
                root.group,
                f"{root.messages}/unheld",
                choose,
                root.options.save_timeout_s,
                question=f"{len(steps)} steps",
            )
            for step in going:
                with contextlib.suppress(StepNotFound):  # another writer was first
                    self.delete(step)
        return going

    def _find(self, step: int, end_s: float) -> tuple[bool, bool]:
        """Returns, at the primary, whether the store has a step, and whether it is a local step or
        the newest: what is deleted must not come back from a host, nor what was saved after it
        there. Newer local steps of a durable one stay. Raises StepNotFound.
        """
        local = self.local_steps()
        with naming_path(self.path_of(step)):
            is_durable = self._index.exists(step, end_s=end_s)
        if not is_durable and step not in local:
            raise self.not_found(step)
        with naming_path(self.root.where):
            line = {*self._index.steps()} - self._index.left_behind()
        return is_durable, step in local or step == max([*line, *local], default=step)

    def _roll_back(self, step: int, end_s: float, timeout_s: float) -> None:
        """Lets no local step from `step` on come back."""

        def begin_below() -> None:
            lineage = self.state.lineage
            if lineage is not None:  # else the primary does
                with naming_path(self.root.where):
                    lineage.deleting_newest(step, end_s)

        if self.tier is None:
            begin_below()
        else:
            self.tier.roll_back(step, begin_below, timeout_s)

    def _remove(self, step: int, end_s: float) -> None:
        """Deletes a step of the store, at the primary. Raises CheckpointError where it stays."""
        error = self._index.remove([step], end_s=end_s).get(step)
        if error is not None:
            where = self.root.where
            raise CheckpointError(
                f"step {step} of {where} could not be deleted and is still there: {error}; look at"
                " the disk or the mount, then delete it again",
                step=step,
                path=where,
            ) from error
