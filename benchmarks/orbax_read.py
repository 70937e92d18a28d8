"""Reads Orbax's own checkpoints with holdfast and with Orbax, in turns; `verify` and plain reading.

    .venv/bin/python benchmarks/orbax_read.py [--folder DIR] [--rounds 5]

Both restore onto four CPU devices, from a warm page cache, each round one after the other; medians
and their ratio are printed. The same process does both, so that neither has the machine to itself.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from holdfast.checkpoint import load, save, verify

STEP = 1
READ_BYTES = 16 << 20


def timed(function: Callable[[], Any]) -> float:
    gc.collect()
    began = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - began


def in_turns(rounds: int, **work: Callable[[], Any]) -> dict[str, float]:
    """Runs all pieces of work once to warm up, then in turns; returns their median seconds."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for number in range(rounds + 1):
        for name, function in work.items():
            seconds = timed(function)
            if number:
                times[name].append(seconds)
    return {name: statistics.median(found) for name, found in times.items()}


def restores(folder: Path, name: str, tree: dict[str, Any], rounds: int) -> None:
    root = folder / name
    with ocp.CheckpointManager(root) as manager:
        manager.save(STEP, args=ocp.args.StandardSave(tree))
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)

    def by_orbax() -> Any:
        with ocp.CheckpointManager(root) as manager:
            return manager.restore(STEP, args=ocp.args.StandardRestore(like))

    found = in_turns(rounds, orbax=by_orbax, holdfast=lambda: load(root / str(STEP), like))
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    print(
        f"| {name} | {total / 2**20:.0f} MiB | {found['orbax']:.3f} | {found['holdfast']:.3f} |"
        f" {found['orbax'] / found['holdfast']:.2f} |",
        flush=True,
    )


def read_all(paths: list[Path]) -> None:
    """Reads files with four threads into buffers that are used again.

    Plain reading goes no faster.
    """

    def ranges() -> list[tuple[Path, int]]:
        return [
            (path, offset) for path in paths for offset in range(0, path.stat().st_size, READ_BYTES)
        ]

    def read(jobs: list[tuple[Path, int]]) -> None:
        buffer = bytearray(READ_BYTES)
        for path, offset in jobs:
            file = os.open(path, os.O_RDONLY)
            os.preadv(file, [buffer], offset)
            os.close(file)

    jobs = ranges()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, [jobs[lane::4] for lane in range(4)]))


def verifies(folder: Path, gigabytes: float, rounds: int) -> None:
    leaves = max(1, round(gigabytes * 1e9 / (64 << 20)))
    block = np.random.default_rng(0).standard_normal((4096, 4096), dtype=np.float32)
    save(folder / "verify", {f"w{i}": block for i in range(leaves)})
    files = sorted((folder / "verify" / "state").glob("*.safetensors"))
    found = in_turns(
        rounds, read=lambda: read_all(files), verify=lambda: verify(folder / "verify").bytes
    )
    size = sum(path.stat().st_size for path in files) / 1e9
    ratio = found["verify"] / found["read"]
    print(
        f"\nverify of {size:.2f} GB: {found['verify']:.3f} s, plain reading {found['read']:.3f} s,"
        f" ratio {ratio:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to write (default: a temporary folder)"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--verify-gigabytes", type=float, default=4.0)
    arguments = parser.parse_args()
    mesh = jax.make_mesh((4,), ("d",))
    sharded = jax.NamedSharding(mesh, jax.P("d"))
    replicated = jax.NamedSharding(mesh, jax.P())
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        folder = Path(scratch)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        print(
            f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}, jax {jax.__version__},"
            f" orbax {ocp.__version__}\n"
        )
        print(
            "| checkpoint of Orbax's | size | Orbax restores, s | holdfast restores, s | times as"
            " fast |\n|---|---|---|---|---|"
        )
        rng = np.random.default_rng(0)
        large = {
            f"w{i}": jax.device_put(rng.standard_normal((2048, 2048), dtype=np.float32), sharded)
            for i in range(64)
        }
        restores(folder, "64 arrays over 4 devices", large, arguments.rounds)
        del large
        small = {
            f"w{i}": jax.device_put(jnp.full(256, i, jnp.float32), replicated) for i in range(4000)
        }
        restores(folder, "4,000 arrays on all of 4 devices", small, arguments.rounds)
        del small
        verifies(folder, arguments.verify_gigabytes, arguments.rounds)


if __name__ == "__main__":
    main()
