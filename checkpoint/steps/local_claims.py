"""Claims in a POSIX folder: a file lock says whose writer lives."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ..errors import CheckpointError, Corrupt
from ..storage.base import PosixFolder
from ..storage.local import is_gone, make_folders, open_to_read
from .claims import CLAIM_LIMIT_BYTES, FOLDER, FULL_ERRORS, WRITER_ID, Writer, parse_writer
from .file_lock import FileLock, hold_lock_in, is_free, locks_are_local, read_mountinfo

_log = logging.getLogger(__name__)


class LocalClaims:
    """Claims in a POSIX folder: the lock says who lives."""

    def __init__(self, root: PosixFolder, *, single_writer: bool = False) -> None:
        self._folder = root.path / FOLDER
        self._folder_mode = root.folder_mode
        self._single_writer = single_writer
        self._locks: dict[str, FileLock] = {}

    def take(self, writer: Writer) -> None:
        """Makes the claim; its lock, held by this process and by no child of it, says that the
        writer lives.
        """
        if writer.id in self._locks:
            return
        made = self._folder / f"new-{writer.id}"
        lock: FileLock | None = None
        try:
            if self._folder.is_symlink():
                raise OSError(
                    errno.ELOOP,
                    "it is a link, and nothing behind links is written",
                    str(self._folder),
                )
            if self._folder_mode is not None:  # the root is for whom its steps are for
                make_folders(self._folder, self._folder_mode)
            lock = hold_lock_in(made)
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
            socket.gethostname()
            if found and locks_are_local(self._folder, read_mountinfo())
            else None
        )
        dead = [(writer, here in (None, writer.host) and is_free(lock)) for writer, lock in found]
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
            if WRITER_ID.fullmatch(name) and not (self._folder / name).is_symlink()
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
            if WRITER_ID.fullmatch(writer_id) and kind == "fenced":
                _remove(self._folder / name)
            elif WRITER_ID.fullmatch(writer_id) and kind == "new":
                _remove_half_made(self._folder / name)

    def _read(self, writer_id: str) -> Writer | None:
        try:
            with open(open_to_read(self._folder / writer_id / "claim.json"), "rb") as file:
                return parse_writer(file.read(CLAIM_LIMIT_BYTES), writer_id)
        except FileNotFoundError:
            return None
        except (OSError, Corrupt):
            return Writer(writer_id)


def _remove_half_made(folder: Path) -> None:
    """Removes a claim whose writer died while making it; one that lives holds the lock, or is about
    to and begins again.
    """
    if folder.is_symlink():
        return
    try:
        lock = FileLock(folder / "lock", create=False)
    except FileNotFoundError:
        with contextlib.suppress(OSError):
            os.rmdir(folder)
        return
    except OSError:  # its lock is no file
        return
    if lock.try_hold():
        _remove(folder)
    lock.close()


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
