"""Mounts a folder by FUSE with calls that some file systems refuse: SOURCE TARGET [CALL=ERRNO]...

Runs until the file system is unmounted.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Any

from mfusepy import FUSE, FuseOSError, Operations

ROOM = ("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_favail", "f_ffree", "f_files", "f_frsize")
STATUS = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid", "st_ino")


class Folder(Operations):  # type: ignore[misc]
    """Passes each call on to a folder, but those that it refuses."""

    use_ns = True

    def __init__(self, root: str, refused: dict[str, int]) -> None:
        self._root = root
        self._refused = refused

    def _path(self, path: str) -> str:
        return self._root + path

    def _pass(self, call: str) -> None:
        if call in self._refused:
            raise FuseOSError(self._refused[call])

    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        status = os.lstat(self._path(path))
        times = {
            f"st_{each}": getattr(status, f"st_{each}_ns") for each in ("atime", "mtime", "ctime")
        }
        return {each: getattr(status, each) for each in STATUS} | times

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._path(path))]

    def access(self, path: str, mode: int) -> int:
        return 0

    def chmod(self, path: str, mode: int) -> int:
        os.chmod(self._path(path), mode)
        return 0

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        return os.open(self._path(path), os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode)

    def open(self, path: str, flags: int) -> int:
        return os.open(self._path(path), flags)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        os.truncate(self._path(path), length)
        return 0

    def flush(self, path: str, fh: int) -> int:
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        os.fsync(fh)
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        self._pass("fsyncdir")
        return 0

    def flock(self, path: str, fh: int, operation: int) -> int:
        self._pass("flock")
        return 0  # of one process; the lock is no lock of the folder's

    def link(self, target: str, source: str) -> int:
        self._pass("link")
        os.link(self._path(source), self._path(target))
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        os.mkdir(self._path(path), mode)
        return 0

    def rename(self, old: str, new: str) -> int:
        os.rename(self._path(old), self._path(new))
        return 0

    def rmdir(self, path: str) -> int:
        os.rmdir(self._path(path))
        return 0

    def unlink(self, path: str) -> int:
        os.unlink(self._path(path))
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._path(path))
        return {each: getattr(found, each) for each in ROOM}

    def utimens(self, path: str, times: Any) -> int:
        os.utime(self._path(path), ns=times)
        return 0


if __name__ == "__main__":
    source, target, *words = sys.argv[1:]
    refusals = {
        call: getattr(errno, name) for call, _, name in (word.partition("=") for word in words)
    }
    FUSE(Folder(source, refusals), target, foreground=True, nothreads=True)
