"""The plan: each byte has one writer that holds it, all processes agree, and the load is even.
Pure: no jax, no files.
"""

from __future__ import annotations

import math
import time
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.format.item_report import FileReport, ItemReport, pack_name
from holdfast.checkpoint.format.record import parse_record
from holdfast.checkpoint.saving.plan import (
    CHUNK_BYTES,
    PACKS,
    Leaf,
    Plan,
    ShardPlacement,
    make_plan,
)
from holdfast.checkpoint.saving.record_builder import RecordHead, build_record


def placement(shards_per_axis: tuple[int, ...], ranks: np.ndarray, me: int) -> ShardPlacement:
    """Returns a placement of one device a process; `ranks` is [shards, replicas]."""
    return ShardPlacement(shards_per_axis, ranks, np.where(ranks == me, 0, -1))


@st.composite
def jobs(
    draw: st.DrawFn,
) -> tuple[int, list[tuple[tuple[int, ...], int, tuple[int, ...], np.ndarray | None]]]:
    """Draws a process count and leaves as (shape, itemsize, shards_per_axis, ranks)."""
    count = draw(st.sampled_from([1, 2, 3, 4, 8]))
    leaves = []
    for _ in range(draw(st.integers(1, 6))):
        sharded = draw(st.sampled_from([n for n in (1, 2, 4, 8) if count % n == 0]))
        shards_per_axis = draw(st.sampled_from([(sharded, 1), (1, sharded)]))
        shape = tuple(count * draw(st.integers(1, 9)) for count in shards_per_axis)
        ranks = np.array(draw(st.permutations(range(count)))).reshape(sharded, -1)
        leaves.append(
            (
                shape,
                draw(st.sampled_from([1, 2, 4, 8, 16])),
                shards_per_axis,
                None if draw(st.integers(0, 4)) == 0 else ranks,
            )
        )
    return count, leaves


def plans(
    count: int,
    leaves: list[tuple[tuple[int, ...], int, tuple[int, ...], np.ndarray | None]],
    **options: int,
) -> list[Plan]:
    made = []
    for rank in range(count):
        described = [
            Leaf(
                f"leaf{i}",
                "array",
                "float32",
                shape,
                itemsize,
                None if ranks is None else placement(shards_per_axis, ranks, rank),
            )
            for i, (shape, itemsize, shards_per_axis, ranks) in enumerate(leaves)
        ]
        made.append(make_plan({"kind": "list"}, described, rank, count, **options))
    return made


@settings(max_examples=200, deadline=None)
@given(jobs())
def test_a_holder_writes_every_element_once(
    job: tuple[int, list[tuple[tuple[int, ...], int, tuple[int, ...], np.ndarray | None]]],
) -> None:
    """The chunks of all processes tile each leaf exactly; equal hashes, equal files; alignment in
    each pack.
    """
    count, leaves = job
    made = plans(count, leaves)
    assert len({plan.hash for plan in made}) == 1 and len({plan.files for plan in made}) == 1
    assert {(plan.process, pack) for plan in made for pack in plan.own} == set(made[0].files)
    written = [np.zeros(shape, int) for shape, *_ in leaves]
    for plan in made:
        for chunks in plan.own.values():
            offset = 0
            for chunk in chunks:
                assert offset % chunk.itemsize == 0 and (chunk.nbytes % 64 or offset % 64 == 0)
                offset += chunk.nbytes
                _, _, spec = chunk.name.partition("[")
                index = (
                    tuple(slice(*map(int, axis.split(":"))) for axis in spec[:-1].split(","))
                    if spec
                    else ()
                )
                written[chunk.leaf][index] += 1
    assert all((array == 1).all() for array in written)
    assert (
        sum(plan.own_bytes for plan in made)
        == made[0].total_bytes
        == sum(math.prod(shape) * size for shape, size, *_ in leaves)
    )


@settings(max_examples=100, deadline=None)
@given(jobs(), st.sets(st.integers(0, 7)))
def test_ranks_that_leave_write_only_their_own(
    job: tuple[int, list[tuple[tuple[int, ...], int, tuple[int, ...], np.ndarray | None]]],
    leaving: set[int],
) -> None:
    """Without the ranks that leave, each chunk is written once by a holder that stays, where there
    is one; what else is lost is named.
    """
    count, leaves = job
    held = [
        None if ranks is None else placement(shards_per_axis, ranks, 0).without(leaving)
        for _, _, shards_per_axis, ranks in leaves
    ]
    described = [
        Leaf(f"leaf{i}", "array", "float32", shape, itemsize, where)
        for i, ((shape, itemsize, _, _), where) in enumerate(zip(leaves, held, strict=True))
    ]
    plan = make_plan({"kind": "list"}, described, 0, count)
    for (_, _, _, ranks), array in zip(leaves, plan.arrays, strict=True):
        assert array is not None
        for shard, writer in zip(array.grid.shards, array.writers, strict=True):
            if ranks is not None:
                assert writer in ranks[shard]
                assert writer not in leaving or leaving.issuperset(ranks[shard].tolist())
    whole = [np.zeros((1, 0), int) if ranks is None else ranks for *_, ranks in leaves]
    for rank in leaving & set(range(count)):
        alone = [
            f"leaf{i}"
            for i, ranks in enumerate(whole)
            if any(set(row) == {rank} for row in ranks.tolist())
        ]
        assert set(alone) <= set(plan.held_only_by(rank))


def test_large_chunks_are_cut_and_shared_evenly() -> None:
    """A 1 GiB replicated array is shared by its four holders in chunks of at most 64 MiB; a sharded
    one stays where it lies.
    """
    ranks = np.arange(4)[None, :]
    made = plans(
        4, [((1 << 14, 1 << 14), 4, (1, 1), ranks), ((1 << 12, 1 << 10), 4, (4, 1), ranks.T)]
    )
    sizes = [plan.own_bytes for plan in made]
    assert max(sizes) <= 1.01 * min(sizes)
    assert all(
        chunk.nbytes <= CHUNK_BYTES
        for plan in made
        for chunks in plan.own.values()
        for chunk in chunks
    )
    assert all(len(plan.own) == PACKS for plan in made)
    weights = [
        sum(chunk.nbytes for chunk in chunks) for plan in made for chunks in plan.own.values()
    ]
    assert max(weights) - min(weights) <= CHUNK_BYTES


def test_small_replicated_leaves_have_few_writers() -> None:
    """A thousand biases on 64 processes lie in one pack, so that a restore opens one file for
    them.
    """
    ranks = np.arange(64)[None, :]
    shared = placement((1,), ranks, 0)
    plan = make_plan(
        {}, [Leaf(f"bias{i}", "array", "float32", (256,), 4, shared) for i in range(1000)], 0, 64
    )
    assert plan.files == ((0, 0),)


def test_files_stay_below_the_bound_of_the_store() -> None:
    """With `max_file_bytes` no pack is larger."""
    limit = 256 << 20
    for plan in plans(
        2,
        [
            ((1 << 28,), 4, (2,), np.arange(2)[:, None]),
            ((1 << 20,), 2, (1,), np.arange(2)[None, :]),
        ],
        max_file_bytes=limit,
    ):
        assert (
            all(sum(chunk.nbytes for chunk in chunks) < limit for chunks in plan.own.values())
            and len(plan.own) >= 2
        )


def test_another_tree_has_another_hash() -> None:
    """Shape, sharding, order of processes, process count and the other leaves all count."""
    ranks = np.arange(2)[:, None]
    one = plans(2, [((4, 4), 4, (2, 1), ranks)])[0].hash
    others = [
        plans(2, [((4, 8), 4, (2, 1), ranks)])[0].hash,
        plans(1, [((4, 4), 4, (2, 1), np.zeros((2, 1), int))])[0].hash,
        plans(2, [((4, 4), 4, (1, 2), ranks)])[0].hash,
        plans(2, [((4, 4), 4, (2, 1), ranks[::-1])])[0].hash,
        plans(2, [((4, 4), 4, (2, 1), ranks), ((1,), 1, (1,), ranks.T)])[0].hash,
    ]
    assert one not in others and len(set(others)) == len(others)


def test_a_job_of_4096_processes() -> None:
    """1,000 leaves over 4,096 processes are planned, recorded and read back; the record stays below
    1 MB. (Times: benchmarks.)
    """
    count = 4096
    me = 7
    ranks = np.arange(count)
    placements = [
        placement((count, 1), ranks[:, None], me),
        placement((1,), ranks[None, :], me),
        placement((64, 1), ranks.reshape(64, 64), me),
    ]
    shapes = [(8192, 4096), (4096,), (8192, 1024)]
    leaves = [
        Leaf(f"layer{i}.w", "array", "bfloat16", shapes[i % 3], 2, placements[i % 3], None)
        for i in range(1000)
    ]
    began = time.perf_counter()
    plan = make_plan({"kind": "list", "nodes": list(range(1000))}, leaves, me, count)
    planned = time.perf_counter()
    files: dict[int, list[FileReport]] = {}
    for rank, pack in plan.files:
        files.setdefault(rank, []).append(
            FileReport(pack_name(rank, pack, "9f3a61c2"), 1 << 20, 1 << 16, 1)
        )
    reports = [ItemReport(rank, plan.hash, tuple(files.get(rank, ()))) for rank in range(count)]
    data = build_record(
        RecordHead(1, writer="9f3a61c2", processes=count, started_s=0.0, finished_s=1.0),
        {"state": (plan, reports)},
    )
    record = parse_record(data, "checkpoint.json")
    print(
        f"plan {planned - began:.2f} s, record {time.perf_counter() - planned:.2f} s, {len(data):,}"
        " bytes"
    )
    assert len(data) < 1_000_000
    for found, array in zip(record.items["state"].leaves[:3], plan.arrays[:3], strict=True):
        assert array is not None and found.files is not None
        expected = [
            plan.files.index((int(w), int(p)))
            for w, p in zip(array.writers[:50], array.packs[:50], strict=True)
        ]
        assert found.files[:50].tolist() == expected
    load = Counter(int(w) for array in plan.arrays if array for w in array.writers)
    assert len(load) == count
