"""Reads a checkpoint of many leaves, and its structure alone, in holdfast's layout and Orbax's.

    .venv/bin/python benchmarks/structure.py [--leaves 4000] [--rounds 5] [--side 16]

In turns. Medians are printed: `structure` of both, and `load` of both, from a warm page cache.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from holdfast.checkpoint import load, save, structure


def tree_of(leaves: int, side: int = 16) -> dict[str, Any]:
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
    kernel = jax.device_put(jnp.ones((side, side)), jax.NamedSharding(mesh, jax.P("x", "y")))
    bias = jax.device_put(jnp.ones(side), jax.NamedSharding(mesh, jax.P()))
    return {f"layer{index}": {"kernel": kernel, "bias": bias} for index in range(leaves // 2)}


def median_ms(rounds: int, work: Callable[[], Any]) -> float:
    times = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        jax.block_until_ready(work())
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:]) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leaves", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--side",
        type=int,
        default=16,
        help="rows and columns of a matrix, of which every second leaf is one",
    )
    options = parser.parse_args()
    tree = tree_of(options.leaves, options.side)
    with tempfile.TemporaryDirectory() as name:
        for layout in ("holdfast", "orbax"):
            folder = Path(name) / layout
            save(folder, tree, layout=layout)  # type: ignore[arg-type]
            seen = median_ms(options.rounds, lambda folder=folder: structure(folder).items)  # type: ignore[misc]
            read = median_ms(options.rounds, lambda folder=folder: load(folder, tree))  # type: ignore[misc]
            print(
                f"{layout}: {options.leaves} leaves: structure {seen:.1f} ms, load {read:.1f} ms,"
                f" {seen / read:.3f}"
            )


if __name__ == "__main__":
    main()
