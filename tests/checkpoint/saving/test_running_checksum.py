"""The checksum of a chunk that comes piece by piece."""

from __future__ import annotations

from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.format.pack_header import LARGE_BYTES, PREFIX_BYTES, count_prefixes
from holdfast.checkpoint.saving.running_checksum import RunningChecksum

BYTES = bytes(range(251)) * (3 * LARGE_BYTES // 251)


@given(st.integers(LARGE_BYTES, len(BYTES)), st.integers(1, 6))
@settings(max_examples=20, deadline=None)
def test_it_is_the_same_whatever_the_pieces(nbytes: int, prefixes: int) -> None:
    """It is that of all the bytes, and of each prefix that ends within them."""
    data = memoryview(BYTES)[:nbytes]
    summed = RunningChecksum()
    for start in range(0, nbytes, prefixes * PREFIX_BYTES):
        summed.add(data[start : start + prefixes * PREFIX_BYTES])
    found = summed.result()
    assert found.crc == crc32c(data)
    assert len(found.prefixes) == count_prefixes(nbytes)
    for number, crc in enumerate(found.prefixes, 1):
        assert crc == crc32c(data[: number * PREFIX_BYTES])
