"""Makes steps of half a second without ever waiting for its devices, until it is to stop.
argv[2] is how it asks: "save", "should_save", or "alone" for one that shows its manager no step.
"""

from __future__ import annotations

import functools
import itertools
import sys
import time
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from holdfast import multihost
from holdfast.checkpoint import CheckpointManager, EveryNSteps

STEP_S = 0.5
way = sys.argv[2]
multihost.initialize()
mesh = jax.make_mesh((jax.device_count(),), ("all",))
jax.set_mesh(mesh)
spread = NamedSharding(mesh, PartitionSpec("all"))


@functools.partial(jax.jit, donate_argnums=0)
def advance(state: Any, rounds: int) -> Any:
    burnt = jax.lax.fori_loop(0, rounds, lambda _, each: jnp.sin(each) + 1e-3, state["w"])
    return {"w": burnt + burnt.mean(), "n": state["n"] + 1}  # a mean over all processes


def fresh() -> Any:
    own = np.zeros(1 << 12, np.float32)
    return {
        "w": jax.make_array_from_process_local_data(spread, own),
        "n": jax.make_array_from_callback((), NamedSharding(mesh, PartitionSpec()), np.zeros),
    }


tried = 400
jax.block_until_ready(advance(fresh(), tried))
began_s = time.perf_counter()
jax.block_until_ready(advance(fresh(), tried))
taken_s = multihost.global_max([int(1e6 * (time.perf_counter() - began_s))])[0] / 1e6
rounds = int(tried * STEP_S / taken_s) + 1

state = fresh()
with CheckpointManager(sys.argv[1], save_policy=EveryNSteps(1_000_000)) as manager:
    manager.save(0, state, force=True)
    for step in itertools.count(1):
        state = advance(state, rounds)
        if way == "save":
            manager.save(step, state)
            stops = manager.reached_preemption(step)
        elif way == "should_save":
            if stops := manager.should_save(step):
                manager.save(step, state)
        elif stops := multihost.reached_preemption(step):
            manager.save(step, state)
        if step == (50 if way == "alone" else 3):  # jax takes the first 32 at once
            print("it goes", flush=True)
        if stops:
            break
sys.exit(75)
