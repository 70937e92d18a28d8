"""Starts real processes for tests: each test of several processes runs several processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self


def free_port() -> int:
    """Returns a port of loopback that nobody listens at now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@dataclass(frozen=True)
class Finished:
    """One ended process: its exit code (negative: the signal) and all that it printed, stderr
    included.
    """

    code: int
    output: str


class Processes:
    """Runs `count` copies of a Python script, each with its own environment, and ends whatever is
    left on exit.

    The script is a file, or source text (dedented). `argv[1]` is the process's index, `argv[2]` the
    count, `argv[3:]` are `arguments`. `env_of(index)` adds variables for one process. jax sees the
    CPU with `devices` devices.
    """

    def __init__(
        self,
        script: str | Path,
        count: int,
        *,
        arguments: Sequence[object] = (),
        env: Mapping[str, str] | None = None,
        env_of: Callable[[int], Mapping[str, str]] | None = None,
        devices: int = 1,
        python: str = sys.executable,
        cwd: str | Path | None = None,
    ) -> None:
        self._scratch = tempfile.TemporaryDirectory()
        path = script if isinstance(script, Path) else Path(self._scratch.name) / "script.py"
        if isinstance(script, str):
            path.write_text(textwrap.dedent(script))
        base = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("HOLDFAST_", "MEGASCALE_", "JAX_"))
            or key.startswith(("HOLDFAST_TESTS_", "HOLDFAST_COMPILE_CACHE"))
        }
        base |= {
            "JAX_PLATFORMS": "cpu",
            # What a test compiles runs a few times at most.
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"
            " --xla_backend_optimization_level=0",
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
        }
        base |= dict(env or {})
        self._output: list[list[str]] = [[] for _ in range(count)]
        self._changed = threading.Condition()
        self.popens = [
            subprocess.Popen(
                [python, str(path), str(index), str(count), *map(str, arguments)],
                env=base | dict(env_of(index) if env_of else {}),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                errors="replace",
                cwd=cwd,
                process_group=0,
            )
            for index in range(count)
        ]
        self._readers = [
            threading.Thread(target=self._read, args=(index,), daemon=True)
            for index in range(count)
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, index: int) -> None:
        stream = self.popens[index].stdout
        assert stream is not None
        for line in stream:
            with self._changed:
                self._output[index].append(line)
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def output(self, index: int) -> str:
        """Returns what process `index` has printed so far."""
        with self._changed:
            return "".join(self._output[index])

    def wait_for(self, index: int, text: str, timeout_s: float = 60) -> None:
        """Waits until process `index` has printed `text`; fails with its output when it ends or the
        time is over.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while text not in "".join(self._output[index]):
                ended = (
                    self.popens[index].poll() is not None and not self._readers[index].is_alive()
                )
                if ended or (
                    not self._changed.wait(min(0.2, max(0.0, deadline - time.monotonic())))
                    and time.monotonic() > deadline
                ):
                    raise AssertionError(
                        f"process {index} never printed {text!r}; it"
                        f" printed:\n{''.join(self._output[index])}"
                    )

    def kill(self, index: int, number: int = signal.SIGKILL) -> None:
        """Sends a signal to process `index`."""
        self.popens[index].send_signal(number)

    def ended(self, index: int, within_s: float) -> bool:
        """Returns whether process `index` ends within so many seconds."""
        try:
            self.popens[index].wait(within_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def wait(self, timeout_s: float = 90) -> list[Finished]:
        """Waits until all have ended; on time-out, ends them with a stack dump and fails with all
        output.
        """
        deadline = time.monotonic() + timeout_s
        try:
            for popen in self.popens:
                popen.wait(max(0.01, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            for popen in self.popens:
                if popen.poll() is None:
                    popen.send_signal(signal.SIGABRT)  # faulthandler prints every thread's stack
            self._join()
            raise AssertionError(
                "\n".join(f"--- process {i}:\n{self.output(i)}" for i in range(len(self.popens)))
            ) from None
        self._join()
        return [
            Finished(popen.returncode, self.output(index))
            for index, popen in enumerate(self.popens)
        ]

    def _join(self) -> None:
        for reader in self._readers:
            reader.join(5)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for popen in self.popens:
            if popen.poll() is None:
                popen.kill()
            popen.wait()
        self._join()
        for popen, reader in zip(self.popens, self._readers, strict=True):
            if reader.is_alive():  # a child of it has its output still, and may never end
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(popen.pid, signal.SIGKILL)
        self._join()
        for popen in self.popens:
            assert popen.stdout is not None
            popen.stdout.close()
        self._scratch.cleanup()


def run_processes(
    script: str | Path,
    count: int,
    *,
    timeout_s: float = 90,
    codes: Sequence[int] | None = None,
    **options: object,
) -> list[str]:
    """Runs `count` processes to their end, asserts their exit codes (default: all 0) and returns
    their outputs.
    """
    with Processes(script, count, **options) as processes:  # type: ignore[arg-type]
        finished = processes.wait(timeout_s)
    expected = list(codes) if codes is not None else [0] * count
    report = "\n".join(
        f"--- process {i} (exit {f.code}):\n{f.output}" for i, f in enumerate(finished)
    )
    assert [f.code for f in finished] == expected, report
    return [f.output for f in finished]


class CollectedOutput:
    """Collects what an engine prints: the lines of the processes, and the launcher's own."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str]] = []
        self.said: list[str] = []

    @property
    def text(self) -> str:
        """All of it as one text, the launcher's lines last."""
        return "\n".join([*(f"[{process}] {line}" for process, line in self.lines), *self.said])

    def line(self, process: int, text: str) -> None:
        self.lines.append((process, text))

    def say(self, text: str) -> None:
        self.said.append(text)
