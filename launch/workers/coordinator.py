"""The coordinator of one attempt, and what processes report to it, as events: progress, and notices
of preemption.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from holdfast.coordination import (
    CoordinationError,
    CoordinationService,
    Credentials,
    Endpoint,
    JobIdentity,
    ServiceTimeouts,
    StatusClient,
)
from holdfast.coordination.diagnosis.findings import Evidence, Finding, diagnose
from holdfast.coordination.diagnosis.stacks import fold
from holdfast.coordination.diagnosis.stall import (
    StallRule,
    describe_stragglers,
    find_stall,
    find_stragglers,
)
from holdfast.coordination.diagnosis.step_curve import StepCurve, sample
from holdfast.coordination.process.diagnose import gather
from holdfast.coordination.process.job_folder import JobFolder, RunningJob
from holdfast.multihost import StartupFailed
from holdfast.multihost.group.group import SaveStage
from holdfast.proto import coordination_pb2, session_pb2

from ..supervisor.goodput import Goodput
from ..supervisor.job import (
    NO_SAVE,
    Event,
    Noticed,
    Progressed,
    RestartPolicy,
    SavePosition,
    Stalled,
    Withdrawn,
)
from .secrets import JobSecrets, credentials_in, server_arguments, write_files

HEARTBEAT_TIMEOUT_S = 60.0
"""Silence after which a process of a launched job is lost: for hosts that vanish. The death of a
process is known at once.
"""

_STARTUP_TIMEOUT_S = 3600.0
_SYNC = "holdfast/sync"  # where multihost's sync points keep their keys
_NOTICE_KEY = re.compile(r"holdfast/sync/.*/notices/(\d+)")
_POLL_S = 0.5
_REAP_S = 10.0
_MOST_EVENTS = 1000
_MOST_STACKS = 4  # of processes that keep a job waiting
MOST_HISTORY = 200  # lines of a launcher that a new coordinator is told


@dataclass(frozen=True)
class ProcessProgress:
    """What one process last reported; -1 where it never did."""

    process: int
    step: int
    saved_step: int
    heartbeat_age_s: float
    error: str


class ProgressWatch:
    """Polls the coordinator at `address` twice a second for the progress of the processes; `report`
    gets what is new.

    That is Progressed, and a Notice that one process got by itself (a signal, its machine's
    metadata): whoever leaves after it is not done, whatever its exit code. By the policy's rules,
    too, that the job has Stalled, once; who keeps it waiting, and where, goes to `say`.

    The coordinator gets `goodput()`, for the status. A thread of its own polls; `refresh` polls at
    once, from any thread. A coordinator that does not answer is no event: the processes notice its
    death themselves.
    """

    def __init__(
        self,
        address: str,
        attempt: int,
        report: Callable[[Event], None],
        credentials: Credentials | None = None,
        *,
        policy: RestartPolicy,
        say: Callable[[str], None],
        goodput: Callable[[], Goodput] = Goodput,
    ) -> None:
        self._attempt = attempt
        self._report = report
        self._say = say
        self._goodput = goodput
        self._rule = StallRule(
            policy.stall_timeout_s, policy.startup_timeout_s, policy.straggler_steps
        )
        self._stragglers: set[int] = set()  # that were reported
        self._stalled = False
        self._client = StatusClient(address, credentials, timeout_s=1.0)
        self._lock = threading.Lock()
        self._reported = Progressed(attempt)
        self._ours: set[int] = (
            set()
        )  # processes that have had a Session, as a poll saw or what they said of a save shows
        self._notices: set[str] = set()
        self._history: deque[tuple[float, str]] = deque(maxlen=MOST_HISTORY)
        self._closed = threading.Event()
        self.status = session_pb2.StatusResponse()  # the last that came
        self.events: deque[session_pb2.Event] = deque(maxlen=_MOST_EVENTS)
        self.curve = StepCurve()
        self.processes: tuple[ProcessProgress, ...] = ()
        self.joined: frozenset[int] = frozenset()  # processes of a job that has gathered
        self._connected = 0
        self._thread = threading.Thread(target=self._run, name="holdfast-progress", daemon=True)
        self._thread.start()

    def note(self, unix_s: float, text: str) -> None:
        """Adds a line to the job's history at the coordinator, with the next poll."""
        self._history.append((unix_s, text))

    def _run(self) -> None:
        while not self._closed.wait(_POLL_S):
            self.refresh()
            with contextlib.suppress(CoordinationError):
                self._judge_steps()

    def _judge_steps(self) -> None:
        """Reports a job that hangs, and processes that are far behind: with stacks, after whose
        taking it must still be so.
        """
        rule = self._rule
        if not self._stalled and rule.timeout_s < math.inf and find_stall(self.status, rule):
            evidence = gather(self._client, hangs=True)
            if why := find_stall(evidence.status, rule):
                self._stalled = True
                self._report_stall(why, evidence)
        if (
            rule.straggler_steps < math.inf
            and {task.task_id for task in find_stragglers(self.status, rule)} - self._stragglers
        ):
            evidence = gather(self._client, with_stacks=True)
            if new := [
                task
                for task in find_stragglers(evidence.status, rule)
                if task.task_id not in self._stragglers
            ]:
                self._stragglers |= {task.task_id for task in new}
                self._say(text := f"straggler: {describe_stragglers(evidence, new)}")
                self.note(time.time(), text)

    def _report_stall(self, why: str, evidence: Evidence) -> None:
        findings = diagnose(evidence)
        for finding in findings:
            self._say(f"hang: {finding.text}")
        odd = findings[0].processes if findings else ()
        for process in odd[:_MOST_STACKS]:
            if samples := evidence.stacks.get(process):
                self._say(f"stacks of process {process}:\n{fold(samples[-1])}")
        silent = frozenset(
            process
            for finding in findings
            if finding.kind == "unheard"
            for process in finding.processes
        )
        self._report(
            Stalled(
                self._attempt,
                "; ".join([why, *(finding.text for finding in findings[:1])]),
                odd,
                silent,
            )
        )

    def refresh(self) -> None:
        """Polls now, and reports what is new before it returns; takes at most 3 s."""
        with self._lock, contextlib.suppress(CoordinationError):
            self._send_history()
            self._client.report_goodput(vars(self._goodput()))
            status = self._client.status(
                with_events=True, events_after=self.events[-1].number if self.events else 0
            )
            self.events.extend(status.events)
            self.status = status
            self.curve.add(sample(status, time.time()))
            self.processes = tuple(_progress(task) for task in status.tasks)
            if status.phase != "gathering":
                self.joined |= {task.task_id for task in status.tasks if task.heartbeat_age_s >= 0}
            self._connected = sum(task.state == coordination_pb2.CONNECTED for task in status.tasks)
            step = max((process.step for process in self.processes), default=-1)
            saved = max((process.saved_step for process in self.processes), default=-1)
            done = len(status.tasks) > 0 and all(
                task.progress.values.get("done", 0) for task in status.tasks
            )
            self._ours |= {
                task.task_id
                for task in status.tasks
                if task.has_session or "save_stage" in task.progress.values
            }
            saves = {process: _save_position(status.tasks[process]) for process in self._ours}
            progress = Progressed(
                self._attempt,
                step,
                saved,
                done,
                saves,
                _most(status, "restore_s"),
                _most(status, "save_blocked_s"),
            )
            if progress != self._reported:
                self._reported = progress
                self._report(progress)
            if self._notices or any(prefix.prefix == "holdfast" for prefix in status.prefixes):
                self._report_notices(self._client.key_value_dir_get_bytes(_SYNC))

    def _send_history(self) -> None:
        while self._history:
            unix_s, text = self._history[0]
            self._client.report_event("launcher", text, unix_s)
            self._history.popleft()

    def diagnose(self) -> list[Finding]:
        """Returns why the job hangs, nothing where the coordinator does not answer. Blocks for at
        most a minute.
        """
        with contextlib.suppress(CoordinationError):
            return diagnose(gather(self._client, hangs=True))
        return []

    def report_exit(self, process: int, code: int) -> None:
        """Reports the end of a process to the coordinator, which ends at once what waits for it;
        takes at most 1 s.
        """
        with contextlib.suppress(CoordinationError):  # it is gone, and nobody waits there
            self._client.report_exit(process, code)

    def end_attempt(self, why: str) -> None:
        """Says through the coordinator that the attempt is over; takes at most 1 s."""
        with contextlib.suppress(CoordinationError):
            self._client.end_attempt(why)

    def still_needed(self, ended_well: bool) -> bool:
        """Returns whether processes needed the coordinator that has ended; one that ends well by
        itself is not needed for a start.
        """
        return self._connected > 0 or (not ended_well and not self.joined)

    def _report_notices(self, entries: Iterable[tuple[str, bytes]]) -> None:
        seen: set[str] = set()
        for key, value in entries:
            if match := _NOTICE_KEY.fullmatch(key):
                notice = json.loads(value)
                source = f"process {match[1]} ({notice['reason']})"
                seen.add(source)
                if source not in self._notices:
                    at = notice.get("deadline_unix_s")
                    self._report(
                        Noticed(
                            source,
                            None if at is None else time.monotonic() + at - time.time(),
                            delivered=True,
                        )
                    )
        for source in self._notices - seen:
            self._report(Withdrawn(source))
        self._notices = seen

    def close(self) -> None:
        """Stops polling."""
        self._closed.set()
        self._thread.join()
        self._client.close()


def report_exit(address: str, process: int, code: int) -> None:
    """Reports the end of a process to the coordinator at `address`, or its relay, unless that is
    gone; takes at most 1 s.
    """
    with contextlib.suppress(CoordinationError), StatusClient(address, timeout_s=1.0) as client:
        client.report_exit(process, code)


def _most(status: session_pb2.StatusResponse, name: str) -> float:
    return max((task.progress.values.get(name, 0.0) for task in status.tasks), default=0.0)


def _save_position(task: session_pb2.TaskStatus) -> SavePosition:
    values = task.progress.values
    return (
        SavePosition(int(values["save"]), SaveStage(int(values["save_stage"])))
        if "save_stage" in values
        else NO_SAVE
    )


def _progress(task: session_pb2.TaskStatus) -> ProcessProgress:
    progress = task.progress
    step = progress.step if progress.HasField("step") else -1
    saved = progress.saved_step if progress.HasField("saved_step") else -1
    return ProcessProgress(task.task_id, step, saved, task.heartbeat_age_s, task.error)


def _folder(attempt: int) -> JobFolder:
    try:
        return JobFolder.create()
    except CoordinationError as error:
        raise StartupFailed(f"the coordinator cannot start: {error}", attempt=attempt) from error


class Coordinator:
    """The coordinator of one (job, attempt), in a process of its own: at a free port of `host`, or
    at a socket of this user's alone.

    With `secured`, its callers show the certificates and the token that are made for it. It ends
    with this process, unless `outlives_us`. Raises StartupFailed, which no other attempt can mend,
    where it does not start.
    """

    def __init__(
        self,
        job_id: str,
        attempt: int,
        num_processes: int,
        *,
        host: str | None = None,
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
        log_file: Path | None = None,
        outlives_us: bool = False,
        secured: bool = False,
    ) -> None:
        self._closed = threading.Event()
        self._folder = _folder(attempt)
        self.secrets: JobSecrets | None = None
        self.credentials = Credentials()
        arguments: list[str] = []
        if log_file is not None:
            arguments.append(f"--log-file={log_file}")
        if not outlives_us:
            arguments.append("--end-with-input")
        try:
            if secured:
                assert host is not None, "a socket needs no secrets"
                self.secrets = JobSecrets.create([host])
                self.credentials = credentials_in(self._folder, self.secrets)
                write_files(self._folder.path, self.secrets.files_of_server())
                arguments += server_arguments(self._folder.path)
            self._service = CoordinationService.spawn(
                num_processes,
                job=JobIdentity(name=job_id, attempt=attempt),
                endpoint=Endpoint(host=host or self._folder.socket),
                timeouts=ServiceTimeouts(
                    heartbeat_s=heartbeat_timeout_s,
                    linger_s=10.0,
                    startup_s=_STARTUP_TIMEOUT_S if outlives_us else 0,
                ),
                recoverable=True,
                survivable=True,
                arguments=tuple(arguments),
            )
        except (CoordinationError, OSError, ImportError) as error:
            self._folder.remove()
            raise StartupFailed(
                f"the coordinator cannot start: {error}", attempt=attempt
            ) from error
        self._folder.publish(RunningJob(job_id, attempt, self.address, self._service.pid))

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._service.pid

    @property
    def address(self) -> str:
        """HOST:PORT, or unix:PATH."""
        return str(self._service.address)

    def on_end(self, report: Callable[[int], None]) -> None:
        """Has `report` called once, on a thread of its own, with the exit code (minus the signal's
        number) when it ends before `close`.
        """

        def wait() -> None:
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            if not self._closed.is_set():
                report(self._service.wait(_REAP_S))

        threading.Thread(target=wait, name="holdfast-coordinator-end", daemon=True).start()

    def close(self) -> None:
        """Ends it."""
        self._closed.set()
        self._service.close()
        self._folder.remove()
