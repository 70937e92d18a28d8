"""Measures barriers and keys: our service and clients next to jaxlib's, interleaved in one run.

    python benchmarks/barrier.py [--clients 2 8 32 128] [--rounds 100] [--repeats 5] [--keys]
        [--launched] [--before TREE]
    python benchmarks/barrier.py --clients --crowd 1000
    python benchmarks/barrier.py --clients 4 --busy

All peers stand side by side and take turns, so that a noisy machine harms all alike: trust the
ratios. Prints Markdown tables. `--launched` adds peers as launched jobs have them: a Unix socket on
one machine; TLS and a token elsewhere, with a relay and without. `--before` adds service and
clients of another commit: the folder src of its tree.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.coordination import CoordinationService, Credentials, Endpoint, ServiceTimeouts

if TYPE_CHECKING:
    from holdfast.launch.workers.secrets import JobSecrets

MOST_PROCESSES = 32
MANY_CLIENTS = 8
"""From here on clients that share an interpreter do not demand it: each thread that waits for it
would wake 200 times a second, and that would be most of the CPU. A process of a job has one client.
"""
ENV = os.environ | {
    "TF_CPP_MIN_LOG_LEVEL": "1"
}  # as jax sets it: one log line a barrier would slow jaxlib down
VALUE = b"x" * 100

JAXLIB_SERVICE = """
import socket, sys
from jaxlib import _jax
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    address = "127.0.0.1:%d" % probe.getsockname()[1]
settings = {"heartbeat_timeout": 600, "shutdown_timeout": 10}
for name, file in zip(("cert", "key", "ca"), sys.argv[2:]):
    settings[f"mtls_{name}_file"] = file
service = _jax.get_distributed_runtime_service(address, int(sys.argv[1]), **settings)
print(address, flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class Peer:
    """A service and its clients, and the way between them."""

    service: str  # jaxlib or holdfast
    client: str
    way: str = "loopback"  # or socket; with TLS and a token: TLS, or relay
    tree: str | None = None  # PYTHONPATH of another commit

    def __str__(self) -> str:
        before = "" if self.tree is None else ", before"
        return f"{self.service} service, {self.client} clients, {self.way}{before}"


PEERS = (Peer("jaxlib", "jaxlib"), Peer("holdfast", "jaxlib"), Peer("holdfast", "holdfast"))
LAUNCHED = (
    *(Peer("holdfast", client, "socket") for client in ("jaxlib", "holdfast")),
    *(Peer("holdfast", "holdfast", way) for way in ("TLS", "relay")),
)
JAXLIBS_TLS = Peer("jaxlib", "jaxlib", "TLS")
"""Where jaxlib knows mutual TLS: from 0.12 on."""


def make_client(kind: str, address: str, process_id: int, secrets: Path | None) -> Any:
    """Returns a client of either kind; `secrets` holds the files that a secured service wants to
    see.
    """
    if kind == "holdfast":
        from holdfast.coordination import CoordinationClient, Timeouts

        shown = (
            None
            if secrets is None
            else Credentials(
                *(f"{secrets}/{name}" for name in ("token", "client.crt", "client.key", "ca.crt"))
            )
        )
        timeouts = Timeouts(heartbeat_s=600, shutdown_s=30)
        return CoordinationClient(address, process_id, timeouts=timeouts, credentials=shown)
    from jaxlib import _jax

    files = {} if secrets is None else mtls_files(secrets, "client")
    return _jax.get_distributed_runtime_client(
        address,
        process_id,
        init_timeout=300,
        heartbeat_timeout=600,
        shutdown_timeout=30,
        shutdown_on_destruction=False,
        **{f"mtls_{name}_file": file for name, file in files.items()},
    )


def mtls_files(secrets: Path, who: str) -> dict[str, str]:
    """Returns the files of one side, as jaxlib calls them, in its order."""
    names = {"cert": f"{who}.crt", "key": f"{who}.key", "ca": "ca.crt"}
    return {name: f"{secrets}/{file}" for name, file in names.items()}


# --- A worker: some clients, a thread each, with commands on its stdin


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


def reports(client: Any, seconds: int, interval_s: float) -> None:
    """Reports once in each interval, at any time of it, as the processes of a job do; no step: one
    that does not move would look stuck.
    """
    for _ in range(int(seconds / interval_s)):
        at = random.uniform(0, interval_s)
        time.sleep(at)
        client.report(
            saved_step=0, waiting_share=0.4, memory_bytes=4e9, report_interval_s=interval_s
        )
        time.sleep(interval_s - at)


def task(what: str, client: Any, process_id: int, rounds: int, mark: str) -> Callable[[], None]:
    """Returns what one client does for a command."""
    if what == "barrier":
        return lambda: barriers(client, rounds)
    if what == "others":  # a barrier of all but client 0, in whose process the busy loop runs
        return lambda: barriers(client, rounds, list(range(1, int(mark)))) if process_id else None
    if what == "leave":
        return client.shutdown
    if what == "report":
        return lambda: reports(client, rounds, float(mark))
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


def work(kind: str, address: str, first: int, count: int, secrets: Path | None) -> None:
    """Joins at the first line. Then serves "barrier R", "others R N", "set R MARK", "get R MARK",
    "report S INTERVAL", "busy 0 or 1", "leave 0", each answered by what it took, and "cpu", by the
    CPU that the clients took so far.
    """
    clients = [make_client(kind, address, first + index, secrets) for index in range(count)]
    if count >= MANY_CLIENTS:
        sys.setswitchinterval(1.0)
    # All join at once: a client that waits for another's imports would take CPU, as gRPC wakes it
    # five times a second.
    print("imported", flush=True)
    sys.stdin.readline()
    imported_s = time.process_time()
    in_threads([client.connect for client in clients])
    if first == 0:
        threading.Thread(target=busy_loop, daemon=True).start()
    print("ready", flush=True)
    for line in sys.stdin:
        what, rounds, mark = [*line.split(), "", ""][:3]
        if what == "cpu":
            print(time.process_time() - imported_s, flush=True)
            continue
        begun = time.perf_counter()
        calls = [
            task(what, client, first + index, int(rounds), mark)
            for index, client in enumerate(clients)
        ]
        in_threads(calls)
        print(time.perf_counter() - begun, flush=True)
    os._exit(0)


# --- The measurement


class Cluster:
    """A service and its clients, spread over at most MOST_PROCESSES worker processes. A context
    manager.
    """

    def __init__(self, peer: Peer, clients: int) -> None:
        self._cleanup = contextlib.ExitStack()
        self._folder = Path(
            self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="barrier-"))
        )
        self._env = ENV if peer.tree is None else ENV | {"PYTHONPATH": peer.tree}
        self.workers: list[subprocess.Popen[str]] = []
        with self._cleanup.pop_all() as undone:
            address = (
                self._serve_jaxlib(undone, peer, clients)
                if peer.service == "jaxlib"
                else self._serve(undone, peer, clients)
            )
            self._start_workers(undone, peer, address, clients)
            self._cleanup = undone.pop_all()

    def _serve_jaxlib(self, undone: contextlib.ExitStack, peer: Peer, clients: int) -> str:
        command = [sys.executable, "-c", JAXLIB_SERVICE, str(clients)]
        if self._make_secrets(peer) is not None:
            command += mtls_files(self._folder, "server").values()
        service = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENV
        )
        undone.callback(end, service)
        assert service.stdout is not None
        self.pid = service.pid
        return service.stdout.readline().strip()

    def _make_secrets(self, peer: Peer) -> JobSecrets | None:
        # Here, not above: a worker does not need them, and an earlier commit has none.
        from holdfast.launch.workers.secrets import JobSecrets, write_files

        if peer.way not in ("TLS", "relay"):
            return None
        secrets = JobSecrets.create(["127.0.0.1"])
        write_files(self._folder, secrets.files_of_client() | secrets.files_of_server())
        return secrets

    def _serve(self, undone: contextlib.ExitStack, peer: Peer, clients: int) -> str:
        from holdfast.launch.workers.secrets import server_arguments, spawn_relay

        secrets = self._make_secrets(peer)
        host = f"unix:{self._folder}/service" if peer.way == "socket" else "127.0.0.1"
        with environment(self._env):
            service = CoordinationService.spawn(
                clients,
                endpoint=Endpoint(host=host),
                timeouts=ServiceTimeouts(heartbeat_s=600),
                arguments=() if secrets is None else server_arguments(self._folder),
            )
        undone.callback(service.close)
        self.pid = service.pid
        self.address = service.address
        if secrets is None or peer.way != "relay":
            return service.address
        relay = spawn_relay(service.address, secrets, range(clients))
        undone.callback(relay.close)
        return relay.address

    def _start_workers(
        self, undone: contextlib.ExitStack, peer: Peer, address: str, clients: int
    ) -> None:
        processes = min(clients, MOST_PROCESSES)
        first = 0
        secrets = str(self._folder) if peer.way == "TLS" else ""
        for index in range(processes):
            count = clients // processes + (index < clients % processes)
            command = [
                sys.executable,
                __file__,
                "--work",
                peer.client,
                address,
                str(first),
                str(count),
                secrets,
            ]
            worker = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self._env
            )
            undone.callback(end, worker)
            self.workers.append(worker)
            first += count
        self._await("imported\n")
        begun_s = time.perf_counter()
        for worker in self.workers:
            assert worker.stdin is not None
            worker.stdin.write("join\n")
            worker.stdin.flush()
        self._await("ready\n")
        self.joined_s = time.perf_counter() - begun_s

    def _await(self, line: str) -> None:
        for worker in self.workers:
            assert worker.stdout is not None and worker.stdout.readline() == line

    def run(self, command: str) -> float:
        """Sends a command to all workers and returns the seconds that the slowest took."""
        for worker in self.workers:
            assert worker.stdin is not None
            worker.stdin.write(command + "\n")
            worker.stdin.flush()
        return max(self._answers())

    def _answers(self) -> list[float]:
        return [
            float(worker.stdout.readline()) for worker in self.workers if worker.stdout is not None
        ]

    def cpu_s(self) -> tuple[float, float]:
        """Returns the CPU that all clients took since they were made, and that of the service."""
        for worker in self.workers:
            assert worker.stdin is not None
            worker.stdin.write("cpu\n")
            worker.stdin.flush()
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        return sum(self._answers()), ticks / os.sysconf("SC_CLK_TCK")

    def memory_mb(self) -> float:
        """Returns the service's resident memory."""
        with open(f"/proc/{self.pid}/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends workers, relay and service."""
        self._cleanup.close()


def end(process: subprocess.Popen[str]) -> None:
    """Kills a process and waits for it."""
    process.kill()
    process.communicate()


@contextlib.contextmanager
def environment(env: Mapping[str, str]) -> Iterator[None]:
    """Gives this process, and what it starts, another environment for a while."""
    own = dict(os.environ)
    os.environ.update(env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(own)


@contextlib.contextmanager
def side_by_side(peers: Iterable[Peer], clients: int) -> Iterator[dict[Peer, Cluster]]:
    """Starts a cluster of each peer."""
    with contextlib.ExitStack() as stack:
        yield {peer: stack.enter_context(Cluster(peer, clients)) for peer in peers}


def compare(peers: Sequence[Peer], clients: int, rounds: int, repeats: int) -> list[str]:
    """Returns the cells of the peers' barriers: median and best in ms, and both as ratios to
    jaxlib's own.
    """
    rounds = max(10, rounds * 8 // max(8, clients))
    times: dict[Peer, list[float]] = {peer: [] for peer in peers}
    with side_by_side(peers, clients) as clusters:
        for cluster in clusters.values():
            cluster.run("barrier 5")
        for _ in range(repeats):
            # In another order each time: whoever comes after a busy peer meets its end.
            for peer, cluster in random.sample(list(clusters.items()), len(clusters)):
                times[peer].append(cluster.run(f"barrier {rounds}") / rounds * 1e3)
    median = {peer: statistics.median(each) for peer, each in times.items()}
    best = {peer: min(each) for peer, each in times.items()}
    return [
        f"{median[peer]:.2f} ({best[peer]:.2f}): {median[peer] / median[peers[0]]:.2f}"
        f" ({best[peer] / best[peers[0]]:.2f})"
        for peer in peers
    ]


def compare_keys(
    peers: Sequence[Peer], clients: int, rounds: int, repeats: int
) -> dict[str, list[str]]:
    """Returns the cells of the peers' key operations: a second, all clients together, and as a
    ratio to jaxlib's own.
    """
    rates: dict[str, dict[Peer, list[float]]] = {
        what: {peer: [] for peer in peers} for what in ("set", "get")
    }
    with side_by_side(peers, clients) as clusters:
        for repeat in range(repeats):
            for what in ("set", "get"):
                for peer, cluster in clusters.items():
                    rates[what][peer].append(
                        clients * rounds / cluster.run(f"{what} {rounds} {repeat}")
                    )
    cells = {}
    for what, by_peer in rates.items():
        median = {peer: statistics.median(each) for peer, each in by_peer.items()}
        cells[f"{what}, {clients} clients"] = [
            f"{median[peer]:,.0f}: {median[peer] / median[peers[0]]:.2f}" for peer in peers
        ]
    return cells


def print_table(head: str, peers: Sequence[Peer], columns: Mapping[str, list[str]]) -> None:
    """Prints a row a peer."""
    print(f"\n| {head} | " + " | ".join(columns) + " |\n|" + "---|" * (1 + len(columns)))
    for index, peer in enumerate(peers):
        print(
            f"| {peer} | " + " | ".join(cells[index] for cells in columns.values()) + " |",
            flush=True,
        )


def busy(clients: int, rounds: int, repeats: int) -> None:
    """Prints a barrier of all our clients but client 0, while a loop keeps client 0's interpreter
    busy and while it does not, in turns.
    """
    times: dict[int, list[float]] = {0: [], 1: []}
    with Cluster(Peer("holdfast", "holdfast"), clients) as cluster:
        for turn in range(2 * repeats):
            cluster.run(f"busy {turn % 2}")
            times[turn % 2].append(cluster.run(f"others {rounds} {clients}") / rounds * 1e3)
    idle = statistics.median(times[0])
    full = statistics.median(times[1])
    print(
        f"{clients - 1} clients beside a trainer: idle {idle:.2f} ms, busy {full:.2f} ms, ratio"
        f" {full / idle:.2f}"
    )


def crowd(clients: int, tree: str | None) -> None:
    """Prints the barrier of many of our own clients, their CPU, and the service's CPU and
    memory.
    """
    peer = Peer("holdfast", "holdfast", tree=tree)
    with Cluster(peer, clients) as cluster:
        theirs_s, its_s = cluster.cpu_s()
        print(f"{peer}: to join, CPU of all clients {theirs_s:.1f} s, of the service {its_s:.1f} s")
        cluster.run("barrier 2")
        times = [cluster.run("barrier 5") / 5 for _ in range(5)]
        print(
            f"{clients} own clients: joined in {cluster.joined_s:.1f} s; barrier median"
            f" {statistics.median(times):.3f} s, best {min(times):.3f} s; service"
            f" {cluster.memory_mb():.0f} MB resident"
        )
        left_s = cluster.run("leave 0")
        theirs_s, its_s = cluster.cpu_s()
        print(f"all left in {left_s:.1f} s")
        print(f"in all, CPU of the clients {theirs_s:.1f} s, of the service {its_s:.1f} s")


def main() -> None:
    """Parses the command line and measures."""
    if "--work" in sys.argv:
        kind, address, first, count, secrets = sys.argv[2:7]
        work(kind, address, int(first), int(count), Path(secrets) if secrets else None)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="*", default=[2, 8, 32, 128])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--launched",
        action="store_true",
        help="also: the socket, and TLS with a token, of launched jobs",
    )
    parser.add_argument(
        "--before",
        metavar="TREE",
        help="also: service and clients of another commit, by its src",
    )
    parser.add_argument("--crowd", type=int, default=0)
    parser.add_argument(
        "--busy",
        action="store_true",
        help="only: what a busy pure-Python loop in one trainer does to the others",
    )
    parser.add_argument("--keys", action="store_true")
    options = parser.parse_args()
    if options.busy:
        busy(options.clients[0], options.rounds, options.repeats)
        return
    before = () if options.before is None else (Peer("holdfast", "holdfast", tree=options.before),)
    import jax  # here: a worker needs none of it

    launched = LAUNCHED
    if hasattr(jax.config, "jax_mtls_cert_file"):
        launched = (*LAUNCHED, JAXLIBS_TLS)
    peers = (*PEERS, *before, *(launched if options.launched else ()))
    if options.clients:
        rows = {
            str(clients): compare(peers, clients, options.rounds, options.repeats)
            for clients in options.clients
        }
        print_table("ms a barrier: ratio; by clients", peers, rows)
    if options.keys:
        columns = compare_keys(peers, 1, options.rounds * 5, options.repeats) | compare_keys(
            peers, 8, options.rounds * 2, options.repeats
        )
        print_table("operations/s: ratio", peers, columns)
    if options.crowd:
        for tree in [None] if options.before is None else [None, str(options.before)]:
            crowd(options.crowd, tree)


if __name__ == "__main__":
    main()
