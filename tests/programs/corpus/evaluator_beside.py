"""A trainer that starts an evaluator beside it: another process, which follows the saved steps."""

import json
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

from holdfast import multihost
from holdfast.checkpoint import CheckpointManager, EveryNSteps, KeepLast, Options, wait_for_new_step


def batch(step):
    x = np.random.default_rng(step).normal(size=(12, 5)).astype(np.float32)
    return x, x @ np.arange(5, dtype=np.float32)


def evaluate(folder):
    """Evaluates each new step until the trainer has gone, and then the last."""
    gone = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), gone.set()), daemon=True).start()
    step = None
    while True:
        is_last_look = gone.is_set()
        found = wait_for_new_step(folder, step, timeout_s=1.0)
        if found is not None:
            step = found
            with CheckpointManager(folder, options=Options(read_only=True)) as manager:
                w = manager.restore(step, np.zeros(5, np.float32), hold_s=60)
            x, y = batch(0)
            print(f"evaluated step {step}: {np.mean((x @ w - y) ** 2):.3f}", flush=True)
        if is_last_look:
            break


@jax.jit
def train(w, x, y):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
    return w - 0.05 * grad, loss


def main(folder, steps):
    multihost.initialize()
    evaluator = None
    if multihost.is_primary_host(0):
        command = [sys.executable, __file__, folder, "evaluate"]
        evaluator = subprocess.Popen(command, stdin=subprocess.PIPE)
    w = jnp.zeros(5)
    with CheckpointManager(folder, save_policy=EveryNSteps(4), keep_policy=KeepLast(2)) as manager:
        last = manager.latest_step() or 0
        if last:
            w = manager.restore(last, w)
            print(f"resumed from step {last}", flush=True)
        for step in range(last + 1, steps + 1):
            w, loss = train(w, *batch(step))
            if jax.process_index() == 0:
                print(f"step {step} loss {loss:.5f}", flush=True)
            manager.save(step, w, metrics={"loss": float(loss)})
            if manager.reached_preemption(step):
                print(f"stops after step {step}", flush=True)
                break
            time.sleep(0.03)  # a larger model's step
    if evaluator is not None:
        evaluator.stdin.close()
        evaluator.wait()
    print("statistics", json.dumps(manager.statistics()))
    multihost.shutdown()


if __name__ == "__main__":
    if sys.argv[2] == "evaluate":
        evaluate(sys.argv[1])
    else:
        main(sys.argv[1], int(sys.argv[2]))
