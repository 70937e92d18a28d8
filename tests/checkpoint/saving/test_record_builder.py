"""The record of a save says what the plan and the reports of all processes say."""

from __future__ import annotations

import json

import numpy as np
import pytest

from holdfast.checkpoint.format.item_report import FileReport, ItemReport, pack_name
from holdfast.checkpoint.format.record import Record, parse_record
from holdfast.checkpoint.format.values import encode_value
from holdfast.checkpoint.saving.plan import Leaf, Plan, ShardPlacement, make_plan
from holdfast.checkpoint.saving.record_builder import RecordHead, build_record

TREE = {"kind": "dict", "keys": ["mine", "name", "w"], "nodes": [0, 1, 2]}
SAVE_ID = "0a0b0c0d00000001"


def plan_of_two() -> Plan:
    rows = ShardPlacement((2, 1), np.array([[0], [1]]), np.array([[0], [-1]]))
    leaves = [
        Leaf("mine", "int", per_process=True),
        Leaf("name", "str"),
        Leaf("w", "array", "float32", (4, 2), 4, rows, {"other": "rows"}),
    ]
    return make_plan(TREE, leaves, 0, 2)


def reports_of(plan: Plan) -> list[ItemReport]:
    values = [(encode_value(7), encode_value("net")), (encode_value(8),)]
    return [
        ItemReport(
            rank,
            plan.hash,
            (FileReport(pack_name(rank, 0, SAVE_ID), 100, 84, rank),),
            (0, 5),
            values[rank],
        )
        for rank in range(2)
    ]


def built(plan: Plan, **more: object) -> bytes:
    reports = reports_of(plan)
    note = [
        ItemReport(rank, "", (FileReport(f"0000{rank}-j-{SAVE_ID}.json", 2, 0, 9),))
        for rank in range(2)
    ]
    options = {"writer": SAVE_ID, "processes": 2, "started_s": 1.0, "finished_s": 2.5} | more
    return build_record(RecordHead(10, **options), {"state": (plan, reports), "note": (None, note)})  # type: ignore[arg-type]


def test_it_reads_back_as_planned_and_reported() -> None:
    """Leaves with their chunks' files, shared values once, values of each process in rank order,
    files by name, times, metrics.
    """
    record: Record = parse_record(
        built(plan_of_two(), metrics={"loss": 0.5}, metadata={"run": [1]}), "p"
    )
    assert (
        record.step,
        record.writer_id,
        record.processes,
        record.started_s,
        record.finished_s,
    ) == (10, SAVE_ID, 2, 1.0, 2.5)
    assert record.metrics == {"loss": 0.5} and record.metadata == {"run": [1]}
    state = record.items["state"]
    mine, name, w = state.leaves
    assert mine.per_process and mine.value == (7, 8) and name.value == "net"
    assert w.shape == (4, 2) and w.files is not None and w.files.tolist() == [0, 1]
    assert [file.name for file in state.files] == [
        f"state/{pack_name(rank, 0, SAVE_ID)}" for rank in range(2)
    ]
    assert record.items["note"].kind == "json" and len(record.items["note"].files) == 2


def test_what_the_plan_says_is_written_once() -> None:
    """The text of tree and leaves is made once for a plan; saves of one plan differ in files,
    values and times alone.
    """
    plan = plan_of_two()
    first = built(plan)
    text = plan.cache["record"]
    assert built(plan) == first and plan.cache["record"] is text and text.encode() in first


def test_leaves_with_equal_chunks_share_their_runs() -> None:
    """A thousand leaves that lie alike say so once: the record grows by their paths alone."""
    rows = ShardPlacement((2,), np.array([[0], [1]]), np.array([[0], [-1]]))
    plan = make_plan(
        {},
        [
            Leaf(f"layer{i}", "array", "float32", (4,), 4, rows, {"other": "rows"})
            for i in range(1000)
        ],
        0,
        2,
    )
    files = [
        ItemReport(rank, plan.hash, (FileReport(pack_name(rank, 0, SAVE_ID), 1, 1, 1),))
        for rank in range(2)
    ]
    item = json.loads(
        build_record(
            RecordHead(1, writer="w", processes=2, started_s=0, finished_s=0),
            {"state": (plan, files)},
        )
    )["items"]["state"]
    assert len(item["cells"]) == len(item["shardings"]) == 1 and {
        leaf["cells"] for leaf in item["leaves"]
    } == {0}


def test_what_is_no_json_is_refused() -> None:
    """Metadata that JSON cannot hold is a TypeError, before anything is written."""
    with pytest.raises(TypeError):
        built(plan_of_two(), metadata=object())


def test_a_file_that_nobody_reported_is_a_defect() -> None:
    """Fewer files than were planned never become a record."""
    plan = plan_of_two()
    with pytest.raises(AssertionError, match="item state: 1 files were reported, 2 planned"):
        build_record(
            RecordHead(1, writer="w", processes=1, started_s=0, finished_s=0),
            {"state": (plan, reports_of(plan)[:1])},
        )
