"""Stands between the code and the kernel: each call on a name below one folder is a step, and may
fail as a disk or a shared file system makes it fail. The files are real, in memory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import glob
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from .rules import Durable, Effect, Gone, Named
from .scheduler import CHANGE, OK, READ, WRITE, Access, Task, current_task
from .world import World

T = TypeVar("T")
BEFORE = "error before"
AFTER = "error after"
LATE = "error, and done late"
NOT_FOUND = "not found, though it is there"
MEMORY = Path("/dev/shm")
ROOT = "root/"  # what the judge hears of; beside it are the folders of hosts

_REAL: dict[str, Any] = {
    name: getattr(os, name)
    for name in (
        "open",
        "close",
        "stat",
        "lstat",
        "mkdir",
        "rmdir",
        "unlink",
        "rename",
        "replace",
        "link",
        "listdir",
        "scandir",
        "pwritev",
        "fsync",
        "utime",
        "ftruncate",
    )
}
_flock = fcntl.flock
_io_open = io.open
_rmtree = shutil.rmtree


class Disk:
    """The folders of one run, each a store of its own or a host, below one real folder."""

    def __init__(self, world: World, folder: str) -> None:
        self.world = world
        self.folder = folder
        self._skip = len(folder) + 1
        self.names: dict[int, str] = {}  # by descriptor
        self.locks: dict[int, tuple[str, str]] = {}  # held: by descriptor, the process and the file

    def shown(self, key: str) -> str:
        """Returns a name as stories and the judge have it: relative to the root."""
        return key[len(ROOT) :] if key.startswith(ROOT) else key or "/"

    def tell(self, effect_of: Callable[[str], Effect], key: str) -> None:
        """Tells the judge of an effect on the root; hosts have no judge."""
        if key.startswith(ROOT):
            self.world.effect(effect_of(key[len(ROOT) :]))

    def key(self, path: Any) -> str | None:
        """Returns a name below the folder, None for all else."""
        if type(path) is not str:
            if isinstance(path, int):
                return None
            path = os.fspath(path)
            if type(path) is not str:
                return None
        return path[self._skip :].rstrip("/") if path.startswith(self.folder) else None

    # --- one call

    def call(
        self,
        verb: str,
        key: str,
        accesses: tuple[Access, ...],
        do: Callable[[], T],
        *,
        faults: tuple[str, ...] = (),
        done: Callable[[T], None] | None = None,
        lost: Callable[[T], None] | None = None,
        late: Callable[[], None] | None = None,
    ) -> T:
        """Does a call as a step. What it returns is `lost` where it fails after it was done."""
        task = current_task()
        assert task is not None
        world = self.world
        label = f"{verb} {' as '.join(map(self.shown, key.split(' as ')))}"
        variant = world.step(task, label, accesses, faults)
        if variant == OK:
            found = do()
            if done is not None:
                done(found)
            return found
        path = f"{self.folder}/{key}"
        if variant == NOT_FOUND:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        if variant == AFTER:
            found = do()
            if done is not None:
                done(found)
            if lost is not None:
                lost(found)
        elif variant == LATE:
            assert late is not None
            late()
            raise OSError(errno.ETIMEDOUT, "Connection timed out", path)
        else:
            world.run.actual = ()
        raise OSError(errno.EIO, "Input/output error", path)

    def named(self, key: str, source: str = "") -> None:
        """Tells the judge what a name stands for now."""
        if self.world.judges:
            # A file may have lost its name since it was opened.
            with contextlib.suppress(IsADirectoryError, FileNotFoundError):
                file = _REAL["open"](f"{self.folder}/{key}", os.O_RDONLY)
                try:
                    data = os.pread(file, 1 << 20, 0)
                finally:
                    _REAL["close"](file)
                came_from = self.shown(source)
                self.tell(
                    lambda name: Named(
                        self.world.who(), name, data, durable=False, source=came_from
                    ),
                    key,
                )

    def is_locked(self, name: str) -> bool:
        """Says whether somebody holds a lock."""
        return any(held == name for _, held in self.locks.values())

    def free(self, files: Iterable[int]) -> None:
        """Frees the locks of a process that died; its descriptors are closed at the end."""
        for file in files:
            _flock(file, fcntl.LOCK_UN)
            self.locks.pop(file, None)

    def gone(self, key: str) -> None:
        self.tell(lambda name: Gone(self.world.who(), name), key)


@functools.lru_cache(1 << 14)
def _above(key: str) -> tuple[Access, ...]:
    """Returns the accesses of whoever goes to a name: the folders above it."""
    parts = key.split("/")[:-1]
    return tuple(("/".join(parts[:count]), READ) for count in range(1, len(parts) + 1))


@functools.lru_cache(1 << 14)
def _reads(key: str) -> tuple[Access, ...]:
    return (*_above(key), (key, READ))


@functools.lru_cache(1 << 14)
def _changes(key: str) -> tuple[Access, ...]:
    return (*_above(key), (key, WRITE), (key.rpartition("/")[0] + "/", CHANGE))


@functools.lru_cache(1 << 14)
def _writes(key: str) -> tuple[Access, ...]:
    return (*_above(key), (key, WRITE))


@functools.lru_cache(1 << 14)
def _lists(key: str) -> tuple[Access, ...]:
    return (*_above(key), (key, READ), (key + "/", READ))


def _file_of(key: str) -> tuple[str, str]:
    """Returns the key of a file that has the same last name wherever its folder goes."""
    return "file", key.rpartition("/")[2]


def _failed(error: OSError, key: str) -> None:
    """Says that a call that was to change something has changed nothing."""
    task = current_task()
    if task is not None:
        accesses = _lists(key) if error.errno == errno.ENOTEMPTY else _reads(key)
        task.run.actual = accesses


class _Entry:
    """An entry of a scan, whose `stat` is a step of its own."""

    def __init__(self, disk: Disk, key: str, real: os.DirEntry[str]) -> None:
        self._disk = disk
        self._key = key
        self._real = real
        self.name = real.name
        self.path = real.path
        self.is_dir = real.is_dir
        self.is_symlink = real.is_symlink
        self.is_file = real.is_file

    def __fspath__(self) -> str:
        return self.path

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self.path, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        return self._real.inode()


class _Scan:
    def __init__(self, entries: list[_Entry]) -> None:
        self._entries = iter(entries)

    def __enter__(self) -> _Scan:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __iter__(self) -> Iterator[_Entry]:
        return self._entries

    def __next__(self) -> _Entry:
        return next(self._entries)

    def close(self) -> None:
        pass


_disks: dict[str, Disk] = {}


def _disk_of(path: Any) -> tuple[Disk, str] | None:
    task = current_task()
    if task is None:
        return None
    disk: Disk | None = getattr(task.run, "disk", None)
    if disk is None:
        return None
    key = disk.key(path)
    return None if key is None else (disk, key)


def _open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    real: Callable[..., int] = _REAL["open"]
    found = _disk_of(path) if dir_fd is None else None
    if found is None:
        return real(path, flags, mode, dir_fd=dir_fd)
    disk, key = found

    def opened(file: int) -> None:
        disk.names[file] = key

    if not flags & os.O_CREAT:
        verb = "open"
        if flags & os.O_DIRECTORY:
            verb = "open folder"
        return disk.call(
            verb,
            key,
            _reads(key),
            lambda: real(path, flags, mode),
            faults=(NOT_FOUND, BEFORE),
            done=opened,
        )

    def create() -> int:
        try:
            return real(path, flags, mode)
        except OSError as error:
            _failed(error, key)
            raise

    return disk.call(
        "create",
        key,
        _changes(key),
        create,
        faults=(BEFORE, AFTER),
        done=opened,
        lost=_close,  # nobody knows the descriptor
    )


def _close(file: int) -> None:
    task = current_task()
    disk: Disk | None = getattr(task.run, "disk", None) if task is not None else None
    if task is not None and disk is not None:
        if file in disk.locks and not task.run.is_over and not sys_is_unwinding(task):
            name = disk.locks[file][1]
            disk.world.step(task, f"unlock {disk.shown(name)}", ((("lock", name), WRITE),), ())
        disk.locks.pop(file, None)
        disk.names.pop(file, None)
    _REAL["close"](file)


def sys_is_unwinding(task: Task) -> bool:
    """Says whether a task belongs to a process that is dead."""
    return task.process in task.run.dead


def _fsync(file: int) -> None:
    task = current_task()
    disk: Disk | None = getattr(task.run, "disk", None) if task is not None else None
    if task is not None and disk is not None and file in disk.names:
        if task.run.is_over:
            return
        key = disk.names[file]
        disk.tell(lambda name: Durable(task.process, name), key)
        if key + "/" == ROOT:
            disk.world.effect(Durable(task.process, ""))
        return
    _REAL["fsync"](file)


def _pwritev(file: int, buffers: Any, offset: int, *flags: int) -> int:
    task = current_task()
    disk: Disk | None = getattr(task.run, "disk", None) if task is not None else None
    real: Callable[..., int] = _REAL["pwritev"]
    if task is None or disk is None or file not in disk.names:
        return real(file, buffers, offset, *flags)
    key = disk.names[file]
    return disk.call(
        "write",
        key,
        _writes(key),
        lambda: real(file, buffers, offset, *flags),
        faults=(BEFORE,),
        done=lambda _: disk.named(key),
    )


def _reading(name: str, verb: str, accesses_of: Callable[[str], tuple[Access, ...]]) -> Any:
    def call(path: Any = ".", *arguments: Any, **options: Any) -> Any:
        real = _REAL[name]
        found = _disk_of(path) if options.get("dir_fd") is None else None
        if found is None:
            return real(path, *arguments, **options)
        disk, key = found
        return disk.call(
            verb,
            key,
            accesses_of(key),
            lambda: real(path, *arguments, **options),
            faults=(NOT_FOUND, BEFORE),
        )

    return call


def _scandir(path: Any = ".") -> Any:
    found = _disk_of(path)
    if found is None:
        return _REAL["scandir"](path)
    disk, key = found

    def scan() -> _Scan:
        with _REAL["scandir"](path) as entries:
            listed = sorted(entries, key=lambda entry: entry.name)
        return _Scan([_Entry(disk, f"{key}/{entry.name}", entry) for entry in listed])

    return disk.call("list", key, _lists(key), scan, faults=(NOT_FOUND, BEFORE))


def _changing(name: str) -> Any:
    def call(path: Any, *arguments: Any, **options: Any) -> Any:
        real = _REAL[name]
        found = _disk_of(path) if options.get("dir_fd") is None else None
        if found is None:
            return real(path, *arguments, **options)
        disk, key = found

        def change() -> None:
            try:
                real(path, *arguments, **options)
            except OSError as error:
                _failed(error, key)
                raise

        accesses = _changes(key)
        if name == "rmdir":
            accesses = (*accesses, (key + "/", READ))
        elif name == "unlink" and key.endswith(".record"):
            accesses = (*accesses, (_file_of(key), WRITE))

        def changed(_: None) -> None:
            if name == "unlink":
                disk.gone(key)
            elif name == "rmdir":
                disk.gone(f"{key}/")
            else:
                disk.tell(lambda name: Named(disk.world.who(), f"{name}/", durable=False), key)

        return disk.call(name, key, accesses, change, faults=(BEFORE, AFTER), done=changed)

    return call


def _files_below(path: str) -> list[str]:
    if not os.path.isdir(path):
        return []
    return [
        os.path.join(folder, file) for folder, _, files in os.walk(path) for file in sorted(files)
    ]


def _moving(name: str) -> Any:
    def call(source: Any, target: Any, **options: Any) -> Any:
        real = _REAL[name]
        found = _disk_of(source)
        to = _disk_of(target)
        if found is None or to is None:
            return real(source, target, **options)
        disk, key = found
        new = to[1]

        def move() -> list[tuple[str, str]]:
            with disk.world.unobserved():
                below = [disk.key(each) or "" for each in _files_below(os.fspath(source))]
            try:
                real(source, target, **options)
            except OSError as error:
                task = current_task()
                assert task is not None
                task.run.actual = (*_reads(key), *_reads(new))
                raise error
            return [(each, new + each[len(key) :]) for each in below or [key]]

        def moved(names: list[tuple[str, str]]) -> None:
            for old, renamed in names:
                disk.named(renamed, source=old)
                disk.gone(old)

        label = f"{key} as {new}"
        accesses = (*_changes(key), *_changes(new))
        return disk.call(name, label, accesses, move, faults=(BEFORE, AFTER), done=moved)

    return call


def _link(source: Any, target: Any, **options: Any) -> None:
    real = _REAL["link"]
    found = _disk_of(source)
    to = _disk_of(target)
    if found is None or to is None:
        real(source, target, **options)
        return
    disk, key = found
    new = to[1]
    world = disk.world

    def link() -> None:
        try:
            real(source, target, **options)
        except OSError:
            task = current_task()
            assert task is not None
            task.run.actual = (*_reads(key), *_reads(new))
            raise

    def land_late() -> None:
        # The server has found the file already: its name may change, or go.
        file = _REAL["open"](source, os.O_RDONLY)

        def land() -> None:
            task = current_task()
            assert task is not None
            try:
                # Of a file that has no name left no link is made.
                accesses = (*_changes(new), (_file_of(key), READ))
                world.step(task, f"a late link lands: {disk.shown(new)}", accesses, ())
                world.count("late links")
                with contextlib.suppress(FileNotFoundError, FileExistsError):
                    # Without a `dir_fd` Python makes a call that follows no link of /proc.
                    real(f"/proc/self/fd/{file}", target, src_dir_fd=file)
                    now = disk.key(os.readlink(f"/proc/self/fd/{file}"))
                    disk.named(new, source=now or key)
                    world.count("late links that landed")
            finally:
                _REAL["close"](file)

        world.kernel("the server", land)
        task = current_task()
        assert task is not None
        task.run.actual = _reads(key)

    disk.call(
        "link",
        f"{key} as {new}",
        (*_reads(key), *_changes(new)),
        link,
        faults=(BEFORE, AFTER, LATE),
        done=lambda _: disk.named(new, source=key),
        late=land_late,
    )


def _flocked(file: int, operation: int) -> None:
    task = current_task()
    disk: Disk | None = getattr(task.run, "disk", None) if task is not None else None
    if task is None or disk is None or file not in disk.names:
        _flock(file, operation)
        return
    name = disk.names[file]
    disk.world.step(task, f"lock {disk.shown(name)}", ((("lock", name), WRITE),), ())
    try:
        _flock(file, operation)
    except BlockingIOError:
        task.blocked = name
        raise
    disk.locks[file] = (task.process, name)


def _opened(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
    found = None if isinstance(file, int) else _disk_of(file)
    if found is None:
        return _io_open(file, mode, *arguments, **options)
    disk, key = found
    if "w" not in mode and "x" not in mode:
        accesses = _reads(key)
        return disk.call(
            "open",
            key,
            accesses,
            lambda: _io_open(file, mode, *arguments, **options),
            faults=(NOT_FOUND, BEFORE),
        )

    # What is written at once, and read by nobody before its folder has its name.
    opened = disk.call(
        "create",
        key,
        _changes(key),
        lambda: _io_open(file, mode, *arguments, **options),
        faults=(BEFORE, AFTER),
    )
    close = opened.close
    return _Told(opened, close, lambda: disk.named(key))


class _Told:
    """A file whose content the judge hears when it is closed."""

    def __init__(self, file: Any, close: Callable[[], None], told: Callable[[], None]) -> None:
        self._file = file
        self._close = close
        self._told = told

    def __enter__(self) -> Any:
        return self._file

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def close(self) -> None:
        self._close()
        self._told()


def _removed_tree(path: Any, *arguments: Any, **options: Any) -> None:
    found = _disk_of(path)
    if found is None:
        _rmtree(path, *arguments, **options)
        return
    disk, key = found

    def remove() -> None:
        with disk.world.unobserved():
            below = [disk.key(each) or "" for each in _files_below(os.fspath(path))]
            _rmtree(path, *arguments, **options)
        for each in below:
            disk.gone(each)

    disk.call("remove", key, (*_changes(key), (key + "/", READ)), remove)


def _ftruncate(file: int, size: int) -> None:
    _REAL["ftruncate"](file, size)


def _utime(path: Any, *arguments: Any, **options: Any) -> None:
    _REAL["utime"](path, *arguments, **options)


@contextlib.contextmanager
def observed_calls() -> Iterator[None]:
    """Has the calls of tasks on the disks of their runs go through here."""
    replaced = {
        "open": _open,
        "close": _close,
        "stat": _reading("stat", "stat", _reads),
        "lstat": _reading("lstat", "stat", _reads),
        "mkdir": _changing("mkdir"),
        "rmdir": _changing("rmdir"),
        "unlink": _changing("unlink"),
        "rename": _moving("rename"),
        "replace": _moving("replace"),
        "link": _link,
        "listdir": _reading("listdir", "list", _lists),
        "scandir": _scandir,
        "pwritev": _pwritev,
        "fsync": _fsync,
    }
    for name, function in replaced.items():
        setattr(os, name, function)
    vars(fcntl).update(flock=_flocked)
    vars(io).update(open=_opened)
    vars(shutil).update(rmtree=_removed_tree)
    globber = getattr(glob, "_StringGlobber", None)  # from Python 3.13 on it has a name of its own
    if globber is not None:
        globber.scandir = staticmethod(_scandir)
    try:
        yield
    finally:
        for name in replaced:
            setattr(os, name, _REAL[name])
        vars(fcntl).update(flock=_flock)
        vars(io).update(open=_io_open)
        vars(shutil).update(rmtree=_rmtree)
        if globber is not None:
            globber.scandir = staticmethod(_REAL["scandir"])


@contextlib.contextmanager
def memory_folder() -> Iterator[Path]:
    """Yields a folder in memory, where there is one."""
    where = str(MEMORY) if MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="searched-", dir=where) as folder:
        yield Path(folder)
