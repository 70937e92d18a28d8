"""What the processes of an attempt report to their coordinator, as events of the supervisor."""

from __future__ import annotations

import contextlib
import json
import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from holdfast.coordination import CoordinationError, Credentials, StatusClient
from holdfast.coordination.client.followed_status import FollowedStatus
from holdfast.coordination.diagnosis.findings import (
    Evidence,
    Finding,
    diagnose,
    own_words,
    raised_by,
)
from holdfast.coordination.diagnosis.stacks import fold
from holdfast.coordination.diagnosis.stall import (
    StallRule,
    describe_stragglers,
    find_stall,
    find_stragglers,
)
from holdfast.coordination.diagnosis.summary import SAVED, counted
from holdfast.coordination.names import DEFECT
from holdfast.coordination.process.diagnose import gather
from holdfast.coordination.vitals import ENDS_WITH
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
    Stuck,
    Withdrawn,
)
from .raised import Grace, save_position

_MOST_HISTORY = 200  # events that a new coordinator is told: so many saves, and so many others

_SYNC = "holdfast/sync"  # where multihost's sync points keep their keys
_NOTICE_KEY = re.compile(r"holdfast/sync/.*/notices/(\d+)")
_LAUNCHER = "launcher"  # the kind of its own events
_CLOCK_S = 0.01  # by which the time of an event that was told may differ
NOBODY_S = 60.0
"""After so long the launcher says that nobody has joined."""

_BEHIND_S = 2.0
_POLL_S = 0.5
_MOST_STACKS = 4  # of processes that keep a job waiting
_MOST_DEAF = 8  # processes that are named


class Reported:
    """What the processes of an attempt have reported, as far as decisions go by it.

    It takes those alone that have changed: a job may have thousands.
    """

    def __init__(self) -> None:
        self.heard: set[int] = set()
        self.raised: dict[int, str] = {}  # the exceptions that have left main threads
        # Of processes that have had a Session, as a poll saw or what they said of a save shows.
        self.saves: dict[int, SavePosition] = {}
        self._step = -1
        self._saved_step = -1
        self._seconds = dict.fromkeys(("restore_s", "save_blocked_s", "compile_s"), 0.0)
        self._those = {name: set[int]() for name in ("done", "leaving", "restartable", "held")}

    def take(self, task: session_pb2.TaskStatus) -> None:
        """Takes what a status says of a process."""
        process = task.task_id
        progress = task.progress
        values = progress.values
        if task.heartbeat_age_s >= 0:
            self.heard.add(process)
        if process in self.saves or task.has_session or "save_stage" in values:
            self.saves[process] = save_position(task)
        self.raised[process] = raised_by(task)
        self._step = max(self._step, _step(task))
        if progress.HasField("saved_step"):
            self._saved_step = max(self._saved_step, progress.saved_step)
        for name, most_s in self._seconds.items():
            self._seconds[name] = max(most_s, values.get(name, 0.0))
        for name, those in self._those.items():
            those.discard(process)
            if values.get(name):
                those.add(process)

    def progressed(self, attempt: int, num_processes: int) -> Progressed:
        """Returns all of it as an event."""
        those = self._those
        return Progressed(
            attempt,
            self._step,
            self._saved_step,
            0 < num_processes == len(those["done"]),
            saves=dict(self.saves),
            restored_s=self._seconds["restore_s"],
            blocked_s=self._seconds["save_blocked_s"],
            compiled_s=self._seconds["compile_s"],
            leaving=frozenset(those["leaving"]),
            restartable=frozenset(those["restartable"]),
            held=frozenset(those["held"]),
        )


class ProgressWatch:
    """Polls the coordinator at `address` twice a second; `on_event` gets what is new.

    That is progress, and a notice that one process got by itself (a signal, its machine's
    metadata): a process that leaves after it is not done, whatever its exit code. By the policy's
    rules, too, that the job has stalled, once; which processes keep it waiting, and where, goes to
    `say`. The coordinator gets `account()`, for the status. Only an engine that `replaces`
    processes hears which can outlive the attempt.

    A thread of its own polls; `refresh` polls at once, from any thread. A coordinator that does not
    answer is no event: the processes notice its death themselves.
    """

    def __init__(
        self,
        address: str,
        attempt: int,
        on_event: Callable[[Event | Stuck], None],
        credentials: Credentials | None = None,
        *,
        policy: RestartPolicy,
        say: Callable[[str], None],
        account: Callable[[], tuple[session_pb2.Launcher, Goodput]],
        replaces: bool,
    ) -> None:
        self.attempt = attempt
        self._replaces = replaces
        self._on_event = on_event
        self._say = say
        self._account = account
        self._rule = StallRule(
            policy.stall_timeout_s, policy.startup_timeout_s, policy.straggler_steps
        )
        self._stragglers: set[int] = set()  # that were said
        self._grace = Grace(policy.grace_s, policy.commit_grace_s)
        self._stuck: set[int] = set()  # those that were reported
        self._said_nobody = False
        self._said_deaf = False
        # When a notice was there first.
        self._at_notice: session_pb2.StatusResponse | None = None
        self._behind_s = _BEHIND_S  # of a wait for devices that is said
        self._stalled = False
        self._explaining = threading.Lock()
        self._why_hung: str | None = None
        self._client = StatusClient(address, credentials, timeout_s=1.0)
        self._followed = FollowedStatus(self._client)
        self._lock = threading.Lock()
        self._last = Progressed(attempt)
        self._reported = Reported()
        self._notices: set[str] = set()
        self._history: deque[session_pb2.Event] = deque()
        self._grows = False  # the coordinator has yet to hear that there is room for more
        self._told_until_s = 0.0  # the latest event of an attempt before that was told
        self._defects: set[str] = set()  # that were said
        self._closed = threading.Event()
        self.status = session_pb2.StatusResponse()  # the last that came
        self.came_s = 0.0  # when that was
        self.gathers = False  # by the last look, if it was answered
        self.events = self._followed.events
        self.curve = self._followed.curve
        self.joined: frozenset[int] = frozenset()  # processes of a job that has gathered
        threading.Thread(target=self._run, name="holdfast-progress", daemon=True).start()

    def note(self, event: session_pb2.Event) -> None:
        """Adds an event to the job's history at the coordinator, with the next poll."""
        self._history.append(event)
        if event.kind != _LAUNCHER:
            self._told_until_s = max(self._told_until_s, event.unix_s + _CLOCK_S)

    def _announce(self, text: str) -> None:
        self._say(text)
        self.note(session_pb2.Event(unix_s=time.time(), kind=_LAUNCHER, text=text))

    def own_events(self) -> list[session_pb2.Event]:
        """Returns the events of this attempt that the launcher did not tell itself."""
        return [
            event
            for event in self.events
            if event.kind != _LAUNCHER and event.unix_s > self._told_until_s
        ]

    def _run(self) -> None:
        while not self._closed.wait(_POLL_S):
            self.refresh()
            self._find_nobody()
            if not self._notices:
                self._at_notice = None
            else:
                self._at_notice = self._at_notice or self.status
                self._find_deaf(self._at_notice)
                self._find_behind(self._at_notice)
            self._find_stuck()
            with contextlib.suppress(CoordinationError):
                self._find_stall()
                self._find_stragglers()

    def _find_nobody(self) -> None:
        """Says, once, that no process has joined: most likely none ever asks to."""
        status = self.status
        is_expected = status.num_processes > 1 and status.phase == "gathering"
        for_s = status.up_s - self._rule.waited_s
        if self._said_nobody or not is_expected or for_s < NOBODY_S:
            return
        self._said_nobody = True
        if all(task.state == coordination_pb2.UNINITIALIZED for task in status.tasks):
            self._announce(
                f"none of the {status.num_processes} processes has joined the job after"
                f" {for_s:.0f} s: call holdfast.multihost.initialize() at the start of the"
                " program; without it each of them trains alone"
            )

    def _find_deaf(self, before: session_pb2.StatusResponse) -> None:
        """Says, once, who makes steps after a notice and has never asked for one: it does not know
        that it is to leave.
        """
        if self._said_deaf:
            return
        # Each asks before it makes the next step that it is told of.
        going_on = [
            task.task_id
            for task in self.status.tasks
            if 0 <= _step(before.tasks[task.task_id]) < _step(task)
            and _stays(task)
            and not task.progress.asks_preemption
        ]
        if going_on:
            self._said_deaf = True
            names = ", ".join(map(str, going_on[:_MOST_DEAF]))
            more = ", ..." if len(going_on) > _MOST_DEAF else ""
            who = "process" if len(going_on) == 1 else "processes"
            self._announce(
                f"{who} {names}{more}: the loop does not ask reached_preemption(step): it goes on"
                " until --preemption-grace-s"
            )

    def _find_behind(self, before: session_pb2.StatusResponse) -> None:
        """Says, each time that the wait has doubled, whose last save waits for its devices: the
        loop has made steps that they have not.
        """
        waits_s, process = max(
            (task.progress.values.get("for_devices_s", 0.0), task.task_id)
            for task in self.status.tasks
        )
        if waits_s < self._behind_s:
            return
        self._behind_s = 2 * waits_s
        steps = int(waits_s * before.tasks[process].steps_per_second)
        behind = f"{counted(steps, 'step')} or more behind" if steps else "behind"
        self._announce(
            f"process {process}: a save has waited {waits_s:.0f} s for its devices, which are"
            f" {behind}; give save or should_save each step, and the state"
        )

    def _find_stuck(self) -> None:
        """Reports, once each, processes that an exception ends, and that have not ended in time."""
        for process, raised in self._reported.raised.copy().items():
            position = self._reported.saves.get(process, NO_SAVE)
            is_over = raised and self._grace.is_over(process, position)
            if is_over and process not in self._stuck:
                self._stuck.add(process)
                self._on_event(Stuck(self.attempt, process, self.raised(process)))

    def raised(self, process: int) -> str:
        """Returns the first line of the exception that ends a process, "" for none."""
        said = self._own_words(process)
        if not said.startswith(ENDS_WITH):
            said = self._reported.raised.get(process, "")
        return _first_line(said.removeprefix(ENDS_WITH))

    def last_words(self, process: int) -> str:
        """Returns the first line of what a process said of its own end, "" for nothing."""
        return self.raised(process) or _first_line(self._own_words(process))

    def _own_words(self, process: int) -> str:
        tasks = self.status.tasks
        # None has answered yet, or it is one of the attempt before, which had more.
        return own_words(process, tasks[process].error) if process < len(tasks) else ""

    def why_never(self, process: int) -> str:
        """Returns what may be amiss where one of several processes failed before it had joined."""
        tasks = self.status.tasks
        if len(tasks) < 2 or process >= len(tasks):
            return ""
        if tasks[process].state != coordination_pb2.UNINITIALIZED:
            return ""
        return "it had not joined the others (holdfast.multihost.initialize())"

    @property
    def with_session(self) -> frozenset[int]:
        """The processes that have had a client of ours."""
        return frozenset(self._reported.saves)

    # --- Hangs

    def _find_stall(self) -> None:
        rule = self._rule
        if self._stalled or rule.timeout_s == math.inf or not find_stall(self.status, rule):
            return
        # Stacks take seconds to come, and the job may have made a step meanwhile.
        evidence = gather(self._client, hangs=True)
        if why := find_stall(evidence.status, rule):
            self._stalled = True
            self._say_stall(why, evidence)

    def _say_stall(self, why: str, evidence: Evidence) -> None:
        findings = diagnose(evidence)
        for finding in findings:
            self._say(f"hang: {finding.text}")
        odd = findings[0].processes if findings else ()
        for process in odd[:_MOST_STACKS]:
            if samples := evidence.stacks.get(process):
                self._say(f"stacks of process {process}:\n{fold(samples[-1])}")
        unheard = [finding.processes for finding in findings if finding.kind == "unheard"]
        silent = frozenset(process for processes in unheard for process in processes)
        reasons = [why, *(finding.text for finding in findings[:1])]
        self._on_event(Stalled(self.attempt, "; ".join(reasons), odd, silent))

    def _find_stragglers(self) -> None:
        rule = self._rule
        if rule.straggler_steps == math.inf or not self._new_stragglers(self.status):
            return
        evidence = gather(self._client, with_stacks=True)
        if new := self._new_stragglers(evidence.status):
            self._stragglers |= {task.task_id for task in new}
            self._announce(f"straggler: {describe_stragglers(evidence, new)}")

    def _new_stragglers(self, status: session_pb2.StatusResponse) -> list[session_pb2.TaskStatus]:
        stragglers = find_stragglers(status, self._rule)
        return [task for task in stragglers if task.task_id not in self._stragglers]

    def explain_hang(self) -> str:
        """Returns which processes keep the others waiting, and where, "" where that is not known;
        says it once. Blocks for at most a minute.

        The processes that hang have left their stacks at the coordinator.
        """
        with self._explaining:
            if self._why_hung is None:
                found: list[Finding] = []
                with contextlib.suppress(CoordinationError):
                    found = diagnose(gather(self._client, hangs=True))
                # Those that have failed did so because it hangs.
                texts = [each.text for each in found if each.kind != "failed"]
                for text in texts:
                    self._say(f"hang: {text}")
                self._why_hung = "; ".join(texts[:1])
            return self._why_hung

    # --- Progress

    def refresh(self) -> None:
        """Polls now, and gives on what is new before it returns; takes at most 3 s."""
        # The lock keeps events in order: a process's end must not overtake its progress.
        with self._lock:
            self.gathers = False
            try:
                self._poll()
            except CoordinationError as error:
                _, mark, rest = str(error).partition(DEFECT)
                if mark:
                    self._say_defect(mark + rest)

    def _say_defect(self, text: str) -> None:
        """Says, once, what is wrong with the coordinator: a launcher that cannot read the status
        finds no hang, and counts no step.
        """
        if text not in self._defects:
            self._defects.add(text)
            self._say(text)

    def _poll(self) -> None:
        self._send_history()
        if self._grows:
            self._client.ask_to_grow()
            self._grows = False
        launcher, goodput = self._account()
        self._client.report_launcher(launcher, vars(goodput))
        status = self._followed.look()
        self._take(status, self._followed.changed)
        progress = self._reported.progressed(self.attempt, status.num_processes)
        if not self._replaces:
            progress = replace(progress, restartable=frozenset())
        # Before the word that all have left their loops: it is for them that they have.
        if self._notices or any(prefix.prefix == "holdfast" for prefix in status.prefixes):
            self._take_notices(self._client.key_value_dir_get_bytes(_SYNC))
        if progress != self._last:
            self._last = progress
            self._on_event(progress)

    def _send_history(self) -> None:
        while self._history:
            event = self._history[0]
            self._client.report_event(event.kind, event.text, event.unix_s)
            self._history.popleft()  # sent: a coordinator that did not answer gets it again

    def _take(self, status: session_pb2.StatusResponse, changed: Iterable[int]) -> None:
        if not self.status.num_processes:
            self._rule = replace(self._rule, waited_s=status.up_s)
        self.status = status
        self.came_s = time.monotonic()
        self.gathers = status.phase == "gathering"
        for sentence in status.defects:
            self._say_defect(sentence)
        for process in changed:
            self._reported.take(status.tasks[process])
        if not self.gathers and len(self.joined) < len(self._reported.heard):
            self.joined = frozenset(self._reported.heard)

    def _take_notices(self, entries: Iterable[tuple[str, bytes]]) -> None:
        standing: set[str] = set()
        for key, value in entries:
            if match := _NOTICE_KEY.fullmatch(key):
                notice = json.loads(value)
                source = f"process {match[1]} ({notice['reason']})"
                standing.add(source)
                at = notice.get("deadline_unix_s")
                deadline = None if at is None else time.monotonic() + at - time.time()
                who = frozenset({int(match[1])})
                noticed = Noticed(source, deadline, True, who, self.attempt)
                if source not in self._notices:
                    self._on_event(noticed)
        for source in self._notices - standing:
            self._on_event(Withdrawn(source))
        self._notices = standing

    # --- Ends

    def report_exit(self, process: int, code: int) -> None:
        """Reports the end of a process to the coordinator; takes at most 1 s.

        The coordinator ends at once what waits for the process.
        """
        with contextlib.suppress(CoordinationError):  # it is gone, and nobody waits there
            self._client.report_exit(process, code)

    def end_attempt(self, why: str) -> None:
        """Says through the coordinator that the attempt is over; takes at most 1 s."""
        with contextlib.suppress(CoordinationError):
            self._client.end_attempt(why)

    def give_notice(self, why: str) -> None:
        """Says through the coordinator why a notice comes, before it does; takes at most 1 s."""
        with contextlib.suppress(CoordinationError):
            self._client.give_notice(why)

    def ask_to_grow(self) -> None:
        """Has process 0 hear, with the next poll, that there is room for more."""
        self._grows = True

    def still_needed(self, ended_well: bool) -> bool:
        """Returns whether processes needed the coordinator that has ended.

        One that ends well knows that no process is there any more, whatever was heard of them last.
        Those that leave have exit codes of their own.
        """
        if ended_well:
            return False
        return any(map(_stays, self.status.tasks)) or not self.joined

    def close(self) -> None:
        """Stops polling; what a diagnosis would have found is not told any more."""
        self._closed.set()
        with self._lock:  # a poll comes to its end
            self._client.close()


def _step(task: session_pb2.TaskStatus) -> int:
    return task.progress.step if task.progress.HasField("step") else -1


def _stays(task: session_pb2.TaskStatus) -> bool:
    """Returns whether a process is there, and has not begun to leave."""
    is_leaving = task.progress.values.get("leaving")
    return task.state == coordination_pb2.CONNECTED and not is_leaving


def _first_line(text: str) -> str:
    first, _, _ = text.partition("\n")
    return first


def newest(history: Iterable[session_pb2.Event]) -> list[session_pb2.Event]:
    """Returns what a new coordinator is told: of saves and restores, and of all else, the last."""
    kept: dict[bool, deque[session_pb2.Event]] = {
        is_save: deque(maxlen=_MOST_HISTORY) for is_save in (False, True)
    }
    for event in history:
        kept[event.kind in (SAVED, "restored")].append(event)
    return sorted([*kept[False], *kept[True]], key=lambda event: event.unix_s)
