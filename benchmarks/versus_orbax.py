"""Saves and restores with holdfast, its facade, Orbax and bare I/O; prints medians.

    python benchmarks/versus_orbax.py [--repeats 3] [--disk FOLDER] [--memory /dev/shm]
        [--only NAME ...] [--systems NAME ...] [--write]

Each system saves in processes of its own, which do nothing before: the first save of a process is a
figure of its own, and so are those after it, each of arrays that are new. The systems take turns.
"blocked" is how long the call of `save` keeps the caller, "total" ends when the step is durable and
committed. Processes of their own restore: first into new memory ("fresh", as a job that starts
again does), then again ("warm"), then after the kernel was told to drop the files' pages ("cold",
disk only); they delete an old step at the end. `busy` saves behind ten steps of 0.15 s that the
device has yet to make.

`--write` puts the figures, with command, machine and date, into versus_orbax.json, and writes
RESULTS-orbax.md and the table of README from that. Run it on a quiet machine: the load is among the
figures.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import gc
import importlib
import importlib.metadata
import itertools
import json
import math
import os
import platform
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
RESULTS = HERE / "versus_orbax.json"
PAGE = HERE / "RESULTS-orbax.md"
README = HERE.parent / "README.md"
BEGIN = "<!-- Made by benchmarks/versus_orbax.py: begin -->"
END = "<!-- Made by benchmarks/versus_orbax.py: end -->"
LATER = 2  # saves of a process after its first
BUSY_STEPS = 10
BUSY_STEP_S = 0.15
FIGURES = {
    "first total": "save, first",
    "total": "save, later",
    "first blocked": "blocked, first",
    "blocked": "blocked, later",
    "fresh": "restore, new process",
    "warm": "restore, again",
    "cold": "restore, cold disk",
    "delete": "delete",
}
IN_README = ("first total", "total", "first blocked", "blocked", "fresh", "warm")
# name: (processes, devices of each, on disk, what it is)
WORKLOADS: dict[str, tuple[int, int, bool, str]] = {
    "disk": (1, 4, True, "1 GiB in 64 arrays over 4 devices"),
    "replicated": (1, 4, True, "256 MiB in 64 arrays, each whole on 4 devices"),
    "big": (1, 4, True, "1 GiB in one array over 4 devices"),
    "small": (1, 4, True, "4,000 arrays of 1 KiB, each whole on 4 devices"),
    "adam": (4, 2, True, "3 GB of bf16 parameters and f32 moments, 4 processes"),
    "busy": (1, 1, True, "4 MiB behind ten steps of 0.15 s on the device"),
    "memory": (1, 4, False, "1 GiB in 64 arrays over 4 devices, in memory (tmpfs)"),
}
DEFAULT = [name for name in WORKLOADS if name != "memory"]


def make_like(name: str) -> dict[str, Any]:
    """Returns the tree of a workload, as shapes with shardings."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    spread = NamedSharding(mesh, PartitionSpec("x"))
    everywhere = NamedSharding(mesh, PartitionSpec())

    def leaves(count: int, shape: tuple[int, ...], dtype: Any, sharding: Any) -> dict[str, Any]:
        like = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        return {f"layer{number:04d}": like for number in range(count)}

    match name:
        case "small":
            return leaves(4000, (256,), jnp.float32, everywhere)
        case "replicated":
            return leaves(64, (1024, 1024), jnp.float32, everywhere)
        case "big":
            return leaves(1, (1 << 14, 1 << 14), jnp.float32, spread)
        case "adam":
            kinds = {"params": jnp.bfloat16, "mu": jnp.float32, "nu": jnp.float32}
            return {kind: leaves(24, (3072, 4096), dtype, spread) for kind, dtype in kinds.items()}
        case "busy":
            return leaves(1, (1024, 1024), jnp.float32, spread)
    return leaves(64, (2048, 2048), jnp.float32, spread)


def make_state(like: dict[str, Any], step: int) -> dict[str, Any]:
    """Returns arrays of random bits, as `like` says, which are others at each step."""
    import jax
    import numpy as np

    numbers = itertools.count()

    def fill(leaf: Any) -> Any:
        number = next(numbers)

        def part(index: Any) -> Any:
            rows = range(*index[0].indices(leaf.shape[0]))
            shape = (len(rows), *leaf.shape[1:])
            size = math.prod(shape) * leaf.dtype.itemsize
            bits = np.random.default_rng((step, number, rows[0])).bytes(size)
            return np.frombuffer(bits, leaf.dtype).reshape(shape)

        return jax.make_array_from_callback(leaf.shape, leaf.sharding, part)

    filled: dict[str, Any] = jax.tree.map(fill, like)
    return jax.block_until_ready(filled)


def busy_steps(state: Any) -> Callable[[Any], Any]:
    """Returns what begins steps of BUSY_STEP_S each, and returns the state after them."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def step(tree: Any, rounds: int) -> Any:
        def work(_: int, leaf: Any) -> Any:
            return jnp.tanh(leaf @ leaf)

        return jax.tree.map(lambda leaf: jax.lax.fori_loop(0, rounds, work, leaf), tree)

    jax.block_until_ready(step(state, 1))
    began = time.perf_counter()
    jax.block_until_ready(step(state, 20))
    rounds = max(1, round(20 * BUSY_STEP_S / (time.perf_counter() - began)))

    def begin(tree: Any) -> Any:
        for _ in range(BUSY_STEPS):
            tree = step(tree, rounds)
        return tree

    return begin


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


def systems_of(name: str, chosen: list[str]) -> list[str]:
    """Returns the systems of a workload. Bare I/O has no small arrays, and no steps to wait for."""
    return [system for system in chosen if system != "floor" or name not in ("small", "busy")]


def _start(count: int, index: int, port: int) -> Callable[[str], None]:
    """Joins the job; returns the barrier of its processes."""
    import jax

    if count > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", count, index)
    from jax.experimental.multihost_utils import sync_global_devices

    return sync_global_devices if count > 1 else lambda point: None


def save(name: str, folder: Path, system: str, *job: int) -> None:
    """Is one process of a job that saves: prints how long its first save takes, and the others."""
    import jax

    index, count, port = job
    together = _start(count, index, port)
    like = make_like(name)
    opened = _open(system, folder, index)
    begin = busy_steps(make_state(like, 0)) if name == "busy" else None
    times: dict[str, Any] = {"total": [], "blocked": []}
    peak = 0
    for step in range(1, LATER + 2):
        state = make_state(like, step)
        os.sync()
        together(f"save {step}")
        if begin is not None:
            state = begin(state)
        before = _reset_peak()
        began = time.perf_counter()
        finish = opened.save(step, state)
        times["blocked"].append(time.perf_counter() - began)
        finish()
        times["total"].append(time.perf_counter() - began)
        peak = max(peak, _peak() - before)
        del state
        let_go()
    together("saved")
    opened.close()
    print("RESULT " + json.dumps(times | {"peak_extra_bytes": peak}), flush=True)
    if count > 1:
        jax.distributed.shutdown()


def restore(name: str, folder: Path, system: str, *job: int) -> None:
    """Is one process of a job that starts again: prints how long its restores take."""
    import jax

    index, count, port = job
    together = _start(count, index, port)
    like = make_like(name)
    step = LATER + 1
    opened = _open(system, folder, index)
    times = {}
    for key in ("fresh", "warm", "cold") if WORKLOADS[name][2] else ("fresh", "warm"):
        if key == "cold":
            drop_pages(folder)
        together(key)
        began = time.perf_counter()
        found = opened.restore(step, like)
        jax.block_until_ready(found)
        times[key] = time.perf_counter() - began
        if key == "warm" and system != "floor":
            _check(make_state(like, step), found)
        del found
        let_go()
    together("restored")
    began = time.perf_counter()
    opened.delete(1)
    times["delete"] = time.perf_counter() - began
    together("deleted")
    opened.close()
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


def run(name: str, root: Path, repeats: int, chosen: list[str]) -> dict[str, Any]:
    """Runs one workload; returns, for each figure of a system, the slowest process's times."""
    systems = systems_of(name, chosen)
    found: dict[str, Any] = {
        system: {key: [] for key in FIGURES} | {"peak_extra_bytes": 0} for system in systems
    }
    for repeat in range(repeats):
        for system in systems if repeat % 2 else systems[::-1]:
            folder = Path(tempfile.mkdtemp(prefix="versus-", dir=root))
            try:
                _run_once(name, folder, system, found[system])
            finally:
                shutil.rmtree(folder)
    return found


def _run_once(name: str, folder: Path, system: str, figures: dict[str, Any]) -> None:
    (folder / system).mkdir()
    saves = run_job(name, "--save", name, folder, system)
    for key in ("total", "blocked"):
        slowest = [max(of_all) for of_all in zip(*(one[key] for one in saves), strict=True)]
        figures[f"first {key}"].append(slowest[0])
        figures[key] += slowest[1:]
    peaks = [one["peak_extra_bytes"] for one in saves]
    figures["peak_extra_bytes"] = max(*peaks, figures["peak_extra_bytes"])
    if name == "busy":
        return
    restores = run_job(name, "--restore", name, folder, system)
    for key in restores[0]:
        figures[key].append(max(one[key] for one in restores))


def medians(times: dict[str, Any]) -> dict[str, float]:
    """Returns the medians of the figures that were taken."""
    return {key: statistics.median(times[key]) for key in FIGURES if times[key]}


def measured(name: str, root: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Runs a workload; returns what is kept of it, in JSON types."""
    before = os.getloadavg()[0]
    found = run(name, root, options.repeats, options.systems)
    return {
        "command": f"--repeats {options.repeats} --only {name}",
        "machine": machine(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "load": [round(before, 1), round(os.getloadavg()[0], 1)],
        "systems": {
            system: {key: round(value, 5) for key, value in medians(times).items()}
            | {"peak_extra_mib": times["peak_extra_bytes"] >> 20}
            for system, times in found.items()
        },
    }


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{value * 1e3:.0f} ms"


def _ratio(ratio: float) -> str:
    return f"{ratio:.0f} x" if ratio >= 10 else f"{ratio:.1f} x"


def readme_table(results: dict[str, Any]) -> str:
    """Returns the table of README: seconds, and how many times Orbax's speed that is. Pure."""
    heads = [FIGURES[key] for key in IN_README]
    lines = [f"| | {' | '.join(heads)} | made by, on |", "|---" * (len(heads) + 2) + "|"]
    machines = {results[name]["machine"] for name in DEFAULT if name in results}
    for name in DEFAULT:
        if name not in results:
            continue
        found = results[name]
        ours, theirs = found["systems"]["holdfast"], found["systems"]["orbax"]
        # How long steps take that are waited for says nothing about the rest of the save.
        keys = [key for key in IN_README if key in ours and (name != "busy" or "blocked" in key)]
        cells = [
            f"{_seconds(ours[key])}, {_ratio(theirs[key] / ours[key])}" if key in keys else ""
            for key in IN_README
        ]
        made = f"`{found['command']}`, {found['date']}"
        lines.append(f"| {WORKLOADS[name][3]} | {' | '.join(cells)} | {made} |")
    return "\n".join([*lines, "", "Machine: " + "; ".join(sorted(machines)) + "."])


def results_page(results: dict[str, Any]) -> str:
    """Returns RESULTS-orbax.md. Pure."""
    lines = [
        "# Beside Orbax and bare I/O",
        "",
        "Written by `benchmarks/versus_orbax.py --write`, whose docstring says what each column is."
        " Medians in",
        "seconds, of the slowest process; in brackets holdfast's times the speed. Disk with fsync."
        ' "floor" is',
        "`benchmarks/floor.py`: the same bytes by bare I/O, without checksum, record or agreement.",
    ]
    for name, found in results.items():
        load = " and ".join(map(str, found["load"]))
        lines += ["", f"## {WORKLOADS[name][3]}", ""]
        lines += [f"`python benchmarks/versus_orbax.py {found['command']}`, {found['date']}."]
        lines += [f"{found['machine']}. Load before and after: {load}.", ""]
        heads = ["system", *FIGURES.values(), "peak extra memory, MiB"]
        lines += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        ours = found["systems"]["holdfast"]
        for system, figures in found["systems"].items():
            cells = []
            for key in FIGURES:
                # Bare I/O is done when its call returns.
                is_known = key in figures and not (system == "floor" and "blocked" in key)
                cell = f"{figures[key]:.4g}" if is_known else ""
                if cell and system != "holdfast":
                    cell += f" ({figures[key] / ours[key]:.2f})"
                cells.append(cell)
            lines.append(f"| {system} | {' | '.join(cells)} | {figures['peak_extra_mib']} |")
    return "\n".join(lines) + "\n"


def write_pages(results: dict[str, Any]) -> None:
    """Writes the page of results and the table of README."""
    PAGE.write_text(results_page(results))
    before, rest = README.read_text().split(BEGIN)
    after = rest.split(END)[1]
    README.write_text(f"{before}{BEGIN}\n{readme_table(results)}\n{END}{after}")


def machine() -> str:
    """Returns cores, memory, and the versions that matter."""
    memory = next(
        int(line.split()[1]) >> 20
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal")
    )
    versions = [f"jax {importlib.metadata.version('jax')}"]
    versions += [f"Orbax {importlib.metadata.version('orbax-checkpoint')}"]
    return (
        f"{os.cpu_count()} cores, {memory} GiB of memory, CPU devices, Linux"
        f" {os.uname().release.split('-')[0]}, Python {platform.python_version()},"
        f" {', '.join(versions)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--only", nargs="*", choices=WORKLOADS, default=DEFAULT)
    systems = ["holdfast", "orbax", "floor", "facade"]
    parser.add_argument("--systems", nargs="*", choices=systems, default=systems[:3])
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    for name in options.only:
        root = options.disk if WORKLOADS[name][2] else options.memory
        found = {name: measured(name, root, options)}
        print(results_page(found), flush=True)
        if options.write:
            kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
            kept |= found
            kept = {name: kept[name] for name in WORKLOADS if name in kept}
            RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
            write_pages(kept)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    if sys.argv[1:2] in (["--save"], ["--restore"]):
        work = save if sys.argv[1] == "--save" else restore
        work(sys.argv[2], Path(sys.argv[3]), sys.argv[4], *map(int, sys.argv[5:]))
    else:
        main()
