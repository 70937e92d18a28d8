"""A process without a cluster gets SIGTERM."""

from __future__ import annotations

import os
import signal
from typing import Any

import jax
import numpy as np

from holdfast import multihost

events: list[str] = []


def listen(event: str, **facts: Any) -> None:
    events.append(event)


jax.monitoring.register_event_listener(listen)
assert not multihost.reached_preemption(0)
os.kill(os.getpid(), signal.SIGTERM)
step = 1
while not multihost.reached_preemption(jax.device_put(np.int32(step))):  # of a train state
    step += 1
assert events == ["/jax/orbax/write/preemption"], events
notice = multihost.preemption_notice()
assert notice is not None
assert notice.reason == "SIGTERM received"
