"""A process of part e: joins, waits at barriers, trains, and says each step to who measures.

two_worker.py collective            sums over both devices once
two_worker.py train PIPE FOLDER STEPS SAVE_EVERY BARRIERS [collective] [stays]
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast import multihost
from holdfast.checkpoint import CheckpointManager, EveryNSteps, KeepLast

BORN_S = time.monotonic()
ELEMENTS = 1 << 20
STEP_S = 0.05
TIMEOUT_S = 60


def make_sharded() -> Any:
    """Returns zeros, an equal part on the device of each process."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(jax.devices(), ("process",))
    sharding = NamedSharding(mesh, PartitionSpec("process"))
    shape = (jax.device_count(), ELEMENTS)
    return jax.jit(lambda: jnp.zeros(shape, jnp.int32), out_shardings=sharding)()


def sum_once() -> None:
    """Sums over both devices."""
    import jax

    multihost.initialize(timeout_s=TIMEOUT_S)
    found = jax.jit(lambda value: (value + 1).sum())(make_sharded())
    assert int(found) == ELEMENTS * jax.device_count(), int(found)
    print("COLLECTIVE", flush=True)
    multihost.shutdown()


class Marks:
    """Says what happens to who measures: a line each."""

    def __init__(self, pipe: str) -> None:
        self._pipe = Path(pipe)

    def add(self, name: str, **more: Any) -> None:
        mark = {
            "name": name,
            "attempt": int(os.environ["HOLDFAST_ATTEMPT"]),
            "process": int(os.environ["HOLDFAST_PROCESS_ID"]),
            "pid": os.getpid(),
            "time_s": time.monotonic(),
        }
        with self._pipe.open("a") as file:
            file.write(json.dumps(mark | more) + "\n")


@dataclass(frozen=True)
class Work:
    """What a process trains: `sums` adds over both devices in each step."""

    folder: str
    steps: int
    save_every: int
    barriers: int
    sums: bool


def train(marks: Marks, work: Work) -> None:
    """Trains to the last step: step n adds n to each element."""
    import jax

    memory = jax.local_devices()[0].memory_stats() or {}
    marks.add("joined", born_s=BORN_S, limit_bytes=memory.get("bytes_limit", 0))
    waits = []
    for _ in range(work.barriers):
        began = time.perf_counter()
        multihost.sync_global_processes("measured", timeout=TIMEOUT_S)
        waits.append(time.perf_counter() - began)
    if waits:
        marks.add("barriers", median_s=statistics.median(waits))
    state = {"sum": make_sharded(), "step": 0}
    add = jax.jit(lambda value, step: value + step, donate_argnums=0)
    total = jax.jit(lambda value: value[:, 0].sum())
    options: dict[str, Any] = {
        "save_policy": EveryNSteps(work.save_every),
        "keep_policy": KeepLast(2),
    }
    with CheckpointManager(work.folder, **options) as manager:
        if manager.latest_step() is not None:
            state = manager.restore(like=state)
        marks.add("restored", step=state["step"])
        for step in range(state["step"] + 1, work.steps + 1):
            began = time.monotonic()
            state = {"sum": add(state["sum"], step), "step": step}
            jax.block_until_ready(total(state["sum"]) if work.sums else state["sum"])
            if multihost.reached_preemption(step):
                break
            manager.save(step, state)
            marks.add("step", step=step)
            time.sleep(max(0.0, began + STEP_S - time.monotonic()))
    (shard,) = state["sum"].addressable_shards
    is_right = bool((shard.data == work.steps * (work.steps + 1) // 2).all())
    marks.add("end", step=state["step"], is_right=is_right)


def main() -> None:
    if sys.argv[1] == "collective":
        sum_once()
        return
    _, pipe, folder, *rest = sys.argv[1:]
    steps, save_every, barriers = map(int, rest[:3])
    marks = Marks(pipe)

    def attempt() -> None:
        # The barriers are measured once.
        is_first = os.environ["HOLDFAST_ATTEMPT"] == "1"
        counted = barriers if is_first else 0
        train(marks, Work(folder, steps, save_every, counted, "collective" in rest))

    if "stays" in rest:
        multihost.run_restartable(attempt, timeout_s=TIMEOUT_S)
    else:
        multihost.initialize(timeout_s=TIMEOUT_S)
        attempt()
        multihost.shutdown()


if __name__ == "__main__":
    main()
