"""A process that speaks plaintext to this process's agent, and certificate, token and key to the
coordinator.

Released jaxlib speaks none of these, so with TLS or a token on, each process has a relay
(docs/adr/0005). It listens at a socket in a folder that only its own user can enter, and forwards
every call of profiles A, B and D and our Session byte for byte, with its errors and their payloads.
A Session's first answer is its own: the address that it forwards to. It lets through the task
ids that it was started for, and ends with the process that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Self

import click
import grpc

from holdfast.proto import (
    coordination_b_pb2,
    coordination_pb2,
    distributed_runtime_pb2,
    session_pb2,
)

from ..client.stream import SILENCE_S
from ..credentials import Credentials, channel_options
from ..limits import Limits
from ..names import (
    NOBODY,
    PROFILE_A,
    PROFILE_B,
    PROFILE_D,
    REPORT_EXIT,
    STACKS,
    STATUS,
    STATUS_DETAILS,
    claim_of,
)
from ..wire.doorway import Doorway
from .job_folder import keep_from_cleaners, temporary_base
from .relayed_session import RelayedSession, Upstream
from .spawn import PROGRAM, SpawnedServer, close_pipes, start

MESSAGES = {
    PROFILE_A: coordination_pb2,
    PROFILE_B: coordination_b_pb2,
    PROFILE_D: distributed_runtime_pb2,
}
FOR_ALL = frozenset({STATUS, STACKS})
"""What every member may ask, in nobody's name."""
_UNIX = "unix:"
_END_S = 2.0
_MOST_GUESTS = 1_000
_MOST_PASSAGES = 4_000
_SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)


class Relay(SpawnedServer):
    """A relay that this process has started; `address` is what this process's agent connects to. A
    context manager.
    """

    @classmethod
    def spawn(
        cls,
        coordinator: str,
        credentials: Credentials,
        process_ids: Sequence[int],
        *,
        name: str = "relay",
        timeout_s: float = 30.0,
    ) -> Self:
        """Starts a relay to `coordinator` ("host:port") for the tasks `process_ids`, and returns
        when it listens, at a socket that is called `name`.

        A client of ours for the same task must be given the same `credentials` object: its key says
        that both are one process. Raises CoordinationError with what the relay printed where it
        does not listen within `timeout_s`, or where a credential cannot be read.
        """
        credentials.metadata()  # raises here, with its name, for a file that cannot be read
        credentials.tls()
        # Not an argument, which all users could read.
        shown = _line(dataclasses.asdict(credentials))
        first = cls.order(name, coordinator, process_ids)
        return cls(*start("relay", [*PROGRAM, "relay"], timeout_s, settings=shown + first))

    def serve(
        self,
        name: str,
        coordinator: str,
        process_ids: Sequence[int],
        *,
        timeout_s: float = 30.0,
    ) -> str:
        """Has it forward to another coordinator too, with the same credentials; returns the address
        of the socket for that, called `name`. Where there is one, it gets more tasks.

        Raises CoordinationError where it does not answer within `timeout_s`.
        """
        self._send(self.order(name, coordinator, process_ids))
        return self._next_address("relay", timeout_s)

    def end(self, name: str) -> None:
        """Closes the socket of that name, and all that is connected there."""
        self._send(self.order(name))

    @staticmethod
    def order(name: str, coordinator: str | None = None, process_ids: Sequence[int] = ()) -> bytes:
        """Returns the line by which whoever holds its input has it do what `serve` or, without a
        coordinator, `end` does.
        """
        return _line({"name": name, "coordinator": coordinator, "process_ids": list(process_ids)})

    def _send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def close(self) -> None:
        """Ends the relay, at once. Does nothing where it has ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()  # where others hold its input too, it is killed
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._process.kill()
        super().close()
        shutil.rmtree(Path(self.address.removeprefix(_UNIX)).parent, ignore_errors=True)

    def abandon(self) -> None:
        """Lets go of the relay: it ends when no other process holds its input any more."""
        close_pipes(self._process)


def _line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


def request_of(path: str, body: bytes) -> Any | None:
    """Returns a unary request's message, None for a path that no profile has. DecodeError for
    garbage.
    """
    if path == REPORT_EXIT:
        return session_pb2.ReportExitRequest.FromString(body)
    profile, _, method = path.rpartition("/")
    kind = getattr(MESSAGES.get(f"{profile}/"), f"{method}Request", None)
    return None if kind is None else kind.FromString(body)


class _Forwarder(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Forwards every call that speaks for its own tasks."""

    def __init__(self, channel: grpc.aio.Channel, upstream: Upstream) -> None:
        self._channel = channel
        self._upstream = upstream
        self._incarnations: set[int] = set()  # those that registered here

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        path = details.method

        # grpc.aio asks for a coroutine function, which no partial is
        async def unary(body: bytes, context: grpc.aio.ServicerContext) -> bytes:
            return await self._unary(path, body, context)

        return grpc.unary_unary_rpc_method_handler(unary)

    async def _check(self, message: Any, context: grpc.aio.ServicerContext) -> None:
        """Refuses a request for another process. Profile A's calls name their task by the
        incarnation that it registered with.
        """
        task_id = claim_of(message).task_id
        refusal = None if task_id in (None, NOBODY) else self._upstream.refusal(task_id)
        if refusal is not None:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, refusal)
        if isinstance(message, coordination_pb2.RegisterTaskRequest):
            self._incarnations.add(message.incarnation)
        elif (
            hasattr(message, "incarnations")
            and message.incarnations.task_incarnation not in self._incarnations
        ):
            what = (
                "the caller has not registered through this relay, which speaks for"
                f" {sorted(self._upstream.process_ids)}"
            )
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, what)

    async def _unary(self, path: str, body: bytes, context: grpc.aio.ServicerContext) -> bytes:
        if path not in FOR_ALL:
            await self._check_unary(path, body, context)
        call = self._channel.unary_unary(path)(
            body, timeout=context.time_remaining(), metadata=self._upstream.metadata
        )
        try:
            return bytes(await call)
        except grpc.aio.AioRpcError as error:
            await self._pass_on(error, context)

    async def _check_unary(self, path: str, body: bytes, context: grpc.aio.ServicerContext) -> None:
        try:
            message = request_of(path, body)
        except Exception:  # DecodeError, whose class differs between protobuf's implementations
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"{path}: the request is not a message of this rpc",
            )
        if message is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{path} is not relayed")
        await self._check(message, context)

    @staticmethod
    async def _pass_on(error: grpc.aio.AioRpcError, context: grpc.aio.ServicerContext) -> NoReturn:
        trailing = tuple(
            (key, value) for key, value in error.trailing_metadata() or () if key == STATUS_DETAILS
        )
        await context.abort(error.code(), error.details() or "", trailing)
        raise AssertionError("abort raises")


class _Door:
    """The socket of one attempt, and what came in by it."""

    def __init__(self, upstream: Upstream, channel: grpc.aio.Channel, path: str) -> None:
        self.upstream = upstream
        self._channel = channel
        self._path = path
        calls = f"{path}.grpc"
        self._server = grpc.aio.server(options=_SERVER_OPTIONS)
        self._server.add_generic_rpc_handlers((_Forwarder(channel, upstream),))
        self._server.add_insecure_port(f"{_UNIX}{calls}")
        listener = socket.socket(socket.AF_UNIX)
        listener.setblocking(False)
        listener.bind(path)
        self._doorway = Doorway(
            [listener],
            lambda connection: RelayedSession(self._doorway, upstream, connection),
            calls,
            most_guests=_MOST_GUESTS,
            most_passages=_MOST_PASSAGES,
            patience_s=Limits().idle_connection_s,
            silence_s=SILENCE_S,
        )

    async def open(self) -> None:
        await self._server.start()

    async def close(self) -> None:
        """Ends all that is connected here."""
        self._doorway.close()
        for session in [*self.upstream.sessions]:
            session.cancel()
        await self._server.stop(0)
        await self._channel.close()
        Path(self._path).unlink(missing_ok=True)


async def _serve(credentials: Credentials, folder: str) -> None:
    """Opens and closes doors, as each line of the input says. That ends with the process that
    started this one.
    """
    tls = credentials.tls()
    options = channel_options(SILENCE_S)
    shown = (credentials.metadata(), credentials.tls_context())
    doors: dict[str, _Door] = {}
    read = partial(asyncio.get_running_loop().run_in_executor, None, sys.stdin.buffer.readline)
    while line := await read():
        said = json.loads(line)
        name = said["name"]
        coordinator = said["coordinator"]
        if coordinator is None:
            if name in doors:
                await doors.pop(name).close()
            continue
        if name not in doors:
            if tls is None:
                channel = grpc.aio.insecure_channel(coordinator, options)
            else:
                channel = grpc.aio.secure_channel(coordinator, tls, options)
            doors[name] = _Door(Upstream(coordinator, *shown), channel, f"{folder}/{name}")
            await doors[name].open()
        doors[name].upstream.process_ids.update(said["process_ids"])
        with contextlib.suppress(OSError):  # nobody reads it any more
            print(f"relay at {_UNIX}{folder}/{name}", flush=True)
    for door in doors.values():
        await door.close()


@click.command()
def relay() -> None:
    """Runs a relay. The first line of its input holds its credentials, as JSON, and each of the
    others an attempt to serve, or to end; it ends with its input.

    No signal ends it but SIGKILL: launchers send theirs to whole groups and job steps, whose
    processes need it to save and leave.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    credentials = Credentials(**json.loads(sys.stdin.buffer.readline()))
    # Of mode 0700.
    with tempfile.TemporaryDirectory(prefix="holdfast-", dir=temporary_base()) as folder:
        keep_from_cleaners(Path(folder))
        asyncio.run(_serve(credentials, folder))
