"""Which machine this is, and which file system a folder is on, by the kernel's table of mounts; and
who has a number of a process.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
from pathlib import Path
from typing import NamedTuple

MOUNTINFO = Path("/proc/self/mountinfo")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Returns what tells this machine, since it was started, from others."""
    return _read_id(BOOT_ID)


@functools.cache
def _read_id(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # no Linux
        return hashlib.sha256(os.uname().nodename.encode()).hexdigest()[:32]


boot_id()  # now: a process that lacks descriptors later would take itself for another machine's


def birth_of(pid: int) -> str:
    """Returns when a process started, in the kernel's ticks: "" where it has ended, also where
    nobody has waited for it (as in containers without an init), or this system does not say.
    Raises OSError where it cannot be read now.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    state, *fields = text.rpartition(")")[2].split()
    return "" if state in "ZX" else fields[18]


class Mount(NamedTuple):
    """A mounted file system: "" and no options where it is not known."""

    kind: str = ""
    options: frozenset[str] = frozenset()


def mount_of(folder: Path) -> Mount:
    """Returns the mount that a folder is on, or would be on once it is made."""
    resolved = folder.resolve()
    above = {str(resolved), *map(str, resolved.parents)}
    innermost = ""
    found = Mount()
    for line in _mounts():
        before, _, after = line.partition(" - ")
        # A space in it is \040. Letters beyond ASCII stand for themselves.
        point = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), before.split(" ")[4])
        # Of two mounts at one point the later hides the earlier.
        if point in above and len(point) >= len(innermost):
            innermost = point
            kind, _, rest = after.partition(" ")
            found = Mount(kind, frozenset(rest.rpartition(" ")[2].split(",")))
    return found


def _mounts() -> list[str]:
    # Only Linux has it. Any other failure must not hide that file locks hold on one host alone.
    with contextlib.suppress(FileNotFoundError, PermissionError):
        return MOUNTINFO.read_text(errors="replace").splitlines()
    return []
