"""What the kit runs, how large, and for how long: follows from a probe of the machine. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

GB = 10**9
LEAVES = 300
SMALL_LEAVES = 4_000
SMALL_LEAF_BYTES = 8 << 10
WANTED_BYTES = 8 * GB
SMOKE_BYTES = GB // 2
LEAST_BYTES = 8 << 20
# Bytes that a part writes, in states; and copies of the state that lie on the disk at a time.
WRITES = 15
STEPS_ON_DISK = 4
TESTED_JAX = ((0, 10), (0, 12))  # the first and the last


@dataclass(frozen=True)
class Part:
    """A part of the kit: its script, its share of the time, in the whole run and in smoke, and what
    it needs on the disk.
    """

    letter: str
    name: str
    script: str
    share: float
    smoke_share: float
    disk_bytes: int

    def needed_bytes(self, *, cpu: bool) -> int:
        """Returns what it needs on the disk. On the CPU the tests have a tenth of the sizes."""
        return self.disk_bytes // 10 if cpu else self.disk_bytes


PARTS = (
    Part("a", "correctness", "correctness.py", 0.22, 0.15, 4 * GB),
    Part("b", "save", "save.py", 0.22, 0.16, GB),
    Part("c", "restore", "restore.py", 0.13, 0.16, GB),
    Part("d", "steps that save", "dispatch.py", 0.08, 0.13, GB),
    Part("e", "two processes on one device", "two_processes.py", 0.28, 0.28, GB // 2),
    Part("f", "compile cache", "compile_cache.py", 0.07, 0.12, GB // 10),
)


@dataclass(frozen=True)
class Probe:
    """What a machine has, and how fast it is."""

    device_bytes: int
    host_free_bytes: int
    disk_free_bytes: int
    write_bytes_s: float


@dataclass(frozen=True)
class Plan:
    """What a part is told."""

    scratch: str
    cpu: bool
    smoke: bool
    state_bytes: int
    small_leaves: int
    limit_s: float = 0.0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: str) -> Self:
        return cls(**json.loads(text))

    def folder(self, name: str) -> Path:
        """Returns a folder of the scratch disk."""
        return Path(self.scratch) / name


def sizes_of(probe: Probe, save_limit_s: float, *, cpu: bool, smoke: bool) -> tuple[int, int]:
    """Returns the bytes of the state, and the number of small leaves.

    The state is what is wanted, bounded by the memories, by the disk, and by what is written in
    half of the time for saves.
    """
    wanted = SMOKE_BYTES if smoke else WANTED_BYTES
    small = SMALL_LEAVES
    if cpu:
        wanted //= 10
        small //= 10
    if smoke:
        small //= 10
    bounds = (
        wanted,
        probe.device_bytes * 3 // 10,
        probe.host_free_bytes // 8,
        probe.disk_free_bytes // STEPS_ON_DISK,
        int(probe.write_bytes_s * save_limit_s / 2 / WRITES),
    )
    return max(min(bounds), LEAST_BYTES), small


def deadlines(limit_s: float, *, smoke: bool) -> Iterator[tuple[Part, float]]:
    """Yields each part and the second at which it has to be over. What one leaves, the next has."""
    shares = [(part, part.smoke_share if smoke else part.share) for part in PARTS]
    whole = sum(share for _, share in shares)
    end = 0.0
    for part, share in shares:
        end += share / whole
        yield part, end * limit_s


def share_s(letter: str, limit_s: float, *, smoke: bool) -> float:
    """Returns how long a part may take of so many seconds."""
    ends = [(part.letter, end_s) for part, end_s in deadlines(limit_s, smoke=smoke)]
    place = [each for each, _ in ends].index(letter)
    return ends[place][1] - (ends[place - 1][1] if place else 0.0)


def remark_on_jax(version: str) -> str:
    """Returns what there is to say of a version of jax; "" of a tested one."""
    first, last = TESTED_JAX
    found = tuple(int(number) for number in version.split(".")[:2])
    if first <= found <= last:
        return ""
    between = " to ".join(".".join(map(str, each)) for each in TESTED_JAX)
    return f"jax is {version}; holdfast is tested with {between}"
