"""A process on loopback that speaks plaintext to this host's agents and certificate and token to the coordinator.

Released jaxlib speaks neither TLS nor token, so with either on, each host has a relay (docs/adr has why). It forwards every call of
profiles A, B and D and our Session byte for byte, with its errors and their payloads, and lets through the task ids of this host only:
whoever reaches the loopback of one host can speak for no other. It ends with the process that started it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self

import grpc

from holdfast.proto import coordination_b_pb2, coordination_pb2, distributed_runtime_pb2, session_pb2

from ._calls import SESSION, STATUS_DETAILS
from ._credentials import Credentials
from ._errors import CoordinationError
from ._unary import CHANNEL_OPTIONS

PROFILES = {
    "xla.coordination.CoordinationService": coordination_pb2,
    "tensorflow.CoordinationService": coordination_b_pb2,
    "xla.DistributedRuntimeService": distributed_runtime_pb2,
}
NUMBERS = ("source_task_id", "requesting_task_id", "node_id", "process_id")
HOLDERS = ("source_task", "requesting_task")
_PREFIX = "relay at "
_SERVER_OPTIONS = (("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


class Relay:
    """Is a relay that this process has started; `address` is what this host's agents connect to. A context manager."""

    def __init__(self, process: subprocess.Popen[bytes], address: str) -> None:
        self._process, self.address = process, address

    @classmethod
    def spawn(cls, coordinator: str, credentials: Credentials, process_ids: Sequence[int], *, timeout_s: float = 30.0) -> Self:
        """Starts a relay to `coordinator` ("host:port") for the tasks `process_ids`, and returns when it listens.

        Raises CoordinationError with what it printed where it does not within `timeout_s`, or where a credential cannot be read.
        """
        credentials.metadata()  # a file that cannot be read is told here, by its name
        credentials.tls()
        told = {"coordinator": coordinator, "process_ids": list(process_ids), "credentials": dataclasses.asdict(credentials)}
        command = [sys.executable, "-c", "from holdfast.coordination._relay import main; main()", json.dumps(told)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
        return cls(process, _address_of(process, timeout_s))

    def close(self) -> None:
        """Ends the relay. Does nothing where it has ended."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _address_of(process: subprocess.Popen[bytes], timeout_s: float) -> str:
    assert process.stdout is not None and process.stderr is not None
    deadline, printed = time.monotonic() + timeout_s, b""
    while not printed.endswith(b"\n"):
        readable, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        piece = os.read(process.stdout.fileno(), 4096) if readable else b""
        if not piece:
            break
        printed += piece
    line = printed.decode(errors="replace").strip()
    if line.startswith(_PREFIX):
        return line.removeprefix(_PREFIX)
    process.kill()
    said = process.communicate()[1].decode(errors="replace").strip()
    raise CoordinationError(f"the relay did not start within {timeout_s:g} s; it said: {said or line!r}", code="UNAVAILABLE")


def task_ids(message: Any) -> list[int]:
    """Returns the tasks that a request names as its caller."""
    names = {field.name for field in message.DESCRIPTOR.fields}
    found = [getattr(message, name) for name in NUMBERS if name in names]
    holders = [getattr(message, name) for name in HOLDERS if name in names]
    return found + [holder.task_id for holder in holders if hasattr(holder, "task_id")]  # a repeated one asks about tasks, for none


def request_of(path: str, body: bytes) -> Any | None:
    """Returns a unary request's message, None for a path that no profile has. DecodeError for garbage."""
    _, service, method = path.split("/") if path.count("/") == 2 else ("", "", "")
    kind = getattr(PROFILES.get(service), f"{method}Request", None)
    return None if kind is None else kind.FromString(body)


class _Forwarder(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Forwards whatever it is asked for."""

    def __init__(self, channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...], allowed: frozenset[int]) -> None:
        self._channel, self._metadata, self._allowed = channel, metadata, allowed
        self._lives: set[int] = set()  # incarnations that registered here

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        path = details.method
        if path == SESSION:
            return grpc.stream_stream_rpc_method_handler(self._stream)

        async def unary(body: bytes, context: grpc.aio.ServicerContext) -> bytes:  # grpc.aio looks whether it is a coroutine function
            return await self._unary(path, body, context)

        return grpc.unary_unary_rpc_method_handler(unary)

    async def _check(self, message: Any, context: grpc.aio.ServicerContext) -> None:
        """Refuses a request in another host's name. Profile A's calls name their task by the incarnation that it registered with."""
        strangers = [task_id for task_id in task_ids(message) if task_id not in self._allowed]
        if strangers:
            what = f"process {strangers[0]} is not of this host: this relay speaks for {sorted(self._allowed)}"
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, what)
        if isinstance(message, coordination_pb2.RegisterTaskRequest):
            self._lives.add(message.incarnation)
        elif hasattr(message, "incarnations") and message.incarnations.task_incarnation not in self._lives:
            what = f"the caller has not registered through this relay, which speaks for {sorted(self._allowed)}"
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, what)

    async def _unary(self, path: str, body: bytes, context: grpc.aio.ServicerContext) -> bytes:
        try:
            message = request_of(path, body)
        except Exception:  # DecodeError, whose class differs between protobuf's implementations
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{path}: the request is not a message of this rpc")
        if message is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{path} is not relayed")
        await self._check(message, context)
        left_s = context.time_remaining()
        call = self._channel.unary_unary(path)(body, timeout=left_s, metadata=self._metadata)
        try:
            return bytes(await call)
        except grpc.aio.AioRpcError as error:
            await self._pass_on(error, context)

    async def _stream(self, frames: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        first = session_pb2.ClientFrame.FromString(await anext(frames))
        await self._check(first.open, context)

        async def forward() -> AsyncIterator[bytes]:
            yield first.SerializeToString()
            async for frame in frames:
                yield frame

        try:
            async for frame in self._channel.stream_stream(SESSION)(forward(), metadata=self._metadata):
                yield frame
        except grpc.aio.AioRpcError as error:
            await self._pass_on(error, context)

    @staticmethod
    async def _pass_on(error: grpc.aio.AioRpcError, context: grpc.aio.ServicerContext) -> NoReturn:
        trailing = tuple((key, value) for key, value in error.trailing_metadata() or () if key == STATUS_DETAILS)
        await context.abort(error.code(), error.details() or "", trailing)
        raise AssertionError("abort raises")


async def _serve(coordinator: str, process_ids: Sequence[int], credentials: Credentials) -> None:
    tls = credentials.tls()
    options = CHANNEL_OPTIONS
    channel = grpc.aio.secure_channel(coordinator, tls, options) if tls else grpc.aio.insecure_channel(coordinator, options)
    server = grpc.aio.server(options=_SERVER_OPTIONS)
    server.add_generic_rpc_handlers((_Forwarder(channel, credentials.metadata(), frozenset(process_ids)),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"{_PREFIX}127.0.0.1:{port}", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)  # ends with whoever started it
    await server.stop(0)


def main() -> None:
    """Runs a relay: its one argument is JSON."""
    told = json.loads(sys.argv[1])
    asyncio.run(_serve(told["coordinator"], told["process_ids"], Credentials(**told["credentials"])))


__all__ = ["Relay", "main"]
