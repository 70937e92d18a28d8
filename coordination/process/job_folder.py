"""The folder of a coordinator that a launcher of this machine started: its socket, its address and
its secrets, for its own user alone.

All of a user's lie in one folder of mode 0700, so that `holdfast status` finds them without an
address.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import math
import os
import shlex
import shutil
import stat
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from ..address import connect
from ..credentials import Credentials
from ..diagnosis.verdict import BY_LAUNCHER
from ..errors import CoordinationError
from ..mounts import birth_of, boot_id

_LONGEST_BASE = 51  # bytes: a socket's path has at most 107
_CONNECT_TIMEOUT_S = 2.0
_LAUNCHED = "launched-"  # begins the names of files of launchers
_ENDED_KEPT_S = 3600.0
_UNPUBLISHED_S = 3600.0  # after which a folder without a job is nobody's
_CREDENTIAL_FILES = {
    "token_file": "token",
    "tls_cert": "client.crt",
    "tls_key": "client.key",
    "tls_ca": "ca.crt",
}


def _own_command() -> str:
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def working_folder() -> str:
    """Returns this process's working folder, "" where it was deleted."""
    try:
        return os.getcwd()
    except OSError:
        return ""


@dataclass(frozen=True)
class RunningJob:
    """A job whose coordinator was started on this machine: its address, and the number of its
    process here, which `born` tells from a later one of that number.

    `command` and `folder` are its launcher's, `unix_s` is when this attempt began: of who makes
    this value, unless they are given. A coordinator that is `waiting` is for an attempt to come.
    """

    job_id: str
    attempt: int
    address: str
    pid: int
    command: str = field(default_factory=_own_command)
    folder: str = field(default_factory=working_folder)
    unix_s: float = field(default_factory=time.time)
    waiting: bool = False
    born: str = field(default="", compare=False)

    @property
    def runs(self) -> bool:
        """Whether the coordinator is there: its process, or whoever listens at its address.

        In another PID namespace its process has another number. An unclear answer is a yes.
        """
        try:
            if not _lives(self):
                connect(self.address, _CONNECT_TIMEOUT_S).close()
        except (ConnectionRefusedError, FileNotFoundError, ValueError):
            return False
        except OSError:
            pass
        return True


@dataclass(frozen=True)
class JobFolder:
    """A folder of one coordinator. A value; the files are written by who made it."""

    path: Path

    @classmethod
    def create(cls) -> Self:
        """Makes a new folder, and removes those of the dead. Raises CoordinationError, saying where
        and why, where there can be none.
        """
        parent = user_folder(create=True)
        for folder in job_folders():
            if folder.is_left():
                folder.remove()
        try:
            return cls(Path(tempfile.mkdtemp(prefix="job-", dir=parent)))
        except OSError as error:
            raise CoordinationError(
                f"cannot make a folder in {parent}: {error.strerror}", code="FAILED_PRECONDITION"
            ) from None

    @property
    def socket(self) -> str:
        """The address of a coordinator that listens in this folder."""
        return f"unix:{self.path}/coordinator"

    def publish(self, job: RunningJob) -> None:
        """Writes what `job` returns, from when on `holdfast status` finds it."""
        _write(self.path / "job", job)

    def job(self) -> RunningJob | None:
        """Returns what was published, None where nothing was."""
        with contextlib.suppress(OSError):
            return self._read()
        return None

    def _read(self) -> RunningJob | None:
        try:
            return RunningJob(**json.loads((self.path / "job").read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def is_left(self) -> bool:
        """Returns whether its coordinator, or who made it and never came to publish, is gone."""
        with contextlib.suppress(OSError):  # as without descriptors: nothing is known of it
            job = self._read()
            if job is not None:
                return not job.runs
            return time.time() - self.path.lstat().st_mtime > _UNPUBLISHED_S
        return False

    def credentials(self, key: str | None = None) -> Credentials:
        """Returns what a client of this user shows to the coordinator: the files that are there,
        and the key of the job's processes.
        """
        fields = {
            field: str(self.path / name)
            for field, name in _CREDENTIAL_FILES.items()
            if (self.path / name).exists()
        }
        if key is not None:
            fields["key"] = key
        return Credentials(**fields)

    def remove(self) -> None:
        """Removes the folder with all that is in it: first what says that there is a job."""
        (self.path / "job").unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)


@dataclass(frozen=True)
class LaunchedJob:
    """What a launcher of this machine says of its job: between two coordinators too, and of how it
    ended, for an hour.

    `log_dir` is where the lines of its processes are, "" where they are in no file. `launcher` has
    the fields of Launcher (proto/session.proto). `address` is that of the last coordinator, "" for
    none. The last two are None until the job has ended.
    """

    job_id: str
    pid: int
    log_dir: str
    launcher: dict[str, Any]
    address: str
    ended_unix_s: float | None = None
    exit_code: int | None = None
    command: str = field(default_factory=_own_command)
    folder: str = field(default_factory=working_folder)
    born: str = field(default="", compare=False)

    @property
    def how(self) -> str:
        """The outcome in the words of all views, with the exit code."""
        return f"{BY_LAUNCHER[self.launcher['state']].value.lower()}, exit code {self.exit_code}"

    def __str__(self) -> str:
        ago_s = max(0.0, time.time() - (self.ended_unix_s or 0.0))
        return (
            f"job {self.job_id}, attempt {self.launcher['attempt']}, ended {ago_s:.0f} s ago:"
            f" {self.how}: {self.launcher['why']}"
        )

    def leave(self) -> None:
        """Writes it into the user's folder, and removes what does not hold there any more.

        Raises OSError, and CoordinationError where there is no such folder.
        """
        parent = user_folder(create=True)
        for left in parent.glob(f"{_LAUNCHED}*"):
            with contextlib.suppress(OSError):  # nothing is known of it
                if _read_launched(left) is None:
                    left.unlink(missing_ok=True)
        _write(parent / f"{_LAUNCHED}{digest_of(self.job_id)}-{self.pid}", self)


def _write(path: Path, job: RunningJob | LaunchedJob) -> None:
    """Writes a file of JSON, which is whole from the first look on."""
    whole = path.with_name(f".{path.name}")
    whole.write_text(json.dumps(asdict(job) | {"born": birth_of(job.pid)}))
    whole.replace(path)


def _lives(job: RunningJob | LaunchedJob) -> bool:
    if job.born:
        return job.born == birth_of(job.pid)
    try:
        os.kill(job.pid, 0)  # a system without births
    except OSError:
        return False
    return True


def digest_of(job_id: str) -> str:
    """Returns a name for a file of a job: its id may be none, or too long for a socket's path."""
    return hashlib.sha256(job_id.encode()).hexdigest()[:16]


def launched_jobs(job_id: str | None = None) -> list[LaunchedJob]:
    """Returns what this user's launchers on this machine say of their jobs, or of one: first of
    those that ended within an hour, oldest first, then of those that run.
    """
    found: list[LaunchedJob | None] = []
    with contextlib.suppress(OSError, CoordinationError):
        parent = user_folder()
        _check_owner(parent.parent)
        name = "" if job_id is None else f"{digest_of(job_id)}-"
        for path in parent.glob(f"{_LAUNCHED}{name}*"):
            with contextlib.suppress(OSError):
                found.append(_read_launched(path))
    jobs = [job for job in found if job is not None]
    return sorted(jobs, key=lambda job: job.ended_unix_s or math.inf)


def _read_launched(path: Path) -> LaunchedJob | None:
    """Returns what a file says; None where its launcher was killed, or ended long ago. Raises
    OSError where it cannot be read.
    """
    text = path.read_text()
    try:
        job = LaunchedJob(**json.loads(text))
    except (ValueError, TypeError):
        return None
    ended_s = job.ended_unix_s
    is_kept = _lives(job) if ended_s is None else time.time() - ended_s < _ENDED_KEPT_S
    return job if is_kept else None


def user_folder(*, create: bool = False) -> Path:
    """Returns the folder of this user's jobs on this machine, since it was started: in holdfast-UID
    in the temporary folder, in /tmp where that is too long. Hosts may share that folder, and what
    another host has there cannot be judged here.

    With `create` it exists on return, and nobody else can enter it. Raises CoordinationError where
    that cannot be had: it is another user's, a link, or there is no temporary folder.
    """
    try:
        own = temporary_base() / f"holdfast-{os.getuid()}"
        path = own / boot_id()[:8]
        if create:
            own.mkdir(mode=0o700, exist_ok=True)
            _check_owner(own)
            keep_from_cleaners(own)
            path.mkdir(exist_ok=True)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        message = (
            f"no temporary folder for the coordinator: {where}{error.strerror or error}; set TMPDIR"
            " to a folder that is there and writable"
        )
        raise CoordinationError(message, code="FAILED_PRECONDITION") from None
    return path


def temporary_base() -> Path:
    """Returns the temporary folder, /tmp where the path of a socket in it would be too long."""
    base = tempfile.gettempdir()
    return Path(base if len(os.fsencode(base)) <= _LONGEST_BASE else "/tmp")


@functools.cache
def keep_from_cleaners(path: Path) -> int:
    """Locks a folder for as long as this process lives, beside others of this user that do.

    Cleaners of temporary folders (systemd-tmpfiles, in tmpfiles.d(5)) pass over what is locked.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return descriptor


def _check_owner(path: Path) -> None:
    # lstat: a link that another user put here would lead secrets to a folder of theirs.
    status = path.lstat()
    is_folder = stat.S_ISDIR(status.st_mode)
    if not is_folder or status.st_uid != os.getuid():
        kind = "a folder" if is_folder else "no folder"
        what = f"expected a folder of user {os.getuid()}, found {kind} of {status.st_uid}"
        raise CoordinationError(
            f"{path}: {what}; remove it, or set TMPDIR to another folder", code="PERMISSION_DENIED"
        )
    if stat.S_IMODE(status.st_mode) != 0o700:
        path.chmod(0o700)


def job_folders() -> list[JobFolder]:
    """Returns the folders of this user's coordinators on this machine, dead ones included, oldest
    first; none where there cannot be any.
    """
    try:
        parent = user_folder()
        _check_owner(parent.parent)
        begun = {}
        for path in parent.glob("job-*"):
            with contextlib.suppress(FileNotFoundError):  # removed beside this look
                begun[path] = path.lstat().st_mtime
        return [JobFolder(path) for path in sorted(begun, key=begun.__getitem__)]
    except (OSError, CoordinationError):
        return []
