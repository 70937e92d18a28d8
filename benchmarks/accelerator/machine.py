"""What the parts share: states, bare copies, the host's memory, files."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from plan import SMALL_LEAF_BYTES

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # the other benchmarks

import floor
import versus_orbax

__all__ = ["floor", "versus_orbax"]
PINNED = "pinned_host"


def time_of(call: Callable[[], Any]) -> float:
    """Returns how long a call takes, what it returns being ready."""
    began = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - began


def make_state(nbytes: int, leaves: int) -> dict[str, jax.Array]:
    """Returns random numbers on the device, two thirds of the leaves f32 and one third bf16."""
    elements = nbytes * 6 // (20 * leaves)

    def draw(dtype: Any) -> Any:
        return jax.jit(lambda seed: jax.random.normal(jax.random.key(seed), (elements,), dtype))

    kinds = [draw(jnp.float32), draw(jnp.float32), draw(jnp.bfloat16)]
    state = {f"leaf{index:03d}": kinds[index % 3](index) for index in range(leaves)}
    ready: dict[str, jax.Array] = jax.block_until_ready(state)
    return ready


def make_small(leaves: int) -> dict[str, jax.Array]:
    """Returns so many small leaves."""
    make = jax.jit(lambda seed: jnp.full((SMALL_LEAF_BYTES // 4,), seed, jnp.float32))
    state = {f"leaf{index:04d}": make(float(index)) for index in range(leaves)}
    ready: dict[str, jax.Array] = jax.block_until_ready(state)
    return ready


def nbytes_of(state: Any) -> int:
    """Returns the bytes of all leaves."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def copy_to_host(state: Any, device: jax.Device) -> Any:
    """Copies a state to the host with nothing else: into pinned memory, where there is such."""
    if device.platform == "cpu":
        return jax.tree.map(lambda leaf: np.array(leaf, copy=True), state)
    return jax.device_put(state, SingleDeviceSharding(device, memory_kind=PINNED))


def same_bits(one: Any, other: Any) -> bool:
    """Says whether two states have the same bits, compared on the device."""

    @jax.jit
    def differ(left: Any, right: Any) -> Any:
        bits = {2: jnp.uint16, 4: jnp.uint32}[left.dtype.itemsize]
        view = jax.lax.bitcast_convert_type
        return (view(left, bits) != view(right, bits)).any()

    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return not any(differ(left, right) for left, right in pairs)


def free_bytes() -> int:
    """Returns what the machine has left of its memory, or this process's cgroup."""
    from holdfast.checkpoint.memory.budget import free_host_bytes

    return free_host_bytes()


def room_bytes(folder: Path) -> int:
    """Returns what a disk has left."""
    return shutil.disk_usage(folder).free


def describe_memory(device: jax.Device) -> str:
    """Returns the memories of a device."""
    limit = (device.memory_stats() or {}).get("bytes_limit")
    kinds = ", ".join(sorted(memory.kind for memory in device.addressable_memories()))
    return (f"{limit / 2**30:.1f} GiB for jax; " if limit else "") + kinds


def remove(folder: Path) -> None:
    """Removes a folder, and has the disk done with it."""
    shutil.rmtree(folder, ignore_errors=True)
    os.sync()


def resident_bytes() -> int:
    """Returns what this process has in the host's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def reset_peak() -> None:
    """Begins the peak anew, where the kernel can."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Returns the most that this process had since then."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def available_bytes() -> int:
    """Returns what the machine has left. Pinned memory is missing here, and is in no process."""
    text = Path("/proc/meminfo").read_text()
    return int(text.split("MemAvailable:")[1].split()[0]) << 10
