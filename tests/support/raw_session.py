"""A Session as frames on a connection, without holdfast's client."""

from __future__ import annotations

import socket
from types import TracebackType
from typing import Any, Self

from holdfast.coordination import Credentials
from holdfast.coordination.address import connect
from holdfast.coordination.client.stream import hello_of, server_name
from holdfast.coordination.core.status import Code
from holdfast.coordination.wire.frames import HEAD_BYTES, PREAMBLE, framed
from holdfast.proto import session_pb2


class RawSession:
    """A connection on which Hello has been sent. A context manager."""

    def __init__(
        self,
        address: str,
        credentials: Credentials | None = None,
        *,
        hello: bytes | None = None,
        timeout_s: float = 20.0,
    ) -> None:
        credentials = credentials or Credentials()
        self.connection: socket.socket = connect(address, timeout_s)
        try:
            self.connection.sendall(PREAMBLE)
            found = self._exactly(len(PREAMBLE))
            assert found == PREAMBLE, found
            context = credentials.tls_context()
            if context is not None:
                name = server_name(address)
                self.connection = context.wrap_socket(self.connection, server_hostname=name)
            self.send_bytes(hello_of(credentials.metadata()) if hello is None else hello)
        except BaseException:
            self.connection.close()
            raise

    def open(self, process_id: int, incarnation: int, **fields: Any) -> Self:
        """Sends Open; its answer is yet to be read."""
        self.send(open=session_pb2.Open(process_id=process_id, incarnation=incarnation, **fields))
        return self

    def send(self, **frame: Any) -> None:
        """Sends a frame of the client."""
        self.send_bytes(session_pb2.ClientFrame(**frame).SerializeToString())

    def ask(self, number: int, method: str, message: Any) -> None:
        """Sends a request."""
        body = message.SerializeToString()
        self.send(request=session_pb2.Request(id=number, method=method, body=body))

    def send_bytes(self, body: bytes) -> None:
        """Sends a frame that may be none of the client's."""
        self.connection.sendall(framed(body))

    def read(self) -> session_pb2.ServerFrame:
        """Returns the service's next frame; EOFError where it has ended the connection."""
        nbytes = int.from_bytes(self._exactly(HEAD_BYTES), "big")
        return session_pb2.ServerFrame.FromString(self._exactly(nbytes))

    def end(self) -> tuple[str, str]:
        """Reads up to the End, and returns its code and sentence."""
        while not (frame := self.read()).HasField("end"):
            pass
        return Code(frame.end.code).name, frame.end.message

    def _exactly(self, nbytes: int) -> bytes:
        data = bytearray()
        while len(data) < nbytes:
            if not (more := self.connection.recv(nbytes - len(data))):
                raise EOFError(f"the connection was closed after {len(data)} of {nbytes} bytes")
            data += more
        return bytes(data)

    def close(self) -> None:
        """Closes the connection."""
        self.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
