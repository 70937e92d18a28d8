"""Which processes of this machine run, by their numbers, and what this one may open."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


def runs(pid: int) -> bool:
    """Returns whether a process of that number runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def descendants(pid: int) -> list[int]:
    """Returns a process of that number, and all below it."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    below = [pid]
    for each in below:  # grows while it is read
        below += children.get(each, ())
    return below


def wait_until_ended(pids: Sequence[int], within_s: float = 20) -> bool:
    """Waits until none of the processes runs; returns False when one still does after `within_s`
    seconds.
    """
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not any(runs(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def wait_until(happened: Callable[[], object], within_s: float = 30) -> None:
    """Waits until something has happened, and fails after a time."""
    deadline = time.monotonic() + within_s
    while not happened():
        assert time.monotonic() < deadline, "it has not happened in time"
        time.sleep(0.02)


@contextmanager
def no_file_can_be_opened() -> Iterator[None]:
    """Has this process fail with EMFILE where it opens a file or a socket; those it has stay."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def no_thread_can_be_started() -> Iterator[None]:
    """Has threads ask for more stack than there is room for; those that run go on."""
    usual = threading.stack_size(1 << 46)
    try:
        yield
    finally:
        threading.stack_size(usual)
