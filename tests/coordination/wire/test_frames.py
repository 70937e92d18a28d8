"""Frames are found in bytes, however they arrive, and long ones before they have come."""

from __future__ import annotations

import hashlib
import random

import pytest

from holdfast.coordination.wire.frames import (
    VERSION,
    FrameReader,
    FrameTooLongError,
    framed,
    head_of,
)
from holdfast.proto import coordination_pb2, session_pb2


def _taken(reader: FrameReader) -> list[bytes]:
    frames = []
    while (frame := reader.take(5_000)) is not None:
        frames.append(frame)
    return frames


@pytest.mark.parametrize("seed", range(20))
def test_frames_come_out_as_they_went_in(seed: int) -> None:
    """In pieces of any size, empty frames too."""
    chance = random.Random(seed)
    frames = [chance.randbytes(chance.choice((0, 1, 3, 100, 5_000))) for _ in range(30)]
    data = b"".join(map(framed, frames))
    reader = FrameReader()
    found = []
    while data:
        nbytes = chance.randrange(1, 3_000)
        reader.feed(data[:nbytes])
        data = data[nbytes:]
        found += _taken(reader)
    assert found == frames


def test_a_frame_that_is_too_long_is_refused_by_its_head() -> None:
    """Before a byte of it is there; another bound may hold for the next."""
    reader = FrameReader()
    reader.feed(framed(b"x" * 10) + head_of(11))
    assert reader.take(10) == b"x" * 10
    with pytest.raises(FrameTooLongError, match="a frame of 11 bytes; expected at most 10"):
        reader.take(10)
    assert reader.take(11) is None
    reader.feed(b"y" * 11)
    assert reader.take(11) == b"y" * 11


def test_a_change_of_the_messages_is_a_decision() -> None:
    """Whoever changes what a Session carries raises VERSION where processes of both kinds would
    misunderstand each other, and writes the new digest here.
    """
    files = (session_pb2.DESCRIPTOR, coordination_pb2.DESCRIPTOR)
    digest = hashlib.sha256(b"".join(file.serialized_pb for file in files)).hexdigest()[:16]
    assert (VERSION, digest) == (4, "cea5135ded1ce7a6")
