"""The processes of a large job: in ranges, with the odd ones by themselves, and bounded."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.coordination.diagnosis.findings import Finding
from holdfast.coordination.diagnosis.verdict import JobState
from holdfast.proto import coordination_pb2, session_pb2
from holdfast.web.process_ranges import (
    MOST_ODD,
    MOST_RANGES,
    MOST_ROWS,
    kinds_of,
    odd_ones,
    range_facts,
    ranges_of,
)
from holdfast.web.snapshot import encode, snapshot

MOST_BYTES = 100_000
"""Of a snapshot of a large job without events."""


def job(hosts: list[str], num_slices: int = 1) -> session_pb2.StatusResponse:
    """Returns a job of one process on each of `hosts`, all at step 7."""
    status = session_pb2.StatusResponse(num_processes=len(hosts), heartbeat_interval_s=15)
    for number, host in enumerate(hosts):
        task = status.tasks.add(task_id=number, state=coordination_pb2.CONNECTED, host=host)
        task.progress.step = 7
        if num_slices > 1:
            task.progress.values["num_slices"] = num_slices
    return status


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=300),
    st.sampled_from([1, 2, 3, 64, 500]),
)
def test_ranges_are_few_and_of_one_slice(sizes: list[int], num_slices: int) -> None:
    """They hold every process once, in order; a host is cut only where it alone is large."""
    status = job([f"h{n}" for n, size in enumerate(sizes) for _ in range(size)], num_slices)
    count = len(status.tasks)
    ranges = ranges_of(status)
    assert len(ranges) <= MOST_RANGES
    assert [each.begin for each in ranges] == [0, *(each.end for each in ranges)][:-1]
    assert ranges[-1].end == count
    if num_slices <= 64:
        for each in ranges:
            assert each.begin * num_slices // count == (each.end - 1) * num_slices // count


def test_a_range_holds_whole_hosts() -> None:
    """Of 2,048 hosts with eight processes each, and four slices."""
    status = job([f"h{n // 8}" for n in range(16_384)], num_slices=4)
    ranges = ranges_of(status)
    assert all(each.begin % 8 == 0 for each in ranges)
    assert {each.slice_id for each in ranges} == {0, 1, 2, 3}
    kinds = ["ok"] * 16_384
    kinds[130] = "culprit"
    assert range_facts(status, kinds, ranges[1]) == {
        "first": 128,
        "last": 255,
        "slice": 0,
        "hosts": ["h16", "h31"],
        "is": "culprit",
        "kinds": {"ok": 127, "culprit": 1},
        "steps": [7, 7],
    }


def test_how_a_process_is() -> None:
    """Failed, named or silent ones are the culprits; behind is more than a step; where the job
    hangs the others wait.
    """
    status = job(["a"] * 6)
    states = coordination_pb2.TaskState
    status.tasks[0].state = states.Value("ERROR")
    status.tasks[1].state = states.Value("DISCONNECTED")
    status.tasks[2].state = states.Value("UNINITIALIZED")
    status.tasks[3].heartbeat_age_s = 99
    status.tasks[4].progress.step = 5
    first = ["culprit", "left", "absent", "culprit"]
    assert kinds_of(status, [], JobState.HEALTHY) == [*first, "behind", "ok"]
    assert kinds_of(status, [], JobState.HUNG) == [*first, "waiting", "waiting"]
    named = Finding("elsewhere", "", (4,))
    assert kinds_of(status, [named], JobState.HUNG) == [*first, "culprit", "waiting"]
    together = Finding("together", "", (4, 5))
    assert kinds_of(status, [together], JobState.HUNG) == [*first, "waiting", "waiting"]


def test_the_odd_ones_are_always_sent() -> None:
    """The worst first, and no more than a screen of them."""
    kinds = ["ok"] * 9000 + ["behind"] * 500 + ["culprit"] * 3
    assert odd_ones(kinds) == [9500, 9501, 9502, *range(9000, 9000 + MOST_ODD - 3)]
    assert odd_ones(["ok"] * 2000) == []
    assert odd_ones(["culprit"] * 2000) == list(range(MOST_ODD))


@pytest.mark.parametrize("count", [MOST_ROWS + 1, 4096, 16_384])
def test_a_large_job_is_a_small_snapshot(count: int) -> None:
    """Whatever is wrong with it: its bytes do not grow with its processes."""
    status = job([f"node-{n // 8}.cluster.example.com" for n in range(count)], num_slices=4)
    for task in list(status.tasks)[::3]:
        task.state = coordination_pb2.ERROR
        task.error = f"process {task.task_id} has failed with a long and sad story"
    finding = Finding("failed", "a third has failed", tuple(range(0, count, 3)))
    shown = snapshot(status, [finding], unix_s=1.0)
    assert len(encode(shown)) < MOST_BYTES
    assert sum(shown["kinds"].values()) == count
    assert sum(sum(each["kinds"].values()) for each in shown["ranges"]) == count
    assert json.loads(encode(shown))["furthest"]["step"] == 7
