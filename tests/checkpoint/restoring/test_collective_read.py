"""The collective read's pure parts: who reads what, and bits that a collective must not change.
tests/system runs it in a job.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from holdfast.checkpoint.arrays.dtypes import dtype_named
from holdfast.checkpoint.layouts.base import fresh
from holdfast.checkpoint.memory.pool import ALIGN_BYTES
from holdfast.checkpoint.restoring.collective_read import (
    _bundles,
    _from_bits,
    _route,
    _share_bytes,
    _share_chunks,
    _to_bits,
    read_once,
)
from holdfast.checkpoint.restoring.match import LeafRequest
from holdfast.checkpoint.restoring.reader import ArrayReader, ReadRequest
from tests.support.array_readers import MemoryReader, record_of

DTYPES = (
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "complex64",
    "int8",
    "int4",
    "uint2",
    "uint32",
    "bool",
)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 9))
def test_bytes_are_shared_in_order(sizes: list[int], count: int) -> None:
    """Rows take leaves in order and do not overlap; none is longer than an even share and the two
    leaves at its ends.
    """
    aligned = np.array(sizes, np.int64) * ALIGN_BYTES
    rows, starts, width = _share_bytes(aligned, count)
    assert (np.diff(rows) >= 0).all() and rows.min() >= 0 and rows.max() < count
    for row in range(count):
        mine = np.flatnonzero(rows == row)
        assert (
            starts[mine].tolist()
            == np.concatenate([[0], np.cumsum(aligned[mine])])[: len(mine)].tolist()
        )
        assert aligned[mine].sum() <= min(width, aligned.sum() / count + 2 * aligned.max())


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 5)), min_size=1, max_size=30),
    st.integers(1, 8),
)
def test_chunks_are_shared_evenly(leaves: list[tuple[int, int]], count: int) -> None:
    """A leaf's chunks go to different rows as far as there are some, begun at the least loaded; the
    loads are the bytes.
    """
    load = np.zeros(count, np.int64)
    for length, chunk in leaves:
        leaf = record_of("w", np.zeros(length, np.uint8), (min(chunk, length),))
        assert leaf.grid is not None
        before = load.copy()
        rows = _share_chunks(leaf, load)
        chunks = np.bincount(rows, minlength=count)
        assert len(rows) == leaf.grid.num_chunks and before[rows[0]] == before.min()
        assert chunks.max() - chunks.min() <= 1 and load.sum() == before.sum() + length


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_come_back(dtype: str) -> None:
    """Every bit pattern, signalling NaNs among them, survives the disguise as whole numbers and a
    sum with zeros.
    """
    kind = dtype_named(dtype)
    assert kind is not None
    if dtype in ("bool", "int4", "uint2"):
        array = jnp.asarray(np.arange(4).astype(kind))
    else:
        array = jnp.asarray(np.random.default_rng(0).integers(0, 256, 4096, np.uint8).view(kind))
    bits = _to_bits(array)
    assert not jnp.issubdtype(bits.dtype, jnp.floating)
    again = _from_bits(
        jnp.sum(jnp.stack([jnp.zeros_like(bits), bits]), 0, dtype=bits.dtype), array.dtype
    )
    assert again.dtype == array.dtype and np.asarray(again).tobytes() == np.asarray(array).tobytes()


def test_one_process_needs_no_collective() -> None:
    """Leaves that are all on this process's devices, and values, are in no bundle and keep their
    request as their route.
    """
    sharding = NamedSharding(jax.make_mesh((1,), ("x",)), PartitionSpec())
    requests = [
        LeafRequest(record_of("w", np.zeros(5)), "jax", None, sharding),
        LeafRequest(record_of("v", np.zeros(5)), "numpy"),
    ]
    assert list(_bundles(requests)) == []
    assert [_route(request, {}).request for request in requests] == requests


def test_reading_once_is_reading_where_there_is_one_process() -> None:
    """Through `read_once` the values, and the one batch that is read, are those of a plain read."""
    arrays = {"a": np.arange(6.0, dtype=np.float32), "b": np.arange(4)}
    requests = [LeafRequest(record_of(path, array), "numpy") for path, array in arrays.items()]
    reader = MemoryReader(arrays)

    def read(inner: ArrayReader, requests: Sequence[LeafRequest]) -> list[Any]:
        reads = [ReadRequest(request.leaf, ((0, request.leaf.shape[0]),)) for request in requests]
        inner.fill(reads, fresh)
        return [read.array for read in reads]

    found = read_once(reader, requests, read, fresh, lambda: None)
    assert [array.tolist() for array in found] == [
        array.tolist() for array in arrays.values()
    ] and len(reader.batches) == 1
