"""Claims: the right of one writer to commit into one root, and how it is taken away.

A claim is the folder `.holdfast/<id>/` with `claim.json` (who) and, on POSIX, `lock`: a file lock
held for the writer's life. It is made under another name, complete with its lock, and renamed into
place, so that no claim is ever seen unlocked while its writer lives. No pack exists before its
claim; so a pack whose writer has no claim belongs to nobody who could still commit it.

To fence a writer is to rename its claim away (POSIX) or to delete it (object stores, where a
tombstone in each step that has its packs stops a commit that was already under way). A writer may
be fenced when it is surely dead, when its job has moved on to a higher attempt, or by force.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import secrets
import socket
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from holdfast.coordination import Fenced

from ..errors import CheckpointError, Corrupt
from ..storage.base import PosixFolder
from ..storage.local import is_gone, make_folders, open_to_read

_log = logging.getLogger(__name__)
FOLDER = ".holdfast"
LOCK_TRIES = 16  # each loss means that a sweep took the unfinished claim for that of a dead writer
FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
MOUNTINFO = Path("/proc/self/mountinfo")
CLAIM_LIMIT_BYTES = 64 << 10  # of claim.json; a longer one is cut, and that of an unknown writer
_ID = re.compile(r"[0-9a-f]{8}")


@dataclass(frozen=True)
class Writer:
    """Who holds a claim. `job` is "" outside of a launched job; `renewed_s` is Unix time by the
    writer's clock.
    """

    id: str
    job: str = ""
    attempt: int = 0
    host: str = ""
    pid: int = 0
    renewed_s: float = 0.0


def this_writer(job: str = "", attempt: int = 0) -> Writer:
    """Returns a new writer for this process, with an id of its own."""
    return Writer(
        secrets.token_hex(4), job, attempt, socket.gethostname(), os.getpid(), time.time()
    )


def may_fence(other: Writer, me: Writer, *, dead: bool) -> str:
    """Returns why `me` may fence `other`, or "". Raises Fenced when it is the other way round: a
    higher attempt of our job is at work.
    """
    if dead:
        return f"writer {other.id} (pid {other.pid} on {other.host}) is dead"
    if not me.job or other.job != me.job or other.attempt == me.attempt:
        return ""
    if other.attempt > me.attempt:
        raise Fenced(
            f"attempt {other.attempt} of job {me.job!r} writes here (on {other.host}); this is"
            f" attempt {me.attempt}: stop"
        )
    return (
        f"writer {other.id} is attempt {other.attempt} of job {me.job!r}, which is now at attempt"
        f" {me.attempt}"
    )


class Claims(Protocol):
    """All that a manager asks of a root's claims. Blocking; raises the store's OSError."""

    def take(self, writer: Writer) -> None:
        """Makes the claim; called again, shows that the writer lives. Raises CheckpointError when
        the store cannot be written safely.
        """

    def others(self, me: str) -> list[tuple[Writer, bool]]:
        """Returns the other claims, and whether each one's writer is surely dead."""

    def fence(self, writer_id: str) -> None:
        """Takes a claim away, one's own or another's: no later commit of that writer succeeds. One
        that is gone is done.
        """

    def standing(self) -> set[str]:
        """Returns the ids of all claims that stand."""

    def bury(self, step_dir: str, names: list[str], writers: set[str]) -> list[str]:
        """Makes sure that writers without a claim can no longer commit a step; returns those of
        `names` that may be deleted then.
        """

    def forget_fenced(self, step_dirs: Sequence[str] = ()) -> None:
        """Removes what fenced claims have left, once their files are swept; `step_dirs` are steps
        that have no packs now.
        """


class LocalClaims:
    """Claims in a POSIX folder: the lock says who lives."""

    def __init__(self, root: PosixFolder, *, single_writer: bool = False) -> None:
        self._folder = root.path / FOLDER
        self._folder_mode = root.folder_mode
        self._single_writer = single_writer
        self._locks: dict[str, _Lock] = {}

    def take(self, writer: Writer) -> None:
        """Makes the claim; its lock, held by this process and by no child of it, says that the
        writer lives.
        """
        if writer.id in self._locks:
            return
        made = self._folder / f"new-{writer.id}"
        lock: _Lock | None = None
        try:
            if self._folder.is_symlink():
                raise OSError(
                    errno.ELOOP,
                    "it is a link, and nothing behind links is written",
                    str(self._folder),
                )
            if self._folder_mode is not None:  # the root is for whom its steps are for
                make_folders(self._folder, self._folder_mode)
            lock = _lock_in(made)
            (made / "claim.json").write_text(json.dumps(asdict(writer)))
            if not self._single_writer:
                _check_links(made)
            made.rename(self._folder / writer.id)
        except OSError as error:
            if lock:
                lock.close()
            _remove(made)
            raise CheckpointError(
                f"cannot write a checkpoint in {self._folder.parent}: {error.strerror or error}"
                f" ({error.filename or made}); expected a folder that this process may write to. To"
                " only read, pass Options(read_only=True)",
                path=str(self._folder.parent),
            ) from error
        except CheckpointError:
            lock.close() if lock else None
            _remove(made)
            raise
        self._locks[writer.id] = lock

    def others(self, me: str) -> list[tuple[Writer, bool]]:
        """Reads each other claim, and tries its lock. Where locks hold on one host alone, another
        host's says nothing.
        """
        found = [
            (writer, self._folder / id / "lock")
            for id in sorted(self.standing() - {me})
            if (writer := self._read(id))
        ]
        here = (
            socket.gethostname() if found and locks_are_local(self._folder, _mountinfo()) else None
        )
        dead = [(writer, here in (None, writer.host) and _is_free(lock)) for writer, lock in found]
        if here is not None and any(writer.host != here for writer, _ in dead):
            _log.warning(
                "file locks in %s hold on one host alone (see its mount options): whether writers"
                " on other hosts are dead is not known, and what they left stays until `holdfast"
                " sweep --force`",
                self._folder,
            )
        return dead

    def fence(self, writer_id: str) -> None:
        """Renames the claim: its writer's next commit finds no folder to link from. One's own is
        removed, and its lock freed anyway.
        """
        try:
            if (
                writer_id in self.standing()
                and (fenced := self._rename_away(writer_id))
                and writer_id in self._locks
            ):
                _remove(fenced)
        finally:
            if lock := self._locks.pop(writer_id, None):
                lock.close()

    def _rename_away(self, writer_id: str) -> Path | None:
        """Renames a claim so that a sweep knows it for a fenced one; returns where it is now, None
        where it is gone.
        """
        for fenced_id in (
            writer_id,
            secrets.token_hex(4),
        ):  # something that is no fenced claim may have the first name
            fenced = self._folder / f"fenced-{fenced_id}"
            try:
                (self._folder / writer_id).rename(fenced)
                return fenced
            except FileNotFoundError:
                return None
            except OSError as error:
                if error.errno not in (errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST):
                    raise
        raise OSError(errno.EEXIST, "it cannot be renamed", str(self._folder / writer_id))

    def standing(self) -> set[str]:
        """Lists the claims."""
        return {
            name
            for name in self._names()
            if _ID.fullmatch(name) and not (self._folder / name).is_symlink()
        }

    def _names(self) -> list[str]:
        """Lists the folder of claims; nothing where it is a link or no folder: what is there is not
        the root's.

        That there is none is believed only where the root is listed without it: a client of a
        shared file system may not find it.
        """
        try:
            return [] if self._folder.is_symlink() else os.listdir(self._folder)
        except NotADirectoryError:
            return []
        except FileNotFoundError:
            if not is_gone(self._folder):
                raise
            return []

    def bury(self, step_dir: str, names: list[str], writers: set[str]) -> list[str]:
        """Does nothing: without its claim's folder a writer has nothing to link from."""
        return names

    def forget_fenced(self, step_dirs: Sequence[str] = ()) -> None:
        """Removes what is left of fenced claims, and of claims that were never completed."""
        for name in self._names():
            kind, _, writer_id = name.partition("-")
            if _ID.fullmatch(writer_id) and kind == "fenced":
                _remove(self._folder / name)
            elif _ID.fullmatch(writer_id) and kind == "new":
                _remove_half_made(self._folder / name)

    def _read(self, writer_id: str) -> Writer | None:
        try:
            with open(open_to_read(self._folder / writer_id / "claim.json"), "rb") as file:
                return parse_writer(file.read(CLAIM_LIMIT_BYTES), writer_id)
        except FileNotFoundError:
            return None
        except (OSError, Corrupt):
            return Writer(writer_id)


def parse_writer(data: bytes, writer_id: str) -> Writer:
    """Reads a claim; one that cannot be read is that of an unknown writer."""
    try:
        found: Any = json.loads(data)
        return Writer(
            writer_id,
            str(found["job"]),
            int(found["attempt"]),
            str(found["host"]),
            int(found["pid"]),
            float(found["renewed_s"]),
        )
    except (ValueError, TypeError, KeyError):
        return Writer(writer_id)


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


def _mountinfo() -> str:
    with contextlib.suppress(OSError):  # only Linux has it
        return MOUNTINFO.read_text(errors="replace")
    return ""


class _Lock:
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


_open_locks: weakref.WeakSet[_Lock] = weakref.WeakSet()


def _drop_locks_in_child() -> None:
    for lock in list(_open_locks):
        lock.close()


os.register_at_fork(after_in_child=_drop_locks_in_child)


def _lock_in(folder: Path) -> _Lock:
    """Makes a folder with a lock in it, held; again when a sweep removes the one or takes the other
    in between.
    """
    for _ in range(LOCK_TRIES):
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            lock = _Lock(folder / "lock")
            if lock.try_hold() and lock.is_at(folder / "lock"):
                return lock
            lock.close()
    raise OSError(errno.ENOLCK, "its lock was taken by others again and again", str(folder))


def _remove_half_made(folder: Path) -> None:
    """Removes a claim whose writer died while making it; one that lives holds the lock, or is about
    to and begins again.
    """
    if folder.is_symlink():
        return
    try:
        lock = _Lock(folder / "lock", create=False)
    except FileNotFoundError:
        with contextlib.suppress(OSError):
            os.rmdir(folder)
        return
    except OSError:  # its lock is no file
        return
    if lock.try_hold():
        _remove(folder)
    lock.close()


def _is_free(path: Path) -> bool:
    """Says whether nobody holds the lock; a claim without its lock file has just been taken
    away.
    """
    try:
        lock = _Lock(path, create=False)
    except OSError:  # gone, or no file
        return False
    free = lock.try_hold()
    lock.close()
    return free


def _check_links(folder: Path) -> None:
    """Makes sure that link() works and refuses a name that exists: commits rest on it."""
    source = folder / "probe"
    target = folder / "probe-link"
    source.touch()
    reason = ""
    try:
        os.link(source, target)
        try:
            os.link(source, target)
            reason = "link() replaced a name that exists"
        except FileExistsError:
            pass
    except OSError as error:
        if error.errno in FULL_ERRORS:
            raise
        reason = f"link() is refused: {error.strerror}"
    finally:
        for path in (source, target):
            path.unlink(missing_ok=True)
    if reason:
        root = folder.parent.parent
        raise CheckpointError(
            f"{root} is on a file system where a commit cannot be made safe against a second writer"
            f" ({reason}). If you promise that only one manager writes here, pass"
            " Options(single_writer=True)",
            path=str(root),
        )


def _remove(folder: Path) -> None:
    """Removes a flat folder that is no claim, or no longer one; what cannot be removed, and a link,
    stays.
    """
    if folder.is_symlink():
        return
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            os.unlink(folder / name)
        os.rmdir(folder)
