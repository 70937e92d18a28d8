"""The engine of this machine: a coordinator and the processes beside it.

Nothing of either is left afterwards.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from holdfast.coordination import CoordinationError
from holdfast.coordination.address import join_address
from holdfast.coordination.diagnosis.summary import counted
from holdfast.coordination.process.diagnose import place_of
from holdfast.coordination.process.job_folder import working_folder
from holdfast.coordination.server.metrics import MetricsServer
from holdfast.multihost import ProcessSpec
from holdfast.multihost.compiled.folder import (
    COMPILE_CACHE,
    JAX_FOLDER,
    OFF,
    keeping_variables,
    why_off,
)
from holdfast.proto import session_pb2

from ..supervisor.engine import JobResult
from ..supervisor.job import (
    Capacity,
    CoordinatorEnded,
    Event,
    Exited,
    Job,
    Notify,
    PrepareNext,
    Rejoin,
    Reserve,
    Reserved,
    RestartPolicy,
    Waiting,
    how_ended,
)
from ..supervisor.ledger import Errand
from ..view import LiveView
from ..workers.coordinator import HEARTBEAT_TIMEOUT_S, Coordinator, Coordinators
from ..workers.environment import own_devices, worker_env
from ..workers.output import LogFiles, Output, console_unless
from ..workers.process import OomKills, WorkerProcess
from ..workers.standby import NO_STANDBYS, Standbys, StandbySettings, standbys_of
from .base import MOST_LOOKS, BaseEngine, chosen

_POLL_S = 0.5  # how often the capacity file is read, and a standby asked whether it is ready
_BEGINS_S = 3.0  # an attempt whose processes are warm has begun before
_REDO_S = 2.0  # in which an attempt that processes have joined again makes lost steps once more
_KILLED_END_S = 10.0  # for a process that got SIGKILL
_NEVER = RestartPolicy()
_STANDBY = StandbySettings()


@dataclass(frozen=True, kw_only=True)
class MetricsSettings:
    """Where the metrics of a job are served for Prometheus. Needs the extra `metrics`."""

    port: int = 0  # 0: a free one
    host: str = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """How a job runs on this machine: `run_local(command, 4, RunSettings(...))`.

    With `capacity_file` the job shrinks to what the file says, to `min_processes` at least, and
    grows with it. `log_dir` gets a file for each process, the coordinator's log, `status.json` with
    the last status and the job's history. `compile_cache` is where jax keeps what it compiles, or
    "off": see `multihost.keep_compiled`.
    """

    restart: RestartPolicy = _NEVER
    min_processes: int | None = None  # None: all
    job_id: str | None = None  # None: a new one
    first_attempt: int = 1
    env: Mapping[str, str] | None = None  # of the processes; None: this process's
    cwd: str | Path | None = None
    capacity_file: str | Path | None = None  # holds how many processes there is room for now
    heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S  # a process silent for so long is lost
    log_dir: str | Path | None = None
    compile_cache: str | Path | None = None  # None: a folder of this host and user
    standby: StandbySettings = _STANDBY
    metrics: MetricsSettings | None = None  # None: none are served

    @property
    def log_folder(self) -> Path | None:
        """`log_dir` as a path."""
        return None if self.log_dir is None else Path(self.log_dir)

    def job(self, num_processes: int) -> Job:
        """Returns the job before its first attempt. ValueError: numbers that do not fit."""
        return Job(
            self.job_id or f"local-{uuid.uuid4().hex[:12]}",
            num_processes if self.min_processes is None else self.min_processes,
            num_processes,
            self.restart,
            attempt=self.first_attempt - 1,
        )


_AS_IT_COMES = RunSettings()


class LocalEngine(BaseEngine):
    """Runs a job's processes as children of this one."""

    def __init__(
        self,
        command: Sequence[str],
        job_id: str,
        settings: RunSettings,
        output: Output,
        *,
        standbys: Standbys = NO_STANDBYS,
    ) -> None:
        super().__init__(output, settings.restart)
        self.errand = Errand(command, str(settings.cwd or working_folder()))
        self.log_folder = settings.log_folder
        self._command = list(command)
        self._job_id = job_id
        self._settings = settings
        self._standbys = standbys
        self._workers: dict[int, WorkerProcess] = {}
        self._environments: dict[int, Mapping[str, str]] = {}  # of the attempt that runs
        self._warm_at: float | None = None  # when what waits for the next attempt is to start
        self._can_stay = False  # processes of this attempt can outlive it
        self._launched_s = 0.0
        self._coordinators = Coordinators(self._start_coordinator)
        self._wanted_room: Reserve | None = None
        self._capacity: int | None = None
        self._seen_room: int | None = None  # that was told while the job ran
        self._oom_kills = OomKills()
        self._unread = ""  # why the capacity file cannot be read
        self._poll_at = 0.0

    # --- Actions

    def _reserve(self, action: Reserve) -> None:
        self._wanted_room = action
        self._poll_at = 0.0

    def _notify(self, action: Notify) -> None:
        if action.why != "SIGINT" or self._watch is None:
            super()._notify(action)
            return
        # A process with a client of ours takes SIGTERM for a notice, and saves. All others get
        # Ctrl-C as Ctrl-C: they may have a handler of their own for that.
        self._watch.refresh()  # one may have come since the last poll
        ours = self._watch.with_session
        self._terminate(ours)
        self._signal(signal.SIGINT, frozenset(self._workers) - ours)

    def _prepare(self, action: PrepareNext) -> None:
        self._coordinators.prepare(action.attempt, action.num_processes)

    def _start_coordinator(self, attempt: int, num_processes: int) -> Coordinator:
        folder = self._settings.log_folder
        return Coordinator(
            self._job_id,
            attempt,
            num_processes,
            heartbeat_timeout_s=self._settings.heartbeat_timeout_s,
            log_file=None if folder is None else folder / "coordinator.log",
        )

    def _launch(self) -> None:
        # What is left of an attempt that SIGKILL has not ended: this one fences it off.
        self._give_back()
        self._open_attempt()
        self._environments = {}
        self._start_ordered()
        self._standbys.close()

    def _open_attempt(self) -> None:
        """Begins to watch the attempt's coordinator."""
        attempt = self._attempt
        coordinator = self._coordinators.open(attempt, self._num_processes)
        self._coordinator = coordinator
        self._warm_at = None
        self._launched_s = time.monotonic()
        self._standbys.hold()
        self._open_watch(coordinator.address)
        coordinator.on_end(lambda code: self._on_coordinator_end(attempt, code))

    def _rejoin(self, action: Rejoin) -> None:
        self._open_attempt()
        for process in self._environments.keys() - set(range(action.num_processes)):
            del self._environments[process]
        self._hand_over(action)

    def _places(self) -> Mapping[int, session_pb2.Place]:
        given = self._settings.env or {}
        num_processes = self._num_processes
        return {
            rank: session_pb2.Place(
                process_id=rank,
                local_rank=rank,
                local_count=num_processes,
                devices=own_devices(given, rank, num_processes),
            )
            for rank in self._staying
        }

    def _replace(self, processes: frozenset[int], missed: frozenset[int]) -> None:
        before = {
            process: worker
            for process in sorted(processes)
            if (worker := self._workers.get(process)) is not None and worker.alive
        }
        if not before:
            self._start_ordered()
            return
        # Their ends are waited for, and each look takes seconds: the loop goes on meanwhile.
        threading.Thread(
            target=self._make_room,
            args=(self._attempt, before, sorted(missed & before.keys())),
            name="holdfast-replace",
            daemon=True,
        ).start()

    def _make_room(
        self, attempt: int, before: Mapping[int, WorkerProcess], missed: Sequence[int]
    ) -> None:
        """Ends processes that others are to stand for, and has these started.

        Of those that were missed it says where they are, while they can still be asked.
        """
        for process in missed[:MOST_LOOKS]:
            self._say_late(attempt, process, place_of(process, self._pids.pop(process, 0)))
        for worker in before.values():
            worker.kill()
        for worker in before.values():
            worker.wait(_KILLED_END_S)
        self._queue.put(partial(self._start_later, attempt))

    def _start_ordered(self) -> None:
        for process in sorted(self._to_start):
            self._start(process)
            self._to_start.discard(process)

    def _start(self, process: int) -> None:
        assert self._coordinator is not None
        spec = ProcessSpec(
            job_id=self._job_id,
            attempt=self._attempt,
            process_id=process,
            num_processes=self._num_processes,
            coordinator=self._coordinator.address,
            local_rank=process,
            local_count=self._num_processes,
            launched_ms=self.launched_ms,
        )
        given = self._settings.env or {}
        env, lines = worker_env(given, spec, share_of=spec.num_processes, decides=True)
        if process == 0:  # the lines are the same for all
            for line in lines:
                self._output.say(line)

        def on_line(text: str) -> None:
            self._output.line(process, text)

        def on_exit(code: int) -> None:
            self._report_exit(Exited(spec.attempt, process, code, self._oom_kills.why(code)))

        self._environments[process] = env
        self._workers[process] = self._standbys.take(
            process, env, on_line, on_exit
        ) or WorkerProcess(
            self._command, env, cwd=self._settings.cwd, on_line=on_line, on_exit=on_exit
        )

    def _on_coordinator_end(self, attempt: int, code: int) -> None:
        watch = self._watch
        if watch is not None and watch.still_needed(ended_well=code == 0):
            self._queue.put(CoordinatorEnded(attempt, f"the coordinator {how_ended(code)}"))

    def _signal(self, number: signal.Signals, processes: frozenset[int] | None) -> None:
        for worker in chosen(self._workers, processes):
            worker.signal(number)

    def _kill(self, processes: frozenset[int] | None) -> None:
        for worker in chosen(self._workers, processes):
            worker.kill()

    def _release(self) -> None:
        if not any(worker.alive for worker in self._workers.values()):
            self._give_back()

    def _give_back(self) -> None:
        self._workers.clear()
        self._close_coordinators()

    # --- Events

    def events(self, timeout_s: float | None) -> Sequence[Event]:
        """Returns what has happened, at the latest after `timeout_s`.

        Reads the capacity file, where one is given, twice a second. Starts what waits for the next
        attempt after the first step of this one: the kernel ends standbys with the thread that has
        started them, and this thread outlives them.
        """
        self._look_for_room()
        if self._warm_next() or self._settings.capacity_file is not None:
            timeout_s = _POLL_S if timeout_s is None else min(_POLL_S, timeout_s)
        return super().events(timeout_s)

    def _on_first_step(self, *, can_stay: bool) -> None:
        self._can_stay = can_stay
        # The cores are for the steps that are made once more: a death so early costs a start.
        self._warm_at = time.monotonic() + (_REDO_S if self._staying else 0.0)
        self._get_ready()

    def _warm_next(self) -> bool:
        """Starts the next standbys; returns whether there may be more to start soon."""
        if self._get_ready():
            return True
        # An attempt that begins needs the cores. One that takes long waits for a process, which
        # may have to be replaced.
        begins = not self._has_stepped and time.monotonic() - self._launched_s < _BEGINS_S
        return begins or self._standbys.warm_next()

    def _get_ready(self) -> bool:
        """Starts the standbys, and a coordinator where the next attempt may begin at once; returns
        whether that is still to come.
        """
        if self._warm_at is None or time.monotonic() < self._warm_at:
            return self._warm_at is not None
        self._warm_at = None
        self._standbys.warm(self._environments, in_turn=self._can_stay)
        if self._can_stay and self._policy.max_failures:
            self._coordinators.prepare(self._attempt + 1, self._num_processes)
        return False

    def _look_for_room(self) -> None:
        """Queues what the capacity file says, for an attempt that waits for room or runs."""
        wanted = self._wanted_room
        if time.monotonic() < self._poll_at:
            return
        capacity = self._read_capacity()
        self._poll_at = time.monotonic() + _POLL_S
        if wanted is not None:
            room = wanted.max_processes if capacity is None else min(capacity, wanted.max_processes)
            if room < wanted.min_processes:
                why = f"room for {room} of at least {counted(wanted.min_processes, 'process')}"
                self._queue.put(Waiting(wanted.attempt, why))
                return
            self._wanted_room = None
            self._queue.put(Reserved(wanted.attempt, room))
        elif capacity is not None and self._workers:
            if capacity != self._seen_room and self._watch is not None:
                # Who leaves hangs on who can stay, which the launcher may not have heard yet.
                self._watch.refresh()
            self._seen_room = capacity
            self._queue.put(Capacity(capacity))

    def _read_capacity(self) -> int | None:
        if self._settings.capacity_file is None:
            return None
        try:
            self._capacity = int(Path(self._settings.capacity_file).read_text())
            self._unread = ""
        except FileNotFoundError:
            self._capacity = None
        except ValueError:  # being written: what it said before still holds
            pass
        except OSError as error:
            self._say_unread(str(error.strerror))
        return self._capacity

    def _say_unread(self, why: str) -> None:
        """Says, once, that the capacity file cannot be read, and what holds instead."""
        if why != self._unread:
            self._unread = why
            room = "all processes" if self._capacity is None else self._capacity
            self._output.say(
                f"capacity file {self._settings.capacity_file} cannot be read: {why}; until it can"
                f" there is room for {room}, as it last said"
            )

    def close(self) -> None:
        """Ends whatever still runs.

        A process that was asked to end has the policy's `grace_s` seconds, then it gets SIGKILL.
        """
        deadline = time.monotonic() + self._policy.grace_s
        for worker in self._workers.values():
            worker.wait(max(0.0, deadline - time.monotonic()))
        self._kill(None)
        for worker in self._workers.values():
            worker.wait(_KILLED_END_S)
        self._release()
        self._coordinators.close()
        self._standbys.close()


def run_local(
    command: Sequence[str],
    num_processes: int,
    settings: RunSettings = _AS_IT_COMES,
    *,
    output: Output | None = None,
) -> JobResult:
    """Runs `command` as `num_processes` processes on this machine, to the end of the job. Blocks.

    The processes have a coordinator of their own, at a Unix socket that only this user reaches, and
    each gets its ProcessSpec in its environment. In the main thread, SIGTERM, SIGINT and SIGHUP are
    passed on: the processes save and leave, and the job ends as "preempted". However this process
    ends, none of the job's processes survives it. `output` gets the lines (default: the console).

    Raises ValueError for numbers of processes that do not fit, and for names in `preload` that no
    module can have. Raises OSError for a port that is taken.
    """
    if not command:
        raise ValueError("no command to run")
    job = settings.job(num_processes)
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(console_unless(output, num_processes))
        lines = output
        if settings.log_folder is not None:
            files = LogFiles(output, settings.log_folder)
            lines = stack.enter_context(contextlib.closing(files))
        environment = _keeping_compiled(settings, lines)
        standbys = standbys_of(
            command,
            environment,
            settings.standby,
            cwd=settings.cwd,
            restarts=job.may_restart,
            say=lines.say,
        )
        settings = replace(settings, env=environment)
        engine = LocalEngine(command, job.job_id, settings, lines, standbys=standbys)
        if (metrics := settings.metrics) is not None:
            server = stack.enter_context(MetricsServer(engine.status, metrics.port, metrics.host))
            lines.say(f"metrics at http://{join_address(metrics.host, server.port)}/metrics")
        return engine.run(job, output if isinstance(output, LiveView) else None)


def _keeping_compiled(settings: RunSettings, output: Output) -> dict[str, str]:
    """Returns the environment of the processes, which has jax keep what it compiles."""
    environment = dict(os.environ if settings.env is None else settings.env)
    if settings.compile_cache is not None:
        environment[COMPILE_CACHE] = str(settings.compile_cache)
        environment.pop(JAX_FOLDER, None)
    try:
        environment |= keeping_variables(environment)
    except (OSError, CoordinationError) as error:
        output.say(why_off(error))
        environment[COMPILE_CACHE] = OFF
    return environment
