"""A process of a launched job that joins its coordinator: `launched_joined.py ROLE ...`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from holdfast.coordination import CoordinationClient, HoldfastError, Timeouts

ADDRESS = os.environ["HOLDFAST_COORDINATOR"]
ATTEMPT = int(os.environ["HOLDFAST_ATTEMPT"])
ME = int(os.environ["HOLDFAST_PROCESS_ID"])


def join() -> CoordinationClient:
    """Returns a client that stays open."""
    client = CoordinationClient(ADDRESS, ME, timeouts=Timeouts(init_s=60))
    client.connect()
    return client


def meet() -> None:
    """Joins, and waits for the others."""
    join().wait_at_barrier("all", 60_000)


def stand_still() -> None:
    """Process 1 stands still after it has joined; the others say what they hear of it."""
    client = join()
    if ME == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        client.wait_at_barrier("all", 60_000)
    except HoldfastError as error:
        print(type(error).__name__, error, flush=True)
        os._exit(7)


def get_sigterm() -> None:
    """Process 1 gets a SIGTERM after all have joined."""
    meet()
    if ME == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(600)


def signal_coordinator(number: str) -> None:
    """Process 0 signals the coordinator, before the launcher has looked who joined."""
    if ATTEMPT == 2:
        sys.exit(0)
    meet()
    if ME == 0:
        job = Path(ADDRESS.removeprefix("unix:")).parent / "job"
        os.kill(json.loads(job.read_text())["pid"], int(number))
    time.sleep(600)


def report_until(file: str) -> None:
    """Reports a step, and fails in attempt 1; attempt 2 ends when the file is there."""
    with CoordinationClient(ADDRESS, ME) as client:
        client.report(step=7 * ATTEMPT)
        while ATTEMPT == 2 and not os.path.exists(file):
            time.sleep(0.05)
        sys.exit(3 if ATTEMPT == 1 else 0)


def end_unseen(file: str) -> None:
    """Ends in order once the file is there, and leaves a file of its own beside it."""
    with CoordinationClient(ADDRESS, ME) as client:
        print("ready", flush=True)
        while not os.path.exists(file):
            time.sleep(0.02)
        client.report(step=40)
    Path(file).with_name(str(ME)).touch()


def run_unmodified_jax() -> None:
    """A program of jax's own, but for its process's number."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # type: ignore[no-untyped-call]
    count = int(os.environ["HOLDFAST_NUM_PROCESSES"])
    jax.distributed.initialize(num_processes=count, process_id=ME)
    gathered = multihost_utils.process_allgather(np.float32(ME))
    assert list(gathered) == list(range(count))
    multihost_utils.sync_global_devices("all")
    print(os.environ["JAX_COORDINATOR_ADDRESS"])
    jax.distributed.shutdown()  # type: ignore[no-untyped-call]


ROLES = {
    role.__name__: role
    for role in (
        get_sigterm,
        stand_still,
        signal_coordinator,
        report_until,
        end_unseen,
        run_unmodified_jax,
    )
}

if __name__ == "__main__":
    ROLES[sys.argv[1]](*sys.argv[2:])
