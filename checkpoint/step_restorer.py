"""Restores a step of a root from where it is, the store or the hosts, alike on all processes of a
group.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from holdfast.multihost import Group

from .agreement.exchange import ask_primary
from .agreement.group_record import read_record_together
from .agreement.restore_verdict import RestoreAgreement, Verdict, name_items
from .errors import StepGone, StepNotFound, error_text, naming_path
from .format.step_folders import list_steps
from .layouts.detect import ForeignSteps, restore_checkpoint
from .local_tier.parts import LocalKey
from .local_tier.tier import LocalTier
from .options import Options
from .restoring.restore import RestoreOptions, restore_any
from .steps.holds import add_hold
from .steps.index import StepIndex
from .steps.lineage import Lineage
from .steps.root_report import RootReporter
from .storage.base import Storage
from .storage.path import join

_log = logging.getLogger(__name__)
# steps that one restore with `fallback` sees deleted while it reads them, before it gives up
MOST_GONE = 64


class StepRestorer:
    """Restores the steps of a manager. For one thread at a time; in a group every process calls the
    same, in the same order.

    A step has a LocalKey where the hosts have it and the store has not. `name` is what the names of
    its messages begin with.
    """

    def __init__(
        self,
        storage: Storage,
        group: Group,
        options: Options,
        name: str,
        index: StepIndex,
        foreign: ForeignSteps,
        tier: LocalTier | None,
        lineage: Lineage | None,
        reporter: RootReporter | None,
    ) -> None:
        self._storage = storage
        self._group = group
        self._name = name
        self._timeout_s = options.restore_timeout_s
        self._index = index
        self._foreign = foreign
        self._tier = tier
        self._lineage = lineage
        self._reporter = reporter

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

        A local step that was not asked for by its number gives way to the next also without. Only
        damage and deletion are passed over. A `like` or an item that does not fit is an error on
        every process: an older step would come back in silence. The steps are listed again before
        each try, since a writer may delete old ones and add new ones meanwhile.
        """
        failures: dict[int, str] = {}
        gone = 0
        if self._tier is not None:
            self._tier.survey()
        while True:
            step, key = self._choose(chosen, failures, fallback=fallback)
            values, verdict = self._restore_alike(step, key, wanted, options, hold_s)
            if verdict.error is None:
                assert values is not None
                return values
            gives_way = fallback or (key is not None and chosen is None)
            if verdict.is_mistake or not gives_way:
                raise verdict.error
            _log.warning(
                "%s %d of %s is passed over: %s",
                "local step" if key else "step",
                step,
                self._storage.root,
                verdict.error,
            )
            if key is not None:
                assert self._tier is not None
                self._tier.pass_over(key)
            elif not isinstance(verdict.error, StepGone):
                failures[step] = error_text(verdict.error)
                self._index.pass_over(step)
                if self._reporter is not None:
                    self._reporter.report()
            elif (gone := gone + 1) == MOST_GONE:
                verdict.error.add_note(
                    f"so were {MOST_GONE - 1} steps before it; hold_s keeps a step while it is read"
                )
                raise verdict.error

    # --- which step

    def _choose(
        self, chosen: int | None, failures: Mapping[int, str], *, fallback: bool
    ) -> tuple[int, LocalKey | None]:
        """Returns the step to restore, alike on all processes; of several the newest that has not
        failed yet.
        """
        if chosen is not None and not fallback:
            return chosen, self._local_key(
                chosen, [chosen] if chosen in self._foreign or self._index.exists(chosen) else []
            )
        durable = self._agreed_steps()
        steps = {*durable, *([] if self._tier is None else self._tier.steps())} - set(failures)
        newest = max((step for step in steps if chosen is None or step <= chosen), default=None)
        if newest is None:
            root, tried = (
                self._storage.root,
                "; ".join(f"step {step}: {failure}" for step, failure in failures.items()),
            )
            raise StepNotFound(
                f"no step of {root} restores: {tried}" if tried else f"there is no step in {root}",
                path=root,
            )
        return newest, self._local_key(newest, durable)

    def _local_key(self, step: int, durable: Sequence[int]) -> LocalKey | None:
        if self._tier is None or step in durable:
            return None
        return next((key for key in self._tier.found() if key.step == step), None)

    def _agreed_steps(self) -> list[int]:
        """Returns the primary's listing, on every process."""
        found: list[int] = ask_primary(
            self._group, f"{self._name}/steps", self.list_steps, self._timeout_s
        )
        return found

    def list_steps(self) -> list[int]:
        """Returns the steps of the store, by a look at it."""
        with naming_path(self._storage.root):
            return [*list_steps(self._storage), *self._foreign]

    # --- one step

    def _restore_alike(
        self,
        step: int,
        key: LocalKey | None,
        wanted: Mapping[str, Any],
        options: RestoreOptions,
        hold_s: float,
    ) -> tuple[dict[str, Any] | None, Verdict]:
        """Returns the values by item, and how the restore ended on all processes."""
        agreement = RestoreAgreement(
            self._group,
            f"{self._name}/restore",
            f"{name_items(wanted)} of step {step}",
            self._timeout_s,
        )
        options = replace(options, before_collective=agreement.before_collective)
        restore: Callable[[], dict[str, Any]]
        if key is None:
            restore = functools.partial(
                self._restore_durable, step, wanted, options, hold_s, agreement
            )
        else:
            restore = functools.partial(self._restore_local, key, wanted, options, agreement)
        values, verdict = agreement.run(restore, join(self._storage.root, self._index.folder(step)))
        if verdict.error is None and self._lineage is not None:
            self._lineage.restored(step)
        return values, verdict

    def _restore_durable(
        self,
        step: int,
        wanted: Mapping[str, Any],
        options: RestoreOptions,
        hold_s: float,
        agreement: RestoreAgreement,
    ) -> dict[str, Any]:
        is_ours, folder = step not in self._foreign, self._index.folder(step)
        name = f"{self._name}/record"
        record = (
            read_record_together(
                self._storage, folder, self._group, name, timeout_s=self._timeout_s
            )
            if is_ours
            else None
        )
        if hold_s > 0 and self._group.index == 0:
            add_hold(self._storage, step, hold_s)
        if record is None:
            checkpoint = self._foreign.open(step)
            agreement.opened(checkpoint.info.save_id)
            return {
                item: restore_checkpoint(checkpoint, item, like, options)
                for item, like in wanted.items()
            }
        agreement.opened(record.writer_id)
        return {
            item: restore_any(self._storage, folder, record, item, like, options)
            for item, like in wanted.items()
        }

    def _restore_local(
        self,
        key: LocalKey,
        wanted: Mapping[str, Any],
        options: RestoreOptions,
        agreement: RestoreAgreement,
    ) -> dict[str, Any]:
        assert self._tier is not None
        storage, record = self._tier.open_step(key)
        agreement.opened(record.writer_id)

        def restore() -> dict[str, Any]:
            return {
                item: restore_any(storage, key.folder, record, item, like, options)
                for item, like in wanted.items()
            }

        return self._tier.restore(storage, restore)
