"""Cells of a notebook, in the order in which somebody ran them: some of them twice."""

import sys

FOLDER = sys.argv[1]
STEPS = int(sys.argv[2])

CELLS = {
    1: """
import json, time
import jax, jax.numpy as jnp, numpy as np
from holdfast.checkpoint import CheckpointManager, EveryNSteps, KeepLast
""",
    2: """
w = jnp.zeros(4)
manager = CheckpointManager(FOLDER, save_policy=EveryNSteps(5), keep_policy=KeepLast(3))
last = manager.latest_step() or 0
if last:
    w = manager.restore(last, w)
""",
    3: """
@jax.jit
def train(w, x):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w - x[:, 1]) ** 2))(w)
    return w - 0.1 * grad, loss
""",
    4: """
if last:
    print(f"resumed from step {last}", flush=True)
stop = False
for step in range(last + 1, STEPS + 1):
    x = np.random.default_rng(step).normal(size=(12, 4)).astype(np.float32)
    w, loss = train(w, x)
    print(f"step {step} loss {loss:.5f}", flush=True)
    manager.save(step, w, metrics={"loss": float(loss)})
    time.sleep(0.03)
""",
    5: """
manager.wait_until_finished()
print(manager.all_steps(), manager.metrics(manager.latest_step()))
""",
}

# The cell that opens the manager was run again, as people do, and so was the last one.
for number in (1, 2, 3, 2, 4, 5, 5):
    exec(compile(CELLS[number], f"cell {number}", "exec"), globals())
