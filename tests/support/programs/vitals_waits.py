"""Says how often the main thread is seen to wait while it does three things."""

from __future__ import annotations

import sys
import threading
import time

import jax
import jax.numpy as jnp

from holdfast.coordination.vitals import main_sleeps
from holdfast.multihost.liveness.vitals import _waits

MAIN = threading.main_thread().ident
seen: list[bool] = []
over = threading.Event()


def look() -> None:
    while not over.wait(0.02):
        asleep = main_sleeps()
        seen.append(_waits(sys._current_frames().get(MAIN or 0), asleep))


def say(what: str) -> None:
    print(what, sum(seen) / len(seen))
    seen.clear()


ones = jnp.ones((500, 500))
multiply = jax.jit(lambda count: jax.lax.fori_loop(0, count, lambda _, a: jnp.tanh(a @ ones), ones))
multiply(1).block_until_ready()
threading.Thread(target=look).start()
multiply(100).block_until_ready()
say("waits")
until = time.monotonic() + 1
while time.monotonic() < until:
    sum(range(1000))
say("computes")
time.sleep(1)
say("sleeps")
over.set()
