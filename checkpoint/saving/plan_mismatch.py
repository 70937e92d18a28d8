"""Says why the plans of a save differ: asked for only when their hashes do, so that a save of equal
ones stays one gather.

The primary broadcasts a question instead of the result; the process that is asked answers with its
leaves; then the result is sent.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from holdfast.coordination import HoldfastError
from holdfast.multihost import Group

from ..agreement.save_protocol import SaveResult
from ..errors import SaveFailed
from ..format.item_report import ItemReport
from ..format.sharding import show_sharding
from .plan import Leaf, Plan


class PlansDiffer(SaveFailed):
    """Says that the processes planned different saves of an item; it does not leave this room."""

    item: str = ""


def check_reports(item: str, plan: Plan, reports: Sequence[ItemReport]) -> None:
    """Raises SaveFailed when the processes' reports (in rank order) are not of one plan
    (PlansDiffer) and one value of each local leaf.

    Its message names the leaf and the processes that differ; `process` is the first of them.
    """
    names = [plan.leaves[index].path for index in plan.local_leaves] + [
        leaf.path for leaf in plan.value_leaves
    ]
    check_shares(item, plan.hash, names, reports)


def check_shares(item: str, plan: str, names: Sequence[str], reports: Sequence[ItemReport]) -> None:
    """Does so where the plan is known by its hash, and by the names of what is local to each
    process.
    """
    others = [report.process for report in reports if report.plan != plan]
    if others:
        message = (
            f"item {item!r}: processes {others} planned another save than process"
            f" {reports[0].process}: their trees differ in structure, shapes, dtypes or shardings;"
            " save the same tree everywhere"
        )
        raise PlansDiffer(message, process=others[0], item=item)
    for position, name in enumerate(names if len(reports) > 1 else []):
        others = [
            report.process
            for report in reports
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
    """Raises SaveFailed when two processes wrote a file of one name into an item of files, or one a
    file where another has a folder.
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


QUESTION = b"leaves of "

ANSWER_S = 20.0  # for all to answer: they have just reported, and wait


def explain(group: Group, name: str, error: PlansDiffer, plan: Plan | None) -> SaveFailed:
    """Does the primary's part: asks the first process that differs, and returns the error with the
    first leaf that does, where it can.

    All processes answer, so that the calls of all stay in step; only the one that is asked, and the
    primary, send their leaves.
    """
    message = error.message
    leaf = ""
    asked = error.process or 0
    try:
        group.broadcast(
            f"{name}/outcome",
            QUESTION + json.dumps([asked, error.item]).encode(),
            timeout_s=ANSWER_S,
        )
        answers = group.gather(f"{name}/leaves", b"", timeout_s=ANSWER_S)
        assert answers is not None
        leaf, difference = first_difference(
            _shown_leaves(plan), json.loads(zlib.decompress(answers[asked])), asked
        )
        message = f"{message}. {difference}" if leaf else message
    except HoldfastError as lost:
        message = f"{message} (which leaf it is could not be asked: {lost})"
    return SaveFailed(message, process=error.process, leaf=leaf)


def receive_result(
    group: Group, name: str, plans: Mapping[str, Plan], timeout_s: float
) -> SaveResult:
    """Does the part of the others: returns the result, having answered the question if there was
    one.
    """
    message = group.broadcast(f"{name}/outcome", None, timeout_s=timeout_s)
    if message.startswith(QUESTION):
        asked, item = json.loads(message.removeprefix(QUESTION))
        answer = (
            zlib.compress(json.dumps(_shown_leaves(plans.get(item))).encode())
            if group.index == asked
            else b""
        )
        group.gather(f"{name}/leaves", answer, timeout_s=ANSWER_S)
        message = group.broadcast(f"{name}/outcome", None, timeout_s=2 * ANSWER_S)
    return SaveResult.from_bytes(message)


ShownLeaves: TypeAlias = Sequence[
    Sequence[Any]
]  # (path, how it is shown, description of its sharding) of each leaf


def _shown_leaves(plan: Plan | None) -> ShownLeaves:
    return (
        [(leaf.path, _shown(leaf), leaf.sharding) for leaf in plan.leaves]
        if plan is not None
        else []
    )


def _shown(leaf: Leaf) -> str:
    if leaf.is_value:
        return f"a Python {leaf.kind}"
    kept = (
        ", kept per process"
        if leaf.per_process
        else ", a value of each host"
        if leaf.placement is None
        else ""
    )
    sharding = f", {show_sharding(leaf.sharding)}" if leaf.sharding is not None else kept
    return f"{leaf.dtype}{list(leaf.shape)} ({leaf.kind}{sharding})"


def first_difference(ours: ShownLeaves, theirs: ShownLeaves, process: int) -> tuple[str, str]:
    """Returns the first leaf that `process` has otherwise than process 0, and a sentence; ("", "")
    when only structure differs.
    """
    first = {path: (shown, sharding) for path, shown, sharding in ours}
    other = {path: (shown, sharding) for path, shown, sharding in theirs}
    for path in [*first, *other]:
        if path not in other or path not in first:
            here, there = (0, process) if path in first else (process, 0)
            return path, f"The leaf {path!r} is on process {here} and not on process {there}"
        here_shown = first[path][0]
        there_shown = other[path][0]
        here_sharding, there_sharding = json.dumps(first[path][1]), json.dumps(other[path][1])
        if (here_shown, here_sharding) != (there_shown, there_sharding):
            if here_shown == there_shown:
                here_shown = f"{here_shown} {here_sharding}"
                there_shown = f"{there_shown} {there_sharding}"
            return (
                path,
                (
                    f"The leaf {path!r} is {here_shown} on process 0 and {there_shown} on process"
                    f" {process}"
                ),
            )
    return "", ""
