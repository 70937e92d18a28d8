"""What listeners cost a save: with those of jax.monitoring, with OpenTelemetry, and with none.

    .venv/bin/python benchmarks/instruments.py [--turns 7]

Saves 200 MB in one array, and 4,000 small ones, into memory (/dev/shm), by one process for each
way, in turns: ten saves of each before the next way has its turn, of which the median counts.
"save" ends when the step is committed, "blocked" when `save` returns. Prints medians, and their
ratio to those with none, which noise makes good to some hundredths; and, to a thousandth, the CPU
seconds that a save spends in the instruments and in who listens to them. Spans of OpenTelemetry go
to its SDK's own exporter in memory (`pip install opentelemetry-sdk`).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WAYS = ("none", "jax.monitoring", "OpenTelemetry")
WARM = 1  # turn before the clock: the first save makes plans
SAVES = 10  # of each state in a turn


def states() -> dict[str, Any]:
    import numpy as np

    small = {f"leaf{index}": np.full(16, index, np.float32) for index in range(4000)}
    return {"200 MB": {"w": np.ones(50_000_000, np.float32)}, "4,000 leaves": small}


def listen(way: str) -> list[Any]:
    """Sets a way up; returns what hears."""
    import jax

    heard: list[Any] = []
    if way == "jax.monitoring":
        jax.monitoring.register_event_listener(lambda *told, **labels: heard.append(told))
        jax.monitoring.register_event_duration_secs_listener(
            lambda *told, **labels: heard.append(told)
        )
        jax.monitoring.register_scalar_listener(lambda *told, **labels: heard.append(told))
    if way != "OpenTelemetry":
        sys.modules["opentelemetry.trace"] = None  # type: ignore[assignment]  # as not installed
        return heard
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(InMemorySpanExporter()))
    trace.set_tracer_provider(provider)
    return heard


def metered() -> dict[str, float]:
    """Has the instruments count the CPU seconds that are spent in them, with those who listen."""
    from holdfast.multihost import instruments

    spent = {"total": 0.0}
    inside = threading.local()

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted(*given: Any, **named: Any) -> Any:
            if getattr(inside, "now", False):
                return function(*given, **named)
            inside.now = True
            began_s = time.thread_time()
            try:
                return function(*given, **named)
            finally:
                spent["total"] += time.thread_time() - began_s
                inside.now = False

        return counted

    instruments._tell = counting(instruments._tell)
    for name in ("__init__", "__enter__", "__exit__", "end"):
        setattr(instruments.Phase, name, counting(getattr(instruments.Phase, name)))
    return spent


def work(way: str) -> None:
    """Saves each state at each line of stdin, and prints how long that took."""
    listen(way)
    spent = metered()
    from holdfast.checkpoint import CheckpointManager, KeepLast

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        managers = {
            name: (CheckpointManager(Path(folder, name), keep_policy=KeepLast(1)), state)
            for name, state in states().items()
        }
        for turn, _ in enumerate(sys.stdin):
            taken = {}
            for name, (manager, state) in managers.items():
                figures: dict[str, list[float]] = {"blocked": [], "save": [], "instruments": []}
                for number in range(SAVES):
                    before_s = spent["total"]
                    began_s = time.perf_counter()
                    manager.save(turn * SAVES + number, state)
                    figures["blocked"].append(time.perf_counter() - began_s)
                    manager.wait_until_finished()
                    figures["save"].append(time.perf_counter() - began_s)
                    figures["instruments"].append(spent["total"] - before_s)
                taken[name] = {figure: statistics.median(each) for figure, each in figures.items()}
            print(json.dumps(taken), flush=True)
        for manager, _ in managers.values():
            manager.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        work(options.way)
        return
    command = [sys.executable, __file__, "--way"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    workers = {
        way: subprocess.Popen(
            [*command, way],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for way in WAYS
    }
    found: dict[tuple[str, str, str], list[float]] = {}
    for turn in range(WARM + options.turns):
        for offset in range(len(WAYS)):
            way = WAYS[(turn + offset) % len(WAYS)]
            worker = workers[way]
            assert worker.stdin is not None and worker.stdout is not None
            print(file=worker.stdin, flush=True)
            for state, taken in json.loads(worker.stdout.readline()).items():
                for figure, seconds in taken.items():
                    if turn >= WARM:
                        found.setdefault((state, figure, way), []).append(seconds)
    for worker in workers.values():
        worker.communicate()
    for (state, figure, way), seconds in found.items():
        median = statistics.median(seconds)
        if figure == "instruments":
            share = median / statistics.median(found[state, "save", way])
            print(
                f"{state}, in the instruments, {way}: {median * 1e3:.3f} ms, {share:.4f} of a save"
            )
            continue
        ratio = median / statistics.median(found[state, figure, "none"])
        print(
            f"{state}, {figure}, {way}: {median * 1e3:.2f} ms ({min(seconds) * 1e3:.2f} to"
            f" {max(seconds) * 1e3:.2f}), {ratio:.3f} of none"
        )


if __name__ == "__main__":
    main()
