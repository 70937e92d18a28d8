"""Batches come from a thread that works ahead; numpy holds the state, which changes in place."""

import itertools
import json
import queue
import sys
import threading
import time

import jax
import numpy as np

from holdfast import multihost
from holdfast.checkpoint import CheckpointManager, EveryNSteps, KeepLast

CENTRES = np.array([[0.0, 0.0], [5.0, 0.0], [0.0, 5.0]])


def prefetched(first):
    """Yields the batches from step `first` on."""
    ready = queue.Queue(maxsize=4)

    def work():
        for step in itertools.count(first):
            rng = np.random.default_rng(step)
            ready.put(CENTRES[rng.integers(0, 3, 12)] + rng.normal(size=(12, 2)))

    threading.Thread(target=work, name="prefetch", daemon=True).start()
    while True:
        yield ready.get()


def update(state, points):
    """One step of k-means on a stream; returns the mean distance."""
    distances = np.linalg.norm(points[:, None] - state["means"], axis=-1)
    for point, nearest in zip(points, distances.argmin(axis=1), strict=True):
        state["counts"][nearest] += 1
        state["means"][nearest] += (point - state["means"][nearest]) / state["counts"][nearest]
    return float(distances.min(axis=1).mean())


multihost.initialize()
state = {
    "means": np.array([[1.0, 1.0], [2.0, 1.0], [1.0, 2.0]]),
    "counts": np.zeros(3, np.int64),
    "note": "k-means",
}
first = 1
with CheckpointManager(sys.argv[1], save_policy=EveryNSteps(5), keep_policy=KeepLast(3)) as manager:
    if manager.latest_step() is not None:
        first = manager.latest_step() + 1
        state = manager.restore(first - 1, state)
        print(f"resumed from step {first - 1}", flush=True)
    for step, points in zip(range(first, int(sys.argv[2]) + 1), prefetched(first), strict=False):
        loss = update(state, points)
        if jax.process_index() == 0:
            print(f"step {step} loss {loss:.5f}", flush=True)
        manager.save(step, state, metrics={"loss": loss})
        if manager.reached_preemption(step):
            print(f"stops after step {step}", flush=True)
            break
        time.sleep(0.03)  # a larger batch
print("statistics", json.dumps(manager.statistics()))
multihost.shutdown()
