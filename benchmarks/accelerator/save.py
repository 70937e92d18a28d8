"""Part b: what a save costs, beside a bare copy to the host, bare I/O and Orbax."""

from __future__ import annotations

import statistics
import sys
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import machine
from machine import versus_orbax
from plan import LEAVES, Plan
from report import figure, seconds, size, speed
from sections import in_own_process, run_each

from holdfast.checkpoint import CheckpointManager, KeepLast

ROUNDS = {True: 1, False: 3}  # by smoke
SOAKS = 20
SOAK_SHARE = 4  # of the leaves


@jax.jit
def _copied(state: Any) -> Any:
    return jax.tree.map(jnp.copy, state)


class Timed:
    """Saves of one system, with their times."""

    def __init__(self, system: Any) -> None:
        self._system = system
        self._step = 0
        self.blocked: list[float] = []
        self.total: list[float] = []

    def save(self, state: Any) -> None:
        """Saves a step, and deletes the one before, off the clock."""
        self._step += 1
        # New arrays, as each step of a training makes them: jax keeps what it has copied of old.
        state = jax.block_until_ready(_copied(state))
        began = time.perf_counter()
        finish = self._system.save(self._step, state)
        self.blocked.append(time.perf_counter() - began)
        finish()
        self.total.append(time.perf_counter() - began)
        if self._step > 1:
            self._system.delete(self._step - 1)

    def close(self) -> None:
        self._system.close()


def later(values: list[float]) -> float:
    """Returns the median without the first."""
    return statistics.median(values[1:] or values)


def compare(plan: Plan) -> None:
    """The large state: holdfast's first save in this process, then all in turns."""
    device = jax.devices()[0]
    state = machine.make_state(plan.state_bytes, LEAVES)
    nbytes = machine.nbytes_of(state)
    folder = plan.folder("save")
    folder.mkdir()
    what = f"{size(nbytes)} in {len(state)} leaves"
    ours = Timed(versus_orbax.Holdfast(folder / "holdfast"))
    ours.save(state)
    figure(f"{what}: first save, blocked", seconds(ours.blocked[0]))
    figure(f"{what}: first save, durable", seconds(ours.total[0]), speed(nbytes, ours.total[0]))
    copies = [machine.time_of(lambda: machine.copy_to_host(state, device)) for _ in range(3)]
    copy = later(copies)
    figure(f"{what}: a bare copy to the host", seconds(copy), speed(nbytes, copy))
    orbax = Timed(versus_orbax.Orbax(folder / "orbax", "orbax.checkpoint"))
    bare = Timed(versus_orbax.Floor(folder / "bare"))
    for _ in range(ROUNDS[plan.smoke]):
        ours.save(state)
        bare.save(state)
        orbax.save(state)
        report(what, nbytes, {"holdfast": ours, "bare": bare, "orbax": orbax}, copy)
    for system in (ours, orbax, bare):
        system.close()
    machine.remove(folder)


def report(what: str, nbytes: int, systems: dict[str, Timed], copy: float) -> None:
    """Reports the medians so far; a later report of the same figure stands in its place."""
    ours = systems["holdfast"]
    orbax = systems["orbax"]
    blocked = later(ours.blocked)
    total = later(ours.total)
    figure(
        f"{what}: later saves, blocked",
        seconds(blocked),
        f"{blocked / copy:.2g} of the bare copy; Orbax {seconds(later(orbax.blocked))}"
        f" (first {seconds(orbax.blocked[0])})",
    )
    figure(
        f"{what}: later saves, durable",
        seconds(total),
        f"{speed(nbytes, total)}; bare copy and write {seconds(later(systems['bare'].total))};"
        f" Orbax {seconds(later(orbax.total))} (first {seconds(orbax.total[0])})",
    )


def small(plan: Plan) -> None:
    """Many small leaves."""
    state = machine.make_small(plan.small_leaves)
    folder = plan.folder("small")
    folder.mkdir()
    what = f"{len(state)} leaves of 8 KiB"
    ours = Timed(versus_orbax.Holdfast(folder / "holdfast"))
    for _ in range(1 + ROUNDS[plan.smoke]):
        ours.save(state)
    figure(f"{what}: first save, blocked", seconds(ours.blocked[0]))
    figure(f"{what}: later saves, blocked", seconds(later(ours.blocked)))
    figure(f"{what}: later saves, durable", seconds(later(ours.total)))
    orbax = Timed(versus_orbax.Orbax(folder / "orbax", "orbax.checkpoint"))
    orbax.save(state)
    figure(
        f"{what}: Orbax, first save",
        seconds(orbax.total[0]),
        f"blocked {seconds(orbax.blocked[0])}",
    )
    orbax.close()
    ours.close()
    machine.remove(folder)


def soak(plan: Plan) -> None:
    """Twenty saves of a part of the state: what stays of the host's memory."""
    state = machine.make_state(plan.state_bytes // SOAK_SHARE, LEAVES // SOAK_SHARE)
    nbytes = machine.nbytes_of(state)
    folder = plan.folder("soak")
    what = f"{SOAKS} saves of {size(nbytes)}"
    machine.reset_peak()
    resident = [machine.resident_bytes()]
    available = [machine.available_bytes()]
    with CheckpointManager(folder, keep_policy=KeepLast(1)) as manager:
        for step in range(SOAKS):
            manager.save(step, state)
            manager.wait_until_finished()
            resident.append(machine.resident_bytes())
            available.append(machine.available_bytes())
        held = manager.statistics()["checkpoint_peak_bytes"]
    figure(
        f"{what}: peak of the host's memory",
        size(machine.peak_bytes() - resident[0]),
        f"above {size(resident[0])} resident; holdfast held {size(held)}",
    )
    figure(
        f"{what}: resident after the last, less after the fifth",
        f"{(resident[-1] - resident[5]) / 1e6:.1f} MB",
        f"the machine had {size(available[5])} left after the fifth,"
        f" {size(available[-1])} after the last",
    )
    machine.remove(folder)


SECTIONS = {"compare": compare, "small": small, "soak": soak}


def main() -> int:
    plan = Plan.of_json(sys.argv[1])
    if len(sys.argv) == 3:
        # Each is in the process alone: what another held would hide what this one takes.
        return run_each(partial(SECTIONS[sys.argv[2]], plan))
    if plan.smoke:
        return run_each(*(partial(section, plan) for section in SECTIONS.values()))
    return run_each(*map(in_own_process, SECTIONS))


if __name__ == "__main__":
    raise SystemExit(main())
