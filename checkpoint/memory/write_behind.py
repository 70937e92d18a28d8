"""Has the kernel write a file out while its next bytes are made, and bounds what is not out yet.

In a cgroup of v1 nothing else bounds it: pages that were written to, and are not on the disk yet,
fill the cgroup, and the kernel ends a process for them.
"""

from __future__ import annotations

import collections
import ctypes
import errno
import os
import sys
from collections.abc import Callable

from .budget import MemoryBudget, current_sharers

START_BYTES = 1 << 20  # dirty bytes after which the kernel is asked to start writing them out
FILES_AT_ONCE = 16  # that a process may write side by side, by both lanes: what each may fill
LEAST_BYTES = 1 << 20
ROOMY_BYTES = 32 << 20  # a file that may fill so much is left to the kernel
_WAIT_BEFORE = 1
_WRITE = 2
_WAIT_AFTER = 4
# The file is of a kind that has nothing to write out.
_NOT_SUCH = {errno.ESPIPE, errno.EINVAL, errno.ENOSYS}


def dirty_limit_bytes() -> int | None:
    """Returns how much of a file may wait to be written out; None where there is room enough."""
    free = MemoryBudget(current_sharers()).free()
    if free.level is None or not free.level.folder:
        return None  # the kernel bounds the machine's by itself
    limit = free.nbytes // FILES_AT_ONCE
    return None if limit >= ROOMY_BYTES else max(limit, LEAST_BYTES)


class WriteBehind:
    """Follows what is written into one file. For one thread.

    With `starts` writing out begins early even where nothing has to be bounded.
    """

    def __init__(self, file: int, *, starts: bool) -> None:
        self._file = file
        self._limit_bytes = dirty_limit_bytes()
        self._starts = starts or self._limit_bytes is not None
        self._dirty_bytes = 0
        self._under_way: collections.deque[tuple[int, int]] = collections.deque()

    def wrote(self, offset: int, nbytes: int) -> None:
        """Notes bytes that were written at an offset; may wait until earlier ones are out.

        Raises OSError where these could not be written out.
        """
        self._dirty_bytes += nbytes
        if not self._starts or self._dirty_bytes < START_BYTES:
            return
        begin = offset + nbytes - self._dirty_bytes
        _sync_range(self._file, begin, self._dirty_bytes, _WRITE)
        if self._limit_bytes is not None:
            self._under_way.append((begin, self._dirty_bytes))
            self._wait_for_room(self._limit_bytes)
        self._dirty_bytes = 0

    def _wait_for_room(self, limit_bytes: int) -> None:
        while sum(size for _, size in self._under_way) > limit_bytes:
            begin, size = self._under_way.popleft()
            failed = _sync_range(self._file, begin, size, _WAIT_BEFORE | _WRITE | _WAIT_AFTER)
            # This wait has taken the error, which fsync would tell otherwise.
            if failed and failed not in _NOT_SUCH:
                raise OSError(failed, os.strerror(failed))


def _no_sync(file: int, offset: int, size: int, flags: int) -> int:
    """Does nothing: only Linux can be asked to start early."""
    return 0


def _find_sync_range() -> Callable[[int, int, int, int], int]:
    if not sys.platform.startswith("linux"):
        return _no_sync
    function = ctypes.CDLL(None, use_errno=True).sync_file_range
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)

    def sync(file: int, offset: int, size: int, flags: int) -> int:
        """Returns the number of an error, or 0."""
        return ctypes.get_errno() if function(file, offset, size, flags) else 0

    return sync


_sync_range = _find_sync_range()
