"""The folder of one run on this host, as one process writes into it: over the files of what was let
go, durably only if it is to be.

A part exists once its `part-<rank>.json` has its name, and no longer once that is gone. So files
may be torn at any moment, and are never taken for whole. Of what other processes wrote, and earlier
attempts, nothing is written over: it is deleted.

All users may be able to write into the folder above, a mount point. So the folder of a run is this
user's alone, and is used only while it is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..errors import CheckpointError, is_shortage
from ..storage import base
from ..storage.local import (
    LocalStorage,
    create_file,
    in_folder,
    make_folders,
    scan_folder,
    sync_folder,
    write_parts,
)
from .parts import LocalKey, Part, parse_folder

_log = logging.getLogger(__name__)
PART_LIMIT_BYTES = 256 << 20
FOLDER_MODE = 0o700
FILE_MODE = 0o600


class _Spare(NamedTuple):
    """A file that may be written over."""

    path: Path
    size: int


class HostStorage(LocalStorage):
    """Writes files over spare ones where there are some: fresh memory costs more than its bytes.
    With `syncs` they outlive a power cut.
    """

    def __init__(self, root: str | os.PathLike[str], *, syncs: bool = False) -> None:
        super().__init__(root, file_mode=FILE_MODE, folder_mode=FOLDER_MODE)
        self.syncs = syncs
        self._spare: list[_Spare] = []
        self._spare_lock = threading.Lock()

    def write(self, name: str, size: int, parts: Iterable[base.Part]) -> None:
        """Writes a file of exactly `size` bytes; its name is not durable yet."""
        path = self._to_change(name)
        file = in_folder(path, lambda: self._opened(path, size), self.folder_mode, syncs=self.syncs)
        try:
            write_parts(file, path, parts, starts=False)
            os.ftruncate(file, size)
            if self.syncs:
                os.fsync(file)
        finally:
            os.close(file)

    @contextlib.contextmanager
    def synced_once(self, folder: str) -> Iterator[None]:
        """Syncs nothing: a part's publication does."""
        yield

    def spare(self, names: Iterable[str]) -> None:
        """Lets files be written over. Nobody may read them for what they are any more."""
        for name in names:
            path = self._to_change(name)
            with contextlib.suppress(FileNotFoundError):
                size = path.lstat().st_size
                with self._spare_lock:
                    self._spare.append(_Spare(path, size))

    def spare_bytes(self) -> int:
        """Returns how many bytes the spare files have that are still there."""
        with self._spare_lock:
            return sum(spare.size for spare in self._spare if spare.path.exists())

    def drop_spare(self) -> None:
        """Deletes the spare files."""
        with self._spare_lock:
            spare = self._spare
            self._spare = []
        for each in spare:
            with contextlib.suppress(OSError):
                each.path.unlink()
                _remove_empty(each.path.parents[:3])

    def _opened(self, path: Path, size: int) -> int:
        """Returns the descriptor of a new file. It may be the spare one of the nearest size under a
        new name, with bytes in it, unless that is nobody's to write over.
        """
        with self._spare_lock:
            spare = min(self._spare, key=lambda spare: abs(spare.size - size), default=None)
            if spare is not None:
                self._spare.remove(spare)
        file = None if spare is None else _renamed(spare.path, path)
        return create_own_file(path) if file is None else file


def _renamed(spare: Path, path: Path) -> int | None:
    """Returns the descriptor of a spare file under a new name, None where that failed."""
    file = -1
    try:
        file = os.open(spare, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        found = os.fstat(file)
        if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
            os.rename(spare, path)
            _remove_empty(spare.parents[:3])
            return file
    except OSError as error:
        _log.debug("%s is not written over: %s", spare, error)
    if file >= 0:
        os.close(file)
    return None


def _remove_empty(folders: Iterable[Path]) -> None:
    """Removes the folders of an item, its step and its branch, up to one with something in it."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


class HostFolder:
    """What one process keeps of a run on its host: its parts, and copies of its peers'.
    Thread-safe.
    """

    def __init__(self, path: Path, run: str, *, syncs: bool = False) -> None:
        self.run = run
        self.path = path / run
        self.storage = HostStorage(self.path, syncs=syncs)
        self._kept: dict[LocalKey, list[Part]] = {}  # what this process has written
        self._lock = threading.Lock()

    def publish(self, written: Part, data: bytes) -> None:
        """Makes a part exist, all of whose files are there, in one operation."""
        path = self.path / written.name
        made = path.with_suffix(".new")
        syncs = self.storage.syncs
        descriptor = in_folder(made, lambda: create_own_file(made), FOLDER_MODE, syncs=syncs)
        try:
            self._write_text(descriptor, data, written.files)
            os.replace(made, path)
        except BaseException:
            made.unlink(missing_ok=True)
            raise
        if syncs:
            sync_folder(path.parent)
        with self._lock:
            self._kept.setdefault(written.key, []).append(written)

    def _write_text(self, descriptor: int, data: bytes, files: Iterable[str]) -> None:
        """Writes the text of a part; the names of its files are durable before it."""
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            if self.storage.syncs:
                for folder in {(self.path / name).parent for name in files}:
                    sync_folder(folder)
                os.fsync(file.fileno())

    def let_go(self, key: LocalKey, more_files: Iterable[str] = ()) -> None:
        """Ends the parts of a local save that this process has written; their files are spare from
        then on, and so are `more_files`.
        """
        with self._lock:
            parts = self._kept.get(key, [])
        for part in parts:
            (self.path / part.name).unlink(missing_ok=True)
        with self._lock:
            self._kept.pop(key, None)
        self.storage.spare({*(name for part in parts for name in part.files), *more_files})
        _remove_empty((self.path / key.part_name(0)).parents[:2])

    def saves(self) -> list[LocalKey]:
        """Returns the local saves that this process has written and not let go, the oldest
        first.
        """
        with self._lock:
            return list(self._kept)

    def scan(self) -> list[Part]:
        """Returns the parts of the run that are complete here, whoever wrote them; what is torn,
        damaged or strange is passed over. Raises OSError where nothing can be listed or read.
        """
        found = []
        for folder in self._folders():
            for path in _parts_in(self.path / folder):
                try:
                    found.append(self._read(path))
                except (OSError, CheckpointError, ValueError) as error:
                    if is_shortage(error):
                        raise
                    _log.warning("%s is passed over: %s", path, error)
        return found

    def _read(self, path: Path) -> Part:
        data = self.storage.fetch(str(path.relative_to(self.path)), PART_LIMIT_BYTES)
        part = Part.from_bytes(data, str(path))
        if part.run != self.run or path != self.path / part.name:
            raise ValueError(
                f"it is process {part.process}'s part of {part.key} of run {part.run}, under"
                " another name"
            )
        for name, size in part.files.items():
            if self.storage.size(name) != size:
                raise ValueError(f"{name} has not the {size} bytes that it was written with")
        return part

    def _folders(self) -> list[str]:
        """Returns the folders of local saves, by their names below that of the run."""
        return [
            found.name.rstrip("/")
            for branch in self.storage.list("", names_only=True)
            for found in self.storage.list(branch.name, names_only=True)
            if found.name.endswith("/") and parse_folder(found.name.rstrip("/"))
        ]

    def prune(self, branch: int, writer: str, stay: Collection[LocalKey]) -> list[str]:
        """Deletes local saves of earlier attempts, and what they left unfinished, but for those
        that stay; returns the names of their folders.

        Nothing of a later branch than `branch` is touched, nor of this one's `writer`: there the
        processes of this attempt are at work.
        """
        return self.delete(
            lambda found, save_id: found <= branch and not save_id.startswith(writer), stay
        )

    def delete(self, goes: Callable[[int, str], bool], stay: Collection[LocalKey]) -> list[str]:
        """Deletes the local saves that go by branch and save id, but for those that stay; returns
        the names of their folders.
        """
        folders = {key.folder for key in stay}
        deleted = []
        for name in self._folders():
            path = self.path / name
            found = parse_folder(name)
            if found is not None and goes(found[0], found[2]) and name not in folders:
                # First: a part without all of its files would still be listed as one.
                for part in _parts_in(path):
                    part.unlink(missing_ok=True)
                shutil.rmtree(path, ignore_errors=True)
                _remove_empty([path.parent])
                deleted.append(name)
        return deleted

    def close(self) -> None:
        """Deletes the files that were to be written over."""
        self.storage.drop_spare()


@dataclass
class RunFolder:
    """This host's folder of the root's run, which is known once the root has a branch."""

    path: Path
    syncs: bool
    _folder: HostFolder | None = None

    def open(self, run: str) -> HostFolder:
        """Returns the folder of a run, which is made if it is missing.

        A root that was made anew has another run. Raises CheckpointError where the folder is not
        this user's alone, OSError.
        """
        # First: where the folder cannot be made, steps are read from the other hosts.
        if self._folder is None or self._folder.run != run:
            self._folder = HostFolder(self.path, run, syncs=self.syncs)
        make_folders(self._folder.path, FOLDER_MODE, syncs=self.syncs)
        check_run_folder(self._folder.path)
        return self._folder

    def current(self) -> HostFolder:
        """Returns the folder that was opened last."""
        assert self._folder is not None
        return self._folder

    def close(self) -> None:
        """Closes the folder."""
        if self._folder is not None:
            self._folder.close()


def _parts_in(folder: Path) -> list[Path]:
    # Path.glob passes over a folder that it cannot list.
    paths = map(Path, scan_folder(folder))
    return sorted(path for path in paths if path.match("part-*.json"))


def create_own_file(path: Path) -> int:
    """Returns the descriptor of a new file that this user alone may read."""
    file = create_file(path)
    os.fchmod(file, FILE_MODE)
    return file


def check_run_folder(path: Path, *, of_any_user: bool = False) -> None:
    """Raises CheckpointError unless this is a folder, no link, that only its user may use; OSError.

    That is this user, unless it may be `of_any_user`.
    """
    status = path.lstat()
    mode = stat.S_IMODE(status.st_mode)
    user = os.geteuid()
    if stat.S_ISLNK(status.st_mode):
        found = "a link"
    elif not stat.S_ISDIR(status.st_mode):
        found = "no folder"
    elif status.st_uid != user and not of_any_user:
        found = f"a folder of user {status.st_uid}"
    elif mode & ~FOLDER_MODE & 0o777:
        found = f"a folder with mode {mode:03o}"
    else:
        return
    raise CheckpointError(
        f"{path} is {found}; expected a folder of user {user} with mode {FOLDER_MODE:03o}, or none."
        " Move it away, or name another folder for local steps",
        path=str(path),
    )
