"""The processes of a job as the service sees them, and the listeners that are notified of
changes.
"""

from __future__ import annotations

import logging
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from holdfast.proto import coordination_pb2 as pb
from holdfast.proto import session_pb2 as spb

from .answers import status_name

log = logging.getLogger("holdfast.coordination")


@dataclass(frozen=True)
class ProcessInfo:
    """One process of the job. `state` is "UNINITIALIZED", "CONNECTED", "DISCONNECTED" or "ERROR";
    `code` and `message` are its error's.

    `incarnation` counts the lives of the process: a restart is one more. `host` is "" and `pid` 0
    where the service does not know them.
    """

    process_id: int
    state: str
    incarnation: int
    code: str = "OK"
    message: str = ""
    host: str = ""
    pid: int = 0

    @property
    def alive(self) -> bool:
        """Returns whether the process has come and is neither gone nor failed."""
        return self.state == "CONNECTED"


Listener = Callable[[Sequence[ProcessInfo]], None]


def process_info(info: pb.TaskInfo, host: str = "", pid: int = 0) -> ProcessInfo:
    """Returns the wire's TaskInfo as a ProcessInfo."""
    return ProcessInfo(
        info.task_id,
        pb.TaskState.Name(info.state),
        info.incarnation,
        code=status_name(info.error_code),
        message=info.error_message,
        host=host,
        pid=pid,
    )


def tasks_in(delta: spb.Delta) -> Sequence[spb.Task]:
    """Returns the tasks that a Delta is about."""
    if delta.packed:
        return spb.Tasks.FromString(zlib.decompress(delta.packed)).tasks
    return delta.tasks


class ProcessWatch:
    """Keeps the table of processes and notifies each listener with the complete list at every
    change. Safe from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._notifying = threading.RLock()  # one list at a time, in order of versions
        self._stream = 0  # the latest that has spoken
        self._table: dict[int, ProcessInfo] = {}
        self._unread: dict[int, spb.Task] = {}
        self._listeners: dict[object, Listener] = {}

    def add(self, listener: Listener) -> Callable[[], None]:
        """Adds a listener, notifies it where the table is known, and returns a function that
        removes it.
        """
        key = object()
        with self._notifying:
            self._read()
            with self._lock:
                self._listeners[key] = listener
                processes = self._sorted()
            if processes:
                _notify(listener, processes)
        return lambda: self._remove(key)

    def _remove(self, key: object) -> None:
        self._listeners.pop(key, None)

    def apply(self, tasks: Iterable[spb.Task], stream: int = 0) -> None:
        """Takes the tasks of a Delta of our session, by the number of its stream. What a stream
        still has to say when a later one has spoken, which began with all, is no news.
        """
        with self._notifying:
            if stream < self._stream:
                return
            self._stream = stream
            with self._lock:
                # Read once somebody wants them: while thousands join, each of them hears of all.
                self._unread.update((task.info.task_id, task) for task in tasks)
                if not self._listeners:
                    return
            if not self._read():
                return
            with self._lock:
                listeners = list(self._listeners.values())
                processes = self._sorted()
            for listener in listeners:
                _notify(listener, processes)

    def _read(self) -> bool:
        """Takes over what has come since the last reading; returns whether anything changed."""
        with self._lock:
            known = self._table
            changed = {key: each for key, each in self._fresh().items() if known.get(key) != each}
            known.update(changed)
            self._unread = {}
        return bool(changed)

    def _fresh(self) -> dict[int, ProcessInfo]:
        return {
            process_id: process_info(task.info, task.host, task.pid)
            for process_id, task in self._unread.items()
        }

    def with_hosts(self, infos: Iterable[pb.TaskInfo]) -> list[ProcessInfo]:
        """Returns profile A's list with the hosts that the watch knows."""
        with self._lock:
            known = self._table | self._fresh()
        unseen = ProcessInfo(-1, "", 0)
        seen = ((info, known.get(info.task_id, unseen)) for info in infos)
        return [process_info(info, process.host, process.pid) for info, process in seen]

    def _sorted(self) -> list[ProcessInfo]:
        return sorted(self._table.values(), key=lambda process: process.process_id)


def _notify(listener: Listener, processes: Sequence[ProcessInfo]) -> None:
    try:
        listener(processes)
    except Exception:
        log.exception("a listener of process changes failed")
