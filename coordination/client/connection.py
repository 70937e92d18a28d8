"""A client's connection over time: joins, calls over outages, and says when it is over."""

from __future__ import annotations

import copy
import itertools
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from holdfast.proto import coordination_pb2 as pb
from holdfast.proto import session_pb2 as spb

from ..address import UNIX
from ..credentials import Credentials
from ..deadline import Deadline
from ..errors import CoordinationError, CoordinatorLost, ProcessLost
from ..limits import HEARTBEATS_PER_TIMEOUT
from ..names import on_the_wire
from .answers import ONCE
from .processes import ProcessInfo, ProcessWatch, tasks_in
from .retry import accepts_connections, first_reconnect_s, pauses, why_unreachable
from .session import ANSWER_GRACE_S, PASSING, SessionTransport, TransportError

log = logging.getLogger("holdfast.coordination")

DEFAULT_HEARTBEAT_TIMEOUT_S = 100.0
"""Where neither the service nor the caller says: jax's own default."""
LAST_ATTEMPT_S = 0.5
"""The least time of one attempt to reach the service, also when the heartbeat budget is over."""

STANDSTILL_TIMEOUTS = 3
"""How many heartbeat timeouts a client waits for a coordinator that answers nobody but to which
connections are accepted: one that is stopped, or whose host is short of memory, goes on where it
was. One to which nobody can connect is lost after the first.
"""

_INTERNAL = 13
"""gRPC's code of the error that a process reports of itself."""

CLOSED = CoordinationError(
    "the client is not connected: it was shut down, or connect() was never called",
    code="FAILED_PRECONDITION",
)


class Connection:
    """Retries over outages, and ends every call with one error once the service is lost. Safe from
    several threads.

    One thread (the keeper) sends heartbeats, opens broken Sessions again, and after
    `heartbeat_timeout_s` of silence gives up: from then on every call, those in flight included,
    raises CoordinatorLost. It does so while the job gathers, too. It waits
    `STANDSTILL_TIMEOUTS` times as long where a heartbeat over an open Session went without an
    answer while connections were accepted.
    """

    def __init__(
        self,
        address: str,
        identity: spb.Open,
        *,
        credentials: Credentials,
        heartbeat_timeout_s: float | None,
        watch: ProcessWatch,
        on_error: Callable[[CoordinationError], None] | None,
    ) -> None:
        self._address = address
        self._identity = identity
        self._credentials = credentials
        self._wanted_heartbeat_timeout_s = heartbeat_timeout_s
        self._watch = watch
        self._on_error = on_error
        self._transport: SessionTransport | None = None
        self._over: CoordinationError | None = None
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._keeper = threading.Thread(target=self._keep, name="holdfast-keeper", daemon=True)
        self._answered_at = time.monotonic()
        self._stands_still = False  # the service, since its last answer
        self._reported_lost: set[tuple[int, int]] = set()
        self._counts: Counter[str] = Counter()
        self._numbers = itertools.count(1)
        self._reported = spb.ReportRequest()
        _open.add(self)

    # --- Opening

    @property
    def closed(self) -> bool:
        """Returns whether `close` was called."""
        return self._stop.is_set()

    def connect(self, deadline: Deadline) -> None:
        """Joins the job; returns when all have come."""
        # Set before it is joined: `close` and `_lose` of another thread have to reach it.
        self._transport = SessionTransport(
            self._address,
            self._identity,
            self._credentials,
            on_delta=self._on_delta,
            on_broken=self._wake.set,
            on_fenced=self._lose,
            report=self._report_of_all,
        )
        self._join(self._transport, deadline)
        self._check_heartbeat_timeout()
        # Before the others have come: a coordinator that dies meanwhile is noticed.
        self._keeper.start()
        # The answer that names the missing comes when the time is over, not before.
        grace = Deadline(deadline.remaining_s() + ANSWER_GRACE_S)
        self.call("RegisterTask", pb.RegisterTaskRequest(), grace, grace_s=ANSWER_GRACE_S)

    def _check_heartbeat_timeout(self) -> None:
        wanted_s = self._wanted_heartbeat_timeout_s
        its_s = self.heartbeat_timeout_s
        if wanted_s is not None and abs(wanted_s - its_s) >= 0.001:
            what = (
                f"the heartbeat timeout of the coordinator at {self._service_address} is {its_s:g}"
                f" s, not {wanted_s:g} s"
            )
            raise CoordinationError(
                f"{what}: set it where the coordinator is started (--heartbeat-timeout-s), or give"
                " none here",
                code="FAILED_PRECONDITION",
            )

    @property
    def heartbeat_timeout_s(self) -> float:
        """The seconds of silence after which either side is lost: the service's, where it says
        so.
        """
        told_s = None if self._transport is None else self._transport.heartbeat_timeout_s
        return told_s or self._wanted_heartbeat_timeout_s or DEFAULT_HEARTBEAT_TIMEOUT_S

    def _join(self, transport: SessionTransport, deadline: Deadline) -> None:
        for pause_s in pauses():
            try:
                transport.join(deadline)
                self._note_answer()
                return
            except PASSING as error:
                if deadline.remaining_s() <= pause_s or self._stop.wait(pause_s):
                    # What the socket says of it stays behind `__cause__`.
                    raise self._out_of_reach(deadline) from error

    def _out_of_reach(self, deadline: Deadline) -> CoordinatorLost:
        tried_s = deadline.elapsed_s()
        address = self._address
        if address.startswith(UNIX) and accepts_connections(address):
            address = self._service_address  # behind the relay that listens
        what = f"no coordinator answered at {address} for {tried_s:.1f} s"
        return CoordinatorLost(
            f"{what}: {why_unreachable(address)}", address=address, tried_s=tried_s
        )

    @property
    def _service_address(self) -> str:
        """Where the service is: behind a relay, as far as it has said so."""
        transport = self._transport
        return self._address if transport is None else transport.service_address

    # --- Calling

    def call(
        self,
        method: str,
        request: Any,
        deadline: Deadline,
        *,
        grace_s: float = 0.0,
        on_retry: Callable[[], None] | None = None,
        **told: Any,
    ) -> Any:
        """Sends a call, again after a broken connection where that is safe, until `deadline`.
        What else is `told` are fields of the Session's Request. Raises CoordinationError.
        """
        self._counts["calls"] += 1
        number = next(self._numbers)
        waits = pauses()
        while True:
            transport = self._require_transport()
            try:
                response = transport.call(method, request, deadline, grace_s, number=number, **told)
                self._note_answer()
                return response
            except TransportError as error:
                self._after_break(error, deadline, next(waits), method)
                if error.sent and on_retry is not None:
                    on_retry()
            except CoordinationError as error:
                self._require_transport()
                if error.code != "DEADLINE_EXCEEDED":
                    self._note_answer()
                raise

    def _require_transport(self) -> SessionTransport:
        # Each thread raises a copy: several tracebacks in one error would grow into each other.
        if self._over is not None:
            raise copy.copy(self._over)
        if self._transport is None or self._stop.is_set():
            raise copy.copy(CLOSED)
        return self._transport

    def _after_break(
        self, error: TransportError, deadline: Deadline, pause_s: float, method: str
    ) -> None:
        self._counts["breaks"] += 1
        # A service that was given up meanwhile is the reason of the break, and says more than it.
        self._require_transport()
        if error.sent and method in ONCE:
            address = self._service_address
            what = (
                f"the connection to {address} broke during {method}: it may or may not have been"
                " applied"
            )
            lost = CoordinatorLost(what, address=address, tried_s=deadline.elapsed_s())
            raise lost from error
        if deadline.remaining_s() <= pause_s:
            raise self._out_of_reach(deadline) from error
        self._stop.wait(pause_s)

    def _note_answer(self) -> None:
        self._answered_at = time.monotonic()

    def leave(self, deadline: Deadline) -> None:
        """Shuts this process's task down and waits for the others."""
        request = pb.ShutdownTaskRequest(source_task_id=self._identity.process_id)
        self.call("ShutdownTask", request, deadline)

    # --- Keeping

    def _keep(self) -> None:
        longer = pauses()
        pause_s = self._interval_s()
        while not self._stop.is_set():
            broken = self._wake.wait(pause_s)
            self._wake.clear()
            # All Sessions break at the same moment where the coordinator dies: thousands that came
            # back as one wave would meet it as it starts.
            if broken and self._transport is not None:
                count = self._transport.num_processes
                self._stop.wait(first_reconnect_s(count, self.heartbeat_timeout_s))
            if self._stop.is_set() or self._over is not None:
                return
            if self._heartbeat():
                self._stands_still = False
                longer = pauses()
                pause_s = self._interval_s()
            else:
                pause_s = min(next(longer), max(0.0, self._budget_left_s()))

    def _interval_s(self) -> float:
        return self.heartbeat_timeout_s / HEARTBEATS_PER_TIMEOUT

    def _heartbeat(self) -> bool:
        """Makes one attempt to reach the service. One more follows the end of the budget: perhaps
        this process stood still.
        """
        budget_s = self._budget_left_s()
        if self._attempt(max(LAST_ATTEMPT_S, min(self._interval_s(), budget_s))):
            return True
        if budget_s <= 0 and self._budget_left_s() <= 0 and not self._stop.is_set():
            self._lose(self._silence())
        return False

    def _attempt(self, timeout_s: float) -> bool:
        transport = self._transport
        assert transport is not None
        try:
            transport.call("Heartbeat", pb.HeartbeatRequest(), Deadline(timeout_s))
            self._note_answer()
            return True
        except TransportError:
            return self._rejoin(transport)
        except CoordinationError as error:
            # A stopped coordinator whose clients connected again and again would meet thousands
            # of dead connections first, once it goes on. So the open one is kept.
            timed_out = error.code == "DEADLINE_EXCEEDED"
            if timed_out and (self._stands_still or accepts_connections(self._service_address)):
                self._outwait()
                return False
            # An error says that the service has given this process up; it may take it back.
            return self._rejoin(transport)

    def _outwait(self) -> None:
        if not self._stands_still:
            self._stands_still = True
            log.warning(
                "the coordinator at %s takes connections but does not answer: waiting %g s",
                self._service_address,
                self._patience_s(),
            )

    def _rejoin(self, transport: SessionTransport) -> bool:
        try:
            most_s = max(1.0, self._interval_s())
            transport.join(Deadline(max(LAST_ATTEMPT_S, min(self._budget_left_s(), most_s))))
        except PASSING:
            return False
        except CoordinationError as error:
            # A time that ran out says nothing; any other answer is the service's last word.
            if error.code != "DEADLINE_EXCEEDED":
                self._lose(error)
            return False
        self._counts["reconnects"] += 1
        self._note_answer()
        return True

    def _budget_left_s(self) -> float:
        return self._patience_s() - (time.monotonic() - self._answered_at)

    def _patience_s(self) -> float:
        timeouts = STANDSTILL_TIMEOUTS if self._stands_still else 1
        return self.heartbeat_timeout_s * timeouts

    def _silence(self) -> CoordinatorLost:
        silent_s = time.monotonic() - self._answered_at
        address = self._service_address
        what = (
            f"the coordinator at {address} has been silent for {silent_s:.1f} s (heartbeat timeout"
            f" {self.heartbeat_timeout_s:g} s)"
        )
        return CoordinatorLost(what, address=address, tried_s=silent_s)

    def _lose(self, error: CoordinationError) -> None:
        with self._lock:
            if self._over is not None or self._stop.is_set():
                return
            # The first reason stays: what fails because of it is no news.
            self._over = error
        log.error("%s", error)
        if self._transport is not None:
            self._transport.close()
        self._notify(error)

    # --- Other processes

    def _notify(self, error: CoordinationError) -> None:
        if self._on_error is None:
            return
        try:
            self._on_error(error)
        except Exception:
            log.exception("on_error failed")

    def _on_delta(self, delta: spb.Delta, stream: int) -> None:
        self._note_answer()
        tasks = tasks_in(delta)
        self._watch.apply(tasks, stream)
        for task in tasks:
            if task.info.state == pb.ERROR:
                self._notify_lost(task)

    def _notify_lost(self, task: spb.Task) -> None:
        info = task.info
        life = (info.task_id, info.incarnation)
        # A delta repeats all tasks after a reconnection: each life is reported lost once.
        if info.task_id == self._identity.process_id or life in self._reported_lost:
            return
        self._reported_lost.add(life)
        what = info.error_message or f"process {info.task_id} is in error"
        self._notify(ProcessLost(what, process=info.task_id, host=task.host or None))

    def processes(self, deadline: Deadline) -> list[ProcessInfo]:
        """Asks the service for all processes."""
        response = self.call("WatchTasks", pb.WatchTasksRequest(version_number=-1), deadline)
        return self._watch.with_hosts(response.task_state)

    def report(self, request: spb.ReportRequest, deadline: Deadline) -> None:
        """Reports this process's progress."""
        self.call("Report", request, deadline)
        with self._lock:
            if request.HasField("root"):
                self._reported.ClearField("root")  # which is told as a whole
            self._reported.MergeFrom(request)

    def _report_of_all(self) -> spb.ReportRequest:
        """Returns all reports that the service has taken, as one: no journal holds them."""
        report = spb.ReportRequest()
        with self._lock:
            report.CopyFrom(self._reported)
        return report

    def report_error(self, message: str, deadline: Deadline) -> None:
        """Reports to the service that this process has failed."""
        request = spb.ReportErrorRequest(error_code=_INTERNAL, error_message=on_the_wire(message))
        self.call("ReportError", request, deadline)

    # --- Closing

    def close(self) -> None:
        """Ends the connection and the threads; calls in flight raise FAILED_PRECONDITION."""
        self._stop.set()
        self._wake.set()
        if self._transport is not None:
            self._transport.close()
        # A listener may close the client on its own thread, which cannot wait for itself.
        if self._keeper.is_alive() and self._keeper is not threading.current_thread():
            self._keeper.join(2.0)

    def abandon(self) -> None:
        """Ends the connection in a forked child without a byte: it is the parent's, and its threads
        are not here.
        """
        what = (
            "this process was forked from the one that connected, and is no process of the job:"
            " call this in its parent"
        )
        self._over = CoordinationError(what, code="FAILED_PRECONDITION")
        # New ones: a thread that is not in the child may have held the old ones at the fork.
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._stop.set()
        if self._transport is not None:
            self._transport.abandon()
            self._transport = None

    def statistics(self) -> dict[str, int | float]:
        """Returns counts, and the seconds since the service last answered."""
        counts = {name: self._counts[name] for name in ("calls", "breaks", "reconnects")}
        return counts | {"silent_s": time.monotonic() - self._answered_at}


_open: WeakSet[Connection] = WeakSet()


def _abandon_all() -> None:
    for connection in list(_open):
        connection.abandon()


# A forked child lets go of the connections of its parent.
os.register_at_fork(after_in_child=_abandon_all)
