"""Drives the service's state machine by hand: numbered calls, their answers, and a clock that tests
turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from holdfast.coordination.core.barriers import Arrival
from holdfast.coordination.core.calls import Call
from holdfast.coordination.core.machine import Machine
from holdfast.coordination.core.status import Code, Status
from holdfast.coordination.core.task_table import Task
from holdfast.coordination.limits import Config
from holdfast.proto import session_pb2


class CountedLooks(list[Task]):
    """A list of tasks that counts how often somebody looks through it."""

    looks = 0

    def __iter__(self) -> Iterator[Task]:
        self.looks += 1
        return super().__iter__()


class Driver:
    """A machine with its tasks connected over Sessions on hosts b0, b1, ..., and a clock to
    turn.
    """

    def __init__(self, count: int = 4, *, sessions: bool = True, **options: Any) -> None:
        self.now = 0.0
        self.config = Config(count, incarnation=7, heartbeat_timeout_s=10.0, **options)
        self.machine = Machine(self.config, self.now)
        self.answers: dict[Call, tuple[Any, Status | None]] = {}
        for task_id in range(count if sessions else 0):
            assert self.open(task_id) is None

    def open(self, task_id: int, life: int = 1) -> Status | None:
        return self.machine.registration.open_session(
            task_id, 100 * life + task_id, f"b{task_id}", 1, self.now
        )

    def call(
        self,
        task_id: int = 0,
        timeout_s: float = math.inf,
        *,
        session: bool = True,
        incarnation: int = 0,
        **facts: Any,
    ) -> Call:
        """Returns a call of a task, by default over its Session."""
        task = self.machine.task_table.get(task_id)
        if task is not None:
            known = task.session if session and task.session else task.agent
            incarnation = incarnation or known
            life = self.machine.task_table.life_of(task_id, incarnation)
            facts = {"life": life} | facts
        return Call(
            self.machine.answers,
            task_id,
            self.now,
            incarnation=incarnation,
            session=session,
            deadline=self.now + timeout_s,
            **facts,
        )

    def make(
        self, event: Callable[[Call], None], task_id: int = 0, *limit_s: float, **facts: Any
    ) -> Call:
        """Makes a call, by which `event` drives the machine, and returns it."""
        call = self.call(task_id, *limit_s, **facts)
        event(call)
        self.settle()
        return call

    def report(self, task_id: int = 0, **fields: Any) -> Call:
        """Reports of a task's own work."""
        report = session_pb2.ReportRequest(**fields)
        return self.make(lambda call: self.machine.report(call, report), task_id)

    def value(self, call: Call) -> Any:
        """Returns what a call was answered with; it must have succeeded."""
        value, status = self.answers[call]
        assert status is None, status
        return value

    def settle(self) -> dict[Call, tuple[Any, Status | None]]:
        for call in self.machine.take_answers():
            assert call not in self.answers, "a call was answered twice"
            self.answers[call] = (call.value, call.status)
        return self.answers

    def wait(self, seconds: float, beating: tuple[int, ...] = ()) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + 0.5)
            for task_id in beating:
                self.machine.seen(task_id, self.now)
            self.machine.tick(self.now)
        self.settle()

    def barrier(
        self,
        task_id: int,
        name: str = "save/100",
        counter: int = 0,
        timeout_s: float = 5,
        ids: tuple[int, ...] = (),
        life: int = 1,
    ) -> Call:
        incarnation = 100 * life + task_id
        return self.make(
            lambda call: self.machine.barrier(Arrival(call, name, counter, frozenset(ids))),
            task_id,
            timeout_s,
            incarnation=incarnation,
        )

    def code(self, call: Call) -> Code | None:
        """Returns how a call ended, None while it waits."""
        if call not in self.answers:
            return None
        status = self.answers[call][1]
        return Code.OK if status is None else status.code

    def message(self, call: Call) -> str:
        status = self.answers[call][1]
        assert status is not None
        return status.message

    def get(
        self,
        key: str,
        task_id: int = 0,
        timeout_s: float = math.inf,
        depends_on: tuple[int, ...] = (),
    ) -> Call:
        return self.make(
            lambda call: self.machine.keys.get(call, key),
            task_id,
            timeout_s,
            depends_on=frozenset(depends_on),
        )

    def set(self, key: str, value: bytes, overwrite: bool = False) -> Call:
        return self.make(lambda call: self.machine.keys.insert(call, key, value, overwrite))

    def register(self, task_id: int, incarnation: int) -> Call:
        return self.make(
            self.machine.registration.register, task_id, session=False, incarnation=incarnation
        )
