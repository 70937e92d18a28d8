"""How tests of checkpoints run several processes."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from holdfast.checkpoint.memory.pool import _Block
from holdfast.coordination import CoordinationClient, Timeouts
from holdfast.multihost import ClusterGroup
from holdfast.multihost.group.group_client import forget_group_client
from tests.support.cluster import Processes, free_port
from tests.support.in_process import serving
from tests.support.memory_client import MemoryClient, MemoryCoordinator
from tests.support.paths import program

T = TypeVar("T")


def together(
    script: Path, count: int, root: object, *arguments: object, **options: object
) -> Processes:
    """Starts `count` processes of a program that imports `joined`; `root` and `arguments` are its
    arguments.
    """
    own = [free_port(), root, *arguments]
    return Processes(script, count, arguments=own, **options)  # type: ignore[arg-type]


def run_together(
    script: Path,
    count: int,
    root: object,
    *arguments: object,
    timeout_s: float = 90,
    **options: object,
) -> list[str]:
    """Runs them to their end, asserts that all exit with 0, and returns what they printed."""
    with together(script, count, root, *arguments, **options) as processes:
        finished = processes.wait(timeout_s)
    report = "\n".join(
        f"--- process {i} (exit {f.code}):\n{f.output}" for i, f in enumerate(finished)
    )
    assert [f.code for f in finished] == [0] * count, report
    return [f.output for f in finished]


def claims_of(script: Path, scratch: Path, devices: int = 8) -> dict[str, str]:
    """Runs a program with devices of its own; returns the errors that it has printed, by claim."""
    with Processes(script, 1, arguments=[scratch], devices=devices) as processes:
        (finished,) = processes.wait(100)
    assert finished.code == 0, finished.output
    claims: dict[str, str] = json.loads(finished.output.splitlines()[-1])
    return claims


def run_in_turn(
    count: int, programs: Sequence[tuple[object, ...]], **options: object
) -> dict[str, list[str]]:
    """Runs programs one after the other in the same `count` processes, each given by its name, its
    root and its arguments. Returns what each printed, by name.
    """
    told = json.dumps([[str(word) for word in words] for words in programs])
    outputs = run_together(program("in_turn"), count, told, **options)  # type: ignore[arg-type]
    printed: dict[str, list[str]] = {}
    for output in outputs:
        for part in output.split("--- ")[1:]:
            name, _, text = part.partition("\n")
            printed.setdefault(name, []).append(text)
    return printed


def at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Makes calls in threads, all at the same time, and returns their values."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(lambda call: call(), calls))


@contextlib.contextmanager
def groups(count: int) -> Iterator[list[ClusterGroup]]:
    """Yields the group of each process of a job whose processes are threads of this one."""
    coordinator = MemoryCoordinator(count)
    clients = [MemoryClient(coordinator, index) for index in range(count)]
    try:
        yield _groups_of(clients)
    finally:
        coordinator.close()
        _forget(clients)


@contextlib.contextmanager
def served_groups(count: int) -> Iterator[list[ClusterGroup]]:
    """Yields the same over clients of a real service."""
    with serving(count) as service:
        clients = [
            CoordinationClient(service.address, index, timeouts=Timeouts(shutdown_s=20))
            for index in range(count)
        ]
        at_once([client.connect for client in clients])
        try:
            yield _groups_of(clients)
        finally:
            at_once([client.shutdown for client in clients])
            _forget(clients)


def _groups_of(clients: Sequence[Any]) -> list[ClusterGroup]:
    return [ClusterGroup(client, index, len(clients)) for index, client in enumerate(clients)]


def _forget(clients: Sequence[Any]) -> None:
    """Drops what this process keeps for a client, by its identity."""
    for client in clients:
        forget_group_client(client)


def pooled_blocks() -> int:
    """Returns how many blocks of the pool of memory are in use."""
    gc.collect()
    return sum(isinstance(each, _Block) for each in gc.get_objects())
