"""The machine's state as rows of a journal, and back. Pure: the journal and the simulator's crashes
use the same two functions.

A row is (table, key, value); a value of None says that the row is gone. Times are kept as wall
time, which goes on while no service runs. Waiting calls are not kept: clients ask again after an
outage, with the same counters, and find the instance that they had arrived at.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from google.protobuf.json_format import MessageToDict, ParseDict

from holdfast.proto import session_pb2

from ..task_bits import bits_of, tasks_of
from .barriers import Barrier, Outcome
from .events import Event
from .liveness import LivenessAnswer, Living, Sending
from .machine import Machine
from .status import (
    ALIVE,
    ARRIVED,
    BARRIER,
    EVENT,
    KEY,
    META,
    TASK,
    Code,
    Missing,
    Status,
)
from .task_table import Task, TaskState


class Row(NamedTuple):
    """One row of the journal."""

    table: str
    key: str
    value: bytes | None


def drain(machine: Machine, wall_offset_s: float) -> list[Row]:
    """Returns the rows that have changed since the last call. Wall time is the machine's time plus
    `wall_offset_s`.
    """
    rows: list[Row] = []
    changed = machine.changes.take()
    for table, key in changed:
        if table == BARRIER:
            rows += _barrier_rows(str(key), machine, wall_offset_s)
        else:
            rows.append(Row(table, str(key), _value(table, key, machine, wall_offset_s)))
    if any(table == TASK for table, _ in changed):
        meta = {
            "gathered": machine.registration.gathered,
            "version": machine.task_table.version,
            "error": _status(machine.polls.error),
        }
        rows.append(Row(META, "state", _json(meta)))
    return rows


def _value(table: str, key: Any, machine: Machine, wall_offset_s: float) -> bytes | None:
    """Returns what a row holds now, None where it is gone."""
    if table == TASK:
        return _task(machine.task_table.tasks[key])
    if table == KEY:
        return machine.keys.values.get(key)
    if table == EVENT and (event := machine.events.kept.get(key)) is not None:
        return _event(event, wall_offset_s)
    if table == ALIVE and (answer := machine.liveness.answers.get(key)) is not None:
        return _alive(answer)
    return None


def load(machine: Machine, rows: Iterable[Row], now: float, wall_offset_s: float) -> None:
    """Puts rows into a fresh machine. Connected tasks count as heard of just now: they cannot help
    our outage.
    """
    tables: dict[str, dict[str, Any]] = defaultdict(dict)
    for table, key, value in rows:
        assert value is not None
        tables[table][key] = value if table == KEY else json.loads(value)
    for task in tables[TASK].values():
        machine.task_table.load(_load_task(task, now))
    meta = tables[META].get("state", {})
    machine.registration.load(meta.get("gathered", False))
    machine.polls.load(_load_status(meta.get("error")))
    machine.task_table.load_version(meta.get("version", 0))
    machine.keys.load(tables[KEY])
    _load_barriers(machine, tables[BARRIER], tables[ARRIVED], wall_offset_s)
    machine.liveness.load(map(_load_alive, tables[ALIVE].values()))
    machine.events.load(
        Event(**kept | {"at": kept["at"] - wall_offset_s}) for kept in tables[EVENT].values()
    )
    machine.changes.clear()


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


_TASK_FIELDS = (
    "task_id",
    "agent",
    "session",
    "host",
    "pid",
    "version",
    "ended",
    "owner",
    "former",
    "life",
    "agent_since",
    "session_since",
)


def _task(task: Task) -> bytes:
    kept = {name: getattr(task, name) for name in _TASK_FIELDS}
    kept["state"] = int(task.state)
    kept["error"] = _status(task.error)
    kept["seen"] = task.last_seen is not None
    kept["progress"] = MessageToDict(task.progress)
    return _json(kept)


def _load_task(kept: dict[str, Any], now: float) -> Task:
    progress = ParseDict(kept["progress"], session_pb2.ReportRequest())
    progress.ClearField("asks_preemption")  # which is told again to a service that is restarted
    return Task(
        **{name: kept[name] for name in _TASK_FIELDS},
        state=TaskState(kept["state"]),
        state_since=now,
        error=_load_status(kept["error"]),
        last_seen=now if kept["seen"] else None,
        progress=progress,
    )


def _event(event: Event, wall_offset_s: float) -> bytes:
    return _json(asdict(event) | {"at": event.at + wall_offset_s})


def _alive(answer: LivenessAnswer) -> bytes:
    kept = {
        "serial": answer.serial,
        "members": f"{bits_of(answer.members):x}",
        "living": answer.living,
        "answered": [(task_id, *sending) for task_id, sending in answer.answered.items()],
    }
    return _json(kept)


def _load_alive(kept: dict[str, Any]) -> LivenessAnswer:
    return LivenessAnswer(
        kept["serial"],
        tasks_of(int(kept["members"], 16)),
        tuple(Living(*living) for living in kept["living"]),
        {task_id: Sending(life, number) for task_id, life, number in kept["answered"]},
    )


def _barrier_rows(name: str, machine: Machine, wall_offset_s: float) -> list[Row]:
    """Returns what has changed of one barrier: of an open one the arrivals alone, unless it is
    new.
    """
    barrier = machine.barriers.open.get(name) or machine.barriers.finished.get(name)
    if barrier is None:
        return [Row(BARRIER, name, None)]
    rows = []
    if barrier.done or barrier.renumbered:
        rows.append(Row(BARRIER, name, _barrier(barrier, machine, wall_offset_s)))
    if barrier.unwritten:
        arrived = []
        for task_id in barrier.unwritten:
            life, at = barrier.arrived[task_id]
            arrived.append((task_id, life, at + wall_offset_s))
        part = {"name": name, "arrived": arrived}
        rows.append(Row(ARRIVED, barrier.row_key(barrier.parts), _json(part)))
    barrier.note_written()
    return rows


def _barrier(barrier: Barrier, machine: Machine, wall_offset_s: float) -> bytes:
    everyone = barrier.participants == machine.task_table.everyone
    kept = {
        "name": barrier.name,
        "participants": None if everyone else sorted(barrier.participants),
        "first": barrier.first,
        "counter": barrier.counter,
        "deadline": barrier.deadline + wall_offset_s,
        "opened": barrier.opened + wall_offset_s,
        "began": barrier.began,
        "former": barrier.former,
        "told": barrier.told,
        "previous": _outcome(barrier.previous),
        "outcome": _outcome(barrier.outcome),
    }
    return _json(_with_digits(kept))


def _load_barriers(
    machine: Machine, rows: dict[str, Any], parts: dict[str, Any], wall_offset_s: float
) -> None:
    barriers = {name: _load_barrier(machine, kept, wall_offset_s) for name, kept in rows.items()}
    for part in parts.values():
        arrived = {task_id: (life, at - wall_offset_s) for task_id, life, at in part["arrived"]}
        barriers[part["name"]].load_part(arrived)
    machine.barriers.load(barriers.values())


def _load_barrier(machine: Machine, kept: dict[str, Any], wall_offset_s: float) -> Barrier:
    named = kept["participants"]
    loaded = {
        "participants": machine.task_table.everyone if named is None else frozenset(named),
        "deadline": kept["deadline"] - wall_offset_s,
        "opened": kept["opened"] - wall_offset_s,
        "previous": _load_outcome(kept["previous"]),
        "outcome": _load_outcome(kept["outcome"]),
    }
    return Barrier(owner=machine.barriers, renumbered=False, **_with_bits(kept) | loaded)


# Sets of tasks as bits are hexadecimal in a row: Python writes no long numbers in decimal.
_BITS = frozenset({"members", "came", "absent", "former", "told"})


def _with_digits(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: f"{value:x}" if name in _BITS else value for name, value in fields.items()}


def _with_bits(kept: dict[str, Any]) -> dict[str, Any]:
    return {name: int(value, 16) if name in _BITS else value for name, value in kept.items()}


def _outcome(outcome: Outcome | None) -> dict[str, Any] | None:
    if outcome is None:
        return None
    status = _status(outcome.status)
    return _with_digits(asdict(replace(outcome, status=None))) | {"status": status}


def _load_outcome(kept: dict[str, Any] | None) -> Outcome | None:
    if kept is None:
        return None
    return Outcome(**_with_bits(kept) | {"status": _load_status(kept["status"])})


def _status(status: Status | None) -> dict[str, Any] | None:
    if status is None:
        return None
    # What a process last reported is with its task, and need not be with each error about it.
    missing = tuple(replace(each, progress=None) for each in status.missing)
    return _with_digits(asdict(replace(status, missing=missing)))


def _load_status(kept: dict[str, Any] | None) -> Status | None:
    if kept is None:
        return None
    loaded = {
        "code": Code(kept["code"]),
        "barrier": None if kept["barrier"] is None else tuple(kept["barrier"]),
        "missing": tuple(Missing(**each) for each in kept["missing"]),
    }
    return Status(**_with_bits(kept) | loaded)
