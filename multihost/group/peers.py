"""The processes of a job by their runtime indices, as the coordinator pushes them: who lives, whose
life has ended, and who is told of changes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

from holdfast.coordination import ProcessLost

_log = logging.getLogger(__name__)

LEFT = "it has left the job"


@dataclass(frozen=True)
class ProcessHealth:
    """One process by its runtime index: how it is, and in which of its lives.

    `state` is "UNINITIALIZED", "CONNECTED", "DISCONNECTED" or "ERROR", `error` says what happened,
    and `incarnation` differs for each life of a process.
    """

    process_id: int
    state: str
    incarnation: int
    error: str = ""
    host: str = ""


class HealthListener(Protocol):
    """Gets the list of processes, in the sense of PJRT's UpdateGlobalProcessInfo."""

    def update_global_process_info(self, infos: Sequence[ProcessHealth]) -> None:
        """Takes the complete list, in order of process numbers, at every change.

        A list is never older than the one before. Must not block for long.
        """


class Peers:
    """Keeps the list, as GroupClient needs it: who is gone, and that something has changed. It is
    what `Health` has beside its public methods.
    """

    def __init__(self, group_client: Any) -> None:
        self.group_client = group_client
        self._changed = threading.Condition()  # guards the rest
        self._infos: list[ProcessHealth] = []
        self._known: dict[Any, ProcessHealth] = {}  # by what was pushed
        self._failed: dict[int, ProcessHealth] = {}
        self._admitted: dict[int, int] = {}  # process: the incarnation last admitted
        self._listeners: list[HealthListener] = []
        self._waiters: list[Callable[[], None]] = []
        self._version = 0
        self._keeps_lives = False
        self._closed = False
        watch = getattr(group_client.client, "watch_processes", None)
        if watch is not None:  # jaxlib's own client has none
            watch(self._update)

    def keep_lives(self) -> Self:
        """Has work with lives that end from here on be refused."""
        self._keeps_lives = True
        return self

    def renumber(self) -> None:
        """Takes the numbers that the processes have now."""
        with self._changed:
            pushed = list(self._known)
            self._known = {}
            self._infos = []
            if pushed:  # under the lock: a newer list may be on its way
                self._update(pushed)

    def gone(self) -> list[ProcessHealth]:
        """Returns the processes that are known to be gone.

        Those in error come first: the others may have left because of them.
        """
        with self._changed:
            infos = self._infos
        states = ("ERROR", "DISCONNECTED")
        return [info for state in states for info in infos if info.state == state]

    def wait_for(self, met: Callable[[], object], timeout_s: float) -> None:
        """Returns when something holds of the list, else after the time."""
        with self._changed:
            self._changed.wait_for(met, timeout_s)

    @contextmanager
    def on_change(self, waiter: Callable[[], None]) -> Iterator[None]:
        """Has `waiter` called at each change of the processes while the block runs.

        It is called on a thread of the client.
        """
        with self._changed:
            self._waiters.append(waiter)
        try:
            yield
        finally:
            with self._changed:
                self._waiters.remove(waiter)

    def _update(self, pushed: Sequence[Any]) -> None:
        with self._changed:
            # What has not changed is the same object: of thousands of processes, a few have.
            self._known = {info: self._known.get(info) or self._health(info) for info in pushed}
            infos = sorted(self._known.values(), key=lambda info: info.process_id)
            if self._keeps_lives and not self._closed:
                self._note_ended(infos)
            self._infos = infos
            self._version += 1
            for listener in [] if self._closed else list(self._listeners):
                try:
                    listener.update_global_process_info(infos)
                except Exception:
                    _log.exception("a listener to the health of processes failed")
            self._changed.notify_all()
            waiters = list(self._waiters)
        for waiter in waiters:
            waiter()

    def _health(self, info: Any) -> ProcessHealth:
        error = info.message or ("" if info.code == "OK" else info.code)
        if info.state == "DISCONNECTED" and not error:
            error = LEFT
        process = self.group_client.process(info.process_id)
        return ProcessHealth(process, info.state, info.incarnation, error, info.host)

    def _note_ended(self, infos: Sequence[ProcessHealth]) -> None:
        now = {info.process_id: info for info in infos}
        for ended in self._infos:
            found = now.get(ended.process_id)
            if found is ended or ended.state != "CONNECTED":
                continue
            if found is not None and self._lives_on(ended, found):
                continue
            why = LEFT if found is None else found.error or "it was started again"
            host = ended.host or "unknown"
            process = ended.process_id
            self._failed[process] = replace(ended, state="ERROR", error=why)
            if why == LEFT:
                _log.info("process %d (host %s) has left the job", process, host)
            else:
                _log.warning("process %d (host %s) is lost: %s", process, host, why)

    def _lives_on(self, before: ProcessHealth, found: ProcessHealth) -> bool:
        """Returns whether a life goes on, or ended before one that is admitted, and lives.

        The answer of `live_processes()` may overtake the list in which the former life ends.
        """
        lives = found.state == "CONNECTED"
        if lives and found.incarnation == before.incarnation:
            return True
        admitted = self._admitted.get(before.process_id, before.incarnation)
        if before.incarnation == admitted:
            return False
        return found.incarnation == (admitted if lives else before.incarnation)


class Health(Peers):
    """The list of processes, as the coordinator pushes it. Thread-safe.

    It refuses work with those that have failed. A process whose life ended stays refused, though it
    may be back with another incarnation, until this process has seen the new one in the answer of
    `live_processes()`: work planned with the old life cannot meet the new one.
    """

    def processes(self) -> list[ProcessHealth]:
        """Returns the complete list as last pushed; empty over jaxlib's own client."""
        with self._changed:
            return list(self._infos)

    def failed(self) -> dict[int, ProcessHealth]:
        """Returns the processes with which work is refused: the ended life of each, and why."""
        with self._changed:
            return dict(self._failed)

    def add_listener(self, listener: HealthListener) -> Callable[[], None]:
        """Gives `listener` the list now and at every change; returns a function that ends it.

        One list at a time, in order.
        """
        with self._changed:
            self._listeners.append(listener)
            if self._infos:
                listener.update_global_process_info(list(self._infos))

        def remove() -> None:
            with self._changed, suppress(ValueError):
                self._listeners.remove(listener)

        return remove

    def require(self, processes: Iterable[int] | None, name: str) -> None:
        """Raises ProcessLost when the life of one of `processes` (None: any) has ended.

        Asks nobody.
        """
        with self._changed:
            for process in list(self._failed) if processes is None else processes:
                if process in self._failed:
                    raise lost(name, self._failed[process])

    def admit(self, incarnations: Mapping[int, int]) -> None:
        """Permits work with these lives from here on."""
        with self._changed:
            self._admitted.update(incarnations)
            for process, incarnation in incarnations.items():
                ended = self._failed.get(process)
                if ended is not None and ended.incarnation != incarnation:
                    del self._failed[process]

    def statistics(self) -> dict[str, Any]:
        """Returns how many lists came, how many listen, and which processes are refused."""
        with self._changed:
            return {
                "version": self._version,
                "listeners": len(self._listeners),
                "failed": sorted(self._failed),
            }

    def close(self) -> None:
        """Stops listening."""
        with self._changed:
            self._closed = True


def lost(name: str, ended: ProcessHealth) -> ProcessLost:
    """Returns the error of a call that needs a process which is gone."""
    return ProcessLost(
        f"{name!r} needs process {ended.process_id} (host {ended.host or 'unknown'}), which is"
        f" gone: {ended.error}",
        process=ended.process_id,
        host=ended.host or None,
    )
