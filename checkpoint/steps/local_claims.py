"""Claims in a POSIX folder: a file lock says whose writer lives."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from ..errors import CheckpointError, Corrupt
from ..storage.base import PosixFolder
from ..storage.local import make_folders, open_to_read, scan_folder
from .claims import CLAIM_LIMIT_BYTES, FOLDER, FULL_ERRORS, WRITER_ID, Writer, parse_writer
from .file_lock import LOCK_NAME, NO_LOCKS, FileLock, hold_lock_in, is_free, locks_are_local

_log = logging.getLogger(__name__)


class LocalClaims:
    """Claims in a POSIX folder: the lock says who lives."""

    def __init__(self, root: PosixFolder, *, single_writer: bool = False) -> None:
        self._folder = root.path / FOLDER
        self._folder_mode = root.folder_mode
        self._single_writer = single_writer
        self._locks: dict[str, FileLock] = {}

    def until(self, end_s: float) -> LocalClaims:
        """Returns itself: calls of a file system cannot be broken off."""
        return self

    def take(self, writer: Writer) -> None:
        """Makes the claim, with a lock that is held by this process and by no child of it."""
        if writer.id in self._locks:
            return
        made = self._folder / f"new-{writer.id}"
        try:
            lock = self._make_claim(writer, made)
        except OSError as error:
            raise CheckpointError(
                f"cannot write a checkpoint in {self._folder.parent}: {error.strerror or error}"
                f" ({error.filename or made}); expected a folder that this process may write to. To"
                " only read, pass Options(read_only=True)",
                path=str(self._folder.parent),
            ) from error
        self._locks[writer.id] = lock

    def _make_claim(self, writer: Writer, made: Path) -> FileLock:
        with contextlib.ExitStack() as undo:
            undo.callback(_remove, made)
            self._make_folder()
            lock = self._hold_lock_in(made)
            undo.callback(lock.close)
            (made / "claim.json").write_text(json.dumps(asdict(writer)))
            if not self._single_writer:
                _check_links(made)
            # A claim gets its name last: no other process ever sees it without its lock.
            made.rename(self._folder / writer.id)
            undo.pop_all()
        return lock

    def _hold_lock_in(self, made: Path) -> FileLock:
        try:
            return hold_lock_in(made, if_any=self._single_writer)
        except OSError as error:
            if error.errno in NO_LOCKS:
                raise _unsafe(made, f"flock() is refused: {error.strerror}") from None
            raise

    def _make_folder(self) -> None:
        if self._folder.is_symlink():
            raise OSError(
                errno.ELOOP, "it is a link, and nothing behind links is written", str(self._folder)
            )
        if self._folder_mode is not None:  # the root is for whom its steps are for
            make_folders(self._folder, self._folder_mode)

    def others(self, me: str) -> list[tuple[Writer, bool]]:
        """Reads each other claim, and tries its lock."""
        others = list(filter(None, map(self._read, sorted(self.standing() - {me}))))
        if not others or not locks_are_local(self._folder):
            return [(writer, self._is_dead(writer)) for writer in others]
        # Here a lock that another host holds looks free: it says nothing of that host's writers.
        here = socket.gethostname()
        if any(writer.host != here for writer in others):
            _log.warning(
                "file locks in %s hold on one host alone (see its mount options): whether writers"
                " on other hosts are dead is not known, and what they left stays until `holdfast"
                " sweep --force`",
                self._folder,
            )
        return [(writer, writer.host == here and self._is_dead(writer)) for writer in others]

    def _is_dead(self, writer: Writer) -> bool:
        return is_free(self._folder / writer.id / LOCK_NAME)

    def fence(self, writer_id: str) -> None:
        """Renames the claim: its writer's next commit finds no folder to link from.

        A claim of this process is removed, and its lock freed in any case.
        """
        # A name of its own: something that is no fenced claim may have one that could be foreseen.
        fenced = self._folder / f"fenced-{secrets.token_hex(4)}"
        try:
            if writer_id in self.standing():
                with contextlib.suppress(FileNotFoundError):
                    (self._folder / writer_id).rename(fenced)
        finally:
            lock = self._locks.pop(writer_id, None)
            if lock is not None:
                lock.close()
        if lock is not None:
            _remove(fenced)  # after the lock: NFS and FUSE keep a file that is open

    def standing(self) -> set[str]:
        """Lists the claims."""
        return {
            name
            for name in self._names()
            if WRITER_ID.fullmatch(name) and not (self._folder / name).is_symlink()
        }

    def _names(self) -> list[str]:
        """Lists the folder of claims; a link or no folder has no claims of the root."""
        if self._folder.is_symlink():
            return []
        # Without claims a sweep would delete the packs of writers that live.
        return [entry.name for entry in scan_folder(self._folder)]

    def bury(self, step_dir: str, packs: Mapping[str, str]) -> list[str]:
        """Deletes the records that fenced writers have not linked yet.

        The kernel may have found such a record before its claim was renamed, and link it now: of a
        file that has no name left it makes no link.
        """
        for folder in self._names():
            if folder.startswith("fenced-") and not (self._folder / folder).is_symlink():
                for entry in scan_folder(self._folder / folder):
                    if entry.name.endswith(".record"):
                        Path(entry).unlink(missing_ok=True)
        return list(packs)

    def forget_fenced(self) -> None:
        """Removes what is left of fenced claims, and of claims that were never completed."""
        for name in self._names():
            kind, _, writer_id = name.partition("-")
            if not WRITER_ID.fullmatch(writer_id):
                continue
            if kind == "fenced":
                _remove(self._folder / name)
            elif kind == "new":
                _remove_half_made(self._folder / name)

    def _read(self, writer_id: str) -> Writer | None:
        try:
            with open(open_to_read(self._folder / writer_id / "claim.json"), "rb") as file:
                return parse_writer(file.read(CLAIM_LIMIT_BYTES), writer_id)
        except FileNotFoundError:
            return None
        except (OSError, Corrupt):
            # Damage is no reason to fence: the lock still says whether the writer lives.
            return Writer(writer_id)


def _remove_half_made(folder: Path) -> None:
    """Removes a claim whose writer died while it made the claim."""
    if folder.is_symlink():
        return
    try:
        lock = FileLock(folder / LOCK_NAME, create=False)
    except FileNotFoundError:
        with contextlib.suppress(OSError):
            os.rmdir(folder)
        return
    except OSError:  # its lock is no file
        return
    # A writer that lives holds the lock. If it is just about to, it loses the folder, sees that
    # its lock is no longer at that path, and begins again: see hold_lock_in.
    with contextlib.closing(lock), contextlib.suppress(OSError):  # without locks it stays
        if lock.try_hold():
            _remove(folder)


def _check_links(folder: Path) -> None:
    """Makes sure that link() works and refuses a name that exists: commits rest on it."""
    source = folder / "probe"
    target = folder / "probe-link"
    source.touch()
    reason = ""
    try:
        os.link(source, target)
        with contextlib.suppress(FileExistsError):
            os.link(source, target)
            reason = "link() replaced a name that exists"
    except OSError as error:
        if error.errno in FULL_ERRORS:
            raise
        reason = f"link() is refused: {error.strerror}"
    finally:
        source.unlink(missing_ok=True)
        target.unlink(missing_ok=True)
    if reason:
        raise _unsafe(folder, reason)


def _unsafe(made: Path, reason: str) -> CheckpointError:
    root = made.parent.parent
    return CheckpointError(
        f"{root} is on a file system where a commit cannot be made safe against a second writer"
        f" ({reason}). If you promise that only one manager writes here, pass"
        " Options(single_writer=True); `save` takes single_writer=True itself",
        path=str(root),
    )


def _remove(folder: Path) -> None:
    """Removes a flat folder that is no claim, or no longer one.

    A link, and what cannot be removed, stays.
    """
    if folder.is_symlink():
        return
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            os.unlink(folder / name)
        os.rmdir(folder)
