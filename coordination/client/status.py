"""Speaks to a coordinator without being a process of its job: status, stacks, keys, and the end of
a process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
from google.protobuf.empty_pb2 import Empty

from holdfast.proto import coordination_b_pb2, session_pb2

from ..credentials import Credentials
from ..errors import CoordinationError, CoordinatorLost
from ..names import (
    END_ATTEMPT,
    PROFILE_B,
    REPORT_EVENT,
    REPORT_EXIT,
    REPORT_LAUNCHER,
    STACKS,
    STATUS,
    on_the_wire,
)

_LIST_KEYS = PROFILE_B + "GetKeyValueDir"  # of profile B, whose requests name no incarnation
_GET_KEY = PROFILE_B + "GetKeyValue"
_STACKS_TIMEOUT_S = 30.0  # the coordinator waits 20 s for a process


class StatusClient:
    """Asks the coordinator at `address` ("host:port"). Each call takes at most `timeout_s` and
    raises CoordinationError with gRPC's code.

    A coordinator that does not listen is UNAVAILABLE at once, or is waited for where
    `wait_for_ready`. Safe from several threads; a context manager.
    """

    def __init__(
        self,
        address: str,
        credentials: Credentials | None = None,
        *,
        timeout_s: float = 5.0,
        wait_for_ready: bool = False,
    ) -> None:
        credentials = credentials or Credentials()
        self._address = address
        self.timeout_s = timeout_s
        self._options = {"metadata": credentials.metadata(), "wait_for_ready": wait_for_ready}
        self._channel = credentials.channel(address)
        self._is_closed = False

    def _call(
        self, path: str, request: Any, response: Any = Empty, timeout_s: float | None = None
    ) -> Any:
        try:
            method = self._method(path, request, response)
            return method(request, timeout=timeout_s or self.timeout_s, **self._options)
        except grpc.RpcError as error:
            raise self._error_of(error) from error
        except ValueError:  # "Cannot invoke RPC on closed channel!"
            raise _closed() from None

    def _method(self, path: str, request: Any, response: Any) -> Any:
        serializer = type(request).SerializeToString
        return self._channel.unary_unary(path, serializer, response.FromString)

    def status(
        self,
        *,
        with_events: bool = False,
        events_after: int = 0,
        after: session_pb2.StatusResponse | None = None,
    ) -> session_pb2.StatusResponse:
        """Returns the state of the whole job; with its history, the events of a higher number than
        `events_after`, where asked for.

        After an earlier status, where the coordinator is the same, `partial` is true, and `tasks`
        are only those that have changed or were heard of since.
        """
        request = session_pb2.StatusRequest(
            with_events=with_events,
            events_after=events_after,
            service_life=None if after is None else after.service_life,
            since_up_s=None if after is None else after.up_s,
        )
        status = self._call(STATUS, request, session_pb2.StatusResponse)
        assert isinstance(status, session_pb2.StatusResponse)
        return status

    def key_value_dir_get_bytes(self, key: str) -> list[tuple[str, bytes]]:
        """Returns the (key, bytes) pairs below the directory `key`, sorted; empty where there are
        none. Not of a secured coordinator.
        """
        request = coordination_b_pb2.GetKeyValueDirRequest(directory_key=key)
        response = self._call(_LIST_KEYS, request, coordination_b_pb2.GetKeyValueDirResponse)
        return sorted((entry.key, bytes(entry.value)) for entry in response.kv)

    def wait_for_key(self, key: str, *, timeout_s: float) -> bytes:
        """Returns the bytes at a key once there is one; DEADLINE_EXCEEDED where there is none by
        then. Not of a secured coordinator.
        """
        request = coordination_b_pb2.GetKeyValueRequest(key=key)
        response = self._call(_GET_KEY, request, coordination_b_pb2.GetKeyValueResponse, timeout_s)
        return bytes(response.kv.value)

    def stacks(
        self, process_ids: Sequence[int], *, timeout_s: float = _STACKS_TIMEOUT_S
    ) -> list[str | CoordinationError]:
        """Returns the stacks of all threads of each process, or why there are none. Asks all at
        once, and waits for `timeout_s` at most.
        """
        requests = [session_pb2.StacksRequest(task_id=process_id) for process_id in process_ids]
        try:
            calls = [
                self._method(STACKS, request, session_pb2.StacksResponse).future(
                    request, timeout=timeout_s, **self._options
                )
                for request in requests
            ]
        except ValueError:
            raise _closed() from None
        return [self._stacks_of(call) for call in calls]

    @staticmethod
    def _stacks_of(call: Any) -> str | CoordinationError:
        try:
            return str(call.result().stacks.decode(errors="replace"))
        except grpc.RpcError as error:
            return CoordinationError(error.details() or "", code=error.code().name)

    def _error_of(self, error: grpc.RpcError) -> CoordinationError:
        """Returns an error of ours; what gRPC says of a broken connection stays its cause."""
        code = error.code().name
        if code == "UNAVAILABLE":
            what = f"no coordinator answers at {self._address}; is it running?"
            return CoordinatorLost(what, address=self._address)
        # The server's gRPC says so, too, to a call that comes while it ends.
        if code == "CANCELLED" and not self._is_closed:
            what = f"the coordinator at {self._address} ended before it answered"
            return CoordinatorLost(what, address=self._address)
        if code == "DEADLINE_EXCEEDED":
            what = f"the coordinator at {self._address} did not answer in {self.timeout_s:g} s"
            return CoordinationError(what, code=code)
        if code == "UNIMPLEMENTED":
            what = f"what listens at {self._address} is no coordinator of holdfast's"
            return CoordinationError(what, code=code)
        return CoordinationError(error.details() or "", code=code)

    def report_exit(self, process_id: int, exit_code: int) -> None:
        """Reports as its launcher that a process has ended, by minus the signal's number where one
        ended it: it is lost at once.

        Nothing happens to one that has left. A secured coordinator takes this from a holder of the
        process's key alone.
        """
        request = session_pb2.ReportExitRequest(process_id=process_id, exit_code=exit_code)
        self._call(REPORT_EXIT, request)

    def report_event(self, kind: str, text: str, unix_s: float = 0.0) -> None:
        """Adds a line to the job's history, as its launcher, of something that happened at `unix_s`
        (0: now).
        """
        request = session_pb2.ReportEventRequest(kind=kind, text=on_the_wire(text), unix_s=unix_s)
        self._call(REPORT_EVENT, request)

    def report_launcher(
        self, launcher: session_pb2.Launcher, goodput_s: Mapping[str, float]
    ) -> None:
        """Reports as the job's launcher what it knows of the job, and where the time went: seconds
        since the job's start, by parts that sum to them.
        """
        request = session_pb2.ReportLauncherRequest(launcher=launcher, seconds=goodput_s)
        self._call(REPORT_LAUNCHER, request)

    def end_attempt(self, why: str, following: session_pb2.NextAttempt | None = None) -> None:
        """Says as its launcher, about to end the processes, that the attempt is over: they log why,
        and take SIGTERM for no preemption. Those that stay go where `following` says. A secured
        coordinator takes this from a holder of a process's key alone.
        """
        request = session_pb2.EndAttemptRequest(why=on_the_wire(why), next=following)
        self._call(END_ATTEMPT, request)

    def give_notice(self, why: str) -> None:
        """Says as its launcher why all processes are about to get a notice: they log that. A
        secured coordinator takes this from a holder of a process's key alone.
        """
        request = session_pb2.EndAttemptRequest(notice=on_the_wire(why))
        self._call(END_ATTEMPT, request)

    def ask_to_grow(self) -> None:
        """Says as its launcher that there is room for more processes: process 0 has all save and
        leave their loops. A secured coordinator takes this from a holder of a process's key alone.
        """
        request = session_pb2.EndAttemptRequest(grow=True)
        self._call(END_ATTEMPT, request)

    def close(self) -> None:
        """Closes the connection; calls under way raise CANCELLED."""
        self._is_closed = True
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _closed() -> CoordinationError:
    return CoordinationError("the status client is closed", code="CANCELLED")
