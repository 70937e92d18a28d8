"""Sets of tasks as bits: there and back, and on the wire."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.coordination.task_bits import bits_from, bits_of, bytes_of, tasks_of


@given(st.frozensets(st.integers(0, 20_000), max_size=40))
def test_a_set_comes_back(tasks: frozenset[int]) -> None:
    """Through bits, and through the bytes that travel; those of equal sets are equal."""
    bits = bits_of(tasks)
    assert tasks_of(bits) == tasks and bits.bit_count() == len(tasks)
    assert bits_from(bytes_of(bits)) == bits


def test_a_set_of_16384_has_2_kib() -> None:
    """A bit a task, and the last byte is no zero."""
    assert len(bytes_of(bits_of(range(16_384)))) == 2_048
    assert bytes_of(0) == b"" and bytes_of(bits_of([8])) == b"\x00\x01"
