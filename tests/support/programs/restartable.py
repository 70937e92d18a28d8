"""A trainer that outlives attempts: `restartable.py FOLDER STEPS [HABIT]`.

Each process writes a line of JSON for what happens into FOLDER/log. It dies by SIGKILL as files
called kill-GROUP-PROCESS-WHERE-STEP say: at that step or later, and after those of the groups
before. Process 1 has a habit.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import queue
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from holdfast import multihost
from holdfast.checkpoint import CheckpointManager, EveryNSteps, Local

FOLDER = Path(sys.argv[1])
STEPS = int(sys.argv[2])
HABIT = sys.argv[3] if len(sys.argv) > 3 else ""
ME = int(os.environ["HOLDFAST_PROCESS_ID"])
ATTEMPT = os.environ["HOLDFAST_ATTEMPT"]  # that this process was started in


def note(what: str, **more: Any) -> None:
    """Writes a line that stays whole beside those of others."""
    line = {"what": what, "process": ME, "pid": os.getpid(), "time_s": time.monotonic()} | more
    line["attempt"] = int(os.environ["HOLDFAST_ATTEMPT"])
    with (FOLDER / "log").open("a") as file:
        file.write(json.dumps(line) + "\n")


def open_files() -> Iterator[str]:
    """Yields what each descriptor stands for."""
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            yield os.readlink(f"/proc/self/fd/{descriptor}")


def usage() -> dict[str, int]:
    """Returns what a process must not have more of after each attempt."""
    gc.collect()
    files = list(open_files())
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "files": len(files),
        "sockets": sum(name.startswith("socket:") for name in files),
        "threads": threading.active_count(),
        "memory": pages * resource.getpagesize(),
    }


def began_s() -> float:
    """Returns when this process was started, on the clock of the notes."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    since_boot_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return since_boot_s + time.monotonic() - time.clock_gettime(time.CLOCK_BOOTTIME)


def die_if_told(where: str, step: int = 0) -> None:
    """Dies where a file of the first group that is left says so."""
    orders = sorted(FOLDER.glob("kill-*"))
    for order in orders:
        _, group, process, place, earliest = order.name.split("-")
        is_due = group == orders[0].name.split("-")[1] and step >= int(earliest)
        if is_due and (int(process), place) == (ME, where):
            order.unlink()
            note("dies", where=where, step=step)
            os.kill(os.getpid(), signal.SIGKILL)


def begin() -> Any:
    """Returns the state of step 0, sharded over all devices."""
    devices = np.array(jax.devices())
    sharding = NamedSharding(Mesh(devices, ("x",)), PartitionSpec("x"))
    shape = (len(devices) * 4,)
    weights = jax.make_array_from_callback(shape, sharding, lambda at: np.zeros(shape)[at])
    return {"w": weights, "step": jnp.zeros((), jnp.int32)}


@jax.jit
def advance(state: Any) -> Any:
    """Makes a step that needs every process."""
    return {"w": state["w"] + jnp.sum(state["w"]) * 1e-3 + 1, "step": state["step"] + 1}


def indulge(error: Exception) -> None:
    """Does what a process must not do when an attempt is over, where it has the habit."""
    if ME == 1 and HABIT == "swallows":
        while True:
            time.sleep(0.1)
    if ME == 1 and HABIT == "sleeps in C":
        ctypes.PyDLL(None).sleep(600)
    raise error


def wait_for_data(step: int) -> None:
    """Waits for a batch, which never comes to the one that has the habit."""
    if ME == 1 and HABIT == "waits for data" and step >= 11 and ATTEMPT == "1":
        queue.SimpleQueue[None]().get()  # the batch


def take_step(manager: CheckpointManager, step: int, state: Any) -> None:
    """Does what a trainer does after each step; says every ten steps what is saved."""
    die_if_told("step", step)
    if multihost.reached_preemption(step):
        sys.exit(75)
    manager.save(step, state)
    die_if_told("save", step)
    if step % 10 == 0:
        manager.wait_until_finished()
        note("saved", step=step)


def open_manager() -> Any:
    """Returns a manager for a block; one that the block leaves open, where all have that habit."""
    every = EveryNSteps(5)
    if HABIT != "leaves it open":
        return CheckpointManager(FOLDER / "root", save_policy=every)
    local = Local(FOLDER / f"host{ME}", save_policy=EveryNSteps(1), failure_domain=f"host{ME}")
    return contextlib.nullcontext(
        CheckpointManager(FOLDER / "root", save_policy=every, local=local)
    )


def train() -> float:
    """Trains to the last step, and returns what came of it."""
    coordinator = os.environ["HOLDFAST_COORDINATOR"]
    note("train", began_s=began_s(), coordinator=coordinator, **usage())
    state = begin()
    with open_manager() as manager:
        if manager.latest_step() is not None:
            die_if_told("restore")
            state = manager.restore(like=state)
        step = int(state["step"])
        note("begins", step=step)
        while step < STEPS:
            try:
                wait_for_data(step)
                state = jax.block_until_ready(advance(state))
                step = int(state["step"])
                take_step(manager, step, state)
            except Exception as error:
                indulge(error)
    return float(np.asarray(state["w"].addressable_shards[0].data)[0])


die_if_told("join")
note("ended", result=multihost.run_restartable(train))
