"""Saves and restores through a slow way to an object store, in turns; prints a table.

    python benchmarks/object_store.py [--gb 4] [--large-gb 6] [--turns 2] [--only NAME ...]
        [--first] [--memory /dev/shm] [--delay-ms 20] [--connection-mb 60] [--link-mb 400]

The store is `s3_server.py`, and the way is `shaped_proxy.py`, each a process whose CPU is counted
apart. Each save and each restore is a process of its own, which has opened its store and made its
arrays before the clock starts. By then what an opening sweeps in the background has been swept.
Whoever saves has saved all of it once before, as a program that trains has, and the store has
forgotten that save. With `--first` the first save is the one that is timed. What was restored is
compared with what was saved, off the clock.

"obstore" is the floor: bare puts of 64 MiB and bare gets of 16 MiB, 16 at a time, whose bytes are
copied into the arrays. "orbax" are tensorstore's zarr3 arrays, a chunk an array, as Orbax lays them
out: sharded, and compressed by zstd; Orbax itself cannot write to s3://. "tensorstore" are the same
without shards and compression. "boto3" is its transfer manager, with 16 threads. Nobody signs or
hashes a payload, and holdfast alone checks the bytes.

"beside" is the peak of memory beside the arrays, in both saves. A save by holdfast copies the
arrays, so that the caller may go on: one copy of them is left out of "beside", and what its threads
took for it of "CPU", not of the time. The checksums, which they compute too, are in "CPU".
`--large-gb` has holdfast alone save and restore once more, to see that peak. The command takes
seven minutes. Run it on a quiet machine: the load is printed with the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
SIDE = 4096  # of each array, which is square
ARRAY_BYTES = SIDE * SIDE * 4
RANGE_BYTES = 16 << 20
AT_ONCE = 16
WARMING, TIMED = 0, 1  # the saves' numbers
BUCKET = "bucket"
REGION = "us-east-1"
RAW_BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
# as Orbax has them for zarr3
ORBAX_CODECS = [
    {
        "name": "sharding_indexed",
        "configuration": {
            "chunk_shape": [SIDE, SIDE],
            "codecs": [RAW_BYTES, {"name": "zstd", "configuration": {"level": 3}}],
            "index_codecs": [RAW_BYTES, {"name": "crc32c"}],
            "index_location": "end",
        },
    }
]
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_EC2_METADATA_DISABLED": "true",
}


class Holdfast:
    """holdfast's manager, which is open when the clock starts."""

    def __init__(self, endpoint: str) -> None:
        from holdfast.checkpoint import CheckpointManager
        from holdfast.checkpoint.saving import snapshot

        self._snapshot = snapshot
        url = f"s3://{BUCKET}/holdfast?endpoint={endpoint}&region={REGION}"
        self._manager = CheckpointManager(url)
        # What an opening leaves to do, such as the sweep of uploads by boto3, is no part of a save.
        assert self._manager._catalog.state.worker.wait(60)
        self.blocked_s = 0.0
        self.copy_s = 0.0
        self._time_copies()

    def _time_copies(self) -> None:
        """Has the CPU seconds of all copies of a snapshot added up."""
        copy = self._snapshot._copy
        adding = threading.Lock()

        def timed(*arrays: Any) -> None:
            own = time.thread_time()
            copy(*arrays)
            with adding:
                self.copy_s += time.thread_time() - own

        self._snapshot._copy = timed

    def save(self, state: Any, number: int) -> None:
        self.copy_s = 0.0
        began = time.perf_counter()
        self._manager.save(number, state)
        self.blocked_s = time.perf_counter() - began
        self._manager.wait_until_finished()

    def forget(self, number: int) -> None:
        self._manager.delete(number)
        assert self._manager._catalog.state.worker.wait(60)

    def restore(self, like: Any) -> Any:
        return self._manager.restore(TIMED, like)

    def close(self) -> None:
        self._manager.close()


class Contender:
    """One whose saves are keys below a prefix of their own."""

    name = ""

    def __init__(self, endpoint: str) -> None:
        self._store = bare_store(endpoint)

    def forget(self, number: int) -> None:
        """Deletes a save."""
        empty(self._store, f"{self.name}/{number}/")

    def close(self) -> None:
        """Lets go of what was opened."""


class Obstore(Contender):
    """Bare puts and gets."""

    name = "obstore"

    def save(self, state: Any, number: int) -> None:
        import obstore

        def put(name: str) -> None:
            data = memoryview(np.asarray(state[name]).reshape(-1).view(np.uint8))
            obstore.put(self._store, f"obstore/{number}/{name}", data, use_multipart=False)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(put, state))

    def restore(self, like: Any) -> Any:
        import obstore

        memory = {name: aligned(leaf) for name, leaf in like.items()}

        def get(place: tuple[str, int]) -> None:
            name, start = place
            found = obstore.get_range(
                self._store, f"obstore/{TIMED}/{name}", start=start, end=start + RANGE_BYTES
            )
            part = memory[name].reshape(-1).view(np.uint8)[start : start + RANGE_BYTES]
            np.copyto(part, np.frombuffer(found, np.uint8))

        places = [(name, at) for name in like for at in range(0, ARRAY_BYTES, RANGE_BYTES)]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(get, places))
        return on_device(memory)


class TensorStore(Contender):
    """zarr3 arrays, all opened, written and read at once, as Orbax does."""

    name = "tensorstore"
    codecs: Sequence[Any] = (RAW_BYTES,)

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        import tensorstore

        self._tensorstore = tensorstore
        self._context = tensorstore.Context({"s3_request_concurrency": {"limit": AT_ONCE}})
        self._kvstore = {
            "driver": "s3",
            "bucket": BUCKET,
            "endpoint": endpoint,
            "aws_region": REGION,
            "aws_credentials": {"type": "anonymous"},
        }

    def _open(self, number: int, name: str, **options: Any) -> Any:
        kvstore = self._kvstore | {"path": f"{self.name}/{number}/{name}/"}
        spec = {"driver": "zarr3", "kvstore": kvstore}
        return self._tensorstore.open(spec, open=True, context=self._context, **options)

    def save(self, state: Any, number: int) -> None:
        chunks = self._tensorstore.ChunkLayout(chunk_shape=next(iter(state.values())).shape)
        codec = self._tensorstore.CodecSpec({"driver": "zarr3", "codecs": list(self.codecs)})
        opened = [
            self._open(
                number,
                name,
                create=True,
                dtype=leaf.dtype.name,
                shape=leaf.shape,
                chunk_layout=chunks,
                codec=codec,
            )
            for name, leaf in state.items()
        ]
        written = [
            array.result().write(np.asarray(leaf), can_reference_source_data_indefinitely=True)
            for array, leaf in zip(opened, state.values(), strict=True)
        ]
        for each in written:
            each.result()

    def restore(self, like: Any) -> Any:
        opened = {name: self._open(TIMED, name) for name in like}
        memory = {name: aligned(leaf) for name, leaf in like.items()}
        read = [
            self._tensorstore.array(memory[name]).write(array.result())
            for name, array in opened.items()
        ]
        for each in read:
            each.result()
        return on_device(memory)


class OrbaxArrays(TensorStore):
    """The same, sharded and compressed."""

    name = "orbax"
    codecs = ORBAX_CODECS


class Boto3(Contender):
    """The transfer manager, with its own size of parts."""

    name = "boto3"

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        import boto3
        from boto3.s3.transfer import TransferConfig, create_transfer_manager
        from botocore import UNSIGNED
        from botocore.config import Config

        config = Config(
            signature_version=UNSIGNED,
            max_pool_connections=AT_ONCE,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        client = boto3.client("s3", endpoint_url=endpoint, region_name=REGION, config=config)
        self._manager = create_transfer_manager(client, TransferConfig(max_concurrency=AT_ONCE))

    def save(self, state: Any, number: int) -> None:
        sent = [
            self._manager.upload(MemoryFile(np.asarray(leaf)), BUCKET, f"boto3/{number}/{name}")
            for name, leaf in state.items()
        ]
        for each in sent:
            each.result()

    def restore(self, like: Any) -> Any:
        memory = {name: aligned(leaf) for name, leaf in like.items()}
        asked = [
            self._manager.download(BUCKET, f"boto3/{TIMED}/{name}", MemoryFile(array))
            for name, array in memory.items()
        ]
        for each in asked:
            each.result()
        return on_device(memory)

    def close(self) -> None:
        self._manager.shutdown()


class MemoryFile(io.RawIOBase):
    """An array's memory as a file."""

    def __init__(self, array: Any) -> None:
        self._data = memoryview(array.reshape(-1).view(np.uint8))
        self._at = 0

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        part = self._data[self._at : self._at + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)

    def write(self, data: Any) -> int:
        self._data[self._at : self._at + len(data)] = data
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        begins = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._data)}
        self._at = begins[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at


CONTENDERS: dict[str, Callable[[str], Any]] = {
    "holdfast": Holdfast,
    "obstore": Obstore,
    "tensorstore": TensorStore,
    "orbax": OrbaxArrays,
    "boto3": Boto3,
}


def bare_store(endpoint: str) -> Any:
    """Returns obstore's store of the bucket, without retries and without limits of time."""
    from obstore.store import S3Store

    return S3Store(
        BUCKET,
        endpoint=endpoint,
        region=REGION,
        unsigned_payload=True,
        client_options={"allow_http": True, "timeout": timedelta(days=1)},
        retry_config={"max_retries": 0, "retry_timeout": timedelta(0)},
    )


def aligned(leaf: Any) -> Any:
    """Returns memory for an array, which jax takes without a copy."""
    nbytes = leaf.size * leaf.dtype.itemsize
    memory = np.empty(nbytes + 64, np.uint8)
    lead = -memory.ctypes.data % 64
    return memory[lead : lead + nbytes].view(leaf.dtype).reshape(leaf.shape)


def on_device(memory: dict[str, Any]) -> Any:
    """Returns the arrays of jax that lie in this memory."""
    import jax

    return jax.device_put(memory)


def shapes(count: int) -> dict[str, Any]:
    """Returns the tree that is saved, as shapes."""
    import jax

    return {
        f"layer{number:03d}": jax.ShapeDtypeStruct((SIDE, SIDE), np.float32)
        for number in range(count)
    }


def bytes_of(number: int) -> Any:
    """Returns the numbers of one array; the same in every process."""
    random = np.random.default_rng(number)
    return random.integers(0, 1 << 32, (SIDE, SIDE), np.uint32).view(np.float32)


# --- One save or restore, in a process of its own


def work(name: str, verb: str, count: int, endpoint: str, servers: Sequence[int]) -> None:
    """Saves, for the first time or once more, or restores; prints a JSON object of figures."""
    import jax

    like = shapes(count)
    state: Any = None
    saves = verb in ("save", "save first")
    if saves:
        state = jax.device_put({key: bytes_of(at) for at, key in enumerate(like)})
        jax.block_until_ready(state)
    opened = CONTENDERS[name](endpoint)
    gc.collect()
    resident = reset_peak()
    if verb == "save":
        opened.save(state, WARMING)
        opened.forget(WARMING)
    asked = requests(endpoint)
    cpu = [cpu_of(process) for process in servers]
    own = time.process_time()
    began = time.perf_counter()
    if saves:
        opened.save(state, TIMED)
    else:
        state = opened.restore(like)
        jax.block_until_ready(state)
    figures: dict[str, Any] = {"wall": time.perf_counter() - began}
    figures["cpu"] = time.process_time() - own
    figures["blocked"] = getattr(opened, "blocked_s", 0.0)
    figures["beside"] = status("VmHWM") - resident
    figures["servers"] = sum(map(cpu_of, servers)) - sum(cpu)
    figures["requests"] = {
        kind: times - asked.get(kind, 0)
        for kind, times in requests(endpoint).items()
        if times > asked.get(kind, 0)
    }
    if not saves or name == "holdfast":  # its snapshot
        figures["beside"] -= count * ARRAY_BYTES
    figures["copy"] = getattr(opened, "copy_s", 0.0)
    if not saves:
        for at, key in enumerate(like):
            expected = bytes_of(at).view(np.uint8)
            assert np.array_equal(np.asarray(state[key]).view(np.uint8), expected), key
    opened.close()
    print("RESULT " + json.dumps(figures), flush=True)


def requests(endpoint: str) -> dict[str, int]:
    """Returns how many requests of each kind the proxy has seen."""
    with urllib.request.urlopen(f"{endpoint}/-/requests", timeout=30) as answer:
        counts: dict[str, int] = json.load(answer)
    return counts


def cpu_of(process: int) -> float:
    """Returns the CPU seconds of another process."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def reset_peak() -> int:
    """Begins the peak of memory anew; returns what is resident."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def status(key: str) -> int:
    """Returns a size of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key + ":"))


# --- All of them, in turns


@contextlib.contextmanager
def server(*command: object) -> Iterator[tuple[str, int]]:
    """Runs one of the servers; gives its address and its process."""
    words = [sys.executable, *map(str, command)]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        yield process.stdout.readline().strip(), process.pid
        process.stdin.close()


def run(name: str, verb: str, count: int, endpoint: str, servers: Sequence[int]) -> dict[str, Any]:
    """Runs one process; returns its figures, with times a GB."""
    words = [name, verb, count, endpoint, *servers]
    done = subprocess.run(
        [sys.executable, __file__, "--worker", *map(str, words)],
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{verb} by {name} failed:\n{done.stdout}")
    found = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    figures: dict[str, Any] = json.loads(found.removeprefix("RESULT "))
    print(f"{name} {verb}: {figures}", file=sys.stderr, flush=True)
    return figures


def empty(store: Any, prefix: str = "") -> None:
    """Deletes all that is stored below a prefix."""
    import obstore

    for page in obstore.list(store, prefix or None, chunk_size=1000):
        obstore.delete(store, [meta["path"] for meta in page])


def checksum_s_a_gb() -> float:
    """Returns the CPU seconds that the checksum of a GB takes, on one thread."""
    from crc32c import crc32c

    data = memoryview(bytes_of(0)).cast("B")
    seconds = []
    for _ in range(5):
        began = time.process_time()
        crc32c(data)
        seconds.append(time.process_time() - began)
    return statistics.median(seconds) / ARRAY_BYTES * 1e9


class Medians:
    """The figures of one contender's saves or restores of one size, over all turns."""

    def __init__(self, count: int, turns: Sequence[dict[str, Any]]) -> None:
        self.gb = count * ARRAY_BYTES / 1e9
        self.wall_s = statistics.median(turn["wall"] for turn in turns)
        self.blocked_s = statistics.median(turn["blocked"] for turn in turns)
        self.copy_s = statistics.median(turn["copy"] for turn in turns) / self.gb
        self.cpu_s = statistics.median(turn["cpu"] - turn["copy"] for turn in turns) / self.gb
        self.servers_s = statistics.median(turn["servers"] for turn in turns) / self.gb
        self.beside_mib = max(turn["beside"] for turn in turns) >> 20
        self.requests = turns[-1]["requests"]


def table(medians: dict[tuple[str, str, int], Medians]) -> str:
    """Returns the figures as a table; CPU is in seconds a GB."""
    lines = [
        "| what | GB | wall, s | of that blocked | CPU | CPU of a copy"
        " | CPU of the servers | beside the arrays, MiB | requests |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (name, verb, _), found in medians.items():
        asked = ", ".join(f"{kind} {times}" for kind, times in found.requests.items())
        lines.append(
            f"| {verb}, {name} | {found.gb:.2f} | {found.wall_s:.2f} | {found.blocked_s:.2f}"
            f" | {found.cpu_s:.2f} | {found.copy_s:.2f} | {found.servers_s:.2f}"
            f" | {found.beside_mib} | {asked} |"
        )
    return "\n".join(lines)


def bars(medians: dict[tuple[str, str, int], Medians], checksum_s: float) -> str:
    """Returns holdfast's figures beside what was wanted of them."""
    lines = ["| holdfast's | found | wanted |", "|---|---|---|"]
    for (name, verb, count), ours in medians.items():
        floor = medians.get(("obstore", verb, count))
        if name != "holdfast" or floor is None:
            continue
        wanted = {"save": 1.3, "restore": 1.2}[verb]
        of_floor = ours.cpu_s / (floor.cpu_s + checksum_s)
        lines += [
            f"| {verb}: of obstore's speed | {floor.wall_s / ours.wall_s:.2f} | at least 0.9 |",
            f"| {verb}: CPU, of obstore's and the checksum's | {of_floor:.2f} | at most {wanted} |",
        ]
        for peer in ("orbax", "tensorstore"):
            other = medians.get((peer, verb, count))
            if other is None:
                continue
            lines += [
                f"| {verb}: wall time, of {peer}'s | {ours.wall_s / other.wall_s:.2f}"
                " | at most 1 |",
                f"| {verb}: CPU, of {peer}'s | {ours.cpu_s / other.cpu_s:.2f}"
                f" | {'at most 0.33' if verb == 'save' else ''} |",
            ]
    for (name, verb, _), found in medians.items():
        if name == "holdfast":
            lines.append(
                f"| {verb} of {found.gb:.1f} GB: memory beside the arrays, MiB"
                f" | {found.beside_mib} | at most 256 |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=4)
    parser.add_argument("--large-gb", type=float, default=6)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--first", action="store_true")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--delay-ms", default="20")
    parser.add_argument("--connection-mb", default="60")
    parser.add_argument("--link-mb", default="400")
    chosen = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    shape = [
        word
        for name in ("delay_ms", "connection_mb", "link_mb")
        for word in (f"--{name.replace('_', '-')}", getattr(chosen, name))
    ]
    folder = Path(tempfile.mkdtemp(prefix="object-store-", dir=chosen.memory))
    results: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    load = os.getloadavg()
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        direct, store_pid = stack.enter_context(server(HERE / "s3_server.py", folder))
        port = direct.rpartition(":")[2]
        shaped, proxy_pid = stack.enter_context(server(HERE / "shaped_proxy.py", port, *shape))

        def compare(name: str, gigabytes: float) -> None:
            count = max(1, round(gigabytes * 1e9 / ARRAY_BYTES))
            for verb in ("save first" if chosen.first else "save", "restore"):
                figures = run(name, verb, count, shaped, (store_pid, proxy_pid))
                results.setdefault((name, verb.split()[0], count), []).append(figures)
            empty(bare_store(direct))

        for _ in range(chosen.turns):
            for name in chosen.only:
                compare(name, chosen.gb)
        if chosen.large_gb and "holdfast" in chosen.only:
            compare("holdfast", chosen.large_gb)
    medians = {key: Medians(key[2], turns) for key, turns in results.items()}
    checksum_s = checksum_s_a_gb()
    print(table(medians))
    print()
    print(bars(medians, checksum_s))
    print()
    print(f"checksum: {checksum_s:.3f} CPU s a GB on one thread")
    print(f"load: {load[0]:.1f} before, {os.getloadavg()[0]:.1f} after, {os.cpu_count()} cores")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        name, verb, count, endpoint, *servers = sys.argv[2:]
        work(name, verb, int(count), endpoint, [int(process) for process in servers])
    else:
        main()
