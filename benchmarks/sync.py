"""Measures `sync_global_processes` next to Orbax's, in two groups of four processes: one on our
service, one on jaxlib's.

    python benchmarks/sync.py [--processes 4] [--rounds 200] [--repeats 7]

Every peer runs in every repeat, in turn, so that a noisy machine harms all alike: trust the ratios.
Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PEERS = {
    "ours": "sync_global_processes",
    "orbax client": "Orbax, distributed client",
    "orbax devices": "Orbax's default, a device collective",
}
SERVICES = {"holdfast": "our service", "jaxlib": "jaxlib's service"}
ENV = os.environ | {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


# --- A worker: one process of a group, which reads from its stdin what to measure


def barriers() -> dict[str, Callable[[str], None]]:
    """Returns each peer as a function of a name."""
    from absl import flags
    from orbax.checkpoint import multihost as orbax

    from holdfast.multihost import sync_global_processes

    flags.FLAGS(["worker"])

    def orbax_with(distributed: bool) -> Callable[[str], None]:
        def barrier(name: str) -> None:
            flags.FLAGS.experimental_orbax_use_distributed_barrier = distributed
            orbax.sync_global_processes(name)

        return barrier

    return {
        "ours": sync_global_processes,
        "orbax client": orbax_with(True),
        "orbax devices": orbax_with(False),
    }


def work(service: str, address: str, index: int, count: int) -> None:
    """Joins a group and measures peer after peer: `PEER ROUNDS` on stdin, seconds a barrier on
    stdout.
    """
    import jax

    from holdfast import multihost

    if service == "holdfast":
        multihost.initialize(address, count, index)
    else:
        jax.distributed.initialize(address, count, index, coordinator_bind_address=address)
        jax.devices()
    peers = barriers()
    print("ready", flush=True)
    for call, line in enumerate(sys.stdin):
        peer, rounds = line.rsplit(" ", 1)
        barrier = peers[peer]
        # Orbax asks for a new name each time.
        names = [f"{peer}.{call}.{number}" for number in range(int(rounds))]
        peers["ours"](f"before {call % 2}")
        start = time.perf_counter()
        for name in names:
            barrier(name)
        print((time.perf_counter() - start) / len(names), flush=True)
    multihost.shutdown()


# --- The launcher


@contextmanager
def group(service: str, count: int) -> Iterator[Callable[[str, int], float]]:
    """Starts a group; yields a function that measures a peer for a number of rounds and returns the
    slowest process's seconds a barrier.
    """
    address = f"127.0.0.1:{free_port()}"
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, "--worker", service, address, str(index), str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=ENV,
        )
        for index in range(count)
    ]

    def answers() -> list[str]:
        found = []
        for worker in workers:
            assert worker.stdout is not None
            line = worker.stdout.readline().strip()
            while line.startswith("["):  # gloo talks on stdout
                line = worker.stdout.readline().strip()
            found.append(line)
        return found

    def measure(peer: str, rounds: int) -> float:
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write(f"{peer} {rounds}\n")
            worker.stdin.flush()
        return max(map(float, answers()))

    try:
        assert answers() == ["ready"] * count
        yield measure
    finally:
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.close()
        for worker in workers:
            worker.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        service, address, index, count = args.worker
        return work(service, address, int(index), int(count))
    found: dict[tuple[str, str], list[float]] = {
        (service, peer): [] for service in SERVICES for peer in PEERS
    }
    with group("holdfast", args.processes) as ours, group("jaxlib", args.processes) as theirs:
        for repeat in range(args.repeats + 1):  # the first warms up
            for (service, peer), times in found.items():
                seconds = (ours if service == "holdfast" else theirs)(
                    peer, args.rounds if repeat else 20
                )
                if repeat:
                    times.append(seconds)
    ours_first = found["holdfast", "ours"]
    print(f"{args.processes} processes, {args.rounds} barriers a repeat, {args.repeats} repeats\n")
    print(
        "| barrier | service | ms, best | ms, median | ours / this, median of the repeats"
        " |\n|---|---|---|---|---|"
    )
    for (service, peer), times in found.items():
        ratio = statistics.median(
            mine / other for mine, other in zip(ours_first, times, strict=True)
        )
        print(
            f"| {PEERS[peer]} | {SERVICES[service]} | {min(times) * 1e3:.3f} |"
            f" {statistics.median(times) * 1e3:.3f} | {ratio:.2f} |"
        )
    return None


if __name__ == "__main__":
    main()
