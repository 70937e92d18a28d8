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

from holdfast.coordination import HoldfastError
from holdfast.multihost import Group, Watchdog, default_group

from .errors import CheckpointError, StepExists, StepNotFound
from .format.files import has_record, list_steps
from .format.record import read_record
from .layouts.detect import ForeignSteps, find_foreign_steps
from .options import Options, Statistics
from .policy import KeepAll, KeepBest, KeepPolicy, SavePolicy, StepFacts, best_rule
from .restorer import Restorer
from .restoring.per_process import PerProcessSelection
from .restoring.restore import RestoreOptions
from .saving.async_saver import AsyncSaver
from .saving.commit import SaveContext, SaveRequest
from .saving.scheduler import SaveScheduler
from .saving.stager import SaveStager
from .steps.garbage import BackgroundWorker, sweep_files
from .steps.index import StepIndex
from .steps.object_claims import open_claims
from .steps.opening import open_root
from .storage.path import open_storage

_log = logging.getLogger(__name__)


class CheckpointManager:
    """Saves, keeps and restores the steps of one root. In a group every process makes one, and calls the same methods in the same order.

    `directory` is a folder, or a URL of an object store (gs://, s3://). Without a save policy every call of `save` saves; without a keep
    policy every step stays. `group` is `holdfast.multihost.default_group()` unless given: in a notebook nothing else is needed.

    Opening it for writing takes a claim on the root, fences writers that are surely dead, and sweeps what they left unfinished. A context
    manager; `close()` waits for the save in flight. Methods are for one thread at a time; saves run in the background.
    Raises CheckpointError when the root cannot be written (pass `Options(read_only=True)` to only read).
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        save_policy: SavePolicy | None = None,
        keep_policy: KeepPolicy | None = None,
        group: Group | None = None,
        options: Options | None = None,
    ) -> None:
        self._closed = True  # until it is open
        self._options = options or Options()
        self._group = group if group is not None else default_group()
        self._keep = keep_policy or KeepAll()
        single_writer = self._options.single_writer
        self._storage = open_storage(directory, single_writer=single_writer)
        self._claims = open_claims(self._storage, single_writer=single_writer, claim_age_s=self._options.claim_age_s)
        opened = open_root(self._storage, self._claims, self._group, self._options, find_foreign=find_foreign_steps)
        self._writer = opened.writer
        self._foreign = ForeignSteps(self._storage, opened.foreign)
        self._statistics = Statistics()
        self._cleaner = BackgroundWorker()
        self._shelf = StepIndex(self._storage, self._keep, opened.steps, self._cleaner, self._statistics, deletes=self._is_writing_primary)
        self._preparer = SaveStager(self._storage, self._group, self._options)
        self._counter = 0
        desk = SaveContext(
            self._storage,
            self._group,
            self._writer.id,
            self._options.save_timeout_s,
            self._options.check_free_space,
            lambda save: self._shelf.superfluous(StepFacts(save.step, save.metrics)),
        )
        self._flight = AsyncSaver(desk, self._preparer.meter, self._settled)
        self._decider = SaveScheduler(
            save_policy,
            self._group,
            f"checkpoint/{self._writer.id}/soon",
            skips=self._options.on_busy == "skip",
            busy=self._flight.busy,
        )
        self._restorer = Restorer(
            self._storage,
            self._group,
            self._writer.id,
            self._statistics,
            self._options.save_timeout_s,
            self._foreign,
        )
        watched = self._options.hang_timeout_s
        self._watchdog = None if watched is None else Watchdog(watched, exit=self._options.hang_exit)
        self._closed = False
        _open_managers.add(self)
        if self._is_writing_primary:
            self._cleaner.put(f"sweeping {self._storage.root}", lambda: sweep_files(self._storage, self._claims))

    # --- saving

    def should_save(self, step: int) -> bool:
        """Says whether `save(step, ...)` would save: the save policy says so, or the preemption sync point. Alike on every process."""
        self._gets_on()
        return bool(self._decider.reason(_checked(step)))

    def reached_preemption(self, step: int) -> bool:
        """Says whether the job was told to give its machines back: save this step and stop. Alike on every process, at the same step."""
        self._gets_on()
        return self._decider.preempted(_checked(step))

    def save(
        self,
        step: int,
        state: Any = None,
        *,
        items: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        metadata: Any = None,
        force: bool = False,
        overwrite: bool = False,
    ) -> bool:
        """Starts to save a step; returns False, having done nothing, when the save policy does not want it.

        `state` is the tree of the item "state"; `items` names several: trees, `Json(value)`, data iterators. Returns when the caller may
        donate or overwrite its arrays; writing goes on in the background. Blocks while the last save is in flight (see Options.on_busy).
        `metrics` are numbers, for KeepBest and `best_step`; `metadata` is a JSON value. `force` saves whatever the policy says;
        `overwrite` replaces a step that exists.

        Raises StepExists, UnsupportedLeaf, ValueError before anything is written. The error of an earlier save that failed in the
        background is raised here too, after this save has begun: every process then begins the same saves, whenever it hears of a
        failure.
        """
        step = _checked(step)
        self._gets_on()
        self._need_writer()
        if not force and not self.should_save(step):
            self._statistics.add(saves_skipped=1)
            return False
        called = time.perf_counter()
        self._flight.join()
        earlier = self._flight.take_error()
        self._counter += 1
        save = SaveRequest(self._counter, step, f"{self._writer.id}{self._counter:08x}", overwrite)
        try:
            if step in self._foreign:
                raise StepExists(f"step {step} of {self._storage.root} was written by another library; save another step", step=step)
            if not overwrite and self._exists(step):
                raise StepExists(
                    f"step {step} is already in {self._storage.root}; nothing was written. To replace it, pass overwrite=True",
                    step=step,
                    path=self._storage.root,
                )
            self._preparer.fill(save, _items(state, items), metrics, metadata)
        except Exception as error:
            if earlier is not None:
                error.add_note(f"besides, an earlier save failed: {earlier}")
            self._break(save, error)
            raise
        self._start(save)
        self._flight.wait_for_snapshots()
        self._statistics.add(save_blocked_s=time.perf_counter() - called)
        if earlier is not None:
            earlier.add_note(f"the save of step {step} was begun nevertheless")
            raise earlier
        return True

    def wait_until_finished(self, timeout_s: float | None = None) -> None:
        """Blocks until no save is in flight; raises the error of the last one if it failed, TimeoutError after `timeout_s`.

        When it returns, every save that was begun is durable, and steps that the keep policy let go are no longer listed.
        """
        self._flight.join(timeout_s)
        self._flight.raise_error()

    def check_for_errors(self) -> None:
        """Raises the error of a save that failed in the background, once. Does not block."""
        self._flight.raise_error()

    def _gets_on(self) -> None:
        if self._watchdog is not None:
            self._watchdog.progress()

    def _need_writer(self) -> None:
        if self._closed:
            raise ValueError(f"the manager of {self._storage.root} is closed")
        if self._options.read_only:
            raise ValueError(f"the manager of {self._storage.root} was opened with Options(read_only=True)")

    @property
    def _is_writing_primary(self) -> bool:
        return self._group.index == 0 and not self._options.read_only

    def _exists(self, step: int) -> bool:
        return step in self._shelf if self._group.count > 1 else has_record(self._storage, step)

    def _break(self, save: SaveRequest, error: Exception) -> None:
        """Lets the other processes know that this one cannot take part; alone, there is nobody to tell."""
        for _, snapshot in save.trees.values():
            snapshot.release()
        if self._group.count > 1:
            save.trees, save.values, save.broken = {}, {}, error
            self._start(save)

    def _start(self, save: SaveRequest) -> None:
        self._decider.started(save.step)
        self._group.report(step=save.step)
        self._flight.start(save)

    def _settled(self, save: SaveRequest, gone: Sequence[int]) -> None:
        """Takes note of how a save ended, on its thread."""
        if save.error is not None:
            self._statistics.add(saves_failed=1)
            if save.leftovers:
                self._cleaner.put(f"deleting what is left of the failed save of step {save.step}", save.leftovers)
            return
        self._statistics.add(saves=1, save_s=save.ended - save.began, save_bytes=save.total_bytes)
        self._group.report(saved_step=save.step)
        if self._is_writing_primary:
            self._claims.take(self._writer)
        self._shelf.add(StepFacts(save.step, save.metrics))
        self._shelf.let_go(gone)

    # --- keeping

    def delete(self, step: int) -> None:
        """Deletes a step, held or not; every process calls it, the primary acts. Blocks. Raises StepNotFound."""
        self._need_writer()
        step = _checked(step)
        if step in self._foreign:
            raise CheckpointError(
                f"step {step} of {self._storage.root} was written by another library; holdfast deletes only its own", step=step
            )
        self._flight.join()
        if not self._exists(step):
            raise StepNotFound(f"there is no step {step} in {self._storage.root}, which has {self.all_steps()}", step=step)
        if self._shelf.let_go([step]):
            raise CheckpointError(f"step {step} of {self._storage.root} could not be deleted; see the log", step=step)
        self._cleaner.wait(self._options.save_timeout_s)

    # --- restoring

    def all_steps(self) -> list[int]:
        """Returns the steps that are there, ascending: the store's listing; in a group what all processes know alike."""
        if self._group.count == 1:
            return sorted([*list_steps(self._storage), *self._foreign])
        return sorted([*self._shelf.steps(), *self._foreign])

    def latest_step(self) -> int | None:
        """Returns the newest step, or None. The last acknowledged save, or a newer one."""
        return max(self.all_steps(), default=None)

    def best_step(self, metric: str | None = None, mode: str = "min") -> int | None:
        """Returns the best step by a metric: that of the keep policy's KeepBest unless given. None when no step has it."""
        rule = best_rule(self._keep) if metric is None else KeepBest(1, metric, mode)  # type: ignore[arg-type]
        if rule is None:
            raise ValueError("best_step: give a metric, or a keep policy with a KeepBest in it")
        known = [StepFacts(step, self.metrics(step)) for step in self.all_steps()]
        return next(iter(rule.ranked(known)), None)

    def metrics(self, step: int) -> dict[str, float]:
        """Returns the metrics of a step. Raises StepNotFound, Corrupt."""
        if step in self._foreign:
            return dict(self._foreign.open(step).info.metrics)
        return dict(read_record(self._storage, str(_checked(step))).metrics)

    def metadata(self, step: int) -> Any:
        """Returns the user's metadata of a step. Raises StepNotFound, Corrupt."""
        if step in self._foreign:
            return self._foreign.open(step).info.metadata
        return read_record(self._storage, str(_checked(step))).metadata

    def restore(
        self,
        step: int | None = None,
        like: Any = None,
        *,
        item: str = "state",
        partial: bool | Callable[[str], bool] = False,
        cast: bool = False,
        types: Sequence[type] = (),
        read_once: bool = False,
        fallback: bool = False,
        hold_s: float = 0.0,
        process: int | None = None,
    ) -> Any:
        """Restores an item of a step; `step=None` is the newest, by the primary's answer.

        `like` is a tree of arrays or jax.ShapeDtypeStructs with shardings, of any topology (None: numpy; SAVED: the saved shardings); for
        an iterator's item the iterator, which takes its state back. `fallback=True` goes to the newest whole step, on all processes
        alike, when a newer one cannot be read. `hold_s` keeps the step from the keep policy for so many seconds. Of iterators, and
        of leaves that were kept per process, each process gets its own back, on as many processes as saved; `process` is the one whose to
        take instead.

        Blocks. Raises StepNotFound, StepGone, TreeMismatch, Corrupt, HostileCheckpoint.
        """
        own = PerProcessSelection(self._group.index, self._group.count) if process is None else PerProcessSelection(operator.index(process))
        memory = self._options.host_memory_bytes
        how = RestoreOptions(partial=partial, cast=cast, types=types, read_once=read_once, per_process=own, host_memory_bytes=memory)
        chosen = None if step is None else _checked(step)
        return self._restorer.restore(chosen, like, item, how, fallback=fallback, hold_s=hold_s)

    # --- the end

    def statistics(self) -> dict[str, Any]:
        """Returns what this manager has done, in JSON types: `saves`, `save_s`, `save_bytes`, `save_blocked_s`, `restores`, ..."""
        return self._statistics.to_dict()

    def close(self) -> None:
        """Waits for the save in flight and for deletions, gives the claim up, and raises the error of a save that failed. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self._flight.join()
        finally:
            self._shut(self._options.exit_timeout_s)
        self._flight.raise_error()

    def _shut(self, timeout_s: float) -> None:
        _open_managers.discard(self)
        self._flight.close()
        if self._watchdog is not None:
            self._watchdog.close()
        self._decider.close()
        if not self._cleaner.wait(timeout_s):
            self._cleaner.drop()
        if self._is_writing_primary:
            try:
                self._claims.fence(self._writer.id)
            except OSError as error:
                _log.warning("the claim on %s could not be removed, the next manager does it: %s", self._storage.root, error)

    def _exit(self) -> None:
        """Is called when the interpreter ends with this manager open: a save in flight may finish, within bounds."""
        self._closed = True
        with contextlib.suppress(TimeoutError, HoldfastError):
            self._flight.join(self._options.exit_timeout_s)
        if (error := self._flight.take_error()) is not None:
            _log.error("a save failed before the exit: %s", error)
        if not self._flight.busy():
            self._shut(1.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.close()
        except HoldfastError as failed:
            if error is None:
                raise
            error.add_note(f"besides, a save failed: {failed}")

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            warnings.warn(f"CheckpointManager of {self._storage.root} was not closed", ResourceWarning, stacklevel=2)

    def __repr__(self) -> str:
        return f"CheckpointManager({self._storage.root!r})"


def _items(state: Any, items: Mapping[str, Any] | None) -> dict[str, Any]:
    if (state is None) == (items is None):
        raise ValueError("save: give either a state or items")
    return {"state": state} if items is None else dict(items)


def _checked(step: int) -> int:
    number = operator.index(step)
    if not 0 <= number < 10**18:
        raise ValueError(f"step {number}: expected 0 to 10**18 - 1")
    return number


_open_managers: weakref.WeakSet[CheckpointManager] = weakref.WeakSet()


def _finish_at_exit() -> None:
    for manager in list(_open_managers):
        manager._exit()


# Threads and executors still work in hooks of `threading`; in those of `atexit` they are gone. The last registered runs first:
# the executors' own hook, registered when their module was imported, runs after ours.
assert _executors is not None
getattr(threading, "_register_atexit", atexit.register)(_finish_at_exit)
