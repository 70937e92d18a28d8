"""Which reads of a store are asked a second time, because their connection seems to stand still.

A read is slow when it takes longer than SLOW_TIMES the 95th percentile of its peers, and at least
SLOWEST_PEER_S. Its peers are the last reads that ended and had at least half as many bytes. Their
time is that of the try that won, so that reads which stood still do not make slowness normal. With
fewer than FEWEST_PEERS, nothing is known of a tail, and a read is slow after UNKNOWN_S.

Second tries are at most SHARE of all reads, and one more. Where nothing at all is answered, either
the connections stand still, or the network is slow, and more requests would make it slower. One
read is asked again to find out, after four times as long a silence each time. Where its answer
comes before those that were asked earlier, all of these are asked again that are slow.

There are no second tries while the store is throttling: a second request is the last thing that it
needs. The idea is from "The Tail at Scale" (Dean and Barroso, 2013).
"""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable

SLOW_TIMES = 2.0
SLOWEST_PEER_S = 1.0
SHARE = 0.05
QUANTILE = 0.95
FEWEST_PEERS = 4
UNKNOWN_S = 5.0
PEERS = 128  # of which the durations are known
CALM_S = 300.0  # after the store's last 503 or 429
LOOK_S = 0.25  # how often a read is looked at: peers that end meanwhile change what is slow


class Hedges:
    """Decides which reads are asked again. For one thread; `note_throttled` is for any.

    `clock` returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.reads = 0
        self.hedged_reads = 0
        self._throttled_s = -math.inf
        self._answered_s = -math.inf
        self._probes = 0  # since the last answer
        self._overtaking = (0, -math.inf)  # the bytes of the last probe that won, and its begin
        self._peers: collections.deque[tuple[int, float]] = collections.deque(maxlen=PEERS)

    def note_read(self) -> None:
        """Counts a read that begins."""
        self.reads += 1

    def note_end(self, nbytes: int, took_s: float) -> None:
        """Takes the duration of a try that brought its bytes."""
        self.note_answer()
        self._peers.append((nbytes, took_s))

    def note_answer(self) -> None:
        """Takes notice that a try has ended, whatever the answer was."""
        self._answered_s = self.clock()
        self._probes = 0

    def note_throttled(self) -> None:
        """Takes notice of a 503 or 429."""
        self._throttled_s = self.clock()

    def is_slow(self, nbytes: int, asked_s: float) -> bool:
        """Says whether a read is slow whose last try began at `asked_s`."""
        return self.clock() - asked_s >= self.limit_s(nbytes)

    def limit_s(self, nbytes: int) -> float:
        """Returns after how long a read of so many bytes is slow."""
        durations = sorted(took_s for size, took_s in self._peers if 2 * size >= nbytes)
        if len(durations) < FEWEST_PEERS:
            return UNKNOWN_S
        tail_s = durations[math.ceil(QUANTILE * len(durations)) - 1]
        return max(SLOWEST_PEER_S, SLOW_TIMES * tail_s)

    def may_hedge(self) -> bool:
        """Says whether one more second try is allowed now."""
        return self._is_calm() and self.hedged_reads + 1 <= SHARE * self.reads + 1

    def may_probe(self, nbytes: int, began_s: float) -> bool:
        """Says whether nothing has been answered for so long that a read that began at `began_s`
        is asked again all the same.
        """
        silent_s = self.clock() - max(began_s, self._answered_s)
        return self._is_calm() and silent_s >= self.limit_s(nbytes) * 4**self._probes

    def note_probe(self) -> None:
        """Counts a try that is to find out whether all others stand still."""
        self._probes += 1

    def note_overtaking(self, nbytes: int, asked_s: float) -> None:
        """Takes notice that a probe has brought its bytes, which began at `asked_s`."""
        self._overtaking = (nbytes, asked_s)

    def is_overtaken(self, nbytes: int, asked_s: float) -> bool:
        """Says whether a probe was faster that began after `asked_s`, with at least half as many
        bytes: what began before stands still.
        """
        probed_bytes, probed_s = self._overtaking
        return self._is_calm() and asked_s < probed_s and 2 * probed_bytes >= nbytes

    def _is_calm(self) -> bool:
        return self.clock() - self._throttled_s >= CALM_S

    def note_hedge(self) -> None:
        """Counts a second try that begins."""
        self.hedged_reads += 1
