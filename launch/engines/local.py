"""The engine of this machine: a coordinator and the processes beside it, and nothing left of either afterwards."""

from __future__ import annotations

import os
import queue
import signal
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from holdfast.multihost import ProcessSpec

from ..supervisor.engine import JobResult, supervise
from ..supervisor.job import (
    Action,
    Capacity,
    Event,
    Exited,
    Job,
    Kill,
    Launch,
    Notify,
    Release,
    Reserve,
    Reserved,
    RestartPolicy,
    Stop,
    Terminate,
)
from ..view import LiveView, reporter
from ..workers.coordinator import Coordinator, ProcessProgress, ProgressWatch
from ..workers.environment import worker_env
from ..workers.output import ConsoleOutput, Output
from ..workers.process import Child, Guard
from ..workers.signals import passing_on

_LOOK_S = 0.5  # between two looks at the capacity file


class LocalEngine:
    """Runs a job's processes as children of this one. Everything but `forward` belongs to the thread that made it."""

    def __init__(
        self,
        command: Sequence[str],
        job_id: str,
        *,
        env: Mapping[str, str],
        cwd: str | Path | None = None,
        output: Output,
        grace_s: float = 5.0,
        capacity_file: Path | None = None,
    ) -> None:
        self._command, self._job_id, self._env, self._cwd = list(command), job_id, env, cwd
        self._output, self._grace_s, self._capacity_file = output, grace_s, capacity_file
        self._guard = Guard()
        self._queue: queue.SimpleQueue[Event | int] = queue.SimpleQueue()
        self._children: dict[int, Child] = {}
        self._coordinator: Coordinator | None = None
        self._watch: ProgressWatch | None = None
        self._reserve: Reserve | None = None
        self._signals = 0
        self._room: int | None = None
        self._look_at = 0.0

    # ---- Actions

    def carry_out(self, action: Action) -> None:
        if isinstance(action, Reserve):
            self._reserve = action
        elif isinstance(action, Launch):
            self._launch(action.attempt, action.count)
        elif isinstance(action, Notify):
            self._signal(signal.SIGINT if action.why == "SIGINT" else signal.SIGTERM)
        elif isinstance(action, Terminate):
            self._signal(signal.SIGTERM)
        elif isinstance(action, Kill):
            self._kill()
        elif isinstance(action, Release):
            self._release()

    def _launch(self, attempt: int, count: int) -> None:
        self._coordinator = Coordinator(self._job_id, attempt, count)
        self._guard.add(self._coordinator.pid)
        address = self._coordinator.address
        self._watch = ProgressWatch(address, attempt, self._queue.put)
        for process in range(count):
            spec = ProcessSpec(job_id=self._job_id, attempt=attempt, process_id=process, num_processes=count, coordinator=address)
            env, lines = worker_env(self._env, spec)
            for line in lines if process == 0 else ():
                self._output.say(line)
            self._children[process] = self._start(attempt, process, env)

    def _start(self, attempt: int, process: int, env: Mapping[str, str]) -> Child:
        return Child(
            self._command,
            env,
            self._guard,
            cwd=self._cwd,
            on_line=lambda text: self._output.line(process, text),
            on_exit=lambda code: self._exited(Exited(attempt, process, code)),
        )

    def _exited(self, event: Exited) -> None:
        watch = self._watch
        if watch is not None:  # what was reached before the end counts
            watch.refresh()
        self._queue.put(event)

    def _signal(self, number: int) -> None:
        for child in self._children.values():
            child.signal(number)

    def _kill(self) -> None:
        for child in self._children.values():
            child.kill()

    def _release(self) -> None:
        if not any(child.alive for child in self._children.values()):
            self._children.clear()
            watch, self._watch = self._watch, None
            if watch is not None:
                watch.close()
            if self._coordinator is not None:
                self._coordinator.close()
                self._guard.discard(self._coordinator.pid)
                self._coordinator = None

    # ---- Events

    def progress(self) -> tuple[ProcessProgress, ...]:
        """Returns what the processes of this attempt last reported."""
        watch = self._watch
        return watch.processes if watch is not None else ()

    def forward(self, number: int) -> None:
        """Takes a signal of the launcher: the first asks the job to stop, the second repeats SIGTERM, the third kills. Signal-safe."""
        self._queue.put(number)

    def events(self, timeout_s: float | None) -> Sequence[Event]:
        """Returns news, at the latest after `timeout_s`; looks at the capacity file, where one is given, twice a second."""
        if found := self._room_events():
            return found
        if self._capacity_file is not None:
            timeout_s = _LOOK_S if timeout_s is None else min(_LOOK_S, timeout_s)
        try:
            news = self._queue.get(timeout=timeout_s) if timeout_s != 0 else self._queue.get_nowait()
        except queue.Empty:
            return []
        return self._on_signal(news) if isinstance(news, int) else [news]

    def _room_events(self) -> list[Event]:
        if self._reserve is None and time.monotonic() < self._look_at:
            return []
        room, self._look_at = self._read_room(), time.monotonic() + _LOOK_S
        if self._reserve is not None and (room is None or room >= self._reserve.least):
            reserve, self._reserve = self._reserve, None
            return [Reserved(reserve.attempt, reserve.most if room is None else min(room, reserve.most))]
        if room is not None and self._children and self._reserve is None:
            return [Capacity(room)]
        return []

    def _read_room(self) -> int | None:
        if self._capacity_file is None:
            return None
        try:
            self._room = int(self._capacity_file.read_text())
        except FileNotFoundError:
            self._room = None
        except ValueError:  # being written
            pass
        return self._room

    def _on_signal(self, number: int) -> list[Event]:
        self._signals += 1
        if self._signals == 1:
            return [Stop(signal.Signals(number).name)]
        if self._signals == 2:
            self._signal(signal.SIGTERM)
        else:
            self._kill()
        return []

    def close(self) -> None:
        """Ends whatever is left: what was already asked to end has `grace_s` seconds, then SIGKILL."""
        deadline = time.monotonic() + self._grace_s
        for child in self._children.values():
            child.wait(max(0.0, deadline - time.monotonic()))
        self._kill()
        for child in self._children.values():
            child.wait(10)
        self._release()
        self._guard.close()


def run_local(
    command: Sequence[str],
    num_processes: int,
    *,
    min_processes: int | None = None,
    policy: RestartPolicy | None = None,
    job_id: str | None = None,
    first_attempt: int = 1,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    output: Output | None = None,
    capacity_file: str | Path | None = None,
) -> JobResult:
    """Runs `command` as `num_processes` processes on this machine, under a coordinator of their own, to the end of the job.

    Blocks. Restarts the group as `policy` says (default: never); `env` (default: this process's) is what the processes get, with
    their ProcessSpec. `capacity_file` holds how many processes there is room for now: the job shrinks (to `min_processes` at least)
    and grows with it. `job_id` defaults to a new one. In the main thread, SIGTERM, SIGINT and SIGHUP are passed on: the processes save and
    leave, and the job ends as "preempted". However this process ends, none of the job's is left. Raises ValueError for counts
    that do not fit.
    """
    if not command:
        raise ValueError("no command to run")
    policy = policy or RestartPolicy()
    job_id = job_id or f"local-{uuid.uuid4().hex[:12]}"
    job = Job(job_id, min_processes or num_processes, num_processes, policy, attempt=first_attempt - 1)
    output = output or ConsoleOutput(sys.stdout, sys.stderr, num_processes)
    engine = LocalEngine(
        command,
        job_id,
        env=os.environ if env is None else env,
        cwd=cwd,
        output=output,
        grace_s=policy.grace_s,
        capacity_file=Path(capacity_file) if capacity_file else None,
    )
    report = reporter(output, first_attempt=first_attempt)
    if isinstance(output, LiveView):
        output.progress = engine.progress
    with passing_on(engine.forward):
        return supervise(job, engine, on_decision=report)
