"""Measures barriers and keys: our service and clients next to jaxlib's, interleaved in one run.

    python benchmarks/barrier.py [--clients 2 8 32 128] [--rounds 100] [--repeats 5] [--crowd 1000] [--busy]

All peers stand side by side and take turns, so that a noisy machine harms all alike: trust the ratios. Prints Markdown tables.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from holdfast.coordination import CoordinationService

PEERS = [("jaxlib", "jaxlib"), ("holdfast", "jaxlib"), ("holdfast", "holdfast")]
MOST_PROCESSES = 32
ENV = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "1"}  # as jax sets it: one log line a barrier would slow jaxlib down
VALUE = b"x" * 100

JAXLIB_SERVICE = """
import socket, sys
from jaxlib import _jax
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    address = "127.0.0.1:%d" % probe.getsockname()[1]
service = _jax.get_distributed_runtime_service(address, int(sys.argv[1]), heartbeat_timeout=600, shutdown_timeout=10)
print(address, flush=True)
sys.stdin.read()
"""


def make_client(kind: str, address: str, process_id: int) -> Any:
    """Returns a client of either kind."""
    if kind == "holdfast":
        from holdfast.coordination import CoordinationClient

        return CoordinationClient(address, process_id, heartbeat_timeout_s=600, init_timeout_s=300, shutdown_timeout_s=30)
    from jaxlib import _jax

    return _jax.get_distributed_runtime_client(
        address, process_id, init_timeout=300, heartbeat_timeout=600, shutdown_timeout=30, shutdown_on_destruction=False
    )


# ---- A worker: some clients, a thread each, with commands on its stdin -------------------------------------------------------------


def in_threads(calls: list[Callable[[], None]]) -> None:
    """Runs calls in threads and waits for all."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def barriers(client: Any, rounds: int, process_ids: list[int] | None = None) -> None:
    for _ in range(rounds):
        client.wait_at_barrier("others" if process_ids else "bench", 300_000, process_ids)


def sets(client: Any, process_id: int, rounds: int, mark: str) -> None:
    for number in range(rounds):
        client.key_value_set_bytes(f"bench/{mark}/{process_id}/{number}", VALUE)


def gets(client: Any, process_id: int, rounds: int, mark: str) -> None:
    for number in range(rounds):
        client.blocking_key_value_get_bytes(f"bench/{mark}/{process_id}/{number}", 60_000)


def task(what: str, client: Any, process_id: int, rounds: int, mark: str) -> Callable[[], None]:
    """Returns what one client does for a command."""
    if what == "barrier":
        return lambda: barriers(client, rounds)
    if what == "others":  # a barrier of all but client 0, in whose process the busy loop runs
        return lambda: barriers(client, rounds, list(range(1, int(mark)))) if process_id else None
    if what == "busy":
        return lambda: BUSY.set() if process_id == 0 and rounds else BUSY.clear()
    return lambda: (sets if what == "set" else gets)(client, process_id, rounds, mark)


BUSY = threading.Event()


def busy_loop() -> None:
    """Counts while BUSY is set: the pure-Python part of a trainer."""
    total = 0
    while True:
        BUSY.wait()
        total += 1


def work(kind: str, address: str, first: int, count: int) -> None:
    """Serves commands "barrier R", "others R N", "set R MARK", "get R MARK", "busy 0 or 1", each answered with the seconds it took."""
    clients = [make_client(kind, address, first + index) for index in range(count)]
    in_threads([client.connect for client in clients])
    if first == 0:
        threading.Thread(target=busy_loop, daemon=True).start()
    print("ready", flush=True)
    for line in sys.stdin:
        what, rounds, mark = [*line.split(), ""][:3]
        begun = time.perf_counter()
        calls = [task(what, client, first + index, int(rounds), mark) for index, client in enumerate(clients)]
        in_threads(calls)
        print(time.perf_counter() - begun, flush=True)
    os._exit(0)


# ---- The measurement ---------------------------------------------------------------------------------------------------------------


class Cluster:
    """A service and its clients, spread over at most MOST_PROCESSES worker processes."""

    def __init__(self, service: str, client: str, clients: int) -> None:
        self.spawned: CoordinationService | None = None
        if service == "holdfast":
            self.spawned = CoordinationService.spawn(clients, heartbeat_timeout_s=600)
            self.pid, address = self.spawned.pid, self.spawned.address
        else:
            self.jaxlib = subprocess.Popen(
                [sys.executable, "-c", JAXLIB_SERVICE, str(clients)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENV
            )
            assert self.jaxlib.stdout is not None
            self.pid, address = self.jaxlib.pid, self.jaxlib.stdout.readline().strip()
        processes = min(clients, MOST_PROCESSES)
        self.workers, first = [], 0
        for index in range(processes):
            count = clients // processes + (index < clients % processes)
            command = [sys.executable, __file__, "--work", client, address, str(first), str(count)]
            self.workers.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENV))
            first += count
        for worker in self.workers:
            assert worker.stdout is not None and worker.stdout.readline() == "ready\n"

    def run(self, command: str) -> float:
        """Sends a command to all workers and returns the seconds that the slowest took."""
        for worker in self.workers:
            assert worker.stdin is not None
            worker.stdin.write(command + "\n")
            worker.stdin.flush()
        return max(float(worker.stdout.readline()) for worker in self.workers if worker.stdout is not None)

    def memory_mb(self) -> float:
        """Returns the service's resident memory."""
        with open(f"/proc/{self.pid}/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024

    def close(self) -> None:
        """Ends workers and service."""
        for worker in self.workers:
            worker.kill()
            worker.wait()
        if self.spawned is not None:
            self.spawned.close()
        else:
            self.jaxlib.kill()
            self.jaxlib.wait()


def compare(clients: int, rounds: int, repeats: int) -> None:
    """Prints a row of barriers for one number of clients: medians and bests in ms, and ratios of both to jaxlib's own."""
    clusters = {peer: Cluster(*peer, clients) for peer in PEERS}
    rounds = max(10, rounds * 8 // max(8, clients))
    times: dict[tuple[str, str], list[float]] = {peer: [] for peer in PEERS}
    for cluster in clusters.values():
        cluster.run("barrier 5")
    for _ in range(repeats):
        for peer, cluster in clusters.items():
            times[peer].append(cluster.run(f"barrier {rounds}") / rounds * 1e3)
    for cluster in clusters.values():
        cluster.close()
    median = {peer: statistics.median(each) for peer, each in times.items()}
    best = {peer: min(each) for peer, each in times.items()}
    cells = [f"{median[peer]:.2f} ({best[peer]:.2f})" for peer in PEERS]
    ratios = [f"{median[peer] / median[PEERS[0]]:.2f} ({best[peer] / best[PEERS[0]]:.2f})" for peer in PEERS[1:]]
    print(f"| {clients} | " + " | ".join(cells + ratios) + " |", flush=True)


def compare_keys(clients: int, rounds: int, repeats: int) -> None:
    """Prints rows of key operations per second, all clients together."""
    clusters = {peer: Cluster(*peer, clients) for peer in PEERS}
    rates: dict[str, dict[tuple[str, str], list[float]]] = {what: {peer: [] for peer in PEERS} for what in ("set", "get")}
    for repeat in range(repeats):
        for what in ("set", "get"):
            for peer, cluster in clusters.items():
                rates[what][peer].append(clients * rounds / cluster.run(f"{what} {rounds} {repeat}"))
    for cluster in clusters.values():
        cluster.close()
    for what, by_peer in rates.items():
        median = {peer: statistics.median(each) for peer, each in by_peer.items()}
        cells = [f"{median[peer]:,.0f}" for peer in PEERS] + [f"{median[peer] / median[PEERS[0]]:.2f}" for peer in PEERS[1:]]
        print(f"| {what}, {clients} clients | " + " | ".join(cells) + " |", flush=True)


def busy(clients: int, rounds: int, repeats: int) -> None:
    """Prints a barrier of all our clients but client 0, while a loop keeps client 0's interpreter busy and while it does not, in turns."""
    cluster = Cluster("holdfast", "holdfast", clients)
    times: dict[int, list[float]] = {0: [], 1: []}
    for turn in range(2 * repeats):
        cluster.run(f"busy {turn % 2}")
        times[turn % 2].append(cluster.run(f"others {rounds} {clients}") / rounds * 1e3)
    cluster.close()
    idle, full = statistics.median(times[0]), statistics.median(times[1])
    print(f"{clients - 1} clients beside a trainer: idle {idle:.2f} ms, busy {full:.2f} ms, ratio {full / idle:.2f}")


def crowd(clients: int) -> None:
    """Prints the barrier of many of our own clients, and the memory of the service."""
    begun = time.perf_counter()
    cluster = Cluster("holdfast", "holdfast", clients)
    joined_s = time.perf_counter() - begun
    cluster.run("barrier 2")
    times = [cluster.run("barrier 5") / 5 for _ in range(5)]
    print(
        f"{clients} own clients: joined in {joined_s:.1f} s; barrier median {statistics.median(times):.3f} s, best {min(times):.3f} s; "
        f"service {cluster.memory_mb():.0f} MB resident"
    )
    cluster.close()


def main() -> None:
    """Parses the command line and measures."""
    if "--work" in sys.argv:
        kind, address, first, count = sys.argv[2:6]
        work(kind, address, int(first), int(count))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="*", default=[2, 8, 32, 128])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--crowd", type=int, default=0)
    parser.add_argument("--busy", action="store_true", help="only: what a busy pure-Python loop in one trainer does to the others")
    parser.add_argument("--keys", action="store_true")
    options = parser.parse_args()
    heads = [f"{service} service, {client} clients" for service, client in PEERS]
    if options.busy:
        busy(options.clients[0], options.rounds, options.repeats)
        return
    if options.clients:
        print("| clients | " + " | ".join(heads) + " | ratio, jaxlib clients | ratio, own clients |\n|" + "---|" * 6)
    for clients in options.clients:
        compare(clients, options.rounds, options.repeats)
    if options.keys:
        print("\n| operations/s | " + " | ".join(heads) + " | ratio, jaxlib clients | ratio, own clients |\n|" + "---|" * 6)
        compare_keys(1, options.rounds * 5, options.repeats)
        compare_keys(8, options.rounds * 2, options.repeats)
    if options.crowd:
        crowd(options.crowd)


if __name__ == "__main__":
    main()
