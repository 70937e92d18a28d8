"""CheckpointManager: the steps of one root, saved, kept and restored by all processes of a job."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from types import TracebackType
from typing import Any, Literal, Self

import jax

from holdfast.coordination import HoldfastError
from holdfast.multihost import Group
from holdfast.multihost.group.group import close_with_attempt
from holdfast.multihost.instruments import Phase, amount
from holdfast.multihost.preemption.preemption import count_anew

from .agreement.restore_verdict import wanted_items
from .errors import Corrupt, HostileCheckpoint, StepNotFound, error_text
from .format.limits import check_step, is_step
from .format.rename import Names
from .lanes import Lane
from .layouts.inspection import Structure
from .manager_parts import open_manager
from .memory.budget import USE
from .notebook import html_table, shown_steps
from .options import Local, Options, answers_foreign_words
from .policy import (
    KeepAll,
    KeepPolicy,
    SavePolicy,
    StepFacts,
    best_rule,
    check_keep_policy,
    check_save_policy,
)
from .restoring.per_process import PerProcessSelection
from .restoring.restore import RestoreOptions
from .restoring.sharing import Reading
from .saving.async_saver import (
    SaveHandle,
    is_interpreter_ending,
    refuse_after_end,
    refuse_in_callback,
    settle,
    settle_at_exit,
    tell_besides,
    tell_lost,
)
from .saving.cast import SaveDtype
from .saving.stager import SaveOrder
from .storage.base import CountsRequests
from .storage.threads import do_beside, register_at_exit

EXIT_DELETIONS_S = 1.0  # for what the keep policy has let go, when the interpreter ends


@answers_foreign_words(
    "write options=Options({word}={value})", [each.name for each in fields(Options)]
)
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
        self._last_saved: int | None = None
        # The program's step, by its last save or restore, and the items of that.
        self._at: tuple[int | None, set[str]] = (None, set())
        self._has_policy = save_policy is not None
        self._forked = False
        _check_settings(save_policy, keep_policy, options, local)
        if local is not None and save_policy is None:
            raise ValueError(
                "CheckpointManager: local= expects a save_policy besides: without one every call"
                " saves durably"
            )
        self._options = options or Options()
        self._keep_policy = keep_policy or KeepAll()
        self._parts = open_manager(
            directory,
            save_policy=save_policy,
            keep_policy=self._keep_policy,
            group=group,
            options=self._options,
            local=local,
        )
        self._catalog = self._parts.catalog
        self._root = self._catalog.root
        self._state = self._catalog.state
        self._durable = self._parts.lanes[0]
        self._closed = False
        count_anew(self._root.group.count)  # with another root the program begins another run
        _open_managers.add(self)
        close_with_attempt(self._end_with_attempt)

    # --- Saving

    def should_save(self, step: int) -> bool:
        """Says whether `save(step, ...)` would save: a save policy says so, or the preemption sync
        point. Alike on every process.
        """
        step = check_step(step)
        self._made(step)
        return any(lane.wants(step) for lane in self._parts.lanes)

    def reached_preemption(self, step: int) -> bool:
        """Says whether the job has to give its machines back: save this step and stop. Alike on
        every process, at the same step.
        """
        step = check_step(step)
        self._made(step)
        return self._durable.scheduler.preempted(step)

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
        does not want it. None wants the items of a step that this manager has just saved, or
        restored, and that is there: after the loop the last one may be saved again, once.

        `state` is the tree of the item "state"; `items` names several: trees, `Json(value)`, data
        iterators. Returns when the caller may donate or overwrite its arrays; writing goes on in
        the background. Blocks while the last save is in flight (see Options.on_busy). `metrics` are
        numbers, for KeepBest and `best_step`; `metadata` is a JSON value. `dtype` is what
        floating-point arrays are saved as, or says so of a leaf's path (None: as it is): `lambda
        path: jnp.bfloat16 if path.startswith("params.") else None`. What it cannot hold is a
        ValueError in an array of numpy's, and inf or nan in one of jax's. `force` saves whatever
        the policy says; `overwrite` replaces a step that exists; one that a restore with `fallback`
        has passed over, or that was left behind, is replaced without.

        The step at which a preemption stops may be saved twice: the second save does nothing.

        At or below the newest step a save goes on from the highest step below it that was restored
        since the last save, and leaves the steps above that behind (see `left_steps`).

        Raises StepExists, StepOutOfOrder where no lower step was restored, UnsupportedLeaf,
        ValueError before anything is written. Where another writer commits the step meanwhile,
        StepExists comes from the handle, and what was written is removed. The error of an earlier
        save that failed in the background is raised here too, after this save has begun:
        every process then begins the same saves, whenever it learns of a failure. A miss (see
        Options.on_save_error) is not raised here.
        """
        self._check_writable("save")
        order = SaveOrder(
            step,
            state=state,
            items=items,
            metrics=metrics,
            metadata=metadata,
            dtype=dtype,
            overwrite=overwrite,
        )
        step = order.step
        self._made(step, state if items is None else items)
        refuse_after_end(f"step {step} of {self._root.where}")
        lane = self._choose_lane(step, force=force)
        if lane is not None and self._state.order.has_restored:
            # Where the program has gone back, the save before is to be known, and left behind.
            self._join_lanes()
        names = {*items} if isinstance(items, Mapping) else {"state"}
        if lane is not None and not overwrite and self._is_done(step, names, force=force):
            lane.started(step)
            lane = None
        if lane is None:
            handle = SaveHandle(step)
            self._state.statistics.add(saves_skipped=1)
        else:
            self._last_saved = step
            handle = lane.save(order)
            self._at = (step, names)
        for other in self._parts.lanes[1:]:
            # Only now: who has heard of a failure, and who has not, begin the same saves.
            if other is not lane:
                other.raise_error()
        if is_interpreter_ending():
            # No call comes that would raise the error, or give the claim up.
            self._parts.close(EXIT_DELETIONS_S)
            self._raise_errors(missed=True)
        return handle

    def _is_done(self, step: int, names: set[str], *, force: bool) -> bool:
        """Says whether the program has just saved these items of a step, or restored them, which is
        there, and it ends or stops there. Waits for the save in flight.
        """
        at, saved = self._at
        if not is_step(step) or step != at or not names <= saved:
            return False
        self._join_lanes()
        ends = self._has_policy and not force
        stops = self._durable.scheduler.stops_at(step)
        if not (ends or stops) or not self._catalog.is_there(step):
            return False
        # Once: a program that stays at a step has forgotten to count.
        self._at = (step, saved) if stops else (None, set())
        return True

    def _made(self, step: int, state: Any = None) -> None:
        """Notes that the program is at a step; waits where its devices are too far behind."""
        self._parts.watchdog.progress()
        self._parts.run_ahead.made(step, state)
        self._parts.watchdog.progress()

    def _choose_lane(self, step: int, *, force: bool) -> Lane | None:
        """Returns the lane that saves a step, the durable one where it is forced."""
        # The durable lane is asked first, on every process: `wants` proposes steps to all of them,
        # and in another order processes would agree on different lanes for one step.
        durable, *others = self._parts.lanes
        is_durable = force or durable.wants(step)
        for lane in others:
            if is_durable:
                lane.started(step)
            elif lane.wants(step):
                return lane
        return durable if is_durable else None

    def wait_until_finished(self, timeout_s: float | None = None) -> None:
        """Blocks until no save is in flight; raises the error of the last one if it failed, a miss
        too, TimeoutError after `timeout_s`.

        When it returns, every save that was begun is durable, and steps that the keep policy let go
        are no longer listed.
        """
        self._refuse_in_callback("wait_until_finished")
        self._join_lanes(timeout_s)
        self._raise_errors(missed=True)

    def is_saving_in_progress(self) -> bool:
        """Says whether a save is in flight on this process."""
        try:
            self._join_lanes(0.0)
        except TimeoutError:
            return True
        return False

    def _join_lanes(self, timeout_s: float | None = None) -> None:
        for lane in self._parts.lanes:
            lane.join(timeout_s)

    def check_for_errors(self) -> None:
        """Raises the error of a save that failed in the background, once, unless it was a miss.
        Does not block.
        """
        self._raise_errors(missed=False)

    def _raise_errors(self, *, missed: bool) -> None:
        for lane in self._parts.lanes:
            lane.raise_error(missed=missed)

    def _refuse_in_callback(self, call: str) -> None:
        refuse_in_callback(self._root.writer.id, call)

    def _check_writable(self, call: str) -> None:
        self._refuse_in_callback(call)
        where = self._root.where
        if self._closed:
            forked = (
                "; it belongs to the process that this one was forked from" if self._forked else ""
            )
            raise ValueError(f"the manager of {where} is closed{forked}")
        if self._options.read_only:
            raise ValueError(f"the manager of {where} was opened with Options(read_only=True)")

    # --- Listing and deleting

    def delete(self, step: int) -> None:
        """Deletes a step, held or not; every process calls it, the primary acts. Blocks. Raises
        StepNotFound, and CheckpointError where the step is still there; on every process alike.
        """
        self._check_writable("delete")
        step = check_step(step)
        self._durable.join()
        self._catalog.delete(step)

    def delete_unheld(self, steps: Sequence[int]) -> list[int]:
        """Deletes steps as a keep policy does: those that a reader holds stay. Returns which of the
        steps are not there any more; one that was not there is no error. Otherwise as `delete`.
        """
        self._check_writable("delete_unheld")
        checked = [check_step(step) for step in steps]
        self._durable.join()
        return self._catalog.delete_unheld(checked)

    def all_steps(self) -> list[int]:
        """Returns the steps that are there, ascending: the store's listing; in a group what all
        processes know alike (see `reload`).

        Local steps are among them.
        """
        return self._catalog.all_steps()

    def local_steps(self) -> list[int]:
        """Returns the steps that the hosts have, whole, ascending, as all processes know alike;
        none without a local tier.

        A process that did not hear how a local save ended knows of that step with the next local
        save, restore or `reload`.
        """
        return self._catalog.local_steps()

    def known_steps(self) -> list[int]:
        """Returns the steps that are known without a look at the store, ascending: those of the
        opening or the last `reload`, and what this manager has saved and deleted since.
        """
        return sorted({*self._catalog.known_steps(), *self.local_steps()})

    def reload(self) -> None:
        """Lists the store again, so that all processes of a group know the steps that others have
        saved or deleted meanwhile.

        Every process calls it; the primary lists. Blocks, first for the save in flight. Alone it is
        not needed: each call lists then.
        """
        self._refuse_in_callback("reload")
        self._durable.join()
        self._catalog.reload()

    def latest_step(self) -> int | None:
        """Returns the newest step, or None. The last acknowledged save, or a newer one; never one
        that was left behind.
        """
        return self._catalog.latest_step()

    def left_steps(self) -> list[int]:
        """Returns the steps that were left behind, ascending: the job went back to an older one and
        has saved from there. They are restored by their numbers alone. They are those of the
        opening or the last `reload`, and what this manager has left since.
        """
        return self._catalog.left_steps()

    def best_step(
        self, metric: str | None = None, mode: Literal["min", "max"] | None = None
    ) -> int | None:
        """Returns the best step by a metric: metric and mode are those of the keep policy's
        KeepBest unless given, and the mode else "min". None when no step has it.

        Steps that were left behind, or are damaged, are not asked.
        """
        rule = best_rule(self._keep_policy, metric, mode)
        if rule is None:
            raise ValueError("best_step: give a metric, or a keep policy with a KeepBest in it")
        facts = []
        for step in self._catalog.line():
            # The keep policy, or another program, may have deleted it since.
            with contextlib.suppress(StepNotFound, Corrupt, HostileCheckpoint):
                facts.append(StepFacts(step, self.metrics(step)))
        ranked = rule.ranked(facts)
        return ranked[0] if ranked else None

    def metrics(self, step: int) -> dict[str, float]:
        """Returns the metrics of a step. Raises StepNotFound, Corrupt."""
        return dict(self._catalog.facts(check_step(step)).metrics)

    def metadata(self, step: int) -> Any:
        """Returns the user's metadata of a step. Raises StepNotFound, Corrupt."""
        return self._catalog.facts(check_step(step)).metadata

    def structure(self, step: int) -> Structure:
        """Returns what a step holds, without reading an array: each item's tree is what `like`
        accepts. Raises StepNotFound, Corrupt.

        Of a step that the store has not every process of a group with a local tier calls it, as
        `restore`, and it blocks until all have: its record is in the parts of all.
        """
        step = check_step(step)
        if self._catalog.is_on_hosts(step):
            self._refuse_in_callback("structure")
            # Its save may be in flight: before its commit it is nowhere, and after it in the store.
            self._join_lanes()
        return self._catalog.structure(step)

    # --- Restoring

    # More than eight parameters, because a caller's restore is one call with these words, which
    # `load` has too; inside they are one RestoreOptions.
    def restore(  # noqa: PLR0913
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
        read: Reading = "auto",
        fallback: bool = False,
        hold_s: float = 0.0,
        process: int | None = None,
    ) -> Any:
        """Restores an item of a step; `step=None` is the newest, by the primary's answer. In a
        group it ends alike on all processes. A step whose save is in flight is waited for.

        `like` is a tree of arrays or jax.ShapeDtypeStructs with shardings, of any topology (None:
        numpy; SAVED: the saved shardings); for an iterator's item the iterator, which takes its
        state back. None within a tree is no leaf, as in all of jax, and stays None. An abstract
        mesh in a `like` means the one that `jax.set_mesh` has set. `items` names
        several, each with its `like` or None, and a dict of them comes back, all of one step.
        Without a `like`, a class that is not among `types` comes back as `Node`, with `plain=True`
        as dict or list. `rename` turns the paths of stored leaves into those of `like`: a mapping,
        rules of (pattern, replacement), or a function. `cast=True` takes arrays of other dtypes: a
        number that the dtype of `like` cannot hold is a TreeMismatch, and digits may go. A Python
        int comes back equal, or is a TreeMismatch. `fallback=True` goes to the newest whole step,
        on all processes alike, when a newer one is damaged or gone. `hold_s` keeps the step from
        the keep policy for so many seconds. Of iterators, and of leaves that were kept per process,
        each process gets its own back, on as many processes as saved; `process` is the one whose to
        take instead.

        `read` says how a group reads what several of its processes need: "each" for itself;
        "once", after which its reader passes it on to the others; "auto" reads once from stores
        that are no folder, where that spares the store 64 MiB or more.

        Blocks, in a group until all processes are done, at most Options.restore_timeout_s after
        this one. Raises StepNotFound, StepGone, TreeMismatch, Corrupt, HostileCheckpoint,
        CheckpointError where the store cannot be read; where one process fails, all raise it, and
        `error.process` says which. Raises BarrierTimeout or ProcessLost naming the process that did
        not come to the end.
        """
        self._refuse_in_callback("restore")
        chosen = None if step is None else _step_to_restore(step)
        if fallback or chosen in (None, self._last_saved):
            self._join_lanes()
        wanted = wanted_items(item, like, items)
        options = RestoreOptions(
            partial=partial,
            cast=cast,
            types=types,
            plain=plain,
            rename=rename,
            read=read,
            per_process=PerProcessSelection.of(process, self._root.group),
            memory=self._root.memory,
        )
        values = self._restore(chosen, wanted, options, hold_s=hold_s, fallback=fallback)
        return values[item] if items is None else values

    def _restore(
        self,
        chosen: int | None,
        wanted: Mapping[str, Any],
        options: RestoreOptions,
        *,
        hold_s: float,
        fallback: bool,
    ) -> dict[str, Any]:
        """Restores as `restore` does, and counts it."""
        group = self._root.group
        count_anew(group.count)
        for lane in self._parts.lanes:
            lane.scheduler.count_anew()
        at, had = self._at
        self._at = (None, set())
        began_s = time.perf_counter()
        # Alike on all processes: a restore ends alike on all.
        trace = f"{self._root.messages}/{self._state.statistics.restores}"
        with self._state.waiting(), Phase("restore", trace=trace, process=group.index):
            step, values = self._parts.restorer.restore(
                chosen, wanted, options, hold_s=hold_s, fallback=fallback
            )
        self._at = (step, {*wanted, *(had if step == at else ())})
        size = sum(map(_bytes_of, values.values()))
        statistics = self._state.statistics
        statistics.add(restores=1, restore_s=time.perf_counter() - began_s, restore_bytes=size)
        amount("restore/bytes", size)
        group.report(
            restored_step=step,
            restore_s=statistics.restore_s,
            checkpoint_peak_bytes=USE.peak_bytes,
        )
        return values

    # --- The end

    def statistics(self) -> dict[str, Any]:
        """Returns what this manager has done, in JSON types: `saves`, `save_s`, `save_bytes`,
        `save_blocked_s`, `restores`, ... A call of `save` in which arrays are still being computed
        counts that time as `save_waited_s`, and not as blocked. Of s3:// and az:// also
        `store_reads`, and how many of these stood still and were asked a second time,
        `store_hedged_reads`. The most memory of the host that all saves and restores of this
        process have held at a time is `checkpoint_peak_bytes`.
        """
        storage = self._root.storage
        counted = storage.statistics() if isinstance(storage, CountsRequests) else {}
        counted["checkpoint_peak_bytes"] = USE.peak_bytes
        tier = self._catalog.tier
        local = {} if tier is None else tier.statistics()
        return self._state.statistics.to_dict() | local | counted

    def close(self) -> None:
        """Waits for the save in flight and for deletions, gives the claim up, and raises the error
        of a save that failed, a miss too. Idempotent.
        """
        if self._closed:
            return
        self._refuse_in_callback("close")
        hangs: HoldfastError | None = None
        try:
            self._durable.join()
        # Not after a Ctrl-C: the save goes on, and the exit waits for it.
        except HoldfastError as error:
            hangs = error
        self._closed = True
        _open_managers.discard(self)
        self._parts.close(self._options.exit_timeout_s)
        if hangs is not None:
            raise hangs
        # No save comes that would try again.
        self._raise_errors(missed=True)

    def _end_with_attempt(self) -> None:
        """Closes the manager as the process leaves the attempt that it belongs to."""
        self._closed = True
        _open_managers.discard(self)
        self._parts.watchdog.close()
        settle()
        self._finish()

    def _finish(self) -> None:
        """Tells what has failed, and gives the claim up, once the saves in flight are settled."""
        try:
            self._join_lanes(0.0)
        except TimeoutError:
            # The save still runs: its claim has to stand as long as it may commit.
            return
        try:
            self._raise_errors(missed=True)
        except Exception as error:
            tell_lost(f"a save to {self._root.where} failed: {error_text(error)}")
        self._parts.close(EXIT_DELETIONS_S)

    def _leave_to_parent(self) -> None:
        """Closes the manager of a forked child without a word to store or group.

        Both are the parent's, and so are the threads.
        """
        self._closed = True
        self._forked = True

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
            tell_besides(error, f"a save to {self._root.where} failed: {error_text(failed)}")

    def __del__(self) -> None:
        # What was not opened needs no closing.
        if not (getattr(self, "_closed", True) or is_interpreter_ending()):
            # Beside: the collector calls this wherever it is, also where a lock of it is held.
            do_beside(self._parts.watchdog.close)
            warnings.warn(
                f"CheckpointManager of {self._root.where} was not closed",
                ResourceWarning,
                stacklevel=2,
            )

    def __repr__(self) -> str:
        return f"<CheckpointManager of {self._root.where!r}: {', '.join(self._shown().values())}>"

    def _repr_html_(self) -> str:
        return html_table("CheckpointManager", {"root": self._root.where} | self._shown())

    def _shown(self) -> dict[str, str]:
        """Returns what matters of the manager, by name. Asks neither the store nor others."""
        group = self._root.group
        shown = {
            "steps": shown_steps(self.known_steps()),
            "keeps": repr(self._keep_policy),
            "process": f"process {group.index} of {group.count}",
        }
        if self._closed:
            shown["state"] = "closed"
        elif self._options.read_only:
            shown["state"] = "read only"
        elif self.is_saving_in_progress():
            shown["state"] = "saving"
        return shown


def _check_settings(
    save_policy: object, keep_policy: object, options: object, local: object
) -> None:
    """Raises TypeError, with the right spelling, for what is no policy, no Options or no Local."""
    if save_policy is not None:
        check_save_policy(save_policy)
    if keep_policy is not None:
        check_keep_policy(keep_policy)
    if options is not None and not isinstance(options, Options):
        raise TypeError(
            f"options={options!r}: write options=Options(...), as in Options(read_only=True)"
        )
    if local is not None and not isinstance(local, Local):
        raise TypeError(
            f"local={local!r}: write local=Local(folder, save_policy=EveryNSteps(10)), with the"
            " folder of this host"
        )


_open_managers: weakref.WeakSet[CheckpointManager] = weakref.WeakSet()


def _step_to_restore(step: Any) -> int:
    """Returns the step as an int. TypeError: it is none, for instance a tree."""
    try:
        return check_step(step)
    except TypeError as error:
        if isinstance(step, bool | float | str):
            raise
        raise TypeError(
            f"restore: expected a step first, found a {type(step).__name__}; to restore what is"
            " like a tree, write restore(like=tree)"
        ) from error


def _bytes_of(value: Any) -> int:
    """Returns the bytes of a tree's leaves; 0 for what is none, as handlers of files may return."""
    with contextlib.suppress(Exception):
        return sum(int(getattr(leaf, "nbytes", 0)) for leaf in jax.tree_util.tree_leaves(value))
    return 0


def finish_all_at_exit() -> None:
    """Ends the saves in flight, and lets go of the claims of managers that are open. May be called
    twice.
    """
    for manager in list(_open_managers):
        manager._parts.watchdog.close()
    settle_at_exit()
    for manager in list(_open_managers):
        # Still open: who saves later, in a hook of atexit, takes the claim again.
        manager._finish()


def _leave_all_to_parent() -> None:
    for manager in list(_open_managers):
        manager._leave_to_parent()
    _open_managers.clear()


os.register_at_fork(after_in_child=_leave_all_to_parent)
register_at_exit(finish_all_at_exit)
