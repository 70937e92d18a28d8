"""jax's profiler around three steps, and a tracker that hears of each step and of each save.

Both write into the folder of the run, beside its steps.
"""

import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from holdfast import multihost
from holdfast.checkpoint import CheckpointManager, EveryNSteps, KeepLast


class Tracker:
    """Stands for wandb, MLflow and the like."""

    def __init__(self, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("a", buffering=1)

    def log(self, step, **values):
        self.file.write(json.dumps({"step": step, "time": time.time(), **values}) + "\n")


class Profile:
    """Profiles the steps from `first` to `last`."""

    def __init__(self, folder, first, last):
        self.folder = folder
        self.first = first
        self.last = last
        self.running = False

    def before(self, step):
        if step == self.first:
            jax.profiler.start_trace(self.folder)
            self.running = True

    def after(self, step):
        if self.running and step == self.last:
            self.close()

    def close(self):
        if self.running:
            jax.profiler.stop_trace()
            self.running = False


@jax.jit
def train(w, x):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((jnp.sin(x @ w) - x[:, 0]) ** 2))(w)
    return w - 0.1 * grad, loss


multihost.initialize()
folder = Path(sys.argv[1])
tracker = Tracker(folder / "tracker" / f"process-{jax.process_index()}.jsonl")
profile = Profile(folder / "plugins", first=7, last=9)
w = jnp.ones(4) / 4
first = 1
with CheckpointManager(folder, save_policy=EveryNSteps(5), keep_policy=KeepLast(3)) as manager:
    if manager.latest_step() is not None:
        first = manager.latest_step() + 1
        w = manager.restore(first - 1, w)
        print(f"resumed from step {first - 1}", flush=True)
    for step in range(first, int(sys.argv[2]) + 1):
        profile.before(step)
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            x = np.random.default_rng(step).normal(size=(12, 4)).astype(np.float32)
            w, loss = train(w, x)
        if jax.process_index() == 0:
            print(f"step {step} loss {loss:.5f}", flush=True)
        tracker.log(step, loss=float(loss))
        if handle := manager.save(step, w, metrics={"loss": float(loss)}):
            handle.on_commit(lambda saved: tracker.log(saved, saved=True))
        profile.after(step)
        if manager.reached_preemption(step):
            print(f"stops after step {step}", flush=True)
            break
        time.sleep(0.03)  # a larger model's step
profile.close()
print("statistics", json.dumps(manager.statistics()))
multihost.shutdown()
