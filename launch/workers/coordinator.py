"""The coordinator of one attempt, and what processes report to it, as events: progress, and notices of preemption."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from holdfast.coordination import CoordinationError, CoordinationService, StatusClient
from holdfast.proto import session_pb2

from ..supervisor.job import Event, Notice, Progress, Withdrawn

_SYNC = "holdfast/sync"  # where multihost's sync points keep their keys
_NOTICE_KEY = re.compile(r"holdfast/sync/.*/notices/(\d+)")
_POLL_S = 0.5


@dataclass(frozen=True)
class ProcessProgress:
    """What one process last reported; -1 where it never did."""

    process: int
    step: int
    saved_step: int
    heartbeat_age_s: float
    error: str


class ProgressWatch:
    """Polls the coordinator at `address` twice a second for the progress of the processes; `report` gets what is new.

    That is Progress, and a Notice that one process got by itself (a signal, its machine's metadata): whoever leaves after it is not done,
    whatever its exit code.

    A thread of its own polls; `refresh` polls at once, from any thread. A coordinator that does not answer is no event: the processes
    notice its death themselves.
    """

    def __init__(self, address: str, attempt: int, report: Callable[[Event], None]) -> None:
        self._attempt, self._report = attempt, report
        self._client = StatusClient(address, timeout_s=1.0)
        self._lock = threading.Lock()
        self._reported = (-1, -1, False)
        self._notices: set[str] = set()
        self._closed = threading.Event()
        self.processes: tuple[ProcessProgress, ...] = ()
        self._thread = threading.Thread(target=self._run, name="holdfast-progress", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed.wait(_POLL_S):
            self.refresh()

    def refresh(self) -> None:
        """Polls now, and reports what is new before it returns; takes at most 2 s."""
        with self._lock, contextlib.suppress(CoordinationError):
            status = self._client.status()
            self.processes = tuple(_progress(task) for task in status.tasks)
            step = max((process.step for process in self.processes), default=-1)
            saved = max((process.saved_step for process in self.processes), default=-1)
            done = len(status.tasks) > 0 and all(task.progress.values.get("done", 0) for task in status.tasks)
            if (step, saved, done) != self._reported:
                self._reported = step, saved, done
                self._report(Progress(self._attempt, step, saved, done))
            if self._notices or any(prefix.prefix == "holdfast" for prefix in status.prefixes):
                self._report_notices(self._client.key_value_dir_get_bytes(_SYNC))

    def _report_notices(self, entries: Iterable[tuple[str, bytes]]) -> None:
        seen: set[str] = set()
        for key, value in entries:
            if match := _NOTICE_KEY.fullmatch(key):
                notice = json.loads(value)
                source = f"process {match[1]} ({notice['reason']})"
                seen.add(source)
                if source not in self._notices:
                    at = notice.get("deadline_unix_s")
                    self._report(Notice(source, None if at is None else time.monotonic() + at - time.time(), delivered=True))
        for source in self._notices - seen:
            self._report(Withdrawn(source))
        self._notices = seen

    def close(self) -> None:
        """Stops polling."""
        self._closed.set()
        self._thread.join()
        self._client.close()


def _progress(task: session_pb2.TaskStatus) -> ProcessProgress:
    progress = task.progress
    step = progress.step if progress.HasField("step") else -1
    saved = progress.saved_step if progress.HasField("saved_step") else -1
    return ProcessProgress(task.task_id, step, saved, task.heartbeat_age_s, task.error)


class Coordinator:
    """The coordinator of one (job, attempt), in a process of its own, on a free port."""

    def __init__(self, job_id: str, attempt: int, num_processes: int, *, host: str = "127.0.0.1") -> None:
        self._service = CoordinationService.spawn(
            num_processes,
            host=host,
            job=job_id,
            attempt=attempt,
            recoverable=True,
            survivable=True,
            linger_s=10.0,
            startup_timeout_s=3600.0,
        )

    @property
    def pid(self) -> int:
        """Its process id, and its group's."""
        return self._service.pid

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return str(self._service.address)

    def close(self) -> None:
        """Ends it."""
        self._service.close()
