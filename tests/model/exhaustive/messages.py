"""A group of processes in one execution: each message is a step, and each wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.coordination import BarrierTimeout, ProcessLost

from .scheduler import OK, READ, WRITE, Access, current_task
from .world import World

TIMES_OUT = "no answer in time"


class Post:
    """What the processes of one group have sent each other, by name and call."""

    def __init__(self, world: World, names: Sequence[str]) -> None:
        self.world = world
        self.names = list(names)
        self.sent: dict[tuple[str, int, int], bytes] = {}  # by name, number of the call and rank


class ModelGroup:
    """One process's view of a group: see `holdfast.multihost.Group`."""

    def __init__(self, post: Post, index: int) -> None:
        self._post = post
        self.index = index
        self.count = len(post.names)
        self.processes = list(range(self.count))
        self._calls: dict[str, int] = {}

    def _number(self, name: str) -> int:
        self._calls[name] = self._calls.get(name, 0) + 1
        return self._calls[name]

    def _send(self, name: str, number: int, value: bytes) -> None:
        task = current_task()
        assert task is not None
        key: Access = (("sent", name, number, self.index), WRITE)
        world = self._post.world
        verb = name.rpartition("/")[2]
        variant = world.step(task, f"sends {verb}", (key,), (TIMES_OUT,))
        if variant != OK:
            raise BarrierTimeout(f"{name}: it could not be sent", name=name, missing=())
        self._post.sent[name, number, self.index] = value

    def _wait(self, name: str, number: int, ranks: Sequence[int]) -> None:
        post = self._post
        run = post.world.run
        task = current_task()
        assert task is not None
        missing = [rank for rank in ranks if rank != self.index]

        def have_come() -> bool:
            return all((name, number, rank) in post.sent for rank in missing)

        def lost() -> list[int]:
            return [
                rank
                for rank in missing
                if (name, number, rank) not in post.sent and post.names[rank] in run.dead
            ]

        def is_over() -> bool:
            return have_come() or bool(lost())

        accesses: list[Access] = []
        for rank in missing:
            accesses.append((("sent", name, number, rank), READ))
            accesses.append((("alive", post.names[rank]), READ))
        verb = name.rpartition("/")[2]
        label = f"waits for {verb}"
        faults = (TIMES_OUT,)
        variant = post.world.step(
            task, label, accesses, faults, ready=is_over, can_time_out=not post.world.is_serial
        )
        if variant == OK and have_come():
            return
        if variant == OK and (dead := lost()):
            raise ProcessLost(f"{name}: process {dead[0]} is lost", process=dead[0])
        absent = [rank for rank in missing if (name, number, rank) not in post.sent]
        if variant == OK:
            run.actual = None  # nobody could go on: time has passed for all
        raise BarrierTimeout(f"{name}: no answer in time", name=name, missing=absent)

    def barrier(self, name: str, *, timeout_s: float) -> None:
        """Waits until every process has called it."""
        number = self._number(name)
        self._send(name, number, b"")
        self._wait(name, number, range(self.count))

    def gather(self, name: str, value: bytes, *, timeout_s: float) -> list[bytes] | None:
        """Sends a value to rank 0, which gets all."""
        number = self._number(name)
        self._send(name, number, value)
        self._wait(name, number, range(self.count))
        if self.index:
            return None
        return [self._post.sent[name, number, rank] for rank in range(self.count)]

    def broadcast(self, name: str, value: bytes | None, *, timeout_s: float) -> bytes:
        """Returns rank 0's value everywhere."""
        number = self._number(name)
        if self.index == 0:
            assert value is not None
            self._send(name, number, value)
            return value
        self._wait(name, number, [0])
        return self._post.sent[name, number, 0]

    def report(self, **progress: Any) -> None:
        """Reports to nobody."""
