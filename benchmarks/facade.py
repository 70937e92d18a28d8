"""Saves and restores by holdfast's own manager and by its stand-in for Orbax's, in turns.

    .venv/bin/python benchmarks/facade.py [--rounds 9] [--leaves 64] [--mib 4]

Both save at every step by a policy, and write the same layout into memory (/dev/shm). "save" ends
when the step is committed, "blocked" when `save` returns; "restore" is into a tree of arrays.
"folder" is the blocked time of a save of one folder: `save_async`, and `AsyncCheckpointer.save`.
Prints medians and their ratios.
"""

from __future__ import annotations

import argparse
import os
import shutil
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

from holdfast.checkpoint import CheckpointManager, EveryNSteps, KeepLast, save_async
from holdfast.compat import orbax as ocp


def tree_of(leaves: int, mib: float) -> dict[str, Any]:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), "x")
    whole = jnp.ones((4, int(mib * (1 << 18)) // 4))
    return {
        f"layer{index}": jax.device_put(whole + index, jax.NamedSharding(mesh, jax.P("x")))
        for index in range(leaves)
    }


def timed(
    save: Callable[[int], Any], wait: Callable[[], Any], restore: Callable[[int], Any], step: int
) -> dict[str, float]:
    began = time.perf_counter()
    save(step)
    blocked = time.perf_counter()
    wait()
    saved = time.perf_counter()
    jax.block_until_ready(restore(step))
    return {
        "blocked": blocked - began,
        "save": saved - began,
        "restore": time.perf_counter() - saved,
    }


def blocked_by_native(folder: Path, tree: Any) -> float:
    began = time.perf_counter()
    handle = save_async(folder, tree)
    blocked = time.perf_counter() - began
    handle.wait()
    return blocked


def blocked_by_checkpointer(folder: Path, tree: Any) -> float:
    with ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        began = time.perf_counter()
        checkpointer.save(folder, args=ocp.args.StandardSave(tree))
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--leaves", type=int, default=64)
    parser.add_argument("--mib", type=float, default=4)
    options = parser.parse_args()
    tree = tree_of(options.leaves, options.mib)
    found = dict[str, list[dict[str, float]]](native=[], facade=[])
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        facade = ocp.CheckpointManager(
            Path(folder) / "facade", options=ocp.CheckpointManagerOptions(max_to_keep=1)
        )
        with (
            CheckpointManager(
                Path(folder) / "native", save_policy=EveryNSteps(1), keep_policy=KeepLast(1)
            ) as native,
            facade,
        ):
            args = ocp.args
            calls: dict[
                str, tuple[Callable[[int], Any], Callable[[], Any], Callable[[int], Any]]
            ] = {
                "native": (
                    lambda step: native.save(step, tree),
                    native.wait_until_finished,
                    lambda step: native.restore(step, tree),
                ),
                "facade": (
                    lambda step: facade.save(step, args=args.StandardSave(tree)),
                    facade.wait_until_finished,
                    lambda step: facade.restore(step, args=args.StandardRestore(tree)),
                ),
            }
            for step in range(options.rounds + 1):
                for name in ("native", "facade") if step % 2 else ("facade", "native"):
                    taken = timed(*calls[name], step)
                    path = Path(folder) / f"{name}-folder"
                    by = blocked_by_native if name == "native" else blocked_by_checkpointer
                    taken["folder"] = by(path, tree)
                    shutil.rmtree(path)
                    if step:  # the first makes plans
                        found[name].append(taken)
    for figure in ("blocked", "save", "restore", "folder"):
        native_ms, facade_ms = (
            statistics.median(each[figure] for each in found[name]) * 1e3
            for name in ("native", "facade")
        )
        print(
            f"{figure}: native {native_ms:.2f} ms, facade {facade_ms:.2f} ms,"
            f" {100 * (facade_ms / native_ms - 1):+.1f} %"
        )


if __name__ == "__main__":
    main()
