"""The parts of a CheckpointManager, and how they are built."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass

from holdfast.multihost import Group, Watchdog
from holdfast.multihost.group.group import given_or_default

from .agreement.misses import Misses
from .errors import CheckpointError
from .format.step_folders import parse_step_format
from .lanes import DurableLane, Lane, LocalLane
from .layouts.detect import OTHER_LAYOUTS, ForeignSteps, warn_of_unread
from .local_tier.local_steps import LocalSteps
from .options import Local, Options, Statistics
from .policy import KeepPolicy, SavePolicy
from .saving.incremental import SaveHistory, can_link, load_digest
from .saving.save import RootState
from .scheduling.run_ahead import RunAhead
from .scheduling.scheduler import SaveScheduler
from .step_catalog import StepCatalog
from .step_restorer import StepRestorer
from .steps.background import BackgroundWorker
from .steps.garbage import sweep_files
from .steps.index import StepIndex
from .steps.left_behind import leave_behind, prune_marks
from .steps.lineage import BRANCHES, Lineage, StepOrder
from .steps.object_claims import open_claims
from .steps.opening import OpenRoot, look_at_steps, open_root
from .steps.refusals import (
    refuse_step_folder,
    refuse_without_joining,
    warn_of_absent_root,
    warn_of_new_root,
    warn_of_writers,
)
from .steps.root_report import root_report
from .steps.step_files import StepDeleter
from .storage.base import Storage
from .storage.path import open_storage


class NoWatchdog:
    """Stands for a watchdog where nobody watches."""

    def progress(self) -> None:
        """Takes no note."""

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Surrounds a wait, which nobody watches."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Ends nothing."""


@dataclass(frozen=True, kw_only=True)
class ManagerParts:
    """What a manager is made of. The first of its lanes is the durable one."""

    catalog: StepCatalog
    lanes: tuple[Lane, ...]
    run_ahead: RunAhead
    restorer: StepRestorer
    watchdog: Watchdog | NoWatchdog

    def close(self, timeout_s: float) -> None:
        """Ends all threads, waits for deletions and gives the claim up."""
        self.watchdog.close()
        for lane in reversed(self.lanes):
            lane.close(timeout_s)
        worker = self.catalog.state.worker
        if not worker.wait(timeout_s):
            worker.drop()
        self.catalog.root.give_up()


def open_manager(
    directory: str | os.PathLike[str],
    *,
    save_policy: SavePolicy | None,
    keep_policy: KeepPolicy,
    group: Group | None,
    options: Options,
    local: Local | None,
) -> ManagerParts:
    """Opens a root and builds the parts of its manager. Blocks, and raises as the manager does."""
    members = given_or_default(group)
    storage = _open_storage(directory, options)
    history = _history_of(storage, options)
    root = _open_root(storage, members, options)
    # What a later part runs into must not leave a claim that only a sweep takes away.
    with contextlib.ExitStack() as undo:
        undo.callback(root.give_up)
        if group is None:
            refuse_without_joining(root)
        warn_of_writers(storage, root.listing.others)
        watchdog = _watchdog_of(options)
        undo.callback(watchdog.close)
        catalog = _open_catalog(
            root, keep_policy, local, history, undo=undo, waiting=watchdog.paused
        )
        durable = DurableLane(
            catalog,
            _scheduler_of(root, save_policy),
            policy_decides=save_policy is not None,
        )
        undo.callback(durable.close, 0.0)
        parts = ManagerParts(
            catalog=catalog,
            lanes=(durable, *_local_lanes(catalog, local)),
            run_ahead=RunAhead(options.max_steps_ahead),
            restorer=StepRestorer(catalog),
            watchdog=watchdog,
        )
        undo.pop_all()
    if root.is_writing_primary:

        def sweep() -> None:
            sweep_files(storage, root.claims, listed=root.listing.files)

        catalog.state.worker.put(f"sweeping {root.where}", sweep)
    catalog.state.report()
    return parts


def _open_storage(directory: str | os.PathLike[str], options: Options) -> Storage:
    if options.step_format is not None:
        parse_step_format(options.step_format)
    return open_storage(
        directory,
        single_writer=options.single_writer,
        file_mode=options.file_mode,
        folder_mode=options.folder_mode,
    )


def _open_root(storage: Storage, group: Group, options: Options) -> OpenRoot:
    claims = open_claims(
        storage, single_writer=options.single_writer, claim_age_s=options.claim_age_s
    )

    def check() -> None:
        refuse_step_folder(storage)
        if not options.read_only:
            warn_of_new_root(storage)

    root = open_root(
        storage,
        claims,
        group,
        options,
        layouts=OTHER_LAYOUTS,
        check=check,
        needs_claim=False,
    )
    if options.read_only and group.index == 0:
        warn_of_absent_root(storage, root.listing.files)
    if group.index == 0 and not root.listing.steps and not root.listing.foreign:
        warn_of_unread(storage, root.listing.files)
    return root


def _lineage_of(root: OpenRoot, index: StepIndex, *, begins: bool) -> Lineage | None:
    if not root.is_writing_primary:
        return None

    def mark(storage: Storage, base: int, save: str, own: Collection[int]) -> None:
        """Marks what the branch of a save leaves, of all that is there by now."""
        found = look_at_steps(storage, OTHER_LAYOUTS, index.names)
        marked = leave_behind(
            storage,
            found.folders,
            base=base,
            save=save,
            stay={*found.left_behind, *own},
            identify=OTHER_LAYOUTS.identify,
        )
        index.note_marked(marked)
        prune_marks(storage, found.marks, found.left_behind)

    files = root.listing.files
    found_none = files is not None and not any(name.startswith(f"{BRANCHES}/") for name in files)
    return Lineage(
        root.storage,
        root.writer.id,
        begins=begins,
        found_none=found_none,
        mark=mark,
    )


def _local_lanes(catalog: StepCatalog, local: Local | None) -> list[Lane]:
    if local is None or catalog.tier is None:
        return []
    root = catalog.root
    scheduler = SaveScheduler(
        local.save_policy,
        root.group,
        f"{root.messages}/local/soon",
        skips=True,
        heeds_notices=False,
    )
    return [LocalLane(catalog, catalog.tier, scheduler)]


def _scheduler_of(root: OpenRoot, save_policy: SavePolicy | None) -> SaveScheduler:
    listing = root.listing
    line = {*listing.steps, *listing.foreign} - {*listing.left_behind}
    return SaveScheduler(
        save_policy,
        root.group,
        f"{root.messages}/soon",
        skips=root.options.on_busy == "skip",
        last_step=max(line, default=None),
    )


def _index_of(root: OpenRoot, keep_policy: KeepPolicy, deleter: StepDeleter) -> StepIndex:
    listing = root.listing
    return StepIndex(
        root.storage,
        keep_policy,
        listing.steps,
        deleter if root.is_writing_primary else None,
        left_behind=listing.left_behind,
        is_alone=root.group.count == 1,
        names=listing.step_names if listing.has_claim or listing.steps else None,
    )


def _open_catalog(
    root: OpenRoot,
    keep_policy: KeepPolicy,
    local: Local | None,
    history: SaveHistory | None,
    *,
    undo: contextlib.ExitStack,
    waiting: Callable[[], contextlib.AbstractContextManager[None]],
) -> StepCatalog:
    deleter = StepDeleter(root.storage, BackgroundWorker(), Statistics())
    index = _index_of(root, keep_policy, deleter)
    lineage = _lineage_of(root, index, begins=local is not None)
    with waiting():
        tier = None if local is None else LocalSteps.open(local, root, lineage)
    if tier is not None:
        undo.callback(tier.close)
    foreign = ForeignSteps(root.storage, root.listing.foreign, root.listing.step_names)

    def report() -> None:
        if root.is_writing_primary:
            copies = tier.copies() if tier else {}
            root.group.report(root=root_report(root.where, index, copies))

    state = RootState(
        index=index,
        order=StepOrder(root.where, has_order=not root.options.out_of_order),
        statistics=deleter.statistics,
        worker=deleter.worker,
        lineage=lineage,
        misses=Misses(root.options),
        report=report,
        leave=None if tier is None else tier.leave,
        make_way=foreign.make_way,
        history=history,
        waiting=waiting,
    )
    return StepCatalog(root, state, foreign, tier)


def _watchdog_of(options: Options) -> Watchdog | NoWatchdog:
    if options.hang_timeout_s is None:
        return NoWatchdog()
    return Watchdog(options.hang_timeout_s, exit=options.hang_exit)


def _history_of(storage: Storage, options: Options) -> SaveHistory | None:
    """Returns the history of incremental saves, where they are wanted.

    Raises CheckpointError where the store has neither hard links nor copies.
    """
    if not options.incremental:
        return None
    load_digest()
    if not can_link(storage):
        raise CheckpointError(
            f"{storage.root} cannot be saved to incrementally: it has neither hard links nor copies"
            " that are done when the store says so; expected a POSIX folder without single_writer,"
            " or s3://. Leave out Options(incremental=True)",
            path=storage.root,
        )
    return SaveHistory(options.full_every)
