"""The client of the coordination service: jaxlib's method names, over a Session.

Every call has a bound, raises exceptions of `holdfast.coordination` and never ends the process.
Three layers: this one counts barriers and names errors; connection.py keeps the connection alive
and retries; session.py carries the calls.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from holdfast.proto import coordination_pb2 as pb
from holdfast.proto import session_pb2 as spb

from ..address import UNIX, split_address
from ..credentials import Credentials
from ..deadline import Deadline
from ..errors import BarrierTimeout, CoordinationError
from ..limits import Limits
from ..names import on_the_wire
from ..settings import JobIdentity, Timeouts
from ..task_bits import bits_of, bytes_of
from .answers import barrier_counter
from .connection import Connection
from .processes import ProcessInfo, ProcessWatch
from .session import ANSWER_GRACE_S

MOST_COUNTERS = 2 * Limits().barriers_kept
"""Barriers whose calls a client counts. One that so many were used after is forgotten by the
service, too, and begins anew.
"""

_MOST_LISTED = 64
"""Processes that a call lists one by one."""


class CoordinationClient:
    """Speaks to the coordination service at `address` ("host:port") as process `process_id`.

    The service is a `holdfast coordinator`. The client takes the same calls as jaxlib's
    `DistributedRuntimeClient`, so it can stand where that one stands in Python code. Safe from
    several threads. A context manager: entering connects, leaving shuts down; a client that is
    forgotten while connected warns with ResourceWarning.

    `job` is compared with the service's; a process of another job is Fenced. `host` is the name
    under which others see this process: this machine's, unless given. The heartbeat timeout is the
    budget of every outage. A service silent for so long is lost (CoordinatorLost), and a shorter
    outage is ridden out. Where its Session stays open and connections to it are accepted, it stands
    still, and the budget is three timeouts. The service tells the timeout at the join, and refuses
    another one (FAILED_PRECONDITION).

    `on_error(error)` gets ProcessLost for another process, CoordinatorLost or Fenced for this one.
    It runs on a thread of the client and must not block for long. `watch_processes` has the changes
    of processes.
    """

    def __init__(
        self,
        address: str,
        process_id: int,
        *,
        job: JobIdentity = JobIdentity(),
        host: str | None = None,
        timeouts: Timeouts = Timeouts(),
        credentials: Credentials | None = None,
        on_error: Callable[[CoordinationError], None] | None = None,
    ) -> None:
        count = job.num_processes
        if process_id < 0 or (count is not None and process_id >= count):
            last = count - 1 if count else "N-1"
            raise ValueError(f"process_id must be in 0..{last}, found {process_id}")
        if not address.startswith(UNIX):
            split_address(address)  # here: what cannot be reached is tried for as long as it takes
        self.address = address
        self.process_id = process_id
        self._timeouts = timeouts
        self._watch = ProcessWatch()
        self._connection = Connection(
            address,
            spb.Open(
                process_id=process_id,
                num_processes=count,
                job=job.name,
                attempt=job.attempt,
                host=socket.gethostname() if host is None else host,
                pid=os.getpid(),
                incarnation=secrets.randbits(63) | 1,
            ),
            credentials=credentials or Credentials(),
            heartbeat_timeout_s=timeouts.heartbeat_s,
            watch=self._watch,
            on_error=on_error,
        )
        self._lock = threading.Lock()
        self._counters: dict[str, int] = {}
        self._ongoing: set[str] = set()
        self._barriers_passed = 0
        self._connected = False

    # --- Life

    @property
    def heartbeat_timeout_s(self) -> float:
        """The seconds of silence after which this process, or the service, is lost to the other.
        The service's own once connected.
        """
        return self._connection.heartbeat_timeout_s

    def connect(self) -> None:
        """Joins the job: blocks until all processes have come, at most `init_s` (and 5 s
        for the answer).

        Raises BarrierTimeout with those `missing` (DEADLINE_EXCEEDED), CoordinatorLost when nobody
        answers at the address, Fenced when the service is another job's, UNIMPLEMENTED for one that
        is no `holdfast coordinator`. A client that failed to connect is closed.
        """
        with self._lock:
            if self._connected or self._connection.closed:
                raise CoordinationError(
                    "the client is connected or has been shut down; make a new one",
                    code="FAILED_PRECONDITION",
                )
            self._connected = True
        try:
            self._connection.connect(Deadline(self._timeouts.init_s))
        except BaseException:
            self.close()
            raise

    def shutdown(self) -> None:
        """Leaves the job: waits for all other processes to leave too, at most `shutdown_s`,
        then closes.

        The client is closed afterwards, whatever happens. Raises CoordinationError when the others
        did not come, CoordinatorLost when the service is gone. A second call does nothing.
        """
        if self._connection.closed or not self._connected:
            self.close()
            return
        try:
            self._connection.leave(Deadline(self._timeouts.shutdown_s))
        finally:
            self.close()

    def close(self) -> None:
        """Releases threads and connection without a shutdown: the others will see this process die.
        Never raises or blocks for long.
        """
        self._connection.close()
        self._connected = False

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.shutdown()
            return
        with contextlib.suppress(CoordinationError):  # the caller's own error says more
            self.report_error(f"{type(error).__name__}: {error}")
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_connected", False) and not self._connection.closed:
            warnings.warn(
                f"{self!r} was never shut down", ResourceWarning, source=self, stacklevel=2
            )
            self.close()

    def __repr__(self) -> str:
        return f"CoordinationClient({self.address!r}, {self.process_id})"

    # --- Barriers

    def wait_at_barrier(
        self, barrier_id: str, timeout_in_ms: int, process_ids: Sequence[int] | None = None
    ) -> None:
        """Waits until all processes (or those of `process_ids`) have come to `barrier_id`, at most
        `timeout_in_ms`.

        An id may be used again; the nth call of one process matches the nth of the others. Raises
        BarrierTimeout with `missing`, ProcessLost when a participant is dead, CoordinatorLost.
        """
        _check(barrier_id=(barrier_id, str), timeout_in_ms=(timeout_in_ms, int))
        with self._lock:
            if barrier_id in self._ongoing:
                raise CoordinationError(
                    f"barrier {barrier_id!r} is already ongoing in this process",
                    code="FAILED_PRECONDITION",
                )
            self._ongoing.add(barrier_id)
            # Taken out and put in again: the dict's order is that of the last use.
            counter = self._counters.pop(barrier_id, -1) + 1
            self._counters[barrier_id] = counter
            if len(self._counters) > MOST_COUNTERS:
                del self._counters[next(iter(self._counters))]
        try:
            self._barrier(barrier_id, counter, timeout_in_ms, process_ids)
        finally:
            with self._lock:
                self._ongoing.discard(barrier_id)

    def _barrier(
        self, barrier_id: str, counter: int, timeout_in_ms: int, process_ids: Sequence[int] | None
    ) -> None:
        request = pb.BarrierRequest(
            barrier_id=barrier_id,
            barrier_timeout_in_ms=timeout_in_ms,
            source_task_id=self.process_id,
            counter=counter,
        )
        deadline = Deadline(max(0.0, timeout_in_ms / 1000) + ANSWER_GRACE_S)
        try:
            named = () if process_ids is None else process_ids
            response = self._call_among("Barrier", request, named, deadline)
        except CoordinationError as error:
            service_counter = barrier_counter(error)
            if service_counter is not None:
                self._counters[barrier_id] = service_counter
            raise
        self._counters[barrier_id] = response.counter
        self._barriers_passed += 1

    def cancel_barrier(self, barrier_id: str) -> None:
        """Fails the instance of `barrier_id` that this process waits at, or would come to next, for
        all its participants, with code CANCELLED. It counts as this process's call of it.

        Over meanwhile: FAILED_PRECONDITION. Not its participant: INVALID_ARGUMENT.
        """
        with self._lock:
            ongoing = barrier_id in self._ongoing
            counter = self._counters.get(barrier_id, -1) + (not ongoing)
        try:
            self._cancel(barrier_id, counter)
        except CoordinationError as error:
            reached = barrier_counter(error)
            if reached is None or reached < counter or ongoing:
                raise
            counter = reached + 1  # the others have gone on without this process
            self._cancel(barrier_id, counter)
        self._counters[barrier_id] = counter

    def _cancel(self, barrier_id: str, counter: int) -> None:
        request = pb.CancelBarrierRequest(
            barrier_id=barrier_id, counter=counter, source_task_id=self.process_id
        )
        self._call("CancelBarrier", request)

    # --- Keys

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        """Sets `key` to a string. A key that exists is ALREADY_EXISTS unless `allow_overwrite`."""
        _check(value=(value, str))
        self.key_value_set_bytes(key, value.encode(), allow_overwrite)

    def key_value_set_bytes(
        self,
        key: str,
        value: bytes,
        allow_overwrite: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Sets `key` to bytes, within `timeout_s`. A key that exists is ALREADY_EXISTS unless
        `allow_overwrite`.

        When a broken connection hides whether the first sending arrived, it is sent again; a key
        that then exists with this very value counts as set.
        """
        _check(key=(key, str), value=(value, bytes))
        request = pb.InsertKeyValueRequest(
            kv=pb.KeyValueEntry(key=key, value=value), allow_overwrite=allow_overwrite
        )
        retries: list[None] = []
        deadline = self._deadline(timeout_s)
        try:
            self._connection.call(
                "InsertKeyValue", request, deadline, on_retry=lambda: retries.append(None)
            )
        except CoordinationError as error:
            # The first sending may have arrived though its answer did not: then the key is ours.
            ours = retries and error.code == "ALREADY_EXISTS"
            if not (ours and self.key_value_try_get_bytes(key) == value):
                raise

    def key_value_set_many_bytes(
        self, values: Mapping[str, bytes], *, timeout_s: float | None = None
    ) -> None:
        """Sets many keys to bytes in one call, over what they hold, within `timeout_s`."""
        entries = [pb.KeyValueEntry(key=key, value=value) for key, value in values.items()]
        self._call("SetKeys", spb.SetKeysRequest(entries=entries), timeout_s)

    def blocking_key_value_get(
        self, key: str, timeout_in_ms: int, *, depends_on: Sequence[int] = ()
    ) -> str:
        """Returns the string at `key`, waiting for it as `blocking_key_value_get_bytes` does."""
        return self.blocking_key_value_get_bytes(key, timeout_in_ms, depends_on=depends_on).decode()

    def blocking_key_value_get_bytes(
        self, key: str, timeout_in_ms: int, *, depends_on: Sequence[int] = ()
    ) -> bytes:
        """Returns the bytes at `key`, waiting for them at most `timeout_in_ms`; DEADLINE_EXCEEDED
        when they do not come.

        `depends_on` names the processes that alone can set the key: when one of them is lost, the
        call raises ProcessLost at once.
        """
        _check(key=(key, str), timeout_in_ms=(timeout_in_ms, int))
        timed_out = (
            f"key {key!r} was not set within {timeout_in_ms} ms; find the process that should have"
            " set it"
        )
        if timeout_in_ms <= 0:
            raise CoordinationError(timed_out, code="DEADLINE_EXCEEDED")
        try:
            deadline = Deadline(timeout_in_ms / 1000 + ANSWER_GRACE_S)
            response = self._connection.call(
                "GetKeyValue",
                pb.GetKeyValueRequest(key=key),
                deadline,
                grace_s=ANSWER_GRACE_S,
                needs=depends_on,
            )
        except CoordinationError as error:
            if error.code == "DEADLINE_EXCEEDED":
                raise CoordinationError(timed_out, code="DEADLINE_EXCEEDED") from error
            raise
        return bytes(response.kv.value)

    def key_value_try_get(self, key: str) -> str:
        """Returns the string at `key`, or raises NOT_FOUND at once."""
        return self.key_value_try_get_bytes(key).decode()

    def key_value_try_get_bytes(self, key: str) -> bytes:
        """Returns the bytes at `key`, or raises NOT_FOUND at once."""
        _check(key=(key, str))
        return bytes(self._call("TryGetKeyValue", pb.TryGetKeyValueRequest(key=key)).kv.value)

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        """Returns the (key, string) pairs below the directory `key`, sorted; empty when there are
        none.
        """
        return [(name, value.decode()) for name, value in self.key_value_dir_get_bytes(key)]

    def key_value_dir_get_bytes(self, key: str) -> list[tuple[str, bytes]]:
        """Returns the (key, bytes) pairs below the directory `key`, sorted; empty when there are
        none.
        """
        _check(key=(key, str))
        response = self._call("GetKeyValueDir", pb.GetKeyValueDirRequest(directory_key=key))
        return sorted((entry.key, bytes(entry.value)) for entry in response.kv)

    def key_value_delete(self, key: str, *, timeout_s: float | None = None) -> None:
        """Deletes `key` and all below it, within `timeout_s`. A key that does not exist is no
        error.
        """
        _check(key=(key, str))
        request = pb.DeleteKeyValueRequest(key=key, is_directory=True)
        self._call("DeleteKeyValue", request, timeout_s)

    def key_value_increment(
        self, key: str, increment: int, *, timeout_s: float | None = None
    ) -> int:
        """Adds to the number at `key` (0 when unset), within `timeout_s`; returns the sum.
        FAILED_PRECONDITION when it holds no number.

        Never sent twice: CoordinatorLost when its answer is lost, and then it may or may not have
        been applied.
        """
        _check(key=(key, str), increment=(increment, int))
        request = pb.IncrementKeyValueRequest(key=key, increment=increment)
        return int(self._call("IncrementKeyValue", request, timeout_s).kv.value)

    # --- Processes

    def get_live_nodes(
        self, process_ids: Sequence[int], *, timeout_s: float | None = None
    ) -> dict[int, int]:
        """Returns {process: incarnation} of those of `process_ids` that live; a barrier over the
        living, at most `timeout_s` (default: `rpc_s`). Raises BarrierTimeout with `missing`.
        """
        request = pb.GetAliveTasksRequest(requesting_task_id=self.process_id)
        most_s = self._timeouts.rpc_s if timeout_s is None else timeout_s
        # The answer that names the missing comes when the time is over, not before.
        deadline = Deadline(most_s + ANSWER_GRACE_S)
        response = self._call_among("GetAliveTasks", request, process_ids, deadline)
        lives = spb.Lives.FromString(zlib.decompress(response.packed)).lives
        return {process_id: life for process_id, life in enumerate(lives) if life}

    def process_info(self) -> list[ProcessInfo]:
        """Returns all processes of the job, as the service sees them now."""
        return self._connection.processes(Deadline(self._timeouts.rpc_s))

    def watch_processes(
        self, listener: Callable[[Sequence[ProcessInfo]], None]
    ) -> Callable[[], None]:
        """Calls `listener` with the complete list of ProcessInfo at every change.

        Returns a function that ends the calls. They run on a thread of the client and must not
        block for long. Added before `connect`, the listener sees the processes come.
        """
        if self._connection.closed:
            raise CoordinationError("the client has been shut down", code="FAILED_PRECONDITION")
        return self._watch.add(listener)

    def report_error(self, message: str) -> None:
        """Reports that this process has failed: the others get ProcessLost with `message`, at
        once.
        """
        self._connection.report_error(message, Deadline(min(5.0, self._timeouts.rpc_s)))

    def report(
        self,
        *,
        step: int | None = None,
        saved_step: int | None = None,
        trouble: str | None = None,
        root: Mapping[str, Any] | None = None,
        asks_preemption: bool | None = None,
        **values: float,
    ) -> None:
        """Publishes this process's progress, for `holdfast status` and the launcher. What is left
        out keeps its value.

        `trouble` is a sentence about what has gone wrong though the process goes on, such as a save
        that failed; "" takes it back. `asks_preemption`: its program has asked whether it is to
        save and stop. `root` says where the job's checkpoints are and which: the fields of
        CheckpointRoot in proto/session.proto.
        """
        request = spb.ReportRequest(
            step=step,
            saved_step=saved_step,
            values=values,
            trouble=None if trouble is None else on_the_wire(trouble),
            root=root,
            asks_preemption=asks_preemption,  # type: ignore[arg-type]
        )
        self._connection.report(request, Deadline(5.0))

    def statistics(self) -> dict[str, int | float]:
        """Returns counts of calls, retries, reconnections, barriers passed, and the seconds since
        the service last answered.
        """
        return self._connection.statistics() | {"barriers_passed": self._barriers_passed}

    # --- Inside

    def _call_among(
        self, method: str, request: Any, process_ids: Sequence[int], deadline: Deadline
    ) -> Any:
        """Makes a call about processes: they are listed, or sent as bits where they are many.

        Raises BarrierTimeout where its time is over, also where nobody has answered.
        """
        participants = _packed(process_ids)
        if not participants:
            request.task_ids[:] = process_ids
        try:
            return self._connection.call(
                method, request, deadline, grace_s=ANSWER_GRACE_S, participants=participants
            )
        except CoordinationError as error:
            if error.code != "DEADLINE_EXCEEDED" or isinstance(error, BarrierTimeout):
                raise
            name = getattr(request, "barrier_id", "live")
            raise BarrierTimeout(error.message, name=name) from error

    def _call(self, method: str, request: Any, timeout_s: float | None = None) -> Any:
        return self._connection.call(method, request, self._deadline(timeout_s))

    def _deadline(self, timeout_s: float | None) -> Deadline:
        most_s = self._timeouts.rpc_s
        return Deadline(most_s if timeout_s is None else min(timeout_s, most_s))


def _packed(process_ids: Sequence[int]) -> bytes:
    """Returns many processes as deflated bits; b"" for a few, and for what the service refuses."""
    if len(process_ids) <= _MOST_LISTED:
        return b""
    named = frozenset(process_ids)
    if len(named) < len(process_ids) or min(named) < 0 or max(named) >= Limits().tasks:
        return b""
    return zlib.compress(bytes_of(bits_of(named)))


def _check(**arguments: tuple[object, type]) -> None:
    for name, (value, kind) in arguments.items():
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be {kind.__name__}, found {type(value).__name__}")
