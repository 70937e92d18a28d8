"""Measures how long `save` blocks with and without the comparison of replicas, in turns.

    holdfast run -n 2 -- python benchmarks/replicas.py FOLDER [--leaves 64] [--leaf-mib 4]
    XLA_FLAGS=--xla_force_host_platform_device_count=4 holdfast run -n 1 -- python
        benchmarks/replicas.py FOLDER --leaves 4000 --leaf-mib 0.001

All leaves are replicated over all devices, and new at each save. Each process prints a row of a
Markdown table: milliseconds of "ignore" and of "warn", and the median ratio of a round's two.
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from holdfast import multihost
from holdfast.checkpoint import CheckpointManager, KeepLast, Options

WARM_ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--leaves", type=int, default=64)
    parser.add_argument("--leaf-mib", type=float, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    multihost.initialize()
    mesh = Mesh(np.array(jax.devices()), ("all",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    size = int(args.leaf_mib * (1 << 20)) // 4
    state = {
        f"leaf{number}": jax.make_array_from_callback(
            (size,), everywhere, lambda cut, number=number: np.full(size, number, np.float32)[cut]
        )
        for number in range(args.leaves)
    }
    managers = {
        mode: CheckpointManager(
            f"{args.folder}/{mode}",
            keep_policy=KeepLast(1),
            options=Options(on_replicas_differ=mode),
        )
        for mode in ("ignore", "warn")
    }
    update = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree))
    blocked: dict[str, list[float]] = {mode: [] for mode in managers}
    total: dict[str, list[float]] = {mode: [] for mode in managers}
    for step in range(1, args.rounds + WARM_ROUNDS + 1):
        # Neither is always the first.
        order = list(managers) if step % 2 else list(reversed(managers))
        for mode in order:
            state = jax.block_until_ready(update(state))
            multihost.sync_global_processes("round")
            begun = time.perf_counter()
            managers[mode].save(step, state)
            blocked[mode].append(time.perf_counter() - begun)
            managers[mode].wait_until_finished()
            total[mode].append(time.perf_counter() - begun)
    for manager in managers.values():
        manager.close()
    cells = [f"{args.leaves} x {args.leaf_mib:g} MiB", f"{jax.process_index()}"]
    for taken in (blocked, total):
        medians = [statistics.median(taken[mode][WARM_ROUNDS:]) for mode in managers]
        least = [min(taken[mode][WARM_ROUNDS:]) for mode in managers]
        cells += [f"{m * 1e3:.1f} ({x * 1e3:.1f})" for m, x in zip(medians, least, strict=True)]
        pairs = zip(taken["warn"], taken["ignore"], strict=True)
        ratios = [warn / ignore for warn, ignore in pairs]
        cells.append(f"{statistics.median(ratios[WARM_ROUNDS:]):.2f}")
    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
