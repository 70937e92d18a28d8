"""Reads whose connection stands still are asked again, and the first answer counts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest

from holdfast.checkpoint import CheckpointManager, Options
from holdfast.checkpoint.format.limits import RECORD_LIMIT_BYTES
from holdfast.checkpoint.storage import hedged_reads
from holdfast.checkpoint.storage import hedges as hedges_module
from holdfast.checkpoint.storage.bucket import BucketStorage
from holdfast.checkpoint.storage.hedged_reads import READ_BYTES, SPARE_BYTES, HedgedReads
from holdfast.checkpoint.storage.hedges import SHARE, Hedges
from holdfast.checkpoint.storage.threads import ByteBudget
from tests.checkpoint.storage.test_retries import Clock
from tests.support.object_servers import BUCKET, rclone_server, s3_server
from tests.support.proxy import SlowProxy, address_of, through

MIB = 1 << 20
BUSY = RuntimeError("Server returned non-2xx status code: 503 Slow Down")


def room_of_a_store() -> ByteBudget:
    return ByteBudget(READ_BYTES, SPARE_BYTES)


class _Tries:
    """The tries of one read, in order: each ends with bytes or an error, or never."""

    def __init__(self, clock: Clock, *ends: bytes | Exception | None) -> None:
        self._clock = clock
        self._ends = iter(ends)
        self.cancelled = 0
        self.begun = 0

    def make(self) -> Awaitable[bytes]:
        return self._try(next(self._ends))

    async def _try(self, end: bytes | Exception | None) -> bytes:
        self.begun += 1
        if isinstance(end, Exception):
            raise end
        if end is not None:
            return end
        self._clock.now += 100.0  # so long does everybody see nothing of it
        try:
            return await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


def _read(tries: _Tries, hedges: Hedges, room: ByteBudget) -> bytes:
    async def read() -> bytes:
        data: bytes = await HedgedReads(hedges, room).read(tries.make, 10)
        await asyncio.sleep(0)  # so that cancelled tries notice it
        return data

    return asyncio.run(read())


def test_the_second_try_wins_and_the_first_is_cancelled() -> None:
    """Nobody waits for the loser, and its bytes are given back."""
    clock = Clock()
    hedges = Hedges(clock.read)
    room = ByteBudget(20, 10)
    tries = _Tries(clock, None, b"second")
    with room.taken(10):
        assert _read(tries, hedges, room) == b"second"
        assert room.try_take(room, 10)
    assert (tries.begun, tries.cancelled) == (2, 1)
    assert (hedges.reads, hedges.hedged_reads) == (1, 1)


def test_a_try_that_fails_is_out_while_another_is_on_its_way() -> None:
    """The error of the last one counts; one that says "busy" lets none be asked again."""
    clock = Clock()
    hedges = Hedges(clock.read)
    with pytest.raises(RuntimeError, match="503"):
        _read(_Tries(clock, BUSY), hedges, room_of_a_store())
    assert not hedges.may_hedge()

    hedges = Hedges(clock.read)
    tries = _Tries(clock, None, BUSY, b"not asked for")
    with pytest.raises(TimeoutError):
        asyncio.run(
            asyncio.wait_for(HedgedReads(hedges, room_of_a_store()).read(tries.make, 10), 1.0)
        )
    assert (tries.begun, tries.cancelled) == (2, 1)


def test_without_room_there_is_no_second_try() -> None:
    """Its buffer would go beyond the bound."""
    clock = Clock()
    tries = _Tries(clock, None)
    room = ByteBudget(15, 5)
    with room.taken(10), pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(HedgedReads(Hedges(clock.read), room).read(tries.make, 10), 1))
    assert (tries.begun, tries.cancelled) == (1, 1)


def test_a_connection_that_stands_still_costs_little() -> None:
    """A read whose connection stalls for longer than the test may last has its bytes by another."""
    with s3_server() as query, SlowProxy(address_of(query), stall_s=1000.0) as proxy:
        storage = BucketStorage(f"s3://{BUCKET}/hedged{through(proxy, query)}")
        storage.put("a", b"some bytes")
        for _ in range(4):
            assert storage._range("a", 0, 4) == b"some"
        stalling = proxy.connections + 1
        proxy.stalls = stalling.__eq__
        proxy.cut()
        assert storage._range("a", 5, 10) == b"bytes"
        assert proxy.stalled == 1
        assert storage.statistics() == {"store_reads": 5, "store_hedged_reads": 1}


def test_a_small_file_whose_connection_stands_still_is_asked_for_again() -> None:
    """Such as a record: it is asked for by its limit, which is more than all tries may have."""
    with s3_server() as query, SlowProxy(address_of(query), stall_s=1000.0) as proxy:
        storage = BucketStorage(f"s3://{BUCKET}/hedged{through(proxy, query)}")
        storage.put("a", b"some bytes")
        assert storage.fetch("a", RECORD_LIMIT_BYTES) == b"some bytes"
        stalling = proxy.connections + 1
        proxy.stalls = stalling.__eq__
        proxy.cut()
        began = time.monotonic()
        assert storage.fetch("a", RECORD_LIMIT_BYTES) == b"some bytes"
        assert proxy.stalled == 1
        assert time.monotonic() - began < 30


@pytest.mark.parametrize("count", [4, 16])
def test_connections_that_all_stand_still_are_asked_again(count: int) -> None:
    """Above the share of second tries too: nothing is answered, so that no store is overloaded."""
    with s3_server() as query, SlowProxy(address_of(query), stall_s=1000.0) as proxy:
        storage = BucketStorage(f"s3://{BUCKET}/hedged{through(proxy, query)}")
        storage.put("a", b"some bytes")
        for _ in range(4):
            assert storage._range("a", 0, 4) == b"some"
        first = proxy.connections
        proxy.stalls = lambda number: first < number <= first + count
        proxy.cut()
        began = time.monotonic()
        with ThreadPoolExecutor(count) as pool:
            found = pool.map(lambda _: bytes(storage._range("a", 5, 10)), range(count))
            assert set(found) == {b"bytes"}
        assert proxy.stalled == count
        assert time.monotonic() - began < 10
        assert storage.statistics()["store_hedged_reads"] >= count


def test_a_slow_network_is_not_asked_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """All reads take long, and nothing is answered meanwhile: one of them is asked again to find
    that out, not all.
    """
    monkeypatch.setattr(hedged_reads, "LOOK_S", 0.02)
    monkeypatch.setattr(hedges_module, "UNKNOWN_S", 0.3)
    begun = []

    async def answer() -> bytes:
        begun.append(1)
        await asyncio.sleep(1.0)
        return b"0123456789"

    async def read_all() -> list[bytes]:
        reads = HedgedReads(Hedges(), room_of_a_store())
        return await asyncio.gather(*(reads.read(answer, 10) for _ in range(32)))

    assert len(asyncio.run(read_all())) == 32
    assert 33 <= len(begun) <= 32 + 2 + SHARE * 32


def test_silence_is_asked_ever_more_rarely() -> None:
    """A store that is gone is not drowned in tries."""
    clock = Clock()
    hedges = Hedges(clock.read)
    probes = 0
    for _ in range(400):
        clock.now += 1.0
        if hedges.may_probe(10, 0.0):
            hedges.note_probe()
            probes += 1
    assert probes == 4  # after 5, 20, 80 and 320 s


LEAVES = 640
DELAY_S = 0.5
STALL_S = 30.0


def _restore_s(root: str) -> tuple[float, dict[str, int]]:
    """Returns how long a restore took, each of whose reads is one leaf, and what it counted."""
    like = {
        f"{number:04}": jax.ShapeDtypeStruct((25_000,), np.float32)
        for number in range(0, LEAVES, 2)
    }
    with CheckpointManager(root, options=Options(read_only=True)) as manager:
        began = time.monotonic()
        tree = manager.restore(like=like, partial=lambda path: True)
        took_s = time.monotonic() - began
        for name, array in tree.items():
            assert array[0] == int(name)
        return took_s, manager.statistics()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_restore_over_connections_that_stall(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One connection in twenty stands still for 30 s: a restore of 10 s takes at most 1.3 of it,
    and without second tries 30 s more.
    """
    with (
        rclone_server(tmp_path) as query,
        SlowProxy(address_of(query), delay_s=DELAY_S, stall_s=STALL_S, stall_at=12) as proxy,
    ):
        root = f"s3://{BUCKET}/stalls"
        with CheckpointManager(f"{root}{query}", options=Options(single_writer=True)) as manager:
            tree = {f"{number:04}": np.full(25_000, number, np.float32) for number in range(LEAVES)}
            manager.save(1, tree).wait()
        root += through(proxy, query)
        calm_s, _ = _restore_s(root)
        assert calm_s >= 10
        first = proxy.connections
        proxy.stalls = lambda number: (number - first) % 20 == 5
        proxy.cut()
        stalled_s, counted = _restore_s(root)
        print(f"calm {calm_s:.1f} s, {proxy.stalled} stalled {stalled_s:.1f} s, {counted}")
        assert stalled_s <= 1.3 * calm_s
        assert 1 <= counted["store_hedged_reads"] <= SHARE * counted["store_reads"] + 1
        monkeypatch.setattr(HedgedReads, "read", lambda self, make, nbytes: make())
        # More of them: the later one gets so far, the longer is what it takes.
        proxy.stalls = lambda number: number % 3 == 0
        first = proxy.connections
        proxy.cut()
        unhedged_s, _ = _restore_s(root)
        print(f"unhedged {unhedged_s:.1f} s, {proxy.connections - first} connections")
        assert unhedged_s >= calm_s + 0.8 * STALL_S
