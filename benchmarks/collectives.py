"""Measures what it costs that the processes compare their calls before `global_max` and
`broadcast_one_to_all`: one gather and one broadcast of a digest.

    python benchmarks/collectives.py [--processes 2 8 32] [--rounds 100] [--repeats 5]

The clients are spread over up to eight interpreters of this machine, and use no devices. Prints a
Markdown table.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from multiprocessing.synchronize import Barrier
from threading import Thread
from typing import Any

from holdfast.coordination import CoordinationClient, CoordinationService
from holdfast.multihost import ClusterGroup

MOST_INTERPRETERS = 8
DIGEST = b"0" * 64 + b" process 0"
WAIT_S = 300.0


def compare(group: ClusterGroup, rounds: int) -> None:
    """Does what a collective does before its computation."""
    for _ in range(rounds):
        sent = group.gather("calls", DIGEST, timeout_s=WAIT_S)
        group.broadcast("calls", None if sent is None else b"", timeout_s=WAIT_S)


def work(
    address: str, own: range, *, count: int, rounds: int, turns: Barrier, results: Any
) -> None:
    """Runs the clients of one interpreter, a thread each."""
    clients = [CoordinationClient(address, process) for process in own]
    joining = [Thread(target=client.connect) for client in clients]
    for thread in joining:
        thread.start()
    for thread in joining:
        thread.join()
    groups = [
        ClusterGroup(client, process, count) for client, process in zip(clients, own, strict=True)
    ]
    while turns.wait(WAIT_S) >= 0:
        threads = [Thread(target=compare, args=(group, rounds)) for group in groups]
        began_s = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        results.put((time.perf_counter() - began_s) / rounds)


def measure(count: int, rounds: int, repeats: int) -> list[float]:
    """Returns the seconds of a comparison among so many processes, once a repeat: its slowest."""
    context = multiprocessing.get_context("spawn")
    interpreters = min(count, MOST_INTERPRETERS)
    turns = context.Barrier(interpreters + 1)
    results = context.Queue()
    with CoordinationService.spawn(count, recoverable=True, survivable=True) as service:
        workers = [
            context.Process(
                target=work,
                args=(service.address, range(at, count, interpreters)),
                kwargs={"count": count, "rounds": rounds, "turns": turns, "results": results},
                daemon=True,
            )
            for at in range(interpreters)
        ]
        for worker in workers:
            worker.start()
        taken = []
        for _ in range(repeats + 1):
            turns.wait(WAIT_S)
            taken.append(max(results.get(timeout=WAIT_S) for _ in workers))
        for worker in workers:
            worker.kill()
            worker.join()
    return taken[1:]  # the first one warms up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print("| processes | ms a comparison, median | range |", "|---|---|---|", sep="\n")
    for count in options.processes:
        taken = [1000 * each for each in measure(count, options.rounds, options.repeats)]
        median = statistics.median(taken)
        print(f"| {count} | {median:.2f} | {min(taken):.2f} to {max(taken):.2f} |", flush=True)


if __name__ == "__main__":
    main()
