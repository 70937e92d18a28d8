"""The folder where jax keeps what it compiles: one for each host, user, processor and jaxlib.

jax's name of an entry says nothing of the host's processor, and code for another one may be illegal
here. So the folder's name does. What comes out of it is run: only its user can enter it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib
import logging
import os
import platform
import shutil
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from jaxlib.version import __version__ as jaxlib_version

from holdfast.coordination import CoordinationError
from holdfast.coordination.mounts import mount_of
from holdfast.coordination.names import on_the_wire
from holdfast.coordination.process.job_folder import user_folder

from ..spec import COMPILE_CACHE as COMPILE_CACHE
from ..spec import OFF as OFF
from ..threads import start_daemon

_log = logging.getLogger(__name__)

MAX_BYTES = 10_000_000_000
UNUSED_S = 30 * 86400.0
LEAST_FREE_BYTES = 64 << 20  # below it the disk counts as full
TORN_AFTER_S = 60.0  # jax writes an entry at once, and in place
JAX_FOLDER = "JAX_COMPILATION_CACHE_DIR"
# jax keeps by itself only what took a second to compile: a start waits for the sum of what did not.
_KEEP_ALL = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
ENTRIES = "*-cache"  # as jax names them
VIEW = "view-"  # begins the names of folders of processes: see view.py
INDEX = "index"  # of entries that were found whole: digest, bytes and name of each
_XLA_CACHES = "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"
_AUTOTUNED = "xla_gpu_per_fusion_autotune_cache_dir/*"  # XLA's, put there by jax
_NETWORK = {"9p", "beegfs", "ceph", "cifs", "gpfs", "lustre", "nfs", "nfs4", "smb3", "wekafs"}
_PROCESSOR = {"model name", "flags", "Features", "CPU implementer", "CPU architecture", "CPU part"}
_ZSTD = b"\x28\xb5\x2f\xfd"
PIECE_BYTES = 1 << 20


def keep_compiled(folder: str | Path | None = None, *, max_bytes: int = MAX_BYTES) -> Path | None:
    """Keeps what jax compiles for the next run of a program, however short its compilation was.

    It lies in a folder of this host, user, processor and jaxlib, which nobody else can enter: below
    `folder`, else below HOLDFAST_COMPILE_CACHE, else in `holdfast/compiled` of XDG_CACHE_HOME
    (`~/.cache`), or of the temporary folder where that is on a network file system. What was not
    used for 30 days goes, and beyond `max_bytes` what was used longest ago. Call it before the
    first computation; `initialize()` does in a job of several processes. Does not block.

    Returns the folder. None: HOLDFAST_COMPILE_CACHE is "off"; JAX_COMPILATION_CACHE_DIR or jax's
    option of that name is set, and stays; or there can be no such folder, and a warning says why.
    Never raises.
    """
    environment = dict(os.environ)
    if folder is not None:
        environment[COMPILE_CACHE] = str(folder)
    config: Any = jax.config  # jax does not type it
    try:
        path = folder_of(environment)
        if path is None or not _may_set(config.jax_compilation_cache_dir, path):
            return None
        make_private(path)
    except (OSError, CoordinationError) as error:
        _log.warning("%s", why_off(error))
        show_to_jax(None)
        return None
    show_to_jax(path)
    for variable, value in _KEEP_ALL.items():
        if variable not in os.environ:
            config.update(variable.lower(), int(value))
    _tend_beside(path, max_bytes)
    return path


def _may_set(current: str | None, path: Path) -> bool:
    """Says whether jax's folder is nobody's, or is this one, or a view of it."""
    return current is None or path in (Path(current), Path(current).parent)


def show_to_jax(path: Path | None, *, is_view: bool = False) -> None:
    """Has jax look for entries in a folder, and write them there, from now on; None for nowhere.

    Beside a view XLA keeps no results of its autotuner: they would go with the view, and before
    jax 0.12 the path of theirs is a part of every key.
    """
    config: Any = jax.config  # jax does not type it
    if is_view and _XLA_CACHES not in os.environ:
        config.update(_XLA_CACHES.lower(), "none")
    folder = None if path is None else str(path)
    if config.jax_compilation_cache_dir != folder:
        config.update("jax_compilation_cache_dir", folder)
        compilation_cache.reset_cache()  # it keeps the folder that it first looked into


def keeping_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables by which processes of this host keep what they compile, for programs
    that do not call `keep_compiled`; none where `environment` says where, or "off".

    Raises OSError, CoordinationError where there can be no folder.
    """
    path = None if JAX_FOLDER in environment else folder_of(environment)
    if path is None:
        return {}
    make_private(path)
    missing = {key: value for key, value in _KEEP_ALL.items() if key not in environment}
    return {JAX_FOLDER: str(path)} | missing


def why_off(error: Exception) -> str:
    """Returns the sentence for what `keeping_variables` has raised."""
    where = getattr(error, "filename", None)
    why = f"{where}: {getattr(error, 'strerror', None)}" if where else str(error)
    return (
        f"what jax compiles is not kept, and each start compiles anew: {why}; remove it, or name"
        f" another folder in {COMPILE_CACHE}"
    )


def folder_of(environment: Mapping[str, str]) -> Path | None:
    """Returns where entries lie, None for nowhere. Makes nothing. Raises CoordinationError."""
    named = environment.get(COMPILE_CACHE, "")
    if named == OFF:
        return None
    cache = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if named:
        root = Path(os.path.expanduser(named)).absolute()
    elif os.path.isabs(cache) and not _is_on_network(Path(cache)):
        root = Path(cache, "holdfast", "compiled")
    else:
        root = user_folder().parent / "compiled"  # which outlives a start of this machine
    return root / f"jaxlib-{jaxlib_version}-{_processor()}"


def _is_on_network(folder: Path) -> bool:
    kind = mount_of(folder).kind
    return kind in _NETWORK or kind.startswith("fuse.")


@functools.cache
def _processor() -> str:
    """Returns a digest of what code for this host's processor may be made of."""
    found = [platform.machine(), platform.processor()]
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if not line.strip():  # the others are of the same kind
                break
            if line.partition(":")[0].strip() in _PROCESSOR:
                found.append(line)
    return hashlib.sha256("".join(found).encode()).hexdigest()[:16]


def make_private(path: Path) -> None:
    """Makes a folder that only this user enters. Raises OSError: another user's, a link, no folder,
    on a full disk, or with a name that jax cannot take.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        # All by the descriptor, so that nobody can put another folder in between.
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            owner = os.fstat(descriptor).st_uid
            if owner != os.geteuid():
                raise PermissionError(None, f"a folder of user {owner}, expected one of this user")
            os.fchmod(descriptor, 0o700)
            room = os.fstatvfs(descriptor)
        finally:
            os.close(descriptor)
        free_bytes = room.f_bavail * room.f_frsize
        if free_bytes < LEAST_FREE_BYTES:
            raise OSError(None, f"the disk is full, {free_bytes:,} bytes are free")
        if on_the_wire(str(path)) != str(path):
            raise OSError(None, "jax takes no path with such characters")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


@functools.cache
def _tend_beside(folder: Path, max_bytes: int) -> None:
    start_daemon("compiled", tend, folder, max_bytes)


def tend(folder: Path, max_bytes: int = MAX_BYTES) -> None:
    """Removes what is too old, too much or torn, unless another process does so now."""
    with contextlib.suppress(OSError), _locked(folder):
        _trim(folder.parent, max_bytes)
        seal(folder)
        for view in folder.glob(f"{VIEW}*"):
            _end_left(view, folder)


def _end_left(view: Path, folder: Path) -> None:
    """Moves over what a process that was killed has left in its view."""
    with contextlib.suppress(OSError):
        is_new = time.time() - view.lstat().st_mtime < TORN_AFTER_S  # its process may yet lock it
        if not is_new:
            with _locked(view):
                merge(view, folder)
                shutil.rmtree(view)


def last_used(status: os.stat_result) -> float:
    """Returns when an entry was used: as a time of the writing, where no time of use is kept."""
    return max(status.st_atime, status.st_mtime)


def _trim(root: Path, max_bytes: int) -> None:
    found = []
    for pattern in (ENTRIES, _AUTOTUNED):
        for path in root.glob(f"jaxlib-*/{pattern}"):
            with contextlib.suppress(OSError):
                status = path.lstat()
                found.append((last_used(status), status.st_size, path))
    kept_bytes = 0
    for used_s, size, path in sorted(found, reverse=True):
        kept_bytes += size
        if kept_bytes > max_bytes or time.time() - used_s > UNUSED_S:
            with contextlib.suppress(OSError):
                path.unlink()


@dataclass(frozen=True)
class Entry:
    """A compiled program as it lies in a folder."""

    name: str
    size: int
    digest: str

    def line(self) -> str:
        """Returns it as a line of the index."""
        return f"{self.digest} {self.size} {self.name}\n"


def sealed(folder: Path) -> dict[str, Entry]:
    """Returns the entries that are there and were found whole, by name."""
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for line in (folder / INDEX).read_text().splitlines():
            # A process that was killed, or a full disk, leaves a part of a line.
            with contextlib.suppress(FileNotFoundError, ValueError):
                digest, size, name = line.split(" ", 2)
                if (folder / name).lstat().st_size == int(size):
                    found[name] = Entry(name, int(size), digest)
    return found


def seal(folder: Path) -> list[Entry]:
    """Returns the entries that are new and whole, and notes them in the index. Raises OSError.

    A process that is killed while it writes leaves a part, which jax never writes again: it goes.
    """
    known = sealed(folder)
    found = []
    for path in folder.glob(ENTRIES):
        if path.name in known:
            continue
        with contextlib.suppress(FileNotFoundError):
            entry = _whole(path)
            if entry is not None:
                found.append(entry)
            elif time.time() - path.lstat().st_mtime > TORN_AFTER_S:
                _log.warning("%s is torn, and is removed", path)
                path.unlink()
    note_sealed(folder, found)
    return found


def merge(view: Path, folder: Path) -> list[Entry]:
    """Moves what is new and whole in a view to the folder of the host, and returns that."""
    new = []
    for entry in seal(view):
        with contextlib.suppress(FileExistsError):
            os.link(view / entry.name, folder / entry.name)
            new.append(entry)
    note_sealed(folder, new)
    return new


def note_sealed(folder: Path, entries: Iterable[Entry]) -> None:
    """Adds to the index of a folder."""
    text = "".join(entry.line() for entry in entries)
    if text:
        descriptor = os.open(
            folder / INDEX, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600
        )
        with os.fdopen(descriptor, "w") as file:
            file.write(text)


def _whole(path: Path) -> Entry | None:
    """Returns what an entry is; None where it is a part of one, or none of jax's."""
    digest = hashlib.sha256()
    size = 0
    try:
        with path.open("rb") as file:
            stream = _decompressor(file.read(len(_ZSTD)))
            file.seek(0)
            while piece := file.read(PIECE_BYTES):
                if not stream.eof:
                    stream.decompress(piece)
                digest.update(piece)
                size += len(piece)
    except FileNotFoundError:
        raise
    except Exception as error:  # of whichever library
        _log.debug("%s: %s", path, error)
        return None
    return Entry(path.name, size, digest.hexdigest()) if stream.eof else None


def _decompressor(head: bytes) -> Any:
    """Returns one for a stream that begins so: jax compresses by zstd where that is installed."""
    if head != _ZSTD:
        return zlib.decompressobj()
    try:
        return importlib.import_module("compression.zstd").ZstdDecompressor()
    except ImportError:
        return importlib.import_module("zstandard").ZstdDecompressor().decompressobj()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
