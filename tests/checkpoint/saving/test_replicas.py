"""Which replicas a process sums, and that a sum sees each bit of each dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from holdfast.checkpoint.agreement.replica_sums import SharedShard
from holdfast.checkpoint.arrays.dtypes import can_store
from holdfast.checkpoint.saving.plan import Leaf, ShardPlacement, make_plan
from holdfast.checkpoint.saving.replicas import (
    LARGE_BYTES,
    TURNS,
    ReplicatedLeaves,
    _bit_sum,
    plan_replicas,
    sum_of_words,
    sums_of_words,
    turn_of,
)
from tests.support.checkpointing import run_together
from tests.support.paths import program

DTYPES = [
    *("bool", "int2", "uint4", "int4", "int8", "uint16", "int32", "float16", "float32"),
    *("bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64"),
]


def placement(*ranks: list[int]) -> ShardPlacement:
    held = np.array(ranks)
    slots = np.where(held == 0, 0, -1)
    return ShardPlacement((len(ranks),), held, slots)


def test_sets_have_the_same_numbers_everywhere() -> None:
    """Of each set of ranks all members have the same shards, in one order, by one number."""
    halves = placement([0, 2], [1, 3])
    everywhere = placement([0, 1, 2, 3])
    alone = placement([0], [1], [2], [3])
    leaves = [
        Leaf("h", "array", "float32", (4,), 4, placement=halves),
        Leaf("n", "numpy", "float32", (4,), 4),
        Leaf("x", "array", "float32", (4,), 4, placement=alone),
        Leaf("e", "array", "float32", (4,), 4, placement=everywhere),
        Leaf("empty", "array", "float32", (0,), 4, placement=everywhere),
        Leaf("h2", "array", "int8", (4,), 1, placement=halves),
    ]
    plan = make_plan(None, leaves, 0, 4)
    leaves_at = ReplicatedLeaves.of(plan)
    assert leaves_at.at(None) == leaves_at.at(7) == (0, 3, 5)
    of_ranks = [plan_replicas(plan, rank, leaves_at.at(0)) for rank in range(4)]
    even = {0: (SharedShard(0, 0), SharedShard(5, 0)), 2: (SharedShard(3, 0),)}
    odd = {1: (SharedShard(0, 1), SharedShard(5, 1)), 2: (SharedShard(3, 0),)}
    assert [each.sets for each in of_ranks] == [even, odd, even, odd]
    assert plan_replicas(plan, 0, (0,)).sets == {0: (SharedShard(0, 0),)}


@pytest.mark.parametrize("nbytes", [1 << 10, 3 << 19])
def test_each_leaf_has_its_turn(nbytes: int) -> None:
    """Of many small leaves each turn compares a sixteenth, all ranks the same, and each leaf has
    one turn; of large ones each turn sums a part, and all of them sum each word once.
    """
    everywhere = placement([0, 1, 2, 3])
    halves = placement([0, 2], [1, 3])
    alone = placement([0], [1], [2], [3])
    leaves = [
        Leaf(f"{at}", "array", "float32", (nbytes // 4,), 4, placement=(everywhere, alone)[at % 2])
        for at in range(400)
    ]
    leaves.append(Leaf("h", "array", "float32", (nbytes // 4,), 4, placement=halves))
    replicated = ReplicatedLeaves.of(make_plan(None, leaves, 0, 4))
    assert replicated == ReplicatedLeaves.of(make_plan(None, leaves, 3, 4))
    turns = [replicated.at(turn) for turn in range(TURNS)]
    small = nbytes < LARGE_BYTES
    # A shard of the last one is half as long.
    whole = [leaf for turn in turns for leaf in turn if small or leaf == 400]
    assert sorted(whole) == ([*range(0, 400, 2), 400] if small else [400] * TURNS)
    assert max(map(len, turns)) <= (13 if small else 201)
    assert replicated.at(None) == (*range(0, 400, 2), 400)
    words = np.random.default_rng(3).integers(0, 1 << 32, nbytes // 4 + 5, np.uint32)
    parts = sum(sum_of_words(words, turn) for turn in range(TURNS))
    assert parts % (1 << 32) == sum_of_words(words) == int(words.sum(dtype=np.uint32))


def test_turns_follow_each_other() -> None:
    """Sixteen saves of a manager are sixteen turns, whatever their steps; managers begin anywhere,
    and a save without a manager has a turn too.
    """
    writers = [f"{number:08x}" for number in range(200)]
    for writer in writers[:20]:
        turns = [turn_of(f"{writer}{count:08x}", count) for count in range(5, 5 + TURNS)]
        assert sorted(turns) == list(range(TURNS))
    assert {turn_of(writer, 0) for writer in writers} == set(range(TURNS))


def test_small_views_are_summed_together() -> None:
    """Sums of many views, of several dtypes and sizes, are those of each alone."""
    random = np.random.default_rng(5)
    views: list[np.ndarray] = []
    for shape in [(3, 4), (7,), (), (1 << 15,), (0,), (5,)] * 3:
        for dtype in (np.float32, np.int8, ml_dtypes.bfloat16):
            views.append(np.asarray(random.standard_normal(shape) * 99).astype(dtype))
    assert sums_of_words(views) == [sum_of_words(view) for view in views]
    assert sums_of_words(views, 3) == [sum_of_words(view, 3) for view in views]


@pytest.mark.parametrize("name", DTYPES)
def test_each_bit_is_seen(name: str) -> None:
    """A flip of any bit of an element changes the sum; the sum is that of the bits."""
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    assert can_store(dtype)
    data = np.arange(16, dtype=np.uint8).repeat(max(1, dtype.itemsize)) * 7
    narrow = {"bool": 1, "int2": 2, "uint4": 4, "int4": 4}.get(name)
    array = data.view(dtype) if narrow is None else (data % (1 << narrow)).astype(dtype)
    summed = jax.jit(_bit_sum)
    before = int(summed(jnp.asarray(array)))
    words_before = sum_of_words(array)
    for bit in range(narrow or 8 * dtype.itemsize):
        other = array.copy()
        flat: Any = other.view(np.uint8)
        flat[len(flat) // 2 + bit // 8] ^= 1 << bit % 8
        assert sum_of_words(other) != words_before, bit
        assert sum_of_words(other[1:]) != sum_of_words(array[1:]), bit
        if narrow in (2, 4) and not name.startswith("u"):
            continue  # numpy keeps these with their sign in a whole byte
        assert int(summed(jnp.asarray(other))) != before, bit


@pytest.mark.parametrize("by", ["numpy", "program"])
def test_replicas_on_the_devices_of_one_process(tmp_path: Path, by: str) -> None:
    """One process alone compares its devices: whole replicas, and replicas of a shard, before a
    cast. With "raise" nothing is committed, and the next save goes on.
    """
    run_together(program("drift_alone"), 1, tmp_path, by, devices=4)
