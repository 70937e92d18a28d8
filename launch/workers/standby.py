"""Interpreters that have imported what the next attempt needs, and wait to become its processes."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import signal
import socket
import sys
import threading
import zipfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..supervisor.job import how_ended
from .process import STANDBY, WorkerProcess

PRELOAD = ("jax", "holdfast.multihost", "holdfast.checkpoint")
_LATE = ("HOLDFAST_", "MEGASCALE_", "JAX_COORDINATOR_")  # all else may be read by what is imported
_LINES = 100  # of what a waiting one prints
_KILLED_END_S = 10.0  # for one that got SIGKILL


def why_cold(command: Sequence[str], env: Mapping[str, str], cwd: str | Path | None) -> str:
    """Returns why processes of this command cannot be prepared, "" where they can."""
    # A TPU is one process's alone, and libtpu may take it when it is imported.
    if glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*"):
        return "this is a TPU host, where that is untested"
    rest = list(command[1:])
    if rest[:1] == ["-u"]:
        del rest[0]
    if not _is_this_interpreter(command[0], env, cwd):
        return f"{command[0]} is another interpreter than {sys.executable}"
    if len(rest) > 1 and rest[0] == "-m":
        return ""
    script = Path(cwd or ".") / rest[0] if rest else Path()
    if not script.is_file() or script.suffix == ".pyc" or zipfile.is_zipfile(script):
        return "the command is neither `python [-u] SCRIPT` nor `python [-u] -m MODULE`"
    return ""


def _is_this_interpreter(name: str, env: Mapping[str, str], cwd: str | Path | None) -> bool:
    if os.sep in name:
        path: str | None = os.path.join(cwd or ".", name)
    else:
        path = shutil.which(name, path=env.get("PATH"))
    if path is None or not os.path.exists(path):
        return False
    # The python of a virtual environment is a link: two environments share the file it leads to,
    # and differ in the folder.
    folder = os.path.realpath(os.path.dirname(path))
    ours = os.path.realpath(os.path.dirname(sys.executable))
    return folder == ours and os.path.samefile(path, sys.executable)


@dataclass(frozen=True, kw_only=True)
class StandbySettings:
    """Interpreters that wait to become the processes of the next attempt. They have imported jax,
    holdfast, `preload`, and the installed modules with which the script begins.

    Raises ValueError for names in `preload` that no module can have.
    """

    wanted: bool | None = None  # None: where restarts are allowed
    preload: Sequence[str] = ()  # modules

    def __post_init__(self) -> None:
        for name in self.preload:
            if not all(part.isidentifier() for part in name.split(".")):
                raise ValueError(
                    f"preload {name!r}: expected the name of a module, such as flax.linen"
                )


def standbys_of(
    command: Sequence[str],
    env: Mapping[str, str],
    settings: StandbySettings,
    *,
    cwd: str | Path | None,
    restarts: bool,
    say: Callable[[str], None],
) -> Standbys:
    """Returns the standbys of a job, `NO_STANDBYS` where it is to have none.

    Where standbys were asked for and cannot be had, `say` gets the reason.
    """
    if not (restarts if settings.wanted is None else settings.wanted):
        return NO_STANDBYS
    if why := why_cold(command, env, cwd):
        if settings.wanted:
            say(f"no standbys, each attempt starts cold: {why}")
        return NO_STANDBYS
    return Standbys(command, cwd=cwd, preload=settings.preload, say=say)


class _Callbacks(NamedTuple):
    """What gets the lines and the end of a standby that has become a process."""

    on_line: Callable[[str], None]
    on_exit: Callable[[int], None]


class Standby:
    """One waiting interpreter. `say` gets a line when it ends before it was taken.

    The calling thread must outlive it.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        process: int,
        *,
        cwd: str | Path | None,
        preload: Sequence[str],
        say: Callable[[str], None],
    ) -> None:
        self._env = dict(env)
        self._process = process
        self._say = say
        # `take` runs on the loop's thread, `_on_line` and `_on_exit` on those of the worker.
        self._lock = threading.Lock()
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._taken: _Callbacks | None = None
        self._ended = False
        self._closed = False
        self._said: dict[str, str] = {}
        self._socket, theirs = socket.socketpair()
        with theirs:
            interpreter = command[: 2 if command[1] == "-u" else 1]
            shim = [str(STANDBY), str(theirs.fileno()), ",".join(preload)]
            try:
                self._worker = WorkerProcess(
                    [*interpreter, *shim, *command],
                    env,
                    cwd=cwd,
                    on_line=self._on_line,
                    on_exit=self._on_exit,
                    pass_fds=(theirs.fileno(),),
                )
            except BaseException:
                self._socket.close()
                raise

    def fits(self, env: Mapping[str, str]) -> bool:
        """Returns whether it can become a process with `env`, now or when it is ready."""
        return self.said("failed") is None and not self._ended and not self._early(env)

    def _changed(self, env: Mapping[str, str]) -> list[str]:
        return [key for key in self._env.keys() | env if self._env.get(key) != env.get(key)]

    def _early(self, env: Mapping[str, str]) -> list[str]:
        """Returns what differs from its own environment, and may have been read already."""
        return sorted(key for key in self._changed(env) if not key.startswith(_LATE))

    @property
    def imports(self) -> bool:
        """Whether it is on its way to be ready."""
        return self.said("ready") is None and not self._ended and self._taken is None

    def said(self, kind: str) -> str | None:
        """Returns what it has said of "ready", "failed" or "cold"; None where nothing."""
        with self._lock:
            with contextlib.suppress(OSError):
                for line in self._socket.recv(1 << 16, socket.MSG_DONTWAIT).splitlines():
                    self._said |= json.loads(line)
            return self._said.get(kind)

    def take(
        self, env: Mapping[str, str], on_line: Callable[[str], None], on_exit: Callable[[int], None]
    ) -> WorkerProcess | None:
        """Has it become the program, with `env`, as soon as it has imported all.

        Returns None where it cannot, and `say` gets the reason. Its own end was said before.
        """
        changed = self._changed(env)
        early = self._early(env)
        failed = self.said("failed") is not None
        with self._lock:
            # It may end between any two lines here. From `_taken` on, its end is the program's.
            if self._ended or failed:
                return None
            if early:
                why = f"its standby has another {', '.join(early)}"
                self._say(f"process {self._process} starts cold: {why}")
                return None
            self._taken = _Callbacks(on_line, on_exit)
        for line in self._lines:
            on_line(line)
        changes = {
            "set": {key: env[key] for key in changed if key in env},
            "unset": [key for key in changed if key not in env],
        }
        # One that has died since is reported as the process that it was to be.
        with contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(changes).encode() + b"\n")
        return self._worker

    def _on_line(self, text: str) -> None:
        with self._lock:
            if self._taken is None:
                self._lines.append(text)
                return
        # Outside the lock: the output may block, and `take` must not wait for it.
        self._taken.on_line(text)

    def _on_exit(self, code: int) -> None:
        # What it said last is in the socket still.
        failed = self.said("failed")
        with self._lock:
            self._ended = True
            taken = self._taken
            closed = self._closed
        if taken is not None:
            taken.on_exit(code)
        elif not closed:
            process = f"process {self._process}, which will start cold"
            self._say(f"no standby for {process}: {failed or f'it {how_ended(code)}'}")

    def signal(self, number: int) -> None:
        """Sends a signal to it."""
        self._worker.signal(number)

    def kill(self) -> None:
        """Ends it, where it was not taken, without waiting."""
        with self._lock:
            self._closed = True
            if self._taken is None:
                self._worker.kill()

    def close(self) -> None:
        """Ends it, where it was not taken, and waits for that."""
        self.kill()
        if self._taken is None:
            self._worker.wait(_KILLED_END_S)
        self._socket.close()


class Standbys:
    """The standbys of a job: one for each process, of which any may become another's that it fits.

    All calls are on one thread, which outlives the standbys: the kernel ends them with it.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: str | Path | None,
        preload: Sequence[str],
        say: Callable[[str], None],
        useless: bool = False,
    ) -> None:
        self._command = list(command)
        self._cwd = cwd
        self._say = say
        self._preload = [*PRELOAD, *preload]
        self._waiting: dict[int, Standby] = {}
        self._taken: list[Standby] = []
        self._held: list[Standby] = []
        self._wanted: dict[int, Mapping[str, str]] = {}
        self._at_once = 0  # may import
        self._useless = useless  # none is started

    def warm(self, environments: Mapping[int, Mapping[str, str]], *, in_turn: bool = False) -> None:
        """Starts one for each process that has none, with the environment of the process.

        Where the next attempt needs but one of them they import `in_turn`, one for two cores of
        this machine: so the first is ready soon. `warm_next` starts the others. None is started
        after one has failed in a way that the next would too, or could not be started.
        """
        reasons = [each.said(kind) for each in self._taken for kind in ("cold", "failed")]
        reason = next(filter(None, reasons), None)
        if reason is not None and not self._useless:
            self._give_up(reason)
        self._close_taken()
        if self._useless:
            return
        self._wanted = {
            process: environments[process]
            for process in sorted(environments.keys() - self._waiting.keys())
        }
        self._at_once = max(1, (os.cpu_count() or 1) // 2) if in_turn else len(environments)
        self.warm_next()

    def _give_up(self, reason: object) -> None:
        self._useless = True
        self._wanted.clear()
        self._say(f"no standbys from here on: {reason}")

    @property
    def imports(self) -> bool:
        """Whether one of them is on its way to be ready."""
        return any(each.imports for each in self._waiting.values())

    def hold(self) -> None:
        """Stops those that import, which others need the cores for, until `warm_next`. One that is
        taken goes on.
        """
        for each in self._waiting.values():
            if each.imports and each not in self._held:
                each.signal(signal.SIGSTOP)
                self._held.append(each)

    def warm_next(self) -> bool:
        """Has those that were held go on, and starts those that may import now.

        Returns whether more are to come.
        """
        for each in self._held:
            each.signal(signal.SIGCONT)
        self._held.clear()
        importing = sum(each.imports for each in self._waiting.values())
        for process in list(self._wanted)[: max(0, self._at_once - importing)]:
            env = self._wanted.pop(process)
            try:
                self._waiting[process] = Standby(
                    self._command, env, process, cwd=self._cwd, preload=self._preload, say=self._say
                )
            except (OSError, RuntimeError) as error:  # no process, file or thread more
                self._give_up(error)
                break
        return bool(self._wanted)

    def take(
        self,
        process: int,
        env: Mapping[str, str],
        on_line: Callable[[str], None],
        on_exit: Callable[[int], None],
    ) -> WorkerProcess | None:
        """Returns a standby as that process: its own, or another's where that one is further.

        Returns None where none is there, or of use.
        """
        chosen = self._choose(process, env)
        if chosen is None:
            if process in self._wanted:
                self._say(f"process {process} starts cold: its standby has not begun")
            return None
        standby = self._waiting.pop(chosen)
        self._taken.append(standby)
        if standby in self._held:
            self._held.remove(standby)
            standby.signal(signal.SIGCONT)
        worker = standby.take(env, on_line, on_exit)
        if worker is None:
            standby.close()
        return worker

    def _choose(self, process: int, env: Mapping[str, str]) -> int | None:
        """Returns whose standby is to become a process, None where there is none at all."""
        fitting = [other for other, each in self._waiting.items() if each.fits(env)]
        if not fitting:
            return process if process in self._waiting else None
        ready = [other for other in fitting if not self._waiting[other].imports]
        if process in ready:
            return process
        return (ready or fitting)[0]  # the first has begun first

    def close(self) -> None:
        """Ends all that wait."""
        self._wanted.clear()
        self._held.clear()
        self._taken += self._waiting.values()
        self._waiting.clear()
        self._close_taken()

    def _close_taken(self) -> None:
        # Killed first, all of them: they end beside each other.
        for each in self._taken:
            each.kill()
        for each in self._taken:
            each.close()
        self._taken.clear()


NO_STANDBYS = Standbys((), cwd=None, preload=(), say=lambda line: None, useless=True)
