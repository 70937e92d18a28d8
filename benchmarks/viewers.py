"""Measures what viewers of the page cost a job: its coordinator's CPU and memory, and barriers.

    python benchmarks/viewers.py [--processes 1000] [--viewers 0 10 100] [--seconds 12]
        [--rounds 5] [--repeats 3] [--hour]

A real coordinator, with real clients that report as the processes of a job do; `holdfast web` as it
is; viewers over HTTP in a process of their own. All take turns, first without a page; the last row
has one more viewer, who reads nothing. CPU is counted while processes do nothing but report. With
`--hour`, ten viewers get all snapshots of an hour one after the other, as fast as the page can make
them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import selectors
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import urlsplit

from barrier import Cluster, Peer, end

from holdfast.web import feed

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
WEB = "from holdfast.cli import main; main()"
AT_ONCE = (
    "import holdfast.web.feed as feed; feed._INTERVAL_S, feed._PROCESSES_PER_S = 0.0,"
    " float('inf'); " + WEB
)


class Row(NamedTuple):
    """What was seen in one turn."""

    coordinator: float  # share of a core
    coordinator_mb: float
    page: float
    page_mb: float
    barrier_ms: float


class Process(NamedTuple):
    """A process whose use is counted; 0 is none."""

    pid: int

    def cpu_s(self) -> float:
        """Returns its CPU time so far."""
        if not self.pid:
            return 0.0
        with open(f"/proc/{self.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * TICK_S

    def memory_mb(self) -> float:
        """Returns its resident memory."""
        if not self.pid:
            return 0.0
        with open(f"/proc/{self.pid}/status") as file:
            return int(re.findall(r"VmRSS:\s+(\d+)", file.read())[0]) / 1024


def view(url: str, reading: int, stuck: int) -> None:
    """Opens the streams of viewers, who read or do not, and prints how many snapshots came, at each
    line of input.
    """
    parts = urlsplit(url)
    selector = selectors.DefaultSelector()
    snapshots = 0
    kept = []
    for number in range(reading + stuck):
        viewer = socket.socket()
        if number >= reading:
            viewer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        viewer.connect((parts.hostname, parts.port))
        viewer.sendall(f"GET {parts.path}events HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
        if number < reading:
            selector.register(viewer, selectors.EVENT_READ, viewer)
        else:
            kept.append(viewer)  # open, and never read
    selector.register(sys.stdin, selectors.EVENT_READ, None)
    print("looking", flush=True)
    while True:
        for key, _ in selector.select():
            if key.data is None:
                if not sys.stdin.readline():
                    os._exit(0)
                print(snapshots, flush=True)
            else:
                snapshots += key.data.recv(1 << 20).count(b"data: ")


@contextlib.contextmanager
def viewers(url: str, reading: int, stuck: int = 0) -> Iterator[subprocess.Popen[str]]:
    """Runs viewers; a line to them is answered with how many snapshots they have got together."""
    command = [sys.executable, __file__, "--view", url, str(reading), str(stuck)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "looking\n"
        yield process
    finally:
        end(process)


@contextlib.contextmanager
def page(address: str, program: str = WEB) -> Iterator[tuple[Process, str]]:
    """Runs `holdfast web`; yields its process and its URL."""
    command = [sys.executable, "-c", program, "web", address, "--end-with-input"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield Process(process.pid), process.stdout.readline().removeprefix("page at ").strip()
    finally:
        end(process)


def interval_s(processes: int) -> float:
    """Returns how often a process of a job reports."""
    return max(2.0, processes / 256)


def turn(
    cluster: Cluster, page_process: Process, seconds: float, rounds: int, processes: int
) -> Row:
    """Counts for a while in which processes do nothing but report, then times barriers."""
    coordinator = Process(cluster.pid)
    began = time.monotonic()
    before = (coordinator.cpu_s(), page_process.cpu_s())
    cluster.run(f"report {seconds:.0f} {interval_s(processes)}")
    elapsed = time.monotonic() - began
    used = (coordinator.cpu_s() - before[0]) / elapsed, (page_process.cpu_s() - before[1]) / elapsed
    barrier_ms = statistics.median(cluster.run("barrier 1") for _ in range(rounds)) * 1e3
    return Row(used[0], coordinator.memory_mb(), used[1], page_process.memory_mb(), barrier_ms)


def turns(cluster: Cluster, options: argparse.Namespace) -> dict[str, list[Row]]:
    """Returns the rows of all turns by what they had: no page, viewers, and one that reads
    nothing.
    """
    rows: dict[str, list[Row]] = {}
    settings = (options.seconds, options.rounds, options.processes)
    for _ in range(options.repeats):
        rows.setdefault("no page", []).append(turn(cluster, Process(0), *settings))
        stuck = (max(options.viewers), 1)
        for reading, not_reading in [*((count, 0) for count in options.viewers), stuck]:
            name = f"{reading} viewers" + (", and one that reads nothing" if not_reading else "")
            with page(cluster.address) as (process, url), viewers(url, reading, not_reading):
                rows.setdefault(name, []).append(turn(cluster, process, *settings))
    return rows


def hour(cluster: Cluster, processes: int, idle: float) -> None:
    """Prints what an hour with ten viewers costs: all its snapshots, one after the other. `idle` is
    the coordinator's share without.
    """
    wanted = int(3600 / max(feed._INTERVAL_S, processes / feed._PROCESSES_PER_S))
    coordinator = Process(cluster.pid)
    over = threading.Event()

    def report() -> None:  # processes that do not report are silent, and would be looked into
        while not over.is_set():
            cluster.run(f"report 12 {interval_s(processes)}")

    reporter = threading.Thread(target=report)
    reporter.start()
    with page(cluster.address, AT_ONCE) as (process, url), viewers(url, 10) as looking:
        assert looking.stdin is not None and looking.stdout is not None
        began = time.monotonic()
        before = coordinator.cpu_s()
        count = 0
        memory_mb = coordinator.memory_mb(), process.memory_mb()
        while count < 10 * wanted:
            time.sleep(1)
            print(file=looking.stdin, flush=True)
            count = int(looking.stdout.readline())
        used_s = coordinator.cpu_s() - before - idle * (time.monotonic() - began)
        print(
            f"\nAn hour with ten viewers, {wanted:,} snapshots of {processes:,} processes to each: "
            f"{used_s:.1f} s of the coordinator's CPU, {100 * used_s / 3600:.2f} % of a core; "
            f"its memory {memory_mb[0]:.0f} MB before, {coordinator.memory_mb():.0f} MB after; "
            f"the page's {memory_mb[1]:.0f} and {process.memory_mb():.0f} MB"
        )
    over.set()
    reporter.join()


def main() -> None:
    """Parses the command line and measures."""
    if "--view" in sys.argv:
        url, reading, stuck = sys.argv[2:5]
        view(url, int(reading), int(stuck))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=1000)
    parser.add_argument("--viewers", type=int, nargs="+", default=[0, 10, 100])
    parser.add_argument("--seconds", type=float, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hour", action="store_true")
    options = parser.parse_args()
    with Cluster(Peer("holdfast", "holdfast"), options.processes) as cluster:
        cluster.run("barrier 2")
        print(
            f"{options.processes} processes | coordinator | its memory | page | its memory |"
            " barrier of all, median (best)"
        )
        print("|---" * 6)
        found = turns(cluster, options)
        for name, rows in found.items():
            median = Row(*(statistics.median(values) for values in zip(*rows, strict=True)))
            best_ms = min(row.barrier_ms for row in rows)
            served = (
                f"{100 * median.page:.1f} % | {median.page_mb:.0f} MB" if median.page_mb else " | "
            )
            print(
                f"| {name} | {100 * median.coordinator:.2f} % | {median.coordinator_mb:.0f} MB |"
                f" {served} | {median.barrier_ms:.0f} ms ({best_ms:.0f}) |"
            )
        if options.hour:
            hour(
                cluster,
                options.processes,
                statistics.median(row.coordinator for row in found["no page"]),
            )


if __name__ == "__main__":
    main()
