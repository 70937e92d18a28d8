"""The coordinator of one attempt, and the progress that it hears of, as events."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from holdfast.proto import session_pb2

from ._job import Event, Progress

_STATUS = "/holdfast.Coordination/GetStatus"
_EVERY_S = 0.5


@dataclass(frozen=True)
class ProcessProgress:
    """Is what one process last reported; -1 where it never did."""

    process: int
    step: int
    saved_step: int
    heartbeat_age_s: float
    error: str


class ProgressWatch:
    """Asks the coordinator at `address` twice a second how far the processes are; `tell` gets Progress when something is new.

    A thread of its own asks; `refresh` asks at once, from any thread. A coordinator that does not answer is no event: what it had to
    say was said, and its death is noticed by the processes.
    """

    def __init__(self, address: str, attempt: int, tell: Callable[[Event], None]) -> None:
        self._attempt, self._tell = attempt, tell
        self._channel = grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])
        self._status = self._channel.unary_unary(
            _STATUS, session_pb2.StatusRequest.SerializeToString, session_pb2.StatusResponse.FromString
        )
        self._lock = threading.Lock()
        self._told = (-1, -1, False)
        self._closed = threading.Event()
        self.processes: tuple[ProcessProgress, ...] = ()
        self._thread = threading.Thread(target=self._run, name="holdfast-progress", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed.wait(_EVERY_S):
            self.refresh()

    def refresh(self, timeout_s: float = 1.0) -> None:
        """Asks now, and tells what is new before it returns."""
        with self._lock, contextlib.suppress(grpc.RpcError, ValueError):
            status = self._status(session_pb2.StatusRequest(), timeout=timeout_s)
            self.processes = tuple(_progress(task) for task in status.tasks)
            step = max((process.step for process in self.processes), default=-1)
            saved = max((process.saved_step for process in self.processes), default=-1)
            done = len(status.tasks) > 0 and all(task.progress.values.get("done", 0) for task in status.tasks)
            if (step, saved, done) != self._told:
                self._told = step, saved, done
                self._tell(Progress(self._attempt, step, saved, done))

    def close(self) -> None:
        """Stops asking."""
        self._closed.set()
        self._thread.join()
        self._channel.close()


def _progress(task: session_pb2.TaskStatus) -> ProcessProgress:
    told = task.progress
    step = told.step if told.HasField("step") else -1
    saved = told.saved_step if told.HasField("saved_step") else -1
    return ProcessProgress(task.task_id, step, saved, task.heartbeat_age_s, task.error)


class Coordinator:
    """Is the coordinator that belongs to one (job, attempt), in a process of its own, on a port that is free now."""

    def __init__(self, job_id: str, attempt: int, count: int, *, host: str = "127.0.0.1") -> None:
        from holdfast.coordination import CoordinationService

        self._service = CoordinationService.spawn(
            count, host=host, job=job_id, attempt=attempt, recoverable=True, survivable=True, linger_s=10.0, startup_timeout_s=3600.0
        )

    @property
    def pid(self) -> int:
        """Is its process id, and its group's."""
        return self._service.pid

    @property
    def address(self) -> str:
        """Is HOST:PORT."""
        return str(self._service.address)

    def close(self) -> None:
        """Ends it."""
        self._service.close()
