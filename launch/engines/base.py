"""What the engines share: events, signals, the coordinator's progress, and the run of a job."""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.json_format import MessageToDict

from holdfast.coordination import CoordinationError, Credentials
from holdfast.coordination.diagnosis.step_curve import StepCurve
from holdfast.coordination.diagnosis.summary import describe_goodput
from holdfast.coordination.process.job_folder import LaunchedJob
from holdfast.multihost import JobError
from holdfast.proto import session_pb2

from ..supervisor.engine import Engine, JobResult, supervise
from ..supervisor.goodput import LIVES, Goodput, GoodputMeter
from ..supervisor.job import (
    DONE,
    HANG,
    Action,
    Decision,
    Dismiss,
    Event,
    Exited,
    Grow,
    Job,
    Kill,
    Launch,
    Noticed,
    Notify,
    PrepareNext,
    Progressed,
    Rejoin,
    Release,
    Replace,
    Reserve,
    RestartPolicy,
    Stop,
    Stuck,
    Terminate,
)
from ..supervisor.ledger import Errand, Ledger
from ..view import LiveView, change_printer
from ..workers.output import Output
from ..workers.progress_watch import ProcessReport, ProgressWatch, newest
from ..workers.raised import RAISED
from ..workers.signals import passing_on

T = TypeVar("T")

SAME_PRESS_S = 0.3
"""A Ctrl-C that comes so soon after another is the same one."""

_MOST_EVENTS = 5000  # of all attempts together
NOT_STARTED = 127  # the exit code of a process that could not be started
_BY_SIGTERM = (-signal.SIGTERM, 128 + signal.SIGTERM)  # the latter from a shell


class BaseEngine(Engine):
    """Queues events and signals, and takes actions apart: an engine adds a method for each action.

    Everything but `forward`, `progress` and `status` belongs to the thread that made it.
    """

    replaces = False  # it carries out Rejoin and Replace

    def __init__(self, output: Output, policy: RestartPolicy) -> None:
        self._output = output
        self._policy = policy
        # What is called runs on the loop's thread, and returns events.
        self._queue: queue.SimpleQueue[Event | Stuck | Callable[[], Sequence[Event]]]
        self._queue = queue.SimpleQueue()
        self._attempt = 0
        self.launched_ms = time.time_ns() // 1_000_000
        self._to_start: set[int] = set()  # those of this attempt whose start was ordered
        self._watch: ProgressWatch | None = None
        self._explaining = threading.Lock()
        self._explained: ProgressWatch | None = None
        self._why_hung = ""  # in the attempt of that watch
        self._status = session_pb2.StatusResponse()
        self._came_s = 0.0  # when that came
        # Of the launcher, and of the attempts that are over.
        self._history: deque[session_pb2.Event] = deque(maxlen=_MOST_EVENTS)
        self._curve = StepCurve()
        self._ledger = Ledger(GoodputMeter(time.monotonic()))
        self._launcher = session_pb2.Launcher()
        self.errand = Errand()
        self.log_folder: Path | None = None  # where the processes' lines are, if anywhere
        self._address = ""  # of the last coordinator
        self._ended: LaunchedJob | None = None
        self._signals: list[signal.Signals] = []
        self._interrupted_s = -math.inf  # when the last Ctrl-C came
        self._sent_sigterm = False  # to the processes of this attempt
        self._stuck: set[int] = set()  # those that were ended, likewise

    def carry_out(self, action: Action) -> None:
        try:
            self._carry_out(action)
        except Exception:
            self._call_off(None, NOT_STARTED)
            raise

    def _carry_out(self, action: Action) -> None:
        match action:
            case Reserve():
                self._attempt = action.attempt
                self._reserve(action)
            case Launch():
                self._attempt = action.attempt
                self._to_start = set(range(action.num_processes))
                self._launch(action.attempt, action.num_processes)
            case Notify():
                if self._watch is not None:
                    # Its signal alone says no more than SIGTERM.
                    self._watch.give_notice("Ctrl-C" if action.why == "SIGINT" else action.why)
                self._call_off(None, -signal.SIGTERM)
                self._notify(action)
            case Grow():
                if self._watch is not None:
                    self._watch.ask_to_grow()
            case Dismiss():
                self._dismiss()
            case Terminate():
                self._terminate(processes=action.processes)
            case Kill():
                self._end(action.processes)
            case Release():
                self._release()
            case PrepareNext():
                self._prepare(action)
            case Rejoin():
                self._attempt = action.attempt
                self._to_start = set(range(action.num_processes)) - action.staying
                self._rejoin(action)
            case Replace():
                self._to_start |= action.processes  # of late ones, too
                self._replace(action)

    def _call_off(self, processes: frozenset[int] | None, code: int) -> None:
        """Reports the end of processes (None: all) that were to start, and do not any more."""
        for process in sorted(self._to_start):
            if processes is None or process in processes:
                self._to_start.discard(process)
                self._queue.put(Exited(self._attempt, process, code))

    def _reserve(self, action: Reserve) -> None:
        """Begins to find room; Reserved, Waiting or StartFailed is queued."""
        raise NotImplementedError

    def _launch(self, attempt: int, num_processes: int) -> None:
        """Starts the processes of an attempt in what was reserved."""
        raise NotImplementedError

    def _notify(self, action: Notify) -> None:
        """Has all processes save and leave."""
        self._terminate(processes=action.processes)

    def _dismiss(self) -> None:
        """Has those leave that wait for a next attempt."""
        raise NotImplementedError

    def _release(self) -> None:
        """Gives back all that is reserved for the attempt."""
        raise NotImplementedError

    def _prepare(self, action: PrepareNext) -> None:
        """Begins what the next attempt will need; by default nothing."""

    def _rejoin(self, action: Rejoin) -> None:
        """Opens an attempt, and says to those that outlive the one before where it is."""
        raise NotImplementedError

    def _replace(self, action: Replace) -> None:
        """Starts processes of this attempt anew."""
        raise NotImplementedError

    def _open_watch(
        self, address: str, attempt: int, credentials: Credentials | None = None
    ) -> None:
        """Begins to watch the coordinator of a new attempt."""
        self._sent_sigterm = False
        self._address = address
        self._output.say(f"attempt {attempt}, coordinator at {address}")
        self._watch = ProgressWatch(
            address,
            attempt,
            self._queue.put,
            credentials,
            policy=self._policy,
            say=self._output.say,
            account=self._account,
            replaces=self.replaces,
        )
        self._stuck = set()
        for event in newest(self._history):
            self._watch.note(event)

    def observe(self, before: Job, decision: Decision, ledger: Ledger) -> None:
        """Takes a decision: the coordinators know how the job is, and each change of it."""
        after = decision.job
        self._ledger = ledger
        changed = (after.state, after.attempt) != (before.state, before.attempt)
        if changed or after.why_waiting != before.why_waiting:
            self._tell(decision)
        if changed:
            self.note(f"attempt {after.attempt} is {after.state}: {decision.reason}")
        over = before.state in LIVES and after.state not in LIVES
        if over and after.alive and after.error is not None:
            self._end_attempt(after.attempt, after.error)

    def _tell(self, decision: Decision) -> None:
        job = decision.job
        self._launcher = self.errand.launcher(decision, self._ledger)
        if job.final:
            return  # `leave_verdict` says how
        # Only a page is worse off without it.
        with contextlib.suppress(OSError, CoordinationError):
            self._launched(job.job_id).leave()

    def _launched(self, job_id: str, **ended: Any) -> LaunchedJob:
        return LaunchedJob(
            job_id=job_id,
            pid=os.getpid(),
            log_dir="" if self.log_folder is None else str(self.log_folder.absolute()),
            launcher=MessageToDict(self._launcher, preserving_proto_field_name=True),
            address=self._address,
            **ended,
        )

    def _account(self) -> tuple[session_pb2.Launcher, Goodput]:
        return self._launcher, self._ledger.meter.goodput(time.monotonic())

    def _terminate(
        self, number: signal.Signals = signal.SIGTERM, processes: frozenset[int] | None = None
    ) -> None:
        """Has processes (None: all) end, or save and leave."""
        self._sent_sigterm = True
        self._call_off(processes, -number)
        self._signal(number, processes)

    def _signal(self, number: signal.Signals, processes: frozenset[int] | None) -> None:
        """Sends a signal to processes; None: to all."""
        raise NotImplementedError

    def _end(self, processes: frozenset[int] | None = None) -> None:
        """Ends processes (None: all) now, also those that have yet to start."""
        self._call_off(processes, -signal.SIGKILL)
        self._kill(processes)

    def _kill(self, processes: frozenset[int] | None = None) -> None:
        """Ends processes (None: all), and what they started, now."""
        raise NotImplementedError

    def note(self, text: str) -> None:
        """Adds a line to the job's history, at this attempt's coordinator and those that follow."""
        event = session_pb2.Event(unix_s=time.time(), kind="launcher", text=text)
        self._history.append(event)
        if self._watch is not None:
            self._watch.note(event)

    def _end_attempt(self, attempt: int, error: JobError) -> None:
        """Has the processes of an attempt log that it is over, and why. Takes at most 1 s."""
        if self._watch is not None:
            why = str(error).replace(f" in attempt {attempt}", "")
            self._watch.end_attempt(f"attempt {attempt} is over: {why}")

    def forward(self, number: int) -> None:
        """Takes a signal of the launcher. Signal-safe.

        The first signal stops the job, the second repeats SIGTERM, the third kills. A second Ctrl-C
        kills.
        """
        self._queue.put(partial(self._on_signal, signal.Signals(number)))

    def progress(self) -> tuple[ProcessReport, ...]:
        """Returns what the processes of this attempt last reported."""
        watch = self._watch
        return watch.processes if watch is not None else ()

    def status(self) -> session_pb2.StatusResponse:
        """Returns the last status of this attempt, or of the one before where there is none yet.
        Ages and goodput are those of now, whether a coordinator answers or not.
        """
        watch = self._watch
        last = self._status
        came_s = self._came_s
        if watch is not None and watch.status.num_processes:
            last = watch.status
            came_s = watch.came_s
        now_s = time.monotonic()
        status = session_pb2.StatusResponse()
        status.CopyFrom(last)
        for task in status.tasks:
            for name in ("heartbeat_age_s", "step_age_s"):
                age_s = getattr(task, name)
                if age_s >= 0:
                    setattr(task, name, age_s + now_s - came_s)
        status.goodput_s.update(vars(self._ledger.meter.goodput(now_s)))
        return status

    def events(self, timeout_s: float | None) -> Sequence[Event]:
        """Returns the next event, at the latest after `timeout_s`."""
        try:
            wait_s = timeout_s and min(timeout_s, threading.TIMEOUT_MAX)
            item = self._queue.get(block=timeout_s != 0, timeout=wait_s)
        except queue.Empty:
            return []
        if isinstance(item, Stuck):
            return self._on_stuck(item)
        return item() if callable(item) else [item]

    def _on_stuck(self, stuck: Stuck) -> list[Event]:
        """Ends a process that has failed, and that its other threads or hooks keep."""
        if self._watch is not None and stuck.attempt == self._watch.attempt:
            text = f"process {stuck.process} has failed, and does not end: {stuck.why}; ending it"
            self._output.say(text)
            self.note(text)
            self._stuck.add(stuck.process)
            self._end(frozenset({stuck.process}))
        return []

    def _on_signal(self, number: signal.Signals) -> list[Event]:
        if number is signal.SIGINT and self._is_same_press():
            return []
        self._signals.append(number)
        if len(self._signals) == 1:
            return [Stop(number.name)]
        if len(self._signals) == 2 and self._signals.count(signal.SIGINT) < 2:
            self._terminate()
        else:
            self._end()
        return []

    def _is_same_press(self) -> bool:
        """Says whether a SIGINT is of a Ctrl-C that was heard: a wrapper such as `uv run` passes on
        what the terminal has sent to all.
        """
        now_s = time.monotonic()
        since_s = now_s - self._interrupted_s
        self._interrupted_s = now_s
        return since_s < SAME_PRESS_S

    def _report_exit(self, event: Exited) -> None:
        """Reports the end of a process to the coordinator, and queues it.

        The progress that the process had reported is queued before its end. A process that has not
        joined has no handler of SIGTERM yet: a SIGTERM that was not ours is a notice to all.
        """
        watch = self._watch
        joined = False
        met = self._attempt - 1  # before it has a coordinator that is watched
        if watch is not None:
            watch.report_exit(event.process, event.code)
            watch.refresh()
            joined = event.process in watch.joined
            why = self._explain_hang(watch) if event.code == HANG else ""
            event = replace(event, why=why or event.why or watch.last_words(event.process))
            met = watch.attempt - watch.gathers
            # A pipe ends with the code of its last command, and some shells with 0.
            hidden = event.code == DONE and watch.raised(event.process)
            if hidden or event.process in self._stuck:
                event = replace(event, code=RAISED)
        if event.code in _BY_SIGTERM and not self._sent_sigterm and not joined:
            self._queue.put(Noticed(f"process {event.process} (SIGTERM before it had joined)"))
        self._queue.put(replace(event, met=met))

    def _explain_hang(self, watch: ProgressWatch) -> str:
        """Returns which processes keep the others waiting, and where, "" where that is not known;
        says it once in an attempt.

        The processes that hang have left their stacks at the coordinator.
        """
        with self._explaining:
            if self._explained is not watch:
                self._explained = watch
                # Those that have failed did so because it hangs.
                found = [each.text for each in watch.diagnose() if each.kind != "failed"]
                self._why_hung = "; ".join(found[:1])
                for text in found:
                    self._output.say(f"hang: {text}")
            return self._why_hung

    def _close_watch(self) -> None:
        watch = self._watch
        self._watch = None
        if watch is not None:
            watch.close()
            self._status = watch.status
            self._came_s = watch.came_s
            for point in watch.curve.samples():
                self._curve.add(point)
            self._history.extend(watch.own_events())

    def leave_verdict(self, result: JobResult) -> None:
        """Has `holdfast status` find, for an hour, how the job ended."""
        ended = self._launched(result.job_id, ended_unix_s=time.time(), exit_code=result.exit_code)
        self._ended = ended
        try:
            ended.leave()
        except (OSError, CoordinationError) as error:
            if self._address:  # without a coordinator the job has said the same
                self._output.say(f"`holdfast status` will not find how the job ended: {error}")

    def leave_status(self, file: Path, result: JobResult) -> None:
        """Writes how the job ended, its last status and its history, as JSON.

        `holdfast run` makes a page of it.
        """
        last = result.reasons[-1] if result.reasons else ""
        kept = {
            "unix_s": time.time(),
            "outcome": f"{result.outcome}: {last}",
            "status": MessageToDict(self._whole_status(result.goodput)),
            "samples": self._curve.samples(),
            "ended": None if self._ended is None else asdict(self._ended),
        }
        try:
            whole = file.with_suffix(".new")
            whole.write_text(json.dumps(kept))
            whole.replace(file)
        except OSError as error:
            self._output.say(f"{file} cannot be written: {error.strerror}")

    def _whole_status(self, goodput: Goodput) -> session_pb2.StatusResponse:
        """Returns the last status, with the events of all attempts and of the launcher."""
        status = session_pb2.StatusResponse()
        status.CopyFrom(self._status)
        del status.events[:]
        status.events.extend(sorted(self._history, key=lambda event: event.unix_s))
        status.goodput_s.update(vars(goodput))
        status.launcher.CopyFrom(self._launcher)
        return status


def chosen(every: Mapping[int, T], processes: frozenset[int] | None) -> list[T]:
    """Returns what there is for those of the processes (None: all) that were started."""
    return [it for process, it in every.items() if processes is None or process in processes]


def has_step(events: Iterable[Event]) -> bool:
    """Returns whether a step of the attempt is among what has happened."""
    return any(isinstance(event, Progressed) and event.step >= 0 for event in events)


def some_can_stay(events: Iterable[Event]) -> bool:
    """Returns whether processes have said that they can outlive the attempt."""
    return any(isinstance(event, Progressed) and event.restartable for event in events)


def run_job(
    job: Job, engine: BaseEngine, output: Output, view: LiveView | None = None
) -> JobResult:
    """Runs a job to its end. Blocks.

    The job's changes of state go to `output`, and at last how it ended; the launcher's signals go
    to the engine.
    """
    if view is not None:
        view.follow(engine.progress)
    print_change = change_printer(output, first_attempt=job.attempt + 1)

    def on_decision(before: Job, decision: Decision, event: Event, ledger: Ledger) -> None:
        if view is not None:
            view.observe(before, decision)
        print_change(before, decision)
        engine.observe(before, decision, ledger)

    with passing_on(engine.forward):
        result = supervise(job, engine, on_decision=on_decision)
    engine.leave_verdict(result)
    if result.step >= 0:
        output.say(describe_goodput(vars(result.goodput)))
    if result.outlived:
        output.say(f"processes stayed in {result.outlived} of {result.attempts} attempts")
    output.say(result.summary)
    return result
