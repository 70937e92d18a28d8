"""The processes of a job as the service sees them, and the listeners that are notified of
changes.
"""

from __future__ import annotations

import dataclasses
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
        self._table: dict[int, ProcessInfo] = {}
        self._unread: dict[int, spb.Task] = {}
        self._unread_is_full = False  # it begins with a complete list
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

    def apply(self, tasks: Iterable[spb.Task], *, full: bool) -> None:
        """Takes the tasks of a Delta of our session."""
        with self._notifying:
            with self._lock:
                if full:
                    self._unread.clear()
                    self._unread_is_full = True
                # Read once somebody wants them: while thousands join, each of them hears of all.
                self._unread.update((task.info.task_id, task) for task in tasks)
                if not self._listeners:
                    return
            self._notify_changes(self._read())

    def _read(self) -> bool:
        """Takes over what has come since the last reading; returns whether anything changed."""
        with self._lock:
            unread = self._unread.values()
            fresh = [process_info(task.info, task.host, task.pid) for task in unread]
            changed = self._store(fresh, full=self._unread_is_full)
            self._unread = {}
            self._unread_is_full = False
        return changed

    def _store(self, fresh: Sequence[ProcessInfo], *, full: bool) -> bool:
        known = self._table
        changed = {
            process.process_id: process
            for process in fresh
            if known.get(process.process_id) != process
        }
        gone = full and len(known) + len(changed) > len(fresh)
        if gone:
            ids = {process.process_id for process in fresh}
            gone = not known.keys() <= ids
            self._table = {key: known[key] for key in known if key in ids}
        self._table.update(changed)
        return bool(changed) or gone

    def _notify_changes(self, changed: bool) -> None:
        if not changed:
            return
        with self._lock:
            listeners = list(self._listeners.values())
            processes = self._sorted()
        for listener in listeners:
            _notify(listener, processes)

    def with_hosts(self, infos: Iterable[pb.TaskInfo]) -> list[ProcessInfo]:
        """Returns profile A's list with the hosts that the watch knows."""
        with self._lock:
            known = dict(self._table)
            unread = list(self._unread.values())
        for task in unread:
            known[task.info.task_id] = process_info(task.info, task.host, task.pid)
        fresh = [process_info(info) for info in infos]
        unseen = ProcessInfo(-1, "", 0)
        hosts = [known.get(process.process_id, unseen) for process in fresh]
        return [
            dataclasses.replace(process, host=seen.host, pid=seen.pid)
            for process, seen in zip(fresh, hosts, strict=True)
        ]

    def _sorted(self) -> list[ProcessInfo]:
        return sorted(self._table.values(), key=lambda process: process.process_id)


def _notify(listener: Listener, processes: Sequence[ProcessInfo]) -> None:
    try:
        listener(processes)
    except Exception:
        log.exception("a listener of process changes failed")
