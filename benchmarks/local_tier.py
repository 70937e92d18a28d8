"""Times the local tier against what bounds it, in one run.

    python benchmarks/local_tier.py [--mib 512] [--rounds 7] [--throttle-s 60]
        [--memory /dev/shm] [--disk DIR]

That is blocked time, bare overwriting, the CPU of copying, peers, and Orbax's p2p. The peer is a
process of its own, and what goes over the network goes over loopback; CPU seconds are those of both
sides. Restores are timed with all cores shared, and with half of them for each side, as hosts have
their own (it takes two cores at least). The columns take turns; medians. A durable save is
stretched to --throttle-s, with local saves meanwhile. Orbax's p2p manager copies nothing ahead, and
needs a process for each replica: alone it saves into its local folder, which is what is timed here,
where it runs.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from crc32c import crc32c

from holdfast.checkpoint import CheckpointManager, EveryNSteps, KeepLast, Local, Options, Progress
from holdfast.checkpoint.format.record import parse_record
from holdfast.checkpoint.layouts.holdfast import HoldfastCheckpoint
from holdfast.checkpoint.layouts.restore import restore_checkpoint
from holdfast.checkpoint.local_tier.host_folder import HostFolder
from holdfast.checkpoint.local_tier.inventory import FoundStep, Inventory, living_steps, record_of
from holdfast.checkpoint.local_tier.part_copier import PIECE_BYTES, Throttle, _PartSource, copy_file
from holdfast.checkpoint.local_tier.parts import LocalKey, PartSummary
from holdfast.checkpoint.local_tier.peer_storage import PeerStorage
from holdfast.checkpoint.steps.lineage import Branch
from holdfast.checkpoint.storage.threads import run_side_by_side
from holdfast.multihost.peers.part_server import PartServer
from holdfast.multihost.peers.peer_connection import PeerConnection, Peers

LEAF_BYTES = 16 << 20
SECRET = b"s" * 32


def tree(mib: int) -> dict[str, Any]:
    values = np.random.default_rng(0).standard_normal(LEAF_BYTES // 4, dtype=np.float32)
    return {f"l{index:04d}": jnp.asarray(values + index) for index in range(max(1, mib // 16))}


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def cpu(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def saves(state: Any, rounds: int, memory: Path, disk: Path) -> dict[str, list[float]]:
    """Returns seconds of saves: blocked by either kind, of a local one, and of overwriting.

    What is overwritten are the same files, with the same bytes.
    """
    found: dict[str, list[float]] = {
        "blocked durable": [],
        "blocked local": [],
        "local save": [],
        "bare overwriting": [],
    }
    local = Local(memory / "tier", save_policy=EveryNSteps(1))
    with CheckpointManager(
        disk / "root", save_policy=EveryNSteps(4), keep_policy=KeepLast(1), local=local
    ) as manager:
        for step in range(4 * rounds + 4):
            began = time.perf_counter()
            handle = manager.save(step, state)
            blocked = time.perf_counter() - began
            handle.wait()
            if step < 4:
                continue
            if step % 4 == 0:
                found["blocked durable"].append(blocked)
                manager._state.worker.wait(60)
            elif step % 4 == 3:
                found["blocked local"].append(blocked)
                found["local save"].append(time.perf_counter() - began)
                found["bare overwriting"].append(timed(lambda: overwrite(memory, state)))
    return found


def overwrite(memory: Path, state: Any) -> None:
    """Writes the state over four files, on as many threads, and checksums it as it goes.

    A local save cannot do without that.
    """
    views = [memoryview(np.asarray(leaf).view(np.uint8).reshape(-1)) for leaf in state.values()]

    def write(number: int) -> None:
        file = os.open(memory / f"bare{number}", os.O_WRONLY | os.O_CREAT)
        at = 0
        for view in views[number::4]:
            for start in range(0, view.nbytes, 1 << 20):
                piece = view[start : start + (1 << 20)]
                crc32c(piece)
                at += os.pwrite(file, piece, at)
        os.close(file)

    run_side_by_side(write, list(range(4)), 4)


def beside_a_durable_save(
    state: Any, throttle_s: float, memory: Path, disk: Path
) -> dict[str, list[float]]:
    """Returns blocked seconds of local saves beside a durable save, and with none in flight.

    The durable save takes `throttle_s`.
    """
    began = 0.0

    def stretch(progress: Progress) -> None:
        time.sleep(
            max(
                0.0,
                began + throttle_s * progress.done_bytes / progress.total_bytes - time.monotonic(),
            )
        )

    found: dict[str, list[float]] = {"blocked beside": [], "blocked alone": []}
    local = Local(memory / "beside", save_policy=EveryNSteps(1))
    # Its number is above those of the local saves beside it.
    options = Options(progress=stretch, out_of_order=True)
    with CheckpointManager(
        disk / "slow", save_policy=EveryNSteps(10**6), options=options, local=local
    ) as manager:
        for step in range(1, 4):
            manager.save(step, state).wait()
        began = time.monotonic()
        slow = manager.save(10**6, state)
        for name in found:
            count = len(found["blocked beside"])
            step = manager.local_steps()[-1]
            while not slow.done() if name == "blocked beside" else len(found[name]) < count:
                step += 1
                at = time.perf_counter()
                handle = manager.save(step, state)
                blocked = time.perf_counter() - at
                handle.wait()
                assert manager.local_steps() == [step]
                if name == "blocked alone" or not slow.done():
                    found[name].append(blocked)
                time.sleep(0.1)
    return found


@contextmanager
def peer_process(folder: Path, run: str) -> Iterator[tuple[str, Connection, int]]:
    """Yields the address of a part server in a process of its own, and how to ask for its CPU.

    That is a connection that answers with its CPU seconds so far, and its process id.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=serve_parts, args=(folder, run, theirs))
    process.start()
    theirs.close()
    try:
        yield ours.recv(), ours, process.pid or 0
    finally:
        ours.close()
        process.join()


def serve_parts(folder: Path, run: str, connection: Connection) -> None:
    """Serves all parts of a host's folder until the other side of the connection is closed."""
    owner = HostFolder(folder, run)
    with PartServer("127.0.0.1", SECRET) as server:
        for part in owner.scan():
            server.publish(owner.path, part.name, part.files)
        connection.send(server.address)
        try:
            while True:
                connection.recv()
                connection.send(time.process_time())
        except EOFError:
            return


def run_on(cores: set[int], process: int) -> None:
    """Has all threads of a process run on some cores, and those that they start."""
    for thread in os.listdir(f"/proc/{process}/task"):
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread), cores)


def peers(state: Any, rounds: int, memory: Path) -> dict[str, list[float]]:
    """Returns the CPU seconds a GB of copying, and the seconds of restores.

    Copying is timed on both sides, and its checks alone; restores are from the own folder and from
    a peer.
    """
    found: dict[str, list[float]] = {}
    local = Local(memory / "owner", save_policy=EveryNSteps(1))
    with CheckpointManager(memory / "root", save_policy=EveryNSteps(10**6), local=local) as manager:
        manager.save(1, state).wait()
    (run,) = [path.name for path in (memory / "owner").iterdir()]
    owner, keeper, empty = (HostFolder(memory / name, run) for name in ("owner", "keeper", "none"))
    (part,) = owner.scan()
    gigabytes = sum(part.files.values()) / 1e9
    assert part.head is not None
    step = FoundStep(part.key, [part.summary().report], [[0]])
    record = record_of(step, part.head)
    with (
        peer_process(memory / "owner", run) as (address, peer_cpu, peer),
        Peers({0: address}, SECRET, 60) as connections,
    ):

        def copy() -> None:
            with PeerConnection(address, SECRET) as connection:
                source = _PartSource(connection, part, Throttle(math.inf), lambda: 60.0)
                for reader, report in part.readers(source, step_bytes=PIECE_BYTES):
                    for file in report.files:
                        copy_file(reader, file, keeper)

        def sent() -> float:
            peer_cpu.send(None)
            return float(peer_cpu.recv())

        def restore(name: str) -> None:
            is_own = name.startswith("restore own")
            storage = PeerStorage(
                (owner if is_own else empty).storage,
                part.key.folder,
                record,
                [[0]],
                own=frozenset({0} if is_own else ()),
                peers=connections,
            )
            parsed = parse_record(record, "record")
            checkpoint = HoldfastCheckpoint(storage, part.key.folder, parsed)
            restored = restore_checkpoint(checkpoint, like=state)
            jax.block_until_ready(restored)

        cores = sorted(os.sched_getaffinity(0))
        for turn in range(rounds + 1):
            before = sent()
            began = time.perf_counter()
            receiving = cpu(copy)
            seconds = {
                "copying, s/GB": (time.perf_counter() - began) / gigabytes,
                "receiving, CPU s/GB": receiving / gigabytes,
            }
            seconds["sending, CPU s/GB"] = (sent() - before) / gigabytes
            views = [
                memoryview(np.asarray(leaf).view(np.uint8).reshape(-1)) for leaf in state.values()
            ]
            seconds["checks, CPU s/GB"] = (
                cpu(lambda views=views: [crc32c(view) for view in views]) / gigabytes
            )
            keeper.storage.spare(part.files)
            for name in ("restore own", "restore peer"):
                before = sent()
                used = time.process_time()
                seconds[name] = timed(lambda name=name: restore(name))
                seconds[f"{name}, CPU s/GB"] = (time.process_time() - used) / gigabytes
                if name == "restore peer":
                    seconds["its sender, CPU s/GB"] = (sent() - before) / gigabytes
            run_on(set(cores[::2]), os.getpid())
            run_on(set(cores[1::2]), peer)
            for name in ("restore own, half of the cores", "restore peer, half of the cores"):
                seconds[name] = timed(lambda name=name: restore(name))
            run_on(set(cores), os.getpid())
            run_on(set(cores), peer)
            for name, value in seconds.items() if turn else ():
                found.setdefault(name, []).append(value)
    return found


def decision() -> float:
    """Returns the CPU seconds of a decision among the inventories of 4,096 processes.

    They have two steps, with a copy of each part.
    """
    count = 4096
    files = [
        [f"00001-{pack:05d}-{'0' * 16}.safetensors", 1 << 28, 4096, 123456789] for pack in range(4)
    ]
    report = json.dumps(
        {
            "state": {
                "process": 1,
                "plan": "a" * 64,
                "files": files,
                "local": [1, 2, 3],
                "values": [],
            }
        }
    )
    inventories = []
    for rank in range(count):
        own = [
            PartSummary(LocalKey(step, 3, f"{step:08x}00000001", count), at, report)
            for step in (1, 2)
            for at in (rank, (rank + 2048) % count)
        ]
        inventories.append(Inventory(own).to_bytes())
    branches = [Branch("", 3, "", -1)]
    return min(cpu(lambda: decide(inventories, branches)) for _ in range(5))


def decide(inventories: Sequence[bytes], branches: Sequence[Branch]) -> None:
    """Does what the primary does in a survey."""
    living_steps([Inventory.from_bytes(data) for data in inventories], branches)


def orbax_p2p(state: Any, rounds: int, memory: Path) -> list[float]:
    """Returns the seconds of saves of Orbax's p2p manager into its local folder.

    There are none where it does not run in one process.
    """
    import orbax.checkpoint as ocp
    from orbax.checkpoint.experimental.emergency.p2p import args, checkpoint_manager, options

    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(1, -1), ("replica", "data"))
    placed = jax.device_put(state, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    settings = options.CheckpointManagerOptions(
        local=options.LocalCheckpointOptions(save_interval_steps=1, max_to_keep=2)
    )
    found = []
    with checkpoint_manager.CheckpointManager(
        mesh, placed, memory / "p2p", options=settings
    ) as manager:
        for step in range(rounds + 1):
            began = time.perf_counter()
            manager.save(step, args.Composite(state=ocp.args.PyTreeSave(placed)))
            manager.wait_until_finished()
            found.append(time.perf_counter() - began)
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--throttle-s", type=float, default=60.0)
    parser.add_argument("--memory", default="/dev/shm")
    parser.add_argument("--disk", default=None)
    chosen = parser.parse_args()
    logging.disable(logging.WARNING)
    state = jax.block_until_ready(tree(chosen.mib))
    memory = Path(tempfile.mkdtemp(dir=chosen.memory))
    disk = Path(tempfile.mkdtemp(dir=chosen.disk))
    try:
        found = saves(state, chosen.rounds, memory, disk) | peers(state, chosen.rounds, memory)
        found |= beside_a_durable_save(state, chosen.throttle_s, memory, disk)
        try:
            found["Orbax p2p save"] = orbax_p2p(state, chosen.rounds, memory)
        except Exception as error:
            print(
                f"Orbax's p2p manager does not run here: {type(error).__name__}: {str(error)[:200]}"
            )
    finally:
        shutil.rmtree(memory)
        shutil.rmtree(disk)
    medians = {name: statistics.median(each) for name, each in found.items()}
    for name, value in medians.items():
        print(f"{name:32} {value:9.4f}")
    print(f"{'decision, CPU s':32} {decision():9.4f}   (wanted 0.1)")
    for name, above, below, wanted in (
        ("blocked local / durable", "blocked local", "blocked durable", "at most 1.1"),
        ("local save / bare overwriting", "local save", "bare overwriting", "at most 1.25"),
        ("restore peer / own", "restore peer", "restore own", "at most 1.2"),
        (
            "with half of the cores each",
            "restore peer, half of the cores",
            "restore own, half of the cores",
            "at most 1.2",
        ),
        (
            "the receiver's CPU alone",
            "restore peer, CPU s/GB",
            "restore own, CPU s/GB",
            "at most 1.2",
        ),
        ("blocked beside / alone", "blocked beside", "blocked alone", "at most 1.1"),
        ("Orbax p2p save / local save", "Orbax p2p save", "local save", "at least 3"),
    ):
        if above in medians:
            print(f"{name:32} {medians[above] / medians[below]:6.2f}   (wanted {wanted})")
    print(
        f"{len(found['blocked beside'])} local saves while a durable one took"
        f" {chosen.throttle_s:g} s"
    )
    copying = (
        medians["receiving, CPU s/GB"] + medians["sending, CPU s/GB"] - medians["checks, CPU s/GB"]
    )
    print(f"{'copying without its checks':32} {copying:6.2f}   (wanted at most 0.7 CPU s/GB)")


if __name__ == "__main__":
    main()
