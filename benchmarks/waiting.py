"""Measures what waiting costs the coordinator: threads and memory, and who is lost when it stops.

    python benchmarks/waiting.py [--clients 1000] [--processes 4] [--seconds 30]
        [--barriers 10000] [--heartbeat-timeout-s 60]

The memory is measured after barriers that one process never reaches. The waits are of real clients
over loopback. Clients send a heartbeat every quarter of the timeout; both sides say how old the
last sign of the other got. The barriers are driven into the state machine itself: ten million
arrivals over sockets would measure the clients.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

from holdfast.coordination import (
    CoordinationClient,
    CoordinationError,
    CoordinationService,
    JobIdentity,
    ServiceTimeouts,
    Timeouts,
)
from holdfast.coordination.client.status import StatusClient
from holdfast.coordination.core.barriers import Arrival
from holdfast.coordination.core.calls import Call
from holdfast.coordination.core.machine import Machine
from holdfast.coordination.limits import Config

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
LOOK_S = 0.2  # between two looks at all clients of a process


def each(clients: list[CoordinationClient], call: Callable[[CoordinationClient], None]) -> None:
    """Calls for every client on a thread of its own, and waits for all."""
    threads = [threading.Thread(target=call, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def watch(clients: list[CoordinationClient], over: threading.Event, oldest_s: list[float]) -> None:
    """Notes the longest time that any client was without an answer."""
    while not over.wait(LOOK_S):
        oldest_s[0] = max(
            oldest_s[0], *(float(client.statistics()["silent_s"]) for client in clients)
        )


def meet(client: CoordinationClient, met: list[bool], timeout_ms: int) -> None:
    """Notes that a client met all the others."""
    client.wait_at_barrier("met", timeout_ms)
    met.append(True)


def work(address: str, first: int, end: int, total: int) -> None:
    """Runs the clients of one process: at each line of input all wait for what it names."""
    clients = [
        CoordinationClient(
            address, process_id, job=JobIdentity(num_processes=total), timeouts=Timeouts(init_s=600)
        )
        for process_id in range(first, end)
    ]
    each(clients, CoordinationClient.connect)
    print("ready", flush=True)
    for line in sys.stdin:
        what, seconds = line.split()

        if what == "meet":
            met: list[bool] = []
            each(clients, partial(meet, met=met, timeout_ms=int(float(seconds) * 1000)))
            print(len(met), flush=True)
            continue

        def wait(
            client: CoordinationClient,
            what: str = what,
            timeout_ms: int = int(float(seconds) * 1000),
        ) -> None:
            try:
                if what == "get":
                    client.blocking_key_value_get("never", timeout_ms)
                elif client.process_id:
                    client.wait_at_barrier("all", timeout_ms)
            except CoordinationError as error:
                if error.code != "DEADLINE_EXCEEDED":
                    raise

        over = threading.Event()
        oldest_s = [0.0]
        watcher = threading.Thread(target=watch, args=(clients, over, oldest_s))
        watcher.start()
        each(clients, wait)
        over.set()
        watcher.join()
        print(oldest_s[0], flush=True)
    os._exit(0)


def cpu_s(pid: int) -> float:
    """Returns the CPU time of a process so far."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def memory_mb(pid: int | str) -> float:
    """Returns the resident memory of a process."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


def waits(options: argparse.Namespace) -> None:
    """Prints the coordinator's CPU while all wait, and the oldest sign of life."""
    count = options.clients
    share = math.ceil(options.clients / options.processes)
    with CoordinationService.spawn(
        count, timeouts=ServiceTimeouts(heartbeat_s=options.heartbeat_timeout_s), recoverable=True
    ) as service:
        workers = [
            subprocess.Popen(
                [
                    sys.executable,
                    __file__,
                    "--work",
                    service.address,
                    str(first),
                    str(min(count, first + share)),
                    str(count),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for first in range(0, count, share)
        ]
        assert all(worker.stdout and worker.stdout.readline() == "ready\n" for worker in workers)
        for what in ("get", "barrier"):
            for worker in workers:
                assert worker.stdin
                print(what, options.seconds, file=worker.stdin, flush=True)
            time.sleep(options.seconds * 0.2)  # all have begun to wait
            before = cpu_s(service.pid)
            begun = time.monotonic()
            oldest_s = 0.0
            while time.monotonic() - begun < options.seconds * 0.6:
                time.sleep(options.seconds * 0.1)
            used = (cpu_s(service.pid) - before) / (time.monotonic() - begun)
            with StatusClient(service.address) as client:
                oldest_s = max(task.heartbeat_age_s for task in client.status().tasks)
            silent_s = max(float(worker.stdout.readline()) for worker in workers if worker.stdout)
            interval_s = options.heartbeat_timeout_s / 4
            print(
                f"{count} clients wait in a {what}: {100 * used:.2f} % of a core; oldest sign of"
                f" life {oldest_s:.1f} s, oldest answer {silent_s:.1f} s (interval {interval_s:g}"
                f" s); {memory_mb(service.pid):.0f} MB",
                flush=True,
            )
        stopped_s = 2 * options.heartbeat_timeout_s
        os.kill(service.pid, signal.SIGSTOP)
        time.sleep(stopped_s)
        os.kill(service.pid, signal.SIGCONT)
        for worker in workers:
            assert worker.stdin
            print("meet 120", file=worker.stdin, flush=True)
        met = sum(int(worker.stdout.readline()) for worker in workers if worker.stdout)
        print(
            f"stopped for {stopped_s:g} s and continued: {met} of {count} clients meet at a"
            " barrier",
            flush=True,
        )
        for worker in workers:
            worker.kill()
            worker.wait()


def memory(tasks: int, barriers: int) -> None:
    """Prints what so many barriers that one task never reaches leave in the machine, each under a
    name of its own.
    """
    machine = Machine(Config(tasks, 7, heartbeat_timeout_s=math.inf, recoverable=True), 0.0)
    for task_id in range(tasks):
        machine.registration.open_session(task_id, 100 + task_id, f"host{task_id}", 1, 0.0)
    before = memory_mb("self")
    now = 0.0
    for number in range(barriers):
        for task_id in range(1, tasks):
            life = machine.task_table.tasks[task_id].session_since
            call = Call(machine.answers, task_id, now, life=life, deadline=now + 1.0)
            machine.barrier(Arrival(call, f"barrier/{number}", 0))
        now += 1.0
        machine.tick(now)
        assert machine.barriers.failed == number + 1 and len(machine.answers) >= tasks - 1
        machine.answers.clear()
        machine.changes.clear()
    print(
        f"{barriers} barriers of {tasks}, never reached by one: {memory_mb('self') - before:.1f} MB"
        " more"
    )


def main() -> None:
    """Parses the command line and measures."""
    if "--work" in sys.argv:
        work(sys.argv[2], *map(int, sys.argv[3:6]))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--barriers", type=int, default=10_000)
    parser.add_argument("--heartbeat-timeout-s", type=float, default=60.0)
    options = parser.parse_args()
    waits(options)
    memory(options.clients, options.barriers)


if __name__ == "__main__":
    main()
