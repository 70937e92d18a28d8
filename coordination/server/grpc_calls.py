"""The calls of jaxlib's agents, launchers and askers, over gRPC's public API.

gRPC copies each message that is handed to it. A value that thousands of agents wait for would be
copied thousands of times at one moment. So large answers take turns; until its turn, an answer is a
reference to the one copy that all share.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from ..core.status import Code
from ..names import SESSION, STATUS_DETAILS
from ..wire.frames import ONE_VERSION, VERSION
from .admission import Admission, CallRefused, headers_of
from .listening import ALTERNATIVE_NAMES, Listening, channel_options
from .service import Service

_STATUS = {status.value[0]: status for status in grpc.StatusCode}
_OLDER = (
    f"this coordinator speaks version {VERSION} of holdfast's Session, and the process an older one"
    f" over gRPC: {ONE_VERSION}"
)


LARGE_BYTES = 4 * 1024
"""From here on an answer takes turns: so many for each of 16,384 agents are the 64 MiB that may be
under way.
"""

LENT_S = 2.0
"""After that the turn of a client that does not read is over for the others' sake: its own answer
stays under way.
"""

Turn = asyncio.Future[None]


class Turns:
    """Bounds the bytes of large answers that are under way at a time."""

    def __init__(self, most_bytes: int, clock: Callable[[], float]) -> None:
        self._most_bytes = most_bytes
        self._clock = clock
        self._lent: dict[Turn, tuple[float, int]] = {}  # since when, bytes; the oldest first
        self._waiting: deque[tuple[Turn, int]] = deque()
        self.under_way_bytes = 0

    async def take(self, nbytes: int) -> Turn:
        """Waits for a turn for so many bytes, and returns it, to be given back."""
        turn: Turn = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, nbytes))
        self._go_on()
        try:
            await turn
        except asyncio.CancelledError:
            self.give_back(turn)
            raise
        return turn

    def _fits(self, nbytes: int) -> bool:
        # The largest answer of all goes alone.
        return not self._lent or self.under_way_bytes + nbytes <= self._most_bytes

    def _go_on(self) -> None:
        while self._waiting and self._fits(self._waiting[0][1]):
            turn, nbytes = self._waiting.popleft()
            if not turn.cancelled():
                self._lent[turn] = (self._clock(), nbytes)
                self.under_way_bytes += nbytes
                turn.set_result(None)

    def give_back(self, turn: Turn) -> None:
        """Ends a turn, where it is not over, and gives the next ones."""
        _, nbytes = self._lent.pop(turn, (0.0, 0))
        self.under_way_bytes -= nbytes
        self._go_on()

    def tick(self) -> None:
        """Ends the turns of those that have not read for `LENT_S`."""
        since = self._clock() - LENT_S
        late = [turn for turn, (lent_at, _) in self._lent.items() if lent_at <= since]
        for turn in late if self._waiting else ():
            self.give_back(turn)


class _UnaryWriter:
    """A ResponseWriter: its outcome is set by the service, and awaited by gRPC's handler."""

    def __init__(self, context: Any, key: str) -> None:
        self._context = context
        self.key = key
        self.timed = context.time_remaining() is not None
        loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[tuple[int, str, bytes]] = loop.create_future()

    def names(self) -> Sequence[bytes]:
        """Returns the alternative names in the caller's certificate."""
        names: Sequence[bytes] = self._context.auth_context().get(ALTERNATIVE_NAMES, ())
        return names

    def succeed(self, body: bytes) -> None:
        if not self.outcome.done():
            self.outcome.set_result((0, "", body))

    def fail(self, code: int, message: str, details: bytes) -> None:
        if not self.outcome.done():
            self.outcome.set_result((code, message, details))


class GrpcCalls(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Hands gRPC's calls to a service. `flush_soon` is called after each."""

    def __init__(
        self,
        service: Service,
        listening: Listening,
        admission: Admission,
        flush_soon: Callable[[], None],
    ) -> None:
        self._service = service
        self._listening = listening
        self._admission = admission
        self._flush_soon = flush_soon
        self._waiting: set[_UnaryWriter] = set()
        self.turns = Turns(service.config.limits.under_way_bytes, listening.clock)
        self._server = grpc.aio.server(handlers=(self,), options=channel_options(service.config))

    async def start(self, path: str) -> None:
        """Serves at a Unix socket."""
        tls = self._listening.tls
        if tls is None:
            self._server.add_insecure_port(f"unix:{path}")
        else:
            self._server.add_secure_port(f"unix:{path}", tls.for_grpc())
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Ends; calls may be answered until then. Those that wait are told that nobody answers."""
        for writer in self._waiting:
            writer.fail(int(Code.UNAVAILABLE), "the coordination service ends", b"")
        await self._server.stop(grace_s)

    def service(self, handler_call_details: Any) -> Any:
        path = handler_call_details.method
        if path == SESSION:
            return grpc.stream_stream_rpc_method_handler(_refuse_older)

        async def unary(body: bytes, context: Any) -> bytes:
            return await self._unary(path, body, context)

        return grpc.unary_unary_rpc_method_handler(unary)

    async def _admit(self, context: Any) -> str:
        headers = headers_of(context.invocation_metadata())
        try:
            self._admission.admit(context.peer, headers.authorization, self._listening.clock())
        except CallRefused as refused:
            await context.abort(_STATUS[refused.code], str(refused))
        return headers.key

    async def _unary(self, path: str, body: bytes, context: Any) -> bytes:
        writer = _UnaryWriter(context, await self._admit(context))
        call = self._service.unary(path, body, writer)
        self._flush_soon()
        self._waiting.add(writer)
        try:
            code, message, body = await writer.outcome
        except asyncio.CancelledError:
            if call is not None:
                self._service.drop(call)
                self._flush_soon()
            raise
        finally:
            self._waiting.discard(writer)
        if code:
            await context.abort(_STATUS[code], message, ((STATUS_DETAILS, body),) if body else ())
        if len(body) >= LARGE_BYTES:
            turn = await self.turns.take(len(body))
            context.add_done_callback(lambda _: self.turns.give_back(turn))
        return body


async def _refuse_older(frames: Any, context: Any) -> None:
    """Answers a client of a holdfast whose Sessions went over gRPC."""
    await context.abort(_STATUS[Code.FAILED_PRECONDITION], _OLDER)
