"""CheckpointManager: the steps of one root, saved, kept and restored by all processes of a job."""

from __future__ import annotations

import atexit
import contextlib
import logging
import operator
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import thread as _executors
from types import TracebackType
from typing import Any, Self

import jax

from holdfast.coordination import HoldfastError
from holdfast.multihost import Group, Watchdog, default_group

from .agreement.restore_verdict import wanted_items
from .errors import CheckpointError, StepExists, StepNotFound, naming_path
from .format.limits import check_step
from .format.record import Record, read_record
from .format.rename import Names
from .format.step_folders import parse_step_format
from .layouts.base import CheckpointInfo
from .layouts.detect import ForeignSteps, find_foreign_steps
from .layouts.holdfast import HoldfastCheckpoint
from .layouts.inspection import Structure, structure_of
from .local_tier.parts import StepHead
from .local_tier.tier import LocalTier
from .options import Local, Options, Statistics
from .policy import KeepAll, KeepBest, KeepPolicy, SavePolicy, StepFacts, best_rule
from .restoring.per_process import PerProcessSelection
from .restoring.restore import RestoreOptions
from .saving.async_saver import AsyncSaver, SaveHandle
from .saving.cast import SaveDtype
from .saving.incremental import SaveHistory, load_digest
from .saving.save import SaveContext
from .saving.scheduler import SaveScheduler
from .saving.stager import SaveRequest, SaveStager
from .step_restorer import StepRestorer
from .steps.background import BackgroundWorker
from .steps.garbage import sweep_files
from .steps.index import StepIndex
from .steps.lineage import Lineage
from .steps.object_claims import open_claims
from .steps.opening import claim_root, list_root, open_root
from .steps.root_report import RootReporter
from .storage.base import Storage
from .storage.path import StorePath, join, open_storage

_log = logging.getLogger(__name__)
# steps that one restore with `fallback` sees deleted while it reads them, before it gives up
MOST_GONE = 64


class CheckpointManager:
    """Saves, keeps and restores the steps of one root. In a group every process makes one, and
    calls the same methods in the same order.

    `directory` is a folder, or a URL of an object store (gs://, s3://, az://). Without a save
    policy every call of `save` saves; without a keep policy every step stays. `group` is
    `holdfast.multihost.default_group()` unless given: in a notebook nothing else is needed. With
    `local` steps are saved on the hosts too, between those of the save policy (see Local).

    Opening it for writing takes a claim on the root, fences writers that are surely dead, and
    sweeps what they left unfinished. A context manager; `close()` waits for the save in flight.
    Methods are for one thread at a time; saves run in the background. Raises CheckpointError when
    the root cannot be written (pass `Options(read_only=True)` to only read). On a full disk it
    opens, so that steps can be restored and deleted; `save` raises CheckpointError there until
    there is room.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        save_policy: SavePolicy | None = None,
        keep_policy: KeepPolicy | None = None,
        group: Group | None = None,
        options: Options | None = None,
        local: Local | None = None,
    ) -> None:
        self._closed = True
        self._forked = False  # until it is open
        if local is not None and save_policy is None:
            raise ValueError(
                "CheckpointManager: local= expects a save_policy besides: without one every call"
                " saves durably"
            )
        self._options = options or Options()
        self._group = group if group is not None else default_group()
        self._keep_policy = keep_policy or KeepAll()
        if self._options.step_format is not None:
            parse_step_format(self._options.step_format)
        single_writer = self._options.single_writer
        file_mode = self._options.file_mode
        folder_mode = self._options.folder_mode
        self._storage = open_storage(
            directory, single_writer=single_writer, file_mode=file_mode, folder_mode=folder_mode
        )
        self._history = _history_of(self._storage, self._options)
        self._claims = open_claims(
            self._storage, single_writer=single_writer, claim_age_s=self._options.claim_age_s
        )
        opened = open_root(
            self._storage,
            self._claims,
            self._group,
            self._options,
            find_foreign=find_foreign_steps,
            needs_claim=False,
        )
        self._writer = opened.writer
        self._has_claim = opened.has_claim
        self._foreign = ForeignSteps(self._storage, opened.foreign)
        self._statistics = Statistics()
        self._worker = BackgroundWorker()
        is_primary = self._is_writing_primary
        self._index = StepIndex(
            self._storage,
            self._keep_policy,
            opened.steps,
            self._worker,
            self._statistics,
            deletes=is_primary,
            is_alone=self._group.count == 1,
            names=opened.step_names,
        )
        self._lineage = (
            Lineage(self._storage, self._writer.id, begins=local is not None)
            if is_primary
            else None
        )
        self._root_reporter = (
            RootReporter(self._group, self._storage.root, self._index) if is_primary else None
        )
        self._stager = SaveStager(self._storage, self._group, self._options, self._history)
        self._saver = AsyncSaver(
            SaveContext(
                self._storage,
                self._group,
                self._claims,
                self._writer,
                self._options,
                self._index,
                self._worker,
                self._statistics,
                self._history,
                self._lineage,
                self._root_reporter,
            )
        )
        self._counter = 0
        self._has_policy = save_policy is not None
        skips, newest = (
            self._options.on_busy == "skip",
            max([*opened.steps, *opened.foreign], default=None),
        )
        self._scheduler = SaveScheduler(
            save_policy, self._group, f"{self._message_name}/soon", skips=skips, last_step=newest
        )
        hang_timeout_s = self._options.hang_timeout_s
        self._watchdog = (
            None
            if hang_timeout_s is None
            else Watchdog(hang_timeout_s, exit=self._options.hang_exit)
        )
        self._tier: LocalTier | None = None
        self._closed = False
        _open_managers.add(self)
        if local is not None:
            try:
                self._tier = LocalTier(
                    local, self._storage, self._group, self._options, self._writer.id, self._lineage
                )
            except BaseException:
                self.close()
                raise
            if self._root_reporter is not None:
                self._root_reporter.local_steps = self._tier.copies
        self._restorer = StepRestorer(
            self._storage,
            self._group,
            self._options,
            self._message_name,
            self._index,
            self._foreign,
            self._tier,
            self._lineage,
            self._root_reporter,
        )
        if is_primary:
            self._worker.put(
                f"sweeping {self._storage.root}", lambda: sweep_files(self._storage, self._claims)
            )
        self._report_root()

    # --- saving

    def should_save(self, step: int) -> bool:
        """Says whether `save(step, ...)` would save: a save policy says so, or the preemption sync
        point. Alike on every process.
        """
        self._note_progress()
        return self._wants_durably(check_step(step)) or self._wants_locally(step)

    def _wants_durably(self, step: int) -> bool:
        return bool(self._scheduler.reason(step, busy=self._saver.busy()))

    def _wants_locally(self, step: int) -> bool:
        return self._tier is not None and step not in self._index and self._tier.wants(step)

    def reached_preemption(self, step: int) -> bool:
        """Says whether the job has to give its machines back: save this step and stop. Alike on
        every process, at the same step.
        """
        self._note_progress()
        return self._scheduler.preempted(check_step(step))

    def save(
        self,
        step: int,
        state: Any = None,
        *,
        items: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        metadata: Any = None,
        dtype: SaveDtype = None,
        force: bool = False,
        overwrite: bool = False,
    ) -> SaveHandle:
        """Starts to save a step; returns a handle, false, having done nothing, when the save policy
        does not want it.

        `state` is the tree of the item "state"; `items` names several: trees, `Json(value)`, data
        iterators. Returns when the caller may donate or overwrite its arrays; writing goes on in
        the background. Blocks while the last save is in flight (see Options.on_busy). `metrics` are
        numbers, for KeepBest and `best_step`; `metadata` is a JSON value. `dtype` is what
        floating-point arrays are saved as, or says so of a leaf's path (None: as it is): `lambda
        path: jnp.bfloat16 if path.startswith("params.") else None`. `force` saves whatever the
        policy says; `overwrite` replaces a step that exists; one that a restore with `fallback` has
        passed over is replaced without.

        Raises StepExists, UnsupportedLeaf, ValueError before anything is written. The error of an
        earlier save that failed in the background is raised here too, after this save has begun:
        every process then begins the same saves, whenever it learns of a failure.
        """
        self._note_progress()
        self._check_writable()
        known = _is_step(step)
        is_durable = (
            force or not (known or self._has_policy) or self._wants_durably(check_step(step))
        )
        if self._tier is not None:
            self._tier.raise_error()
            if not is_durable and self._wants_locally(check_step(step)):
                handle = self._tier.save(step, _items(state, items), metrics, metadata, dtype)
                if (reporter := self._root_reporter) is not None:
                    handle.on_commit(lambda _: reporter.report())
                return handle
        if not is_durable:
            self._statistics.add(saves_skipped=1)
            return SaveHandle(step)
        if self._tier is not None and known:
            self._tier.started(step)
        overwrite = overwrite or (known and self._index.was_passed_over(step))
        called = time.perf_counter()
        self._counter += (
            1  # before all that can fail: the next save has the same number on all processes
        )
        number, save_id = check_step(step) if known else 0, f"{self._writer.id}{self._counter:08x}"
        request = SaveRequest(self._counter, number, save_id, overwrite, self._folder(number))
        earlier: HoldfastError | None = None
        if not self._has_claim:
            claim_root(self._storage, self._claims, self._writer, self._group, self._options)
            self._has_claim = True
        try:
            with self._saver.preparing(request, self._group):
                self._saver.join()
                earlier = self._saver.take_error()
                step = check_step(step)
                self._refuse_existing(step, overwrite)
                leaving = self._scheduler.leaving(step, self._options.save_timeout_s)
                request = self._stager.stage(
                    request, _items(state, items), metrics, metadata, dtype, leaving
                )
        except BaseException as error:
            if earlier is not None:
                error.add_note(f"besides, an earlier save failed: {earlier}")
            if self._group.count > 1 and known:  # it was begun, for the others
                self._scheduler.started(step)
            raise
        self._scheduler.started(step)
        self._group.report(step=step, save_blocked_s=self._statistics.save_blocked_s)
        handle = self._saver.start(request)
        self._saver.wait_for_snapshots()
        if self._group.index in leaving and not request.own_bytes:
            # its machine is taken: what it has to say of this save it says before anything else
            self._saver.join()
        self._statistics.add(save_blocked_s=time.perf_counter() - called)
        if earlier is not None:
            earlier.add_note(f"the save of step {step} was begun nevertheless")
            raise earlier
        return handle

    def wait_until_finished(self, timeout_s: float | None = None) -> None:
        """Blocks until no save is in flight; raises the error of the last one if it failed,
        TimeoutError after `timeout_s`.

        When it returns, every save that was begun is durable, and steps that the keep policy let go
        are no longer listed.
        """
        self._saver.join(timeout_s)
        if self._tier is not None:
            self._tier.join(timeout_s)
        self.check_for_errors()

    def is_saving_in_progress(self) -> bool:
        """Says whether a save is in flight on this process."""
        return self._saver.busy() or (self._tier is not None and self._tier.is_busy())

    def check_for_errors(self) -> None:
        """Raises the error of a save that failed in the background, once. Does not block."""
        self._saver.raise_error()
        if self._tier is not None:
            self._tier.raise_error()

    def _note_progress(self) -> None:
        if self._watchdog is not None:
            self._watchdog.progress()

    def _check_writable(self) -> None:
        if self._closed:
            forked = (
                "; it belongs to the process that this one was forked from" if self._forked else ""
            )
            raise ValueError(f"the manager of {self._storage.root} is closed{forked}")
        if self._options.read_only:
            raise ValueError(
                f"the manager of {self._storage.root} was opened with Options(read_only=True)"
            )

    @property
    def _message_name(self) -> str:
        """What the names of this manager's messages to its group begin with."""
        return f"checkpoint/{self._writer.id}"

    @property
    def _is_writing_primary(self) -> bool:
        return self._group.index == 0 and not self._options.read_only

    def _folder(self, step: int) -> str:
        return self._index.folder(check_step(step))

    def _exists(self, step: int) -> bool:
        return self._index.exists(check_step(step))

    def _refuse_existing(self, step: int, overwrite: bool) -> None:
        root = self._storage.root
        if step in self._foreign:
            raise StepExists(
                f"step {step} of {root} was written by another library; save another step",
                step=step,
            )
        if not overwrite and self._exists(step):
            message = (
                f"step {step} is already in {root}; nothing was written. To replace it, pass"
                " overwrite=True"
            )
            raise StepExists(message, step=step, path=root)

    # --- keeping

    def delete(self, step: int) -> None:
        """Deletes a step, held or not; every process calls it, the primary acts. Blocks. Raises
        StepNotFound.
        """
        self._check_writable()
        step = check_step(step)
        if step in self._foreign:
            raise CheckpointError(
                f"step {step} of {self._storage.root} was written by another library; holdfast"
                " deletes only its own",
                step=step,
            )
        self._saver.join()
        if self._history is not None:
            self._history.forget()
        is_there = self._exists(step)
        if not is_there and step not in self.local_steps():
            raise StepNotFound(
                f"there is no step {step} in {self._storage.root}, which has {self.all_steps()}",
                step=step,
            )
        if not is_there or step == max(self._index.steps(), default=step):
            self._roll_back(step)
        if not is_there:
            return
        if error := self._index.remove([step]).get(step):
            root = self._storage.root
            message = (
                f"step {step} of {root} could not be deleted and is still there: {error}; look at"
                " the disk or the mount, then"
            )
            raise CheckpointError(f"{message} delete it again", step=step, path=root) from error
        self._report_root()
        self._worker.wait(self._options.save_timeout_s)

    def _report_root(self) -> None:
        """Has the primary report which steps there are, for those who watch the job."""
        if self._root_reporter is not None:
            self._root_reporter.report()

    def _roll_back(self, step: int) -> None:
        """Lets no local step from `step` on come back."""

        def begin() -> None:
            if self._lineage is not None:
                self._lineage.deleting_newest(step)

        if self._tier is None:
            begin()
        else:
            self._tier.roll_back(step, begin)

    # --- restoring

    def all_steps(self) -> list[int]:
        """Returns the steps that are there, ascending: the store's listing; in a group what all
        processes know alike (see `reload`).

        Local steps are among them.
        """
        return sorted({*self._durable_steps(), *self.local_steps()})

    def local_steps(self) -> list[int]:
        """Returns the steps that the hosts have, whole, ascending, as all processes know alike;
        none without a local tier.
        """
        return [] if self._tier is None else self._tier.steps()

    def known_steps(self) -> list[int]:
        """Returns the steps that are known without a look at the store, ascending: those of the
        opening or the last `reload`, and what this manager has saved and deleted since.
        """
        return sorted({*self._index.steps(), *self._foreign, *self.local_steps()})

    def _durable_steps(self) -> list[int]:
        if self._group.count == 1:
            return sorted(self._restorer.list_steps())
        return sorted([*self._index.steps(), *self._foreign])

    def reload(self) -> None:
        """Lists the store again, so that all processes of a group know the steps that others have
        saved or deleted meanwhile.

        Every process calls it; the primary lists. Blocks, first for the save in flight. Alone it is
        not needed: each call lists then.
        """
        self._saver.join()
        name = f"{self._message_name}/reload"
        steps, foreign = list_root(
            self._storage, self._group, self._options, name, find_foreign=find_foreign_steps
        )
        self._index.adopt(steps)
        self._foreign.adopt(foreign)
        if self._tier is not None:
            self._tier.survey()

    def latest_step(self) -> int | None:
        """Returns the newest step, or None. The last acknowledged save, or a newer one."""
        return max(self.all_steps(), default=None)

    def best_step(self, metric: str | None = None, mode: str = "min") -> int | None:
        """Returns the best step by a metric: that of the keep policy's KeepBest unless given. None
        when no step has it.
        """
        rule = best_rule(self._keep_policy) if metric is None else KeepBest(1, metric, mode)  # type: ignore[arg-type]
        if rule is None:
            raise ValueError("best_step: give a metric, or a keep policy with a KeepBest in it")
        known = [StepFacts(step, self.metrics(step)) for step in self._durable_steps()]
        return next(iter(rule.ranked(known)), None)

    def metrics(self, step: int) -> dict[str, float]:
        """Returns the metrics of a step. Raises StepNotFound, Corrupt."""
        return dict(self._facts(step).metrics)

    def metadata(self, step: int) -> Any:
        """Returns the user's metadata of a step. Raises StepNotFound, Corrupt."""
        return self._facts(step).metadata

    def _tier_with(self, step: int) -> LocalTier | None:
        """Returns the local tier where it has a step that the store has not."""
        return (
            self._tier
            if self._tier is not None and step in self._tier.steps() and not self._exists(step)
            else None
        )

    def _facts(self, step: int) -> Record | CheckpointInfo | StepHead:
        if (tier := self._tier_with(step)) is not None:
            return tier.head(step)
        with naming_path(join(self._storage.root, self._folder(step))):
            if step in self._foreign:
                return self._foreign.open(step).info
            return read_record(self._storage, self._folder(step))

    def structure(self, step: int) -> Structure:
        """Returns what a step holds, without reading an array: each item's tree is what `like`
        accepts. Raises StepNotFound, Corrupt.

        Of a local step every process of a group calls it, as `restore`, and it blocks until all
        have: its record is in the parts of all.
        """
        if (tier := self._tier_with(step)) is not None:
            return tier.structure(step)
        with naming_path(join(self._storage.root, self._folder(step))):
            if step in self._foreign:
                return structure_of(self._foreign.open(step))
            return structure_of(HoldfastCheckpoint(StorePath(self._storage, self._folder(step))))

    def restore(
        self,
        step: int | None = None,
        like: Any = None,
        *,
        item: str = "state",
        items: Mapping[str, Any] | None = None,
        partial: bool | Callable[[str], bool] = False,
        cast: bool = False,
        types: Sequence[type] = (),
        plain: bool = False,
        rename: Names = None,
        read_once: bool = False,
        fallback: bool = False,
        hold_s: float = 0.0,
        process: int | None = None,
    ) -> Any:
        """Restores an item of a step; `step=None` is the newest, by the primary's answer. In a
        group it ends alike on all processes.

        `like` is a tree of arrays or jax.ShapeDtypeStructs with shardings, of any topology (None:
        numpy; SAVED: the saved shardings); for an iterator's item the iterator, which takes its
        state back. `items` names several, each with its `like` or None, and a dict of them comes
        back, all of one step. Without a `like`, a class that is not among `types` comes back as
        `Node`, with `plain=True` as dict or list. `rename` turns the paths of stored leaves into
        those of `like`: a mapping, rules of (pattern, replacement), or a function. `fallback=True`
        goes to the newest whole step, on all processes alike, when a newer one cannot be read.
        `hold_s` keeps the step from the keep policy for so many seconds. Of iterators, and of
        leaves that were kept per process, each process gets its own back, on as many processes as
        saved; `process` is the one whose to take instead.

        Blocks, in a group until all processes are done, at most Options.restore_timeout_s after
        this one. Raises StepNotFound, StepGone, TreeMismatch, Corrupt, HostileCheckpoint,
        CheckpointError where the store cannot be read; where one process fails, all raise it, and
        `error.process` says which. Raises BarrierTimeout or ProcessLost naming the process that did
        not come to the end.
        """
        chosen, wanted = None if step is None else check_step(step), wanted_items(item, like, items)
        selected = (
            (self._group.index, self._group.count)
            if process is None
            else (operator.index(process),)
        )
        options = RestoreOptions(
            partial=partial,
            cast=cast,
            types=types,
            plain=plain,
            rename=rename,
            read_once=read_once,
            per_process=PerProcessSelection(*selected),
            host_memory_bytes=self._options.host_memory_bytes,
        )
        began = time.perf_counter()
        values = self._restorer.restore(chosen, wanted, options, hold_s=hold_s, fallback=fallback)
        size = sum(int(getattr(leaf, "nbytes", 0)) for leaf in jax.tree_util.tree_leaves(values))
        self._statistics.add(restores=1, restore_s=time.perf_counter() - began, restore_bytes=size)
        self._group.report(restore_s=self._statistics.restore_s)
        return values[item] if items is None else values

    # --- the end

    def statistics(self) -> dict[str, Any]:
        """Returns what this manager has done, in JSON types: `saves`, `save_s`, `save_bytes`,
        `save_blocked_s`, `restores`, ...
        """
        return self._statistics.to_dict() | ({} if self._tier is None else self._tier.statistics())

    def close(self) -> None:
        """Waits for the save in flight and for deletions, gives the claim up, and raises the error
        of a save that failed. Idempotent.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._saver.join()
        finally:
            self._release(self._options.exit_timeout_s)
        self.check_for_errors()

    def _release(self, timeout_s: float) -> None:
        _open_managers.discard(self)
        if self._tier is not None:
            self._tier.close(timeout_s)
        self._saver.close()
        if self._watchdog is not None:
            self._watchdog.close()
        self._scheduler.close()
        if not self._worker.wait(timeout_s):
            self._worker.drop()
        if self._is_writing_primary:
            try:
                self._claims.fence(self._writer.id)
            except OSError as error:
                _log.warning(
                    "the claim on %s could not be removed, the next manager does it: %s",
                    self._storage.root,
                    error,
                )

    def _finish_at_exit(self) -> None:
        """Lets a save in flight finish, within bounds, when the interpreter ends with this manager
        open.
        """
        self._closed = True
        with contextlib.suppress(TimeoutError, HoldfastError):
            self._saver.join(self._options.exit_timeout_s)
        if (error := self._saver.take_error()) is not None:
            _log.error("a save failed before the exit: %s", error)
        if not self._saver.busy():
            self._release(1.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except HoldfastError as failed:
            if error is None:
                raise
            error.add_note(f"besides, a save failed: {failed}")

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            warnings.warn(
                f"CheckpointManager of {self._storage.root} was not closed",
                ResourceWarning,
                stacklevel=2,
            )

    def __repr__(self) -> str:
        return f"CheckpointManager({self._storage.root!r})"


def _history_of(storage: Storage, options: Options) -> SaveHistory | None:
    """Returns the history of incremental saves, where they are wanted. Raises CheckpointError where
    the store has no hard links.
    """
    if not options.incremental:
        return None
    load_digest()
    if storage.posix is None or not storage.posix.can_link:
        message = (
            f"{storage.root} cannot be saved to incrementally: it has no hard links; expected a"
            " POSIX folder, without single_writer"
        )
        raise CheckpointError(f"{message}. Leave out Options(incremental=True)", path=storage.root)
    return SaveHistory(options.full_every)


def _is_step(step: Any) -> bool:
    with contextlib.suppress(TypeError, ValueError):
        check_step(step)
        return True
    return False


def _items(state: Any, items: Mapping[str, Any] | None) -> dict[str, Any]:
    if (state is None) == (items is None):
        raise ValueError("save: give either a state or items")
    return {"state": state} if items is None else dict(items)


_open_managers: weakref.WeakSet[CheckpointManager] = weakref.WeakSet()


def _finish_all_at_exit() -> None:
    for manager in list(_open_managers):
        manager._finish_at_exit()


def _close_all_in_child() -> None:
    """Closes the managers of a forked child without a word to store or group: they are the
    parent's, and so are their threads.
    """
    for manager in list(_open_managers):
        manager._closed = manager._forked = True
    _open_managers.clear()


os.register_at_fork(after_in_child=_close_all_in_child)

# Threads and executors still work in hooks of `threading`; in those of `atexit` they are gone. The
# last registered runs first: the executors' own hook, registered when their module was imported,
# runs after ours.
assert _executors is not None
getattr(threading, "_register_atexit", atexit.register)(_finish_all_at_exit)
