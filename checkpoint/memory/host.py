"""Reads what bounds this process's memory on its machine: a thin shell around `levels`."""

from __future__ import annotations

import os
from collections.abc import Mapping

from .levels import MemoryLevel, find_cgroup_folders, find_levels

_READ_BYTES = 16 << 10


def look_at_memory() -> list[MemoryLevel]:
    """Returns the levels as they are now: see `find_levels`. Reads a few small files."""
    return find_levels(_read)


def cgroup_numbers() -> Mapping[str, int]:
    """Returns the numbers of this process's cgroup and of those above, by their folders.

    A cgroup of a machine has one number, from whichever container it is seen.
    """
    numbers = {}
    for folder in find_cgroup_folders(_read):
        try:
            numbers[folder] = os.stat(folder).st_ino
        except OSError:  # it is not seen from here
            continue
    return numbers


def _read(path: str) -> str | None:
    # Without a file object, which costs more than to read so small a file.
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return b"".join(iter(lambda: os.read(file, _READ_BYTES), b"")).decode(errors="replace")
        finally:
            os.close(file)
    except OSError:
        return None
