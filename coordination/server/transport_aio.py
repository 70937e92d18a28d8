"""The service over grpc.aio, gRPC's public API: the fallback for releases with which
transport_completion_queue was not tested.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grpc

from ..core.machine import STANDSTILL_S
from ..core.status import Code
from ..names import SESSION, STATUS_DETAILS
from .admission import CallRefused
from .service import Service
from .sessions import Session
from .transports import ALTERNATIVE_NAMES, Listening, channel_options

_CATCH_UP_S = 0.5
"""After a standstill what has arrived is read for so long before time passes."""


def _names(context: Any) -> Sequence[bytes]:
    names: Sequence[bytes] = context.auth_context().get(ALTERNATIVE_NAMES, ())
    return names


class _UnaryWriter:
    """A ResponseWriter: its outcome is set by the service, and awaited by gRPC's handler."""

    def __init__(self, context: Any, key: str) -> None:
        self._context = context
        self.key = key
        self.timed = context.time_remaining() is not None
        loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[tuple[int, str, bytes]] = loop.create_future()

    def names(self) -> Sequence[bytes]:
        return _names(self._context)

    def succeed(self, body: bytes) -> None:
        if not self.outcome.done():
            self.outcome.set_result((0, "", body))

    def fail(self, code: int, message: str, details: bytes) -> None:
        if not self.outcome.done():
            self.outcome.set_result((code, message, details))


class _End(NamedTuple):
    """How a stream ends."""

    code: int
    message: str


class _QueuedStream:
    """A SessionStream whose frames to write wait in a queue."""

    def __init__(self, context: Any, key: str) -> None:
        self._context = context
        self.key = key
        self.session: Session | None = None
        self.queue: asyncio.Queue[tuple[bytes, bytes] | _End] = asyncio.Queue()
        self.backlog_bytes = 0

    def bind(self, session: Session | None) -> None:
        self.session = session

    def names(self) -> Sequence[bytes]:
        return _names(self._context)

    def write(self, frame: bytes, shared: bytes = b"") -> None:
        self.backlog_bytes += len(frame) + len(shared)
        self.queue.put_nowait((frame, shared))

    def note_written(self, message: bytes) -> None:
        self.backlog_bytes -= len(message)

    def finish(self, code: int, message: str) -> None:
        self.queue.put_nowait(_End(code, message))


class AioTransport(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Serves a Service until it is over."""

    def __init__(self, service: Service, listening: Listening) -> None:
        self._service = service
        self._listening = listening
        self._admission = listening.admission(service.config.limits)
        self._flushing = False
        self._woken = asyncio.Event()
        self._server = grpc.aio.server(handlers=(self,), options=channel_options(service.config))

    def bind(self) -> int:
        """Binds the port; OSError where it is taken."""
        server = self._server
        address = self._listening.address
        return self._listening.bind(
            lambda tls: (
                server.add_secure_port(address, tls) if tls else server.add_insecure_port(address)
            )
        )

    def service(self, handler_call_details: Any) -> Any:
        path = handler_call_details.method
        if path == SESSION:
            return grpc.stream_stream_rpc_method_handler(self._session)

        async def unary(body: bytes, context: Any) -> bytes:
            return await self._unary(path, body, context)

        return grpc.unary_unary_rpc_method_handler(unary)

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        self._service.flush()
        self._woken.set()

    async def _admit(self, context: Any) -> str:
        try:
            return self._admission.admit(
                context.peer, context.invocation_metadata(), self._listening.clock()
            )
        except CallRefused as refused:
            await context.abort(_STATUS[refused.code], str(refused))
            raise AssertionError("abort raises") from refused

    async def _unary(self, path: str, body: bytes, context: Any) -> bytes:
        writer = _UnaryWriter(context, await self._admit(context))
        call = self._service.unary(path, body, writer)
        self._flush_soon()
        try:
            code, message, body = await writer.outcome
        except asyncio.CancelledError:
            if call is not None:
                self._service.drop(call)
            raise
        if code:
            await context.abort(_STATUS[code], message, ((STATUS_DETAILS, body),) if body else ())
        return body

    async def _session(self, request_iterator: Any, context: Any) -> None:
        stream = _QueuedStream(context, await self._admit(context))
        reader = asyncio.create_task(self._read(stream, request_iterator))
        try:
            while True:
                item = await stream.queue.get()
                if not isinstance(item, _End):
                    message = b"".join(item)
                    await context.write(message)
                    stream.note_written(message)
                elif item.code == Code.OK:  # which gRPC does not abort with
                    return
                else:
                    await context.abort(_STATUS[item.code], item.message)
        finally:
            reader.cancel()
            self._service.stream_closed(stream)
            self._flush_soon()

    async def _read(self, stream: _QueuedStream, frames: Any) -> None:
        async for frame in frames:
            self._service.stream_frame(stream, frame)
            self._flush_soon()
        stream.finish(Code.OK, "")

    async def serve(self, stop_reason: Callable[[], str | None]) -> str:
        """Serves until `stop_reason()` gives one, which it returns."""
        await self._server.start()
        while (reason := stop_reason()) is None:
            due_s = self._service.next_due() - self._listening.clock()
            self._woken.clear()
            if due_s > 0:
                try:
                    await asyncio.wait_for(self._woken.wait(), min(due_s, 0.5))
                except TimeoutError:
                    continue
            late_s = self._listening.clock() - self._service.next_due()
            if late_s > STANDSTILL_S:
                await asyncio.sleep(_CATCH_UP_S)
            if late_s >= 0:
                self._service.tick()
                self._service.flush()
        self._service.close()
        await self._server.stop(0.5)
        return reason


_STATUS = {status.value[0]: status for status in grpc.StatusCode}
