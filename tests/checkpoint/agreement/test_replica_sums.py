"""What processes tell of their replicas, and who is named where some differ."""

from __future__ import annotations

import pytest

from holdfast.checkpoint.agreement.replica_sums import (
    DeviceSum,
    LocalDifference,
    ReplicaAnswer,
    ReplicaQuestion,
    ReplicaReport,
    SharedShard,
    difference_of,
    differing_sets,
)
from holdfast.checkpoint.agreement.save_protocol import SaveKey, SaveReport, Told

SHARDS = {3: (SharedShard(0, 0), SharedShard(1, 2))}
PATHS = ["a.w", "b"]
HERE = LocalDifference(SharedShard(1, 2), (DeviceSum("cuda:0", 5), DeviceSum("cuda:1", 4)))


def answers(*sums: tuple[int, ...], here: tuple[LocalDifference, ...] = ()) -> dict:
    """Returns the answers of processes 0, 1, ..., each on a host of its own; `here` of the last."""
    found = {
        process: ReplicaAnswer(f"h{process}", {3: own} if own else {})
        for process, own in enumerate(sums)
    }
    last = len(sums) - 1
    found[last] = ReplicaAnswer(f"h{last}", found[last].sums, here)
    return found


def test_messages_come_back_as_they_went() -> None:
    """Report, question and answer are what they were."""
    report = ReplicaReport({0: "ab", 7: "cd"}, differs_here=True)
    sent = SaveReport(0, SaveKey("id", 1, 2), replicas={"state": report})
    assert SaveReport.from_bytes(sent.to_bytes()) == sent
    question = Told(replicas_of=ReplicaQuestion("state", (1, 2)))
    assert Told.from_bytes(question.to_bytes()) == question
    answer = ReplicaAnswer("h", {3: (1, 2**32 - 1)}, (HERE,))
    assert ReplicaAnswer.from_bytes(answer.to_bytes()) == answer


def test_only_digests_of_one_set_are_compared() -> None:
    """Sets differ by their members' digests; a process without one says nothing."""
    reports = [
        ReplicaReport({0: "a", 1: "x"}),
        ReplicaReport({0: "a", 2: "y"}),
        ReplicaReport(),
        ReplicaReport({1: "z"}),
    ]
    assert differing_sets(reports) == (1,)
    assert differing_sets(reports[:3]) == ()


@pytest.mark.parametrize(
    ("found", "leaf", "process", "sentence"),
    [
        (
            answers((5, 6), (5, 6), (5, 7)),
            "b",
            2,
            "'b': process 2 (host h2) differs from 2 others that agree.",
        ),
        (
            answers((1, 6), (5, 6)),
            "a.w",
            0,
            "'a.w': process 0 (host h0), process 1 (host h1) differ from each other.",
        ),
        (
            answers((5, 5), (5, 5), (5, 5), here=(HERE,)),
            "b",
            2,
            "'b': process 2 (host h2, cuda:0), process 2 (host h2, cuda:1) differ from each other.",
        ),
        (
            answers((5, 5), (5, 5), (5, 4), here=(HERE,)),
            "b",
            2,
            "'b': process 2 (host h2, cuda:1) differs from 3 others that agree.",
        ),
        (
            answers((1, 6), (5, 6), (5, 7)),
            "a.w",
            0,
            "'a.w': process 0 (host h0) differs from 2 others that agree; 'b': process 2 (host h2)"
            " differs from 2 others that agree.",
        ),
    ],
)
def test_who_differs_is_named(found: dict, leaf: str, process: int, sentence: str) -> None:
    """Leaf, process, host and, within a process, device; the ones that fewer agree on."""
    error = difference_of("state", 4, PATHS, SHARDS, found)
    assert error is not None and (error.leaf, error.process, error.step) == (leaf, process, 4)
    assert sentence in str(error), str(error)


def test_sums_of_other_leaves_are_not_compared() -> None:
    """A process that leaves other leaves out, or does not answer, is no difference."""
    assert difference_of("state", 4, PATHS, SHARDS, answers((5, 6), (6,), ())) is None


def test_many_are_counted() -> None:
    """Of many leaves and processes some are named, and the others counted."""
    shards = {3: tuple(SharedShard(leaf, 0) for leaf in range(9))}
    found = {process: ReplicaAnswer(f"h{process}", {3: (process,) * 9}) for process in range(20)}
    error = difference_of("state", 4, [f"l{leaf}" for leaf in range(9)], shards, found)
    assert error is not None and "replicas of 9 leaves" in str(error)
    assert "; and 4 more" in str(error) and "and 12 more differ from each other" in str(error)
