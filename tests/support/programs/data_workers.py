"""A trainer whose batches come from a worker process: `data_workers.py LOADER WAY ROOT`. LOADER is
`grain`, or `torch_like`, which ends and fails as torch's DataLoader does. The worker `dies` by
SIGTERM, or `ignores` it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from holdfast import multihost
from holdfast.checkpoint import CheckpointManager, EveryNSteps

LOADER, WAY, ROOT = sys.argv[1:]


def load(number: int) -> int:
    time.sleep(0.1)
    return number


def ignore(*_: object) -> None:
    if WAY == "ignores":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def work(batches: Any, done: Any) -> None:
    ignore()
    number = 0
    while not done.is_set():
        batches.put(load(number))
        number += 1
    batches.cancel_join_thread()


def torch_like() -> Iterator[int]:
    context = multiprocessing.get_context("spawn")
    batches = context.Queue(1)
    done = context.Event()
    worker = context.Process(target=work, args=(batches, done), daemon=True)
    worker.start()
    try:
        while True:
            try:
                yield batches.get(timeout=0.2)
            except queue.Empty:
                if not worker.is_alive():
                    raise RuntimeError(f"the data worker ended with {worker.exitcode}") from None
    finally:
        done.set()
        while worker.is_alive():
            with contextlib.suppress(queue.Empty):
                batches.get(timeout=0.2)


def of_grain() -> Iterator[int]:
    import grain
    from absl import flags

    flags.FLAGS(["x"])
    read = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
    workers = grain.MultiprocessingOptions(num_workers=1, per_worker_buffer_size=1)
    numbers = grain.MapDataset.range(100_000).map(load).to_iter_dataset(read)
    return iter(numbers.mp_prefetch(workers, worker_init_fn=ignore))


def train() -> None:
    multihost.initialize()
    batches = of_grain() if LOADER == "grain" else torch_like()
    with CheckpointManager(ROOT, save_policy=EveryNSteps(5)) as manager:
        state = {"w": jnp.zeros(4)}
        for step in range(1, 100_000):
            state["w"] += next(batches)
            manager.save(step, state)
            if step == 7:
                manager.wait_until_finished()
                multihost.default_group().report(step=step)
                print("step 7", flush=True)
            # A notice that comes here is heard at the next step: it needs its batch.
            if multihost.reached_preemption(step):
                manager.wait_until_finished()
                if LOADER != "grain":
                    batches.close()  # type: ignore[attr-defined]
                print("left at", step, flush=True)
                sys.exit(75)


if __name__ == "__main__":
    train()
