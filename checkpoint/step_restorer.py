"""Restores a step of a root from where it is, the store or the hosts, alike on all processes of a
group.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from .agreement.exchange import ask_primary
from .agreement.group_record import SentRecord, read_record_together
from .agreement.restore_verdict import RestoreAgreement, Verdict, is_small, name_items
from .errors import Corrupt, HostileCheckpoint, StepGone, StepNotFound, error_text, naming_step
from .format.record import ItemRecord, Record
from .layouts.detect import restore_items, why_not_read
from .local_tier.parts import LocalKey
from .local_tier.restore_peers import GroupPeers, is_worth_sharing
from .restoring.renamed import check_rename
from .restoring.restore import RestoreOptions, restore_any
from .step_catalog import StepCatalog
from .steps.holds import take_hold
from .steps.refusals import why_no_steps
from .storage.path import StorePath

_log = logging.getLogger(__name__)
# steps that one restore sees deleted or overwritten while it reads them, before it gives up
MOST_GONE = 64
# what says of a step in the store that it is not whole, or gone, and does not pass
_DAMAGE = (Corrupt, HostileCheckpoint, StepGone, StepNotFound)


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
    ) -> dict[str, Any]:
        """Restores a step, or the newest; with `fallback`, from the newest (or `chosen`) down the
        first that restores on every process.

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
                return values
            gives_way = fallback and isinstance(error, _DAMAGE)
            # Hosts may be lost: what cannot be read of a local step is in the store, or older.
            gives_way |= key is not None and (fallback or chosen is None)
            # The newest is what it is now, where a writer replaced or deleted it meanwhile: also
            # between the listing and the opening, where its record is missing.
            is_missing = isinstance(error, StepNotFound) and not fallback
            is_gone = isinstance(error, StepGone) or is_missing
            gives_way |= chosen is None and is_gone
            if verdict.is_mistake or not gives_way:
                raise error
            what = "step" if key is None else "local step"
            _log.warning("%s %d of %s is passed over: %s", what, step, self._root.where, error)
            if key is not None and self._tier is not None:
                self._tier.pass_over(key)
                continue
            if not is_gone:
                failures[step] = error_text(error)
                self._state.index.pass_over(step)
                self._state.reporter.report()
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
            key = self._local_key(chosen)
            # The store is asked only where it matters: opening the step will say the rest.
            if key is not None and self._catalog.has(chosen):
                key = None
            return chosen, key
        durable, left = self._agreed_steps()
        # What was left behind comes back by its number alone.
        line = {*durable} - {*left}
        asked = {step for step in durable if step == chosen}
        steps = (line | {*self._catalog.local_steps()} | asked) - set(failures)
        newest = max((step for step in steps if chosen is None or step <= chosen), default=None)
        if newest is None:
            where = self._root.where
            storage = self._root.storage
            tried = "; ".join(f"step {step}: {failure}" for step, failure in failures.items())
            more = f"; it has {sorted(left)}, which were left behind: name one" if left else ""
            more = more or why_no_steps(storage) or why_not_read(list(StorePath(storage).names()))
            raise StepNotFound(
                f"no step of {where} restores: {tried}"
                if tried
                else f"there is no step in {where}{more}",
                path=where,
            )
        return newest, None if newest in line else self._local_key(newest)

    def _local_key(self, step: int) -> LocalKey | None:
        found = [] if self._tier is None else self._tier.found()
        return next((key for key in found if key.step == step), None)

    def _agreed_steps(self) -> tuple[list[int], list[int]]:
        """Returns the primary's listing, and what was left behind, on every process."""
        steps, left = ask_primary(
            self._root.group,
            f"{self._root.messages}/steps",
            self._catalog.look,
            self._timeout_s,
        )
        return steps, left

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
        agreement = RestoreAgreement(
            self._root.group,
            f"{self._root.messages}/restore",
            f"{name_items(wanted)} of step {step}",
            self._timeout_s,
        )
        options = replace(options, before_reading=agreement.before_reading)
        shares = key is None and step not in self._catalog.foreign
        if not shares or not is_worth_sharing(options.read, self._root.storage, self._root.group):
            return self._agree_on(step, key, wanted, options, agreement, hold_s=hold_s)
        # The part servers stay until all have agreed.
        with GroupPeers(self._root.group, agreement, options) as peers:
            options = replace(options, peers=peers)
            outcome = self._agree_on(step, key, wanted, options, agreement, hold_s=hold_s)
        counts = peers.counts
        self._state.statistics.add(
            restore_store_bytes=counts["store_bytes"],
            restore_peer_bytes=counts["peer_bytes"],
            restore_peer_failures=counts["peer_failed"] + counts["peer_damaged"],
        )
        return outcome

    def _agree_on(
        self,
        step: int,
        key: LocalKey | None,
        wanted: Mapping[str, Any],
        options: RestoreOptions,
        agreement: RestoreAgreement,
        *,
        hold_s: float,
    ) -> tuple[dict[str, Any] | None, Verdict]:
        path = self._catalog.path_of(step)

        def restore() -> dict[str, Any]:
            with naming_step(f"step {step}", step, path):
                if key is not None:
                    return self._restore_local(key, wanted, options, agreement)
                if step in self._catalog.foreign:
                    return self._restore_foreign(step, wanted, options, agreement)
                return self._restore_durable(step, wanted, options, agreement, hold_s=hold_s)

        values, verdict = agreement.run(restore, path)
        if verdict.error is None:
            self._state.order.restored(step)
            self._state.lineage.restored()
        return values, verdict

    def _hold(self, step: int, folder: str, hold_s: float) -> None:
        """Raises StepGone where the step goes, so that it is held whenever it has been restored."""
        if hold_s <= 0 or self._root.group.index:
            return
        if not take_hold(self._root.storage, step, folder, hold_s):
            where = self._root.where
            raise StepGone(
                f"step {step} of {where} cannot be held: a keep policy lets it go, or it is gone;"
                " restore a newer step",
                path=where,
                step=step,
            )

    def _restore_foreign(
        self,
        step: int,
        wanted: Mapping[str, Any],
        options: RestoreOptions,
        agreement: RestoreAgreement,
    ) -> dict[str, Any]:
        checkpoint = self._catalog.foreign.open(step)
        agreement.opened(checkpoint.info.save_id)
        return restore_items(checkpoint, wanted, options)

    def _restore_durable(
        self,
        step: int,
        wanted: Mapping[str, Any],
        options: RestoreOptions,
        agreement: RestoreAgreement,
        *,
        hold_s: float,
    ) -> dict[str, Any]:
        storage = self._root.storage
        folder = self._state.index.folder(step)
        with self._catalog.looking_for(step):
            record, has_room = self._read_record(folder, wanted, options)
        if has_room:
            agreement.found_room()
        self._hold(step, folder, hold_s)
        agreement.opened(record.writer_id)
        check_rename(options.rename, _wanted_of(record, wanted))
        restored = {
            item: restore_any(storage, folder, record, item, like=like, options=options)
            for item, like in wanted.items()
        }
        options.check_choice()
        return restored

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
            find_room=lambda record: self._has_room(_wanted_of(record, wanted), options),
        )

    def _has_room(self, items: Iterable[ItemRecord], options: RestoreOptions) -> bool:
        """Says whether each process has room for all of the items, were it to read them whole."""
        nbytes = sum(leaf.nbytes for item in items for leaf in item.leaves)
        if is_small(nbytes, self._root.group.count):
            return True
        # A cast makes copies, of another size.
        return not options.cast and self._root.memory.has_room_for_each(nbytes)

    def _restore_local(
        self,
        key: LocalKey,
        wanted: Mapping[str, Any],
        options: RestoreOptions,
        agreement: RestoreAgreement,
    ) -> dict[str, Any]:
        tier = self._tier
        assert tier is not None  # it has found the key
        storage, record = tier.open_step(key, str(self._tries))
        agreement.opened(record.writer_id)
        check_rename(options.rename, _wanted_of(record, wanted))
        restores = {
            item: functools.partial(
                restore_any, storage, key.folder, record, item, like=like, options=options
            )
            for item, like in wanted.items()
        }
        restored = tier.restore(storage, restores)
        options.check_choice()
        return restored


def _wanted_of(record: Record, wanted: Iterable[str]) -> list[ItemRecord]:
    return [record.items[item] for item in wanted if item in record.items]
