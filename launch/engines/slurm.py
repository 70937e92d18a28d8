"""The engine of Slurm: inside an allocation, one job step an attempt, with the coordinator beside it in the batch step.

A step is one `srun` of `holdfast task`, which tells by a marked line how each task ended: srun alone gives one exit code for all. What
Slurm takes away is given back by `scontrol requeue`: a batch job that merely ended inside the grace period would count as completed.
"""

from __future__ import annotations

import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

from ..external.detect import slurm_attempt
from ..external.task import MARK
from ..supervisor.engine import JobResult, supervise
from ..supervisor.job import Action, Event, Exited, Job, Kill, Launch, Notify, Release, Reserve, Reserved, RestartPolicy, Stop, Terminate
from ..view import reporter
from ..workers.coordinator import Coordinator, ProgressWatch
from ..workers.output import ConsoleOutput, Output
from ..workers.process import Child, Guard
from ..workers.signals import passing_on

_LABELLED = re.compile(r"\s*(\d+): (.*)", re.DOTALL)
_REQUEUE_WAIT_S = 120.0


class SlurmEngine:
    """Runs a job's processes as tasks of job steps of this allocation. Everything but `forward` belongs to the thread that made it."""

    def __init__(
        self, command: Sequence[str], job_id: str, environment: Mapping[str, str], output: Output, *, host: str, grace_s: float
    ) -> None:
        self._command, self._job_id, self._env, self._output, self._host = list(command), job_id, dict(environment), output, host
        self._grace_s = grace_s
        self._guard = Guard()
        self._queue: queue.SimpleQueue[Event | int] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of `_left` and `_step`: the reader of srun's output writes them
        self._left: set[int] = set()
        self._step = ""
        self._srun: Child | None = None
        self._coordinator: Coordinator | None = None
        self._watch: ProgressWatch | None = None
        self._signals = 0

    # ---- Actions

    def carry_out(self, action: Action) -> None:
        if isinstance(action, Reserve):  # the allocation is ours already
            self._queue.put(Reserved(action.attempt, action.most))
        elif isinstance(action, Launch):
            self._launch(action.attempt, action.count)
        elif isinstance(action, Notify | Terminate):
            self._signal("TERM")
        elif isinstance(action, Kill):
            self._signal("KILL")
        elif isinstance(action, Release):
            self._release()

    def _launch(self, attempt: int, count: int) -> None:
        self._coordinator = Coordinator(self._job_id, attempt, count, host=self._host)
        self._watch = ProgressWatch(self._coordinator.address, attempt, self._queue.put)
        self._left, self._step = set(range(count)), ""
        task = [
            sys.executable,
            "-c",
            "from holdfast.cli import main; main()",
            "task",
            "--report",
            "--coordinator",
            self._coordinator.address,
        ]
        task += ["--job-id", self._job_id, "--attempt", str(attempt), "--", *self._command]
        srun = ["srun", f"--ntasks={count}", "--label", "--kill-on-bad-exit=0", "--wait=0", "--quit-on-interrupt"]
        self._srun = Child(
            [*srun, *task],
            self._env,
            self._guard,
            on_line=lambda line: self._line(attempt, line),
            on_exit=lambda code: self._ended(attempt, code),
        )

    def _line(self, attempt: int, line: str) -> None:
        found = _LABELLED.fullmatch(line)
        if found is None:
            self._output.say(line)
            return
        process, text = int(found[1]), found[2]
        before, mark, words = text.partition(MARK)
        if before or not mark:
            self._output.line(process, before if mark else text)
        if mark:
            self._marked(attempt, process, words.split())

    def _marked(self, attempt: int, process: int, words: list[str]) -> None:
        if words[:1] == ["started"] and len(words) == 2:
            with self._lock:
                self._step = words[1]
        elif words[:1] == ["exited"] and len(words) == 2:
            with self._lock:
                self._left.discard(process)
            self._exited(Exited(attempt, process, int(words[1])))

    def _ended(self, attempt: int, code: int) -> None:
        """srun is gone: tasks that have not told their end were killed, with their machine or without."""
        with self._lock:
            missing, self._left = sorted(self._left), set()
        for process in missing:
            self._exited(Exited(attempt, process, -9, f"srun ended with {code}"))

    def _exited(self, event: Exited) -> None:
        watch = self._watch
        if watch is not None:
            watch.refresh()
        self._queue.put(event)

    def _signal(self, name: str) -> None:
        with self._lock:
            step = self._step
        if step and self._srun is not None and self._srun.alive:
            slurm("scancel", f"--signal={name}", f"{self._env['SLURM_JOB_ID']}.{step}")
        elif name == "KILL" and self._srun is not None:
            self._srun.kill()

    def _release(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
        if self._coordinator is not None and (self._srun is None or self._srun.wait(self._grace_s)):
            self._coordinator.close()
            self._coordinator = None

    # ---- Events

    def forward(self, number: int) -> None:
        """Takes a signal of the batch step: the first asks the job to stop, the second repeats SIGTERM, the third kills. Signal-safe."""
        self._queue.put(number)

    def events(self, timeout_s: float | None) -> Sequence[Event]:
        """Returns the next piece of news, at the latest after `timeout_s`."""
        try:
            news = self._queue.get(timeout=timeout_s) if timeout_s != 0 else self._queue.get_nowait()
        except queue.Empty:
            return []
        return self._on_signal(news) if isinstance(news, int) else [news]

    def _on_signal(self, number: int) -> list[Event]:
        self._signals += 1
        if self._signals == 1:
            return [Stop(signal.Signals(number).name)]
        self._signal("TERM" if self._signals == 2 else "KILL")
        return []

    def close(self) -> None:
        """Ends whatever is left: the step has `grace_s` seconds, then SIGKILL."""
        if self._srun is not None and not self._srun.wait(self._grace_s):
            self._signal("KILL")
            if not self._srun.wait(self._grace_s):
                self._srun.kill()
                self._srun.wait(10)
        self._release()
        self._guard.close()


def run_slurm(
    command: Sequence[str],
    environment: Mapping[str, str] = os.environ,
    *,
    policy: RestartPolicy | None = None,
    host: str | None = None,
    output: Output | None = None,
    requeue: bool = True,
) -> JobResult:
    """Runs `command` as the tasks of this Slurm allocation, to the end of the job, and requeues the job when it is preempted. Blocks.

    Restarts the group as `policy` says (default: 3 failures between two advances). SIGTERM, SIGINT and SIGUSR1 (ask for it with
    `#SBATCH --signal=B:USR1@60`) make the processes save and leave. A preempted job is handed back with `scontrol requeue`, unless
    `requeue` is False; then the call does not return before Slurm ends this process. `host` is where tasks reach the coordinator
    (default: this node's name, or loopback where there is one node only). Raises ValueError outside an allocation.
    """
    if "SLURM_JOB_ID" not in environment:
        raise ValueError("SLURM_JOB_ID is not set: `holdfast slurm` runs inside an allocation, as the last line of an sbatch script")
    count = int(environment.get("SLURM_NTASKS") or environment.get("SLURM_JOB_NUM_NODES") or 1)
    host = host or ("127.0.0.1" if environment.get("SLURM_JOB_NUM_NODES", "1") == "1" else socket.gethostname())
    policy = policy or RestartPolicy(max_failures=3)
    attempt = slurm_attempt(environment)
    job = Job(f"slurm-{environment['SLURM_JOB_ID']}", count, count, policy, attempt=attempt - 1)
    output = output or ConsoleOutput(sys.stdout, sys.stderr, count)
    engine = SlurmEngine(command, job.job_id, environment, output, host=host, grace_s=policy.grace_s)
    with passing_on(engine.forward, signal.SIGUSR1):
        result = supervise(job, engine, on_decision=reporter(output, first_attempt=attempt))
        if result.outcome == "preempted" and not result.interrupted and requeue:
            _hand_back(environment["SLURM_JOB_ID"], output)
    return result


def _hand_back(slurm_job: str, output: Output) -> None:
    """Requeues our own job, and waits for Slurm to end us: whoever exits first counts as completed."""
    done = slurm("scontrol", "requeue", slurm_job)
    if done.returncode != 0:
        output.say(f"Slurm does not requeue job {slurm_job}: {done.stderr.strip()}; ending with 75")
        return
    output.say(f"job {slurm_job} is requeued")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(_REQUEUE_WAIT_S)


def slurm(*command: str) -> subprocess.CompletedProcess[str]:
    """Runs one of Slurm's commands; it has a minute."""
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
