"""What bounds the memory of a process: its cgroup, the cgroups above, and the machine. Pure.

`read` returns the text of a file, or None where there is none. Sources: cgroups(7), proc(5), the
kernel's "Memory Resource Controller" (v1) and "Control Group v2".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

Read: TypeAlias = Callable[[str], str | None]

CGROUP_FILE = "/proc/self/cgroup"
MOUNTS_FILE = "/proc/self/mountinfo"
MACHINE_FILE = "/proc/meminfo"
# v1 says "no limit" by a number near 2**63. No machine has so much.
UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True)
class MemoryLevel:
    """A bound that processes share: a cgroup's, or the machine's.

    `free_bytes` may be taken now: clean file pages count as free, as the kernel reclaims them at
    once. `most_bytes` may be taken in the end: dirty file pages are written out, and there is swap.
    `folder` is that of the cgroup, "" for the machine. So much as `lazy_bytes` of both may be pages
    that a process has marked as free, and has written since.
    """

    name: str
    limit_bytes: int
    free_bytes: int
    most_bytes: int
    folder: str = ""
    lazy_bytes: int = UNLIMITED_BYTES


def find_levels(read: Read) -> list[MemoryLevel]:
    """Returns the levels of this process, its own cgroup first and the machine last.

    Cgroups without a limit are left out. Without /proc there is no level.
    """
    machine = _numbers(read(MACHINE_FILE), unit_bytes=1024)
    swap_bytes = machine.get("SwapFree", 0)
    levels = list(_cgroup_levels(read, swap_bytes))
    if "MemAvailable" in machine:
        free = machine["MemAvailable"]
        total = machine.get("MemTotal", free)
        lazy = UNLIMITED_BYTES
        if "Active(file)" in machine:
            listed = machine["Active(file)"] + machine["Inactive(file)"] + machine["Shmem"]
            lazy = max(0, listed - machine["Cached"] - machine["Buffers"])
        levels.append(MemoryLevel("this machine", total, free, free + swap_bytes, lazy_bytes=lazy))
    return levels


def _cgroup_levels(read: Read, swap_bytes: int) -> Iterator[MemoryLevel]:
    place = _find_cgroup(read)
    if place is None:
        return
    for folder in place.folders(read):
        usage = (_usage_v1 if place.is_v1 else _usage_v2)(read, folder)
        if usage is not None:
            yield usage.level(place.name_of(folder), folder, swap_bytes)


def find_cgroup_folders(read: Read) -> list[str]:
    """Returns the folders of this process's cgroup and of those above, with a limit or without."""
    place = _find_cgroup(read)
    return [] if place is None else list(place.folders(read))


# --- which cgroup this process is in


class _Place(NamedTuple):
    """The folder of a process's cgroup, and that of the topmost cgroup which is seen from here."""

    folder: str
    top: str
    is_v1: bool

    def folders(self, read: Read) -> Iterator[str]:
        """Yields the folders, from the process's own to the top."""
        folder = self.folder
        yield folder
        while folder != self.top and folder not in {"", "/"}:
            folder = folder.rpartition("/")[0] or "/"
            charges = read(f"{folder}/memory.use_hierarchy") if self.is_v1 else None
            if (charges or "1").strip() == "0":
                return  # nothing is charged to the groups above
            yield folder

    def name_of(self, folder: str) -> str:
        """Returns the name of one of them, for a sentence."""
        inside = folder.removeprefix(self.top)
        return f"the cgroup {inside}" if inside else "this cgroup"


class _Mount(NamedTuple):
    root: str  # which part of the hierarchy is mounted
    point: str
    is_v1: bool


def _find_cgroup(read: Read) -> _Place | None:
    """Returns where this process's memory is counted; None where no such hierarchy is mounted."""
    paths = _paths(read(CGROUP_FILE) or "")
    mounted = [mount for mount in _mounts(read(MOUNTS_FILE) or "") if mount.is_v1 in paths]
    # On a machine that has both, the controller is in one hierarchy: in v1 where its line is there.
    wanted = [mount for mount in mounted if mount.is_v1] or mounted
    places = [_place_in(mount, paths[mount.is_v1]) for mount in wanted]
    return max(places, key=lambda place: len(place.folder), default=None)


def _paths(cgroups: str) -> dict[bool, str]:
    """Returns the paths of the process, by whether they are of v1."""
    paths = {}
    for line in cgroups.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            paths[True] = path
        elif number == "0" and not controllers:
            paths[False] = path
    return paths


def _mounts(mounts: str) -> Iterator[_Mount]:
    for line in mounts.splitlines():
        about, _, kind = line.partition(" - ")
        fields = about.split(" ")
        types = kind.split(" ")
        if len(fields) < 5 or len(types) < 3:
            continue
        is_v1 = types[0] == "cgroup" and "memory" in types[2].split(",")
        if is_v1 or types[0] == "cgroup2":
            yield _Mount(_unescaped(fields[3]), _unescaped(fields[4]), is_v1)


def _unescaped(path: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)


def _place_in(mount: _Mount, path: str) -> _Place:
    root = mount.root.rstrip("/")
    is_inside = path == root or path.startswith(f"{root}/")
    # In a container the path may be of a hierarchy that is not seen here: its top is what bounds.
    inside = path.removeprefix(root) if is_inside and ".." not in path.split("/") else ""
    return _Place(f"{mount.point}{inside}".rstrip("/"), mount.point, mount.is_v1)


# --- what a cgroup says


# Pages on the kernel's lists of file pages, those of these that are dirty, and all cached pages
# with those of memory that has a name, which are on other lists.
_STAT_V1 = ("inactive_file", "active_file", "dirty", "writeback", "cache", "shmem")
_STAT_V2 = ("inactive_file", "active_file", "file_dirty", "file_writeback", "file", "shmem")


class _Usage(NamedTuple):
    limit_bytes: int
    used_bytes: int
    swap_bytes: int  # that may still be swapped out
    file_pages: Sequence[int]  # bytes, as _STAT_V2 names them

    def level(self, name: str, folder: str, swap_bytes: int) -> MemoryLevel:
        """Returns the level of a cgroup on a machine with so much free swap."""
        inactive, active, dirty, writeback, cached, shared = self.file_pages
        listed = inactive + active
        left = self.limit_bytes - self.used_bytes  # less than none where more is used
        return MemoryLevel(
            name,
            self.limit_bytes,
            max(0, left + max(0, listed - dirty - writeback)),
            max(0, left + listed + min(swap_bytes, self.swap_bytes)),
            folder=folder,
            lazy_bytes=max(0, listed - (cached - shared)),
        )


def _usage_v2(read: Read, folder: str) -> _Usage | None:
    limit = min(_number(read(f"{folder}/{name}")) for name in ("memory.max", "memory.high"))
    in_use = _number(read(f"{folder}/memory.current"))
    if UNLIMITED_BYTES in (limit, in_use):
        return None
    stat = _numbers(read(f"{folder}/memory.stat"))
    most_swap = _number(read(f"{folder}/memory.swap.max"))
    swapped = _number(read(f"{folder}/memory.swap.current"), missing=0)
    swap = max(0, most_swap - swapped)
    return _Usage(limit, in_use, swap, [stat.get(name, 0) for name in _STAT_V2])


def _usage_v1(read: Read, folder: str) -> _Usage | None:
    own = _number(read(f"{folder}/memory.limit_in_bytes"))
    in_use = _number(read(f"{folder}/memory.usage_in_bytes"))
    stat = _numbers(read(f"{folder}/memory.stat"))
    # It knows of groups above that are not seen from a container.
    above = stat.get("hierarchical_memory_limit", UNLIMITED_BYTES)
    limit = min(own, above)
    if max(limit, in_use) >= UNLIMITED_BYTES:
        return None
    both_limit = _number(read(f"{folder}/memory.memsw.limit_in_bytes"))
    both_used = _number(read(f"{folder}/memory.memsw.usage_in_bytes"), missing=0)
    swap = max(0, both_limit - limit - (both_used - in_use))
    return _Usage(limit, in_use, swap, [stat.get(f"total_{name}", 0) for name in _STAT_V1])


def _number(text: str | None, *, missing: int = UNLIMITED_BYTES) -> int:
    """Returns a number that bounds, UNLIMITED_BYTES for an absurd one; `missing` for "max" or
    none.
    """
    text = (text or "").strip()
    return min(int(text), UNLIMITED_BYTES) if text.isdecimal() else missing


def _numbers(text: str | None, *, unit_bytes: int = 1) -> dict[str, int]:
    """Returns the numbers of lines such as `name 12` or `Name:  12 kB`."""
    found = {}
    for line in (text or "").splitlines():
        fields = line.split()
        if len(fields) >= 2 and fields[1].isdecimal():
            found[fields[0].rstrip(":")] = int(fields[1]) * unit_bytes
    return found
