"""A job as the page draws it: its status, what is wrong, and its last minutes. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from holdfast.coordination.diagnosis.findings import Finding, expected_s, silent
from holdfast.coordination.diagnosis.step_curve import Sample
from holdfast.coordination.diagnosis.summary import (
    GOODPUT_PARTS,
    checkpoint_roots,
    describe_staying,
    fold_saves,
    saved_step,
)
from holdfast.coordination.diagnosis.verdict import OVER, judge
from holdfast.proto import coordination_pb2, session_pb2

from .process_ranges import (
    MOST_ROWS,
    ProcessRange,
    kinds_of,
    odd_ones,
    range_facts,
    ranges_of,
    slice_of,
    slices_of,
)

MOST_EVENTS = 300  # and so many saves
_STEP_FACTS = (
    "step",
    "bytes",
    "incremental",
    "local",
    "damaged",
    "survives",
    "left_behind",
    "took_s",
)
_LAUNCHER_FACTS = ("command", "folder", "began_unix_s")
_MOST_NAMED = 50  # processes of one barrier, or of one finding


def snapshot(
    status: session_pb2.StatusResponse,
    findings: Sequence[Finding] = (),
    samples: Iterable[Sample] = (),
    *,
    unix_s: float,
    gone: str = "",
) -> dict[str, Any]:
    """Returns what the page draws. `gone` says why there is no newer status than this one."""
    saves = _saves(status)
    root = next((_root(each, saves) for each in checkpoint_roots(status)), None)
    verdict = judge(status, findings, gone=gone)
    kinds = kinds_of(status, findings, verdict.state)
    shown: Sequence[int] = range(len(kinds))
    ranges: list[ProcessRange] = []
    if len(kinds) > MOST_ROWS:
        shown = odd_ones(kinds)
        ranges = ranges_of(status)
    return {
        "verdict": verdict.as_json() | {"over": verdict.state in OVER},
        **{name: getattr(status.launcher, name) for name in _LAUNCHER_FACTS},
        "unix_s": unix_s,
        "gone": gone,
        "job": status.job,
        "attempt": status.launcher.attempt or status.attempt,
        "attempts": [_attempt(each) for each in status.launcher.attempts],
        "phase": status.phase,
        "up_s": round(status.up_s, 1),
        "num_processes": status.num_processes,
        "barriers_passed": status.barriers_passed,
        "barriers_failed": status.barriers_failed,
        "goodput_s": {part: round(seconds, 1) for part, seconds in status.goodput_s.items()},
        "goodput_parts": GOODPUT_PARTS,
        "findings": [
            finding.as_json() | {"processes": finding.processes[:_MOST_NAMED]}
            for finding in findings
        ],
        "kinds": dict(Counter(kinds)),
        "furthest": _furthest(status, is_now=not gone),
        "processes": rows(status, kinds, shown, is_now=not gone),
        "ranges": [range_facts(status, kinds, each) for each in ranges],
        "root": root,
        "saves": [[unix_s, step] for step, unix_s in saves.items()][-MOST_EVENTS:],
        "last_save": _last_save(root["steps"] if root else [], saves),
        "barriers": [_barrier(barrier) for barrier in status.barriers],
        "events": [
            {"unix_s": round(event.unix_s, 1), "kind": event.kind, "text": event.text}
            for event in fold_saves(status.events)[-MOST_EVENTS:]
        ],
        "samples": [list(each) for each in samples],
    }


def _attempt(attempt: session_pb2.Attempt) -> dict[str, Any]:
    return {
        "number": attempt.number,
        "began_unix_s": round(attempt.began_unix_s, 1),
        "processes": describe_staying(attempt),
        "why": attempt.why,
    }


def encode(shown: Any) -> str:
    """Returns a snapshot as JSON that may stand inside a script: nothing in it ends the script."""
    text = json.dumps(shown, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _furthest(status: session_pb2.StatusResponse, *, is_now: bool) -> dict[str, float | None]:
    """Returns the most that any process has reached; -1 where none has. A status that is not of now
    says nothing of a rate.
    """
    steps = [task.progress.step for task in status.tasks if task.progress.HasField("step")]
    pace = max((task.steps_per_second for task in status.tasks), default=0.0)
    return {
        "step": max(steps, default=-1),
        "steps_per_second": round(pace, 3) if is_now else None,
    }


def rows(
    status: session_pb2.StatusResponse,
    kinds: Sequence[str],
    numbers: Iterable[int],
    *,
    is_now: bool,
) -> list[dict[str, Any]]:
    """Returns what the page says of single processes, given by their index."""
    count = len(status.tasks)
    num_slices = slices_of(status)
    return [
        _row(status, status.tasks[number], is_now=is_now)
        | {"is": kinds[number], "slice": slice_of(number, count, num_slices)}
        for number in numbers
    ]


def _row(
    status: session_pb2.StatusResponse, task: session_pb2.TaskStatus, *, is_now: bool
) -> dict[str, Any]:
    progress = task.progress
    values = progress.values
    return {
        "id": task.task_id,
        "state": "SILENT" if silent(status, task) else coordination_pb2.TaskState.Name(task.state),
        "host": task.host,
        "pid": task.pid,
        "heard_s": round(task.heartbeat_age_s, 1) if is_now else None,
        "expected_s": expected_s(status, task),
        "step": progress.step if progress.HasField("step") else None,
        "steps_per_second": round(task.steps_per_second, 3) if is_now else None,
        "saved_step": progress.saved_step if progress.HasField("saved_step") else None,
        "waiting": values.get("waiting_share"),
        "memory_bytes": values.get("memory_bytes"),
        "checkpoint_peak_bytes": values.get("checkpoint_peak_bytes"),
        "blocked_s": values.get("save_blocked_s"),
        "waited_s": values.get("save_waited_s"),
        "compiled": values.get("compiled"),
        "loaded": values.get("loaded"),
        "compile_s": values.get("compile_s"),
        "note": task.error or progress.trouble,
    }


def _saves(status: session_pb2.StatusResponse) -> dict[int, float]:
    """Returns when each step was saved, by the job's history: the last one comes last."""
    saves: dict[int, float] = {}
    for event in sorted(status.events, key=lambda event: event.unix_s):
        step = saved_step(event)
        if step >= 0:
            saves.pop(step, None)
            saves[step] = round(event.unix_s, 1)
    return saves


def _root(root: session_pb2.CheckpointRoot, saves: Mapping[int, float]) -> dict[str, Any]:
    """Returns what is known of the steps. When an earlier attempt saved one, the history knows."""
    steps = [
        {name: getattr(step, name) for name in _STEP_FACTS}
        | {
            "metrics": dict(step.metrics),
            "best": list(step.best),
            "saved_unix_s": step.saved_unix_s or (0.0 if step.local else saves.get(step.step, 0.0)),
        }
        for step in root.steps
    ]
    return {"path": root.path, "num_steps": root.num_steps, "steps": steps}


def _last_save(steps: Sequence[Mapping[str, Any]], saves: Mapping[int, float]) -> dict[str, Any]:
    """Returns the step that was saved last, and when: 0 where an earlier run saved it. A step of -1
    says that there is none.
    """
    known = {step: {"step": step, "saved_unix_s": at, "took_s": 0.0} for step, at in saves.items()}
    known |= {
        step["step"]: {name: step[name] for name in ("step", "saved_unix_s", "took_s")}
        for step in steps
        if not step["local"]
    }
    none = {"step": -1, "saved_unix_s": 0.0, "took_s": 0.0}
    return max([none, *known.values()], key=lambda save: (save["saved_unix_s"], save["step"]))


def _barrier(barrier: session_pb2.BarrierStatus) -> dict[str, Any]:
    return {
        "name": barrier.barrier_id,
        "waiting": len(barrier.waiting),
        "waited_s": round(max((each.since_s for each in barrier.waiting), default=0.0), 1),
        "missing": list(barrier.missing[:_MOST_NAMED]),
        "num_missing": len(barrier.missing),
        "left_s": round(barrier.left_s, 1),
    }
