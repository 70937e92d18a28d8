"""What the hosts of a job hold together: their inventories, which local steps are whole, and which
of them may come back.

No word of a local save is needed later: a step comes back by the parts that are found. The primary
alone decides, so that all processes list the same steps.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Self

from holdfast.multihost import Group

from ..agreement.exchange import exchange
from ..agreement.messages import Message
from ..errors import CheckpointError, HostileCheckpoint, SaveFailed
from ..format.item_report import ItemReport
from ..saving.plan_mismatch import check_json, check_shares
from ..saving.record_builder import RecordHead, TreeText, build_record
from ..steps.lineage import Branch
from .parts import LocalKey, PartSummary, StepHead, why_dead

MOST_FOUND = 16  # local steps that are told to all


@dataclass(frozen=True)
class Inventory(Message):
    """The parts that one process lists, or why its folder cannot be used; `unseen` is why it could
    not look, which says nothing of what is there.
    """

    parts: Sequence[PartSummary] = ()
    error: str = ""
    unseen: str = ""


@dataclass(frozen=True)
class FoundStep:
    """A local step of which all parts are there: by process, the report and the ranks that hold the
    part.
    """

    key: LocalKey
    reports: list[str]
    holders: list[list[int]]

    def survives(self, hosts: Sequence[str]) -> int:
        """Returns how many hosts may be lost before a part is; `hosts` are those of the ranks."""
        return min(len({hosts[rank] for rank in ranks}) for ranks in self.holders) - 1


@dataclass(frozen=True)
class SurveyVerdict(Message):
    """What all processes know after a survey: the local steps, best first, or why there are none.

    With `unseen`, as in Inventory, nothing is known of them. The reports of the parts stay with the
    primary, which builds records of them.
    """

    steps: Sequence[FoundStep] = ()
    why_off: str = ""
    unseen: str = ""

    def told(self) -> Self:
        """Returns what all hear of it."""
        return replace(self, steps=[replace(step, reports=[]) for step in self.steps])


def survey(
    group: Group, name: str, own: Inventory, branches: Collection[Branch], timeout_s: float
) -> SurveyVerdict:
    """Returns which local steps may come back; every process calls it, the primary decides.

    Blocks. Raises CheckpointError where a process could not look, BarrierTimeout, ProcessLost.
    """
    judged: list[SurveyVerdict] = []

    def decide(inventories: list[Inventory]) -> SurveyVerdict:
        judged.append(_judge(inventories, branches))
        return judged[0].told()

    told = exchange(group, name, own, decide, SurveyVerdict, timeout_s=timeout_s)
    if told.unseen:
        raise CheckpointError(told.unseen)
    return judged[0] if judged else told


def _judge(inventories: Sequence[Inventory], branches: Collection[Branch]) -> SurveyVerdict:
    why_off = next(filter(None, (inventory.error for inventory in inventories)), "")
    unseen = next(filter(None, (inventory.unseen for inventory in inventories)), "")
    steps = [] if why_off else living_steps(inventories, branches)[:MOST_FOUND]
    return SurveyVerdict(steps, why_off, unseen)


def find_whole(inventories: Sequence[Inventory]) -> list[FoundStep]:
    """Returns the local steps of which every part is somewhere, by the inventories of all ranks."""
    parts_of: dict[LocalKey, dict[int, tuple[str, list[int]]]] = {}
    for rank, inventory in enumerate(inventories):
        for part in inventory.parts:
            parts = parts_of.setdefault(part.key, {})
            report, holders = parts.setdefault(part.process, (part.report, []))
            # A copy with another report is no copy: the first that was listed counts.
            if report == part.report:
                holders.append(rank)
    return [
        FoundStep(
            key,
            [parts[process][0] for process in range(key.processes)],
            [parts[process][1] for process in range(key.processes)],
        )
        for key, parts in parts_of.items()
        if len(parts) == key.processes
    ]


def living_steps(inventories: Sequence[Inventory], branches: Collection[Branch]) -> list[FoundStep]:
    """Returns the whole local steps that may come back, best first.

    The highest is the best, of equals that of the latest branch.
    """
    living = [step for step in find_whole(inventories) if not why_dead(step.key, branches)]
    return sorted(living, key=lambda step: step.key, reverse=True)


# --- the record of a local step


def record_of(found: FoundStep, head: StepHead) -> bytes:
    """Returns the record of a local step, built from its parts.

    Raises SaveFailed where the reports do not fit together, as at a commit; HostileCheckpoint.
    """
    key = found.key
    shares = _parse_shares(found, head)
    items = {name: (head.trees.get(name), [share[name] for share in shares]) for name in shares[0]}
    for name, (tree, reports) in items.items():
        _check_item(name, tree, reports)
    return build_record(
        RecordHead(
            key.step,
            writer=key.save_id,
            processes=key.processes,
            started_s=head.started_s,
            finished_s=head.finished_s,
            metrics=head.metrics,
            metadata=head.metadata,
            opening=key.branch,
        ),
        items,
    )


def _parse_shares(found: FoundStep, head: StepHead) -> list[dict[str, ItemReport]]:
    """Returns, by process, what it has saved of each item."""
    shares = [
        {name: ItemReport.from_json(report) for name, report in json.loads(text).items()}
        for text in found.reports
    ]
    for process, share in enumerate(shares):
        if share.keys() != shares[0].keys() or not head.trees.keys() <= share.keys():
            raise SaveFailed(
                f"local step {found.key.step}: process {process} saved the items {sorted(share)},"
                f" others {sorted(shares[0])}"
            )
    return shares


def _check_item(name: str, tree: TreeText | None, reports: Sequence[ItemReport]) -> None:
    if tree is None:
        first, *others = reports
        if first.names is None and not any(report.files for report in others):
            check_json(name, reports)
        return
    if not _fit_plan(reports, tree):
        raise HostileCheckpoint(
            f"item {name!r} of a local step: the reports of its parts are not what its plan"
            " asks for"
        )
    check_shares(name, tree, reports)


def _fit_plan(reports: Sequence[ItemReport], tree: TreeText) -> bool:
    first, *others = reports
    lengths = {(len(report.local), len(report.values)) for report in others}
    return (
        sum(len(report.files) for report in reports) == tree.files
        and len(first.values) == len(tree.values)
        and lengths <= {(len(tree.names), sum(tree.values))}
        and (not others or len(first.local) == len(tree.names))
        and all(report.where is None for report in reports)
    )
