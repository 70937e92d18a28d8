"""One case of a job that gets notices of preemption. argv: index, count, address, case, its own."""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import distributed
from jax.experimental import multihost_utils

from holdfast import multihost
from holdfast.multihost import Notice
from holdfast.multihost.preemption import preemption as notices
from holdfast.multihost.preemption.sources import Notify, Source
from holdfast.multihost.start import start
from holdfast.multihost.start.jax_agent import start_jax

index, count = map(int, sys.argv[1:3])
address, case, *own = sys.argv[3:]
DRAINED = Notice("drained")
leave: Any = jax.distributed.shutdown  # jax does not type it


def begin_plainly(*, service: bool = False) -> Any:
    """Joins by jax.distributed alone; returns its client."""
    configure: Any = jax.config.update
    configure("jax_enable_preemption_service", service)
    jax.distributed.initialize(address, count, index)
    return distributed.global_state.client


def begin(*, service: bool = False) -> tuple[Any, notices.Preemption]:
    client = begin_plainly(service=service)
    return client, notices.start(client, index, count, sources=[])


def end() -> None:
    notices.stop()
    leave()


def ask(
    reached: Callable[[int], bool] = multihost.reached_preemption,
    *,
    first: int = 0,
    within: int = 10**6,
    between: Callable[[int], object] = lambda step: time.sleep(0.01),
) -> int:
    """Asks step by step until one is reached, says which, and returns it."""
    step = first
    while step < within and not reached(step):
        between(step)
        step += 1
    print(f"stopped at {step}", flush=True)
    return step


def seeds() -> None:
    """Random delays and random times of notices. Own: service, source, path, seeds, strides."""
    service, source, path, begin_seed, end_seed, *strides = own
    signal.signal(signal.SIGTERM, lambda number, frame: print("user's handler ran", flush=True))
    if service == "ours":
        multihost.initialize(address, count, index, preemption_sources=[])
    else:
        begin_plainly()
    client: Any = multihost.current_client()
    for seed in range(int(begin_seed), int(end_seed)):
        rng = random.Random(1000 * seed + index)
        chosen = index == seed % count
        notices.stop()
        notices.start(client, index, count, sources=sources_of(source, path, seed, rng, chosen))
        client.wait_at_barrier(f"begin {seed}", 60_000)
        print(f"ready {seed}.", flush=True)
        if source == "program" and chosen:
            threading.Timer(rng.random() * 0.5, multihost.notify_preemption, [DRAINED]).start()
        run_seed(seed, rng, int(strides[seed % len(strides)]))
        client.wait_at_barrier(f"end {seed}", 60_000)
        notices.stop()
    if service == "ours":
        multihost.shutdown()
    else:
        leave()


def sources_of(
    source: str, path: str, seed: int, rng: random.Random, chosen: bool
) -> Sequence[Source] | None:
    if source == "file":
        return [multihost.WatchedFile(f"{path}/{seed}", every_s=0.02)]
    if source == "gce":
        return [multihost.GceMetadata(host=f"{path}/{seed}", every_s=0.02)]
    if source == "slurm":
        end_unix_s = time.time() + 60.3 + rng.random() * 0.5 if chosen else 2e9
        return [multihost.SlurmEnd(end_unix_s, lead_s=60, every_s=0.02)]
    return None if source == "signal" else []


def run_seed(seed: int, rng: random.Random, stride: int) -> None:
    step = 0
    longest_s = rng.choice([0.002, 0.005, 0.02])
    while not multihost.reached_preemption(step):
        time.sleep(rng.random() * longest_s)
        step += stride
    print(f"seed {seed} stopped at {step}", flush=True)
    assert multihost.reached_preemption(step)
    assert multihost.reached_preemption(step + stride)


def lockstep() -> None:
    """A device collective in every step, which blocks main threads."""
    begin()
    if index == 1:
        threading.Timer(0.5, multihost.notify_preemption, [DRAINED]).start()
    ask(between=lambda step: multihost_utils.broadcast_one_to_all(jnp.ones(4)))
    end()


def before_step_0() -> None:
    client, preemption = begin()
    if index == 0:
        multihost.notify_preemption(DRAINED)
    while preemption._sync.latest != "raised":
        time.sleep(0.01)
    assert multihost.reached_preemption(0)
    client.wait_at_barrier("asked", 60_000)
    end()


def withdrawn() -> None:
    """Both processes have a notice, and withdraw it one after the other."""
    client, preemption = begin()

    def wait_until_known(value: str) -> None:
        while preemption._sync.latest != value or preemption._news.is_set():
            time.sleep(0.01)

    multihost.notify_preemption(Notice(f"from {index}", deadline_unix_s=1000.0 + index))
    wait_until_known("raised")
    client.wait_at_barrier("notified", 60_000)
    assert multihost.reached_preemption(5)
    assert multihost.preemption_notice() == Notice("from 0", 1000.0)
    client.wait_at_barrier("asked", 60_000)
    if index == 0:
        multihost.notify_preemption(None)
        while multihost.preemption_notice() != Notice("from 1", 1001.0):
            time.sleep(0.01)
    client.wait_at_barrier("one left", 60_000)
    assert multihost.reached_preemption(6)
    client.wait_at_barrier("asked again", 60_000)
    if index == 1:
        multihost.notify_preemption(None)
    wait_until_known("lowered")
    assert multihost.reached_preemption(6)
    assert not multihost.reached_preemption(7)
    assert multihost.preemption_notice() is None
    client.wait_at_barrier("done", 60_000)
    end()


def never_asks() -> None:
    """Process 2 has no sync point."""
    client = begin_plainly()
    if index != 2:
        notices.start(client, index, count, sources=[], timeout_s=12)
    client.wait_at_barrier("started", 100_000)
    if index != 2:
        multihost.notify_preemption(DRAINED)
        try:
            ask()
        except TimeoutError as error:
            print(f"missing {getattr(error, 'missing', None)}: {error}", flush=True)
    client.wait_at_barrier("done", 60_000)
    end()


def dead_announcer() -> None:
    """Process 2 dies after announcing, before it sent any mail."""
    multihost.initialize(address, count, index, heartbeat_timeout_s=8, preemption_sources=[])
    client: Any = multihost.current_client()
    change = f"{notices.current()._sync.folder}/0/change"
    multihost.reached_preemption(10 * index)
    client.wait_at_barrier("asked", 60_000)
    if index == 2:
        client.key_value_set(change, "2 raised")
        os.kill(os.getpid(), signal.SIGKILL)
    client.blocking_key_value_get(change, 60_000)
    if index == 0:
        multihost.notify_preemption(DRAINED)
    ask(first=10 * index + 1)


class Kept(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def coordinator_dies() -> None:
    kept = Kept()
    logging.getLogger("holdfast").addHandler(kept)
    multihost.initialize(address, count, index, heartbeat_timeout_s=8, preemption_sources=[])
    assert not multihost.reached_preemption(0)
    print("begun", flush=True)
    try:
        multihost.sync_global_processes("gone", timeout=30)
    except Exception:
        multihost.notify_preemption(DRAINED)
    step = 1
    while step < 100 or not any("the notice cannot be passed on" in line for line in kept.lines):
        assert not multihost.reached_preemption(step)
        time.sleep(0.01)
        step += 1
    print("answered", flush=True)
    os._exit(0)


def jax_service() -> None:
    """JAX's service is on. Own: who asks, "ours" or "theirs"; the other gets the notice."""
    ours = own[0] == "ours"
    client, _ = begin(service=True)
    if index == 0 and ours:
        client.key_value_set("RECEIVED_PREEMPTION_NOTICE", "2026-01-01T00:00:00+00:00")
    elif index == 0:
        multihost.notify_preemption(DRAINED)
    theirs: Any = multihost_utils.reached_preemption_sync_point

    def meet(step: int) -> None:
        client.wait_at_barrier(f"step {step}", 60_000)
        time.sleep(0.01)

    ask(multihost.reached_preemption if ours else theirs, between=meet)
    client.wait_at_barrier("done", 60_000)
    end()


def plain_jax() -> None:
    """jax.distributed alone, its service on, and both sync points are asked."""
    theirs: Any = multihost_utils.reached_preemption_sync_point
    assert not multihost.reached_preemption(-1)  # before jax.distributed: of this process alone
    client = begin_plainly(service=True)
    stops: dict[str, int] = {}
    step = 0
    print("ready", flush=True)
    while len(stops) < 2:
        if "ours" not in stops and multihost.reached_preemption(step):
            stops["ours"] = step
        if theirs(step):
            stops["theirs"] = step
        client.wait_at_barrier(f"step {step}", 60_000)
        step += 1
    print(f"stopped at {stops['ours']}, stopped at {stops['theirs']}")


def proposals() -> None:
    """Rank 0 proposes again and again on a sync point of its own."""
    client = begin_plainly()
    random.seed(index)
    steps = []
    with multihost.agree_on_step(multihost.ClusterGroup(client, index, count), "save") as sync:
        for step in range(150):
            if index == 0 and step % 30 == 10:
                sync.propose()
            if sync.reached(step):
                steps.append(step)
            time.sleep(random.random() * 0.01)
        client.wait_at_barrier("asked", 60_000)
    assert 3 <= len(steps) <= 5, steps
    assert sync.statistics()["rounds"] == 5, sync.statistics()
    print(f"steps {steps}")
    client.wait_at_barrier("done", 60_000)
    leave()


class Held:
    """A source that the program holds in its hand."""

    name = "held"
    closed = False

    def start(self, notify: Notify) -> None:
        self.notify = notify

    def close(self) -> None:
        self.closed = True


def early_source() -> None:
    """A source is added, and a question asked, before the job."""
    held = Held()
    multihost.add_preemption_source(held)
    assert not multihost.reached_preemption(-1)
    before = notices.current()
    multihost.initialize(address, count, index, preemption_sources=[])
    assert notices.current() is before
    assert not held.closed
    multihost.sync_global_processes("asked")
    if index == 0:
        held.notify(DRAINED)
    step = ask()
    assert notices.current() is before
    assert multihost.preemption_notice() == DRAINED
    multihost.shutdown()
    assert vars(held)["closed"]
    assert notices.current() is before
    assert multihost.reached_preemption(step + 1)  # a late question


def leaving() -> None:
    """Process 0 leaves while the others ask. Own: how long it waits for them."""
    multihost.initialize(address, count, index, timeout_s=60)
    assert not multihost.reached_preemption(10 if index == 0 else 0)
    if index == 0:
        print("leaving", flush=True)
        multihost.shutdown(timeout_s=float(own[0]))
        print("left", flush=True)
        return
    print("asking", flush=True)
    ask(first=1, within=200)
    multihost.shutdown()


def joining() -> None:
    """Waits for a process that never comes."""
    print("waiting", flush=True)
    multihost.initialize(address, 2, 0, timeout_s=60)


def starting() -> None:
    """Process 1 gets SIGTERM twice while jax starts."""

    def slowly(*arguments: Any, **options: Any) -> None:
        if index == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        start_jax(*arguments, **options)

    vars(start)["start_jax"] = slowly
    multihost.initialize(address, count, index, timeout_s=60)
    ask()
    multihost.shutdown()


globals()[case]()
