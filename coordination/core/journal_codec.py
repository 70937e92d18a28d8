"""The machine's state as rows of a journal, and back. Pure: the journal and the simulator's crashes use the same two functions.

A row is (table, key, value); a value of None says that the row is gone. Times are kept as wall time, which goes on while no service runs.
Waiting calls are not kept: clients ask again after an outage, with the same counters, and find the instance that they had arrived at.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, NamedTuple

from .barriers import Barrier, PreviousInstance
from .machine import Machine
from .status import Code, Missing, Status
from .task_table import Task, TaskState

META, TASK, KEY, BARRIER = "meta", "task", "key", "barrier"


class Row(NamedTuple):
    """One row of the journal."""

    table: str
    key: str
    value: bytes | None


def drain(machine: Machine, wall_offset_s: float) -> list[Row]:
    """Returns the rows that have changed since the last call. Wall time is the machine's time plus `wall_offset_s`."""
    rows = [Row(TASK, str(task_id), _task(machine.task_table.tasks[task_id])) for task_id in machine.task_table.dirty]
    rows += [Row(KEY, key, machine.keys.values.get(key)) for key in machine.keys.dirty]
    for name in machine.barriers.dirty:
        barrier = machine.barriers.open.get(name) or machine.barriers.finished.get(name)
        rows.append(Row(BARRIER, name, None if barrier is None else _barrier(barrier, machine, wall_offset_s)))
    if machine.task_table.dirty:
        meta = {"gathered": machine.registration.gathered, "version": machine.task_table.version, "error": _status(machine.error)}
        rows.append(Row(META, "state", _json(meta)))
    machine.task_table.dirty.clear()
    machine.keys.dirty.clear()
    machine.barriers.dirty.clear()
    return rows


def load(machine: Machine, rows: Iterable[Row], now: float, wall_offset_s: float) -> None:
    """Puts rows into a fresh machine. Connected tasks count as heard of just now: they cannot help our outage."""
    keys: dict[str, bytes] = {}
    barriers: list[Barrier] = []
    for table, key, value in rows:
        assert value is not None
        if table == KEY:
            keys[key] = value
        elif table == TASK:
            _load_task(machine, json.loads(value), now)
        elif table == BARRIER:
            barriers.append(_load_barrier(machine, json.loads(value), wall_offset_s))
        elif key == "state":
            meta = json.loads(value)
            machine.registration.gathered, machine.error = meta["gathered"], _load_status(meta["error"])
            machine.task_table.version = meta["version"]
    machine.keys.load(keys)
    machine.barriers.load(barriers)


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _task(task: Task) -> bytes:
    names = ("task_id", "agent", "session", "host", "pid", "version", "owner", "former")
    kept = {name: getattr(task, name) for name in names}
    progress = asdict(task.progress)
    return _json(kept | {"state": int(task.state), "error": _status(task.error), "seen": task.last_seen is not None, "progress": progress})


def _load_task(machine: Machine, kept: dict[str, Any], now: float) -> None:
    task = machine.task_table.tasks[kept["task_id"]]
    task.session, task.host, task.pid, task.version = kept["session"], kept["host"], kept["pid"], kept["version"]
    task.former = kept["former"]
    task.state, task.error, task.state_since = TaskState(kept["state"]), _load_status(kept["error"]), now
    task.last_seen = now if kept["seen"] else None
    for name, value in kept["progress"].items():
        setattr(task.progress, name, value)
    machine.task_table.set_agent(task, kept["agent"])
    machine.task_table.set_owner(task, kept["owner"])
    machine.task_table.connected_count += task.state is TaskState.CONNECTED
    if task.state in (TaskState.DISCONNECTED, TaskState.ERROR):
        machine.task_table.lost.add(task.task_id)


def _barrier(barrier: Barrier, machine: Machine, wall_offset_s: float) -> bytes:
    previous, everyone = barrier.previous, barrier.participants == machine.task_table.everyone
    kept = {
        "name": barrier.name,
        "participants": None if everyone else sorted(barrier.participants),
        "counter": barrier.counter,
        "deadline": None if barrier.deadline == math.inf else barrier.deadline + wall_offset_s,
        "opened": barrier.opened + wall_offset_s,
        "arrived": [(task_id, incarnation, when + wall_offset_s) for task_id, (incarnation, when) in barrier.arrived.items()],
        "former": list(barrier.former.items()),
        "past": None if previous is None else [previous.counter, _status(previous.status), list(previous.arrived.items())],
        "refusal": _status(barrier.status),
        "done": barrier.done,
    }
    return _json(kept)


def _load_barrier(machine: Machine, kept: dict[str, Any], wall_offset_s: float) -> Barrier:
    participants = machine.task_table.everyone if kept["participants"] is None else frozenset(kept["participants"])
    barrier = Barrier(kept["name"], participants, kept["counter"], machine.barriers, opened=kept["opened"] - wall_offset_s)
    barrier.deadline = math.inf if kept["deadline"] is None else kept["deadline"] - wall_offset_s
    barrier.arrived = {task_id: (incarnation, when - wall_offset_s) for task_id, incarnation, when in kept["arrived"]}
    barrier.former = dict(kept["former"])
    if kept["past"] is not None:
        counter, status, arrived = kept["past"]
        barrier.previous = PreviousInstance(counter, _load_status(status), dict(arrived))
    barrier.status, barrier.done = _load_status(kept["refusal"]), kept["done"]
    return barrier


def _status(status: Status | None) -> dict[str, Any] | None:
    return None if status is None else asdict(status)


def _load_status(kept: dict[str, Any] | None) -> Status | None:
    if kept is None:
        return None
    barrier = None if kept["barrier"] is None else tuple(kept["barrier"])
    missing = tuple(Missing(**each) for each in kept["missing"])
    return Status(**(kept | {"code": Code(kept["code"]), "barrier": barrier, "missing": missing}))
