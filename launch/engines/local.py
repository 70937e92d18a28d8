"""The engine of this machine: a coordinator and the processes beside it, and nothing left of either
afterwards.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from holdfast.coordination.server.metrics import MetricsServer
from holdfast.multihost import ProcessSpec, StartupFailed

from ..supervisor.engine import JobResult
from ..supervisor.job import (
    Action,
    Capacity,
    CoordinatorEnded,
    Event,
    Exited,
    Job,
    Kill,
    Launch,
    Notify,
    Prepare,
    Progress,
    Release,
    Reserve,
    Reserved,
    RestartPolicy,
    Terminate,
)
from ..workers.compile_cache import compile_cache
from ..workers.coordinator import HEARTBEAT_TIMEOUT_S, Coordinator
from ..workers.environment import worker_env
from ..workers.output import ConsoleOutput, LogFiles, Output
from ..workers.process import WorkerProcess
from ..workers.standby import Standbys, standbys_of
from .base import BaseEngine, run_job

_POLL_S = 0.5  # how often the capacity file is read


class LocalEngine(BaseEngine):
    """Runs a job's processes as children of this one."""

    def __init__(
        self,
        command: Sequence[str],
        job_id: str,
        *,
        env: Mapping[str, str],
        cwd: str | Path | None = None,
        output: Output,
        policy: RestartPolicy,
        capacity_file: Path | None = None,
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
        coordinator_log: Path | None = None,
        standbys: Standbys | None = None,
    ) -> None:
        super().__init__(output, policy)
        self._command, self._job_id, self._env, self._cwd = list(command), job_id, env, cwd
        self._capacity_file = capacity_file
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._coordinator_log = coordinator_log
        self._standbys = standbys
        self._workers: dict[int, WorkerProcess] = {}
        self._environments: dict[int, Mapping[str, str]] = {}  # of the attempt that runs
        self._warmed = False  # standbys for the next one are there
        self._coordinator: Coordinator | None = None
        self._prepared: dict[
            tuple[int, int], Coordinator
        ] = {}  # at most one, for an attempt of so many processes
        self._reserve: Reserve | None = None
        self._capacity: int | None = None
        self._poll_at = 0.0

    # --- Actions

    def carry_out(self, action: Action) -> None:
        if isinstance(action, Reserve):
            self._reserve = action
        elif isinstance(action, Launch):
            self._launch(action.attempt, action.num_processes)
        elif isinstance(action, Notify):
            self._terminate(signal.SIGINT if action.why == "SIGINT" else signal.SIGTERM)
        elif isinstance(action, Terminate):
            self._terminate(processes=action.processes)
        elif isinstance(action, Kill):
            self._kill(action.processes)
        elif isinstance(action, Release):
            self._release()
        elif isinstance(action, Prepare):
            with contextlib.suppress(StartupFailed):  # which the launch will meet again, and report
                self._prepared[action.attempt, action.num_processes] = self._start_coordinator(
                    action.attempt, action.num_processes
                )

    def _start_coordinator(self, attempt: int, num_processes: int) -> Coordinator:
        return Coordinator(
            self._job_id,
            attempt,
            num_processes,
            heartbeat_timeout_s=self._heartbeat_timeout_s,
            log_file=self._coordinator_log,
        )

    def _drop_prepared(self) -> None:
        while self._prepared:
            self._prepared.popitem()[1].close()

    def _launch(self, attempt: int, num_processes: int) -> None:
        prepared = self._prepared.pop((attempt, num_processes), None)
        self._drop_prepared()
        self._coordinator = prepared or self._start_coordinator(attempt, num_processes)
        self._environments = {}
        self._warmed = False
        address = self._coordinator.address
        self._open_watch(address, attempt)
        self._coordinator.on_end(lambda code: self._on_coordinator_end(attempt, code))
        for process in range(num_processes):
            spec = ProcessSpec(
                job_id=self._job_id,
                attempt=attempt,
                process_id=process,
                num_processes=num_processes,
                coordinator=address,
                local_rank=process,
            )
            env, lines = worker_env(self._env, spec, share_of=num_processes)
            for line in lines if process == 0 else ():
                self._output.say(line)
            self._environments[process] = env
            self._workers[process] = self._start(attempt, process, env)
        if self._standbys is not None:
            self._standbys.close()

    def _on_coordinator_end(self, attempt: int, code: int) -> None:
        watch = self._watch
        if watch is not None and watch.still_needed(ended_well=code == 0):
            how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
            self._queue.put(CoordinatorEnded(attempt, f"the coordinator {how}"))

    def _start(self, attempt: int, process: int, env: Mapping[str, str]) -> WorkerProcess:
        def on_line(text: str) -> None:
            self._output.line(process, text)

        def on_exit(code: int) -> None:
            self._report_exit(Exited(attempt, process, code))

        warm = (
            None if self._standbys is None else self._standbys.take(process, env, on_line, on_exit)
        )
        return warm or WorkerProcess(
            self._command, env, cwd=self._cwd, on_line=on_line, on_exit=on_exit
        )

    def _signal(self, number: signal.Signals, processes: frozenset[int] | None) -> None:
        for process in self._workers if processes is None else processes:
            self._workers[process].signal(number)

    def _kill(self, processes: frozenset[int] | None = None) -> None:
        for process in self._workers if processes is None else processes:
            self._workers[process].kill()

    def _release(self) -> None:
        if not any(worker.alive for worker in self._workers.values()):
            self._workers.clear()
            self._close_watch()
            if self._coordinator is not None:
                self._coordinator.close()
                self._coordinator = None

    # --- Events

    def events(self, timeout_s: float | None) -> Sequence[Event]:
        """Returns what has happened, at the latest after `timeout_s`; reads the capacity file,
        where one is given, twice a second.

        After the first step of an attempt it starts the standbys: this thread outlives them.
        """
        if events := self._capacity_events():
            return events
        if self._capacity_file is not None:
            timeout_s = _POLL_S if timeout_s is None else min(_POLL_S, timeout_s)
        seen = super().events(timeout_s)
        if (
            self._standbys is not None
            and not self._warmed
            and any(isinstance(each, Progress) and each.step >= 0 for each in seen)
        ):
            self._warmed = True
            self._standbys.warm(self._environments)
        return seen

    def _capacity_events(self) -> list[Event]:
        if self._reserve is None and time.monotonic() < self._poll_at:
            return []
        capacity, self._poll_at = self._read_capacity(), time.monotonic() + _POLL_S
        if self._reserve is not None and (
            capacity is None or capacity >= self._reserve.min_processes
        ):
            reserve = self._reserve
            self._reserve = None
            most = reserve.max_processes
            return [Reserved(reserve.attempt, most if capacity is None else min(capacity, most))]
        if capacity is not None and self._workers and self._reserve is None:
            return [Capacity(capacity)]
        return []

    def _read_capacity(self) -> int | None:
        if self._capacity_file is None:
            return None
        try:
            self._capacity = int(self._capacity_file.read_text())
        except FileNotFoundError:
            self._capacity = None
        except ValueError:  # being written
            pass
        return self._capacity

    def close(self) -> None:
        """Ends whatever still runs: what was already asked to end has the policy's `grace_s`
        seconds, then SIGKILL.
        """
        deadline = time.monotonic() + self._policy.grace_s
        for worker in self._workers.values():
            worker.wait(max(0.0, deadline - time.monotonic()))
        self._kill()
        for worker in self._workers.values():
            worker.wait(10)
        self._release()
        self._drop_prepared()
        if self._standbys is not None:
            self._standbys.close()


def run_local(
    command: Sequence[str],
    num_processes: int,
    *,
    min_processes: int | None = None,
    restart: RestartPolicy | None = None,
    job_id: str | None = None,
    first_attempt: int = 1,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    output: Output | None = None,
    capacity_file: str | Path | None = None,
    heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
    log_dir: str | Path | None = None,
    standby: bool | None = None,
    preload: Sequence[str] = (),
    metrics_port: int | None = None,
    metrics_host: str = "127.0.0.1",
) -> JobResult:
    """Runs `command` as `num_processes` processes on this machine, under a coordinator of their
    own, to the end of the job.

    Blocks. Restarts the group as `restart` says (default: never); `env` (default: this process's)
    is what the processes get, with their ProcessSpec. `capacity_file` holds how many processes
    there is room for now: the job shrinks (to `min_processes` at least) and grows with it. `job_id`
    defaults to a new one. The coordinator listens at a Unix socket that only this user reaches; a
    process that is silent for `heartbeat_timeout_s` is lost. `log_dir` gets a file for each
    process, the coordinator's log, `status.json` with the last status and the job's history, and
    what jax compiles, which later attempts load; without one that lies in a temporary folder until
    the job ends. With `standby` (default: where restarts are allowed) an interpreter for each
    process imports jax, holdfast and the modules `preload` once an attempt has done its first step,
    and waits to become a process of the next one. With `metrics_port` the job's metrics are served
    for Prometheus, through all attempts (0: at a free port; needs the extra `metrics`). In the main
    thread, SIGTERM, SIGINT and SIGHUP are passed on: the processes save and leave, and the job ends
    as "preempted". However this process ends, none of the job's survives it. Raises ValueError for
    numbers of processes that do not fit, and for names in `preload` that no module can have, and
    OSError for a port that is taken.
    """
    if not command:
        raise ValueError("no command to run")
    restart = restart or RestartPolicy()
    job_id = job_id or f"local-{uuid.uuid4().hex[:12]}"
    job = Job(
        job_id, min_processes or num_processes, num_processes, restart, attempt=first_attempt - 1
    )
    output = output or ConsoleOutput(sys.stdout, sys.stderr, num_processes)
    env = os.environ if env is None else env
    logs = None if log_dir is None else LogFiles(output, Path(log_dir))
    with contextlib.ExitStack() as stack:
        if logs is not None:
            stack.enter_context(contextlib.closing(logs))
        cache = stack.enter_context(
            compile_cache(env, None if log_dir is None else Path(log_dir), (logs or output).say)
        )
        env = {**env, **cache}
        restarts = (
            restart.max_failures + restart.max_preemptions > 0 or job.min_processes < num_processes
        )
        say = (logs or output).say
        standbys = standbys_of(
            command, env, cwd=cwd, wanted=standby, restarts=restarts, preload=preload, say=say
        )
        engine = LocalEngine(
            command,
            job_id,
            env=env,
            cwd=cwd,
            output=logs or output,
            policy=restart,
            capacity_file=Path(capacity_file) if capacity_file else None,
            heartbeat_timeout_s=heartbeat_timeout_s,
            coordinator_log=None if logs is None else logs.coordinator_log,
            standbys=standbys,
        )
        if metrics_port is not None:
            server = stack.enter_context(MetricsServer(engine.status, metrics_port, metrics_host))
            say(f"metrics at http://{metrics_host}:{server.port}/metrics")
        result = run_job(job, engine, output)
        if log_dir is not None:
            engine.leave_status(Path(log_dir) / "status.json", result)
        return result
