"""Part d: what saves do to a loop that keeps the device busy, and what summing replicas takes."""

from __future__ import annotations

import functools
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import machine
from plan import LEAVES, Plan
from report import figure, seconds, size, speed
from sections import run_each

from holdfast.checkpoint import CheckpointManager, EveryNSteps, KeepLast
from holdfast.checkpoint.saving.replicas import _bit_sum

STEP_S = 0.05
SAVE_EVERY = 10
ROUNDS = {True: 1, False: 2}  # by smoke
SIDE = {True: 512, False: 8192}
STEPS = {True: 10, False: 40}


class Loop:
    """Matrix products of STEP_S a step, and a state that each step donates and changes."""

    def __init__(self, plan: Plan) -> None:
        side = SIDE[plan.cpu]
        self._matrix = jnp.full((side, side), 1 / side, jnp.bfloat16)
        self.state = machine.make_state(plan.state_bytes // 4, LEAVES // 4)
        self._products = 1
        self._count = 0  # of the steps that a manager was asked to save
        self._calibrate()

    @staticmethod
    @functools.partial(jax.jit, donate_argnums=0)
    def _step(state: Any, matrix: jax.Array, products: jax.Array) -> tuple[Any, jax.Array]:
        last = jax.lax.fori_loop(0, products, lambda _, found: found @ matrix, matrix)
        loss = last.astype(jnp.float32).mean()
        return jax.tree.map(lambda leaf: (leaf * 0.999).astype(leaf.dtype), state), loss

    def step(self) -> jax.Array:
        """Dispatches a step; returns its loss."""
        self.state, loss = self._step(self.state, self._matrix, jnp.int32(self._products))
        return loss

    def _calibrate(self) -> None:
        self.step().block_until_ready()
        for _ in range(4):
            took = machine.time_of(self.step)
            self._products = max(1, min(10_000, round(self._products * STEP_S / took)))

    def _save(self, manager: CheckpointManager) -> None:
        self._count += 1
        manager.save(self._count, self.state)

    def run(self, steps: int, manager: CheckpointManager | None) -> list[float]:
        """Returns how long each step took, the next one being dispatched meanwhile."""
        times = []
        previous = self.step()
        last = time.perf_counter()
        for _ in range(steps):
            loss = self.step()
            if manager is not None:
                self._save(manager)
            previous.block_until_ready()
            now = time.perf_counter()
            times.append(now - last)
            last = now
            previous = loss
        previous.block_until_ready()
        if manager is not None:
            manager.wait_until_finished()
        return times


def main() -> int:
    plan = Plan.of_json(sys.argv[1])
    loop = Loop(plan)
    return run_each(functools.partial(steps_that_save, plan, loop), functools.partial(sums, loop))


def steps_that_save(plan: Plan, loop: Loop) -> None:
    """The loop with saves and without, in turns."""
    nbytes = machine.nbytes_of(loop.state)
    steps = STEPS[plan.smoke]
    without: list[float] = []
    saving: list[float] = []
    folder = plan.folder("dispatch")
    policy = EveryNSteps(SAVE_EVERY)
    with CheckpointManager(folder, save_policy=policy, keep_policy=KeepLast(1)) as manager:
        loop.run(SAVE_EVERY, manager)  # what the first save makes is there
        for _ in range(ROUNDS[plan.smoke]):
            without += loop.run(steps, None)
            saving += loop.run(steps, manager)
            report(nbytes, without, saving)
    machine.remove(folder)


def report(nbytes: int, without: list[float], saving: list[float]) -> None:
    bare = statistics.median(without)
    what = f"a step of the loop, {size(nbytes)} saved every {SAVE_EVERY} steps"
    figure(
        f"{what}: median",
        seconds(statistics.median(saving)),
        f"without saves {seconds(bare)}",
    )
    figure(f"{what}: longest", seconds(max(saving)), f"without saves {seconds(max(without))}")
    extra = (sum(saving) - sum(without)) / (len(saving) / SAVE_EVERY)
    figure(
        f"{what}: all steps longer, by the save",
        seconds(max(0.0, extra)),
        f"{sum(saving) / sum(without):.3f} of the time without saves",
    )


def sums(loop: Loop) -> None:
    """The sums of bits by which a save of several devices finds replicas that differ."""
    summed = jax.jit(lambda leaves: jnp.stack([_bit_sum(leaf) for leaf in leaves]))
    leaves = list(loop.state.values())
    machine.time_of(lambda: summed(leaves))
    took = min(machine.time_of(lambda: summed(leaves)) for _ in range(3))
    nbytes = machine.nbytes_of(loop.state)
    figure(f"the sums of replicas of {size(nbytes)}", seconds(took), speed(nbytes, took))


if __name__ == "__main__":
    raise SystemExit(main())
