"""What waits to be written: one message at a time on a stream, large ones in turns."""

from __future__ import annotations

from holdfast.coordination.server.outbox import LARGE_BYTES, LENT_S, Outbox, Turns


class Stream:
    """A stream that keeps what was started."""

    def __init__(self, turns: Turns) -> None:
        self.started: list[bytes] = []
        self.end: tuple[int, str] | None = None
        self.outbox = Outbox(turns, self.started.append, self._finish)

    def _finish(self, code: int, message: str) -> None:
        self.end = (code, message)


class Clock:
    """A clock that a test turns."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_messages_of_a_stream_go_one_after_the_other() -> None:
    """In order, the shared part behind the frame; the end comes after them, and nothing later."""
    stream = Stream(Turns(1 << 20, Clock()))
    stream.outbox.write(b"a", b"1")
    stream.outbox.write(b"b", b"2")
    stream.outbox.finish(5, "over")
    stream.outbox.write(b"c", b"")
    assert stream.started == [] and stream.outbox.backlog_bytes == 4
    for _ in range(2):
        stream.outbox.written()
    assert stream.started == [b"a1", b"b2"] and stream.end is None
    stream.outbox.written()
    assert stream.end == (5, "over") and stream.outbox.backlog_bytes == 0


def test_large_messages_take_turns_and_small_ones_do_not() -> None:
    """Two fit; the third waits, without a backlog of its own; a closed one gives its turn on."""
    turns = Turns(2 * LARGE_BYTES, Clock())
    streams = [Stream(turns) for _ in range(5)]
    for stream in streams:
        stream.outbox.written()
        stream.outbox.write(b"", b"x" * LARGE_BYTES)
        stream.outbox.write(b"small", b"")
    assert [len(stream.started) for stream in streams] == [1, 1, 0, 0, 0]
    assert streams[0].outbox.backlog_bytes == 5 and streams[2].outbox.backlog_bytes == 0
    streams[2].outbox.close()
    streams[0].outbox.written()
    assert [len(stream.started) for stream in streams] == [2, 1, 0, 1, 0]
    streams[1].outbox.close()
    assert [len(stream.started) for stream in streams] == [2, 1, 0, 1, 1]
    assert turns.under_way_bytes == 2 * LARGE_BYTES


def test_one_that_does_not_read_gives_its_turn_up() -> None:
    """After LENT_S, and not before; what it gives back later is counted once."""
    clock = Clock()
    turns = Turns(LARGE_BYTES, clock)
    stopped = Stream(turns)
    other = Stream(turns)
    for stream in (stopped, other):
        stream.outbox.written()
        stream.outbox.write(b"", b"x" * LARGE_BYTES)
    clock.now = LENT_S - 0.1
    turns.tick()
    assert not other.started
    clock.now = LENT_S
    turns.tick()
    assert other.started and turns.under_way_bytes == LARGE_BYTES
    stopped.outbox.written()
    assert turns.under_way_bytes == LARGE_BYTES
    other.outbox.written()
    assert turns.under_way_bytes == 0


def test_a_message_larger_than_all_turns_goes_alone() -> None:
    """It waits until nothing large is under way."""
    turns = Turns(2 * LARGE_BYTES, Clock())
    first = Stream(turns)
    second = Stream(turns)
    for stream, size in ((first, LARGE_BYTES), (second, 9 * LARGE_BYTES)):
        stream.outbox.written()
        stream.outbox.write(b"", b"x" * size)
    assert not second.started
    first.outbox.written()
    assert second.started
