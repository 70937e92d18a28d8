"""Snapshots: once one is taken the caller may do with its arrays what it likes."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from crc32c import crc32c
from jax.sharding import SingleDeviceSharding

from holdfast.checkpoint import SaveCancelled
from holdfast.checkpoint.format.pack_header import ChunkChecksum
from holdfast.checkpoint.format.tree import FlatTree
from holdfast.checkpoint.layouts.holdfast import HoldfastCheckpoint
from holdfast.checkpoint.layouts.restore import restore_checkpoint
from holdfast.checkpoint.memory.budget import USE, MemoryBudget
from holdfast.checkpoint.memory.levels import UNLIMITED_BYTES
from holdfast.checkpoint.memory.pool import MemoryPool
from holdfast.checkpoint.saving import plan as plans
from holdfast.checkpoint.saving import snapshot as snapshots
from holdfast.checkpoint.saving.incremental import SaveHistory, Unmoved
from holdfast.checkpoint.saving.item_files import ItemTarget
from holdfast.checkpoint.saving.pack_writer import ChunkSums, pack_parts, plan_pack, write_snapshot
from holdfast.checkpoint.saving.planner import Planner
from holdfast.checkpoint.saving.record_builder import RecordHead, build_record
from holdfast.checkpoint.saving.snapshot import (
    ArrayWaits,
    Snapshot,
    begin_copies,
    default_host_limit_bytes,
    first_copies,
    host_memory_kind,
    take_snapshot,
)
from holdfast.checkpoint.storage.local import LocalStorage


def commit(snapshot: Snapshot, storage: LocalStorage) -> None:
    report = write_snapshot(snapshot, ItemTarget(storage, "", "state", "ab12cd34"))
    record = build_record(
        RecordHead(0, writer="ab12cd34", processes=1, started_s=0.0, finished_s=0.0),
        {"state": (snapshot.plan, [report])},
    )
    (Path(storage.root) / ".holdfast/ab12cd34").mkdir(parents=True)
    storage.commit("checkpoint.json", record, ".holdfast/ab12cd34")


def on_devices(plan: plans.Plan) -> plans.Plan:
    """Has a plan's arrays count as those of devices that have memory of their own."""
    plan.cache["on host"] = False
    return plan


def aligned(count: int) -> np.ndarray[Any, Any]:
    """Returns the numbers from 0 on in memory that jax takes as it is."""
    raw = np.empty(4 * count + 64, np.uint8)
    start = -raw.ctypes.data % 64
    values = raw[start : start + 4 * count].view(np.float32)
    values[:] = np.arange(count)
    return values


@pytest.mark.parametrize("on_host", [None, False])
def test_donation_and_overwriting_do_not_disturb_it(tmp_path: Path, on_host: bool | None) -> None:
    """Arrays donated, numpy leaves overwritten, and numpy memory that jax shares, right after the
    snapshot, are saved as they were.
    """
    memory = aligned(1000)
    tree = {
        "device": jnp.arange(1 << 16, dtype=jnp.float32),
        "host": np.arange(1000),
        "key": jax.random.key(2),
    }
    if on_host is None:
        tree["shared"] = jax.device_put(memory)
        assert np.shares_memory(np.asarray(tree["shared"]), memory)
    planner = Planner()
    storage = LocalStorage(tmp_path)
    flat = FlatTree.of(tree)
    plan = planner.plan(flat)
    snapshot = take_snapshot(plan if on_host is None else on_devices(plan), flat)
    assert snapshot.wait(0)
    step = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    array: Any = tree["device"]
    for _ in range(3):
        array = step(array)
    array.block_until_ready()
    tree["host"][:] = -1  # type: ignore[index]
    memory[:] = -1
    commit(snapshot, storage)
    found = restore_checkpoint(HoldfastCheckpoint(storage))
    np.testing.assert_array_equal(found["device"], np.arange(1 << 16, dtype=np.float32))
    np.testing.assert_array_equal(found["host"], np.arange(1000))
    np.testing.assert_array_equal(found.get("shared", np.arange(1000)), np.arange(1000))
    np.testing.assert_array_equal(found["key"], jax.random.key_data(jax.random.key(2)))


def test_bounded_host_memory_makes_the_caller_wait(tmp_path: Path) -> None:
    """With room for one of four arrays, `wait` ends when the writer has fetched the others; what is
    written is right.
    """
    tree = {f"w{i}": jnp.full(1 << 18, i, jnp.float32) for i in range(4)}
    storage = LocalStorage(tmp_path)
    flat = FlatTree.of(tree)
    snapshot = take_snapshot(
        on_devices(Planner().plan(flat)), flat, memory=MemoryBudget(bound_bytes=1 << 20)
    )
    assert not snapshot.wait(0)
    writer = threading.Thread(target=commit, args=(snapshot, storage))
    writer.start()
    assert snapshot.wait(60)
    for array in tree.values():
        array.delete()
    writer.join()
    found = restore_checkpoint(HoldfastCheckpoint(storage))
    assert all((found[f"w{i}"] == i).all() for i in range(4))


def test_what_is_written_last_is_copied() -> None:
    """Packs are written side by side, four at a time: the later turn comes first, then the ends."""
    sizes = {pack: [10, 10, 10, 10] for pack in range(5)}
    assert first_copies(sizes, 200) == dict.fromkeys(sizes, 0)
    assert first_copies(sizes, 125) == {0: 2, 1: 2, 2: 2, 3: 2, 4: 0}
    assert first_copies(sizes, 25) == {0: 4, 1: 4, 2: 4, 3: 4, 4: 2}
    assert first_copies({0: [100], 1: []}, 99) == {0: 1, 1: 0}


def test_arrays_of_the_host_without_room_are_written_from_where_they_lie(tmp_path: Path) -> None:
    """`wait` ends when what was not copied is out; what the caller then writes is in no file."""
    tree: dict[str, Any] = {f"w{i}": np.full(1 << 18, i, np.float32) for i in range(8)}
    tree["last"] = jnp.arange(1 << 18)
    storage = LocalStorage(tmp_path)
    flat = FlatTree.of(tree)
    held = USE.held_bytes
    room = MemoryBudget(bound_bytes=held + (3 << 20))
    snapshot = take_snapshot(Planner().plan(flat), flat, memory=room)
    assert USE.held_bytes == held + (3 << 20)
    assert not snapshot.wait(0)
    writer = threading.Thread(target=commit, args=(snapshot, storage))
    writer.start()
    assert snapshot.wait(60)
    for i in range(8):
        tree[f"w{i}"][:] = -1
    writer.join()
    assert USE.held_bytes == held
    found = restore_checkpoint(HoldfastCheckpoint(storage))
    assert all((found[f"w{i}"] == i).all() for i in range(8))
    np.testing.assert_array_equal(found["last"], np.arange(1 << 18))


def test_copies_use_the_memory_of_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is used again when nothing looks into it any more, and not before: what a put that was
    given up still sends stays as it was.
    """
    monkeypatch.setattr(snapshots, "POOL", MemoryPool())
    wanted = np.arange(1 << 19, dtype=np.int64)
    flat = FlatTree.of({"w": wanted.copy()})
    plan = Planner().plan(flat)

    def copy() -> tuple[Snapshot, np.ndarray[Any, Any]]:
        snapshot = take_snapshot(plan, flat)
        (found,) = snapshot.packs[0]
        return snapshot, found

    first, found = copy()
    address = found.ctypes.data
    looked: Any = found.view(np.uint8)
    sent = np.frombuffer(memoryview(looked)[8:16], np.int64)
    del found, looked
    first.release()
    del first
    flat.leaves[0][:] = -1
    second, other = copy()
    assert other.ctypes.data != address and sent[0] == 1
    del sent
    third, found = copy()
    assert found.ctypes.data == address
    assert (found == -1).all() and (other == -1).all()
    second.release()
    third.release()


def test_a_save_that_fails_lets_arrays_go_that_were_not_copied(tmp_path: Path) -> None:
    """A store that refuses the first pack holds the caller no longer."""
    flat = FlatTree.of({"w": np.zeros(1 << 20)})
    snapshot = take_snapshot(Planner().plan(flat), flat, memory=MemoryBudget(bound_bytes=0))
    (tmp_path / "state").touch()
    with pytest.raises(OSError):
        write_snapshot(snapshot, ItemTarget(LocalStorage(tmp_path), "", "state", "ab12cd34"))
    assert snapshot.wait(0)


def _two_packs() -> tuple[dict[str, np.ndarray[Any, Any]], Snapshot]:
    """Returns a tree, and a snapshot of it in two packs that are not copied yet."""
    tree = {name: np.full(1 << 21, place, np.float32) for place, name in enumerate("ab")}
    flat = FlatTree.of(tree)
    plan = Planner().plan(flat)
    assert len(plan.own) == 2
    return tree, take_snapshot(plan, flat, copies_later=True)


def test_copies_are_made_later(tmp_path: Path) -> None:
    """The caller waits until the packs are copied, and a pack's writer for that pack; what the
    caller writes then is in no file.
    """
    tree, snapshot = _two_packs()
    assert not snapshot.wait(0)
    storage = LocalStorage(tmp_path)
    writer = threading.Thread(target=commit, args=(snapshot, storage))
    writer.start()
    begin_copies([snapshot])
    assert snapshot.wait(60)
    for array in tree.values():
        array[:] = -1
    writer.join()
    found = restore_checkpoint(HoldfastCheckpoint(storage))
    assert (found["a"] == 0).all() and (found["b"] == 1).all()


@pytest.mark.parametrize("layout", ["rows", "whole", "odd size", "transposed", "small"])
def test_a_large_chunk_is_summed_as_it_is_copied(
    monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """Its checksum and those of its prefixes are those of the bytes in the pack. What is small, or
    laid out otherwise, the writer sums.
    """
    monkeypatch.setattr(plans, "CHUNK_BYTES", 5 << 20)
    values = np.random.default_rng(1).integers(0, 1 << 30, (1 << 10, 600))
    odd = values.reshape(-1)[: (5 << 17) + 3]
    tree = {
        "rows": np.concatenate([values] * 4),  # divided into chunks
        "whole": values,
        "odd size": odd,
        "transposed": values.T,
        "small": values[:20],
    }
    flat = FlatTree.of({"w": tree[layout]})
    snapshot = take_snapshot(Planner().plan(flat), flat, copies_later=True)
    begin_copies([snapshot])
    found: list[ChunkChecksum] = []
    own: list[ChunkChecksum] = []
    for pack in snapshot.plan.own:
        planned = plan_pack(snapshot.plan, pack)
        shards = snapshot.take_pack(pack)
        known = snapshot.checksums_of(pack)
        assert len(known) == (0 if layout in ("transposed", "small") else len(shards))
        for checksums, sums in ((found, ChunkSums(known)), (own, ChunkSums())):
            list(pack_parts(planned, list(shards), sums))
            checksums.extend(sums.checksums)
    assert found == own and (len(own) > 1) == (layout == "rows")


def test_an_incremental_save_sums_what_it_writes() -> None:
    """It may link a chunk, which then would have been summed for nothing."""
    flat = FlatTree.of({"w": np.zeros(1 << 20)})
    unmoved = Unmoved()
    snapshot = take_snapshot(Planner().plan(flat), flat, copies_later=True, unmoved=unmoved)
    begin_copies([snapshot])
    (pack,) = snapshot.plan.own
    assert (snapshot.take_pack(pack)[0] == 0).all() and not snapshot.checksums_of(pack)


def test_copies_that_are_stopped_are_no_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """`stop_copies` waits for what is being copied; the rest is never copied, and its pack is
    refused.
    """
    tree, snapshot = _two_packs()
    first, second = snapshot.copies
    make = snapshots._PackCopy._make
    begun = threading.Event()
    goes_on = threading.Event()

    def held(copy: Any, chunk: Any) -> None:
        begun.set()
        assert goes_on.wait(60)
        make(copy, chunk)

    monkeypatch.setattr(snapshots._PackCopy, "_make", held)
    copier = threading.Thread(target=first.make)
    copier.start()
    assert begun.wait(60)
    stopper = threading.Thread(target=snapshot.stop_copies)
    stopper.start()
    assert second.ended.wait(60)
    goes_on.set()
    stopper.join()
    assert first.ended.is_set()
    tree["a"][:] = -1
    second.make()
    whole, refused = snapshot.plan.own
    assert (snapshot.take_pack(whole)[0] == 0).all()
    with pytest.raises(SaveCancelled, match="was interrupted before"):
        snapshot.take_pack(refused)
    copier.join()


def test_all_threads_copy_the_first_pack_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunks of one pack are copied side by side, and no other pack's before them: the first
    pack can leave early.
    """
    tree = {name: np.full(1 << 20, place, np.float32) for place, name in enumerate("abcd")}
    flat = FlatTree.of(tree)
    snapshot = take_snapshot(Planner().plan(flat), flat, copies_later=True)
    first, second = snapshot.copies
    assert first.chunks == second.chunks == 2
    make = snapshots._PackCopy._make
    both_begun = threading.Barrier(2)
    order: list[float] = []

    def together(copy: Any, chunk: Any) -> None:
        order.append(chunk.shard.shard[0])
        if len(order) <= 2:
            both_begun.wait(60)
        make(copy, chunk)

    monkeypatch.setattr(snapshots._PackCopy, "_make", together)
    monkeypatch.setattr(snapshots, "COPY_THREADS", 2)
    begin_copies([snapshot])
    assert snapshot.wait(60)
    own = snapshot.plan.own
    assert set(order[:2]) == {chunk.leaf for chunk in own[min(own)]}
    for pack, chunks in own.items():
        for chunk, copied in zip(chunks, snapshot.take_pack(pack), strict=True):
            assert (copied == chunk.leaf).all()


def test_a_snapshot_that_is_not_written_lets_go() -> None:
    """`release` ends every wait, and may be called twice."""
    tree = {"w": jnp.arange(8)}
    flat = FlatTree.of(tree)
    snapshot = take_snapshot(
        on_devices(Planner().plan(flat)), flat, memory=MemoryBudget(bound_bytes=0)
    )
    assert not snapshot.wait(0)
    snapshot.release()
    snapshot.release()
    assert snapshot.wait(0)


def test_shards_without_room_wait_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pool that ends in the middle: what fitted is on its way, the rest is copied when its turn
    comes, and every value is right.
    """
    tree = {f"w{i}": jnp.full(1000, i) for i in range(6)}
    real = jax.device_put
    room = [3]

    def device_put(value: Any, place: Any, **how: Any) -> Any:
        if isinstance(value, list) or not room[0]:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: the host allocator has no room")
        room[0] -= 1
        return real(value, place, **how)

    flat = FlatTree.of(tree)
    plan = Planner().plan(flat)
    monkeypatch.setattr(jax, "device_put", device_put)
    snapshot = take_snapshot(on_devices(plan), flat)
    assert not snapshot.wait(0)
    (pack,) = plan.own
    for chunk, shard in zip(plan.own[pack], snapshot.take_pack(pack), strict=True):
        assert (shard.get() == chunk.leaf).all()
    assert snapshot.wait(0) and room == [0]


def test_what_is_in_the_memory_of_the_copies_already_is_copied_too() -> None:
    """State that lives in `pinned_host` may be donated at once, as any other: jax.device_put gives
    back the very array that is there already.
    """
    (device,) = jax.devices()[:1]
    kind = host_memory_kind(device)
    assert kind is not None
    offloaded = jax.device_put(jnp.arange(1 << 16), SingleDeviceSharding(device, memory_kind=kind))
    flat = FlatTree.of({"mu": offloaded})
    plan = Planner().plan(flat)
    snapshot = take_snapshot(on_devices(plan), flat)
    assert snapshot.wait(0)
    offloaded.delete()
    (pack,) = plan.own
    (shard,) = snapshot.take_pack(pack)
    assert (shard.get() == np.arange(1 << 16)).all()


def test_other_errors_of_the_copy_come_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a pool without room is passed over."""
    tree = {"w": jnp.zeros(8)}
    flat = FlatTree.of(tree)
    plan = Planner().plan(flat)

    def device_put(value: Any, place: Any, **how: Any) -> Any:
        raise jax.errors.JaxRuntimeError("INTERNAL: the device is gone")

    monkeypatch.setattr(jax, "device_put", device_put)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        take_snapshot(on_devices(plan), flat)


class Device:
    """What is asked of a device: its platform and its memories."""

    def __init__(self, platform: str, *kinds: str) -> None:
        self.platform = platform
        self._kinds = kinds

    def addressable_memories(self) -> list[Any]:
        return [SimpleNamespace(kind=kind) for kind in self._kinds]

    def devices(self) -> set[Device]:
        return {self}


def test_where_devices_stage_their_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs in pinned memory, 0.8 of XLA's pool of it; TPUs in ordinary memory, where they have it;
    others nowhere.
    """
    assert host_memory_kind(Device("gpu", "device", "pinned_host")) == "pinned_host"
    assert (
        host_memory_kind(Device("tpu", "device", "pinned_host", "unpinned_host")) == "unpinned_host"
    )
    assert host_memory_kind(Device("tpu", "device", "pinned_host")) == "pinned_host"
    assert host_memory_kind(Device("METAL", "device")) is None
    gpu: Any = Device("gpu")
    monkeypatch.delenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", raising=False)
    assert default_host_limit_bytes([gpu]) == int(0.8 * (64 << 30))
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "10")
    assert default_host_limit_bytes([gpu]) == 8 << 30
    assert (
        default_host_limit_bytes([cast(Any, Device("tpu"))])
        == default_host_limit_bytes([])
        == UNLIMITED_BYTES
    )


_SIZE = 900


@jax.jit
def _compute(x: jax.Array) -> jax.Array:
    """Computes for a good part of a second."""
    for _ in range(8):
        x = x @ x * (1 / _SIZE)
    return x


@pytest.fixture(scope="module")
def start() -> jax.Array:
    x = jnp.ones((_SIZE, _SIZE))
    jax.block_until_ready(_compute(x))
    return x


def test_keys_are_waited_for_as_the_arrays_that_they_wrap() -> None:
    """An array of random keys is there once its numbers are: at a save, and while an earlier one is
    waited for.
    """
    waits = ArrayWaits()
    keys = jax.random.split(jax.random.key(0), 3)
    waits.wait(keys)
    waits.wait_meanwhile([keys], lambda seconds: False)
    with waits.dispatching([keys]):
        pass
    deleted = jax.random.key(1)
    deleted.delete()
    waits.wait_meanwhile([deleted], lambda seconds: False)


def test_what_is_there_takes_no_time(start: jax.Array) -> None:
    """Arrays that are computed, numbers, and arrays that were donated, which the snapshot finds."""
    waits = ArrayWaits()
    gone = jnp.zeros(3)
    gone.delete()
    for value in (start, 0.5, gone):
        waits.wait(value)
    waits.wait_late(start)
    waits.add_late(time.perf_counter())
    waits.wait_meanwhile([start, gone], lambda seconds: pytest.fail("nothing is waited for"))
    with waits.dispatching([start, 0.5]):
        _compute(start).block_until_ready()
    assert waits.seconds == 0.0


def test_a_computation_is_waited_for(start: jax.Array) -> None:
    """By whoever reads its array, by what is computed from it, and beside a wait that is over
    sooner or later.
    """
    began_s = time.perf_counter()
    waits = ArrayWaits()
    waits.wait(_compute(start))
    usual_s = waits.seconds
    assert 0 < usual_s <= time.perf_counter() - began_s
    later = ArrayWaits()
    with later.dispatching([_compute(start)]):
        _compute(start).block_until_ready()
    assert later.seconds > 0
    meanwhile = ArrayWaits()
    never = threading.Event()
    array = _compute(start)
    began_s = time.perf_counter()
    meanwhile.wait_meanwhile([array], never.wait)
    assert array.is_ready() and 0 < meanwhile.seconds <= time.perf_counter() - began_s
    over = threading.Event()
    over.set()
    array = _compute(start)
    sooner = ArrayWaits()
    sooner.wait_meanwhile([array], over.wait)
    assert sooner.seconds < usual_s


def test_what_another_thread_waited_for_counts(start: jax.Array) -> None:
    """Up to when the array was there, from when the caller began to wait."""
    waits = ArrayWaits()
    array = _compute(start)
    began_s = time.perf_counter()
    thread = threading.Thread(target=waits.wait_late, args=(array,))
    thread.start()
    thread.join()
    waits.add_late(began_s)
    assert 0 < waits.seconds <= time.perf_counter() - began_s
    waits.add_late(time.perf_counter())
    assert waits.seconds <= time.perf_counter() - began_s


def test_what_stays_on_its_device_is_waited_for_there(tmp_path: Path, start: jax.Array) -> None:
    """The writer waits for the array, and the caller for the writer: of that the computation's time
    counts.
    """
    waits = ArrayWaits()
    flat = FlatTree.of({"w": _compute(start)})
    snapshot = take_snapshot(
        on_devices(Planner().plan(flat)),
        flat,
        memory=MemoryBudget(bound_bytes=0),
        waits=waits,
    )
    began_s = time.perf_counter()
    writer = threading.Thread(target=commit, args=(snapshot, LocalStorage(tmp_path)))
    writer.start()
    assert snapshot.wait(60)
    waited_s = time.perf_counter() - began_s
    waits.add_late(began_s)
    writer.join()
    assert 0.5 * waited_s < waits.seconds <= waited_s


def test_an_array_of_two_leaves_is_waited_for_once() -> None:
    """Tied weights that stay on their device are the caller's again once they are written."""
    tied = jnp.ones(1 << 16)
    flat = FlatTree.of({"decoder": tied, "encoder": tied})
    plan = Planner().plan(flat)
    no_room = MemoryBudget(bound_bytes=0)
    snapshot = take_snapshot(on_devices(plan), flat, memory=no_room)
    shards = [shard for pack in plan.own for shard in snapshot.take_pack(pack)]
    assert not snapshot.wait(0)
    assert all((shard.get() == 1).all() for shard in shards)
    assert snapshot.wait(0)


def test_what_a_copy_has_summed_is_of_no_later_file(tmp_path: Path) -> None:
    """The checksums of a copy are by the places of all chunks of a pack. A later file of the pack
    has those chunks that have changed.
    """
    known = SaveHistory()
    for number in range(2):
        tree = FlatTree.of({"a": np.zeros(1 << 19, "f4"), "b": np.full(1 << 19, number, "f4")})
        snapshot = take_snapshot(Planner().plan(tree), tree, copies_later=True)
        begin_copies([snapshot])
        target = ItemTarget(LocalStorage(tmp_path), f"{number}", "state", "ab12cd34")
        write_snapshot(snapshot, target, history=known)
        known.end(committed=True)
    for path in (tmp_path / "1/state").iterdir():
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        sums = header.pop("__metadata__")["crc32c"]
        places = sorted(entry["data_offsets"] for entry in header.values())
        found = [data[start + at : start + end] for at, end in places]
        assert sums == "".join(f"{crc32c(chunk):08x}" for chunk in found)
