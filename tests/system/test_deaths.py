"""A death is known at once where somebody saw it, and in seconds where nobody did: each wait that needs the process ends by its name."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.coordination import CoordinationService
from tests.support.cluster import Processes

HEARTBEAT_S = 100.0
"""Far above all that is waited for here: no silence decides anything."""
HOLDFAST = Path(sys.executable).parent / "holdfast"

# argv: index, count, address, the program that starts the processes ("task", or "" for nobody), whose client, what the survivors wait for
WAITING = f"""
import json, os, sys, time
index, count, address, starter, whose = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6]
if starter and "HOLDFAST_COORDINATOR" not in os.environ:
    os.execv({str(HOLDFAST)!r}, ["holdfast", "task", "--coordinator", address, "--", sys.executable, *sys.argv])
last = count - 1
if whose == "ours":
    from holdfast.coordination import CoordinationClient
    client = CoordinationClient(address, index, num_processes=count, host=f"b{{index}}")
else:
    from jaxlib import _jax
    client = _jax.get_distributed_runtime_client(address, index, init_timeout=60, shutdown_timeout=1, heartbeat_timeout=86400)
client.connect()
waits = [
    lambda: client.wait_at_barrier("meet", 60_000),
    lambda: client.blocking_key_value_get("value", 60_000, **({{"depends_on": [last]}} if whose == "ours" else {{}})),
]
if index == last:
    print("pid", os.getpid(), flush=True)
    time.sleep(600)
client.key_value_set(f"waits/{{index}}", "")
print("waits", flush=True)
try:
    waits[index % 2]()
except Exception as error:
    print("failed", json.dumps([time.time(), type(error).__name__, str(error)]), flush=True)
os._exit(0)
"""


@contextmanager
def job(count: int, *arguments: str) -> Iterator[tuple[Processes, int]]:
    """Yields processes that wait for the last of them, and its number."""
    with CoordinationService.spawn(count, recoverable=True, survivable=True, heartbeat_timeout_s=HEARTBEAT_S) as service:
        ranks = [{"OMPI_COMM_WORLD_RANK": str(index), "OMPI_COMM_WORLD_SIZE": str(count)} for index in range(count)]
        with Processes(WAITING, count, arguments=[service.address, *arguments], env_of=ranks.__getitem__) as processes:
            processes.wait_for(count - 1, "pid ")
            for index in range(count - 1):
                processes.wait_for(index, "waits")
            yield processes, int(processes.output(count - 1).split("pid ")[1].split()[0])


def failures(processes: Processes, count: int) -> list[tuple[float, str, str]]:
    """Returns when and how the waits of the first `count` processes failed."""
    found = []
    for index in range(count):
        processes.wait_for(index, "failed")
        found.append(tuple(json.loads(processes.output(index).split("failed ", 1)[1].splitlines()[0])))
    return found


@pytest.mark.parametrize("whose", ["ours", "jaxlib's"])
def test_a_launcher_that_saw_an_exit_ends_every_wait_by_name(whose: str) -> None:
    """SIGKILL of one of three under `holdfast task`: a barrier and a blocking get fail with its name and why, a hundredth of the
    heartbeat timeout later, with our client and with jaxlib's own."""
    with job(3, "task", whose) as (processes, pid):
        killed_at = time.time()
        os.kill(pid, signal.SIGKILL)
        found = failures(processes, 2)
        assert processes.popens[2].wait(20) == 128 + signal.SIGKILL
    for failed_at, kind, message in found:
        print(f"{whose}: {failed_at - killed_at:.2f} s after SIGKILL: {kind}: {message}")
        assert "ended by signal 9" in message and "process 2" in message
        assert kind == ("ProcessLost" if whose == "ours" else "JaxRuntimeError")
        assert failed_at - killed_at < HEARTBEAT_S / 10
