"""Pages of a file that is written, in a tight cgroup."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from holdfast.checkpoint.memory import budget, write_behind
from holdfast.checkpoint.memory.levels import MemoryLevel
from holdfast.checkpoint.memory.write_behind import WriteBehind, dirty_limit_bytes
from holdfast.checkpoint.storage.local import LocalStorage

MIB = 1 << 20


def in_cgroup(patch: pytest.MonkeyPatch, free_bytes: int, folder: str = "/job") -> None:
    level = MemoryLevel("the cgroup /job", 1 << 40, free_bytes, free_bytes, folder)
    patch.setattr(budget.MemoryBudget, "free", lambda self: budget.FreeMemory(free_bytes, level))


def test_only_a_tight_cgroup_bounds_what_is_dirty(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's dirty pages are the kernel's to bound."""
    for free_bytes, folder, limit in (
        (1 << 40, "/job", None),
        (64 * MIB, "/job", 4 * MIB),
        (0, "/job", MIB),
        (0, "", None),
    ):
        in_cgroup(monkeypatch, free_bytes, folder)
        assert dirty_limit_bytes() == limit


@pytest.mark.parametrize(("free_mib", "waits"), [(1 << 20, 0), (64, 4)])
def test_a_file_waits_for_its_own_earlier_pages(
    free_mib: int, waits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 8 MiB at most 4 are under way: the first four are out before the last is written."""
    in_cgroup(monkeypatch, free_mib * MIB)
    asked: list[Sequence[int]] = []
    real = write_behind._sync_range
    monkeypatch.setattr(
        write_behind, "_sync_range", lambda *args: (asked.append(args), real(*args))[1]
    )
    parts = [(place * MIB, [memoryview(bytes([place]) * MIB)]) for place in range(8)]
    LocalStorage(tmp_path).write("file", 8 * MIB, parts)
    waited = [offset // MIB for _, offset, _, flags in asked if flags != write_behind._WRITE]
    assert waited == list(range(waits))
    assert len(asked) == 8 + waits
    assert (tmp_path / "file").read_bytes()[7 * MIB :] == b"\7" * MIB


def test_an_error_of_earlier_pages_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait takes it from fsync; what a file system cannot do is no error."""
    in_cgroup(monkeypatch, 0)
    failures = iter([0, 0, errno.ESPIPE, 0, errno.EIO])
    monkeypatch.setattr(write_behind, "_sync_range", lambda *args: next(failures))
    file = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
    behind = WriteBehind(file, starts=True)
    behind.wrote(0, MIB)
    behind.wrote(MIB, MIB)
    with pytest.raises(OSError, match="Input/output"):
        behind.wrote(2 * MIB, MIB)
    os.close(file)
