"""A client's connection over time: opening it, keeping it alive, riding out outages, and knowing when it is over."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.proto import coordination_pb2 as pb
from holdfast.proto import session_pb2 as spb

from ..credentials import Credentials
from ..deadline import Deadline
from ..errors import CoordinationError, CoordinatorLost, Fenced, ProcessLost
from ..names import is_service_mismatch
from .processes import ProcessInfo, ProcessWatch
from .retry import IDEMPOTENT, Backoff
from .session import SessionWire
from .unary import Identity, TransportError, UnaryWire

log = logging.getLogger("holdfast.coordination")

BEATS_PER_TIMEOUT = 4
LAST_ATTEMPT_S = 0.5
"""What an attempt to be heard gets at the least, also when the heartbeat budget is over."""

CLOSED = CoordinationError("the client is not connected: it was shut down, or connect() was never called", code="FAILED_PRECONDITION")


class Connection:
    """Chooses the wire, retries over outages and turns the end of all hope into one error for everybody. Safe from several threads.

    One thread (the keeper) beats, opens broken sessions again, and after `heartbeat_timeout_s` of silence gives up: from then on
    every call, those in flight included, raises CoordinatorLost.
    """

    def __init__(
        self,
        address: str,
        process_id: int,
        num_processes: int | None,
        job: str,
        attempt: int,
        host: str,
        *,
        credentials: Credentials,
        heartbeat_timeout_s: float,
        session: bool | None,
        watch: ProcessWatch,
        on_error: Callable[[CoordinationError], None] | None,
    ) -> None:
        self._address = address
        self._identity = Identity(process_id, num_processes, job, attempt, host, secrets.randbits(63) | 1)
        self._credentials = credentials
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._session_wanted = session
        self._watch = watch
        self._on_error = on_error
        self._wire: UnaryWire | SessionWire | None = None
        self._over: CoordinationError | None = None
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._heard_at = time.monotonic()
        self._lost_told: set[tuple[int, int]] = set()
        self._counts: Counter[str] = Counter()

    # Opening

    @property
    def closed(self) -> bool:
        """Tells whether `close` was called."""
        return self._stop.is_set()

    def connect(self, deadline: Deadline) -> None:
        """Joins the job over a session, or over unary calls where the service has none."""
        if self._session_wanted is not False and self._try_session(deadline):
            self._start(self._keep)
            return
        unary = UnaryWire(self._address, self._identity, self._credentials)
        self._wire = unary
        self._join(unary, deadline)
        self._start(self._keep)
        self._start(self._poll)
        if self._watch.wanted:
            self.start_watch()

    def _try_session(self, deadline: Deadline) -> bool:
        session = SessionWire(self._address, self._identity, self._credentials, self._on_delta, self._wake.set, self._lose)
        self._wire = session
        try:
            self._join(session, deadline)
        except CoordinationError as error:
            if error.code != "UNIMPLEMENTED" or self._session_wanted:
                raise
            session.close()
            return False
        return True

    def _join(self, wire: UnaryWire | SessionWire, deadline: Deadline) -> None:
        for pause_s in Backoff().pauses():
            try:
                wire.join(deadline)
                self._heard()
                return
            except TransportError as broken:
                if deadline.remaining_s() <= pause_s or self._stop.wait(pause_s):
                    raise self._out_of_reach(deadline, broken) from None

    def _out_of_reach(self, deadline: Deadline, broken: TransportError) -> CoordinatorLost:
        tried_s = deadline.elapsed_s()
        what = f"no coordinator answered at {self._address} for {tried_s:.1f} s ({broken.message})"
        return CoordinatorLost(f"{what}; is it running and reachable from this host?", address=self._address, tried_s=tried_s)

    # Calling

    def call(
        self,
        method: str,
        request: Any,
        deadline: Deadline,
        *,
        grace_s: float = 0.0,
        idempotent: bool | None = None,
        on_retry: Callable[[], None] | None = None,
        needs: Sequence[int] = (),
    ) -> Any:
        """Sends a call, again after a broken connection where that is safe, until `deadline`. Raises CoordinationError."""
        again = method in IDEMPOTENT if idempotent is None else idempotent
        self._counts["calls"] += 1
        for pause_s in Backoff().pauses():
            wire = self._require_wire()
            try:
                answer = wire.call(method, request, deadline, grace_s, needs)
                self._heard()
                return answer
            except TransportError as broken:
                self._after_break(method, broken, again, deadline, pause_s)
                if broken.sent and on_retry is not None:
                    on_retry()
            except CoordinationError as error:
                self._after_answer(error)
                raise
        raise AssertionError("pauses never end")

    def _require_wire(self) -> UnaryWire | SessionWire:
        if self._over is not None:
            raise _again(self._over)
        if self._wire is None or self._stop.is_set():
            raise _again(CLOSED)
        return self._wire

    def _after_break(self, method: str, broken: TransportError, again: bool, deadline: Deadline, pause_s: float) -> None:
        self._counts["breaks"] += 1
        self._require_wire()
        if broken.sent and not again:
            what = f"the connection to {self._address} broke during {method}: it may or may not have been applied ({broken.message})"
            raise CoordinatorLost(what, address=self._address, tried_s=deadline.elapsed_s())
        if deadline.remaining_s() <= pause_s:
            raise self._out_of_reach(deadline, broken)
        self._stop.wait(pause_s)

    def _after_answer(self, error: CoordinationError) -> None:
        if self._over is not None or self._stop.is_set():
            self._require_wire()
        if is_service_mismatch(error):
            what = f"the coordinator at {self._address} was restarted without its journal: its keys and barriers are gone; restart the job"
            self._lose(Fenced(what))
            self._require_wire()
        if error.code != "DEADLINE_EXCEEDED":
            self._heard()

    def _heard(self) -> None:
        self._heard_at = time.monotonic()

    def leave(self, deadline: Deadline) -> None:
        """Says goodbye and waits for the others' goodbyes."""
        self.call("ShutdownTask", pb.ShutdownTaskRequest(source_task_id=self._identity.process_id), deadline)

    # Keeping

    def _keep(self) -> None:
        pauses, pause_s = Backoff().pauses(), self._interval_s()
        while not self._stop.is_set():
            self._wake.wait(pause_s)
            self._wake.clear()
            if self._stop.is_set() or self._over is not None:
                return
            if self._beat():
                pauses, pause_s = Backoff().pauses(), self._interval_s()
            else:
                pause_s = min(next(pauses), max(0.0, self._left_s()))

    def _interval_s(self) -> float:
        assert self._wire is not None
        return min(self._heartbeat_timeout_s, self._wire.heartbeat_timeout_s) / BEATS_PER_TIMEOUT

    def _beat(self) -> bool:
        """Makes one attempt to be heard. The one after the end of the budget is the last: it was perhaps this process that stood still."""
        left_s = self._left_s()
        if self._attempt(max(LAST_ATTEMPT_S, min(self._interval_s(), left_s))):
            return True
        if left_s <= 0 and not self._stop.is_set():
            self._lose(self._silence())
        return False

    def _attempt(self, timeout_s: float) -> bool:
        wire = self._wire
        assert wire is not None
        try:
            wire.beat(Deadline(timeout_s))
            self._heard()
            return True
        except TransportError:
            return isinstance(wire, SessionWire) and self._rejoin(wire)  # gRPC opens a unary channel again by itself
        except CoordinationError as error:
            if is_service_mismatch(error):
                self._after_answer_quietly(error)
                return False
            late = error.code == "DEADLINE_EXCEEDED" and isinstance(wire, UnaryWire)
            return not late and self._rejoin(wire)  # refused: the service has given this process up, and may take it back

    def _rejoin(self, wire: UnaryWire | SessionWire) -> bool:
        try:
            wire.join(Deadline(max(LAST_ATTEMPT_S, min(self._left_s(), max(1.0, self._interval_s())))))
        except TransportError:
            return False
        except CoordinationError as error:
            if error.code != "DEADLINE_EXCEEDED":
                self._lose(error)
            return False
        self._counts["reconnects"] += 1
        self._heard()
        return True

    def _left_s(self) -> float:
        return self._heartbeat_timeout_s - (time.monotonic() - self._heard_at)

    def _after_answer_quietly(self, error: CoordinationError) -> None:
        with contextlib.suppress(CoordinationError):  # _lose has told everybody
            self._after_answer(error)

    def _silence(self) -> CoordinatorLost:
        silent_s = time.monotonic() - self._heard_at
        what = (
            f"the coordinator at {self._address} has been silent for {silent_s:.1f} s (heartbeat timeout {self._heartbeat_timeout_s:g} s)"
        )
        return CoordinatorLost(what, address=self._address, tried_s=silent_s)

    def _lose(self, error: CoordinationError) -> None:
        with self._lock:
            if self._over is not None or self._stop.is_set():
                return
            self._over = error
        log.error("%s", error)
        if self._wire is not None:
            self._wire.close()
        self._tell(error)

    # News of other processes

    def _tell(self, error: CoordinationError) -> None:
        if self._on_error is None:
            return
        try:
            self._on_error(error)
        except Exception:
            log.exception("on_error failed")

    def _on_delta(self, delta: spb.Delta) -> None:
        self._heard()
        self._watch.apply(delta)
        for task in delta.tasks:
            info, life = task.info, (task.info.task_id, task.info.incarnation)
            failed = info.state == pb.TaskState.ERROR and info.task_id != self._identity.process_id
            if failed and life not in self._lost_told:
                self._lost_told.add(life)
                what = info.error_message or f"process {info.task_id} is in error"
                self._tell(ProcessLost(what, process=info.task_id, host=task.host or None))

    def _poll(self) -> None:
        """Waits for profile A's one long poll; CANCELLED means that there will be no news this way."""
        try:
            forever = Deadline(10 * 365 * 86400.0)
            self.call("PollForError", pb.PollForErrorRequest(source_task_id=self._identity.process_id), forever)
        except CoordinationError as error:
            if error.code == "CANCELLED" or error is self._over or self._stop.is_set() or self._over is not None:
                return
            self._tell(error if isinstance(error, ProcessLost) else ProcessLost(error.message, code=error.code))

    def start_watch(self) -> None:
        """Feeds the watch: sessions are pushed to; over unary calls a thread asks in a loop."""
        with self._lock:
            if isinstance(self._wire, UnaryWire) and not any(thread.name == "holdfast-_watch_loop" for thread in self._threads):
                self._start(self._watch_loop)

    def _watch_loop(self) -> None:
        version = -1
        while not self._stop.is_set():
            try:
                reply = self.call("WatchTasks", pb.WatchTasksRequest(version_number=version), Deadline(3600.0))
            except CoordinationError as error:
                if error.code == "DEADLINE_EXCEEDED":
                    continue
                log.debug("the watch ends: %s", error)
                return
            version = reply.version_number
            self._watch.replace(reply.task_state)

    def processes(self, deadline: Deadline) -> list[ProcessInfo]:
        """Asks the service for all processes."""
        reply = self.call("WatchTasks", pb.WatchTasksRequest(version_number=-1), deadline)
        return self._watch.with_hosts(reply.task_state)

    def report_error(self, message: str, deadline: Deadline) -> None:
        """Tells the service that this process has failed, where it can be told."""
        self._require_session("report_error")
        self.call("ReportError", spb.ReportErrorRequest(error_code=13, error_message=message), deadline, idempotent=True)

    @property
    def has_session(self) -> bool:
        """Tells whether our own session is spoken."""
        return isinstance(self._wire, SessionWire)

    def _require_session(self, what: str) -> None:
        self._require_wire()
        if not self.has_session:
            raise CoordinationError(f"{what} needs holdfast's own service; the one at {self._address} has no session", code="UNIMPLEMENTED")

    # Closing

    def _start(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=f"holdfast-{target.__name__}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        """Ends the connection and the threads; calls in flight raise FAILED_PRECONDITION."""
        self._stop.set()
        self._wake.set()
        if self._wire is not None:
            self._wire.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(2.0)

    def statistics(self) -> dict[str, int | float | str]:
        """Returns counts, the wire spoken, and the seconds since the service was heard."""
        counts = {name: self._counts[name] for name in ("calls", "breaks", "reconnects")}
        return counts | {"wire": "session" if self.has_session else "unary", "silent_s": time.monotonic() - self._heard_at}


def _again(error: CoordinationError) -> CoordinationError:
    """Returns a copy of an error that several threads raise, so that their tracebacks stay apart."""
    build, arguments = error.__reduce__()
    copy = build(*arguments)
    assert isinstance(copy, CoordinationError)
    return copy
