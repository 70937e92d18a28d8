"""Locks on files, which end with the process that holds them, and where such locks hold."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
import weakref
from pathlib import Path

from holdfast.coordination.mounts import mount_of

LOCK_NAME = "lock"
LOCK_WAIT_S = 10.0
# What flock() says where there are no locks, as Lustre may, and NFS, and FUSE.
NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}
_POLL_S = 0.001


def locks_are_local(folder: Path) -> bool:
    """Says whether the mount of a folder makes file locks hold on this host alone.

    Lustre's localflock does so, and NFS's local_lock and nolock; other file systems show nothing in
    their options.
    """
    mount = mount_of(folder)
    local = {"localflock"} if mount.kind == "lustre" else set[str]()
    if mount.kind.startswith("nfs"):
        local = {"nolock", "local_lock=all", "local_lock=flock"}
    return not local.isdisjoint(mount.options)


class FileLock:
    """A file lock that a forked child does not keep alive."""

    def __init__(self, path: Path, *, create: bool = True) -> None:
        self._path = path
        self._file = -1  # for __del__, where the open fails
        # O_NONBLOCK: to open a pipe that has the lock's name would wait for a writer to it.
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        if create:
            flags |= os.O_CREAT
        self._file = os.open(path, flags, 0o666)
        _open_locks.add(self)

    def try_hold(self, *, if_any: bool = False) -> bool:
        """Holds the lock if nobody does; a file that no longer has its name is no lock.

        Raises OSError where the file system has no locks; `if_any` goes on without.
        """
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if not (if_any and error.errno in NO_LOCKS):
                raise
        return self.is_at(self._path)

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
    # `flock` belongs to the open file, which a forked child shares: with the file open in a child,
    # the lock would outlive its writer.
    for lock in list(_open_locks):
        lock.close()


os.register_at_fork(after_in_child=_drop_locks_in_child)


def hold_lock_in(folder: Path, *, if_any: bool = False) -> FileLock:
    """Makes a folder with a lock in it, and holds the lock, `if_any` as in `try_hold`.

    A sweep may find the lock before this process holds it, and remove the folder; a manager that
    closes may remove the folder above. Then it begins anew. Raises OSError where the lock stays
    with another for LOCK_WAIT_S.
    """
    deadline = time.monotonic() + LOCK_WAIT_S
    taken = OSError(errno.EBUSY, "its lock was taken by others again and again", str(folder))
    failure = taken
    while time.monotonic() < deadline:
        try:
            _make(folder)
            with contextlib.ExitStack() as undo:
                lock = undo.enter_context(contextlib.closing(FileLock(folder / LOCK_NAME)))
                if lock.try_hold(if_any=if_any):
                    undo.pop_all()
                    return lock
            failure = taken
        except FileNotFoundError as error:  # or where no folder can be made, as in /proc
            failure = error
        time.sleep(_POLL_S)  # a sweep that has the lock needs a moment for its removal
    raise failure


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:  # also where the folder went after mkdir had found it
        if folder.exists():
            raise


def is_free(path: Path) -> bool:
    """Says whether nobody holds the lock, as far as a lock can say it."""
    # No file; or it is gone, with a claim that has just been taken away; or there are no locks.
    with contextlib.suppress(OSError), contextlib.closing(FileLock(path, create=False)) as lock:
        return lock.try_hold()
    return False
