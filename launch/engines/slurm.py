"""The engine of Slurm: inside an allocation, a job step for all that start together.

The coordinators run beside it in the batch step. A step is one `srun` of `holdfast task`, which
reports by a marked line how each task ended: srun alone gives one exit code for all. What is
ordered of a task goes by srun's input, which reaches each of them; scancel is for whole steps. Who
is lost while others stay has a step of its own. What Slurm takes away is given back by `scontrol
requeue`: a batch job that merely ended inside the grace period would count as completed.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from holdfast.coordination.address import own_host
from holdfast.coordination.diagnosis.findings import LOST
from holdfast.coordination.diagnosis.summary import counted
from holdfast.multihost import Preempted
from holdfast.multihost.start.launchers import slurm_attempt
from holdfast.proto import coordination_pb2

from ..external.task import ALL, MARK
from ..supervisor.engine import JobResult
from ..supervisor.job import (
    Event,
    Exited,
    Job,
    Rejoin,
    Reserve,
    Reserved,
    RestartPolicy,
)
from ..supervisor.ledger import Errand
from ..workers.coordinator import HEARTBEAT_TIMEOUT_S, Coordinator
from ..workers.output import Output, console_unless
from ..workers.process import WorkerProcess, last_state
from ..workers.secrets import JobSecrets, require_cryptography
from ..workers.signals import passing_on
from .base import FOR_EVER_S, BaseEngine

_LABELLED = re.compile(r"\s*(\d+): (.*)", re.DOTALL)
_REQUEUE_WAIT_S = 120.0
_COMMAND_TIMEOUT_S = 60.0
_KILLED_END_S = 10.0  # for what got SIGKILL
_POLL_S = 0.5  # how often it looks who is lost
_NODE_LOST = "Node failure on"  # of srun: so it says that Slurm has set one of its nodes DOWN
_POLICY = RestartPolicy(max_failures=3)


@dataclass(frozen=True, kw_only=True)
class SlurmSettings:
    """How a job runs in its allocation: `run_slurm(command, SlurmSettings(spares=1))`.

    `host` is where tasks reach the coordinator (default: this node's name, or its address where the
    name is loopback's; loopback where there is one node only). The job has a token and certificates
    of its own, which srun hands to its tasks, unless `insecure`. So many nodes of the allocation
    are `spares`: each stands for one that Slurm has lost.
    """

    restart: RestartPolicy = _POLICY
    host: str | None = None
    requeue: bool = True  # a preempted job
    heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S  # a process silent for so long is lost
    insecure: bool = False
    spares: int = 0


_AS_IT_COMES = SlurmSettings()


class _Step:
    """One srun, and what its tasks have reported."""

    def __init__(
        self,
        attempt: int,
        processes: Sequence[int],
        words: Sequence[str],
        env: Mapping[str, str],
        *,
        node: str,
        lost: frozenset[str],
        on_line: Callable[[_Step, str], None],
        on_exit: Callable[[_Step, int], None],
    ) -> None:
        """Starts srun with further options, and what each task runs."""
        self.attempt = attempt
        self.processes = processes  # of the tasks, in order
        self.node = node  # where it is to be; "": wherever Slurm has it
        self.lost = lost  # nodes where it is not
        self.running = set(processes)
        self.begun: set[int] = set()
        self._to_end: set[int] = set()
        self._name = ""  # Slurm's, once a task has begun
        told, orders = os.pipe()
        os.set_blocking(orders, False)
        self._orders = os.fdopen(orders, "wb", buffering=0)
        command = [
            "srun",
            f"--ntasks={len(processes)}",
            f"--input=/dev/fd/{told}",
            "--label",
            "--no-kill",
            "--kill-on-bad-exit=0",
            "--wait=0",
            "--quit-on-interrupt",
            *words,
        ]
        with os.fdopen(told):
            # A line that overwrites itself begins with a label, which folding would take.
            self._srun = WorkerProcess(
                command,
                env,
                on_line=partial(on_line, self),
                on_exit=partial(on_exit, self),
                pass_fds=[told],
                folds=False,
            )

    @property
    def could_not_begin(self) -> bool:
        """Whether nobody has heard of its tasks, and nobody has ended them."""
        return bool(self.running) and not (self._name or self._to_end)

    def begin(self, name: str, process: int) -> None:
        """Notes that a task has begun, and Slurm's name of the step."""
        self._name = name
        self.begun.add(process)

    def order(self, line: bytes) -> None:
        """Says a line to each task."""
        with contextlib.suppress(OSError, ValueError):  # srun ends, or does not read
            self._orders.write(line)

    def close(self) -> None:
        """Takes no order any more: srun has ended."""
        self._orders.close()

    def end(self, processes: frozenset[int] | None) -> str:
        """Notes that processes (None: all) are to end. Returns the step's name where that ends its
        last.
        """
        ends = self.running if processes is None else self.running & processes
        self._to_end |= ends
        if self.running - self._to_end or not (ends or processes is None):
            return ""
        if not self._name:
            self.kill()
        return self._name

    def kill(self) -> None:
        """Ends srun, and with it the step."""
        self._srun.kill()


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
        settings: SlurmSettings,
    ) -> None:
        super().__init__(output, settings.restart)
        self.errand = Errand(command)
        self._command = list(command)
        self._job_id = job_id
        self._env = dict(environment)
        self._host = host
        # Of the job: all attempts have their coordinators on this host.
        self._secrets = None if settings.insecure else JobSecrets.create([host])
        self._heartbeat_timeout_s = settings.heartbeat_timeout_s
        self._of_all = [f"--nodes={self._env['SLURM_NNODES']}"]  # options of a step of all
        # Where nodes are spared, others may have too few, unless each has as many.
        is_even = not settings.spares or "SLURM_NTASKS_PER_NODE" in environment
        if is_even and (cpus := environment.get("SLURM_CPUS_PER_TASK")):
            self._of_all.append(f"--cpus-per-task={cpus}")  # since 22.05 srun does not ask for it
        self._nodes: dict[int, str] = {}  # of the processes
        self._states: dict[str, str] = {}  # of the allocation's nodes, as Slurm last said
        self._suspect: set[str] = set()  # nodes without a word of any task's end, unlike others
        # Of the next: the readers of what each srun prints write it.
        self._changed = threading.Condition()
        self._steps: list[_Step] = []  # those that run

    # --- Actions

    def _reserve(self, action: Reserve) -> None:
        self._queue.put(Reserved(action.attempt, action.max_processes))  # the allocation is ours

    def _launch(self) -> None:
        # Those of an attempt whose step SIGKILL has not ended: this one fences it off.
        self._close_coordinators()
        self._open_attempt()
        if self._nodes:  # of an attempt before
            self._ask_for_nodes(self._start_later, self._attempt)
        else:
            self._start_step(range(self._num_processes), options=self._of_all)
            self._to_start.clear()

    def _open_attempt(self) -> None:
        coordinator = Coordinator(
            self._job_id,
            self._attempt,
            self._num_processes,
            host=self._host,
            secrets=self._secrets,
            heartbeat_timeout_s=self._heartbeat_timeout_s,
        )
        self._coordinator = coordinator
        self._open_watch(coordinator.address, coordinator.credentials)

    def _start_step(
        self, processes: Sequence[int], node: str = "", options: Sequence[str] = ()
    ) -> None:
        main = "from holdfast.cli import main; main()"
        # -P: a module of the program may have the name of one that holdfast imports.
        task = [
            *(sys.executable, "-P", "-c", main, "task", "--report"),
            *("--coordinator", self._address),
            *("--job-id", self._job_id),
            *("--attempt", str(self._attempt)),
            *("--", *self._command),
        ]
        secrets = self._secrets.to_env() if self._secrets else {}
        # Where other steps have the nodes, srun tries again for ever.
        limit_s = math.ceil(min(max(1.0, self._policy.startup_timeout_s), FOR_EVER_S))
        with self._changed:  # what it prints, and its end, come after it is known
            step = _Step(
                self._attempt,
                processes,
                [f"--immediate={limit_s}", *options, *task],
                self._env | secrets,
                node=node,
                lost=frozenset(self._lost()),
                on_line=self._on_line,
                on_exit=self._on_srun_exit,
            )
            self._steps.append(step)

    def _rejoin(self, action: Rejoin) -> None:
        self._open_attempt()
        self._order("serve", action.attempt, self._address)
        self._hand_over(action)

    def _replace(self, processes: frozenset[int], missed: frozenset[int]) -> None:
        for process in sorted(missed):
            self._say_late(self._attempt, process, "")
        self._kill(processes)
        self._ask_for_nodes(self._start_later, self._attempt, processes)

    def _ask_for_nodes(
        self,
        then: Callable[[int], list[Event]],
        attempt: int,
        ending: frozenset[int] = frozenset(),
    ) -> None:
        """Asks Slurm for the states of the nodes, once those that are to end have; the loop goes on
        meanwhile, and makes a call then.
        """

        def ask() -> None:
            self._await_end(ending, _KILLED_END_S)
            nodes = self._env["SLURM_JOB_NODELIST"]
            said = slurm("sinfo", "--noheader", "--Node", f"--nodes={nodes}", "--format=%N %t")
            self._states = dict(line.split() for line in said.stdout.splitlines())
            self._queue.put(partial(then, attempt))

        threading.Thread(target=ask, name="holdfast-nodes", daemon=True).start()

    def _note_lost(self, attempt: int) -> list[Event]:
        """Counts those as lost whose node is DOWN. They may live on, but srun has let go of them:
        no order reaches them, and none tells their relay of an attempt.
        """
        down = {name for name, state in self._states.items() if state.startswith("down")}
        for step in self._steps.copy():
            for process in step.running.copy() if step.begun else ():
                # One that has not begun, unlike others of its step, is where Slurm has lost one.
                there = {self._nodes[process]} if process in step.begun else down - step.lost
                if there & down:
                    self._note_end(step, process, -9, "Slurm has lost its node")
        return []

    def _start_ordered(self) -> None:
        self._note_lost(self._attempt)
        if len(self._to_start) == self._num_processes:
            self._start_all()
            return
        processes = sorted(self._to_start)
        for node in sorted({self._nodes[process] for process in processes}):
            self._leave_if_lost(node)
        for process in processes:
            node = self._nodes[process]
            here = sorted(each for each, its in self._nodes.items() if its == node)
            # The first that it names has a relay of its own.
            others = [each for each in here if each != process]
            says = {
                "PROCID": process,
                "STEP_NUM_TASKS": self._num_processes,
                "LOCALID": here.index(process),
                "GTIDS": ",".join(map(str, [process, *others])),
            }
            variables = [f"SLURM_{name}={value}" for name, value in says.items()]
            options = ["--overlap", "--nodes=1", f"--nodelist={node}"]
            # Slurm does not know which CPUs it had: it has those of the others there, too.
            options += ["--cpu-bind=none", "env", *variables]
            self._start_step([process], node, options)
            self._to_start.discard(process)

    def _start_all(self) -> None:
        """Starts all in one step, on the nodes that they had but for those that may be lost. Raises
        Preempted where too few are left.
        """
        for step in self._steps.copy():  # of the attempt before, with a node that is lost
            self._suspect_silent(step)
            step.kill()
        used = set(self._nodes.values())
        standing = sorted(
            self._states.keys() - self._lost(),
            key=lambda name: (name in self._suspect, name not in used, name),
        )
        count = int(self._env["SLURM_NNODES"])
        if len(standing) < count and self._states:
            raise Preempted(
                f"of the nodes Slurm has left {len(standing)}, and the job needs {count}: ask for"
                " more with --spares, in an allocation of as many more"
            )
        # A step that has lost a node stays, in Slurm's eyes, on its others.
        options = ["--overlap", *self._of_all]
        options += [f"--nodelist={','.join(standing[:count])}"] if standing else []
        self._start_step(sorted(self._to_start), options=options)
        self._to_start.clear()

    def _lost(self) -> set[str]:
        """Returns the nodes that are DOWN, or do not answer Slurm."""
        return {
            name
            for name, state in self._states.items()
            if state.startswith("down") or state.endswith("*")
        }

    def _leave_if_lost(self, node: str) -> None:
        """Has a spare node stand for one that is lost. Raises Preempted where none is left."""
        lost = self._lost()
        if node not in lost:
            return
        spares = self._states.keys() - lost - set(self._nodes.values())
        if not spares:
            raise Preempted(
                f"Slurm has lost node {node}, and none is spare: with --spares 1, in an allocation"
                " of one node more, the other processes would stay"
            )
        spare = min(spares)
        self._output.say(f"node {spare} stands for {node}, which Slurm has lost")
        for process, its in self._nodes.items():
            if its == node:
                self._nodes[process] = spare

    def _on_line(self, step: _Step, line: str) -> None:
        labelled = _LABELLED.fullmatch(line)
        if labelled is None:
            self._output.say(line)
            if _NODE_LOST in line:
                self._ask_for_nodes(self._note_lost, step.attempt)
            return
        process = step.processes[int(labelled[1])]
        text, mark, words = labelled[2].partition(MARK)
        if text or not mark:
            self._output.line(process, last_state(text))
        match words.split():
            case ["started", name, node]:
                self._nodes[process] = node
                self._suspect.discard(node)
                step.begin(name, process)
            case ["exited", code]:
                self._note_end(step, process, int(code))

    def _note_end(self, step: _Step, process: int, code: int, why: str = "") -> None:
        with self._changed:
            if process not in step.running:
                return
            step.running.discard(process)
            self._changed.notify_all()
        self._report_exit(Exited(step.attempt, process, code, why))

    def _on_srun_exit(self, step: _Step, code: int) -> None:
        """Reports tasks that have not reported their end: they were killed, with their machine or
        without. One that could not begin on its node may on another.
        """
        with self._changed:
            self._steps.remove(step)
            self._changed.notify_all()
        step.close()
        if step.node and step.could_not_begin:
            self._queue.put(partial(self._start_elsewhere, step))
            return
        self._suspect_silent(step)
        for process in sorted(step.running):
            self._note_end(step, process, -9, f"srun ended with {code}")

    def _suspect_silent(self, step: _Step) -> None:
        """Suspects the nodes that have not told the end of a task, where others have."""
        silent = {self._nodes[each] for each in step.begun & step.running}
        if told := {self._nodes[each] for each in step.begun - step.running}:
            self._suspect |= silent - told

    def _start_elsewhere(self, step: _Step) -> list[Event]:
        if step.attempt == self._attempt:
            self._states[step.node] = "*"
            self._to_start |= step.running
        return self._start_later(step.attempt)

    # --- Events

    def events(self, timeout_s: float | None) -> Sequence[Event]:
        """Returns the next event, at the latest after `timeout_s`. Looks whom the coordinator has
        lost, of those that others can outlive: srun does not say whose machine is gone.
        """
        seen = super().events(_POLL_S if timeout_s is None else min(timeout_s, _POLL_S))
        for task in self.tasks():
            is_lost = LOST in task.error and task.state != coordination_pb2.CONNECTED
            if is_lost and task.progress.values.get("restartable"):
                for step in self._steps.copy():
                    if step.attempt == self._lives[task.task_id]:
                        self._note_end(step, task.task_id, -9, task.error)
        return seen

    # --- Orders

    def _order(self, *words: object) -> None:
        """Says a line to every task."""
        line = " ".join(map(str, words)) + "\n"
        for step in self._steps.copy():
            step.order(line.encode())

    def _signal(self, number: signal.Signals, processes: frozenset[int] | None) -> None:
        for process in [ALL] if processes is None else sorted(processes):
            self._order("signal", process, int(number))

    def _kill(self, processes: frozenset[int] | None) -> None:
        """Ends tasks, and a step with the last that runs of it."""
        for step in self._steps.copy():
            if name := step.end(processes):
                # It asks the controller, which may take a minute: the loop does not wait.
                threading.Thread(
                    target=self._scancel, args=(name,), name="holdfast-scancel", daemon=True
                ).start()
        self._signal(signal.SIGKILL, processes)

    def _scancel(self, step: str) -> None:
        target = f"{self._env['SLURM_JOB_ID']}.{step}"
        done = slurm("scancel", "--signal=KILL", target)
        if done.returncode:
            self._output.say(f"scancel --signal=KILL {target} failed: {done.stderr.strip()}")

    def _release(self) -> None:
        self._close_watch()
        # Else with the next attempt, or at the end.
        if not self._steps:
            self._close_coordinators()

    def _close_older(self) -> None:
        self._order("close")
        super()._close_older()

    def close(self) -> None:
        """Ends whatever still runs: the steps have `grace_s` seconds, then SIGKILL."""
        if not self._await_end(None, self._policy.grace_s):
            self._end(None)
            if not self._await_end(None, self._policy.grace_s):
                for step in self._steps.copy():
                    step.kill()
                self._await_end(None, _KILLED_END_S)
        self._close_coordinators()

    def _await_end(self, processes: frozenset[int] | None, timeout_s: float) -> bool:
        """Returns whether all tasks of processes (None: all steps) end within a time."""

        def have_ended() -> bool:
            if processes is None:
                return not self._steps
            return not any(step.running & processes for step in self._steps)

        with self._changed:
            return self._changed.wait_for(have_ended, min(timeout_s, threading.TIMEOUT_MAX))


def run_slurm(
    command: Sequence[str],
    settings: SlurmSettings = _AS_IT_COMES,
    environment: Mapping[str, str] = os.environ,
    *,
    output: Output | None = None,
) -> JobResult:
    """Runs `command` as the tasks of this Slurm allocation, to the end of the job. Blocks.

    Starts all again when one is lost, and that one alone where they call
    `multihost.run_restartable()`. SIGTERM, SIGINT and SIGUSR1 (ask for it with
    `#SBATCH --signal=B:USR1@60`) make the processes save and leave. A preempted job is handed back
    with `scontrol requeue`; then the call does not return before Slurm ends this process.

    Raises ValueError outside an allocation, and where no node is left beside the spares,
    ImportError where certificates cannot be made.
    """
    slurm_job = environment.get("SLURM_JOB_ID")
    if slurm_job is None:
        raise ValueError(
            "SLURM_JOB_ID is not set: `holdfast slurm` runs inside an allocation, as the last line"
            " of an sbatch script"
        )
    if not settings.insecure:
        require_cryptography()
    nodes, num_processes = _size(environment, settings.spares)
    job = Job(
        f"slurm-{slurm_job}",
        num_processes,
        num_processes,
        settings.restart,
        attempt=slurm_attempt(environment) - 1,
    )
    host = settings.host or (own_host() if nodes + settings.spares > 1 else "127.0.0.1")
    of_srun = {**environment, "SLURM_NNODES": str(nodes)}
    with console_unless(output, num_processes) as lines:
        engine = SlurmEngine(command, job.job_id, of_srun, lines, host=host, settings=settings)
        with passing_on(engine.forward, signal.SIGUSR1):
            result = engine.run(job)
            is_ours = result.outcome == "preempted" and not result.interrupted
            if is_ours and settings.requeue:
                _hand_back(slurm_job, lines)
    return result


def _size(environment: Mapping[str, str], spares: int) -> tuple[int, int]:
    """Returns how many nodes of the allocation the job uses beside its spares, and with how many
    processes.
    """
    nodes = int(environment.get("SLURM_JOB_NUM_NODES") or 1)
    used = nodes - spares
    if not 0 < used <= nodes:
        raise ValueError(
            f"spares={spares} in an allocation of {counted(nodes, 'node')}: expected"
            f" 0 to {nodes - 1}"
        )
    # With --ntasks, --ntasks-per-node is the most that a node has.
    tasks = int(environment.get("SLURM_NTASKS") or 0)
    fitting = int(environment.get("SLURM_NTASKS_PER_NODE") or 0) * used
    return used, min(filter(None, (tasks, fitting)), default=used)


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
