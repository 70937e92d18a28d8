"""How a Session's frames lie on a connection, for both sides. No sockets."""

from __future__ import annotations

PREAMBLE = b"HFS1"
"""Each side's first bytes, in the clear. By them one port serves Sessions and gRPC."""

VERSION = 4
"""Of the frames. It rises when what session.proto or coordination.proto says changes its meaning:
the processes of a job that have another are refused, with both numbers.
"""

HELLO_BYTES = 4 * 1024
"""The largest frame before a Session is open: token, key and the names of job and host."""

ONE_VERSION = "install one version of holdfast on all hosts of a job"

HEAD_BYTES = 4
"""Of a frame's length."""


class FrameTooLongError(ValueError):
    """Says that a frame is longer than its reader takes."""


def head_of(nbytes: int) -> bytes:
    """Returns what stands before a frame of so many bytes."""
    return nbytes.to_bytes(HEAD_BYTES, "big")


def length_of(head: bytes | bytearray, most_bytes: int) -> int:
    """Returns the bytes of a frame by what stands before it. Raises FrameTooLongError."""
    nbytes = int.from_bytes(head, "big")
    if nbytes > most_bytes:
        raise FrameTooLongError(f"a frame of {nbytes} bytes; expected at most {most_bytes}")
    return nbytes


def framed(body: bytes) -> bytes:
    """Returns a frame as it lies on a connection."""
    return head_of(len(body)) + body


class FrameReader:
    """Finds frames in the bytes of a connection."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> None:
        """Takes what has arrived."""
        self._buffer += data

    def take(self, most_bytes: int) -> bytes | None:
        """Returns the next frame, None where it has not arrived whole.

        Raises FrameTooLongError as soon as its length is known.
        """
        buffer = self._buffer
        if len(buffer) < HEAD_BYTES:
            return None
        end = HEAD_BYTES + length_of(buffer[:HEAD_BYTES], most_bytes)
        if len(buffer) < end:
            return None
        with memoryview(buffer) as view:
            frame = bytes(view[HEAD_BYTES:end])
        del buffer[:end]
        return frame
