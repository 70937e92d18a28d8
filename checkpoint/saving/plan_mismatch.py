"""Says why the plans of a save differ, only when their hashes do.

A save of equal plans stays one gather. Where they differ, the primary broadcasts a question instead
of the result; the process that is asked answers with its leaves; then the result is sent. A
question for the sums of replicas (see `replicas`) goes the same way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from holdfast.coordination import HoldfastError
from holdfast.multihost import Group

from ..agreement.messages import Message
from ..agreement.save_protocol import LeafQuestion, SaveResult, Told
from ..arrays.sharding import show_sharding
from ..errors import SaveFailed
from ..format.item_report import ItemReport
from .plan import Leaf, Plan
from .record_builder import TreeText
from .replicas import ANSWER_S, ReplicaSums, answer_for, ask_all


class PlansDiffer(SaveFailed):
    """Says that the processes planned different saves of an item; it does not leave this room."""

    item: str = ""


def check_shares(item: str, tree: TreeText, reports: Sequence[ItemReport]) -> None:
    """Raises SaveFailed when the reports, in rank order, are not of one plan and equal leaves.

    Its message names the leaf and the processes that differ; `process` is the first of them. It is
    a PlansDiffer where the plans do.
    """
    others = [report.process for report in reports if report.plan != tree.plan]
    if others:
        raise PlansDiffer(
            f"item {item!r}: processes {others} planned another save than process"
            f" {reports[0].process}: their trees differ in structure, shapes, dtypes or shardings;"
            " save the same tree everywhere",
            process=others[0],
            item=item,
        )
    _check_local(item, tree.names, reports)


def _check_local(item: str, names: Sequence[str], reports: Sequence[ItemReport]) -> None:
    # Compared as a whole first: 4,096 processes with 1,000 local leaves are 4 million values.
    differing = [report for report in reports if report.local != reports[0].local]
    for position, name in enumerate(names if differing else ()):
        others = [
            report.process
            for report in differing
            if report.local[position] != reports[0].local[position]
        ]
        if others:
            raise SaveFailed(
                f"item {item!r}: the leaf {name!r} is local to each process and differs on"
                f" processes {others} from process 0; make it equal, or keep it per process:"
                " Options(per_process=...)",
                process=others[0],
                leaf=name,
            )


def check_json(item: str, reports: Sequence[ItemReport]) -> None:
    """Raises SaveFailed when a JSON item that is one for all processes is not equal on all."""
    others = [report.process for report in reports if report.local != reports[0].local]
    if others:
        raise SaveFailed(
            f"item {item!r}: its JSON on processes {others} differs from that of process 0; "
            "make it equal, or let each process keep its own: Json(value, per_process=True)",
            process=others[0],
        )


def check_own_names(item: str, reports: Sequence[ItemReport]) -> None:
    """Raises SaveFailed when files of two processes in an item of files cannot be together.

    They have one name, or one is a file where the other has a folder.
    """
    owners: dict[str, int] = {}
    for report in reports:
        for name in report.names or ():
            owners.setdefault(name, report.process)
            above = [name[:at] for at, character in enumerate(name) if character == "/"]
            for taken in [name, *above]:
                if owners.get(taken, report.process) != report.process:
                    raise SaveFailed(
                        f"item {item!r}: processes {owners[taken]} and {report.process} both wrote"
                        f" {taken!r}; expected one of them to",
                        process=report.process,
                    )


@dataclass(frozen=True, slots=True)
class ShownLeaf:
    """A leaf as people see it, and the description of its sharding."""

    path: str
    text: str
    sharding: Any


@dataclass(frozen=True)
class ShownLeaves(Message):
    """What a process that is asked for its leaves answers."""

    leaves: tuple[ShownLeaf, ...]

    @classmethod
    def of(cls, plan: Plan | None) -> Self:
        """Takes the leaves of a plan; of none there are none."""
        leaves = () if plan is None else plan.leaves
        return cls(tuple(ShownLeaf(leaf.path, _show(leaf), leaf.sharding) for leaf in leaves))


def explain(group: Group, name: str, error: PlansDiffer, plan: Plan | None) -> SaveFailed:
    """Does the primary's part: asks the first process that differs.

    Returns the error with the first leaf that differs, where it can. All processes answer, so that
    the calls of all stay in step; only the process that is asked, and the primary, show leaves.
    """
    message = error.message
    leaf = ""
    asked = error.process or 0
    question = Told(leaves_of=LeafQuestion(asked, error.item))
    try:
        theirs = ShownLeaves.from_bytes(ask_all(group, name, question, b"")[asked])
        leaf, difference = first_difference(ShownLeaves.of(plan), theirs, asked)
        message = f"{message}. {difference}" if leaf else message
    except HoldfastError as lost:
        message = f"{message} (which leaf it is could not be asked: {lost})"
    return SaveFailed(message, process=error.process, leaf=leaf)


def receive_result(
    group: Group,
    name: str,
    plans: Mapping[str, Plan],
    replicas: Mapping[str, ReplicaSums],
    *,
    timeout_s: float,
) -> SaveResult:
    """Does the part of the others: returns the result, after it answered what is asked before.

    Blocks, for `timeout_s` at most after each answer.
    """
    while True:
        told = Told.from_bytes(group.broadcast(f"{name}/outcome", None, timeout_s=timeout_s))
        if told.result is not None:
            return told.result
        if told.replicas_of is not None:
            answer = answer_for(replicas, told.replicas_of)
        else:
            answer = _own_leaves(told.leaves_of, plans, group.index)
        group.gather(f"{name}/answers", answer, timeout_s=ANSWER_S)


def _own_leaves(question: LeafQuestion | None, plans: Mapping[str, Plan], process: int) -> bytes:
    """Returns the leaves of the process that is asked for them; of all others nothing."""
    if question is None or question.process != process:
        return b""
    return ShownLeaves.of(plans.get(question.item)).to_bytes()


def _show(leaf: Leaf) -> str:
    if leaf.is_value:
        return f"a Python {leaf.kind}"
    facts = leaf.kind
    if leaf.sharding is not None:
        facts += f", {show_sharding(leaf.sharding)}"
    elif leaf.per_process:
        facts += ", kept per process"
    elif leaf.placement is None:
        facts += ", a value of each host"
    return f"{leaf.dtype}{list(leaf.shape)} ({facts})"


def first_difference(ours: ShownLeaves, theirs: ShownLeaves, process: int) -> tuple[str, str]:
    """Returns the first leaf that `process` has otherwise than process 0, and a sentence.

    ("", "") when only the structure differs.
    """
    first = {leaf.path: leaf for leaf in ours.leaves}
    other = {leaf.path: leaf for leaf in theirs.leaves}
    for path in [*first, *other]:
        if path not in other:
            return path, f"The leaf {path!r} is on process 0 and not on process {process}"
        if path not in first:
            return path, f"The leaf {path!r} is on process {process} and not on process 0"
        sentence = _difference(first[path], other[path], process)
        if sentence:
            return path, sentence
    return "", ""


def _difference(ours: ShownLeaf, theirs: ShownLeaf, process: int) -> str:
    here = ours.text
    there = theirs.text
    if here == there:
        here, there = (f"{leaf.text} {json.dumps(leaf.sharding)}" for leaf in (ours, theirs))
    if here == there:
        return ""
    return f"The leaf {ours.path!r} is {here} on process 0 and {there} on process {process}"
