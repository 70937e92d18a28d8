"""No manager: `save`, `load` and `verify`, and folders that the program names itself."""

import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from holdfast import multihost
from holdfast.checkpoint import load, save, verify

root = Path(sys.argv[1])
steps = int(sys.argv[2])


@jax.jit
def power_iteration(v, a):
    v = a @ v
    return v / jnp.linalg.norm(v), jnp.linalg.norm(v)


multihost.initialize()
group = multihost.default_group()
base = np.random.default_rng(0).normal(size=(6, 6)).astype(np.float32)
matrix = base @ base.T
v = jnp.ones(6)
first = 1
# The primary looks, and all take what it has found.
found = [int(path.name) for path in root.glob("*") if (path / "checkpoint.json").exists()]
mine = str(max(found, default=0)).encode() if multihost.is_primary_host(0) else None
last = int(group.broadcast("last", mine, timeout_s=60))
if last:
    verify(root / str(last))
    v = load(root / str(last), v, group=group)
    first = last + 1
    print(f"resumed from step {last}", flush=True)
for step in range(first, steps + 1):
    v, size = power_iteration(v, matrix)
    if jax.process_index() == 0:
        print(f"step {step} loss {1 / size:.5f}", flush=True)
    stop = multihost.reached_preemption(step)
    if step % 10 == 0 or stop or step == steps:
        save(root / str(step), v, step=step)
    if stop:
        print(f"stops after step {step}", flush=True)
        break
    time.sleep(0.03)  # a larger matrix
multihost.shutdown()
