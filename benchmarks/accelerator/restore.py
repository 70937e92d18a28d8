"""Part c: what a restore costs, beside bare reads, a bare copy to the device, and Orbax."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from plan import LEAVES, Plan
from report import figure, not_run, seconds, size, speed
from sections import in_own_process, run_each

ROUNDS = {True: 1, False: 3}  # by smoke
STEP = 1


def open_all(folder: Path) -> dict[str, Any]:
    """Returns the systems, on their folders."""
    from machine import versus_orbax

    return {
        "holdfast": versus_orbax.Holdfast(folder / "holdfast"),
        "bare": versus_orbax.Floor(folder / "bare"),
        "orbax": versus_orbax.Orbax(folder / "orbax", "orbax.checkpoint"),
    }


def prepare(plan: Plan) -> None:
    """Saves the state with each system; runs in a process of its own."""
    import machine

    state = machine.make_state(plan.state_bytes, LEAVES)
    folder = plan.folder("restore")
    folder.mkdir()
    for system in open_all(folder).values():
        system.save(STEP, state)()
        system.close()
    os.sync()


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Returns how long a call takes until what it returns is ready, and that."""
    import jax

    began = time.perf_counter()
    found = jax.block_until_ready(call())
    return time.perf_counter() - began, found


def restore_all(plan: Plan) -> None:
    """Restores in a process that has restored nothing before; then all in turns."""
    import jax
    import machine
    from machine import versus_orbax

    device = jax.devices()[0]
    state = machine.make_state(plan.state_bytes, LEAVES)
    nbytes = machine.nbytes_of(state)
    like = shapes_of(state)
    folder = plan.folder("restore")
    what = f"{size(nbytes)} in {len(state)} leaves"
    systems = open_all(folder)

    def restore(name: str) -> float:
        took, found = timed(lambda: systems[name].restore(STEP, like))
        if name != "bare" and not machine.same_bits(found, state):
            raise AssertionError(f"{name} restored other bits")
        del found
        versus_orbax.let_go()
        return took

    first = restore("holdfast")
    if not plan.smoke:
        figure(f"{what}: first restore of a process", seconds(first), speed(nbytes, first))
    copy = time_of_copy(state, device)
    figure(f"{what}: a bare copy to the device", seconds(copy), speed(nbytes, copy))
    took: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(ROUNDS[plan.smoke]):
        for name in systems:
            took[name].append(restore(name))
        medians = {name: statistics.median(values) for name, values in took.items()}
        figure(
            f"{what}: later restores, from the page cache",
            seconds(medians["holdfast"]),
            f"{speed(nbytes, medians['holdfast'])}; bare read and copy"
            f" {seconds(medians['bare'])}; Orbax {seconds(medians['orbax'])}"
            f" (first {seconds(took['orbax'][0])})",
        )
    for name in systems:
        versus_orbax.drop_pages(folder)
        took[name] = [restore(name)]
    figure(
        f"{what}: a restore from the disk",
        seconds(took["holdfast"][0]),
        f"{speed(nbytes, took['holdfast'][0])}; bare {seconds(took['bare'][0])};"
        f" Orbax {seconds(took['orbax'][0])}",
    )
    for system in systems.values():
        system.close()
    machine.remove(folder)


def time_of_copy(state: Any, device: Any) -> float:
    """Returns how long a bare copy of the state to the device takes."""
    import jax
    import machine
    import numpy as np

    host = [np.asarray(leaf) for leaf in state.values()]
    return min(machine.time_of(lambda: jax.device_put(host, device)) for _ in range(3))


def bounded(plan: Plan) -> None:
    """Restores with a quarter of the state as the bound of the host's memory, in a process that has
    held nothing before.
    """
    import machine

    from holdfast.checkpoint import CheckpointManager, Options

    state = machine.make_state(plan.state_bytes, LEAVES)
    nbytes = machine.nbytes_of(state)
    like = shapes_of(state)
    options = Options(host_memory_bytes=nbytes // 4, read_only=True)
    machine.reset_peak()
    before = machine.resident_bytes()
    with CheckpointManager(plan.folder("restore") / "holdfast", options=options) as manager:
        took, found = timed(lambda: manager.restore(STEP, like))
        held = manager.statistics()["checkpoint_peak_bytes"]
    peak = machine.peak_bytes() - before
    if not machine.same_bits(found, state):
        raise AssertionError("a bounded restore has other bits")
    figure(
        f"{size(nbytes)} restored with {size(nbytes // 4)} of the host's memory",
        seconds(took),
        f"holdfast held {size(held)} at most; the process had {size(peak)} more at its peak",
    )


def shapes_of(state: Any) -> Any:
    """Returns what a restore is told to give."""
    import jax

    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )


def main() -> int:
    plan = Plan.of_json(sys.argv[1])
    if len(sys.argv) == 3:
        return run_each(partial({"prepare": prepare, "bounded": bounded}[sys.argv[2]], plan))
    what = "a restore with a quarter of the state as the host's memory"
    if plan.smoke:
        not_run(f"{what}, and the first restore of a process", "not in smoke")
        return run_each(partial(prepare, plan), partial(restore_all, plan))
    sections = [in_own_process("prepare"), partial(restore_all, plan)]
    if plan.cpu:
        not_run(what, "on the CPU the values stay in the host's memory")
    else:
        sections.insert(1, in_own_process("bounded"))
    return run_each(*sections)


if __name__ == "__main__":
    raise SystemExit(main())
