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
import multiprocessing
import os
import queue
import resource
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from holdfast import multihost
from holdfast.checkpoint import CheckpointManager, EveryNSteps, Local, register_storage
from holdfast.checkpoint.storage.base import Part
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.multihost.job import current_job

FOLDER = Path(sys.argv[1])
STEPS = int(sys.argv[2])
HABIT = sys.argv[3] if len(sys.argv) > 3 else ""
ME = int(os.environ["HOLDFAST_PROCESS_ID"])
ATTEMPT = os.environ["HOLDFAST_ATTEMPT"]  # that this process was started in
LATE_LINK = FOLDER / "late-link"
COMES_S = 15.0  # in which all others have come, where one has the habit of coming late
CLIENTS = weakref.WeakSet[Any]()  # of all attempts so far


def note(what: str, **more: Any) -> None:
    """Writes a line that stays whole beside those of others."""
    number = int(os.environ["HOLDFAST_PROCESS_ID"])  # another one where the job has gone on smaller
    line = {"what": what, "process": number, "pid": os.getpid(), "time_s": time.monotonic()} | more
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
    CLIENTS.add(current_job().client)
    files = list(open_files())
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "files": len(files),
        "sockets": sum(name.startswith("socket:") for name in files),
        "threads": threading.active_count(),
        "clients": len(CLIENTS),
        "memory": pages * resource.getpagesize(),
    }


def began_s() -> float:
    """Returns when this process was started, on the clock of the notes."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    since_boot_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return since_boot_s + time.monotonic() - time.clock_gettime(time.CLOCK_BOOTTIME)


def die_if_told(where: str, step: int = 0) -> None:
    """Dies where a file of the first group that is left says so; has a notice at "notice"."""
    orders = sorted(FOLDER.glob("kill-*"))
    for order in orders:
        _, group, process, place, earliest = order.name.split("-")
        is_due = group == orders[0].name.split("-")[1] and step >= int(earliest)
        if is_due and (int(process), place) == (ME, where):
            order.unlink()
            note("dies", where=where, step=step)
            if HABIT == "takes its folder along":
                os.rmdir(os.getcwd())
            os.kill(os.getpid(), signal.SIGTERM if where == "notice" else signal.SIGKILL)


def begin() -> Any:
    """Returns the state of step 0, sharded over all devices."""
    devices = np.array(jax.devices())
    sharding = NamedSharding(Mesh(devices, ("x",)), PartitionSpec("x"))
    shape = (len(devices) * (1 << 18 if HABIT == "is large" else 4),)
    kind: type = float
    if HABIT.startswith("is of any size"):
        shape = (12,)
        kind = np.int32
    weights = jax.make_array_from_callback(shape, sharding, lambda at: np.zeros(shape, kind)[at])
    return {"w": weights, "step": jnp.zeros((), jnp.int32)}


@jax.jit
def advance(state: Any) -> Any:
    """Makes a step that needs every process."""
    weights = state["w"]
    if weights.dtype == jnp.int32:  # the same to the bit, however many add it up
        mixed = 3 * weights + jnp.sum(weights) + jnp.flip(weights) + 1
        return {"w": mixed, "step": state["step"] + 1}
    mixed = weights + jnp.sum(weights) * 1e-3 + jnp.flip(weights) * 1e-3 + 1  # all is sent
    return {"w": mixed, "step": state["step"] + 1}


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
    if ME != 1 or step < 11 or ATTEMPT != "1":
        return
    if HABIT == "waits for data":
        queue.SimpleQueue[None]().get()  # the batch
    if HABIT == "waits for a worker":
        context = multiprocessing.get_context("spawn")
        batches = context.SimpleQueue()
        worker = context.Process(target=time.sleep, args=(600,), daemon=True)
        worker.start()
        note("worker", worker=worker.pid)
        batches.get()


class HangingStorage(LocalStorage):
    """A folder in which a call for step 15 never returns, where the process has that habit."""

    def write(self, name: str, size: int, parts: Iterable[Part]) -> None:
        if HABIT == "its write hangs" and ME in (1, 2) and self._hangs(name):
            threading.Event().wait()
        super().write(name, size, parts)

    def _publish(self, source: Path, path: Path, made: os.stat_result, replace: bool) -> None:
        if HABIT == "its commit hangs" and ME == 0 and self._hangs(f"{path.parent.name}/"):
            LATE_LINK.write_text(json.dumps([str(source), str(path)]))
            threading.Event().wait()
        super()._publish(source, path, made, replace)

    def _hangs(self, name: str) -> bool:
        return ATTEMPT == "1" and name.startswith("15/")


def link_late() -> None:
    """Does the link at last that hung in an attempt before, as a server of files may."""
    if ME != 2 or not LATE_LINK.exists():
        return
    source, path = json.loads(LATE_LINK.read_text())
    LATE_LINK.unlink()
    try:
        os.link(source, path)
        note("late link", error="")
    except OSError as error:
        note("late link", error=type(error).__name__)


def result_of(state: Any) -> float:
    """Returns what training has come to."""
    return float(np.asarray(state["w"].addressable_shards[0].data)[0])


def last_step() -> int:
    """Returns the last step: what a file says that somebody makes well before that step."""
    told = FOLDER / "last"
    return int(told.read_text()) if told.exists() else STEPS


def take_step(manager: CheckpointManager, step: int, state: Any) -> bool:
    """Does what a trainer does after each step; says every ten steps what is saved. Returns whether
    it is to stop.
    """
    if HABIT.endswith("hangs") and step == 17 and ATTEMPT == "1":
        time.sleep(2.0)  # until all that does not hang of the save is done
    die_if_told("step", step)
    die_if_told("notice", step)
    manager.save(step, state)
    die_if_told("save", step)
    stops = manager.reached_preemption(step)
    if step % 10 == 0 or stops:
        manager.wait_until_finished()
        note("saved", step=step, result=result_of(state))
    return stops


def open_manager() -> Any:
    """Returns a manager for a block; one that the block leaves open, where all have that habit."""
    every = EveryNSteps(5)
    if HABIT.endswith("hangs"):
        return CheckpointManager(f"hangs://{FOLDER}/root", save_policy=every)
    if HABIT not in ("leaves it open", "is of any size, in memory"):
        return CheckpointManager(FOLDER / "root", save_policy=every)
    local = Local(FOLDER / f"host{ME}", save_policy=EveryNSteps(1), failure_domain=f"host{ME}")
    manager = CheckpointManager(FOLDER / "root", save_policy=every, local=local)
    return manager if HABIT != "leaves it open" else contextlib.nullcontext(manager)


def train() -> float | None:
    """Trains to the last step, and returns what came of it; None where it is to stop before."""
    coordinator = os.environ["HOLDFAST_COORDINATOR"]
    note("train", began_s=began_s(), coordinator=coordinator, **usage())
    state = begin()
    with open_manager() as manager:
        if manager.latest_step() is not None:
            die_if_told("restore")
            state = manager.restore(like=state)
        link_late()
        step = int(state["step"])
        note("begins", step=step)
        while step < last_step():
            try:
                wait_for_data(step)
                state = advance(state)  # which nobody waits for: the devices are behind
                step += 1
                if take_step(manager, step, state) and step < last_step():
                    return None
            except Exception as error:
                indulge(error)
    return result_of(state)


register_storage("hangs", lambda url, _: HangingStorage(url.removeprefix("hangs://")))
if __name__ == "__main__":  # not in a worker of its own
    die_if_told("join")
    settings = {}
    if HABIT == "comes late":
        settings["timeout_s"] = COMES_S
        time.sleep(0.0 if ATTEMPT == "1" else 1.3 * COMES_S)
    come_to = multihost.run_restartable(train, **settings)
    if come_to is None:
        note("left")
    else:
        note("ended", result=come_to)
