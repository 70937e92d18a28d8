"""Packs are ordinary safetensors files that other tools open."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from crc32c import crc32c
from jax.sharding import NamedSharding, PartitionSpec
from safetensors import safe_open

from holdfast.checkpoint import load, save, verify
from holdfast.checkpoint.arrays.dtypes import _AS_BYTES, _BY_NAME, SAFETENSORS_NAMES
from holdfast.checkpoint.saving.incremental import is_unchanged
from holdfast.checkpoint.saving.pack_writer import SENT_BYTES, ChunkSums
from holdfast.checkpoint.storage.bucket import BucketStorage


def packs(path: Path) -> list[Path]:
    found = sorted(path.glob("state/*.safetensors"))
    assert found
    return found


def random_array(dtype: Any, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Returns an array of every bit pattern that its dtype allows."""
    dtype = np.dtype(dtype)
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    if dtype == np.bool_:
        return (raw[..., 0] & 1).astype(np.bool_)
    if dtype.name in (
        "int4",
        "uint4",
        "int2",
        "uint2",
        "float4_e2m1fn",
        "float6_e2m3fn",
        "float6_e3m2fn",
    ):
        return (raw[..., 0] % 3 - (dtype.name.startswith("int"))).astype(np.int8).astype(dtype)
    return raw.reshape(-1).view(dtype).reshape(shape)


def can_show(opened: Any) -> bool:
    """Says whether safetensors' numpy front end has this dtype; torch alone shows fp8 in older
    ones.
    """
    try:
        opened.get_tensor("a")
    except (TypeError, KeyError, AttributeError):
        return False
    return True


@pytest.mark.parametrize("dtype", sorted(SAFETENSORS_NAMES))
def test_safetensors_shows_the_very_arrays(tmp_path: Path, dtype: str) -> None:
    """safe_open(pack, "np") gives back the same bits for every dtype that safetensors has, bf16 and
    fp8 included where it can.
    """
    tree = {
        name: random_array(_BY_NAME[dtype], shape)
        for name, shape in (("a", (3, 5)), ("b.c", (64,)), ("d", ()), ("e", (0, 2)))
    }
    save(tmp_path, tree)
    (pack,) = packs(tmp_path)
    with safe_open(pack, "np") as opened:
        assert set(opened.keys()) == {"a", "b\\.c", "d", "e"}
        if dtype.startswith("float8") and not can_show(opened):
            return
        found = {name: opened.get_tensor(name.replace(".", "\\.")) for name in tree}
    for name, array in tree.items():
        assert (
            found[name].dtype == array.dtype
            and found[name].shape == array.shape
            and found[name].tobytes() == array.tobytes()
        )
    verify(tmp_path)


@pytest.mark.parametrize("dtype", sorted(set(_AS_BYTES) & set(_BY_NAME)))
def test_other_dtypes_travel_as_bytes(tmp_path: Path, dtype: str) -> None:
    """A dtype that safetensors lacks is U8 in the file, its last axis in bytes, and comes back as
    itself.
    """
    array = random_array(_BY_NAME[dtype], (3, 5))
    save(tmp_path, {"a": array, "zero": array[0, 0]})
    with safe_open(packs(tmp_path)[0], "np") as opened:
        raw = opened.get_tensor("a")
    assert (
        raw.dtype == np.uint8
        and raw.shape == (3, 5 * array.dtype.itemsize)
        and raw.tobytes() == array.tobytes()
    )
    found = load(tmp_path)
    assert (
        found["a"].dtype == array.dtype
        and found["a"].tobytes() == array.tobytes()
        and found["zero"].tobytes() == array[0, 0].tobytes()
    )


def test_every_jax_dtype_comes_back(tmp_path: Path) -> None:
    """Every dtype that jax has on this platform survives, as a jax.Array."""
    names = sorted(set(_BY_NAME) - {"int64", "uint64", "float64", "complex128"})
    tree = {}
    for name in names:
        try:
            tree[name] = jax.device_put(random_array(_BY_NAME[name], (4, 8)))
        except (TypeError, ValueError, jax.errors.JaxRuntimeError):
            assert name.startswith(
                ("float6", "int2", "uint2", "float4", "float8_e3m4", "float8_e4m3", "float8_e8m0")
            ), name
    save(tmp_path, tree)
    found = load(tmp_path, tree)
    for name, array in tree.items():
        assert (
            found[name].dtype == array.dtype
            and np.asarray(found[name]).tobytes() == np.asarray(array).tobytes()
        )


def test_a_file_is_as_the_format_page_says(tmp_path: Path) -> None:
    """Data begins at a multiple of 64, has no holes, and `__metadata__` holds each chunk's CRC32C
    in data order.
    """
    sharding = NamedSharding(jax.make_mesh((1,), ("x",)), PartitionSpec("x"))
    tree = {
        "odd": np.arange(3, dtype=np.int8),
        "even": np.arange(32, dtype=np.float32),
        "half": jnp.ones(3, jnp.bfloat16),
        "device": jax.device_put(np.arange(64.0, dtype=np.float32), sharding),
    }
    save(tmp_path, tree)
    data = packs(tmp_path)[0].read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__")
    crcs = metadata["crc32c"]
    assert (
        (8 + length) % 64 == 0
        and len(crcs) == 8 * len(header)
        and "crc32c_prefixes" not in metadata
    )
    at = 0
    for index, (name, entry) in enumerate(
        sorted(header.items(), key=lambda pair: pair[1]["data_offsets"])
    ):
        start, stop = entry["data_offsets"]
        assert start == at and crc32c(data[8 + length + start : 8 + length + stop]) == int(
            crcs[8 * index : 8 * index + 8], 16
        ), name
        at = stop
    assert 8 + length + at == len(data)
    assert list(header) == ["device", "even", "half", "odd"]


def test_large_chunks_have_checksums_of_their_prefixes(tmp_path: Path) -> None:
    """`crc32c_prefixes` is base64 of little-endian u32: CRC32Cs of the first 256 KiB, 512 KiB and
    so on of each chunk from 1 MiB on.
    """
    tree = {
        "a": random_array("uint8", (1 << 20,)),
        "b": random_array("uint8", ((5 << 20) + 3,), 1),
        "c": random_array("uint8", (1000,), 2),
    }
    save(tmp_path, tree)
    data = packs(tmp_path)[0].read_bytes()
    length = int.from_bytes(data[:8], "little")
    prefixes = np.frombuffer(
        base64.b64decode(json.loads(data[8 : 8 + length])["__metadata__"]["crc32c_prefixes"]), "<u4"
    ).tolist()
    step = 256 << 10
    assert prefixes == [
        crc32c(tree[name][:stop].tobytes())
        for name in "ab"
        for stop in range(step, len(tree[name]), step)
    ]
    assert len(prefixes) == 3 + 20


def test_bfloat16_is_bfloat16(tmp_path: Path) -> None:
    """A bf16 leaf is BF16 in the pack: not its bits as integers."""
    save(tmp_path, {"w": jnp.arange(6, dtype=jnp.bfloat16)})
    with safe_open(packs(tmp_path)[0], "np") as opened:
        assert opened.get_tensor("w").dtype == ml_dtypes.bfloat16


def test_a_store_that_streams_is_given_few_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    stream = BucketStorage._stream

    def noted(self: BucketStorage, upload: Any) -> None:
        buffers = list(upload.buffers())
        given.extend(buffer.nbytes for buffer in buffers)
        upload.buffers = lambda: iter(buffers)
        stream(self, upload)

    monkeypatch.setattr(BucketStorage, "_stream", noted)
    state = {"a": np.arange(5 * SENT_BYTES // 8, dtype=np.float32)}
    save("memory://few-buffers", state)
    _header, *pieces = given
    assert pieces == [SENT_BYTES, SENT_BYTES, SENT_BYTES // 2]
    assert np.array_equal(load("memory://few-buffers")["a"], state["a"])


def test_a_digest_is_the_same_whatever_the_pieces() -> None:
    data = memoryview(random_array("uint8", (SENT_BYTES + 3,)))
    sums = ChunkSums(with_digests=True)
    assert [start for start, _ in sums.add_large(data, SENT_BYTES)] == [0, SENT_BYTES]
    digest = sums.fates[0].digest
    assert digest is not None and is_unchanged(data, digest)
