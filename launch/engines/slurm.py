"""The engine of Slurm: inside an allocation, one job step an attempt.

The coordinator runs beside it in the batch step. A step is one `srun` of `holdfast task`, which
reports by a marked line how each task ended: srun alone gives one exit code for all. What Slurm
takes away is given back by `scontrol requeue`: a batch job that merely ended inside the grace
period would count as completed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

from holdfast.coordination.address import own_host
from holdfast.multihost.start.launchers import slurm_attempt

from ..external.task import MARK, TERMINATE
from ..supervisor.engine import JobResult
from ..supervisor.job import Event, Exited, Job, Reserve, Reserved, RestartPolicy, Stuck
from ..supervisor.ledger import Errand
from ..workers.coordinator import HEARTBEAT_TIMEOUT_S, Coordinator
from ..workers.output import Output, console_unless
from ..workers.process import WorkerProcess
from ..workers.secrets import JobSecrets, require_cryptography
from ..workers.signals import passing_on
from .base import BaseEngine, run_job

_LABELLED = re.compile(r"\s*(\d+): (.*)", re.DOTALL)
_REQUEUE_WAIT_S = 120.0
_COMMAND_TIMEOUT_S = 60.0
_KILLED_END_S = 10.0  # for a step that got SIGKILL


class SlurmEngine(BaseEngine):
    """Runs a job's processes as tasks of job steps of this allocation."""

    def __init__(
        self,
        command: Sequence[str],
        job_id: str,
        environment: Mapping[str, str],
        output: Output,
        *,
        host: str,
        policy: RestartPolicy,
        secured: bool,
        heartbeat_timeout_s: float,
    ) -> None:
        super().__init__(output, policy)
        self.errand = Errand(command)
        self._command = list(command)
        self._job_id = job_id
        self._env = dict(environment)
        self._host = host
        # Of the job: all attempts have their coordinators on this host.
        self._secrets = JobSecrets.create([host]) if secured else None
        self._heartbeat_timeout_s = heartbeat_timeout_s
        # Of the next three: the reader of srun's output writes them.
        self._lock = threading.Lock()
        self._running: set[int] = set()
        self._started: set[int] = set()
        self._to_end: set[int] = set()  # of this attempt
        self._step = ""
        self._srun: WorkerProcess | None = None
        self._coordinator: Coordinator | None = None

    # --- Actions

    def _reserve(self, action: Reserve) -> None:
        self._queue.put(Reserved(action.attempt, action.max_processes))  # the allocation is ours

    def _launch(self, attempt: int, num_processes: int) -> None:
        # That of an attempt whose step SIGKILL has not ended: this one fences it off.
        self._close_coordinator()
        coordinator = Coordinator(
            self._job_id,
            attempt,
            num_processes,
            host=self._host,
            secrets=self._secrets,
            heartbeat_timeout_s=self._heartbeat_timeout_s,
        )
        self._coordinator = coordinator
        self._open_watch(coordinator.address, attempt, coordinator.credentials)
        self._running = set(range(num_processes))
        self._started = set()
        self._to_end = set()
        self._step = ""
        secrets = self._secrets.to_env() if self._secrets else {}
        self._srun = WorkerProcess(
            [*_srun(num_processes), *self._task(attempt, coordinator.address)],
            self._env | secrets,
            on_line=lambda line: self._on_line(attempt, line),
            on_exit=lambda code: self._on_srun_exit(attempt, code),
        )
        self._to_start.clear()

    def _task(self, attempt: int, address: str) -> list[str]:
        """Returns the command of each task of the step."""
        main = "from holdfast.cli import main; main()"
        # -P: a module of the program may have the name of one that holdfast imports.
        return [
            *(sys.executable, "-P", "-c", main, "task", "--report"),
            *("--coordinator", address),
            *("--job-id", self._job_id),
            *("--attempt", str(attempt)),
            *("--", *self._command),
        ]

    def _on_line(self, attempt: int, line: str) -> None:
        labelled = _LABELLED.fullmatch(line)
        if labelled is None:
            self._output.say(line)
            return
        process = int(labelled[1])
        text, mark, words = labelled[2].partition(MARK)
        if text or not mark:
            self._output.line(process, text)
        if mark:
            self._on_report(attempt, process, words.split())

    def _on_report(self, attempt: int, process: int, words: list[str]) -> None:
        if words[:1] == ["started"] and len(words) == 2:
            with self._lock:
                self._step = words[1]
                self._started.add(process)
        elif words[:1] == ["exited"] and len(words) == 2:
            with self._lock:
                self._running.discard(process)
            self._report_exit(Exited(attempt, process, int(words[1])))

    def _on_srun_exit(self, attempt: int, code: int) -> None:
        """Reports tasks that have not reported their end.

        They were killed, with their machine or without.
        """
        with self._lock:
            silent = sorted(self._running)
            self._running = set()
        for process in silent:
            self._report_exit(Exited(attempt, process, -9, f"srun ended with {code}"))

    def _signal(self, number: signal.Signals, processes: frozenset[int] | None) -> None:
        """Signals the step, where no task is to go on: scancel knows no single task."""
        running = self._still_running()
        if processes is None or running <= processes:
            with self._lock:
                hear = running <= self._started
            if number is signal.SIGTERM and hear:
                number = TERMINATE
            self._scancel(number.name.removeprefix("SIG"))

    def _on_stuck(self, stuck: Stuck) -> list[Event]:
        super()._on_stuck(stuck)
        # It cannot be ended alone: it goes with the others, whom its failure ends.
        ended = stuck.process in self._stuck
        return [Exited(stuck.attempt, stuck.process, 1, stuck.why)] if ended else []

    def _kill(self, processes: frozenset[int] | None = None) -> None:
        """Ends the step, once all its tasks are to end."""
        if processes is not None:
            self._to_end |= processes
            if not self._still_running() <= self._to_end:
                return
        if not self._scancel("KILL") and self._srun is not None:
            self._srun.kill()

    def _still_running(self) -> set[int]:
        with self._lock:
            return set(self._running)

    def _scancel(self, name: str) -> bool:
        """Sends a signal to all tasks. Returns False where no step is known to run."""
        with self._lock:
            step = self._step
        if not step or self._srun is None or not self._srun.alive:
            return False
        # scancel asks the controller, which may take a minute: the loop of the job does not wait.
        threading.Thread(
            target=self._run_scancel,
            args=(name, f"{self._env['SLURM_JOB_ID']}.{step}"),
            name="holdfast-scancel",
            daemon=True,
        ).start()
        return True

    def _run_scancel(self, name: str, target: str) -> None:
        done = slurm("scancel", f"--signal={name}", target)
        if done.returncode:
            self._output.say(f"scancel --signal={name} {target} failed: {done.stderr.strip()}")

    def _release(self) -> None:
        self._close_watch()
        # Else with the next attempt, or at the end.
        if self._srun is None or not self._srun.alive:
            self._close_coordinator()

    def _close_coordinator(self) -> None:
        if self._coordinator is not None:
            self._coordinator.close()
            self._coordinator = None

    def close(self) -> None:
        """Ends whatever still runs: the step has `grace_s` seconds, then SIGKILL."""
        if self._srun is not None and not self._srun.wait(self._policy.grace_s):
            self._end()
            if not self._srun.wait(self._policy.grace_s):
                self._srun.kill()
                self._srun.wait(_KILLED_END_S)
        self._close_watch()
        self._close_coordinator()


def _srun(num_processes: int) -> list[str]:
    return [
        "srun",
        f"--ntasks={num_processes}",
        "--label",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--quit-on-interrupt",
    ]


def run_slurm(
    command: Sequence[str],
    environment: Mapping[str, str] = os.environ,
    *,
    restart: RestartPolicy | None = None,
    host: str | None = None,
    output: Output | None = None,
    requeue: bool = True,
    heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
    insecure: bool = False,
) -> JobResult:
    """Runs `command` as the tasks of this Slurm allocation, to the end of the job. Blocks.

    Restarts the group as `restart` says (default: 3 failures between two advances). SIGTERM, SIGINT
    and SIGUSR1 (ask for it with `#SBATCH --signal=B:USR1@60`) make the processes save and leave. A
    preempted job is handed back with `scontrol requeue`, unless `requeue` is False; then the call
    does not return before Slurm ends this process. `host` is where tasks reach the coordinator
    (default: this node's name, or its address where the name is loopback's; loopback where there is
    one node only). The job has a token and certificates of its own, which srun hands to its tasks,
    unless `insecure`.

    Raises ValueError outside an allocation, ImportError where certificates cannot be made.
    """
    slurm_job = environment.get("SLURM_JOB_ID")
    if slurm_job is None:
        raise ValueError(
            "SLURM_JOB_ID is not set: `holdfast slurm` runs inside an allocation, as the last line"
            " of an sbatch script"
        )
    if not insecure:
        require_cryptography()
    nodes = environment.get("SLURM_JOB_NUM_NODES")
    num_processes = int(environment.get("SLURM_NTASKS") or nodes or 1)
    if not host:
        host = own_host() if nodes not in (None, "1") else "127.0.0.1"
    policy = restart or RestartPolicy(max_failures=3)
    before = slurm_attempt(environment) - 1
    job = Job(f"slurm-{slurm_job}", num_processes, num_processes, policy, attempt=before)
    with console_unless(output, num_processes) as lines:
        engine = SlurmEngine(
            command,
            job.job_id,
            environment,
            lines,
            host=host,
            policy=policy,
            secured=not insecure,
            heartbeat_timeout_s=heartbeat_timeout_s,
        )
        with passing_on(engine.forward, signal.SIGUSR1):
            result = run_job(job, engine, lines)
            if result.outcome == "preempted" and not result.interrupted and requeue:
                _hand_back(slurm_job, lines)
    return result


def _hand_back(slurm_job: str, output: Output) -> None:
    """Requeues our own job, and waits for Slurm to end this process.

    A job that exits by itself counts as completed.
    """
    done = slurm("scontrol", "requeue", slurm_job)
    if done.returncode != 0:
        output.say(f"Slurm does not requeue job {slurm_job}: {done.stderr.strip()}; ending with 75")
        return
    output.say(f"job {slurm_job} is requeued")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(_REQUEUE_WAIT_S)


def slurm(*command: str) -> subprocess.CompletedProcess[str]:
    """Runs one of Slurm's commands; it has a minute, and ends with 124 after it."""
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_COMMAND_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(
            command, 124, "", f"no answer within {_COMMAND_TIMEOUT_S:g} s"
        )
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, "", f"{command[0]}: {error.strerror}")
