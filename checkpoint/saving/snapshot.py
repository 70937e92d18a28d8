"""Takes a copy of what a process owns of a tree.

What lies in the host's memory is copied before `save` returns: numpy arrays, and on CPU jax.Arrays
too. jax.device_put of a numpy array may take its memory as it is, and jax does not tell: what the
caller writes there later would be in the files, and not in their checksums. For a store behind a
network packs are copied while the first of them are on their way. Elsewhere all shards
are sent to the host's memory at once, ordered before whatever the caller does next, and `save` need
not wait for the bytes. What would take more of it than allowed, or than there is, or has none to go
to, stays on the device until it is written. So does what has no room in the host's memory for a
copy: it is written from where it lies, and `save` waits until it is out. Those chunks are the first
of their packs, so that the wait is short.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from holdfast.multihost.liveness.vitals import waiting_for_devices

from ..arrays.dtypes import HostArray
from ..errors import LeafFailed, SaveCancelled
from ..format.pack_header import LARGE_BYTES, ChunkChecksum, RunningChecksum
from ..format.tree import FlatTree, is_key, is_there, paused_gc
from ..memory.budget import USE, WHOLE_BUDGET, HeldBytes, MemoryBudget
from ..memory.levels import UNLIMITED_BYTES
from ..memory.pool import POOL
from ..storage.threads import Latch, do_beside, run_side_by_side
from .incremental import Unmoved, never_changes
from .item_files import PIECE_BYTES
from .plan import PACKS, Plan

# More than there are cores would only wait for each other at the interpreter.
COPY_THREADS = min(4, os.cpu_count() or 4)
LOOK_S = 0.005  # between two looks whether arrays are there, while something else is waited for
SMALL_BYTES = 64 << 10  # shards that are copied whole, at once
ShardViews: TypeAlias = Mapping[int, Sequence[Any]]  # by leaf and slot; of them numpy makes arrays
_PINNED = "pinned_host"
_PAGEABLE = "unpinned_host"
_POOL_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_POOL_GB = 64


class ArrayWaits:
    """Counts how long one save waits for arrays that the program's computations have yet to make.

    That is time of the steps: without the save the program would wait for it elsewhere. For the
    caller's thread, but for `wait_late`.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._late_s = 0.0  # when the last array was there that another thread waited for

    def wait(self, array: Any) -> None:
        """Blocks until an array is there, which is needed now; what is no array is there."""
        # One at a time, as they are needed: what is there is copied while others are computed.
        if not is_there(array):
            began_s = time.perf_counter()
            with waiting_for_devices():
                array.block_until_ready()
            self.seconds += time.perf_counter() - began_s

    def wait_meanwhile(self, arrays: Sequence[jax.Array], wait: Callable[[float], bool]) -> None:
        """Calls `wait(seconds)` until it says that the wait is over, or all arrays are there."""
        pending = list(arrays)
        began_s = seen_s = time.perf_counter()
        while pending:
            if is_there(pending[-1]):
                pending.pop()
                continue
            # What is not known counts as the save's own.
            seen_s = time.perf_counter()
            if wait(LOOK_S):
                break
        self.seconds += seen_s - began_s

    @contextlib.contextmanager
    def dispatching(self, arrays: Iterable[Any]) -> Iterator[None]:
        """Surrounds what is computed from arrays: a device that has much to do takes no more."""
        began_s = None if all(map(is_there, arrays)) else time.perf_counter()
        yield
        if began_s is not None:
            self.seconds += time.perf_counter() - began_s

    def wait_late(self, array: Any) -> None:
        """Blocks until an array is there, on another thread than the one that saves, and waits."""
        if not is_there(array):
            with waiting_for_devices():
                array.block_until_ready()
            self._late_s = time.perf_counter()

    def add_late(self, began_s: float) -> None:
        """Counts a wait that began at a time, and is over, for what other threads waited for."""
        self.seconds += max(0.0, self._late_s - began_s)


def blamed(named: Iterable[tuple[str, Any]], error: Exception) -> Exception:
    """Returns the failure of the first of some arrays whose computation failed, else the error."""
    arrays = [(name, array) for name, array in named if isinstance(array, jax.Array)]
    # Those that are computed still are waited for last.
    for name, array in sorted(arrays, key=lambda pair: not is_there(pair[1])):
        known: Any = array
        if known.is_deleted():
            continue
        try:
            array.block_until_ready()
        except jax.errors.JaxRuntimeError as own:
            return LeafFailed(name, own)
    return error


class Shard:
    """A shard on a device, or on its way to the host, for all packs that have chunks of it."""

    def __init__(self, array: jax.Array, path: str) -> None:
        self.array: Any = array  # None: it is on the host
        self._path = path
        self._waits: ArrayWaits | None = None
        self._host: HostArray | None = None
        self._moved: Callable[[], None] | None = None
        self._lock = threading.Lock()

    def send(self, copy: jax.Array) -> None:
        """Takes a copy that is on its way to the host, and lets go of the array."""
        self.array = copy

    def keep(self, moved: Callable[[], None], waits: ArrayWaits) -> None:
        """Keeps the array until `get`, which calls `moved` then."""
        self._moved = moved
        self._waits = waits

    def get(self) -> HostArray:
        """Returns the shard on the host; blocks. Safe for several threads."""
        with self._lock:
            if self._host is None:
                try:
                    if self._waits is not None:
                        self._waits.wait_late(self.array)
                    # The one setting that a copy heeds: all of them cost more than a small copy.
                    with jax.transfer_guard_device_to_host("allow"):
                        self._host = np.asarray(self.array)
                except jax.errors.JaxRuntimeError as error:
                    raise LeafFailed(self._path, error) from error
                self.array = None
                if self._moved is not None:
                    self._moved()
            return self._host


class Snapshot:
    """This process's share of a tree, held until it is written."""

    def __init__(
        self,
        plan: Plan,
        unmoved: Unmoved | None = None,
        waits: ArrayWaits | None = None,
        views: ShardViews | None = None,
    ) -> None:
        self.plan = plan
        self._views = views or {}
        self._waits = waits or ArrayWaits()
        self.unmoved = unmoved or Unmoved()
        # An incremental save may link a chunk, which then needs no new checksum.
        self._sums_copies = unmoved is None
        self.local: list[HostArray] = []  # host-local leaves that another rank writes
        self.values: list[Any] = []  # the Python values, in leaf order
        self.packs: dict[int, list[Any]] = {}
        self._copies: dict[int, _PackCopy] = {}  # those that are made later
        self._in_place: dict[int, int] = {}  # of packs with chunks that are not copied: how many
        self._held = HeldBytes(USE)
        self._in_use = 0  # shards and packs that still need the caller's arrays
        self._lock = threading.Lock()
        self._moved: Latch | None = None  # None: nothing is waited for

    def take_pack(self, pack: int) -> list[Any]:
        """Hands over the shards of a pack's chunks, in their order.

        They are numpy arrays, Shards, or None for what has not moved. Blocks until they are copied.
        Raises SaveCancelled where `stop_copies` came first.
        """
        if pack in self._copies:
            self._copies[pack].wait()
        return self.packs.pop(pack)

    def checksums_of(self, pack: int) -> Mapping[int, ChunkChecksum]:
        """Returns the checksums of a pack's chunks that are known from its copy, by their places.

        The pack has been taken.
        """
        return self._copies[pack].checksums if pack in self._copies else {}

    def wait(self, timeout_s: float | None = None) -> bool:
        """Blocks until the caller may donate or overwrite its arrays.

        That is at once unless copies are made later, or the host memory bound was below the bytes
        owned.

        The save must be running meanwhile: it begins the copies, and `write_snapshot` frees the
        memory that the rest needs.
        """
        moved = self._moved
        return moved is None or moved.wait(timeout_s)

    def release(self) -> None:
        """Drops whatever is still held; may be called twice."""
        for copy in self._copies.values():
            copy.call_off()
        self.packs.clear()
        self.local.clear()
        with self._lock:
            self._in_place.clear()
            self._held.drop(self._held.nbytes)
            self._let_go()

    def stop_copies(self) -> None:
        """Makes no more copies, and waits for those that are being made: the caller's arrays are
        then its own. Without its copy no pack is written.
        """
        for copy in self._copies.values():
            copy.call_off()
        for copy in self._copies.values():
            copy.ended.wait()

    def count_in_place(self, pack: int) -> int:
        """Returns how many of a pack's first chunks are written from where they lie; among them may
        be some that are not.
        """
        return self._in_place.get(pack, 0)

    def written_in_place(self, pack: int) -> None:
        """Notes that these are out. May be called again."""
        with self._lock:
            was_awaited = self._in_place.pop(pack, 0)
        if was_awaited:
            self._one_done()

    def hold(self, nbytes: int) -> None:
        """Counts what the snapshot holds of the host's memory until it is released."""
        self._held.add(nbytes)

    def take_shards(
        self,
        leaves: Sequence[Any],
        *,
        on_host: bool,
        copies_later: bool,
        memory: MemoryBudget,
    ) -> list[Any]:
        """Takes the shards of all packs; returns each once.

        Of what is on the host the chunks of this process are copied, now or later, as far as there
        is room.
        """
        shards: dict[tuple[int, int], Any] = {}
        copies = {}
        for pack, chunks in self.plan.own.items():
            taken: list[Any] = []
            to_copy = []
            for place, chunk in enumerate(chunks):
                if (pack, place) in self.unmoved.chunks:
                    taken.append(None)
                    continue
                key = chunk.leaf, chunk.slot
                if key not in shards:
                    shards[key] = self._find(leaves[chunk.leaf], *key, on_host)
                shard = shards[key]
                if isinstance(shard, _HostShard):
                    to_copy.append(_ChunkCopy(shard, chunk.inside, place, chunk.nbytes))
                    shard = shard.copy
                taken.append(shard)
            self.packs[pack] = taken
            copies[pack] = to_copy
        self._keep_in_place(copies, memory)
        if copies_later:
            self._plan_copies(copies)
        else:
            run_side_by_side(_copy_chunks, list(copies.values()), COPY_THREADS)
        return list(shards.values())

    def _keep_in_place(self, copies: dict[int, list[_ChunkCopy]], memory: MemoryBudget) -> None:
        """Takes those chunks out of the copies that are to be written from where they lie."""
        sizes = {pack: [copy.nbytes for copy in of_pack] for pack, of_pack in copies.items()}
        wanted = sum(map(sum, sizes.values()))
        limit = _room_bytes(memory, wanted) if wanted else 0
        if wanted > limit:
            for pack, first in first_copies(sizes, limit).items():
                for copy in copies[pack][:first]:
                    self.packs[pack][copy.place] = copy.shard.shard
                    self._in_place[pack] = copy.place + 1
                copies[pack] = copies[pack][first:]
        self.hold(sum(copy.nbytes for of_pack in copies.values() for copy in of_pack))
        self._expect(len(self._in_place))

    def _plan_copies(self, chunks: Mapping[int, Sequence[_ChunkCopy]]) -> None:
        self._copies = {
            pack: _PackCopy(of_pack, self._one_done, sums=self._sums_copies)
            for pack, of_pack in chunks.items()
            if of_pack
        }
        self._expect(len(self._copies))

    @property
    def copies(self) -> Iterable[_PackCopy]:
        """The copies that are made later, in the order of their packs."""
        return self._copies.values()

    def take_host_leaves(self, leaves: Sequence[Any]) -> None:
        """Takes the Python values, and copies the host-local arrays that another rank writes."""
        plan = self.plan
        if plan.process != 0:
            self.local = [
                np.array(self._host_view(leaves[index]), order="C") for index in plan.local_leaves
            ]
        self.values = [
            leaf for leaf, described in zip(leaves, plan.leaves, strict=True) if described.is_value
        ]

    def keep_on_device(self, shard: Shard) -> None:
        """Has `wait` wait for a shard: the writer copies it when its turn comes."""
        self._expect(1)
        shard.keep(self._one_done, self._waits)

    def _find(self, leaf: Any, index: int, slot: int, on_host: bool) -> Any:
        """Returns a shard: a copy of it, one that is to be copied, or one on its device."""
        described = self.plan.leaves[index]
        if slot < 0:
            return self._find_whole(leaf, per_process=described.per_process)
        views = self._views.get(index)
        if on_host and views is not None:
            return _copied_on_host(np.asarray(views[slot]))
        if described.kind == "key":
            leaf = jax.random.key_data(leaf)
        shard = leaf.addressable_data(slot)
        if on_host:
            return _copied_on_host(self._host_view(shard))
        return Shard(shard, described.path)

    def _find_whole(self, leaf: Any, *, per_process: bool) -> Any:
        array = self._host_view(leaf)
        if per_process:
            array = array[None]
        return array if never_changes(leaf) else _copied_on_host(array)

    def _host_view(self, leaf: Any) -> HostArray:
        if isinstance(leaf, jax.Array) and is_key(leaf):
            leaf = jax.random.key_data(leaf)
        self._waits.wait(leaf)
        return np.asarray(leaf)

    def _expect(self, count: int) -> None:
        """Has `wait` wait for so many shards and packs more, each until it is `_one_done`."""
        if count:
            self._in_use += count
            self._moved = self._moved or Latch()

    def _one_done(self) -> None:
        with self._lock:
            self._in_use -= 1
            if not self._in_use:
                self._let_go()

    def _let_go(self) -> None:
        moved = self._moved
        self._moved = None
        if moved is not None:
            moved.set()


def take_snapshot(
    plan: Plan,
    tree: FlatTree,
    *,
    memory: MemoryBudget = WHOLE_BUDGET,
    unmoved: Unmoved | None = None,
    waits: ArrayWaits | None = None,
    copies_later: bool = False,
    views: ShardViews | None = None,
) -> Snapshot:
    """Starts copying this process's chunks of `tree` to the host and returns.

    What is on the host already, numpy leaves and arrays of the CPU, has been copied by then. With
    `copies_later` that begins with `begin_copies`, and `Snapshot.wait` waits for it.
    `tree` must be the one that `plan` was made of, or one with equal avals and shardings. What has
    no room in `memory` stays where it is until it is written. Chunks that are `unmoved` are not
    taken. `waits` counts the time until arrays are there that computations have yet to make.
    `views` are shards that the caller has looked at already.
    """
    leaves = tree.leaves
    snapshot = Snapshot(plan, unmoved, waits, views)
    with paused_gc():
        on_host = _are_on_host(plan, leaves)
        shards = snapshot.take_shards(
            leaves, on_host=on_host, copies_later=copies_later, memory=memory
        )
        if not on_host:
            on_devices = [shard for shard in shards if isinstance(shard, Shard)]
            _send(snapshot, on_devices, memory)
        snapshot.take_host_leaves(leaves)
    return snapshot


def _room_bytes(memory: MemoryBudget, wanted_bytes: int) -> int:
    """Returns how much of the host's memory copies may take."""
    free = memory.free_for(wanted_bytes)
    # Pages of the files that are written take memory too.
    return free.nbytes if free.level is None else free.nbytes // 2


def begin_copies(snapshots: Iterable[Snapshot]) -> None:
    """Begins the copies that snapshots were taken without, on threads that end with them."""
    copies = [copy for snapshot in snapshots for copy in snapshot.copies]

    def serve() -> None:
        # All threads copy the first pack, then the next: it is soon whole, and on its way.
        for copy in copies:
            copy.make()

    for _ in range(min(COPY_THREADS, sum(copy.chunks for copy in copies))):
        do_beside(serve)


def _are_on_host(plan: Plan, leaves: Sequence[Any]) -> bool:
    """Says whether all arrays lie in the host's memory; the same for all trees of one plan."""

    def look() -> bool:
        shardings = {leaf.sharding for leaf in leaves if isinstance(leaf, jax.Array)}
        devices: set[Any] = {device for each in shardings for device in each.device_set}
        return all(device.platform == "cpu" for device in devices)

    return plan.once("on host", look)


class _HostShard:
    """A shard in the host's memory, and memory for a copy of it, which is not filled yet.

    Memory that nothing is copied to is not taken from the system. That of an earlier copy is used
    again once nothing refers to it, neither a snapshot nor a write of it that was given up.
    """

    def __init__(self, shard: HostArray) -> None:
        self.shard = shard
        self.copy = POOL.take(shard.nbytes).view(shard.dtype).reshape(shard.shape)


class _ChunkCopy(NamedTuple):
    """The part of a shard that is to be copied (None: all), for a chunk at its place in a pack."""

    shard: _HostShard
    inside: tuple[slice, ...] | None
    place: int
    nbytes: int

    def make(self, *, sums: bool = False) -> ChunkChecksum | None:
        """Copies the chunk; with `sums` returns its checksum, if it is large and not laid out
        otherwise.
        """
        part: Any = ... if self.inside is None else self.inside
        copy = self.shard.copy[part]
        original = self.shard.shard[part]
        is_flat = copy.flags.c_contiguous and original.flags.c_contiguous
        if not sums or self.nbytes < LARGE_BYTES or not is_flat:
            _copy(copy, original)
            return None
        return _copy_summed(copy.reshape(-1).view(np.uint8), original.reshape(-1).view(np.uint8))


class _PackCopy:
    """The copy of a pack's chunks, each made once at most. Thread-safe.

    With `sums` it has the checksums of those that are large, by their places, once it has ended.
    """

    def __init__(
        self, chunks: Sequence[_ChunkCopy], done: Callable[[], None], *, sums: bool = False
    ) -> None:
        self.chunks = len(chunks)
        self.checksums: dict[int, ChunkChecksum] = {}
        self._sums = sums
        # Who takes a chunk decides: it is never given back, so that an interrupt leaves nobody
        # waiting.
        self._todo = collections.deque(chunks)
        self._count_ended = itertools.count(1).__next__  # one operation, which no thread breaks
        self._done = done
        self._error: BaseException | None = None
        self.ended = Latch()

    def make(self) -> None:
        """Copies chunks until none is left, side by side with other threads that do the same."""
        with contextlib.suppress(IndexError):  # none is left
            while True:
                self._make(self._todo.popleft())

    def _make(self, chunk: _ChunkCopy) -> None:
        try:
            checksum = chunk.make(sums=self._sums)
            if checksum is not None:
                self.checksums[chunk.place] = checksum
        except BaseException as error:
            self._error = error
        if self._count_ended() == self.chunks:
            self.ended.set()
            self._done()

    def call_off(self) -> None:
        """Has those chunks never copied whose copy has not begun: the pack is then refused."""
        with contextlib.suppress(IndexError):  # none is left
            while True:
                self._todo.popleft()
                self._error = SaveCancelled(
                    "the save was interrupted before it had copied its arrays"
                )
                if self._count_ended() == self.chunks:
                    self.ended.set()

    def wait(self) -> None:
        """Blocks until the chunks are copied. Raises why they are not."""
        self.ended.wait()
        if self._error is not None:
            raise self._error


def first_copies(sizes: Mapping[int, Sequence[int]], limit_bytes: int) -> dict[int, int]:
    """Returns by pack from which of its chunks on there is room for copies: pure.

    `sizes` are the chunks' bytes. Packs are written side by side, a few at a time, and each from
    its begin: the last chunks that are written are copied.
    """
    late_first = []
    for turn, (pack, of_pack) in enumerate(sizes.items()):
        whole = max(1, sum(of_pack))
        before = 0
        for place, nbytes in enumerate(of_pack):
            late_first.append((turn // PACKS, before / whole, place, pack, nbytes))
            before += nbytes
    first = {pack: len(of_pack) for pack, of_pack in sizes.items()}
    for *_, place, pack, nbytes in sorted(late_first, reverse=True):
        limit_bytes -= nbytes
        if limit_bytes < 0:
            break
        first[pack] = place
    return first


def _copy_chunks(chunks: Sequence[_ChunkCopy]) -> None:
    for chunk in chunks:
        chunk.make()


def _copy(copy: HostArray, original: HostArray) -> None:
    copy[...] = original


def _copy_summed(copy: HostArray, original: HostArray) -> ChunkChecksum:
    """Copies bytes; each piece is summed while it is in the cache."""
    summed = RunningChecksum()
    for start in range(0, copy.nbytes, PIECE_BYTES):
        piece: Any = copy[start : start + PIECE_BYTES]
        _copy(piece, original[start : start + PIECE_BYTES])
        summed.add(memoryview(piece))
    return summed.result()


def _copied_on_host(array: HostArray) -> Any:
    """Returns a copy of a small shard, or a larger one whose chunks are to be copied."""
    return np.array(array, order="C") if array.nbytes <= SMALL_BYTES else _HostShard(array)


def _send(snapshot: Snapshot, shards: Sequence[Shard], memory: MemoryBudget) -> None:
    """Starts the copies that have room, all together; all other shards stay until they are
    written.
    """
    room = _pool_room_bytes(memory, [shard.array for shard in shards])
    sent = []
    places = []
    for shard in shards:
        (device,) = shard.array.devices()
        kind = host_memory_kind(device)
        if kind is None or shard.array.nbytes > room:
            snapshot.keep_on_device(shard)
            continue
        room -= shard.array.nbytes
        sent.append(shard)
        places.append(SingleDeviceSharding(device, memory_kind=kind))
    copies = _copied([shard.array for shard in sent], places)
    snapshot.hold(sum(copy.nbytes for copy in copies))
    for shard, copy in zip(sent, copies, strict=False):
        shard.send(copy)
    for shard in sent[len(copies) :]:
        snapshot.keep_on_device(shard)


def _pool_room_bytes(memory: MemoryBudget, arrays: Sequence[jax.Array]) -> int:
    """Returns how much of the host's memory copies of arrays on devices may take."""
    room = _room_bytes(memory, sum(array.nbytes for array in arrays))
    return room if memory.bound_bytes is not None else min(room, default_host_limit_bytes(arrays))


def _copied(arrays: Sequence[jax.Array], places: Sequence[SingleDeviceSharding]) -> list[jax.Array]:
    """Starts the copies, or as many of the first ones as the host's pool has room for."""
    # An array that is in such memory already would come back as it is, and go with its donation.
    put = partial(jax.device_put, may_alias=False)
    with _while_there_is_room():
        return list(put(arrays, places))
    copies = []
    with _while_there_is_room():
        for array, place in zip(arrays, places, strict=True):
            copies.append(put(array, place))
    return copies


@contextlib.contextmanager
def _while_there_is_room() -> Iterator[None]:
    """Ends its block where the host's pool has no room for a copy."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise


def host_memory_kind(device: Any) -> str | None:
    """Returns where a device's arrays are staged; None: the device has no such memory.

    The choice for TPUs was not tested on one.
    """
    kinds = {memory.kind for memory in device.addressable_memories()}
    # A TPU's pool of pinned memory never shrinks: there ordinary memory comes first.
    wanted = (_PAGEABLE, _PINNED) if device.platform == "tpu" else (_PINNED,)
    return next((kind for kind in wanted if kind in kinds), None)


def default_host_limit_bytes(arrays: Sequence[jax.Array]) -> int:
    """Returns what a snapshot may hold on the host unless told: on GPUs 0.8 of XLA's pinned pool.

    Beyond the pool copies fail. It has as many GiB as XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB says, 64
    unless it is set (XLA's GPU client).
    """
    if not any(device.platform == "gpu" for array in arrays[:1] for device in array.devices()):
        return UNLIMITED_BYTES
    return int(0.8 * float(os.environ.get(_POOL_VARIABLE) or _POOL_GB) * (1 << 30))
