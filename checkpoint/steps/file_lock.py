"""Locks on files, which end with the process that holds them, and where such locks hold."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import weakref
from pathlib import Path

LOCK_TRIES = 16  # each loss means that a sweep took the unfinished claim for that of a dead writer
MOUNTINFO = Path("/proc/self/mountinfo")


def locks_are_local(folder: Path, mountinfo: str) -> bool:
    """Says whether the mount of a folder makes file locks hold on this host alone: Lustre's
    localflock, NFS's local_lock and nolock.

    `mountinfo` is the text of /proc/self/mountinfo. Other file systems do not tell by their
    options.
    """
    above, found = {str(folder.resolve()), *map(str, folder.resolve().parents)}, ("", "", "")
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        point = before.split(" ")[4].encode().decode("unicode_escape")  # a space in it is \040
        kind, _, rest = after.partition(" ")
        if point in above and len(point) >= len(
            found[0]
        ):  # of two at one point the later hides the earlier
            found = point, kind, rest.rpartition(" ")[2]
    _, kind, options = found
    if kind.startswith("nfs"):
        return bool({"nolock", "local_lock=all", "local_lock=flock"} & set(options.split(",")))
    return kind == "lustre" and "localflock" in options.split(",")


def read_mountinfo() -> str:
    with contextlib.suppress(OSError):  # only Linux has it
        return MOUNTINFO.read_text(errors="replace")
    return ""


class FileLock:
    """A file lock that a forked child does not keep alive: `flock` belongs to the open file, which
    a child shares.
    """

    def __init__(self, path: Path, *, create: bool = True) -> None:
        self._file = -1
        self._file = os.open(
            path,
            os.O_RDWR
            | os.O_NOFOLLOW
            | os.O_NONBLOCK
            | os.O_CLOEXEC
            | (os.O_CREAT if create else 0),
            0o666,
        )
        _open_locks.add(self)

    def try_hold(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def is_at(self, path: Path) -> bool:
        """Says whether the locked file is still the one of that name."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._file), os.stat(path))
        return False

    def close(self) -> None:
        file = self._file
        self._file = -1
        if file >= 0:
            os.close(file)

    def __del__(self) -> None:
        self.close()


_open_locks: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _drop_locks_in_child() -> None:
    for lock in list(_open_locks):
        lock.close()


os.register_at_fork(after_in_child=_drop_locks_in_child)


def hold_lock_in(folder: Path) -> FileLock:
    """Makes a folder with a lock in it, held; again when a sweep removes the one or takes the other
    in between.
    """
    for _ in range(LOCK_TRIES):
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            lock = FileLock(folder / "lock")
            if lock.try_hold() and lock.is_at(folder / "lock"):
                return lock
            lock.close()
    raise OSError(errno.ENOLCK, "its lock was taken by others again and again", str(folder))


def is_free(path: Path) -> bool:
    """Says whether nobody holds the lock; a claim without its lock file has just been taken
    away.
    """
    try:
        lock = FileLock(path, create=False)
    except OSError:  # gone, or no file
        return False
    free = lock.try_hold()
    lock.close()
    return free
