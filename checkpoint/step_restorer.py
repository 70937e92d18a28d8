"""Restores a step of a root from where it is, the store or the hosts, alike on all processes of a
group.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from .agreement.exchange import ask_primary
from .agreement.group_record import SentRecord, read_record_together
from .agreement.restore_verdict import RestoreAgreement, Verdict, is_small, name_items
from .errors import (
    Corrupt,
    HostileCheckpoint,
    StepGone,
    StepNotFound,
    clear_frames,
    error_text,
    naming_step,
)
from .format.record import Record
from .layouts.base import CheckpointReader
from .layouts.detect import why_not_read
from .layouts.holdfast import HoldfastCheckpoint
from .layouts.restore import restore_items
from .local_tier.parts import LocalKey
from .restoring.restore import RestoreOptions
from .restoring.restore_peers import RestorePeers, is_worth_sharing
from .step_catalog import StepCatalog
from .steps.holds import take_hold
from .steps.refusals import why_no_steps
from .storage.path import StorePath

_log = logging.getLogger(__name__)
# steps that one restore sees deleted or overwritten while it reads them, before it gives up
MOST_GONE = 64
# what says of the files of a step in the store that they are damaged, or gone
_DAMAGE = (Corrupt, HostileCheckpoint, StepGone)


class StepRestorer:
    """Restores the steps of a manager. For one thread at a time; in a group every process calls the
    same, in the same order.

    A step has a LocalKey where the hosts have it and the store has not.
    """

    def __init__(self, catalog: StepCatalog) -> None:
        self._catalog = catalog
        self._root = catalog.root
        self._state = catalog.state
        self._tier = catalog.tier
        self._timeout_s = catalog.root.options.restore_timeout_s
        self._tries = 0  # alike on all processes, whatever each of them restores

    def restore(
        self,
        chosen: int | None,
        wanted: Mapping[str, Any],
        options: RestoreOptions,
        *,
        hold_s: float,
        fallback: bool,
    ) -> tuple[int, dict[str, Any]]:
        """Restores a step, or the newest; with `fallback`, from the newest (or `chosen`) down the
        first that restores on every process. Returns which, and its values by item.

        Where no number was asked for, a local step gives way to the next also without, and a step
        that was deleted or overwritten to what is the newest then. Only damage and deletion are
        passed over. A `like` or an item that does not fit, and what passes (no descriptor, no
        memory, a store that does not answer), is an error on every process: an older step would
        come back in silence. The steps are listed again before each try, since a writer may delete
        old ones and add new ones meanwhile.
        """
        failures: dict[int, str] = {}
        gone = 0
        if self._tier is not None:
            self._tier.survey()
        while True:
            step, key = self._choose(chosen, failures, fallback=fallback)
            values, verdict = self._restore_alike(step, key, wanted, options, hold_s=hold_s)
            error = verdict.error
            if error is None:
                assert values is not None
                return step, values
            is_damage = isinstance(error, _DAMAGE)
            if key is None and is_damage and self._state.history is not None:
                self._state.history.doubt()
            gives_way = fallback and (is_damage or isinstance(error, StepNotFound))
            # Hosts may be lost: what cannot be read of a local step is in the store, or older.
            gives_way |= key is not None and (fallback or chosen is None)
            # The newest is what it is now, where a writer replaced or deleted it meanwhile: also
            # between the listing and the opening, where its record is missing.
            is_missing = isinstance(error, StepNotFound) and not fallback
            is_gone = isinstance(error, StepGone) or is_missing
            gives_way |= chosen is None and is_gone
            if verdict.is_mistake or not gives_way:
                raise error
            clear_frames(error)
            what = "step" if key is None else "local step"
            _log.warning("%s %d of %s is passed over: %s", what, step, self._root.where, error)
            if key is not None and self._tier is not None:
                self._tier.pass_over(key)
                continue
            if not is_gone:
                failures[step] = error_text(error)
                self._state.index.pass_over(step)
                self._state.report()
                continue
            # A writer may delete faster than this process reads, without an end.
            gone += 1
            if gone == MOST_GONE:
                error.add_note(
                    f"so were {MOST_GONE - 1} steps before it; hold_s keeps a step while it is read"
                )
                raise error

    # --- which step

    def _choose(
        self, chosen: int | None, failures: Mapping[int, str], *, fallback: bool
    ) -> tuple[int, LocalKey | None]:
        """Returns the step to restore, alike on all processes: the newest that did not fail."""
        if chosen is not None and not fallback:
            # The store is asked only where it matters: opening the step will say the rest.
            return chosen, self._local_key(chosen) if self._catalog.is_local(chosen) else None
        durable, left = ask_primary(
            self._root.group,
            f"{self._root.messages}/steps",
            self._catalog.look,
            self._timeout_s,
        )
        # What was left behind comes back by its number alone.
        line = {*durable} - {*left}
        steps = line | {*self._catalog.local_steps()} | ({*durable} & {chosen})
        steps -= failures.keys()
        newest = max((step for step in steps if chosen is None or step <= chosen), default=None)
        if newest is None:
            raise self._none_restores(failures, left)
        if chosen not in (None, newest) and not failures:
            _log.warning("%s has no step %d: step %d is restored", self._root.where, chosen, newest)
        return newest, None if newest in line else self._local_key(newest)

    def _none_restores(
        self, failures: Mapping[int, str], left_behind: Collection[int]
    ) -> StepNotFound:
        where = self._root.where
        if failures:
            tried = "; ".join(f"step {step}: {failure}" for step, failure in failures.items())
            return StepNotFound(f"no step of {where} restores: {tried}", path=where)
        storage = self._root.storage
        more = ""
        if left_behind:
            more = f"; it has {sorted(left_behind)}, which were left behind: name one"
        with contextlib.suppress(OSError, MemoryError):  # there is none, whatever else is there
            more = more or why_no_steps(storage) or why_not_read(list(StorePath(storage).names()))
        return StepNotFound(f"there is no step in {where}{more}", path=where)

    def _local_key(self, step: int) -> LocalKey | None:
        found = [] if self._tier is None else self._tier.found()
        return next((key for key in found if key.step == step), None)

    # --- one step

    def _restore_alike(
        self,
        step: int,
        key: LocalKey | None,
        wanted: Mapping[str, Any],
        options: RestoreOptions,
        *,
        hold_s: float,
    ) -> tuple[dict[str, Any] | None, Verdict]:
        """Returns the values by item, and how the restore ended on all processes."""
        self._tries += 1
        root = self._root
        path = self._catalog.path_of(step)

        agreement = RestoreAgreement(
            root.group,
            f"{root.messages}/restore",
            f"{name_items(wanted)} of step {step}",
            self._timeout_s,
        )

        @contextlib.contextmanager
        def opened() -> Iterator[CheckpointReader]:
            with naming_step(f"step {step}", step, path):
                if key is not None:
                    assert self._tier is not None  # it has found the key
                    with self._tier.opened(key, str(self._tries)) as local:
                        yield local
                elif step in self._catalog.foreign:
                    yield self._catalog.foreign.open(step)
                else:
                    yield self._open_durable(step, wanted, options, agreement, hold_s=hold_s)

        is_ours = key is None and step not in self._catalog.foreign
        shares = is_ours and is_worth_sharing(options.read, root.storage, root.group)
        values, verdict, counts = restore_together(
            agreement, opened, wanted, options, path=path, shares=shares
        )
        self._state.statistics.add(
            restore_store_bytes=counts["store_bytes"],
            restore_peer_bytes=counts["peer_bytes"],
            restore_peer_failures=counts["peer_failed"] + counts["peer_damaged"],
        )
        if verdict.error is None:
            self._state.order.restored(step)
            if self._state.lineage is not None:
                self._state.lineage.restored()
        return values, verdict

    def _open_durable(
        self,
        step: int,
        wanted: Iterable[str],
        options: RestoreOptions,
        agreement: RestoreAgreement,
        *,
        hold_s: float,
    ) -> CheckpointReader:
        """Returns a step of the store, held where that is wanted. Raises StepGone where it goes, so
        that it is held whenever it has been restored.
        """
        root = self._root
        folder = self._state.index.folder(step)
        with self._catalog.looking_for(step):
            record, has_room = self._read_record(folder, wanted, options)
        if has_room:
            agreement.found_room()
        holds = root.group.index == 0 and hold_s > 0
        if holds and not take_hold(root.storage, step, folder, hold_s):
            raise StepGone(
                f"step {step} of {root.where} cannot be held: a keep policy lets it go, or it is"
                " gone; restore a newer step",
                path=root.where,
                step=step,
            )
        return HoldfastCheckpoint(root.storage, folder, record)

    def _read_record(
        self, folder: str, wanted: Iterable[str], options: RestoreOptions
    ) -> SentRecord:
        group = self._root.group
        if group.count == 1:
            return SentRecord(self._catalog.seen.read(self._root.storage, folder))
        return read_record_together(
            self._root.storage,
            folder,
            group,
            f"{self._root.messages}/record",
            question=str(self._tries),
            timeout_s=self._timeout_s,
            find_room=lambda record: self._has_room(record, wanted, options),
        )

    def _has_room(self, record: Record, wanted: Iterable[str], options: RestoreOptions) -> bool:
        """Says whether each process has room for all of the items, were it to read them whole."""
        items = [record.items[item] for item in wanted if item in record.items]
        nbytes = sum(leaf.nbytes for item in items for leaf in item.leaves)
        if is_small(nbytes, self._root.group.count):
            return True
        # A cast makes copies, of another size.
        return not options.cast and self._root.memory.has_room_for_each(nbytes)


def restore_together(
    agreement: RestoreAgreement,
    opened: Callable[[], AbstractContextManager[CheckpointReader]],
    wanted: Mapping[str, Any],
    options: RestoreOptions,
    *,
    path: str,
    shares: bool,
) -> tuple[dict[str, Any] | None, Verdict, Counter[str]]:
    """Restores items of the checkpoint that `opened` opens, on all processes of a group. Blocks.
    Returns the values by item, how the restore ended on all processes, and what came from where.

    Where it `shares`, alike on all, the processes pass on what they read. What any of them runs
    into is in the verdict of all; the store's errors name a file, or `path`.
    """
    peers = None
    if shares:
        peers = RestorePeers(agreement.group, agreement, options.read, options.memory)
    options = replace(
        options,
        before_reading=agreement.before_reading,
        before_giving=agreement.before_giving,
        peers=peers,
    )

    def restore() -> dict[str, Any]:
        with opened() as checkpoint:
            agreement.opened(checkpoint.info.save_id)
            return restore_items(checkpoint, wanted, options)

    # The part servers stay until all have agreed.
    with peers or contextlib.nullcontext():
        values, verdict = agreement.run(restore, path)
    return values, verdict, Counter() if peers is None else peers.counts
