"""Measures what thousands of processes cost the coordinator's machine: CPU, bytes and memory, on no
sockets.

    python benchmarks/scale.py [--counts 1000 2048 4096 8192 16384] [--repeats 3] [--plot]

The machine and its Sessions are the real ones; the wire counts what is written, and
clients read at once. Each count has processes of its own, in turns. CPU is the least of
`--repeats`. One more run counts the calls of functions, which no other work on the machine changes.
Prints Markdown tables: all loads, and the costs that have a bar. Both say how a cost grows with the
processes: the exponent of a power law fitted over all counts, 1 where it is linear.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import math
import resource
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.plot import draw
from holdfast.coordination.core import journal_codec
from holdfast.coordination.core.machine import Machine
from holdfast.coordination.task_bits import bits_of, bytes_of
from holdfast.multihost.group.group import pack
from holdfast.multihost.group.ids import ProcessIds, columns_of
from holdfast.proto import coordination_pb2, session_pb2
from tests.support.crowd import PROCESSES_PER_HOST, Crowd

COUNTS = (1_000, 2_048, 4_096, 8_192, 16_384)
DEATHS = 20  # one takes too little to be measured
MIB = 1 << 20

BARS = (
    ("start: all join", "at_most_mib", "MiB of memory at most, with what is on its way", 1_024.0),
    ("start: all join", "calls", "calls of functions", None),
    ("at rest", "resident_mib", "MiB of memory", 600.0),
    ("barrier", "cpu_s", "s of CPU", 1.0),
    ("barrier", "calls", "calls of functions", None),
    ("barrier, half missing", "sent_mib", "MiB of replies", 30.0),
    ("live_processes", "cpu_s", "s of CPU", 2.0),
    ("live_processes", "sent_mib", "MiB of replies", None),
    ("live_processes", "calls", "calls of functions", None),
    (f"{DEATHS} deaths", "cpu_s", "s of CPU", None),
    (f"{DEATHS} deaths", "sent_mib", "MiB", None),
    (f"{DEATHS} deaths", "messages", "messages", None),
    (f"{DEATHS} deaths", "calls", "calls of functions", None),
)
"""Load, cost, its unit, and what it may be at 16,384 where there is a bar."""


def most_resident_mib() -> float:
    """Returns the most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def resident_mib() -> float:
    """Returns the memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / MIB


class Measured:
    """A crowd, and what each load costs it."""

    def __init__(self, count: int, counts_calls: bool) -> None:
        self.count = count
        self._counts_calls = counts_calls
        self.rows: dict[str, dict[str, float]] = {}
        gc.collect()
        self._base_mib = resident_mib()
        self.crowd = Crowd(count, kept_bytes=0, heartbeat_timeout_s=100_000.0)

    def load(self, name: str, run: Callable[[], None]) -> None:
        wire = self.crowd.wire
        wire.take_counts()
        profile = cProfile.Profile()
        begun_s = time.process_time()
        if self._counts_calls:
            profile.runcall(run)
        else:
            run()
        cpu_s = time.process_time() - begun_s
        peak_mib = wire.peak_bytes / MIB
        sent_bytes, messages = wire.take_counts()
        self.rows[name] = {
            "cpu_s": cpu_s,
            "calls": sum(entry.callcount for entry in profile.getstats()),
            "sent_mib": sent_bytes / MIB,
            "messages": messages,
            "on_way_mib": peak_mib,
            "resident_mib": resident_mib() - self._base_mib,
            # gRPC copies what is on its way; here all Sessions share one copy of it
            "at_most_mib": most_resident_mib() - self._base_mib + peak_mib,
        }


def ids_of(count: int) -> bytes:
    """Returns what `initialize_ids` hands to all: the numbers and devices of each process."""
    ids = [
        ProcessIds(number, number, tuple(range(8 * number, 8 * number + 8)))
        for number in range(count)
    ]
    return pack(columns_of(ids))


def measure(count: int, counts_calls: bool) -> dict[str, dict[str, float]]:
    """Returns the costs of all loads at one count."""
    measured = Measured(count, counts_calls)
    crowd = measured.crowd
    measured.load("start: all join", crowd.gather)

    def hand_out() -> None:
        get = coordination_pb2.GetKeyValueRequest(key="ids")
        crowd.call_all("GetKeyValue", lambda _: get, range(1, count))
        entry = coordination_pb2.KeyValueEntry(key="ids", value=ids_of(count))
        crowd.call(0, "InsertKeyValue", coordination_pb2.InsertKeyValueRequest(kv=entry))
        crowd.settle()

    def barrier() -> None:
        crowd.barrier("step")
        crowd.settle()

    def timed_out() -> None:
        crowd.barrier("half", range(0, count, 2), timeout_s=5.0)
        crowd.tick(6.0)
        crowd.settle()

    def live() -> None:
        bits = zlib.compress(bytes_of(bits_of(range(count))))
        alive = coordination_pb2.GetAliveTasksRequest()
        crowd.call_all("GetAliveTasks", lambda _: alive, participants=bits)
        crowd.settle()

    def preemption() -> None:
        get = [coordination_pb2.GetKeyValueRequest(key=f"mail/{task}") for task in range(count)]
        crowd.call_all("GetKeyValue", lambda task: get[task])
        entries = [
            coordination_pb2.KeyValueEntry(key=f"mail/{task}", value=b"0 notice")
            for task in range(count)
        ]
        crowd.call(0, "SetKeys", session_pb2.SetKeysRequest(entries=entries))
        crowd.settle()

    def restart() -> None:
        crowd.machine.touch_all()
        rows = journal_codec.drain(crowd.machine, 0.0)
        machine = Machine(crowd.machine.config, crowd.now)
        journal_codec.load(machine, rows, crowd.now, 0.0)

    def deaths() -> None:
        for number in range(DEATHS):
            crowd.machine.report_exit(number * (count // DEATHS), -9, crowd.now)
            crowd.service.flush()
            crowd.settle()

    measured.load("ids", hand_out)
    measured.load("barrier", barrier)
    measured.load("barrier, half missing", timed_out)
    measured.load("live_processes", live)
    measured.load("announced preemption", preemption)
    measured.load("journal written and read", restart)
    measured.load(f"{DEATHS} deaths", deaths)
    gc.collect()
    measured.load("at rest", lambda: None)
    return measured.rows


def exponent(costs: dict[int, float]) -> float:
    """Returns the slope of log(cost) over log(count): 1 where a cost is linear."""
    points = [(math.log(count), math.log(cost)) for count, cost in costs.items() if cost > 0]
    middle_x = sum(x for x, _ in points) / len(points)
    middle_y = sum(y for _, y in points) / len(points)
    rise = sum((x - middle_x) * (y - middle_y) for x, y in points)
    return rise / sum((x - middle_x) ** 2 for x, _ in points)


def plot(results: dict[int, dict[str, dict[str, float]]]) -> str:
    """Returns bars of the CPU of each load at each count."""
    counts = list(results)
    most_s = max(row["cpu_s"] for row in results[counts[-1]].values())
    lines = []
    for name in results[counts[0]]:
        lines.append(name)
        for count in counts:
            cpu_s = results[count][name]["cpu_s"]
            lines.append(f"  {count:>6,} {cpu_s:5.2f} s {'#' * round(50 * cpu_s / most_s)}")
    return "\n".join(lines)


def measured_apart(count: int, *options: str) -> dict[str, dict[str, float]]:
    """Returns the costs at one count, measured in a process whose memory nothing else has used."""
    command = [sys.executable, __file__, "--one", str(count), *options]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    costs: dict[str, dict[str, float]] = json.loads(done.stdout)
    return costs


def measure_all(counts: Sequence[int], repeats: int) -> dict[int, dict[str, dict[str, float]]]:
    """Returns the costs at all counts."""
    results = {count: measured_apart(count) for count in counts}
    for _ in range(repeats - 1):
        for count in counts:
            for name, again in measured_apart(count).items():
                row = results[count][name]
                row["cpu_s"] = min(row["cpu_s"], again["cpu_s"])
    for count in counts:
        for name, counted in measured_apart(count, "--calls").items():
            results[count][name]["calls"] = counted["calls"]
    return results


def print_bars(results: dict[int, dict[str, dict[str, float]]]) -> None:
    """Prints the costs that have a bar, or have to be linear."""
    print("\n| load | cost | " + " | ".join(f"{count:,}" for count in results), end="")
    print(" | bar at 16,384 | grows as N to the |")
    print("|---" * (len(results) + 4) + "|")
    for name, what, unit, most in BARS:
        costs = {count: rows[name][what] for count, rows in results.items()}
        cells = " | ".join(f"{cost:,.{3 if cost < 10 else 0}f}" for cost in costs.values())
        bar = "-" if most is None else f"{most:,.0f}"
        fitted = f"{exponent(costs):.2f}" if len(costs) > 1 else "-"
        print(f"| {name} | {unit} | {cells} | {bar} | {fitted} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS)
    parser.add_argument("--plot", action="store_true", help="also draw scale.svg")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--calls", action="store_true", help="only: with --one, count calls")
    parser.add_argument("--one", type=int, help="only: the costs at one count, as JSON")
    given = parser.parse_args()
    if given.one is not None:
        gc.set_threshold(50_000, 20, 20)  # as `holdfast coordinator` has it
        print(json.dumps(measure(given.one, given.calls)))
        return
    counts = given.counts
    results = measure_all(counts, given.repeats)
    print(
        f"{PROCESSES_PER_HOST} processes a host. CPU; sent; at most on the way; resident, in MiB\n"
    )
    print("| load | " + " | ".join(f"{count:,}" for count in counts) + " | CPU grows as N to the |")
    print("|---" * (len(counts) + 2) + "|")
    for name in results[counts[0]]:
        cells = []
        for count in counts:
            row = results[count][name]
            mib = "; ".join(
                f"{row[name]:,.0f}" for name in ("sent_mib", "on_way_mib", "resident_mib")
            )
            cells.append(f"{row['cpu_s']:.2f} s; {mib}")
        fitted = "-"
        if len(counts) > 1 and all(results[count][name]["cpu_s"] > 0.001 for count in counts):
            fitted = f"{exponent({count: results[count][name]['cpu_s'] for count in counts}):.2f}"
        print(f"| {name} | " + " | ".join(cells) + f" | {fitted} |", flush=True)
    print_bars(results)
    if given.plot:
        draw(plot(results), "scale.svg", "CPU of the coordinator's machine against processes")


if __name__ == "__main__":
    main()
