"""A memory cgroup of the tests' own, below the one that they run in."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.checkpoint.memory.host import cgroup_numbers

REMOVE_S = 10.0


@contextlib.contextmanager
def memory_cgroup(name: str) -> Iterator[Path]:
    """Yields the folder of a new cgroup, without a limit; removes it. Skips where none can be made.

    Processes enter it by writing their number into its `cgroup.procs`.
    """
    own = next(iter(cgroup_numbers()), None)
    if own is None:
        pytest.skip("this process sees no cgroup of memory")
    # In v2 a cgroup that has processes gives its children no controllers: it becomes a sibling.
    parent = Path(own) if (Path(own) / "memory.limit_in_bytes").exists() else Path(own).parent
    folder = parent / f"{name}-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made in {parent}: {error}; run as root, or delegate one")
    try:
        if not limit_file(folder).exists():
            pytest.skip(f"{parent} gives its children no memory controller")
        yield folder
    finally:
        _remove(folder)


def limit_file(folder: Path) -> Path:
    """Returns the file that has a cgroup's limit."""
    v1 = folder / "memory.limit_in_bytes"
    return v1 if v1.exists() else folder / "memory.max"


def _remove(folder: Path) -> None:
    # The kernel lets a cgroup go once its last process is buried.
    end = time.monotonic() + REMOVE_S
    while True:
        try:
            folder.rmdir()
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
        else:
            return
