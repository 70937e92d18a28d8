"""The machine's state as rows of a journal, and back. Pure: the journal and the simulator's crashes
use the same two functions.

A row is (table, key, value); a value of None says that the row is gone. Times are kept as wall
time, which goes on while no service runs. Waiting calls are not kept: clients ask again after an
outage, with the same counters, and find the instance that they had arrived at.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, NamedTuple

from .barriers import Barrier, Outcome
from .events import Event
from .machine import Machine
from .status import Code, Missing, Status
from .task_table import Task, TaskState

META = "meta"
TASK = "task"
KEY = "key"
BARRIER = "barrier"
ARRIVED = "arrived"
EVENT = "event"


class Row(NamedTuple):
    """One row of the journal."""

    table: str
    key: str
    value: bytes | None


def drain(machine: Machine, wall_offset_s: float) -> list[Row]:
    """Returns the rows that have changed since the last call. Wall time is the machine's time plus
    `wall_offset_s`.
    """
    rows = [
        Row(TASK, str(task_id), _task(machine.task_table.tasks[task_id]))
        for task_id in machine.task_table.dirty
    ]
    rows += [Row(KEY, key, machine.keys.values.get(key)) for key in machine.keys.dirty]
    rows += [
        Row(ARRIVED, _part(over, number), None)
        for over in machine.barriers.dropped_parts
        for number in range(over.parts)
    ]
    rows += [Row(EVENT, str(number), None) for number in machine.events.dropped]
    rows += [
        Row(EVENT, str(event.number), _event(event, wall_offset_s))
        for event in machine.events.added
    ]
    machine.events.forget_changes()
    for name in machine.barriers.dirty:
        rows += _barrier_rows(name, machine, wall_offset_s)
    if machine.task_table.dirty:
        meta = {
            "gathered": machine.registration.gathered,
            "version": machine.task_table.version,
            "error": _status(machine.error),
        }
        rows.append(Row(META, "state", _json(meta)))
    machine.task_table.dirty.clear()
    machine.keys.dirty.clear()
    machine.barriers.dirty.clear()
    machine.barriers.dropped_parts.clear()
    return rows


def load(machine: Machine, rows: Iterable[Row], now: float, wall_offset_s: float) -> None:
    """Puts rows into a fresh machine. Connected tasks count as heard of just now: they cannot help
    our outage.
    """
    keys: dict[str, bytes] = {}
    barriers: dict[str, Barrier] = {}
    parts: list[bytes] = []
    events: list[Event] = []
    version = 0
    task_table = machine.task_table
    for table, key, value in rows:
        assert value is not None
        if table == KEY:
            keys[key] = value
        elif table == TASK:
            _load_task(machine, json.loads(value), now)
        elif table == BARRIER:
            barriers[key] = _load_barrier(machine, json.loads(value), wall_offset_s)
        elif table == EVENT:
            events.append(_load_event(json.loads(value), wall_offset_s))
        elif table == ARRIVED:
            parts.append(value)
        elif key == "state":
            meta = json.loads(value)
            machine.registration.gathered, machine.error = (
                meta["gathered"],
                _load_status(meta["error"]),
            )
            version = meta["version"]
    task_table.version = version  # last: agents that are set raise it
    task_table.latest_life = max(
        max(task.agent_since, task.session_since) for task in task_table.tasks
    )
    machine.keys.load(keys)
    for part in parts:
        kept = json.loads(part)
        barrier = barriers[kept["name"]]
        barrier.arrived |= {
            task_id: (life, when - wall_offset_s) for task_id, life, when in kept["arrived"]
        }
        barrier.parts += 1
    machine.barriers.load(barriers.values())
    machine.events.load(events)


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _task(task: Task) -> bytes:
    names = (
        "task_id",
        "agent",
        "session",
        "host",
        "pid",
        "version",
        "ended",
        "owner",
        "former",
        "agent_since",
        "session_since",
    )
    kept = {name: getattr(task, name) for name in names}
    progress = asdict(task.progress)
    return _json(
        kept
        | {
            "state": int(task.state),
            "error": _status(task.error),
            "seen": task.last_seen is not None,
            "progress": progress,
        }
    )


def _load_task(machine: Machine, kept: dict[str, Any], now: float) -> None:
    task = machine.task_table.tasks[kept["task_id"]]
    for name in ("session", "host", "pid", "version", "ended", "former"):
        setattr(task, name, kept[name])
    machine.task_table.set_state(task, TaskState(kept["state"]))
    task.error, task.state_since = _load_status(kept["error"]), now
    task.last_seen = now if kept["seen"] else None
    for name, value in kept["progress"].items():
        setattr(task.progress, name, value)
    machine.task_table.set_agent(task, kept["agent"])
    task.agent_since = kept["agent_since"]
    task.session_since = kept["session_since"]
    machine.task_table.set_owner(task, kept["owner"])
    if task.state in (TaskState.DISCONNECTED, TaskState.ERROR):
        machine.task_table.lost.add(task.task_id)


def _event(event: Event, wall_offset_s: float) -> bytes:
    return _json(asdict(event) | {"at": event.at + wall_offset_s})


def _load_event(kept: dict[str, Any], wall_offset_s: float) -> Event:
    return Event(**kept | {"at": kept["at"] - wall_offset_s})


def _part(barrier: Barrier, number: int) -> str:
    return f"{barrier.first}/{number}/{barrier.name}"


def _barrier_rows(name: str, machine: Machine, wall_offset_s: float) -> list[Row]:
    """Returns what has changed of one barrier: of an open one the arrivals alone, unless it is
    new.
    """
    barrier = machine.barriers.open.get(name) or machine.barriers.finished.get(name)
    if barrier is None:
        return [Row(BARRIER, name, None)]
    rows = (
        [Row(BARRIER, name, _barrier(barrier, machine, wall_offset_s))]
        if barrier.done or barrier.renumbered
        else []
    )
    barrier.renumbered = False
    if barrier.unwritten:
        arrived = [
            (task_id, barrier.arrived[task_id][0], barrier.arrived[task_id][1] + wall_offset_s)
            for task_id in barrier.unwritten
        ]
        rows.append(
            Row(ARRIVED, _part(barrier, barrier.parts), _json({"name": name, "arrived": arrived}))
        )
        barrier.parts += 1
        barrier.unwritten = []
    return rows


def _barrier(barrier: Barrier, machine: Machine, wall_offset_s: float) -> bytes:
    everyone = barrier.participants == machine.task_table.everyone
    kept = {
        "name": barrier.name,
        "participants": None if everyone else sorted(barrier.participants),
        "first": barrier.first,
        "counter": barrier.counter,
        "deadline": None if barrier.deadline == math.inf else barrier.deadline + wall_offset_s,
        "opened": barrier.opened + wall_offset_s,
        "began": barrier.began,
        "former": _bits(barrier.former),
        "told": _bits(barrier.told),
        "previous": _outcome(barrier.previous),
        "outcome": _outcome(barrier.outcome),
    }
    return _json(kept)


def _load_barrier(machine: Machine, kept: dict[str, Any], wall_offset_s: float) -> Barrier:
    participants = (
        machine.task_table.everyone
        if kept["participants"] is None
        else frozenset(kept["participants"])
    )
    counters = (kept["first"], kept["counter"])
    opened = kept["opened"] - wall_offset_s
    barrier = Barrier(
        kept["name"], participants, *counters, machine.barriers, opened=opened, renumbered=False
    )
    barrier.deadline = math.inf if kept["deadline"] is None else kept["deadline"] - wall_offset_s
    barrier.began, barrier.former, barrier.told = (
        kept["began"],
        int(kept["former"], 16),
        int(kept["told"], 16),
    )
    barrier.previous, barrier.outcome = (
        _load_outcome(kept["previous"]),
        _load_outcome(kept["outcome"]),
    )
    return barrier


def _bits(bits: int) -> str:
    return f"{bits:x}"


def _outcome(outcome: Outcome | None) -> list[Any] | None:
    if outcome is None:
        return None
    sets = [_bits(bits) for bits in (outcome.members, outcome.came, outcome.absent)]
    return [outcome.first, outcome.counter, _status(outcome.status), *sets, outcome.ended]


def _load_outcome(kept: list[Any] | None) -> Outcome | None:
    if kept is None:
        return None
    first, counter, status, members, came, absent, ended = kept
    return Outcome(
        first,
        counter,
        _load_status(status),
        int(members, 16),
        int(came, 16),
        int(absent, 16),
        ended,
    )


def _status(status: Status | None) -> dict[str, Any] | None:
    return None if status is None else asdict(status)


def _load_status(kept: dict[str, Any] | None) -> Status | None:
    if kept is None:
        return None
    barrier = None if kept["barrier"] is None else tuple(kept["barrier"])
    missing = tuple(Missing(**(each | {"progress": None})) for each in kept["missing"])
    return Status(**(kept | {"code": Code(kept["code"]), "barrier": barrier, "missing": missing}))
