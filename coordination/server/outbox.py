"""What waits to be written to clients. No sockets.

gRPC copies each message that is handed to it. A value that thousands of Sessions wait for would be
copied thousands of times at one moment: 29 GB, where 16,384 processes exchange their ids. So large
messages take turns. Until its turn, a message is a reference to the one copy that all share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

LARGE_BYTES = 4 * 1024
"""From here on a message takes turns: so many for each of 16,384 Sessions are the 64 MiB that may
be under way.
"""

LENT_S = 2.0
"""After that the turn of a client that does not read is over for the others' sake: its own message
stays under way.
"""


class Sender(Protocol):
    """One that waits for its turn."""

    def begin(self) -> bool:
        """Begins to send; returns False where there is nothing to send any more."""


class Turns:
    """Bounds the bytes of large messages that are under way at a time."""

    def __init__(self, most_bytes: int, clock: Callable[[], float]) -> None:
        self._most_bytes = most_bytes
        self._clock = clock
        self._lent: dict[Sender, tuple[float, int]] = {}  # since when, bytes; the oldest first
        self._waiting: deque[tuple[Sender, int]] = deque()
        self.under_way_bytes = 0

    def take(self, sender: Sender, nbytes: int) -> bool:
        """Gives a turn for so many bytes; where it cannot now, `sender.begin` is called later."""
        if self._waiting or not self._fits(nbytes):
            self._waiting.append((sender, nbytes))
            return False
        self._lend(sender, nbytes)
        return True

    def _fits(self, nbytes: int) -> bool:
        # The largest message of all goes alone.
        return not self._lent or self.under_way_bytes + nbytes <= self._most_bytes

    def _lend(self, sender: Sender, nbytes: int) -> None:
        self._lent[sender] = (self._clock(), nbytes)
        self.under_way_bytes += nbytes

    def give_back(self, sender: Sender) -> None:
        """Ends a turn, where the sender has one, and gives the next ones."""
        if self._take_back(sender):
            self._go_on()

    def _take_back(self, sender: Sender) -> bool:
        _, nbytes = self._lent.pop(sender, (0.0, 0))
        self.under_way_bytes -= nbytes
        return nbytes > 0

    def _go_on(self) -> None:
        while self._waiting and self._fits(self._waiting[0][1]):
            sender, nbytes = self._waiting.popleft()
            self._lend(sender, nbytes)
            if not sender.begin():
                self._take_back(sender)

    def tick(self) -> None:
        """Ends the turns of those that have not read for `LENT_S`."""
        if not self._waiting:
            return
        since = self._clock() - LENT_S
        for sender in [each for each, (lent_at, _) in self._lent.items() if lent_at <= since]:
            self._take_back(sender)
        self._go_on()


class Outbox:
    """The messages of one stream, which takes one at a time: `start` hands one to the stream, and
    `written` is called when it is through. `finish` ends the stream after all of them.
    """

    __slots__ = (
        "_closed",
        "_end",
        "_finish",
        "_has_turn",
        "_queue",
        "_queued_bytes",
        "_start",
        "_turns",
        "_waits",
        "_writing",
    )

    def __init__(
        self, turns: Turns, start: Callable[[bytes], None], finish: Callable[[int, str], None]
    ) -> None:
        self._turns = turns
        self._start = start
        self._finish = finish
        self._queue: deque[tuple[bytes, bytes]] = deque()
        self._queued_bytes = 0
        self._writing = True  # the stream's own beginning
        self._waits: tuple[bytes, bytes] | None = None  # for its turn
        self._has_turn = False  # or waits for it
        self._end: tuple[int, str] | None = None  # after what is queued
        self._closed = False

    @property
    def writing(self) -> bool:
        """Whether a message is on its way, or waits for its turn."""
        return self._writing

    @property
    def backlog_bytes(self) -> int:
        """The bytes that the client leaves unread; none while the stream waits for its turn."""
        return 0 if self._waits is not None else self._queued_bytes

    def write(self, frame: bytes, shared: bytes) -> None:
        """Writes a message: `frame`, and what it shares with others' messages."""
        if self._closed or self._end is not None:
            return
        if self._writing:
            self._queue.append((frame, shared))
            self._queued_bytes += len(frame) + len(shared)
        else:
            self._send(frame, shared)

    def _send(self, frame: bytes, shared: bytes) -> None:
        self._writing = True
        nbytes = len(frame) + len(shared)
        if nbytes >= LARGE_BYTES:
            self._has_turn = True
            if not self._turns.take(self, nbytes):
                self._waits = (frame, shared)
                return
        self._start(frame + shared)

    def begin(self) -> bool:
        """Sends what has waited for its turn."""
        if self._waits is None:
            return False
        frame, shared = self._waits
        self._waits = None
        self._start(frame + shared)
        return True

    def written(self, event: object = None) -> None:
        """Goes on with the next message. Some streams tell by an event."""
        if self._has_turn:
            self._give_back()
        self._writing = False
        if self._closed:
            return
        if self._queue:
            frame, shared = self._queue.popleft()
            self._queued_bytes -= len(frame) + len(shared)
            self._send(frame, shared)
        elif self._end is not None:
            self._finish(*self._end)

    def finish(self, code: int, message: str) -> None:
        """Ends the stream after what waits."""
        if self._end is not None:
            return
        self._end = (code, message)
        if not self._writing:
            self._finish(code, message)

    def close(self) -> None:
        """Forgets what waits: the stream is over."""
        self._closed = True
        self._queue.clear()
        self._waits = None
        self._give_back()

    def _give_back(self) -> None:
        self._has_turn = False
        self._turns.give_back(self)
