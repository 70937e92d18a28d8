"""The network between one process and the coordinator: it loses, resets and stalls as it is told.

All faults are short beside the heartbeat timeout, so a client has to ride through each.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from tests.support.proxy import Proxy

LOSE_ANSWERS = "lose answers"
LOSE_REQUESTS = "lose requests"
RESET = "reset"
STALL = "stall"
STALL_AND_RESET = "stall and reset"
HARMS = (LOSE_ANSWERS, LOSE_REQUESTS, RESET, STALL, STALL_AND_RESET)


@dataclass(frozen=True)
class Fault:
    """What happens as process `process` begins a call: to its connection for `lasts_s`, or to the
    coordinator, where the harm is one of its moments.
    """

    process: int
    harm: str
    lasts_s: float = 0.1


class Cable(Proxy):
    """The connection of one process. One fault at a time: the next begins when the last is over."""

    def __init__(self, target: str) -> None:
        self._busy = threading.Lock()
        super().__init__(target)

    def strike(self, fault: Fault) -> None:
        """Begins a fault; it ends by itself."""
        self._busy.acquire()
        if fault.harm == LOSE_ANSWERS:
            self.drop("answers")
        elif fault.harm == LOSE_REQUESTS:
            self.drop("requests")
        elif fault.harm in (STALL, STALL_AND_RESET):
            self.hold()
        threading.Thread(target=self._end, args=(fault,), daemon=True).start()

    def _end(self, fault: Fault) -> None:
        time.sleep(fault.lasts_s)
        if fault.harm != STALL:
            # What a connection has lost makes all that follows on it unreadable.
            self.cut(refuse=True)
        self.deliver()
        if fault.harm != STALL:
            self.cut()
        self._busy.release()
