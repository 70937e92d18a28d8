"""What the coordinator's core would do for 16,384 processes behind a tree of relays, simulated,
beside the flat one that `benchmarks/scale.py` measures.

    python benchmarks/relay_tree.py [--counts 1024 4096 16384] [--fan-in 128]

The machine is the real one. A relay hands on one union of arrivals, and one report of signs of
life, and fetches a value once. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.scale import MIB, ids_of
from tests.support.crowd import Crowd
from tests.support.simulated_relays import Peer, Report, Request, Tree


def settle(tree: Tree) -> None:
    """Lets a second pass."""
    until = tree.world.now + 1.0
    while tree.world.now < until:
        tree.world.step()


def flat(count: int) -> list[str]:
    """Returns CPU and messages of a barrier, and MiB of ids, without relays."""
    crowd = Crowd(count, kept_bytes=0, heartbeat_timeout_s=100_000.0)
    crowd.gather()
    crowd.wire.take_counts()
    begun_s = time.process_time()
    crowd.barrier("step")
    crowd.settle()
    cpu_s = time.process_time() - begun_s
    _, messages = crowd.wire.take_counts()
    sent_mib = len(ids_of(count)) * (count - 1) / MIB
    return [f"{cpu_s:.2f} s", f"{count + messages:,}", f"{sent_mib:,.0f}"]


def tree_of(count: int, fan_in: int) -> list[str]:
    """Returns the same with relays, and the CPU of a round of their reports."""
    tree = Tree(1, 0, fan_in=fan_in)
    core = type(tree.core)(tree, count)
    tree.core = core
    relays = [Peer(tree, number) for number in range(-(-count // fan_in))]
    shares = [
        range(index * fan_in, min(count, (index + 1) * fan_in)) for index in range(len(relays))
    ]
    tree.arrived[0].update(range(count))
    tree.count = count
    for relay, share in zip(relays, shares, strict=True):
        for task_id in share:
            core.open(relay, task_id, 1000 + task_id, 1)
            tree.heard[task_id, 1000 + task_id] = 0.0
    settle(tree)
    begun_s = time.process_time()
    for share in shares:
        core.arrive([Request(task, 1000 + task, task, "barrier", 0, 1e9) for task in share])
    barrier_s = time.process_time() - begun_s
    assert core.machine.barriers.passed == 1
    core.ping(relays[0])
    ping = max(core.pings)
    reports = [Report({ping: 0.0}, {(t, 1000 + t): 0.0 for t in share}) for share in shares]
    tree.heard = dict.fromkeys(tree.heard, 1e9)
    begun_s = time.process_time()
    for report in reports:
        core.report(report)
    report_s = time.process_time() - begun_s
    sent_mib = len(ids_of(count)) * len(relays) / MIB
    return [f"{barrier_s:.2f} s", f"{2 * len(relays):,}", f"{sent_mib:,.0f}", f"{report_s:.3f} s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counts", type=int, nargs="+", default=(1_024, 4_096, 16_384))
    parser.add_argument("--fan-in", type=int, default=128)
    given = parser.parse_args()
    print("| processes | | barrier, CPU | its messages | ids, MiB sent | a round of reports |")
    print("|---|---|---|---|---|---|")
    for count in given.counts:
        print(f"| {count:,} | flat | " + " | ".join([*flat(count), "-"]) + " |", flush=True)
        peers = -(-count // given.fan_in)
        row = " | ".join(tree_of(count, given.fan_in))
        print(f"| {count:,} | {peers} relays | {row} |", flush=True)


if __name__ == "__main__":
    main()
