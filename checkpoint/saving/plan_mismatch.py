"""Says why the plans of a save differ, only when their hashes do.

A save of equal plans stays one gather. Where they differ, the primary broadcasts a question instead
of the result; the process that is asked answers with its leaves; then the result is sent. A
question for the sums of replicas (see `replicas`) goes the same way.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from holdfast.coordination import HoldfastError
from holdfast.multihost import Group

from ..agreement.replica_sums import ReplicaQuestion
from ..agreement.save_protocol import SaveResult
from ..arrays.sharding import show_sharding
from ..errors import SaveFailed
from ..format.item_report import ItemReport
from .plan import Leaf, Plan
from .replicas import ANSWER_S, ReplicaSums, answer_for


class PlansDiffer(SaveFailed):
    """Says that the processes planned different saves of an item; it does not leave this room."""

    item: str = ""


def check_reports(item: str, plan: Plan, reports: Sequence[ItemReport]) -> None:
    """Raises SaveFailed when the reports, in rank order, are not of one plan and equal leaves.

    Its message names the leaf and the processes that differ; `process` is the first of them. It is
    a PlansDiffer where the plans do.
    """
    names = [plan.leaves[index].path for index in plan.local_leaves]
    names += [leaf.path for leaf in plan.value_leaves]
    check_shares(item, plan.hash, names, reports)


def check_shares(item: str, plan: str, names: Sequence[str], reports: Sequence[ItemReport]) -> None:
    """Does so where a plan is known by its hash, and by the names of its local leaves."""
    others = [report.process for report in reports if report.plan != plan]
    if others:
        message = (
            f"item {item!r}: processes {others} planned another save than process"
            f" {reports[0].process}: their trees differ in structure, shapes, dtypes or shardings;"
            " save the same tree everywhere"
        )
        raise PlansDiffer(message, process=others[0], item=item)
    # Compared as a whole first: 4,096 processes with 1,000 local leaves are 4 million values.
    differing = [report for report in reports if report.local != reports[0].local]
    for position, name in enumerate(names if differing else []):
        others = [
            report.process
            for report in differing
            if report.local[position] != reports[0].local[position]
        ]
        if others:
            message = (
                f"item {item!r}: the leaf {name!r} is local to each process and differs on"
                f" processes {others} from process 0; make it equal, or keep it per process:"
                " Options(per_process=...)"
            )
            raise SaveFailed(message, process=others[0], leaf=name)


def check_json(item: str, reports: Sequence[ItemReport]) -> None:
    """Raises SaveFailed when a JSON item that is one for all processes is not equal on all."""
    others = [report.process for report in reports if report.local != reports[0].local]
    if others:
        message = (
            f"item {item!r}: its JSON on processes {others} differs from that of process 0; "
            "make it equal, or let each process keep its own: Json(value, per_process=True)"
        )
        raise SaveFailed(message, process=others[0])


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
                    message = (
                        f"item {item!r}: processes {owners[taken]} and {report.process} both wrote"
                        f" {taken!r}; expected one of them to"
                    )
                    raise SaveFailed(message, process=report.process)


@dataclass(frozen=True)
class Question:
    """Asks one process for its leaves of an item; it comes instead of a save's result."""

    process: int
    item: str

    _BEGIN: ClassVar[bytes] = b"leaves of "

    def to_bytes(self) -> bytes:
        return self._BEGIN + json.dumps([self.process, self.item]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self | None:
        """Returns the question; None for a result."""
        if not data.startswith(cls._BEGIN):
            return None
        return cls(*json.loads(data.removeprefix(cls._BEGIN)))


@dataclass(frozen=True, slots=True)
class ShownLeaf:
    """A leaf as people see it, and the description of its sharding."""

    path: str
    text: str
    sharding: Any


def explain(group: Group, name: str, error: PlansDiffer, plan: Plan | None) -> SaveFailed:
    """Does the primary's part: asks the first process that differs.

    Returns the error with the first leaf that differs, where it can. All processes answer, so that
    the calls of all stay in step; only the process that is asked, and the primary, show leaves.
    """
    message = error.message
    leaf = ""
    asked = error.process or 0
    question = Question(asked, error.item)
    try:
        group.broadcast(f"{name}/outcome", question.to_bytes(), timeout_s=ANSWER_S)
        answers = group.gather(f"{name}/leaves", b"", timeout_s=ANSWER_S)
        assert answers is not None
        theirs = leaves_from_bytes(answers[asked])
        leaf, difference = first_difference(shown_leaves(plan), theirs, asked)
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
        message = group.broadcast(f"{name}/outcome", None, timeout_s=timeout_s)
        asked_plan = Question.from_bytes(message)
        asked_replicas = ReplicaQuestion.from_bytes(message)
        if asked_plan is not None:
            answer = b""
            if group.index == asked_plan.process:
                answer = leaves_to_bytes(shown_leaves(plans.get(asked_plan.item)))
            group.gather(f"{name}/leaves", answer, timeout_s=ANSWER_S)
        elif asked_replicas is not None:
            answer = answer_for(replicas, asked_replicas)
            group.gather(f"{name}/replicas", answer, timeout_s=ANSWER_S)
        else:
            return SaveResult.from_bytes(message)


def leaves_to_bytes(leaves: Sequence[ShownLeaf]) -> bytes:
    rows = [(leaf.path, leaf.text, leaf.sharding) for leaf in leaves]
    return zlib.compress(json.dumps(rows).encode())


def leaves_from_bytes(data: bytes) -> list[ShownLeaf]:
    return [ShownLeaf(*row) for row in json.loads(zlib.decompress(data))]


def shown_leaves(plan: Plan | None) -> list[ShownLeaf]:
    leaves = () if plan is None else plan.leaves
    return [ShownLeaf(leaf.path, _show(leaf), leaf.sharding) for leaf in leaves]


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


def first_difference(
    ours: Sequence[ShownLeaf], theirs: Sequence[ShownLeaf], process: int
) -> tuple[str, str]:
    """Returns the first leaf that `process` has otherwise than process 0, and a sentence.

    ("", "") when only the structure differs.
    """
    first = {leaf.path: leaf for leaf in ours}
    other = {leaf.path: leaf for leaf in theirs}
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
    our_sharding = json.dumps(ours.sharding)
    their_sharding = json.dumps(theirs.sharding)
    if ours.text != theirs.text:
        here = ours.text
        there = theirs.text
    elif our_sharding != their_sharding:
        here = f"{ours.text} {our_sharding}"
        there = f"{theirs.text} {their_sharding}"
    else:
        return ""
    return f"The leaf {ours.path!r} is {here} on process 0 and {there} on process {process}"
