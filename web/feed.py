"""What all viewers of a job see: one thread asks the coordinator, whatever their number.

Another thread asks why the job does not get on.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.json_format import ParseDict

from holdfast.coordination import CoordinationError, Credentials, StatusClient
from holdfast.coordination.client.followed_status import FollowedStatus
from holdfast.coordination.diagnosis.findings import (
    Evidence,
    Finding,
    at_later,
    diagnose,
    wants_stacks,
)
from holdfast.coordination.diagnosis.stacks import whole
from holdfast.coordination.diagnosis.step_curve import StepCurve
from holdfast.coordination.diagnosis.summary import printable
from holdfast.coordination.diagnosis.verdict import OVER, judge
from holdfast.coordination.process.diagnose import gather
from holdfast.coordination.process.job_folder import LaunchedJob
from holdfast.proto import session_pb2

from .process_ranges import kinds_of, ranges_of
from .snapshot import encode, rows, snapshot

_INTERVAL_S = 1.0
_PROCESSES_PER_S = 512  # asked for in a second: a job of 4,096 is drawn every eight seconds
_DIAGNOSIS_INTERVAL_S = 10.0
_PASSING_S = 10.0  # between a coordinator that has ended and its launcher's word
_LEFT = "Left by its watchdog: "
_MOST_LOG_BYTES = 65_536
_MOST_LOG_LINES = 200
_MOST_HISTORY = 65_536  # points of all processes together
_LEAST_HISTORY = 4
_MOST_HISTORY_EACH = 600
_STACKS_PER_S = 64  # of a large job less often: a stack is tens of KB


@dataclass(frozen=True)
class CoordinatorAddress:
    """Where the coordinator of a job is."""

    address: str
    credentials: Credentials


class Feed:
    """Asks for the state of a job until `close()`, and publishes it. A context manager.

    `publish` gets each snapshot as JSON. `find` returns the coordinator as of now, None where there
    is none; it may be another one after a restart. `publish` is called from threads of the feed.
    """

    def __init__(
        self,
        find: Callable[[], CoordinatorAddress | None],
        publish: Callable[[str], None],
        launched: Callable[[str], LaunchedJob | None] = lambda job: None,
    ) -> None:
        self._launched = launched
        self._histories: dict[int, deque[tuple[float, ...]]] = {}
        self._find = find
        self._publish = publish
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._client: StatusClient | None = None
        self._followed: FollowedStatus | None = None  # by that client
        self._target: CoordinatorAddress | None = None
        self._status = session_pb2.StatusResponse()  # empty until a coordinator has answered
        self._evidence = Evidence(self._status)  # of the last look at processes
        self._findings: list[Finding] = []
        self._curve = StepCurve()
        self._gone = ""  # why there is no newer status
        self._answered_s = -math.inf
        self._is_launched = False  # by a launcher on this machine
        self._wanted = threading.Event()  # stacks
        self._threads = [
            threading.Thread(target=run, daemon=True) for run in (self._watch, self._explain)
        ]
        for thread in self._threads:
            thread.start()

    def stacks(self, process_id: int) -> str:
        """Returns where the threads of a process are, or why that cannot be known.

        Blocks for at most 30 s.
        """
        with self._lock:
            client = self._client
        if client is None:
            return "there is no coordinator now"
        answer = str(client.stacks([process_id])[0])
        found, mark, left = answer.partition(_LEFT)
        return f"{whole(found) or found}{mark}{left}"

    def history(self, process_id: int) -> str:
        """Returns what was known of a process over time, as JSON: when, steps per second, bytes of
        memory and the share of its time that it waits, oldest first. -1: not known.
        """
        with self._lock:
            known = tuple(self._histories.get(process_id, ()))
        return json.dumps(known)

    def range(self, number: int) -> str:
        """Returns the processes of a range of the last snapshot, as JSON; none where it is gone."""
        status = self._status
        ranges = ranges_of(status)
        if number >= len(ranges):
            return "[]"
        gone = self._gone
        kinds = kinds_of(status, self._findings, judge(status, self._findings, gone=gone).state)
        its = ranges[number]
        return encode(rows(status, kinds, range(its.begin, its.end), is_now=not gone))

    def log(self, process_id: int) -> str:
        """Returns the last lines of a process, or why there are none."""
        word = self._word()
        if word is None or not word.log_dir:
            return "the lines of this process are in no file on this machine: see --log-dir"
        path = Path(word.log_dir, f"process-{process_id}.log")
        try:
            with path.open("rb") as stream:
                stream.seek(max(0, path.stat().st_size - _MOST_LOG_BYTES))
                text = stream.read().decode(errors="replace")
        except OSError as error:
            return f"{path}: {error.strerror}"
        return printable("\n".join(text.splitlines()[-_MOST_LOG_LINES:]), lines=True)

    def close(self) -> None:
        """Stops asking."""
        self._closed.set()
        self._wanted.set()
        self._reach(None)
        for thread in self._threads:
            thread.join(10)

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _watch(self) -> None:
        wait_s = 0.0
        while not self._closed.wait(wait_s):
            self._gone = self._lasting(self._ask())
            self._take_word(self._gone)
            shown = snapshot(
                self._status,
                self._findings,
                self._curve.samples(),
                unix_s=time.time(),
                gone=self._gone,
            )
            self._publish(encode(shown))
            wait_s = max(_INTERVAL_S, self._status.num_processes / _PROCESSES_PER_S)

    def _word(self) -> LaunchedJob | None:
        return self._launched(self._status.job)

    def _lasting(self, gone: str) -> str:
        """Returns why there is no answer, "" for a while where a launcher here runs the job: its
        coordinator ends with the last process, before the launcher has said how the job ended.
        """
        now_s = time.monotonic()
        if not gone:
            self._answered_s = now_s
            self._is_launched = self._is_launched or self._word() is not None
        elif self._is_launched and now_s < self._answered_s + _PASSING_S:
            word = self._word()
            if word is None or word.launcher["state"] == "running":
                return ""
        return gone

    def _take_word(self, gone: str) -> None:
        """Takes the launcher's own word where no coordinator passes it on."""
        word = self._word() if gone else None
        if word is None:
            return
        status = session_pb2.StatusResponse()
        status.CopyFrom(self._status)
        status.launcher.ClearField("waiting_for")
        status.launcher.ClearField("attempts")
        # A launcher of a later version may say more.
        ParseDict(word.launcher, status.launcher, ignore_unknown_fields=True)
        self._status = status
        if judge(status, gone=gone).state in OVER:
            self._findings = [each for each in self._findings if each.kind == "failed"]

    def _remember(self, status: session_pb2.StatusResponse) -> None:
        """Keeps what is known of each process now; of many processes, less far back."""
        most = max(_LEAST_HISTORY, _MOST_HISTORY // max(1, len(status.tasks)))
        for task in status.tasks:
            values = task.progress.values
            point = (
                round(time.time(), 1),
                round(task.steps_per_second, 3) if task.step_age_s >= 0 else -1.0,
                values.get("memory_bytes", -1.0),
                round(values.get("waiting_share", -1.0), 3),
            )
            with self._lock:
                kept = self._histories.setdefault(
                    task.task_id, deque(maxlen=min(_MOST_HISTORY_EACH, most))
                )
                kept.append(point)

    def _ask(self) -> str:
        """Brings the status up to date; returns why that could not be done, "" where it was."""
        target = self._find()
        if target is None:
            return "the job has no coordinator now: it is over, or between two attempts"
        try:
            self._status = self._look(target)
        except (CoordinationError, ValueError) as error:  # or its token is no text
            return f"the coordinator at {target.address} does not answer: {error}"
        self._remember(self._status)
        if wants_stacks(self._status):
            self._wanted.set()
        self._findings = diagnose(at_later(self._evidence, self._status))
        return ""

    def _look(self, target: CoordinatorAddress) -> session_pb2.StatusResponse:
        if target != self._target:
            self._reach(target)
        assert self._followed is not None
        status = self._followed.look()
        if self._status.num_processes and status.job != self._status.job:
            # Another job has a coordinator at this address.
            self._curve = StepCurve()
            with self._lock:
                self._histories.clear()
            self._reach(target)
            status = self._followed.look()
        return status

    def _reach(self, target: CoordinatorAddress | None) -> None:
        client: StatusClient | None = None
        followed: FollowedStatus | None = None
        if target is not None:
            client = StatusClient(target.address, target.credentials, timeout_s=5.0)
            followed = FollowedStatus(client, self._curve)
        with self._lock:
            old = self._client
            self._client = client
            self._followed = followed
            self._target = target
        if old is not None:
            old.close()

    def _explain(self) -> None:
        while not self._closed.is_set():
            self._wanted.wait()
            client = self._client
            if client is not None:
                with contextlib.suppress(CoordinationError):
                    self._evidence = gather(client)
            self._wanted.clear()
            count = self._status.num_processes
            self._closed.wait(max(_DIAGNOSIS_INTERVAL_S, count / _STACKS_PER_S))
