"""Which calls may be sent again, and after how long."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

IDEMPOTENT = frozenset(
    {
        "RegisterTask",
        "Heartbeat",
        "PollForError",
        "ShutdownTask",
        "WatchTasks",
        "GetKeyValue",
        "TryGetKeyValue",
        "GetKeyValueDir",
        "DeleteKeyValue",
        "Barrier",  # the same counter joins, or replays the result
        "CancelBarrier",
        "GetAliveTasks",
    }
)
"""Methods whose second sending does no more than the first. InsertKeyValue is one only with allow_overwrite; without it, the client
reads the key back to learn whether the first sending had arrived. IncrementKeyValue never is: its answer lost, it fails."""

TRANSIENT = frozenset({"UNAVAILABLE", "UNKNOWN"})
"""Codes that a broken connection gives, as opposed to an answer of the service."""


@dataclass(frozen=True)
class Backoff:
    """Yields growing pauses with full jitter, so that the processes of a job do not come back as one wave."""

    first_s: float = 0.02
    factor: float = 1.6
    most_s: float = 1.0

    def pauses(self, seed: int | None = None) -> Iterator[float]:
        """Yields pauses in seconds, for ever: each between half and all of a bound that grows to `most_s`."""
        draw = random if seed is None else random.Random(seed)  # making one takes longer than a call
        bound = self.first_s
        while True:
            yield bound * draw.uniform(0.5, 1.0)
            bound = min(self.most_s, bound * self.factor)
