"""What the page draws, from a status; and JSON that ends no script."""

from __future__ import annotations

import json
from typing import Any

from holdfast.coordination.diagnosis.findings import Finding
from holdfast.coordination.diagnosis.step_curve import sample
from holdfast.proto import coordination_pb2, session_pb2
from holdfast.web.snapshot import MOST_EVENTS, encode, snapshot


def test_a_snapshot_is_bounded() -> None:
    """Of thousands that a barrier misses fifty are named, and of the history the last events."""
    status = session_pb2.StatusResponse(num_processes=2, heartbeat_interval_s=15)
    status.tasks.add(
        task_id=0, state=coordination_pb2.CONNECTED, heartbeat_age_s=1
    ).progress.step = 7
    status.tasks.add(task_id=1, state=coordination_pb2.CONNECTED, heartbeat_age_s=99)
    status.barriers.add(barrier_id="b", missing=range(4096), waiting=[{"task_id": 0, "since_s": 3}])
    for number in range(1000):
        status.events.add(number=number, text=f"event {number}")
    shown = snapshot(
        status, [Finding("elsewhere", "process 1 is away", (1,))], [sample(status, 5.0)], unix_s=6.0
    )
    assert [row["state"] for row in shown["processes"]] == ["CONNECTED", "SILENT"] and shown[
        "processes"
    ][1]["step"] is None
    assert (
        len(shown["barriers"][0]["missing"]) == 50 and shown["barriers"][0]["num_missing"] == 4096
    )
    assert len(shown["events"]) == MOST_EVENTS and shown["events"][-1]["text"] == "event 999"
    assert shown["samples"] == [[5.0, 7, 0.0, -1]] and shown["findings"][0]["processes"] == (1,)


def test_a_status_of_earlier_tells_no_rate() -> None:
    """Where the coordinator is gone, nobody knows how fast the job is now, nor who was heard."""
    status = session_pb2.StatusResponse(num_processes=1)
    task = status.tasks.add(state=coordination_pb2.CONNECTED, steps_per_second=4.3)
    task.progress.step = 7
    now = snapshot(status, unix_s=1.0)
    assert now["furthest"]["steps_per_second"] == now["processes"][0]["steps_per_second"] == 4.3
    gone = snapshot(status, unix_s=1.0, gone="it does not answer")
    row = gone["processes"][0]
    assert gone["furthest"]["step"] == row["step"] == 7
    assert gone["furthest"]["steps_per_second"] is row["steps_per_second"] is row["heard_s"] is None


def test_each_attempt_says_who_stayed() -> None:
    """In the words of `holdfast status`."""
    status = session_pb2.StatusResponse()
    kept = {"number": 2, "num_processes": 3, "stayed": 2, "replaced": [1]}
    status.launcher.attempts.add(**kept, began_unix_s=7.25, why="process 1 died")
    (shown,) = snapshot(status, unix_s=8.0)["attempts"]
    assert shown == {
        "number": 2,
        "began_unix_s": 7.2,
        "processes": "2 stayed, replaced 1",
        "why": "process 1 died",
    }


def test_the_root_is_the_primarys() -> None:
    """None where nobody did."""
    status = session_pb2.StatusResponse()
    status.tasks.add(task_id=0)
    assert snapshot(status, unix_s=1.0)["root"] is None
    step = {
        "step": 5,
        "bytes": 640,
        "incremental": True,
        "local": True,
        "damaged": True,
        "survives": 1,
        "left_behind": True,
        "saved_unix_s": 5.0,
        "took_s": 0.5,
        "metrics": {"loss": 0.25},
        "best": ["loss"],
    }
    status.tasks.add(task_id=1).progress.root.MergeFrom(
        session_pb2.CheckpointRoot(path="/data", num_steps=3, steps=[step])
    )
    assert snapshot(status, unix_s=1.0)["root"] == {
        "path": "/data",
        "num_steps": 3,
        "steps": [step],
    }


def restarted(*steps: Any) -> session_pb2.StatusResponse:
    """Returns a job in its second attempt, which has saved nothing: the launcher has told its
    coordinator what was before.
    """
    status = session_pb2.StatusResponse()
    status.tasks.add(task_id=0).progress.root.MergeFrom(
        session_pb2.CheckpointRoot(path="/data", num_steps=len(steps), steps=steps)
    )
    for at, (kind, text) in enumerate(
        [
            ("joined", "2 processes joined"),
            *(("saved", f"step {step} is saved") for step in range(10, 50, 10)),
            ("lost", "process 1 is lost"),
            ("launcher", "attempt 2 is running"),
        ]
    ):
        status.events.add(unix_s=100.0 + at, kind=kind, text=text)
    return status


def test_after_a_restart_the_saves_before_are_there() -> None:
    """In the chart, in the table and as the last save: this job saved step 40, though this attempt
    did not.
    """
    shown = snapshot(restarted({"step": 30}, {"step": 40}), unix_s=200.0)
    assert shown["saves"] == [[101.0, 10], [102.0, 20], [103.0, 30], [104.0, 40]]
    assert [step["saved_unix_s"] for step in shown["root"]["steps"]] == [103.0, 104.0]
    assert shown["last_save"] == {"step": 40, "saved_unix_s": 104.0, "took_s": 0.0}


def test_the_history_does_not_drown_in_saves() -> None:
    """Saves that nothing came between are one line, at the time of the last; the rest stays."""
    texts = [event["text"] for event in snapshot(restarted(), unix_s=200.0)["events"]]
    assert texts == [
        "2 processes joined",
        "4 steps are saved, from step 10 to step 40",
        "process 1 is lost",
        "attempt 2 is running",
    ]


def test_a_step_of_an_earlier_run_is_saved_too() -> None:
    """When is not known here; a job without any step says so."""
    status = session_pb2.StatusResponse()
    assert snapshot(status, unix_s=1.0)["last_save"]["step"] == -1
    root = session_pb2.CheckpointRoot(num_steps=1, steps=[{"step": 7}, {"step": 9, "local": True}])
    status.tasks.add(task_id=0).progress.root.MergeFrom(root)
    last = snapshot(status, unix_s=1.0)["last_save"]
    assert last == {"step": 7, "saved_unix_s": 0.0, "took_s": 0.0}


def test_a_page_without_a_status_says_why() -> None:
    """Before the first answer there is nothing to draw but the reason."""
    shown = snapshot(session_pb2.StatusResponse(), unix_s=1.0, gone="no coordinator")
    assert shown["gone"] == "no coordinator" and shown["processes"] == []


def test_names_cannot_end_the_script_that_holds_them() -> None:
    """Every character that means something to a browser is written as JSON's escape, and read back
    as it was.
    """
    hostile = {"host": "</script><!--<script>&\u2028é"}
    text = encode(hostile)
    assert json.loads(text) == hostile and not set("<>&\u2028é") & set(text)
