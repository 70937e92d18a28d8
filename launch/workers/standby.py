"""Interpreters that have imported what the next attempt needs, and wait to become its processes."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import socket
import sys
import threading
import zipfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .process import STANDBY, WorkerProcess

PRELOAD = ("jax", "holdfast.multihost", "holdfast.checkpoint")
_LATE = ("HOLDFAST_", "MEGASCALE_", "JAX_COORDINATOR_")  # all else may be read by what is imported
_LINES = 100  # of what a waiting one prints


def why_cold(command: Sequence[str], env: Mapping[str, str], cwd: str | Path | None) -> str:
    """Returns why processes of this command cannot be prepared, "" where they can."""
    if glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*"):
        return "this is a TPU host, where that is untested"
    rest = list(command[1:])
    rest = rest[1:] if rest[:1] == ["-u"] else rest
    if not _is_this_interpreter(command[0], env, cwd):
        return f"{command[0]} is another interpreter than {sys.executable}"
    if len(rest) > 1 and rest[0] == "-m":
        return ""
    script = Path(cwd or ".") / rest[0] if rest else Path()
    if not script.is_file() or script.suffix == ".pyc" or zipfile.is_zipfile(script):
        return "the command is neither `python [-u] SCRIPT` nor `python [-u] -m MODULE`"
    return ""


def _is_this_interpreter(name: str, env: Mapping[str, str], cwd: str | Path | None) -> bool:
    found = (
        os.path.join(cwd or ".", name)
        if os.sep in name
        else shutil.which(name, path=env.get("PATH"))
    )
    if found is None or not os.path.exists(found):
        return False
    folder, ours = (
        os.path.realpath(os.path.dirname(path)) for path in (found, sys.executable)
    )  # of a venv, whose python is a link
    return folder == ours and os.path.samefile(found, sys.executable)


@dataclass(frozen=True, kw_only=True)
class StandbySettings:
    """Interpreters that wait to become the processes of the next attempt."""

    wanted: bool | None = None  # None: where restarts are allowed
    preload: Sequence[str] = ()  # modules, imported besides jax and holdfast


def standbys_of(
    command: Sequence[str],
    env: Mapping[str, str],
    settings: StandbySettings,
    *,
    cwd: str | Path | None,
    restarts: bool,
    say: Callable[[str], None],
) -> Standbys | None:
    """Returns the standbys of a job, None where it is to have none.

    Where standbys were asked for and cannot be had, `say` gets the reason. Raises ValueError for
    names in `preload` that no module can have.
    """
    for name in settings.preload:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f"preload {name!r}: expected the name of a module, such as flax.linen")
    if not (restarts if settings.wanted is None else settings.wanted):
        return None
    if why := why_cold(command, env, cwd):
        if settings.wanted:
            say(f"no standbys, each attempt starts cold: {why}")
        return None
    return Standbys(command, cwd=cwd, preload=settings.preload, say=say)


class Standby:
    """One waiting interpreter. `say` gets a line when it ends before it was taken. The calling
    thread must outlive it.
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
        self._env, self._process, self._say = dict(env), process, say
        self._lock = threading.Lock()
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._taken: tuple[Callable[[str], None], Callable[[int], None]] | None = None
        self._ended = self._closed = False
        self._said: dict[str, str] = {}
        self._socket, theirs = socket.socketpair()
        with theirs:
            shim = [
                *command[: 2 if command[1] == "-u" else 1],
                str(STANDBY),
                str(theirs.fileno()),
                ",".join(preload),
            ]
            self._worker = WorkerProcess(
                [*shim, *command],
                env,
                cwd=cwd,
                on_line=self._on_line,
                on_exit=self._on_exit,
                pass_fds=(theirs.fileno(),),
            )

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
        """Has it become the program, with `env`. Returns None where it cannot, which is said; its
        own end was said before.
        """
        changed = [key for key in self._env.keys() | env if self._env.get(key) != env.get(key)]
        early = sorted(key for key in changed if not key.startswith(_LATE))
        why = (
            f"its standby has another {', '.join(early)}"
            if early
            else "its standby is not ready"
            if self.said("ready") is None
            else ""
        )
        with self._lock:
            if self._ended:
                return None
            if why:
                self._say(f"process {self._process} starts cold: {why}")
                return None
            self._taken = on_line, on_exit
        for line in self._lines:
            on_line(line)
        changes = {
            "set": {key: env[key] for key in changed if key in env},
            "unset": [key for key in changed if key not in env],
        }
        with contextlib.suppress(
            OSError
        ):  # it has died since, and is reported as the process that it was to be
            self._socket.sendall(json.dumps(changes).encode() + b"\n")
        return self._worker

    def _on_line(self, text: str) -> None:
        with self._lock:
            if self._taken is None:
                self._lines.append(text)
                return
        self._taken[0](text)

    def _on_exit(self, code: int) -> None:
        failed = self.said("failed")
        with self._lock:
            self._ended = True
            taken = self._taken
            closed = self._closed
        if taken is not None:
            taken[1](code)
        elif not closed:
            how = failed or (
                f"it was ended by signal {-code}" if code < 0 else f"it ended with exit code {code}"
            )
            self._say(f"no standby for process {self._process}, which will start cold: {how}")

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
            self._worker.wait(10)
        self._socket.close()


class Standbys:
    """The standbys of a job: one for each process. All calls on one thread, which outlives them."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: str | Path | None,
        preload: Sequence[str],
        say: Callable[[str], None],
    ) -> None:
        self._command, self._cwd, self._say = list(command), cwd, say
        self._preload = [*PRELOAD, *preload]
        self._waiting: dict[int, Standby] = {}
        self._taken: list[Standby] = []
        self._useless = ""

    def warm(self, environments: Mapping[int, Mapping[str, str]]) -> None:
        """Starts one for each process, with the environment that it has now; none after one has
        failed in a way that the next would too.
        """
        whys = [
            why for each in self._taken for kind in ("cold", "failed") if (why := each.said(kind))
        ]
        if whys and not self._useless:
            self._useless = whys[0]
            self._say(f"no standbys from here on: {whys[0]}")
        self._close(self._taken)
        if not self._useless:
            for process, env in environments.items():
                self._waiting[process] = Standby(
                    self._command, env, process, cwd=self._cwd, preload=self._preload, say=self._say
                )

    def take(
        self,
        process: int,
        env: Mapping[str, str],
        on_line: Callable[[str], None],
        on_exit: Callable[[int], None],
    ) -> WorkerProcess | None:
        """Returns the process's standby as that process; None where there is none, or not of
        use.
        """
        standby = self._waiting.pop(process, None)
        if standby is None:
            return None
        self._taken.append(standby)
        worker = standby.take(env, on_line, on_exit)
        if worker is None:
            standby.close()
        return worker

    def close(self) -> None:
        """Ends all that wait."""
        self._taken += self._waiting.values()
        self._waiting.clear()
        self._close(self._taken)

    def _close(self, standbys: list[Standby]) -> None:
        for each in standbys:
            each.kill()
        for each in standbys:
            each.close()
        standbys.clear()
