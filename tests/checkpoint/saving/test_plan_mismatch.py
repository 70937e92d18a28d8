"""Plans that differ: how it is noticed, and which leaf is named to all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from holdfast.checkpoint import SaveFailed
from holdfast.checkpoint.agreement.save_protocol import SaveKey, SaveResult, Superfluous, Told
from holdfast.checkpoint.format.item_report import ItemReport
from holdfast.checkpoint.saving.plan import Leaf, Plan, ShardPlacement, make_plan
from holdfast.checkpoint.saving.plan_mismatch import (
    PlansDiffer,
    ShownLeaf,
    ShownLeaves,
    check_shares,
    explain,
    first_difference,
    receive_result,
)
from holdfast.checkpoint.saving.record_builder import tree_text
from holdfast.multihost import Group, Solo
from tests.support.checkpointing import at_once, groups

KEY = SaveKey("0a00000001", 1, 5)


def plan_of(*leaves: Leaf, rank: int = 0, count: int = 2) -> Plan:
    return make_plan({"kind": "list"}, leaves, rank, count)


def test_differences_between_processes_are_named() -> None:
    """Another plan names the processes; another value of a host-local leaf names leaf and
    processes.
    """
    placement = ShardPlacement((2,), np.array([[0], [1]]), np.array([[0], [-1]]))
    plan = plan_of(
        Leaf("w", "array", "float32", (4,), 4, placement),
        Leaf("count", "numpy", "int64", (), 8),
        Leaf("name", "str"),
    )
    good = [ItemReport(0, plan.hash, (), (1, 2)), ItemReport(1, plan.hash, (), (1, 2))]
    check_shares("state", tree_text(plan), good)
    with pytest.raises(SaveFailed, match=r"processes \[1\] planned another save") as caught:
        check_shares("state", tree_text(plan), [good[0], ItemReport(1, "other", (), (1, 2))])
    assert caught.value.process == 1
    with pytest.raises(SaveFailed, match=r"leaf 'name' .* differs on processes \[1\]"):
        check_shares("state", tree_text(plan), [good[0], ItemReport(1, plan.hash, (), (1, 3))])


class Looked(tuple[int, ...]):
    """Checksums that count how often one of them is looked at."""

    looks = 0

    def __getitem__(self, index: Any) -> Any:
        Looked.looks += 1
        return super().__getitem__(index)


def test_equal_processes_cost_no_look_each() -> None:
    """Only the leaves of processes that differ are compared one by one, in every save."""
    plan = plan_of(*[Leaf(f"leaf{number}", "str") for number in range(50)])
    reports = [ItemReport(rank, plan.hash, (), Looked(range(50))) for rank in range(100)]
    Looked.looks = 0
    check_shares("state", tree_text(plan), reports)
    assert Looked.looks == 0
    reports[7] = ItemReport(7, plan.hash, (), Looked([*range(49), 0]))
    with pytest.raises(SaveFailed, match=r"leaf 'leaf49' .* differs on processes \[7\]"):
        check_shares("state", tree_text(plan), reports)
    assert Looked.looks == 100


@pytest.mark.parametrize(
    ("ours", "theirs", "leaf", "sentence"),
    [
        ([["a", "int", None]], [["a", "int", None]], "", ""),
        (
            [["a", "x", None]],
            [["a", "y", None]],
            "a",
            "The leaf 'a' is x on process 0 and y on process 2",
        ),
        ([], [["b", "x", None]], "b", "The leaf 'b' is on process 2 and not on process 0"),
        (
            [["a", "x", None], ["b", "x", None]],
            [["a", "x", None]],
            "b",
            "The leaf 'b' is on process 0 and not on process 2",
        ),
        (
            [["a", "x", [1]]],
            [["a", "x", [2]]],
            "a",
            "The leaf 'a' is x [1] on process 0 and x [2] on process 2",
        ),
    ],
)
def test_the_first_difference_is_named(
    ours: list[list[Any]], theirs: list[list[Any]], leaf: str, sentence: str
) -> None:
    """The first leaf that another process has otherwise than process 0; shardings are spelt out
    where all else is equal.
    """
    shown = [ShownLeaves(tuple(ShownLeaf(*row) for row in rows)) for rows in (ours, theirs)]
    assert first_difference(*shown, 2) == (leaf, sentence)


def test_one_is_asked_and_all_learn_the_leaf() -> None:
    """The first process that differs sends its leaves, the others nothing, and all receive the
    result.
    """
    plans = [
        plan_of(Leaf("n", "numpy", "int64", shape, 8), rank=rank)
        for rank, shape in enumerate([(3,), (4,), (5,)])
    ]
    message = "item 'state': processes [1, 2] planned another save than process 0"
    sent: list[int] = []

    def lead(group: Group) -> SaveResult:
        result = SaveResult(
            KEY, explain(group, "name", PlansDiffer(message, process=1, item="state"), plans[0])
        )
        group.broadcast("name/outcome", Told(result).to_bytes(), timeout_s=60)
        return result

    def follow(group: Group) -> SaveResult:
        gather = group.gather
        group.gather = lambda name, value, **more: (
            sent.append(len(value)),
            gather(name, value, **more),
        )[1]  # type: ignore[method-assign, func-returns-value]
        return receive_result(group, "name", {"state": plans[group.index]}, {}, timeout_s=60)

    with groups(3) as all_three:
        results = at_once(
            [lambda: lead(all_three[0]), lambda: follow(all_three[1]), lambda: follow(all_three[2])]
        )
    assert min(sent) == 0 < max(sent) and len(sent) == 2
    for result in results:
        assert isinstance(result.error, SaveFailed) and (
            result.error.leaf,
            result.error.process,
        ) == ("n", 1)
        assert str(result.error).endswith(
            "The leaf 'n' is int64[3] (numpy, a value of each host) on process 0 and int64[4]"
            " (numpy, a value of each host) on process 1"
        )


def test_a_result_without_a_question_comes_through() -> None:
    """Who is not asked receives the result as it was sent."""
    with groups(2) as both:
        sent = Told(SaveResult(KEY, after=Superfluous((1,)))).to_bytes()

        def send() -> bytes:
            return both[0].broadcast("name/outcome", sent, timeout_s=60)

        _, received = at_once([send, lambda: receive_result(both[1], "name", {}, {}, timeout_s=60)])
    assert received == SaveResult(KEY, after=Superfluous((1,)))


def test_where_nobody_answers_the_processes_are_still_named() -> None:
    """A question that fails leaves the error without a leaf, and says that it could not be
    asked.
    """

    class Deaf(Solo):
        def gather(self, name: str, value: bytes, *, timeout_s: float) -> list[bytes] | None:
            raise SaveFailed("nobody came")

    error = explain(
        Deaf(),
        "name",
        PlansDiffer("processes [1] planned another save", process=1, item="state"),
        None,
    )
    assert (
        str(error)
        == "processes [1] planned another save (which leaf it is could not be asked: nobody came)"
        and error.leaf == ""
    )
