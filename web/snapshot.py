"""A job as the page draws it: its status, what is wrong, and its last minutes. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence, Set
from typing import Any

from holdfast.coordination.diagnosis.findings import Finding, expected_s, silent
from holdfast.coordination.diagnosis.step_curve import Sample
from holdfast.coordination.diagnosis.summary import GOODPUT_PARTS, checkpoint_roots
from holdfast.coordination.diagnosis.verdict import OVER, judge
from holdfast.proto import coordination_pb2, session_pb2

MOST_EVENTS = 300
_STEP_FACTS = (
    *("step", "bytes", "incremental", "local", "damaged", "survives"),
    *("saved_unix_s", "took_s"),
)
_LAUNCHER_FACTS = ("command", "folder", "began_unix_s")
_MOST_NAMED = 50  # processes of one barrier


def snapshot(
    status: session_pb2.StatusResponse | None,
    findings: Sequence[Finding] = (),
    samples: Iterable[Sample] = (),
    *,
    unix_s: float,
    gone: str = "",
) -> dict[str, Any]:
    """Returns what the page draws. `gone` says why there is no newer status than this one."""
    if status is None:
        status = session_pb2.StatusResponse()
    roots = checkpoint_roots(status)
    at_barriers = {each.task_id for barrier in status.barriers for each in barrier.waiting}
    verdict = judge(status, findings, gone=gone)
    return {
        "verdict": verdict.as_json() | {"over": verdict.state in OVER},
        **{name: getattr(status.launcher, name) for name in _LAUNCHER_FACTS},
        "unix_s": unix_s,
        "gone": gone,
        "job": status.job,
        "attempt": status.launcher.attempt or status.attempt,
        "phase": status.phase,
        "up_s": round(status.up_s, 1),
        "num_processes": status.num_processes,
        "barriers_passed": status.barriers_passed,
        "barriers_failed": status.barriers_failed,
        "goodput_s": {part: round(seconds, 1) for part, seconds in status.goodput_s.items()},
        "goodput_parts": GOODPUT_PARTS,
        "findings": [finding.as_json() for finding in findings],
        "processes": [_row(status, task, at_barriers) for task in status.tasks],
        "root": _root(roots[0]) if roots else None,
        "barriers": [_barrier(barrier) for barrier in status.barriers],
        "events": [
            {"unix_s": round(event.unix_s, 1), "kind": event.kind, "text": event.text}
            for event in status.events[-MOST_EVENTS:]
        ],
        "samples": [list(each) for each in samples],
    }


def encode(shown: dict[str, Any]) -> str:
    """Returns a snapshot as JSON that may stand inside a script: nothing in it ends the script."""
    text = json.dumps(shown, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _row(
    status: session_pb2.StatusResponse, task: session_pb2.TaskStatus, at_barriers: Set[int]
) -> dict[str, Any]:
    progress = task.progress
    values = progress.values
    return {
        "id": task.task_id,
        "waits": task.task_id in at_barriers,
        "state": "SILENT" if silent(status, task) else coordination_pb2.TaskState.Name(task.state),
        "host": task.host,
        "pid": task.pid,
        "heard_s": round(task.heartbeat_age_s, 1),
        "expected_s": expected_s(status, task),
        "step": progress.step if progress.HasField("step") else None,
        "steps_per_second": round(task.steps_per_second, 2),
        "saved_step": progress.saved_step if progress.HasField("saved_step") else None,
        "waiting": values.get("waiting_share"),
        "memory_bytes": values.get("memory_bytes"),
        "blocked_s": values.get("save_blocked_s"),
        "note": task.error or progress.trouble,
    }


def _root(root: session_pb2.CheckpointRoot) -> dict[str, Any]:
    steps = [
        {name: getattr(step, name) for name in _STEP_FACTS} | {"metrics": dict(step.metrics)}
        for step in root.steps
    ]
    return {"path": root.path, "num_steps": root.num_steps, "steps": steps}


def _barrier(barrier: session_pb2.BarrierStatus) -> dict[str, Any]:
    return {
        "name": barrier.barrier_id,
        "waiting": len(barrier.waiting),
        "waited_s": round(max((each.since_s for each in barrier.waiting), default=0.0), 1),
        "missing": list(barrier.missing[:_MOST_NAMED]),
        "num_missing": len(barrier.missing),
        "left_s": round(barrier.left_s, 1),
    }
