"""Says why the plans of a save differ: asked for only when their hashes do, so that a save of equal ones stays one gather.

The primary broadcasts a question instead of the result; every process answers with its leaves; then the primary sends the result.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence

from holdfast.coordination import HoldfastError
from holdfast.multihost import Group

from ..errors import SaveFailed
from ..format.files import ItemReport
from ..format.sharding import show_sharding
from .plan import Leaf, Plan
from .protocol import SaveResult


class PlansDiffer(SaveFailed):
    """Says that the processes planned different saves of an item; it does not leave this room."""

    item: str = ""


def check_reports(item: str, plan: Plan, reports: Sequence[ItemReport]) -> None:
    """Raises SaveFailed when the processes' reports (in rank order) are not of one plan (PlansDiffer) and one value of each local leaf.

    Its message names the leaf and the processes that differ; `process` is the first of them.
    """
    others = [report.process for report in reports if report.plan != plan.hash]
    if others:
        message = (
            f"item {item!r}: processes {others} planned another save than process {plan.process}: "
            "their trees differ in structure, shapes, dtypes or shardings; save the same tree everywhere"
        )
        raise PlansDiffer(message, process=others[0], item=item)
    names = [plan.leaves[index].path for index in plan.local_leaves] + [leaf.path for leaf in plan.value_leaves]
    for position, name in enumerate(names if plan.process_count > 1 else []):
        others = [report.process for report in reports if report.local[position] != reports[0].local[position]]
        if others:
            message = (
                f"item {item!r}: the leaf {name!r} is local to each process and differs on processes {others} from process 0; "
                "make it equal, or keep it per process: Options(per_process=...)"
            )
            raise SaveFailed(message, process=others[0], leaf=name)


QUESTION = b"leaves of "

ANSWER_S = 20.0  # for all to answer: they have just reported, and wait


def explain(group: Group, name: str, error: PlansDiffer, plan: Plan | None) -> SaveFailed:
    """Does the primary's part: asks all, and returns the error with the first leaf that differs, where it can be known."""
    message, leaf = error.message, ""
    try:
        group.broadcast(f"{name}/outcome", QUESTION + error.item.encode(), timeout_s=ANSWER_S)
        answers = group.gather(f"{name}/leaves", _answer(plan), timeout_s=ANSWER_S)
        assert answers is not None
        leaf, difference = first_difference([json.loads(zlib.decompress(answer)) for answer in answers])
        message = f"{message}. {difference}" if leaf else message
    except HoldfastError as lost:
        message = f"{message} (which leaf it is could not be asked: {lost})"
    return SaveFailed(message, process=error.process, leaf=leaf)


def receive_result(group: Group, name: str, plans: Mapping[str, Plan], timeout_s: float) -> SaveResult:
    """Does the part of the others: returns the result, having answered the question if there was one."""
    message = group.broadcast(f"{name}/outcome", None, timeout_s=timeout_s)
    if message.startswith(QUESTION):
        group.gather(f"{name}/leaves", _answer(plans.get(message.removeprefix(QUESTION).decode())), timeout_s=ANSWER_S)
        message = group.broadcast(f"{name}/outcome", None, timeout_s=2 * ANSWER_S)
    return SaveResult.from_bytes(message)


def _answer(plan: Plan | None) -> bytes:
    leaves = [(leaf.path, _shown(leaf), leaf.sharding) for leaf in plan.leaves] if plan is not None else []
    return zlib.compress(json.dumps(leaves).encode())


def _shown(leaf: Leaf) -> str:
    if leaf.is_value:
        return f"a Python {leaf.kind}"
    kept = ", kept per process" if leaf.per_process else ", a value of each host" if leaf.placement is None else ""
    sharding = f", {show_sharding(leaf.sharding)}" if leaf.sharding is not None else kept
    return f"{leaf.dtype}{list(leaf.shape)} ({leaf.kind}{sharding})"


def first_difference(answers: Sequence[Sequence[Sequence[object]]]) -> tuple[str, str]:
    """Returns the first leaf that another process has otherwise than process 0, and a sentence; ("", "") when only structure differs."""
    first = {str(path): (shown, sharding) for path, shown, sharding in answers[0]}
    for process, answer in enumerate(answers[1:], 1):
        other = {str(path): (shown, sharding) for path, shown, sharding in answer}
        for path in [*first, *other]:
            if path not in other or path not in first:
                here, there = (0, process) if path in first else (process, 0)
                return path, f"The leaf {path!r} is on process {here} and not on process {there}"
            if first[path] != other[path]:
                ours, theirs = first[path][0], other[path][0]
                if ours == theirs:
                    ours, theirs = f"{ours} {json.dumps(first[path][1])}", f"{theirs} {json.dumps(other[path][1])}"
                return path, f"The leaf {path!r} is {ours} on process 0 and {theirs} on process {process}"
    return "", ""
