"""Restores FSDP-4 x DP-4 on 16 processes from an object store behind a slow way; prints a table.

    python benchmarks/shared_restore.py [--mib 256] [--turns 2] [--only NAME ...]
        [--connection-mb 20] [--link-mb 100]

The store is `s3_server.py`, and the way is `shaped_proxy.py`, which counts the bytes that it lets
through. All processes have opened the store, and met, before the clock starts. What comes back is
compared with what was saved, off the clock.

"each" and "once" are ways to read. The others are "once" with process 5 disturbed, SECONDS after
the start: the way of its own to the store is stopped ("store"), the way of others to its part
server and its own way to theirs ("peers"), or the process itself ("stop") for `--stall-s`; or it is
killed ("kill"). "held" is when the last of the others has all its bytes, "after" is when the last
returned, counted from when the disturbance ended: negative where it returned before that.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from object_store import server

HERE = Path(__file__).parent
COUNT = 16
SHARDS = 4
ARRAYS = 8
VICTIM = 5
SECONDS = 1.0
ADDRESS_BYTES = 64
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "OMP_NUM_THREADS": "1",
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_EC2_METADATA_DISABLED": "true",
}


def url_of(endpoint: str) -> str:
    """Returns the checkpoint root behind an endpoint."""
    return f"s3://bucket/shared?endpoint={endpoint}&region=us-east-1"


def whole(number: int, rows: int) -> np.ndarray:
    """Returns an array of the state, of a MiB for each 256 rows."""
    return np.random.default_rng(number).standard_normal((rows, 1024)).astype(np.float32)


def save(endpoint: str, rows: int) -> None:
    """Saves the state from one process with a device for each shard."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from holdfast.checkpoint import CheckpointManager

    mesh = Mesh(np.array(jax.devices()), ("model",))
    sharding = NamedSharding(mesh, PartitionSpec("model"))
    state = {f"w{i}": jax.device_put(whole(i, rows), sharding) for i in range(ARRAYS)}
    with CheckpointManager(url_of(endpoint)) as manager:
        manager.save(1, state)


def restore(endpoint: str, rows: int, index: int, port: int, way: str) -> None:
    """Is one process of a restore: prints READY, waits for a line, and prints what it saw."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from holdfast import multihost

    # jaxlib's client would end this process when another one dies. A process that is stopped is
    # not to be dead.
    heartbeat_s = 10.0 if way == "kill" else 100.0
    multihost.initialize(f"127.0.0.1:{port}", COUNT, index, heartbeat_timeout_s=heartbeat_s)

    from holdfast.checkpoint import CheckpointManager, Options
    from holdfast.checkpoint.restoring.shared_reader import SharedReader

    devices = np.array(jax.devices()).reshape(COUNT // SHARDS, SHARDS)
    sharding = NamedSharding(Mesh(devices, ("data", "model")), PartitionSpec("model"))
    like = {
        f"w{i}": jax.ShapeDtypeStruct((rows, 1024), np.float32, sharding=sharding)
        for i in range(ARRAYS)
    }
    held: list[float] = []
    finish = SharedReader.finish

    def noting(reader: SharedReader) -> None:
        held.append(time.monotonic())
        finish(reader)

    SharedReader.finish = noting  # type: ignore[method-assign]
    relay = None
    if way == "peers" and index == VICTIM:
        relay = relay_peers()
    seen: dict[str, Any] = {"index": index, "error": ""}
    with CheckpointManager(url_of(endpoint), options=Options(restore_timeout_s=120)) as manager:
        print("READY", 0 if relay is None else relay.pid, flush=True)
        sys.stdin.readline()
        try:
            found = manager.restore(1, like, read="each" if way == "each" else "once")
        except Exception as error:
            seen["error"] = f"{type(error).__name__}: {error}"
            found = {}
        seen["returned"] = time.monotonic()
        seen["held"] = held[0] if held else seen["returned"]
        seen["counts"] = {
            name: value
            for name, value in manager.statistics().items()
            if name.startswith("restore_")
        }
        for i in range(ARRAYS if found else 0):
            want = whole(i, rows)
            for shard in found[f"w{i}"].addressable_shards:
                assert np.array_equal(np.asarray(shard.data), want[shard.index]), (i, index)
        print("RESULT", json.dumps(seen), flush=True)
        sys.stdin.readline()
    os._exit(0)  # a job that lost a process ends slowly


def relay_peers() -> subprocess.Popen[str]:
    """Has all bytes between this process and its peers go through a process that can be stopped."""
    from holdfast.multihost.peers import part_server, peer_connection

    relay = subprocess.Popen(
        [sys.executable, __file__, "--relay"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert relay.stdout is not None
    outward, inward = relay.stdout.readline().split()

    init = part_server.PartServer.__init__
    connect = peer_connection.connect

    def serving(self: Any, *args: Any) -> None:
        init(self, *args)
        print(self.address, file=relay.stdin, flush=True)
        self.address = inward

    def connecting(address: str, timeout_s: float) -> socket.socket:
        # Nothing of a relay that is stopped answers: the kernel alone takes the connection.
        connection = connect(outward, timeout_s)
        connection.sendall(address.encode().ljust(ADDRESS_BYTES))
        return connection

    part_server.PartServer.__init__ = serving
    peer_connection.connect = connecting
    return relay


def relay() -> None:
    """Prints two addresses: one leads to the address that a connection says first, the other to the
    address that is read from stdin.
    """

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 18):
                sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def serve(listener: socket.socket, address_of: Callable[[socket.socket], str]) -> None:
        while True:
            client, _ = listener.accept()
            host, _, port = address_of(client).strip().rpartition(":")
            try:
                target = socket.create_connection((host, int(port)))
            except OSError:  # a restore that has ended serves nobody
                client.close()
                continue
            for pair in ((client, target), (target, client)):
                threading.Thread(target=pump, args=pair, daemon=True).start()

    def said(client: socket.socket) -> str:
        return client.recv(ADDRESS_BYTES, socket.MSG_WAITALL).decode()

    outward, inward = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
    print(*(f"127.0.0.1:{each.getsockname()[1]}" for each in (outward, inward)), flush=True)
    threading.Thread(target=serve, args=(outward, said), daemon=True).start()
    own = sys.stdin.readline()
    threading.Thread(target=serve, args=(inward, lambda _: own), daemon=True).start()
    sys.stdin.read()


def answered_bytes(endpoint: str) -> int:
    """Returns how many bytes a proxy has let through."""
    with urllib.request.urlopen(f"{endpoint}/-/bytes") as answer:
        return int(answer.read())


class Job:
    """The processes of one restore."""

    def __init__(self, endpoint: str, own: str, rows: int, way: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.workers = [
            subprocess.Popen(
                [
                    *(sys.executable, __file__, "--restore"),
                    *(own if index == VICTIM else endpoint, str(rows), str(index)),
                    *(str(port), way),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for index in range(COUNT)
        ]

    def heard(self, index: int, word: str) -> str:
        """Returns what a worker says after a word; "" where it has ended."""
        output = self.workers[index].stdout
        assert output is not None
        return next((line[len(word) :] for line in output if line.startswith(word)), "")

    def tell_all(self) -> None:
        """Lets all workers go on."""
        for worker in self.workers:
            assert worker.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                print(file=worker.stdin, flush=True)

    def end(self) -> None:
        """Ends all workers."""
        for worker in self.workers:
            worker.kill()
            worker.communicate()


def run(way: str, endpoint: str, own: tuple[str, int], rows: int, stall_s: float) -> dict[str, Any]:
    """Runs one job; returns its figures."""
    job = Job(endpoint, own[0], rows, way)
    try:
        relays = [int(job.heard(index, "READY") or 0) for index in range(COUNT)]
        before = answered_bytes(endpoint) + answered_bytes(own[0])
        began_s = time.monotonic()
        job.tell_all()
        ended_s = disturb(way, job.workers[VICTIM].pid, own[1], relays[VICTIM], stall_s)
        told = [job.heard(index, "RESULT") for index in range(COUNT)]
        seen = [json.loads(each) for each in told if each]
        others = [each for each in seen if each["index"] != VICTIM]
        job.tell_all()
        figures = {
            "way": way,
            "wall": max(each["returned"] for each in seen) - began_s,
            "held": max(each["held"] for each in others) - began_s,
            "after": max(each["returned"] for each in seen) - max(ended_s, began_s),
            "bytes": answered_bytes(endpoint) + answered_bytes(own[0]) - before,
            "errors": sorted({each["error"][:100] for each in seen}),
            "failures": sum(each["counts"]["restore_peer_failures"] for each in seen),
        }
        print(figures, file=sys.stderr, flush=True)
        return figures
    finally:
        job.end()


def disturb(way: str, process: int, own_way: int, relay: int, stall_s: float) -> float:
    """Disturbs a process; returns when that ended."""
    if way in ("each", "once"):
        return 0.0
    time.sleep(SECONDS)
    if way == "kill":
        os.kill(process, signal.SIGKILL)
        return time.monotonic()
    stopped = {"store": own_way, "peers": relay, "stop": process}[way]
    os.kill(stopped, signal.SIGSTOP)
    time.sleep(stall_s)
    os.kill(stopped, signal.SIGCONT)
    return time.monotonic()


def table(results: dict[str, list[dict[str, Any]]], step_bytes: int) -> str:
    """Returns the figures as a table."""
    lines = [
        "| way | wall, s | others hold, s | after the disturbance, s | bytes, of the step"
        " | failed answers | errors |",
        "|---|---|---|---|---|---|---|",
    ]
    for way, turns in results.items():
        middle = {
            name: statistics.median(turn[name] for turn in turns)
            for name in ("wall", "held", "after", "bytes", "failures")
        }
        after = "" if way in ("each", "once") else f"{middle['after']:.2f}"
        lines.append(
            f"| {way} | {middle['wall']:.2f} | {middle['held']:.2f} | {after}"
            f" | {middle['bytes'] / step_bytes:.2f} | {middle['failures']:.0f}"
            f" | {'; '.join(filter(None, turns[-1]['errors']))} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--turns", type=int, default=2)
    ways = ["each", "once", "store", "peers", "stop", "kill"]
    parser.add_argument("--only", nargs="+", choices=ways, default=ways[:2])
    parser.add_argument("--stall-s", type=float, default=30)
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--delay-ms", default="20")
    parser.add_argument("--connection-mb", default="20")
    parser.add_argument("--link-mb", default="100")
    chosen = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    rows = chosen.mib * 256 // ARRAYS
    shape = [
        *("--delay-ms", chosen.delay_ms, "--connection-mb", chosen.connection_mb),
        *("--link-mb", chosen.link_mb),
    ]
    folder = Path(tempfile.mkdtemp(prefix="shared-restore-", dir=chosen.memory))
    results: dict[str, list[dict[str, Any]]] = {}
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        direct, _ = stack.enter_context(server(HERE / "s3_server.py", folder))
        port = direct.rpartition(":")[2]
        shaped, _ = stack.enter_context(server(HERE / "shaped_proxy.py", port, *shape))
        subprocess.run(
            [sys.executable, __file__, "--save", direct, str(rows)],
            env=os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={SHARDS}"},
            check=True,
        )
        for _ in range(chosen.turns):
            for way in chosen.only:
                # Process 5 has a way of its own only where that is to be stopped.
                if way == "store":
                    with server(HERE / "shaped_proxy.py", port, *shape) as own:
                        found = run(way, shaped, own, rows, chosen.stall_s)
                else:
                    found = run(way, shaped, (shaped, 0), rows, chosen.stall_s)
                    found["bytes"] //= 2  # both ways are one
                results.setdefault(way, []).append(found)
    print(table(results, chosen.mib << 20))
    print(f"load: {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--save"]:
        save(sys.argv[2], int(sys.argv[3]))
    elif sys.argv[1:2] == ["--relay"]:
        relay()
    elif sys.argv[1:2] == ["--restore"]:
        _, _, endpoint, rows, index, port, way = sys.argv
        restore(endpoint, int(rows), int(index), int(port), way)
    else:
        main()
