"""What the engines share: events, signals, the lives of processes, the coordinators of attempts,
what is told there of progress, and the run of a job.
"""

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from google.protobuf.json_format import MessageToDict

from holdfast.coordination import CoordinationError, Credentials
from holdfast.coordination.diagnosis.step_curve import StepCurve
from holdfast.coordination.diagnosis.summary import describe_goodput
from holdfast.coordination.process.job_folder import LaunchedJob
from holdfast.multihost import JobError
from holdfast.proto import session_pb2

from ..supervisor.engine import Engine, JobResult, start_failed, supervise
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
    State,
    Stop,
    Stuck,
    Terminate,
    renumbered,
)
from ..supervisor.ledger import Errand, Ledger
from ..view import LiveView
from ..workers.output import Output
from ..workers.progress_watch import ProgressWatch, newest
from ..workers.raised import RAISED
from ..workers.signals import passing_on

T = TypeVar("T")

SAME_PRESS_S = 0.3
"""A Ctrl-C that comes so soon after another is the same one."""

_MOST_EVENTS = 5000  # of all attempts together
FOR_EVER_S = 1e8  # where a limit has to be a number
MOST_LOOKS = 4
"""At so many processes that are late: each takes up to 6 s."""
_NOT_STARTED = 127  # the exit code of a process that could not be started
_BY_SIGTERM = (-signal.SIGTERM, 128 + signal.SIGTERM)  # the latter from a shell
_ORDINARY = (State.SCHEDULING, State.RUNNING)


class AttemptCoordinator(Protocol):
    """The coordinator of one attempt, wherever it runs."""

    @property
    def address(self) -> str:
        """HOST:PORT, or unix:PATH."""

    def end_attempt(self, following: session_pb2.NextAttempt) -> None:
        """Says to those that outlive its attempt where the next one is; takes at most 1 s."""

    def close(self) -> None:
        """Ends it."""


class BaseEngine(Engine):
    """Queues events and signals, and takes actions apart: an engine adds a method for each action.

    It keeps the processes that outlive an attempt, and its coordinator until all of them are in the
    next one. Everything but `forward`, `tasks` and `status` belongs to the thread that made it.
    """

    replaces = True  # it is given Rejoin and Replace

    def __init__(self, output: Output, policy: RestartPolicy) -> None:
        self._output = output
        self._policy = policy
        # What is called runs on the loop's thread, and returns events.
        self._queue: queue.SimpleQueue[Event | Stuck | Callable[[], Sequence[Event]]]
        self._queue = queue.SimpleQueue()
        self._attempt = 0
        self._num_processes = 0  # of the attempt
        self._lives: dict[int, int] = {}  # the attempt that each process was started for
        self._gone: dict[int, int] = {}  # exit codes of the latest lives that have ended
        self._pids: dict[int, int] = {}  # of the processes of the attempt before
        self._coordinator: AttemptCoordinator | None = None
        # Of attempts that processes outlive, until these are in the one that runs.
        self._older: list[AttemptCoordinator] = []
        self.launched_ms = time.time_ns() // 1_000_000
        self._to_start: set[int] = set()  # those of this attempt whose start was ordered
        self._watch: ProgressWatch | None = None
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
        self._has_stepped = False  # this attempt
        self._sent_sigterm = False  # to the processes of this attempt
        self._stuck: set[int] = set()  # those that were ended, likewise

    def carry_out(self, action: Action) -> None:
        try:
            self._carry_out(action)
        except Exception:
            self._call_off(None, _NOT_STARTED)
            raise

    def _carry_out(self, action: Action) -> None:
        match action:
            case Reserve():
                self._attempt = action.attempt
                self._reserve(action)
            case Launch():
                self._attempt = action.attempt
                self._lives = {}
                self._begin_attempt(action.num_processes, frozenset())
                self._launch()
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
                self._terminate(action.processes)
            case Kill():
                self._end(action.processes)
            case Release():
                self._release()
            case PrepareNext():
                self._prepare(action)
            case Rejoin():
                self._attempt = action.attempt
                self._leave_attempt(action.numbers_before)
                self._begin_attempt(action.num_processes, action.staying)
                self._rejoin(action)
            case Replace():
                missed = self._staying & action.processes - self._gone.keys()
                self._begin_lives(action.processes)
                self._replace(action.processes, missed)

    # --- Lives, and the attempts that some of them outlive

    def _begin_attempt(self, num_processes: int, staying: frozenset[int]) -> None:
        """Counts the processes of an attempt as started for it, but for those that stay."""
        self._num_processes = num_processes
        self._to_start = set()
        self._begin_lives(frozenset(range(num_processes)) - staying)

    def _begin_lives(self, processes: frozenset[int]) -> None:
        """Counts processes as started for this attempt: from here on, earlier ends are no news."""
        self._to_start |= processes
        self._lives |= dict.fromkeys(processes, self._attempt)
        for process in processes:
            self._gone.pop(process, None)

    @property
    def _staying(self) -> frozenset[int]:
        """The processes of this attempt that have outlived one."""
        lives = self._lives.items()
        outlived = frozenset(process for process, life in lives if life < self._attempt)
        return outlived.intersection(range(self._num_processes))

    def _leave_attempt(self, numbers_before: Sequence[int]) -> None:
        """Keeps the coordinator of the attempt that is over for those that stay, and knows them by
        their new numbers.
        """
        assert self._coordinator is not None
        self._older.append(self._coordinator)
        self._close_watch()
        self._pids |= {task.task_id: task.pid for task in self._status.tasks if task.pid}
        if numbers_before:
            self._lives = renumbered(self._lives, numbers_before)
            self._gone = renumbered(self._gone, numbers_before)
            self._pids = renumbered(self._pids, numbers_before)

    def _hand_over(self, action: Rejoin) -> None:
        """Says to those that stay where the attempt is that has begun: its watch is open."""
        assert self._coordinator is not None
        for process in sorted(self._staying & self._gone.keys()):  # it ended beside this
            assert self._watch is not None
            self._watch.report_exit(process, self._gone[process])
        following = session_pb2.NextAttempt(
            attempt=action.attempt,
            coordinator=self._coordinator.address,
            staying=sorted(map(action.number_before, action.staying - action.going)),
            saving=sorted(map(action.number_before, action.saving)),
            why=f"attempt {action.attempt - 1} is over: {action.why}",
            num_processes=action.num_processes,
            startup_timeout_s=min(self._policy.startup_timeout_s, FOR_EVER_S),
            places={
                action.number_before(process): place for process, place in self._places().items()
            },
        )
        # One that is on its way to an attempt between finds out there, and has to where its number
        # was another one before that.
        numbers = action.numbers_before
        is_same = numbers == tuple(range(len(numbers)))
        for older in self._older if is_same else self._older[-1:]:
            older.end_attempt(following)

    def _places(self) -> Mapping[int, session_pb2.Place]:
        """Returns who those are that stay, where that may change."""
        return {}

    def _dismiss(self) -> None:
        """Has those leave that wait for a next attempt."""
        if self._coordinator is not None:
            self._coordinator.end_attempt(session_pb2.NextAttempt(why="no process stays"))

    def _start_ordered(self) -> None:
        """Starts the processes of the attempt that are still to start."""
        raise NotImplementedError

    def _start_later(self, attempt: int) -> list[Event]:
        """Starts them, once there is room, unless the attempt is over by then."""
        if attempt != self._attempt:
            return []
        try:
            self._start_ordered()
        except Exception as error:
            return self._not_started(error)
        return []

    def _not_started(self, error: Exception) -> list[Event]:
        """Returns the word that the attempt could not start, since an error came later."""
        self._call_off(None, _NOT_STARTED)
        return [start_failed(self._attempt, error)]

    def _say_late(self, attempt: int, process: int, place: str) -> None:
        """Says where a process is that was to be in an attempt, and is replaced."""
        where = place or "code that cannot be seen"
        text = f"process {process} did not come to attempt {attempt}: it is in {where}"
        self._output.say(text)
        self.note(text)

    def _close_older(self) -> None:
        while self._older:
            self._older.pop().close()

    def _close_coordinators(self) -> None:
        self._close_watch()
        self._close_older()
        if self._coordinator is not None:
            self._coordinator.close()
            self._coordinator = None

    def _call_off(self, processes: frozenset[int] | None, code: int) -> None:
        """Reports the end of processes (None: all) that were to start, and do not any more."""
        for process in sorted(self._to_start):
            if processes is None or process in processes:
                self._to_start.discard(process)
                self._queue.put(Exited(self._attempt, process, code))

    # --- What an engine adds

    def _reserve(self, action: Reserve) -> None:
        """Begins to find room; Reserved, Waiting or StartFailed is queued."""
        raise NotImplementedError

    def _launch(self) -> None:
        """Starts the processes of the attempt in what was reserved."""
        raise NotImplementedError

    def _notify(self, action: Notify) -> None:
        """Has all processes save and leave."""
        self._terminate(action.processes)

    def _release(self) -> None:
        """Gives back all that is reserved for the attempt."""
        raise NotImplementedError

    def _prepare(self, action: PrepareNext) -> None:
        """Begins what the next attempt will need; by default nothing."""

    def _rejoin(self, action: Rejoin) -> None:
        """Opens an attempt, and says to those that outlive the one before where it is."""
        raise NotImplementedError

    def _replace(self, processes: frozenset[int], missed: frozenset[int]) -> None:
        """Starts processes of this attempt anew, some of them since they did not come to it."""
        raise NotImplementedError

    # --- What is told of the job

    def _open_watch(self, address: str, credentials: Credentials | None = None) -> None:
        """Begins to watch the coordinator of a new attempt."""
        self._has_stepped = False
        self._sent_sigterm = False
        self._address = address
        self._output.say(f"attempt {self._attempt}, coordinator at {address}")
        self._watch = ProgressWatch(
            address,
            self._attempt,
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
        """Takes a decision: the coordinators know how the job is, and each change of it. So does
        the output, but for the ordinary course of the first attempt, and the end.
        """
        after = decision.job
        self._ledger = ledger
        changed = (after.state, after.attempt) != (before.state, before.attempt)
        if changed or after.why_waiting != before.why_waiting:
            self._tell(decision)
        if changed:
            self.note(f"attempt {after.attempt} is {after.state}: {decision.reason}")
            is_ordinary = len(ledger.attempts) == 1 and after.state in _ORDINARY
            if not (is_ordinary or after.final):  # the last line says more
                self._output.say(f"{after.state}: {decision.reason}")
        over = before.state in LIVES and after.state not in LIVES
        if over and after.alive and after.error is not None:
            self._end_attempt(after.attempt, after.error)

    def _tell(self, decision: Decision) -> None:
        job = decision.job
        self._launcher = self.errand.launcher(decision, self._ledger)
        if job.final:
            return  # `_leave_verdict` says how
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

    def _terminate(self, processes: frozenset[int] | None) -> None:
        """Has processes (None: all) end, or save and leave."""
        self._sent_sigterm = True
        self._call_off(processes, -signal.SIGTERM)
        self._signal(signal.SIGTERM, processes)

    def _signal(self, number: signal.Signals, processes: frozenset[int] | None) -> None:
        """Sends a signal to processes; None: to all."""
        raise NotImplementedError

    def _end(self, processes: frozenset[int] | None) -> None:
        """Ends processes (None: all) now, also those that have yet to start."""
        self._call_off(processes, -signal.SIGKILL)
        self._kill(processes)

    def _kill(self, processes: frozenset[int] | None) -> None:
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

    def tasks(self) -> Sequence[session_pb2.TaskStatus]:
        """Returns the processes of this attempt as they were told last."""
        watch = self._watch
        return watch.status.tasks if watch is not None else ()

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

    # --- Events

    def events(self, timeout_s: float | None) -> Sequence[Event]:
        """Returns the next event, at the latest after `timeout_s`."""
        try:
            wait_s = timeout_s and min(timeout_s, threading.TIMEOUT_MAX)
            item = self._queue.get(block=timeout_s != 0, timeout=wait_s)
        except queue.Empty:
            return []
        if isinstance(item, Stuck):
            return self._on_stuck(item)
        if isinstance(item, Progressed) and item.attempt == self._attempt:
            self._on_progress(item)
        return item() if callable(item) else [item]

    def _on_progress(self, event: Progressed) -> None:
        if self._older and self._staying <= event.saves.keys():
            self._close_older()
        # The last that is seen may come when the attempt has been given back.
        if event.step >= 0 and self._watch is not None and not self._has_stepped:
            self._has_stepped = True
            self._on_first_step(can_stay=bool(event.restartable))

    def _on_first_step(self, *, can_stay: bool) -> None:
        """Begins what waits for the next attempt; by default nothing. With `can_stay` some have
        said that they can outlive this one.
        """

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
            self._terminate(None)
        else:
            self._end(None)
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
        if self._lives.get(event.process) != event.life:
            return  # it has been replaced
        self._gone[event.process] = event.code
        watch = self._watch
        joined = False
        met = self._attempt - 1  # before it has a coordinator that is watched
        if watch is not None:
            watch.report_exit(event.process, event.code)
            watch.refresh()
            joined = event.process in watch.joined
            why = watch.explain_hang() if event.code == HANG else ""
            event = replace(event, why=why or event.why or watch.last_words(event.process))
            met = watch.attempt - watch.gathers
            # A pipe ends with the code of its last command, and some shells with 0.
            hidden = event.code == DONE and watch.raised(event.process)
            if hidden or event.process in self._stuck:
                event = replace(event, code=RAISED)
            if event.code == RAISED and not event.why:
                event = replace(event, why=watch.why_never(event.process))
        if event.code in _BY_SIGTERM and not self._sent_sigterm and not joined:
            self._queue.put(Noticed(f"process {event.process} (SIGTERM before it had joined)"))
        self._queue.put(replace(event, met=met))

    # --- The run, and how it ended

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

    def run(self, job: Job, view: LiveView | None = None) -> JobResult:
        """Runs a job to its end, and takes the launcher's signals meanwhile. Blocks.

        The job's changes of state go to the output, and at last how it ended.
        """
        if view is not None:
            view.follow(self.tasks)

        def on_decision(before: Job, decision: Decision, event: Event, ledger: Ledger) -> None:
            if view is not None:
                view.observe(decision.job)
            self.observe(before, decision, ledger)

        with passing_on(self.forward):
            result = supervise(job, self, on_decision=on_decision)
        self._leave_verdict(result)
        if self.log_folder is not None:
            self._leave_status(self.log_folder / "status.json", result)
        say = self._output.say
        if result.step >= 0:
            say(describe_goodput(vars(result.goodput)))
        if result.outlived:
            say(f"processes stayed in {result.outlived} of {result.attempts} attempts")
        say(result.summary)
        return result

    def _leave_verdict(self, result: JobResult) -> None:
        """Has `holdfast status` find, for an hour, how the job ended."""
        ended = self._launched(result.job_id, ended_unix_s=time.time(), exit_code=result.exit_code)
        self._ended = ended
        try:
            ended.leave()
        except (OSError, CoordinationError) as error:
            if self._address:  # without a coordinator the job has said the same
                self._output.say(f"`holdfast status` will not find how the job ended: {error}")

    def _leave_status(self, file: Path, result: JobResult) -> None:
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
