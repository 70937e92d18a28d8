"""Saves and restores with holdfast, its facade, Orbax and bare I/O, in turns; prints medians.

    python benchmarks/versus_orbax.py [--repeats 5] [--disk FOLDER] [--memory /dev/shm]
        [--only NAME ...] [--write]

Each workload runs in processes of its own, every system once before the clock starts. The order of
the systems changes from repeat to repeat, so that none has the same place always. "blocked" is
how long the call of `save` keeps the caller, "total" ends when the step is durable and committed;
"restore" is from a warm page cache into memory that this process had before, "fresh" the same as
the first thing that a new process does, as a job that starts again, "cold" after the kernel was
told to drop the files' pages (disk only); "delete" is the deletion of one old step, off the timed
path of all the others. `--write` draws the plot versus_orbax.svg. Run it on a quiet machine: the
load is printed with the figures.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import itertools
import json
import math
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FIGURES = ("total", "blocked", "restore", "fresh", "cold", "delete")
# name: (processes, devices each, on disk, what it is, wanted ratios of save total, blocked and warm
# restore to Orbax's)
WORKLOADS: dict[str, tuple[int, int, bool, str, tuple[float, float, float]]] = {
    "disk": (1, 4, True, "64 x 16 MiB f32, sharded over 4 devices, disk with fsync", (3.5, 10, 3)),
    "memory": (1, 4, False, "the same in memory (tmpfs)", (8, 10, 3)),
    "small": (1, 4, True, "4,000 x 1 KiB replicated over 4 devices", (150, 100, 20)),
    "adam": (
        4,
        2,
        True,
        "3 GB of bf16 params and f32 Adam moments, 4 processes x 2 devices",
        (2.5, 20, 4),
    ),
}


def make_like(name: str) -> dict[str, Any]:
    """Returns the tree of a workload, as shapes with shardings."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    spread = NamedSharding(mesh, PartitionSpec("x"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    if name == "small":
        return {
            f"leaf{i:04d}": jax.ShapeDtypeStruct((256,), jnp.float32, sharding=everywhere)
            for i in range(4000)
        }
    if name == "adam":
        kinds = {"params": jnp.bfloat16, "mu": jnp.float32, "nu": jnp.float32}
        shape = (3072, 4096)
        return {
            kind: {
                f"layer{i:02d}": jax.ShapeDtypeStruct(shape, dtype, sharding=spread)
                for i in range(24)
            }
            for kind, dtype in kinds.items()
        }
    return {
        f"layer{i:02d}": jax.ShapeDtypeStruct((2048, 2048), jnp.float32, sharding=spread)
        for i in range(64)
    }


def make_state(like: dict[str, Any]) -> dict[str, Any]:
    """Returns arrays of random numbers, as `like` says."""
    import jax
    import numpy as np

    seeds = itertools.count()

    def fill(leaf: Any) -> Any:
        seed = next(seeds)

        def part(index: Any) -> Any:
            rows = range(*index[0].indices(leaf.shape[0]))
            return (
                np.random.default_rng((seed, rows[0]))
                .standard_normal((len(rows), *leaf.shape[1:]), np.float32)
                .astype(leaf.dtype)
            )

        return jax.make_array_from_callback(leaf.shape, leaf.sharding, part)

    filled: dict[str, Any] = jax.tree.map(fill, like)
    return filled


class Holdfast:
    """holdfast's manager."""

    def __init__(self, folder: Path) -> None:
        from holdfast.checkpoint import CheckpointManager

        self._manager = CheckpointManager(folder)

    def save(self, step: int, state: Any) -> Callable[[], None]:
        assert self._manager.save(step, state)
        return self._manager.wait_until_finished

    def restore(self, step: int, like: Any) -> Any:
        return self._manager.restore(step, like)

    def delete(self, step: int) -> None:
        self._manager.delete(step)

    def close(self) -> None:
        self._manager.close()


class Orbax:
    """Orbax's manager, asynchronous as it comes.

    And holdfast's facade, of the same calls, by the change of import.
    """

    def __init__(self, folder: Path, module: str) -> None:
        ocp = importlib.import_module(module)
        self._args = ocp.args
        self._manager = ocp.CheckpointManager(
            folder,
            options=ocp.CheckpointManagerOptions(create=True, enable_async_checkpointing=True),
        )

    def save(self, step: int, state: Any) -> Callable[[], None]:
        assert self._manager.save(step, args=self._args.StandardSave(state))
        return self._manager.wait_until_finished

    def restore(self, step: int, like: Any) -> Any:
        return self._manager.restore(step, args=self._args.StandardRestore(like))

    def delete(self, step: int) -> None:
        self._manager.delete(step)

    def close(self) -> None:
        self._manager.close()


class Floor:
    """Bare I/O of this process's shards, each byte once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._memory: list[Any] = []

    def save(self, step: int, state: Any) -> Callable[[], None]:
        import floor
        import jax
        import numpy as np

        shards = [
            shard
            for leaf in jax.tree.leaves(state)
            for shard in leaf.addressable_shards
            if shard.replica_id == 0
        ]
        floor.write(
            self._folder / str(step),
            [np.asarray(shard.data).reshape(-1).view(np.uint8) for shard in shards],
        )
        return lambda: None

    def restore(self, step: int, like: Any) -> Any:
        import floor
        import jax

        leaves = jax.tree.leaves(like)
        parts = [
            (leaf.dtype, leaf.sharding.shard_shape(leaf.shape), device)
            for leaf in leaves
            for device in _own_devices(leaf)
        ]
        sizes = [math.prod(shape) * dtype.itemsize for dtype, shape, _ in parts]
        self._memory = self._memory or [
            floor.aligned(size) for size in sizes
        ]  # warm from the second time on, as our pool is
        floor.read(self._folder / str(step), sizes, self._memory)
        views = [
            memory.view(dtype).reshape(shape)
            for memory, (dtype, shape, _) in zip(self._memory, parts, strict=True)
        ]
        return jax.device_put(views, [device for *_, device in parts])

    def delete(self, step: int) -> None:
        shutil.rmtree(self._folder / str(step))

    def close(self) -> None:
        self._memory.clear()


def _own_devices(leaf: Any) -> list[Any]:
    """Returns this process's devices that have a part of an array, in the order of its shards."""
    return list(leaf.sharding.addressable_devices_indices_map(leaf.shape))


def _open(system: str, folder: Path, index: int) -> Any:
    """Opens a system on its folder."""
    if system == "floor":
        return Floor(folder / f"floor{index}")
    if system == "holdfast":
        return Holdfast(folder / system)
    return Orbax(
        folder / system, "orbax.checkpoint" if system == "orbax" else "holdfast.compat.orbax"
    )


def _systems(name: str) -> list[str]:
    return ["holdfast", "facade", "orbax"] + ["floor"] * (name != "small")


def _in_turn(systems: list[str], repeat: int) -> list[str]:
    """Returns the order of one repeat: each system has each place, and each neighbour, as often.

    What runs second finds caches and an allocator as the first left them, so no order is fair.
    """
    first = repeat // 2 % len(systems)
    order = systems[first:] + systems[:first]
    return order[::-1] if repeat % 2 else order


def _start(count: int, index: int, port: int) -> Callable[[str], None]:
    """Joins the job; returns the barrier of its processes."""
    import jax

    if count > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", count, index)
    from jax.experimental.multihost_utils import sync_global_devices

    return sync_global_devices if count > 1 else lambda point: None


def restore_fresh(name: str, folder: Path, system: str, step: int, *job: int) -> None:
    """Is one process of a job that starts again: prints how long its first restore takes."""
    import jax

    index, count, port = job
    together = _start(count, index, port)
    like = make_like(name)
    opened = _open(system, folder, index)
    together("opened")
    began = time.perf_counter()
    found = opened.restore(step, like)
    jax.block_until_ready(found)
    print("RESULT " + json.dumps(time.perf_counter() - began), flush=True)
    together("restored")
    opened.close()
    if count > 1:
        jax.distributed.shutdown()


def work(name: str, folder: Path, repeats: int, *job: int) -> None:
    """Works as one process of one workload: prints a JSON object of times.

    It leaves a step for fresh restores.
    """
    import jax

    index, count, port = job
    together = _start(count, index, port)
    like = make_like(name)
    state = make_state(like)
    jax.block_until_ready(state)
    systems: dict[str, Any] = {system: _open(system, folder, index) for system in _systems(name)}
    times: dict[str, Any] = {
        system: {key: [] for key in FIGURES} | {"peak_extra_bytes": 0} for system in systems
    }
    for step in range(repeats + 1):
        for kind in _in_turn(list(systems), step):
            system = systems[kind]
            # what the system before has left for the kernel to write would be charged to this one
            os.sync()
            together(f"{kind} save {step}")
            before = _reset_peak()
            began = time.perf_counter()
            finish = system.save(step, state)
            blocked = time.perf_counter() - began
            finish()
            total = time.perf_counter() - began
            peak = _peak() - before
            figures = {"total": total, "blocked": blocked}
            os.sync()
            for key in ("restore", "cold") if WORKLOADS[name][2] else ("restore",):
                if key == "cold":
                    drop_pages(folder)
                together(f"{kind} saved {step} {key}")
                began = time.perf_counter()
                found = system.restore(step, like)
                jax.block_until_ready(found)
                figures[key] = time.perf_counter() - began
                if kind != "floor" and step == 0:
                    _check(state, found)
                del found
                let_go()
            together(f"{kind} restored {step}")
            began = time.perf_counter()
            system.delete(step)
            figures["delete"] = time.perf_counter() - began
            if step:
                for key, seconds in figures.items():
                    times[kind][key].append(seconds)
                times[kind]["peak_extra_bytes"] = max(peak, times[kind]["peak_extra_bytes"])
    for system in systems.values():
        system.save(repeats + 1, state)()
        system.close()
    print("RESULT " + json.dumps(times), flush=True)
    if count > 1:
        jax.distributed.shutdown()


def _check(state: Any, found: Any) -> None:
    import jax
    import numpy as np

    for left, right in zip(jax.tree.leaves(state), jax.tree.leaves(found), strict=True):
        for a, b in zip(left.addressable_shards, right.addressable_shards, strict=True):
            assert np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes()


def let_go() -> None:
    """Gives the memory of dead arrays back to the system.

    What one system keeps would be missing for the next.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def drop_pages(folder: Path) -> None:
    """Has the kernel forget what it holds of all files, which are clean by now."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)  # Orbax leaves pages unwritten, and those stay
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def _reset_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key + ":"))


def run_job(name: str, *words: object) -> list[Any]:
    """Runs the processes of one job of a workload; returns what each printed.

    They get these words, and their places in the job.
    """
    count, devices, *_ = WORKLOADS[name]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    command = [sys.executable, __file__, *map(str, words)]
    processes = [
        subprocess.Popen(
            [*command, str(index), str(count), str(port)],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
            cwd=HERE,
        )
        for index in range(count)
    ]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"{name} failed:\n" + "\n".join(outputs))
    return [
        json.loads(line.removeprefix("RESULT "))
        for output in outputs
        for line in output.splitlines()
        if line.startswith("RESULT")
    ]


def run(name: str, root: Path, repeats: int) -> dict[str, Any]:
    """Runs one workload; returns, for each figure, the slowest process's times."""
    folder = Path(tempfile.mkdtemp(prefix="versus-", dir=root))
    try:
        found = run_job(name, "--worker", name, folder, repeats)
        merged: dict[str, Any] = {}
        for system in found[0]:
            merged[system] = {
                key: [
                    max(times) for times in zip(*(one[system][key] for one in found), strict=True)
                ]
                for key in FIGURES
            }
            merged[system]["peak_extra_bytes"] = max(
                one[system]["peak_extra_bytes"] for one in found
            )
        for repeat in range(repeats):
            for system in _in_turn(list(merged), repeat):
                words = ("--fresh", name, folder, system, repeats + 1)
                merged[system]["fresh"].append(max(run_job(name, *words)))
        return merged
    finally:
        shutil.rmtree(folder)


def table(results: dict[str, Any]) -> str:
    """Returns the medians, in seconds, and how many times Orbax's they are."""
    heads = [
        "work",
        "system",
        "save, total",
        "save, blocked",
        "restore, warm",
        "restore, fresh",
        "restore, cold",
        "delete",
    ]
    heads += ["peak extra host memory"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, found in results.items():
        *_, label, wanted = WORKLOADS[name]
        medians = {system: _medians(times) for system, times in found.items()}
        for system, figures in medians.items():
            cells = {key: f"{figures[key]:.4g}" if key in figures else "" for key in FIGURES}
            if system == "holdfast":
                for key, want in zip(FIGURES, wanted, strict=False):
                    cells[key] += (
                        f" (**{medians['orbax'][key] / figures[key]:.1f}x**, wanted {want:g}x)"
                    )
                cells["fresh"] += f" (**{medians['orbax']['fresh'] / figures['fresh']:.1f}x**)"
            if system == "facade":
                for key in ("total", "blocked", "restore", "fresh"):
                    cells[key] += f" ({figures[key] / medians['holdfast'][key]:.2f} of holdfast's)"
            if system == "floor":
                cells["blocked"] = cells["delete"] = ""
                for key in ("total", "restore", "fresh"):
                    cells[key] += (
                        f" (holdfast takes {medians['holdfast'][key] / figures[key]:.2f} of it)"
                    )
            lines.append(
                f"| {label} | {system} | {' | '.join(cells.values())} |"
                f" {found[system]['peak_extra_bytes'] >> 20} MiB |"
            )
    return "\n".join(lines)


def _medians(times: dict[str, Any]) -> dict[str, float]:
    return {key: statistics.median(times[key]) for key in FIGURES if times[key]}


def bars(results: dict[str, Any]) -> str:
    """Returns a plot in text: how many times Orbax's speed, on a scale that doubles."""
    lines = []
    for name, found in results.items():
        ours = _medians(found["holdfast"])
        theirs = _medians(found["orbax"])
        for key in ours:
            ratio = theirs[key] / ours[key]
            lines.append(
                f"{name:7} {key:8} {'█' * round(5 * math.log2(max(ratio, 1)))} {ratio:.1f}x"
            )
    return "\n".join(lines)


def machine() -> str:
    memory = next(
        int(line.split()[1]) >> 20
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal")
    )
    return f"{os.cpu_count()} cores, {memory} GiB of memory, Linux {os.uname().release}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--only", nargs="*", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    before = os.getloadavg()
    results = {}
    for name in options.only:
        results[name] = run(
            name, options.disk if WORKLOADS[name][2] else options.memory, options.repeats
        )
        print(table({name: results[name]}), flush=True)
    after = os.getloadavg()
    load = f"load average {before[0]:.1f} before and {after[0]:.1f} after"
    text = (
        f"{machine()}; {load}; median of {options.repeats}; seconds; the slowest process"
        f" counts.\n\n{table(results)}\n\n"
    )
    text += f"Times Orbax's speed; each five marks double it:\n\n```\n{bars(results)}\n```\n"
    print(text)
    if options.write:
        from plot import draw

        draw(bars(results), "versus_orbax.svg", "Times Orbax's speed; five marks double it")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        sys.path.insert(0, str(HERE))
        work(sys.argv[2], Path(sys.argv[3]), *map(int, sys.argv[4:]))
    elif sys.argv[1:2] == ["--fresh"]:
        sys.path.insert(0, str(HERE))
        restore_fresh(sys.argv[2], Path(sys.argv[3]), sys.argv[4], *map(int, sys.argv[5:]))
    else:
        main()
