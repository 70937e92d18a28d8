"""A restore in which processes pass on what they read."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.checkpoint import Corrupt, save
from holdfast.checkpoint.agreement.restore_verdict import RestoreAgreement
from holdfast.checkpoint.format.record import Record, read_record
from holdfast.checkpoint.layouts.holdfast import HoldfastCheckpoint
from holdfast.checkpoint.layouts.restore import restore_checkpoint
from holdfast.checkpoint.memory.budget import USE, MemoryBudget
from holdfast.checkpoint.restoring import restore_peers, shared_reader, sharing
from holdfast.checkpoint.restoring.devices import Region, slices_in
from holdfast.checkpoint.restoring.reader import ReadRequest
from holdfast.checkpoint.restoring.restore import RestoreOptions, allocate
from holdfast.checkpoint.restoring.restore_peers import RestorePeers
from holdfast.checkpoint.restoring.shared_reader import HeldBlocks, SharedReader
from holdfast.checkpoint.restoring.sharing import Demand, Runs
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.multihost import ClusterGroup, Solo
from tests.support.checkpointing import at_once, groups
from tests.support.paths import program

COUNT = 4
MIB = 1 << 20


class Counting(LocalStorage):
    """Counts what is read of packs."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.bytes = 0
        self.lock = threading.Lock()

    def read(self, name: str, offset: int, buffers: Sequence[memoryview]) -> int:
        got = super().read(name, offset, buffers)
        with self.lock:
            self.bytes += got
        return got


class Peers(RestorePeers):
    """Peers whose faults are chosen: `harm` changes what has come, or raises."""

    harm: Callable[[int, Sequence[memoryview], int], int] = staticmethod(
        lambda rank, buffers, got: got
    )

    def read(self, rank: int, name: str, offset: int, buffers: Sequence[memoryview]) -> int | None:
        got = super().read(rank, name, offset, buffers)
        return None if got is None else self.harm(rank, buffers, got)


def state() -> dict[str, Any]:
    random = np.random.default_rng(7)
    tree: dict[str, Any] = {f"w{i}": random.standard_normal((512, 1024)) for i in range(6)}
    tree["small"] = [random.standard_normal(40 + i) for i in range(30)]
    return tree


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shared") / "step"
    save(path, state(), group=Solo())
    return path


def restore_each(
    folder: Path,
    make: Callable[[ClusterGroup, RestoreAgreement], RestorePeers],
    partial: Callable[[int], Any] = lambda rank: False,
    stores: Mapping[int, LocalStorage] | None = None,
) -> tuple[list[Any], list[RestorePeers], Counting]:
    """Restores on COUNT processes that are threads: their results, and what was read in all.

    `stores` are those of ranks that have one of their own.
    """
    storage = Counting(str(folder))
    other = stores or {}
    record: Record = read_record(storage, "")
    storage.bytes = 0

    with groups(COUNT) as members:

        def restore(group: ClusterGroup) -> tuple[Any, RestorePeers]:
            agreement = RestoreAgreement(group, "restore", "the state", 30.0)
            with make(group, agreement) as peers:
                options = RestoreOptions(read="once", peers=peers, partial=partial(group.index))
                values, verdict = agreement.run(
                    lambda: restore_checkpoint(
                        HoldfastCheckpoint(other.get(group.index, storage), record=record),
                        options=options,
                    ),
                    str(folder),
                )
                return verdict.error or values, peers

        both = at_once([lambda group=group: restore(group) for group in members])
    return [result for result, _ in both], [peers for _, peers in both], storage


def plain(group: ClusterGroup, agreement: RestoreAgreement) -> Peers:
    return Peers(group, agreement, "once", address="127.0.0.1")


def same(found: Any) -> bool:
    want = state()
    assert all(np.array_equal(found[f"w{i}"], want[f"w{i}"]) for i in range(6))
    pairs = zip(found["small"], want["small"], strict=True)
    return all(np.array_equal(one, other) for one, other in pairs)


def counted(peers: Sequence[Any], name: str) -> int:
    return sum(each.counts.get(name, 0) for each in peers)


def test_each_byte_comes_from_the_store_once(folder: Path) -> None:
    """Four processes that need all read 1.1 of the bytes together, evenly, and all have them."""
    held_bytes = USE.held_bytes
    results, peers, storage = restore_each(folder, plain)
    assert USE.held_bytes <= held_bytes  # at once: `peers` has the readers
    assert all(same(each) for each in results)
    size = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    assert storage.bytes < 1.1 * size, (storage.bytes, size)
    shares = [each.counts["store_bytes"] for each in peers]
    assert max(shares) < 0.4 * size, shares


def test_what_one_alone_needs_it_reads_itself(folder: Path) -> None:
    """Processes that need different leaves get theirs, and the common ones are read once."""
    results, _, _ = restore_each(
        folder, plain, lambda rank: lambda path: path in (f"w{rank}", "w5")
    )
    want = state()
    for rank, found in enumerate(results):
        assert np.array_equal(found[f"w{rank}"], want[f"w{rank}"])
        assert np.array_equal(found["w5"], want["w5"])
        assert found[f"w{(rank + 1) % 4}"] is None


def flipped(rank: int, buffers: Sequence[memoryview], got: int) -> int:
    buffers[0][0] ^= 1
    return got


def refused(rank: int, buffers: Sequence[memoryview], got: int) -> int:
    raise ConnectionResetError("it went")


def short(rank: int, buffers: Sequence[memoryview], got: int) -> int:
    return got // 2


@pytest.mark.parametrize(
    ("harm", "counter"),
    [(flipped, "peer_damaged"), (refused, "peer_failed"), (short, "peer_failed")],
)
def test_a_peer_that_fails_is_replaced_by_the_store(
    folder: Path, harm: Callable[..., int], counter: str
) -> None:
    """Wrong bytes, none and too few are noticed and counted; all processes have the right ones."""

    def make(group: ClusterGroup, agreement: RestoreAgreement) -> Peers:
        peers = plain(group, agreement)
        if group.index == 1:
            peers.harm = harm
        return peers

    results, peers, _ = restore_each(folder, make)
    assert all(same(each) for each in results)
    assert counted(peers[1:2], counter) > 0


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes half a second long."""
    monkeypatch.setattr(sharing, "PATIENCE_S", 0.5)
    monkeypatch.setattr(restore_peers, "SILENT_S", 0.5)
    monkeypatch.setattr(shared_reader, "PENDING_S", 0.1)


class Stalling(LocalStorage):
    """A store whose reads end when they are let go."""

    def __init__(self, root: str, let_go: threading.Event) -> None:
        super().__init__(root)
        self.let_go = let_go
        self.given_up = 0

    def read(self, name: str, offset: int, buffers: Sequence[memoryview]) -> int:
        if offset > MIB and sum(map(len, buffers)) > MIB // 2:  # headers come
            self.given_up += not self.let_go.wait(30)
        return super().read(name, offset, buffers)


@pytest.mark.usefixtures("hurried")
def test_a_reader_whose_store_stands_still_is_passed_over(folder: Path) -> None:
    """The others hold all their bytes while its reads of the store hang, and it has its own when
    they come.
    """
    let_go = threading.Event()
    done: list[int] = []

    class Watched(Peers):
        def finish(self) -> None:
            if self.index != 1:
                done.append(self.index)
                if len(done) == COUNT - 1:
                    let_go.set()
            super().finish()

    results, peers, _ = restore_each(
        folder,
        lambda *args: Watched(*args, "once", address="127.0.0.1"),
        stores={1: Stalling(str(folder), let_go)},
    )
    assert let_go.is_set() and len(done) == COUNT - 1
    assert all(same(each) for each in results)
    assert counted([peers[rank] for rank in (0, 2, 3)], "peer_failed") > 0


@pytest.mark.usefixtures("hurried")
def test_a_reader_whose_store_stands_still_gets_its_blocks_from_who_stands_in(
    folder: Path,
) -> None:
    """Its reads of the store hang to the end of the restore, and it has all its bytes before."""
    let_go = threading.Event()

    class Released(Peers):
        def finish(self) -> None:
            super().finish()
            let_go.set()

    stalling = Stalling(str(folder), let_go)
    results, peers, _ = restore_each(
        folder, lambda *args: Released(*args, "once", address="127.0.0.1"), stores={1: stalling}
    )
    assert all(same(each) for each in results)
    assert stalling.given_up == 0
    assert counted(peers[1:2], "own_left") > 0


@pytest.mark.usefixtures("hurried")
def test_slow_answers_that_come_are_no_failures(folder: Path) -> None:
    """A reader that takes longer than an answer may take, but says that it reads, is waited for."""

    class Slow(LocalStorage):
        def read(self, name: str, offset: int, buffers: Sequence[memoryview]) -> int:
            if offset > MIB:
                time.sleep(0.4)
            return super().read(name, offset, buffers)

    slow = {rank: Slow(str(folder)) for rank in range(COUNT)}
    results, peers, _ = restore_each(folder, plain, stores=slow)
    assert all(same(each) for each in results)
    assert counted(peers, "peer_failed") == 0
    assert counted(peers, "peer_bytes") > 0


@pytest.mark.usefixtures("hurried")
def test_a_peer_that_never_answers_is_dropped(folder: Path) -> None:
    """Its server takes connections and says nothing: nobody waits for it for long."""
    ended = threading.Event()

    class Mute(Peers):
        def _find(self, name: str, offset: int, size: int) -> memoryview | None:
            ended.wait(30)
            return super()._find(name, offset, size)

    began_s = time.monotonic()
    try:
        results, peers, _ = restore_each(
            folder,
            lambda group, agreement: (Mute if group.index == 2 else Peers)(
                group, agreement, "once", address="127.0.0.1"
            ),
        )
    finally:
        ended.set()
    assert time.monotonic() - began_s < 15
    assert all(same(each) for each in results)
    assert not peers[0].trust.may_ask(2)
    assert peers[0].trust.may_ask(1)


def test_a_peer_that_is_gone_is_replaced(folder: Path) -> None:
    """It ends each connection: its blocks come from who stands in, or the store."""

    class Gone(Peers):
        def _find(self, name: str, offset: int, size: int) -> memoryview | None:
            if self.index == 1:
                raise ConnectionResetError
            return super()._find(name, offset, size)

    results, peers, _ = restore_each(folder, lambda *args: Gone(*args, "once", address="127.0.0.1"))
    assert all(same(each) for each in results)
    assert counted([peers[rank] for rank in (0, 2, 3)], "peer_failed") > 0
    assert not peers[0].trust.may_ask(1)


def test_little_of_a_large_block_is_read_alone(folder: Path) -> None:
    """Processes that need small leaves alone read these, and no blocks around them."""
    results, peers, storage = restore_each(
        folder, plain, lambda rank: lambda path: path == "small.3"
    )
    assert all(np.array_equal(found["small"][3], state()["small"][3]) for found in results)
    assert storage.bytes < MIB
    assert counted(peers, "peer_bytes") == 0


def test_what_is_held_for_others_is_bounded_and_dropped(folder: Path) -> None:
    """With room for one block, blocks are dropped; who comes later reads the store."""

    def make(group: ClusterGroup, agreement: RestoreAgreement) -> Peers:
        few = MemoryBudget(bound_bytes=4 * MIB)
        return Peers(group, agreement, "once", few, "127.0.0.1")

    results, _, _ = restore_each(folder, make)
    assert all(same(each) for each in results)


def test_without_free_memory_one_block_is_held_at_a_time() -> None:
    """The next one takes its place."""
    none = MemoryBudget(bound_bytes=0)
    agreement = RestoreAgreement(Solo(), "restore", "the state", 30.0)
    peers = RestorePeers(Solo(), agreement, "once", none)
    blocks = HeldBlocks(lambda block: memoryview(b"xyz"), lambda block: 3, peers.hold_bytes)
    assert [blocks.get(block, 2) for block in (0, 1, 0)] == [b"xyz", b"xyz", None]
    blocks.close()


def test_a_process_without_an_address_reads_for_itself(folder: Path) -> None:
    """A process that cannot serve is none's reader, and gets its bytes."""

    class Unreachable(Peers):
        def _serve_peers(self) -> str:
            return ""

    def make(group: ClusterGroup, agreement: RestoreAgreement) -> Peers:
        kind = Unreachable if group.index == 2 else Peers
        return kind(group, agreement, "once", address="127.0.0.1")

    results, peers, _ = restore_each(folder, make)
    assert all(same(each) for each in results)
    assert peers[2].counts["peer_bytes"] > 0


def test_damage_in_the_store_is_an_error_for_all(tmp_path: Path) -> None:
    """A chunk that is damaged in the store is Corrupt on every process. What was held for others
    goes though the error lives.
    """
    folder = tmp_path / "step"
    save(folder, state(), group=Solo())
    pack = max(folder.rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    with pack.open("r+b") as file:
        file.seek(5 * MIB)
        byte = file.read(1)
        file.seek(5 * MIB)
        file.write(bytes([byte[0] ^ 1]))
    gc.collect()
    held_bytes = USE.held_bytes
    results, _, _ = restore_each(folder, plain)
    assert all(isinstance(each, Corrupt) for each in results), results
    assert USE.held_bytes <= held_bytes


def test_one_process_that_fails_ends_the_restore_of_all(folder: Path) -> None:
    """One that fails before it has told its needs is the error of all, at once."""

    class Failing(Peers):
        def meet(self, runs: Runs) -> list[Demand]:
            if self.index == 3:
                raise Corrupt("its disk is gone", path="here")
            return super().meet(runs)

    results, _, _ = restore_each(folder, lambda *args: Failing(*args, "once", address="127.0.0.1"))
    assert all(isinstance(each, Corrupt) for each in results), results


def random_region(random: np.random.Generator, shape: tuple[int, ...]) -> Region:
    """Returns a region of a leaf, which has something in it."""
    region = []
    for size in shape:
        start = int(random.integers(0, size))
        region.append((start, int(random.integers(start + 1, size + 1))))
    return tuple(region)


@pytest.fixture(scope="module")
def meshes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder of steps that were saved on meshes of four devices, by their rows."""
    path = tmp_path_factory.mktemp("meshes")
    subprocess.run(
        [sys.executable, program("save_on_meshes"), path],
        env=os.environ
        | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
        check=True,
        timeout=60,
    )
    return path


@pytest.mark.parametrize(("rows", "count"), [(1, 2), (2, 3), (4, 6)])
def test_any_regions_come_bit_for_bit_to_any_number_of_processes(
    meshes: Path, rows: int, count: int
) -> None:
    """Processes read regions of their own in two waves, while one peer's bytes are damaged."""
    random = np.random.default_rng(3)
    whole = {f"w{i}": random.standard_normal((256 << i, 512)).astype(np.float32) for i in range(3)}
    storage = LocalStorage(str(meshes / str(rows)))
    item = read_record(storage, "").items["state"]
    wanted = [
        [[ReadRequest(leaf, random_region(random, leaf.shape)) for leaf in item.leaves]]
        + [[ReadRequest(leaf, whole_region(leaf.shape)) for leaf in item.leaves]]
        for _ in range(count)
    ]

    def read(group: ClusterGroup) -> tuple[Exception | None, int]:
        agreement = RestoreAgreement(group, "restore", "the state", 30.0)
        with plain(group, agreement) as peers:
            if group.index == 0:
                peers.harm = flipped

            def fill() -> None:
                reader = SharedReader(storage, "", item, peers)
                reader.foresee(itertools.chain(*wanted[group.index]))
                for wave in wanted[group.index]:
                    reader.fill(wave, allocate)
                reader.finish()

            error = agreement.run(fill, storage.root)[1].error
            return error, peers.counts.get("peer_damaged", 0)

    with groups(count) as members:
        found = at_once([lambda group=group: read(group) for group in members])
    assert [error for error, _ in found] == [None] * count
    assert found[0][1] > 0
    for request in itertools.chain(*itertools.chain(*wanted)):
        assert request.array is not None
        want = whole[request.leaf.path][slices_in(request.region, whole_region(request.leaf.shape))]
        assert np.array_equal(request.array, want)


def whole_region(shape: tuple[int, ...]) -> Region:
    """Returns the region that is all of a leaf."""
    return tuple((0, size) for size in shape)
