"""Who lives, for whoever computes: pushed lists of processes, and blocks that all end alike.

What this can and cannot end. Our own waits that involve a dead process end at once. A device
collective in flight ends where the backend can end it: on GPU, which aborts its communicators; on
CPU with `--xla_cpu_collective_timeout_seconds`, which `initialize()` sets; on TPU not.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from holdfast.coordination import BarrierTimeout, CoordinationError

from ..group.barriers import deadline_of
from ..group.group_client import GroupClient, bounded_name, group_client_of
from ..group.peers import Health, ProcessHealth, lost
from ..group.runtime import current_group_client
from ..threads import on_thread

_log = logging.getLogger(__name__)


def health() -> Health:
    """Returns the health of this job's processes; alone, and over jaxlib's own client, it knows
    nobody.
    """
    try:
        group_client = current_group_client()
    except ValueError:
        group_client = group_client_of(None)
    return group_client.peers.keep_lives()


def live_processes(
    processes: Collection[int] | None = None, *, timeout_s: float | None = None
) -> dict[int, int]:
    """Returns {process: incarnation} of those of `processes` (None: all) that live.

    Every one of them gets the same answer. A barrier over the living: each of them has to call it,
    with the same processes, this one among them. Blocks for at most `timeout_s` (default 300).
    Raises BarrierTimeout naming who has not called it, CoordinatorLost, ValueError. Source of the
    meaning: GetAliveTasks of XLA's coordination service.
    """
    timeout_s = deadline_of(timeout_s).timeout_s
    members = sorted(range(jax.process_count()) if processes is None else set(processes))
    if jax.process_index() not in members:
        raise ValueError(
            f"live_processes of {members}: this is process {jax.process_index()}, which is not one"
            " of them"
        )
    if not 0 <= members[0] <= members[-1] < jax.process_count():
        raise ValueError(
            f"live_processes of {members}: the job has {jax.process_count()} processes, 0 to"
            f" {jax.process_count() - 1}"
        )
    if jax.process_count() == 1:
        return {0: 0}
    group_client = current_group_client()
    tasks = [group_client.task(process) for process in members]
    with group_client.errors("live_processes", "live_processes", timeout_s):
        answer = _live_tasks(group_client, tasks, timeout_s)
    living = {group_client.process(task): answer[task] for task in sorted(answer)}
    health().admit(living)
    return living


def _live_tasks(
    group_client: GroupClient, tasks: Sequence[int], timeout_s: float
) -> dict[int, int]:
    client: Any = group_client.client
    if group_client.pushes:
        answer: dict[int, int] = client.get_live_nodes(tasks, timeout_s=timeout_s)
        return answer
    # The call of jaxlib's own client has no timeout: it stays behind on its thread.
    asked = on_thread("live_processes", lambda: client.get_live_nodes(tasks))
    if not wait([asked], timeout_s).done:
        raise BarrierTimeout(
            f"live_processes did not end in {timeout_s:g} s: a living process has not called it",
            name="live_processes",
        )
    return dict(asked.result())


@dataclass(frozen=True)
class _Block:
    """A block of `live_devices`. `name` is the same in every process that began it, and no other
    block has it.
    """

    name: str
    members: Sequence[int]
    began: Mapping[int, int]  # process: incarnation

    @property
    def folder(self) -> str:
        """Where each process tells how the latest of its blocks ended."""
        return f"holdfast/live/{bounded_name('-'.join(map(str, self.members)))}"


def _begin_block(
    members: Sequence[int], began: Mapping[int, int], timeout_s: float | None
) -> _Block:
    group_client = current_group_client()
    # The number counts blocks since the latest start of one of them: all that a process knows that
    # was started again.
    lives = "-".join(f"{process}.{incarnation:x}" for process, incarnation in began.items())
    name = f"{'-'.join(map(str, members))}~{lives}"
    with group_client.call("block", name, deadline_of(timeout_s)) as call:
        return _Block(call.folder, members, began)


@contextmanager
def live_devices(
    devices: Sequence[jax.Device] | None = None, *, timeout_s: float | None = None
) -> Iterator[list[jax.Device]]:
    """Runs a block on those of `devices` (None: all) whose processes live.

    It has one outcome on every survivor. On entry it asks afresh who lives (jax.live_devices
    answers with what it knew at the end of the block before), and gives the devices in order of
    their ids. On exit it asks again: either the block ended well in every process that began it, or
    every survivor raises: ProcessLost when one died or was started again, the block's own exception
    where it raised, and CoordinationError (ABORTED) naming the process elsewhere. A process that
    came to the exit without having ended this block has failed it, too. Every living process enters
    with the same devices, some of them its own. Each end blocks for at most `timeout_s` (default
    300).
    """
    devices = jax.devices() if devices is None else devices
    members = sorted({device.process_index for device in devices})
    began = live_processes(members, timeout_s=timeout_s)
    block = _begin_block(members, began, timeout_s) if jax.process_count() > 1 else None
    failure: Exception | None = None
    try:
        yield sorted(
            (device for device in devices if device.process_index in began),
            key=lambda device: device.id,
        )
    except Exception as error:
        failure = error
    if block is not None:
        _end_alike(block, failure, timeout_s)
    if failure is not None:
        raise failure


def _exchange_ends(
    block: _Block, failure: Exception | None, timeout_s: float | None
) -> tuple[dict[int, int], dict[int, str]]:
    """Returns who lives after the block, and how it failed in each process where it did."""
    group_client = current_group_client()
    failed = f"{type(failure).__name__}: {failure}" if failure else ""
    # One key a process: who comes to the end of a block has read the ends of the one before.
    own = f"{block.name} {failed}".encode(errors="backslashreplace")
    group_client.set(f"{block.folder}/{jax.process_index()}", own)
    now = live_processes(block.members, timeout_s=timeout_s)
    told = group_client.list(block.folder)
    failures = {}
    for process in block.began:
        name, _, failed = told.get(str(process), b"").decode().partition(" ")
        if name != block.name:
            failures[process] = "it did not come to the end of this block"
        elif failed:
            failures[process] = failed
    return now, failures


def _end_alike(block: _Block, failure: Exception | None, timeout_s: float | None) -> None:
    """Reports how the block ended here, waits for all that live, and raises what concerns all."""
    now, failures = _exchange_ends(block, failure, timeout_s)
    ended = sorted(
        process for process, incarnation in block.began.items() if now.get(process) != incarnation
    )
    if ended:
        # A start within the block may not have been pushed yet.
        unheard = ProcessHealth(
            ended[0], "ERROR", block.began[ended[0]], "it died during the block"
        )
        raise lost("live_devices", health().failed().get(ended[0], unheard)) from failure
    if failures and failure is None:
        first = min(failures)
        raise CoordinationError(
            f"the block failed in process {first}: {failures[first]}", code="ABORTED"
        )
