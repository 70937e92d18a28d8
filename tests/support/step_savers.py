"""What saves the steps of a root without a manager, for tests of saving alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.checkpoint import KeepAll, KeepPolicy, Options
from holdfast.checkpoint.agreement.misses import Misses
from holdfast.checkpoint.format.step_folders import list_steps
from holdfast.checkpoint.options import Statistics
from holdfast.checkpoint.saving.save import RootState, StepSaver
from holdfast.checkpoint.saving.stager import OneSave, SaveOrder, SaveStager
from holdfast.checkpoint.steps.background import BackgroundWorker
from holdfast.checkpoint.steps.claims import Writer, this_writer
from holdfast.checkpoint.steps.index import StepIndex
from holdfast.checkpoint.steps.lineage import Lineage, StepOrder
from holdfast.checkpoint.steps.local_claims import LocalClaims
from holdfast.checkpoint.steps.opening import OpenRoot
from holdfast.checkpoint.steps.step_files import StepDeleter
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.multihost import Group, Solo


def open_saver(
    folder: Path,
    group: Group | None = None,
    writer: Writer | None = None,
    *,
    keep_policy: KeepPolicy | None = None,
    **options: Any,
) -> StepSaver:
    """Returns what saves into a folder; the claim is the primary's to take."""
    storage = LocalStorage(folder)
    root = OpenRoot(
        storage=storage,
        group=group or Solo(),
        options=Options(**options),
        claims=LocalClaims(storage),
        writer=writer or this_writer(),
    )
    if root.is_writing_primary:
        root.claims.take(root.writer)
    return StepSaver(root, _state_of(root, keep_policy or KeepAll()))


def _state_of(root: OpenRoot, keep_policy: KeepPolicy) -> RootState:
    worker = BackgroundWorker()
    statistics = Statistics()
    deleter = None
    if root.is_writing_primary:
        deleter = StepDeleter(root.storage, worker, statistics)
    index = StepIndex(root.storage, keep_policy, list_steps(root.storage), deleter)
    return RootState(
        index=index,
        order=StepOrder(root.where),
        statistics=statistics,
        worker=worker,
        lineage=Lineage(root.storage, root.writer.id, begins=False),
        misses=Misses(root.options),
    )


def stage(saver: StepSaver, step: int, tree: Any, counter: int = 1, **order: Any) -> OneSave:
    """Returns a staged save of a tree as a step."""
    root = saver.root
    save = saver.new_save(counter, step)
    save.overwrite = bool(order.get("overwrite", False))
    SaveStager(root).stage(save, SaveOrder(step, tree, **order))
    return save
