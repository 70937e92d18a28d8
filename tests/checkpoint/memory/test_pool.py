"""Memory for what is read and copied: aligned, used again when its arrays have died, not before."""

from __future__ import annotations

import gc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint import load, save
from holdfast.checkpoint.memory.pool import ALIGN_BYTES, POOL, MemoryPool


def test_memory_is_used_again() -> None:
    """A large block goes back to the pool when the last array that looks into it dies, and not
    before.
    """
    pool = MemoryPool()
    memory = pool.take(3 << 20)
    assert memory.ctypes.data % 64 == 0 and memory.nbytes == 3 << 20
    view = memory[5:].view(np.uint8).reshape(-1)[7:]
    address = memory.ctypes.data
    del memory
    assert pool.idle_bytes() == 0
    del view
    assert pool.idle_bytes() == 3 << 20
    assert pool.take(3 << 20).ctypes.data == address
    small = MemoryPool(idle_bytes=0)
    small.take(2 << 20)
    assert small.idle_bytes() == 0


def test_restored_memory_is_not_shared(tmp_path: Path) -> None:
    """Arrays of two restores are independent, also when the first has died and been overwritten
    meanwhile.
    """
    save(tmp_path, {"w": jnp.arange(1 << 20, dtype=jnp.float32)})
    like = {"w": jax.ShapeDtypeStruct((1 << 20,), jnp.float32)}
    first = load(tmp_path, like)["w"]
    second = load(tmp_path, like)["w"]
    kept = np.asarray(second)
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    for _ in range(3):
        first = double(first)
    np.testing.assert_array_equal(kept, np.arange(1 << 20, dtype=np.float32))
    del first, second
    gc.collect()
    third = load(tmp_path, like)["w"]
    np.testing.assert_array_equal(kept, np.arange(1 << 20, dtype=np.float32))
    np.testing.assert_array_equal(np.asarray(third), kept)
    assert POOL.idle_bytes() >= 0


@given(st.integers(0, 5 << 20))
@settings(max_examples=30, deadline=None)
def test_memory_is_aligned_and_of_the_size_asked_for(nbytes: int) -> None:
    """Small and large requests are 64-aligned, writable, and have as many bytes as were asked
    for.
    """
    memory = MemoryPool().take(nbytes)
    assert (
        memory.nbytes == nbytes
        and memory.dtype == np.uint8
        and (nbytes == 0 or memory.ctypes.data % ALIGN_BYTES == 0)
    )
    memory[:] = 7


def test_what_is_in_use_again_is_told() -> None:
    """Of what is in use that counts which was idle before, until it is idle again or dropped."""
    pool = MemoryPool(idle_bytes=2 << 20)
    first = pool.take(2 << 20)
    assert pool.reused_bytes() == 0
    del first
    assert pool.reused_bytes() == 0
    first = pool.take(2 << 20)
    second = pool.take(2 << 20)
    assert pool.reused_bytes() == 2 << 20
    del second
    assert pool.reused_bytes() == pool.idle_bytes() == 2 << 20
    del first
    assert pool.reused_bytes() == 0


def test_a_closed_pool_keeps_nothing() -> None:
    """After `close` what dies goes back to the system, and memory is still handed out."""
    pool = MemoryPool()
    first = pool.take(2 << 20)
    second = pool.take(2 << 20)
    del first
    assert pool.idle_bytes() == 2 << 20
    pool.close()
    del second
    assert pool.idle_bytes() == 0 and pool.take(2 << 20).nbytes == 2 << 20
