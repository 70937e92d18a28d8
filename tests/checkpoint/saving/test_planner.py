"""The planner: what it reads from jax and numpy, what it refuses, and when a plan is used again."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from holdfast.checkpoint import Files, Json, UnsupportedLeaf
from holdfast.checkpoint.format.tree import FlatTree
from holdfast.checkpoint.saving.planner import CACHED_PLANS, Planner, placement_of, row_placement


def test_plans_are_reused() -> None:
    """The same structure gives the very plan, whatever the values; another shape, dtype or type of
    leaf gives another.
    """
    planner = Planner()
    tree: dict[str, Any] = {"a": jnp.zeros(4), "n": 1, "h": np.zeros(3)}
    plan = planner.plan(FlatTree.of(tree))
    assert planner.plan(FlatTree.of({"a": jnp.ones(4), "n": 2, "h": np.ones(3)})) is plan
    for change in (
        {"a": jnp.zeros(5)},
        {"a": jnp.zeros(4, jnp.int32)},
        {"n": 1.0},
        {"h": np.zeros(3, np.float32)},
        {"b": 1},
    ):
        assert planner.plan(FlatTree.of(tree | change)) is not plan
    assert planner.plan(FlatTree.of(tree)) is plan


def test_old_plans_are_forgotten() -> None:
    """A planner keeps the last few plans, the newest in front; one that is used no longer is made
    anew.
    """
    planner = Planner()
    first = planner.plan(FlatTree.of({"a": np.zeros(1)}))
    for size in range(2, CACHED_PLANS + 1):
        planner.plan(FlatTree.of({"a": np.zeros(size)}))
    assert planner.plan(FlatTree.of({"a": np.ones(1)})) is first
    planner.plan(FlatTree.of({"a": np.zeros(CACHED_PLANS + 1)}))
    assert planner.plan(FlatTree.of({"a": np.ones(1)})) is not first


def test_every_kind_of_leaf_is_described() -> None:
    """Arrays, keys, numpy arrays and scalars, and Python values, with dtype, shape and size."""
    tree = {
        "a": jnp.zeros((2, 3), jnp.bfloat16),
        "k": jax.random.key(0),
        "n": np.zeros(3),
        "s": np.float32(1),
        "v": 7,
    }
    found = {leaf.path: leaf for leaf in Planner().plan(FlatTree.of(tree)).leaves}
    assert [
        (found[path].kind, found[path].dtype, found[path].shape, found[path].nbytes)
        for path in "aknsv"
    ] == [
        ("array", "bfloat16", (2, 3), 12),
        ("key", "uint32", (2,), 8),
        ("numpy", "float64", (3,), 24),
        ("scalar", "float32", (), 4),
        ("int", "", (), 0),
    ]
    assert "fry" in found["k"].impl
    assert found["a"].placement is not None and found["n"].placement is None and found["v"].is_value


def test_in_a_group_one_processs_array_is_local() -> None:
    """An array that this process alone can address has no placement: rank 0 writes it whole, as it
    does numpy arrays.
    """
    plan = Planner(1, 2).plan(FlatTree.of({"a": jnp.zeros(4), "n": np.zeros(3)}))
    assert (
        all(leaf.placement is None for leaf in plan.leaves)
        and plan.own == {}
        and plan.files == ((0, 0),)
    )


def test_leaves_of_each_process_have_a_row_each() -> None:
    """A leaf kept per process is [processes, ...], and each process writes its row."""
    plan = Planner(1, 3, per_process=lambda path: path == "mine").plan(
        FlatTree.of({"mine": np.zeros((2, 2)), "ours": np.zeros(2), "at": 3})
    )
    mine = next(leaf for leaf in plan.leaves if leaf.path == "mine")
    assert (
        mine.per_process
        and mine.shape == (3, 2, 2)
        and plan.own_bytes == 32
        and {rank for rank, _ in plan.files} == {0, 1, 2}
    )
    assert row_placement(3, 2).shards_per_axis == (3, 1, 1)


def test_shardings_of_any_type_say_where_shards_lie() -> None:
    """The general way, by the indices of devices, finds what the arithmetic on mesh and spec
    finds.
    """
    device = jax.devices()[0]
    named = jax.device_put(
        jnp.zeros((2, 3)), NamedSharding(jax.make_mesh((1, 1), ("x", "y")), PartitionSpec("x", "y"))
    )
    single = jax.device_put(jnp.zeros((2, 3)), SingleDeviceSharding(device))
    for array in (named, single):
        found = placement_of(array, {0: 0})
        assert (
            found.shards_per_axis == (1, 1)
            and found.ranks.tolist() == [[0]] == found.slots.tolist()
        )
    assert placement_of(named, {5: 0}).ranks.tolist() == [[-1]], "its process is none of the group"


def deleted() -> jax.Array:
    array = jnp.zeros(3)
    array.delete()
    return array


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (
            object(),
            (
                r"the leaf 'a' is a .*object, which cannot be saved; save its arrays, or register"
                r" its class: as a pytree"
            ),
        ),
        (
            jax.ShapeDtypeStruct((3,), jnp.float32),
            "it has no values: save the array that it describes",
        ),
        (
            np.zeros(3, ">f4"),
            r"the leaf 'a' has dtype >f4 .*; convert it to a little-endian number dtype",
        ),
        (Json({}), r"it is an item of its own: save\(step, items=\{'a': \.\.\.\}\)"),
        (Files(), r"it is an item of its own: save\(step, items=\{'a': \.\.\.\}\)"),
        (np.array(["x"], object), "which cannot be saved; convert it"),
        (deleted(), "the leaf 'a' was deleted or donated: save it before that"),
    ],
)
def test_what_cannot_be_saved_is_named(leaf: Any, message: str) -> None:
    """Each leaf that cannot be saved is UnsupportedLeaf with its path, and says what to do."""
    with pytest.raises(UnsupportedLeaf, match=message) as caught:
        Planner().plan(FlatTree.of({"a": leaf}))
    assert caught.value.leaf == "a"


def test_a_tracer_is_refused() -> None:
    """Saving inside of jit is an error that says so."""
    with pytest.raises(
        UnsupportedLeaf, match="the leaf 'a' is a tracer: save outside of jit and grad"
    ):
        jax.jit(lambda x: Planner().plan(FlatTree.of({"a": x})) and x)(jnp.zeros(3))


def test_an_array_outside_the_group_is_refused() -> None:
    """A group that does not hold all of an array cannot save it."""
    planner = Planner(0, 1, processes=[5])
    with pytest.raises(
        UnsupportedLeaf, match="shards of the leaf 'a' are on processes outside of this group"
    ):
        planner.plan(FlatTree.of({"a": jnp.zeros(3)}))
