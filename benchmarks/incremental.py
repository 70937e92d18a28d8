"""Compares incremental saves with plain ones, and Orbax's: bytes written, and seconds to durable.

    python benchmarks/incremental.py [--frozen-mib 512] [--changing-mib 4] [--saves 5]
        [--folder DIR]

The columns take turns, each save after another kind; medians. A LoRA run: a frozen base and an
adapter that moves; and one in which every leaf moves, where the digests are all that incremental
saves add. "identity" is what accelerators have: there a leaf that is the same jax.Array is not even
looked at. On the CPU one may be a view of numpy's memory; these are not, and the benchmark says so
by hand.
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
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from holdfast.checkpoint import CheckpointManager, KeepLast, Options
from holdfast.checkpoint.saving import incremental as incremental_saves

LEAF_BYTES = 4 << 20


def tree(mib: int, seed: int) -> dict[str, Any]:
    """Returns leaves of 4 MiB, not compressible, different for each seed."""
    values = np.random.default_rng(seed).standard_normal(LEAF_BYTES // 4, dtype=np.float32)
    return {f"l{index:04d}": jnp.asarray(values + index) for index in range(max(1, mib // 4))}


def bytes_in(root: Path) -> int:
    """Returns what a folder takes, each inode once."""
    found = {
        (path.stat().st_ino, path.stat().st_size) for path in root.rglob("*") if path.is_file()
    }
    return sum(size for _, size in found)


class Ours:
    """A manager of ours."""

    def __init__(self, root: Path, *, incremental: bool, by_identity: bool = False) -> None:
        self.root = root
        self.by_identity = by_identity
        self.manager = CheckpointManager(
            root, keep_policy=KeepLast(2), options=Options(incremental=incremental)
        )

    def save(self, step: int, state: Any) -> None:
        if self.by_identity:
            with mock.patch.object(
                incremental_saves, "never_changes", lambda leaf: isinstance(leaf, jax.Array)
            ):
                self.manager.save(step, state)
        else:
            self.manager.save(step, state)
        self.manager.wait_until_finished()

    def settle(self) -> None:
        """Waits for deletions: they are nobody else's time."""
        self.manager._state.worker.wait(60)

    def written(self) -> int:
        return int(self.manager.statistics()["save_written_bytes"])


class Orbax:
    """Orbax's manager, as its documentation sets it up."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.manager = ocp.CheckpointManager(
            root, options=ocp.CheckpointManagerOptions(max_to_keep=2)
        )

    def save(self, step: int, state: Any) -> None:
        self.manager.save(step, args=ocp.args.StandardSave(state))
        self.manager.wait_until_finished()

    def settle(self) -> None:
        """Deletes while it saves."""

    def written(self) -> int:
        return 0


def measure(title: str, state_of: Callable[[int], Any], saves: int, folder: Path) -> None:
    """Saves in turns and prints the medians."""
    savers = {
        "plain": Ours(folder / "plain", incremental=False),
        "incremental": Ours(folder / "incremental", incremental=True),
        "identity": Ours(folder / "identity", incremental=True, by_identity=True),
        "Orbax": Orbax(folder / "orbax"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in savers}
    written: dict[str, list[int]] = {name: [] for name in savers}
    for step in range(saves + 1):
        state = state_of(step)
        for name, saver in savers.items():
            os.sync()
            before = saver.written()
            began = time.perf_counter()
            saver.save(step, state)
            elapsed_s = time.perf_counter() - began
            saver.settle()
            if step:  # the first writes everything
                seconds[name].append(elapsed_s)
                written[name].append(saver.written() - before)
    plain = statistics.median(seconds["plain"])
    print(f"\n{title}, medians of {saves} saves")
    for name, saver in savers.items():
        median = statistics.median(seconds[name])
        size = statistics.median(written[name])
        saver.manager.close()
        space = bytes_in(saver.root) / 2**20
        shown = f"{size / 2**20:8.1f} MiB" if size else " " * 12
        print(
            f"  {name:12} {median:6.3f} s  {median / plain:5.2f} of plain  written {shown}  both"
            f" steps take {space:7.0f} MiB"
        )


def main() -> None:
    """Runs both."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--frozen-mib", type=int, default=512)
    parser.add_argument("--changing-mib", type=int, default=4)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    given = parser.parse_args()
    frozen = tree(given.frozen_mib, 0)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        measure(
            f"{given.frozen_mib} MiB frozen, {given.changing_mib} MiB changing",
            lambda step: {"base": frozen, "lora": tree(given.changing_mib, step + 1)},
            given.saves,
            Path(folder),
        )
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        measure(
            f"{given.frozen_mib} MiB, all changing",
            lambda step: tree(given.frozen_mib, step),
            given.saves,
            Path(folder),
        )


if __name__ == "__main__":
    main()
