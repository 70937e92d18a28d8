"""The reader of an item: any region of any leaf, in few reads, each chunk checked."""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint import CheckpointError, Corrupt, HostileCheckpoint, load, save
from holdfast.checkpoint.format.item_report import FileReport
from holdfast.checkpoint.format.pack_header import PREFIX_BYTES
from holdfast.checkpoint.format.record import ItemRecord, read_record
from holdfast.checkpoint.restoring.reader import RANGE_BYTES, STEP_BYTES, ItemReader, ReadRequest
from holdfast.checkpoint.restoring.restore import allocate
from holdfast.checkpoint.storage import local
from holdfast.checkpoint.storage.bucket import BucketStorage
from holdfast.checkpoint.storage.counting import CountingStorage
from holdfast.checkpoint.storage.local import LocalStorage


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    bounds = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return tuple((start, stop) for start, stop in bounds)


ARRAYS = {
    "big": np.arange((9 << 20) // 2, dtype=np.uint16).reshape(9, 1 << 10, -1),
    "empty": np.zeros((0, 3), np.float32),
    "scalar": np.float64(2.5),
    **{f"small{i}": np.arange(i * 7, dtype=np.int16) for i in range(40)},
}


class Reads(LocalStorage):
    """A local store that keeps (offset, bytes) of its reads."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads: list[tuple[int, int]] = []

    def read(self, name: str, offset: int, buffers: Any) -> int:
        self.reads.append((offset, sum(buffer.nbytes for buffer in buffers)))
        return super().read(name, offset, buffers)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Reads, ItemRecord]:
    root = tmp_path_factory.mktemp("item")
    save(root, ARRAYS)
    storage = Reads(root)
    return storage, read_record(storage, "").items["state"]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_regions_are_read_exactly(saved: tuple[Reads, ItemRecord], data: st.DataObject) -> None:
    """Whatever regions of whatever leaves are asked for together, overlapping ones and empty ones
    too, each is numpy's slice.
    """
    storage, item = saved
    leaves = data.draw(st.lists(st.sampled_from(item.leaves), min_size=1, max_size=6))
    reads = [ReadRequest(leaf, data.draw(regions(leaf.shape))) for leaf in leaves]
    ItemReader(storage, "", item).fill(reads, allocate)
    for read in reads:
        expected = np.asarray(ARRAYS[read.leaf.path])[
            tuple(slice(*bounds) for bounds in read.region)
        ]
        assert (
            read.array is not None
            and read.array.shape == expected.shape
            and read.array.tobytes() == expected.tobytes()
        )


def test_small_chunks_are_read_together(saved: tuple[Reads, ItemRecord]) -> None:
    """Forty small leaves, which lie side by side, cost two reads besides the checks of the
    header.
    """
    storage, item = saved
    reader = ItemReader(storage, "", item)
    reader.load_headers(range(len(item.files)))
    storage.reads.clear()
    reads = [
        ReadRequest(leaf, ((0, leaf.shape[0]),))
        for leaf in item.leaves
        if leaf.path.startswith("small")
    ]
    reader.fill(reads, allocate)
    assert len(reads) == 40 and len(storage.reads) <= 2
    assert all(
        read.array is not None and read.array.tobytes() == ARRAYS[read.leaf.path].tobytes()
        for read in reads
    )


def test_headers_are_read_once(saved: tuple[Reads, ItemRecord]) -> None:
    """What is known of a pack is not read again."""
    storage, item = saved
    reader = ItemReader(storage, "", item)
    first = dict(reader.load_headers([0]))
    storage.reads.clear()
    assert reader.load_headers([0]) == first and storage.reads == []


def test_groups_are_bounded(saved: tuple[Reads, ItemRecord]) -> None:
    """No read is longer than a large chunk's step or a range of small ones."""
    storage, item = saved
    storage.reads.clear()
    ItemReader(storage, "", item).check_all()
    assert max(nbytes for _, nbytes in storage.reads) <= max(RANGE_BYTES, STEP_BYTES)
    assert sum(nbytes for _, nbytes in storage.reads) >= sum(
        np.asarray(array).nbytes for array in ARRAYS.values()
    )


class Meeting(BucketStorage):
    """A store whose reads of a whole step wait until three of them are on their way at once."""

    step_bytes = 4 * PREFIX_BYTES
    barrier = threading.Barrier(3)

    def read_sized(
        self, name: str, offset: int, buffers: Sequence[memoryview]
    ) -> tuple[int, int | None]:
        if sum(buffer.nbytes for buffer in buffers) == self.step_bytes:
            self.barrier.wait(30)
        return super().read_sized(name, offset, buffers)


@pytest.mark.parametrize("columns", [512, 100], ids=["straight", "gathered"])
def test_ranges_of_one_chunk_are_asked_side_by_side(columns: int) -> None:
    """Over a network the ranges of a large chunk do not wait for one another, whether they go
    straight into an array or not; so do those of a verification.
    """
    root = f"memory://{uuid.uuid4().hex}"
    save(root, {"big": ARRAYS["big"]})
    storage = Meeting(root)
    item = read_record(storage, "").items["state"]
    reader = ItemReader(storage, "", item)
    reader.step_bytes = storage.step_bytes
    read = ReadRequest(item.leaves[0], ((0, 9), (0, 1024), (0, columns)))
    reader.fill([read], allocate)
    assert read.array is not None
    assert read.array.tobytes() == ARRAYS["big"][:, :, :columns].tobytes()
    reader.check_all()


def test_a_chunk_and_a_header_open_their_file_once_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk the steps of a large chunk share one open file, and so do the two reads of a
    header; a wrapper that counts changes nothing.
    """
    save(tmp_path, {"big": ARRAYS["big"]})
    opened: list[Path] = []

    really_open = local.open_to_read

    def open_to_read(path: Path) -> int:
        opened.append(path)
        return really_open(path)

    monkeypatch.setattr(local, "open_to_read", open_to_read)
    counted: list[int] = []
    storage = CountingStorage(LocalStorage(tmp_path), counted.append)
    item = read_record(storage, "").items["state"]
    opened.clear()
    counted.clear()
    reader = ItemReader(storage, "", item)
    read = ReadRequest(item.leaves[0], tuple((0, size) for size in ARRAYS["big"].shape))
    reader.fill([read], allocate)
    assert read.array is not None and read.array.tobytes() == ARRAYS["big"].tobytes()
    assert len(opened) == 2  # header, chunk
    assert len(counted) == 2 + -(-read.nbytes // STEP_BYTES)


BIG_ROW = ARRAYS["big"][0].nbytes


@pytest.mark.parametrize(
    ("region", "most"),
    [
        (((0, 9), (0, 1024), (0, 512)), 9 * BIG_ROW),
        (((4, 5), (0, 1024), (0, 512)), BIG_ROW),
        (((4, 5), (100, 300), (0, 512)), 200 * 1024 + 2 * PREFIX_BYTES),
        (((4, 5), (100, 101), (7, 9)), 2 * PREFIX_BYTES),
        (((2, 4), (0, 1024), (5, 6)), 2 * BIG_ROW),
    ],
    ids=["all", "a row", "rows of a row", "two items", "a column"],
)
def test_bytes_read_follow_bytes_needed(
    saved: tuple[Reads, ItemRecord], region: tuple[tuple[int, int], ...], most: int
) -> None:
    """Of a large chunk the rows that are needed are read, out to the nearest blocks, and no byte
    twice.
    """
    storage, item = saved
    reader = ItemReader(storage, "", item)
    reader.load_headers(range(len(item.files)))
    storage.reads.clear()
    (big,) = (leaf for leaf in item.leaves if leaf.path == "big")
    read = ReadRequest(big, region)
    reader.fill([read], allocate)
    assert (
        read.array is not None
        and read.array.tobytes()
        == ARRAYS["big"][tuple(slice(*bounds) for bounds in region)].tobytes()
    )
    assert sum(nbytes for _, nbytes in storage.reads) <= most


def test_two_stretches_of_a_chunk_are_read_without_what_lies_between(
    saved: tuple[Reads, ItemRecord],
) -> None:
    """The first and the last row of a chunk, for two devices, cost two rows; two that lie close
    together are one stretch.
    """
    storage, item = saved
    reader = ItemReader(storage, "", item)
    reader.load_headers(range(len(item.files)))
    (big,) = (leaf for leaf in item.leaves if leaf.path == "big")
    for rows, most in (((0, 8), 2 * BIG_ROW), ((3, 4), 2 * BIG_ROW)):
        storage.reads.clear()
        reads = [ReadRequest(big, ((row, row + 1), (0, 1024), (0, 512))) for row in rows]
        reader.fill(reads, allocate)
        for row, read in zip(rows, reads, strict=True):
            assert read.array is not None and read.array.tobytes() == ARRAYS["big"][row].tobytes()
        ranges = sorted(storage.reads)
        assert sum(nbytes for _, nbytes in ranges) <= most
        assert all(
            first + nbytes <= second for (first, nbytes), (second, _) in itertools.pairwise(ranges)
        )


def test_a_flipped_byte_in_a_needed_block_is_corrupt(tmp_path: Path) -> None:
    """Whatever block is read is checked, and one that is not read is not: each block of a chunk is
    flipped in turn.
    """
    array = np.arange(5 * 100_003, dtype=np.float32).reshape(
        100_003, 5
    )  # 2 MB, no multiple of a block
    save(tmp_path, {"w": array})
    storage = LocalStorage(tmp_path)
    item = read_record(storage, "").items["state"]
    (pack,) = tmp_path.glob("state/*")
    needed = slice(30_000, 40_000)
    first, last = (row * 20 // PREFIX_BYTES for row in (needed.start, needed.stop))
    data = pack.read_bytes()
    for block in range(-(-array.nbytes // PREFIX_BYTES)):
        flipped = bytearray(data)
        flipped[item.files[0].head + block * PREFIX_BYTES + 99] ^= 4
        pack.write_bytes(flipped)
        read = ReadRequest(item.leaves[0], ((needed.start, needed.stop), (0, 5)))
        if first <= block <= last:
            with pytest.raises(Corrupt, match="'w"):
                ItemReader(storage, "", item).fill([read], allocate)
        else:
            ItemReader(storage, "", item).fill([read], allocate)
            assert read.array is not None and read.array.tobytes() == array[needed].tobytes()
        with pytest.raises(Corrupt, match="'w'"):
            load(tmp_path)


@pytest.mark.parametrize("has_header", [True, False])
def test_a_whole_file_is_checked_in_pieces(has_header: bool, tmp_path: Path) -> None:
    """However long it is, a piece is held at a time; a flipped byte anywhere, an early end and a
    header beyond all bounds are noticed.
    """
    save(tmp_path, {"big": ARRAYS["big"], "small": np.arange(9), "none": ARRAYS["empty"]})
    item = read_record(LocalStorage(tmp_path), "").items["state"]
    (file,) = item.files
    if not has_header:
        file = replace(file, head=0, crc=crc32c((tmp_path / file.name).read_bytes()))
    reader = ItemReader(LocalStorage(tmp_path), "", item)
    path = tmp_path / file.name
    data = path.read_bytes()
    pieces = [bytes(piece) for piece in reader.pieces(file)]
    assert b"".join(pieces) == data and max(map(len, pieces)) <= STEP_BYTES < len(data)
    for at in (9, file.head, file.head + STEP_BYTES, len(data) - 1):
        flipped = bytearray(data)
        flipped[at] ^= 4
        path.write_bytes(flipped)
        with pytest.raises(Corrupt, match="the checksum of "):
            reader.check_file(file)
    for damaged in (data[:-1], data + b"x"):
        path.write_bytes(damaged)
        with pytest.raises(Corrupt):
            reader.check_file(file)
    with pytest.raises(HostileCheckpoint):
        reader.check_file(FileReport(file.name, 1 << 60, 1 << 59, 0))


def test_a_lack_of_memory_is_a_typed_error(saved: tuple[Reads, ItemRecord]) -> None:
    """Where the host has no memory for a leaf, the error names it and says what to do."""

    def refuse(nbytes: int) -> np.ndarray:
        raise MemoryError

    storage, item = saved
    (big,) = (leaf for leaf in item.leaves if leaf.path == "big")
    with pytest.raises(
        CheckpointError,
        match=r"no memory for the 9,437,184 bytes of 'big'.* divided over more processes",
    ):
        ItemReader(storage, "", item).fill(
            [ReadRequest(big, tuple((0, size) for size in big.shape))], refuse
        )
