"""How a restore is divided into waves, and what it needs of the host's memory."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from holdfast.checkpoint import NotEnoughMemory, save
from holdfast.checkpoint.format.grid import Grid
from holdfast.checkpoint.format.record import ItemRecord, LeafRecord
from holdfast.checkpoint.layouts.holdfast import HoldfastCheckpoint
from holdfast.checkpoint.layouts.restore import restore_checkpoint
from holdfast.checkpoint.memory import budget
from holdfast.checkpoint.memory.budget import USE, WHOLE_BUDGET, FreeMemory, MemoryBudget
from holdfast.checkpoint.memory.levels import UNLIMITED_BYTES, MemoryLevel
from holdfast.checkpoint.memory.pool import POOL
from holdfast.checkpoint.restoring import waves
from holdfast.checkpoint.restoring.match import LeafRequest
from holdfast.checkpoint.restoring.restore import RestoreOptions
from holdfast.checkpoint.restoring.waves import (
    LEAST_BYTES,
    WAVE_BYTES,
    Placed,
    WaveRoom,
    divide_into_waves,
    wave_limit_bytes,
)
from holdfast.checkpoint.storage.local import LocalStorage

MIB = 1 << 20
LEVEL = MemoryLevel("this machine", 1 << 40, 1 << 40, 1 << 40)


@pytest.fixture(autouse=True)
def nothing_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What earlier tests have left of this process's own memory is not of the machines here."""
    monkeypatch.setattr(POOL, "reused_bytes", lambda: 0)


def leaf(path: str, shape: tuple[int, ...], chunk: tuple[int, ...]) -> LeafRecord:
    return LeafRecord(path, "array", "uint16", shape, grid=Grid(shape, chunk, chunk, 2))


def room_for(item: ItemRecord, *, stays: bool) -> WaveRoom:
    return WaveRoom(item, WHOLE_BUDGET, 0, stays=stays, held_for_others=0)


def test_waves_count_what_this_process_reads() -> None:
    """Of leaves that are divided over 4,096 processes, a wave has as many as one process's shares
    of them fill, not one alone.
    """
    shape = (4096, 1 << 19)  # 4 GiB
    array = leaf("w", shape, (1, 1 << 19))
    value = Placed.of(LeafRequest(LeafRecord("n", "int", value=3), "value"), None)
    share: Any = SimpleNamespace(num_elements=1 << 19)
    whole: Any = SimpleNamespace(num_elements=4096 << 19)
    divided = Placed.of(LeafRequest(array, "jax"), share)
    replicated = Placed.of(LeafRequest(array, "jax"), whole)
    divided_into = list(divide_into_waves([divided, value] * 1000, lambda: 1 << 30))
    assert [len(wave) for wave in divided_into] == [2000]
    divided_into = list(
        divide_into_waves([divided] * 1025 + [replicated, divided], lambda: 1 << 30)
    )
    assert [len(wave) for wave in divided_into] == [1024, 1, 1, 1]
    assert replicated.nbytes == array.nbytes == 4 << 30


def test_each_wave_asks_anew() -> None:
    """What is left may shrink while a restore runs."""
    limits = iter([4 * MIB, 2 * MIB, 0, 8 * MIB])
    array = leaf("w", (MIB // 2,), (MIB // 2,))
    divided_into = divide_into_waves(
        [Placed.of(LeafRequest(array, "numpy"), None)] * 9, lambda: next(limits)
    )
    assert [len(wave) for wave in divided_into] == [4, 2, 1, 2]


def test_a_cast_takes_its_copy_too() -> None:
    array = leaf("w", (MIB // 2,), (MIB // 2,))
    placed = Placed.of(LeafRequest(array, "numpy", np.dtype("float32")), None)
    assert (placed.nbytes, placed.value_bytes, placed.wave_bytes) == (MIB, 2 * MIB, 3 * MIB)
    other = Placed.of(LeafRequest(leaf("big", (MIB,), (MIB,)), "numpy"), None)
    item = ItemRecord("state", "tree", (), leaves=(placed.request.leaf, other.request.leaf))
    kept = room_for(item, stays=True).need_of([placed, other])
    assert (kept.nbytes, kept.leaf, kept.leaf_bytes) == (4 * MIB, "w", 2 * MIB)
    assert (kept.item, kept.item_bytes) == ("state", 3 * MIB)
    passing = room_for(item, stays=False).need_of([placed, other])
    assert (passing.nbytes, passing.leaf) == (3 * MIB, "w")


def test_two_waves_share_what_is_free() -> None:
    """While one is put the next is read: neither the budget nor WAVE_BYTES has room for more."""
    roomy = FreeMemory(UNLIMITED_BYTES, LEVEL)
    assert wave_limit_bytes(roomy, 0, stays=False) == WAVE_BYTES // 2
    tight = FreeMemory(1 << 30, LEVEL)
    assert wave_limit_bytes(tight, 0, stays=False) == 1 << 29
    assert wave_limit_bytes(FreeMemory(1 << 29, LEVEL), 1 << 29, stays=False) == 1 << 29
    # One chunk passes, whatever is left.
    assert wave_limit_bytes(FreeMemory(0, LEVEL), 0, stays=False) == LEAST_BYTES


def test_values_that_stay_are_one_wave_if_they_fit() -> None:
    assert wave_limit_bytes(FreeMemory(5 << 30, LEVEL), 0, stays=True) == 5 << 30
    assert wave_limit_bytes(FreeMemory(0, LEVEL), 0, stays=True) == LEAST_BYTES


def test_a_bound_of_the_caller_is_taken_as_it_is() -> None:
    """Also one below a chunk: a leaf that is larger comes alone."""
    assert wave_limit_bytes(FreeMemory(1000), 0, stays=False) == 500
    assert wave_limit_bytes(FreeMemory(500), 500, stays=False) == 500


# --- a restore whose memory runs out


class Shrinking:
    """A cgroup that has so many bytes left, one number for each look; the last one stays."""

    def __init__(self, *free: int) -> None:
        self._free = list(free)
        self.looks = 0

    def __call__(self) -> list[MemoryLevel]:
        left = self._free[min(self.looks, len(self._free) - 1)]
        self.looks += 1
        return [MemoryLevel("the cgroup /job", 8 * MIB, left, left, "/job")]


TREE = {f"w{i}": np.full(MIB, i, np.uint8) for i in range(6)}


def restored(tmp_path: Path, patch: pytest.MonkeyPatch, cgroup: Shrinking) -> Any:
    patch.setattr(waves, "LEAST_BYTES", MIB)
    patch.setattr(budget, "UNASKED_BYTES", 0)
    save(tmp_path / "step", TREE)
    storage = LocalStorage(tmp_path / "step")
    options = RestoreOptions(memory=MemoryBudget(look=cgroup))
    return restore_checkpoint(HoldfastCheckpoint(storage), options=options)


def test_a_tight_restore_comes_in_waves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every value is right, and the cgroup is looked at before each wave."""
    cgroup = Shrinking(7 * MIB, 2 * MIB)
    held_bytes = USE.held_bytes
    found = restored(tmp_path, monkeypatch, cgroup)
    assert all((found[f"w{i}"] == i).all() for i in range(6))
    assert cgroup.looks > 6
    assert USE.held_bytes == held_bytes


def test_a_cgroup_that_shrinks_ends_the_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is killed: the error names the leaf, what is left, and the least that would do."""
    cgroup = Shrinking(7 * MIB, 2 * MIB, 2 * MIB, MIB // 2)
    held_bytes = USE.held_bytes
    with pytest.raises(NotEnoughMemory) as caught:
        restored(tmp_path, monkeypatch, cgroup)
    assert re.fullmatch(
        r"this restore needs 1\.0 MiB for its values, 1\.0 MiB of them for 'w[1-5]'; 512\.0 KiB are"
        r" left in the cgroup /job; raise its limit of 8\.0 MiB by 512\.0 KiB, .*",
        caught.value.message,
    )
    assert USE.held_bytes == held_bytes


def test_what_cannot_fit_is_refused_before_a_byte_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        NotEnoughMemory, match=r"needs 6\.0 MiB for its values, .* 5\.0 MiB are left"
    ):
        restored(tmp_path, monkeypatch, Shrinking(5 * MIB))


def test_what_comes_back_as_numpy_stays_beside_devices_with_memory_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs room for all values, and not for one after the other: no device takes them."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.raises(NotEnoughMemory, match=r"needs 6\.0 MiB for its values"):
        restored(tmp_path, monkeypatch, Shrinking(5 * MIB))
