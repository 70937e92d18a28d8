"""Reads which machine this is, and what bounds this process's memory there: a thin shell around
`levels`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

from .levels import MemoryLevel, find_cgroup_folders, find_levels

BOOT_ID = "/proc/sys/kernel/random/boot_id"
_READ_BYTES = 16 << 10


def boot_id() -> str:
    """Returns what tells this machine, since it was started, from others."""
    text = _read(BOOT_ID)
    if text is None:  # no Linux
        return hashlib.sha256(os.uname().nodename.encode()).hexdigest()[:32]
    return text.strip()


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
