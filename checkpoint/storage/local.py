"""A folder of a POSIX file system as a store.

Vectored I/O at positions, early write-back, fsync of files and of folders, commit by link.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import threading
import uuid
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from holdfast.coordination import Fenced
from holdfast.coordination.vitals import fill_standard_streams

from ..errors import Corrupt
from ..memory.write_behind import WriteBehind
from ..options import absolute
from .base import (
    Buffers,
    Entry,
    NameTaken,
    NotCommitted,
    Part,
    PosixFolder,
    TensorStoreAccess,
)

_log = logging.getLogger(__name__)
IOV_MAX = 1000  # buffers in one vectored call; Linux allows 1,024
FOLDER_TRIES = 16
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
# After these errors of link() and rename() nothing was done. After others (EIO, ESTALE, ETIMEDOUT)
# the name may exist.
REFUSALS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EMLINK,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.EXDEV,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
}
# What fsync says of a folder where that is nothing: SMB before Linux 5.7, and some FUSE.
_NO_SYNC = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}
T = TypeVar("T")
StrPath: TypeAlias = str | os.PathLike[str]


class LocalStorage:
    """A store in a local (or shared POSIX) folder, which need not exist yet. Thread-safe.

    With `single_writer` a commit is a check and then a rename, for file systems without hard links.
    That is only safe while nobody else writes. `file_mode` and `folder_mode` are the modes of new
    files and folders, whatever the umask; None: as the umask has it.
    """

    max_file_bytes: int | None = None
    max_concurrency: int = 4
    conditions = None

    def __init__(
        self,
        root: StrPath,
        *,
        single_writer: bool = False,
        file_mode: int | None = None,
        folder_mode: int | None = None,
    ) -> None:
        fill_standard_streams()  # no file of a checkpoint gets what is printed
        self.path = Path(absolute(root))
        self.root = str(self.path)
        self.folder_mode = folder_mode
        self._single_writer = single_writer
        self._file_mode = file_mode
        self._kept = _KeptFile()
        self._synced_later: set[Path] = set()

    @property
    def posix(self) -> PosixFolder:
        return self

    @property
    def tensorstore(self) -> TensorStoreAccess:
        return self

    # --- A folder of a POSIX file system

    @property
    def can_link(self) -> bool:
        return not self._single_writer

    def link(self, source: str, name: str, size: int) -> None:
        old = self.path / source
        new = self._to_change(name)
        status = old.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            raise OSError(errno.ESTALE, f"it is no file of {size} bytes", str(old))
        in_folder(new, lambda: os.link(old, new, follow_symlinks=False), self.folder_mode)

    def make_durable(self, folder: str) -> None:
        sync_folder(self.path / folder)

    # --- What tensorstore opens

    context = None

    def kvstore(self, folder: str) -> dict[str, Any]:
        return {"driver": "file", "path": f"{self.path / folder}/"}

    # --- The seam

    def _to_change(self, name: str) -> Path:
        """Returns the path of what is written or deleted.

        Raises OSError for a name behind a link: what is there is not the root's.
        """
        path = self.path
        for folder in name.rstrip("/").split("/")[:-1]:
            path /= folder
            if path.is_symlink():
                raise OSError(
                    errno.ELOOP,
                    "it is a link, and nothing behind links is written or deleted",
                    str(path),
                )
        return self.path / name

    def write(self, name: str, size: int, parts: Iterable[Part]) -> None:
        path = self._to_change(name)
        file = in_folder(path, lambda: create_file(path), self.folder_mode)
        try:
            self._set_mode(file)
            # The kernel begins to write while the next part is made: fsync has less to wait for.
            write_parts(file, path, parts, starts=True)
            made = os.fstat(file).st_size
            assert made == size, f"{path}: the parts made {made} bytes of {size}"
            with _naming(path):
                os.fsync(file)
        finally:
            os.close(file)
        if path.parent not in self._synced_later:
            sync_folder(path.parent)

    @contextlib.contextmanager
    def synced_once(self, folder: str) -> Iterator[None]:
        """Syncs a folder once for all files that are written in it: see SyncsFoldersOnce."""
        path = self.path / folder
        self._synced_later.add(path)
        try:
            yield
        finally:
            self._synced_later.discard(path)
        if path.is_dir():  # nothing may have been written
            sync_folder(path)

    def _set_mode(self, file: int) -> None:
        if self._file_mode is not None:
            os.fchmod(file, self._file_mode)

    def read(self, name: str, offset: int, buffers: Buffers) -> int:
        if self._kept.name == name:
            got = self._kept.read(self.path, offset, buffers)
            if got is not None:
                return got
        file = open_to_read(self.path / name)
        try:
            return _transfer(os.preadv, file, buffers, offset)
        finally:
            os.close(file)

    @contextlib.contextmanager
    def kept_open(self, name: str) -> Iterator[None]:
        """Keeps a file open that this thread reads from: see KeepsFilesOpen."""
        self._kept.keep(name)
        try:
            yield
        finally:
            self._kept.keep(None)

    def size(self, name: str) -> int:
        path = self.path / name
        _refuse_folder(path)
        return path.stat().st_size

    def fetch(self, name: str, limit_bytes: int) -> bytes:
        with open(open_to_read(self.path / name), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit_bytes:
                raise OverflowError(
                    f"{self.path / name} has {size} bytes; at most {limit_bytes} are read"
                )
            return file.read(size)

    def commit(self, name: str, data: bytes, claim: str, *, replace: bool = False) -> None:
        with self._refusing(claim):
            path = self._to_change(name)
            source = self._to_change(f"{claim}/{uuid.uuid4().hex}.record")
            made = self._written(source, data, path)
        try:
            # Before the link, of which some errors say nothing: without its folder none was tried.
            with self._refusing(claim):
                in_folder(path, lambda: None, self.folder_mode)
            with self._refusing(claim, REFUSALS):
                in_folder(
                    path, lambda: self._publish(source, path, made, replace), self.folder_mode
                )
        finally:
            with contextlib.suppress(OSError):  # it goes with its claim
                os.unlink(source)
        sync_folder(path.parent)

    def _written(self, source: Path, data: bytes, path: Path) -> os.stat_result:
        """Writes a new file that is to become `path`, durably; returns its status."""
        file = os.open(source, _NEW_FILE, 0o666)
        try:
            with _naming(path):
                self._set_mode(file)
                write_all(file, [memoryview(data)], 0)
                os.fsync(file)
            return os.fstat(file)
        finally:
            os.close(file)

    def _publish(self, source: Path, path: Path, made: os.stat_result, replace: bool) -> None:
        taken = NameTaken(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        if self._single_writer and not replace and os.path.lexists(path):
            raise taken
        try:
            if replace or self._single_writer:
                os.rename(source, path)
            else:
                os.link(source, path)
        except OSError as error:
            standing = _status(path)
            if standing is None:
                raise
            # An NFS client may lose the first answer, and see EEXIST or ENOENT of its own doing.
            if os.path.samestat(standing, made):
                return
            if isinstance(error, FileExistsError):
                raise taken from None
            raise

    @contextlib.contextmanager
    def _refusing(self, claim: str, numbers: Container[int | None] | None = None) -> Iterator[None]:
        """Raises Fenced where the claim is gone, and NotCommitted for an OSError that is a refusal:
        of these numbers, or any.
        """
        try:
            try:
                yield
            except FileNotFoundError as error:
                if not is_gone(self.path / claim):
                    raise
                raise fenced(f"{self.path / claim}") from error
        except (NotCommitted, FileExistsError):
            raise
        except OSError as error:
            if numbers is not None and error.errno not in numbers:
                raise
            raise NotCommitted(error.errno, error.strerror, error.filename) from error

    def list(
        self, folder: str, *, recursive: bool = False, names_only: bool = False
    ) -> list[Entry]:
        return sorted(
            self._entries(folder.strip("/"), recursive, names_only), key=lambda entry: entry.name
        )

    def _entries(self, folder: str, recursive: bool, names_only: bool) -> Iterator[Entry]:
        for item in scan_folder(self.path / folder):
            name = f"{folder}/{item.name}" if folder else item.name
            if not item.is_dir(follow_symlinks=False):
                yield from _file_entry(item, name, names_only)
            elif recursive:
                yield from self._entries(name, True, names_only)
            else:
                yield Entry(name + "/", 0)

    def delete(self, names: Sequence[str]) -> None:
        folders: dict[Path, None] = {}
        for name in names:
            path = self._to_change(name)
            try:
                if name.endswith("/"):
                    os.rmdir(path)
                else:
                    os.unlink(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                if name.endswith("/") and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    continue
                raise
            folders[path.parent] = None
            folders.pop(path, None)
        for folder in folders:
            with contextlib.suppress(FileNotFoundError):
                sync_folder(folder)


class _KeptFile(threading.local):
    """The file that a thread reads from several times, opened by the first of these reads."""

    name: str | None = None
    _file: int | None = None

    def keep(self, name: str | None) -> None:
        """Closes the file; from now on reads of another are kept open (None: of none)."""
        self._close()
        self.name = name

    def read(self, root: Path, offset: int, buffers: Buffers) -> int | None:
        """Does what a store's `read` does; None where the open file is no longer there: a shared
        file system has deleted or replaced it. Another try opens the file anew.
        """
        assert self.name is not None
        if self._file is None:
            self._file = open_to_read(root / self.name)
        try:
            return _transfer(os.preadv, self._file, buffers, offset)
        except OSError as error:
            self._close()
            if error.errno == errno.ESTALE:
                return None
            raise

    def _close(self) -> None:
        file = self._file
        self._file = None
        if file is not None:
            os.close(file)


def scan_folder(folder: Path) -> list[os.DirEntry[str]]:
    """Returns what is in a folder; nothing where there is none."""
    for _ in range(FOLDER_TRIES):
        try:
            return list(os.scandir(folder))
        except NotADirectoryError:
            return []
        except FileNotFoundError:
            # A client of a shared file system may not find a folder that is there.
            if is_gone(folder) or folder.is_symlink():
                return []
        except OSError as error:
            if error.errno == errno.ELOOP:  # a link that leads in circles is no folder
                return []
            raise
    raise OSError(errno.ESTALE, "it is listed, and cannot be opened", str(folder))


def _file_entry(item: os.DirEntry[str], name: str, names_only: bool) -> Iterator[Entry]:
    """Yields the entry of what is no folder; nothing if it is gone since it was listed."""
    if names_only:
        yield Entry(name, None)
        return
    try:
        status = item.stat()
    except FileNotFoundError:
        # A link to nothing is no file. What is listed still has not gone: it was not found.
        if not item.is_symlink() and not is_gone(Path(item.path)):
            yield Entry(name, None)
    except OSError:
        # A link that leads in circles, or somewhere forbidden. Its name is there, and opening it
        # says what is wrong.
        yield Entry(name, None)
    else:
        yield Entry(name, status.st_size, status.st_mtime, status.st_nlink)


def create_file(path: Path) -> int:
    """Returns the descriptor of a new file. A file that is there is replaced, never written over.

    Other steps may have a name for that file too.
    """
    for _ in range(FOLDER_TRIES):
        try:
            return os.open(path, _NEW_FILE, 0o666)
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISREG(os.lstat(path).st_mode):  # a link, a pipe: nobody's to replace
                    raise
                os.unlink(path)
    return os.open(path, _NEW_FILE, 0o666)


def is_gone(path: Path) -> bool:
    """Says whether nothing has this name, by a listing of its folder.

    A client of a shared file system may not find a file that is there.
    """
    try:
        return path.name not in os.listdir(path.parent)
    except FileNotFoundError:
        return is_gone(path.parent)
    except PermissionError:  # it may be looked into, not listed
        return not os.path.lexists(path)


def open_to_read(path: Path) -> int:
    """Returns a file's descriptor. Raises Corrupt for a pipe, a socket or a device.

    To read one of these could wait for ever.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ELOOP):  # a socket, a link that leads in circles
            raise _no_file(path) from error
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        _refuse_folder(path)
        raise _no_file(path)
    return file


def _refuse_folder(path: Path) -> None:
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))


def _status(path: Path) -> os.stat_result | None:
    """Returns the status of what has this name, None for nothing.

    Raises EIO, which is no refusal, where that cannot be seen.
    """
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise OSError(
            errno.EIO, f"whether it has got its name is not known: {error.strerror}", str(path)
        ) from error


def _no_file(path: Path) -> Corrupt:
    return Corrupt(
        f"{path} is a pipe, a socket, a device or a link in circles; expected a file",
        path=str(path),
        file=str(path),
    )


def fenced(claim: str) -> Fenced:
    """Returns the error of a writer whose claim is gone."""
    return Fenced(
        f"the claim {claim} was taken away: another writer has fenced this one, or somebody has"
        " removed files of the root; open a new manager to write again"
    )


def write_all(file: int, buffers: Buffers, offset: int) -> int:
    total = sum(buffer.nbytes for buffer in buffers)
    done = _transfer(os.pwritev, file, buffers, offset)
    if done != total:
        raise OSError(errno.EIO, f"only {done} of {total} bytes were written")
    return total


def write_parts(file: int, path: Path, parts: Iterable[Part], *, starts: bool) -> None:
    """Writes the parts of a file as they are made; `starts` as WriteBehind has it."""
    behind = WriteBehind(file, starts=starts)
    for offset, buffers in parts:
        with _naming(path):
            behind.wrote(offset, write_all(file, buffers, offset))


def _transfer(
    call: Callable[[int, Buffers, int], int],
    file: int,
    buffers: Buffers,
    offset: int,
) -> int:
    """Makes vectored calls until all buffers are done or one moves nothing.

    Returns how many bytes they moved.
    """
    pending = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
    start = 0
    done = 0
    while start < len(pending):
        moved = call(file, pending[start : start + IOV_MAX], offset + done)
        if moved == 0:
            break
        done += moved
        while start < len(pending) and moved >= pending[start].nbytes:
            moved -= pending[start].nbytes
            start += 1
        if moved:
            pending[start] = pending[start][moved:]
    return done


def make_folders(folder: Path, mode: int | None, *, syncs: bool = True) -> None:
    """Makes a folder and those above it, each durable in its parent if it `syncs`.

    New folders have the mode, if it is not None.
    """
    if folder.is_dir():
        return
    make_folders(folder.parent, mode, syncs=syncs)
    with contextlib.suppress(FileExistsError):
        # Never more open than its mode, not for a moment: another process may look.
        os.mkdir(folder, 0o777 if mode is None else mode)
        if mode is not None:
            os.chmod(folder, mode)
    if syncs:
        sync_folder(folder.parent)


def in_folder(
    path: Path, make: Callable[[], T], mode: int | None = None, *, syncs: bool = True
) -> T:
    """Makes the folder of a path, then what is in it.

    Tries again when a sweep removes the folder while it is still empty.
    """
    for _ in range(FOLDER_TRIES):
        with contextlib.suppress(FileNotFoundError):
            make_folders(path.parent, mode, syncs=syncs)
            return make()
    make_folders(path.parent, mode, syncs=syncs)
    return make()


def sync_folder(folder: StrPath) -> None:
    """Makes the names in a folder durable. Where its file system cannot, that is logged once."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with _naming(folder):
            os.fsync(file)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
        _warn_of_no_sync(os.fstat(file).st_dev, error)
    finally:
        os.close(file)


_told_devices: set[int] = set()


def _warn_of_no_sync(device: int, error: OSError) -> None:
    if device in _told_devices:
        return
    _told_devices.add(device)
    _log.warning(
        "its file system syncs no folders (%s): the newest steps may be gone after a power cut",
        error,
    )


@contextlib.contextmanager
def _naming(path: StrPath) -> Iterator[None]:
    """Has an OSError of a descriptor name its file."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
