"""The header of a pack: what is written is parsed, and nothing else is."""

from __future__ import annotations

import contextlib

import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint import Corrupt, HostileCheckpoint
from holdfast.checkpoint.format.pack_header import (
    ALIGN_BYTES,
    LARGE_BYTES,
    PREFIX_BYTES,
    ChunkChecksum,
    HeaderFrame,
    RunningChecksum,
    count_prefixes,
    parse_header,
)

NAMES = st.text(min_size=1, max_size=6).filter(lambda name: name != "__metadata__")
CHUNK = st.tuples(
    NAMES, st.sampled_from(["F32", "U8"]), st.integers(0, 9), st.integers(0, 0xFFFFFFFF)
)
CHUNKS = st.lists(CHUNK, unique_by=lambda chunk: chunk[0], max_size=6)
SUMMED = bytes(range(251)) * (3 * LARGE_BYTES // 251)
Drawn = list[tuple[str, str, int, int]]


def header_of(chunks: Drawn) -> tuple[bytes, int]:
    """Returns a pack's header and the size of the pack."""
    entries = [
        (name, dtype, (count,), count * (4 if dtype == "F32" else 1))
        for name, dtype, count, _ in chunks
    ]
    frame = HeaderFrame.around(entries)
    data = frame.join([ChunkChecksum(crc) for *_, crc in chunks])
    assert len(data) == frame.nbytes
    return data, len(data) + sum(entry[3] for entry in entries)


@given(CHUNKS)
def test_a_header_is_parsed_as_it_was_written(chunks: Drawn) -> None:
    """Names, dtypes, shapes, offsets and checksums come back; the data begins at a multiple of 64
    and the length is in front.
    """
    data, size = header_of(chunks)
    assert len(data) % ALIGN_BYTES == 0 and int.from_bytes(data[:8], "little") == len(data) - 8
    found = parse_header(data, size, "p")
    assert list(found) == [name for name, *_ in chunks] or any(
        count == 0 for *_, count, _ in chunks
    )
    at = len(data)
    for name, dtype, count, crc in chunks:
        nbytes = count * (4 if dtype == "F32" else 1)
        assert (found[name].dtype, found[name].shape, found[name].nbytes) == (
            dtype,
            (count,),
            nbytes,
        )
        if nbytes:
            assert (found[name].start, found[name].checksum.crc) == (at, crc)
        at += nbytes
    assert at == size


@given(CHUNKS, st.integers(-9, 9).filter(bool))
def test_a_file_of_another_size_is_refused(chunks: Drawn, change: int) -> None:
    """A header that does not describe every byte of its file is hostile."""
    data, size = header_of(chunks)
    with pytest.raises(HostileCheckpoint, match="the header describes"):
        parse_header(data, size + change, "p")


@given(CHUNKS.filter(bool), st.data())
def test_a_damaged_header_is_a_typed_error(chunks: Drawn, drawn: st.DataObject) -> None:
    """Any byte changed is either refused with a typed error or parsed to chunks within the file."""
    data, size = header_of(chunks)
    at = drawn.draw(st.integers(8, len(data) - 1))
    changed = data[:at] + bytes([drawn.draw(st.integers(0, 255))]) + data[at + 1 :]
    with contextlib.suppress(Corrupt, HostileCheckpoint):
        found = parse_header(changed, size, "p")
        assert all(
            len(data) <= entry.start <= entry.start + entry.nbytes <= size
            for entry in found.values()
        )


@given(st.lists(st.integers(0, 3 * LARGE_BYTES), min_size=1, max_size=4))
def test_checksums_of_prefixes_come_back(sizes: list[int]) -> None:
    """Each chunk has those of its own prefixes, at every PREFIX_BYTES below its size, and one below
    LARGE_BYTES has none.
    """
    frame = HeaderFrame.around(
        [(f"c{index}", "U8", (size,), size) for index, size in enumerate(sizes)]
    )
    numbers = iter(range(1, 1000))
    checksums = [
        ChunkChecksum(next(numbers), tuple(next(numbers) for _ in range(count_prefixes(size))))
        for size in sizes
    ]
    found = parse_header(frame.join(checksums), frame.nbytes + sum(sizes), "p")
    for index, (size, checksum) in enumerate(zip(sizes, checksums, strict=True)):
        entry = found[f"c{index}"]
        assert size == 0 or entry.checksum == checksum
        ends = [stop for stop in range(PREFIX_BYTES, size, PREFIX_BYTES) if size >= LARGE_BYTES]
        assert [entry.crc_until(stop) for stop in ends] == list(checksum.prefixes[: len(ends)])
        assert entry.crc_until(0) == 0 and entry.crc_until(size) == (
            entry.checksum.crc if size else 0
        )
        assert size == 7 or entry.crc_until(7) is None


def test_a_header_without_prefixes_is_read() -> None:
    """Packs of the first version have none: their chunks are known by their whole alone."""
    frame = HeaderFrame.around([("w", "U8", (4 * LARGE_BYTES,), 4 * LARGE_BYTES)])
    data = frame.join([ChunkChecksum(7, tuple(range(count_prefixes(4 * LARGE_BYTES))))])
    start = data.index(b'","crc32c_prefixes":"')
    end = data.index(b'"}', start)
    old = data[:start] + data[end:] + b" " * (end - start)
    entry = parse_header(old, len(old) + 4 * LARGE_BYTES, "p")["w"]
    assert (
        entry.checksum == ChunkChecksum(7)
        and entry.crc_until(LARGE_BYTES) is None
        and entry.crc_until(4 * LARGE_BYTES) == 7
    )
    more = data.replace(b'"crc32c_prefixes":"', b'"crc32c_prefixes":"AAAA')
    with pytest.raises((HostileCheckpoint, Corrupt), match=r"prefixes|cannot be read"):
        parse_header(more, len(more) + 4 * LARGE_BYTES, "p")
    cut = data.replace(data[start:end], b'","crc32c_prefixes":"AAAAAA==')
    with pytest.raises(HostileCheckpoint, match="checksums of 1 prefixes, its chunks have 15"):
        parse_header(cut, len(cut) + 4 * LARGE_BYTES, "p")


@given(st.integers(LARGE_BYTES, len(SUMMED)), st.integers(1, 6))
@settings(max_examples=20, deadline=None)
def test_a_checksum_is_the_same_whatever_the_pieces(nbytes: int, prefixes: int) -> None:
    """It is that of all the bytes, and of each prefix that ends within them."""
    data = memoryview(SUMMED)[:nbytes]
    summed = RunningChecksum()
    for start in range(0, nbytes, prefixes * PREFIX_BYTES):
        summed.add(data[start : start + prefixes * PREFIX_BYTES])
    found = summed.result()
    assert found.crc == crc32c(data)
    assert len(found.prefixes) == count_prefixes(nbytes)
    for number, crc in enumerate(found.prefixes, 1):
        assert crc == crc32c(data[: number * PREFIX_BYTES])
