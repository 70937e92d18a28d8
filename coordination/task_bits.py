"""Sets of tasks as the bits of an int: 2 KiB for 16,384 tasks."""

from __future__ import annotations

from collections.abc import Iterable


def bits_of(task_ids: Iterable[int]) -> int:
    """Returns a set of tasks as the bits of an int."""
    marks = bytearray()
    for task_id in task_ids:
        byte = task_id >> 3
        if byte >= len(marks):
            marks.extend(bytes(byte + 1 - len(marks)))
        marks[byte] |= 1 << (task_id & 7)
    return int.from_bytes(marks, "little")


def bytes_of(bits: int) -> bytes:
    """Returns bits as they travel: the lowest task's first."""
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def bits_from(travelled: bytes) -> int:
    """Returns bits that have travelled."""
    return int.from_bytes(travelled, "little")


def tasks_of(bits: int) -> frozenset[int]:
    """Returns the tasks whose bits are set."""
    return frozenset(task_id for task_id, digit in enumerate(reversed(f"{bits:b}")) if digit == "1")
