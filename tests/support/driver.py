"""Drives the service's pure machine by hand: numbered calls, their answers, and a clock that tests turn."""

from __future__ import annotations

import math
from typing import Any

from holdfast.coordination.core.barriers import Arrival
from holdfast.coordination.core.machine import Machine
from holdfast.coordination.core.status import Code, Status
from holdfast.coordination.limits import Config


class Driver:
    """A machine with its tasks connected over Sessions on hosts b0, b1, ..., and a clock to turn."""

    def __init__(self, count: int = 4, *, sessions: bool = True, **options: Any) -> None:
        self.now = 0.0
        self.config = Config(count, incarnation=7, heartbeat_timeout_s=10.0, **options)
        self.machine = Machine(self.config, self.now)
        self.calls = 0
        self.answers: dict[int, tuple[Any, Status | None]] = {}
        for task_id in range(count if sessions else 0):
            assert self.open(task_id) is None

    def open(self, task_id: int, life: int = 1) -> Status | None:
        return self.machine.registration.open_session(task_id, 100 * life + task_id, f"b{task_id}", 1, self.now)

    def call(self) -> int:
        self.calls += 1
        return self.calls

    def settle(self) -> dict[int, tuple[Any, Status | None]]:
        for completion in self.machine.completions:
            assert completion.call not in self.answers, "a call was answered twice"
            self.answers[completion.call] = (completion.value, completion.status)
        self.machine.completions.clear()
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
        self, task_id: int, name: str = "save/100", counter: int = 0, timeout_s: float = 5, ids: tuple[int, ...] = (), life: int = 1
    ) -> int:
        call = self.call()
        arrival = Arrival(call, task_id, 100 * life + task_id, name, counter, self.now + timeout_s, frozenset(ids))
        self.machine.barrier(arrival, self.now)
        self.settle()
        return call

    def code(self, call: int) -> Code | None:
        """Returns how a call ended, None while it waits."""
        if call not in self.answers:
            return None
        status = self.answers[call][1]
        return Code.OK if status is None else status.code

    def message(self, call: int) -> str:
        status = self.answers[call][1]
        assert status is not None
        return status.message

    def get(self, key: str, task_id: int = 0, timeout_s: float = math.inf, depends_on: tuple[int, ...] = ()) -> int:
        call = self.call()
        self.machine.keys.get(call, task_id, key, self.now, self.now + timeout_s, frozenset(depends_on))
        self.settle()
        return call

    def set(self, key: str, value: bytes, overwrite: bool = False) -> int:
        call = self.call()
        self.machine.keys.insert(call, key, value, overwrite)
        self.settle()
        return call

    def register(self, task_id: int, incarnation: int) -> int:
        call = self.call()
        self.machine.registration.register(call, task_id, incarnation, self.now)
        self.settle()
        return call
