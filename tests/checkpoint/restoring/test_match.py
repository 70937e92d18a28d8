"""Matching: a saved leaf and its leaf of `like` make a request, or an error that names both."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import SingleDeviceSharding

from holdfast.checkpoint import TreeMismatch, load, save
from holdfast.checkpoint.format.grid import Grid
from holdfast.checkpoint.format.record import ItemRecord, LeafRecord
from holdfast.checkpoint.format.tree import FlatTree, describe
from holdfast.checkpoint.restoring.match import (
    LISTED,
    SAVED,
    check_paths,
    match_leaf,
    request_as_saved,
    show_leaf,
    spans_processes,
)


def leaf(
    dtype: str = "float32", shape: tuple[int, ...] = (4, 2), kind: str = "array", **facts: Any
) -> LeafRecord:
    return LeafRecord("a.b", kind, dtype, shape, grid=Grid(shape, shape, shape), **facts)


def test_forms_of_requests() -> None:
    """numpy for numpy, a scalar for a scalar, jax for jax and for a description, a value for a
    value; a cast is noted, sameness is not.
    """
    like = jax.ShapeDtypeStruct((4, 2), jnp.float32)
    found = match_leaf(leaf(), np.zeros((4, 2), np.float32), False)
    assert (found.form, found.dtype, found.sharding) == ("numpy", None, None)
    assert match_leaf(leaf(), like, False).form == "jax"
    assert match_leaf(leaf("int32", ()), np.int32(0), False).form == "scalar"
    assert match_leaf(leaf("int32", ()), 0, False).form == "value"
    assert match_leaf(leaf(), np.zeros((4, 2), np.float16), True).dtype == np.float16


def test_an_int_goes_by_value() -> None:
    """Into a dtype without a sign too, where it is not below 0."""
    assert match_leaf(LeafRecord("n", "int", value=7), np.uint8(0), False).dtype == np.uint8
    for value, like in ((-1, np.uint8(0)), (1, np.bool_(0))):
        with pytest.raises(TreeMismatch, match=f"cannot hold {value}"):
            match_leaf(LeafRecord("n", "int", value=value), like, False)


def test_a_sharding_is_taken_over() -> None:
    """A `like` with a sharding is requested on it; one that is not committed is left to jax."""
    sharding = SingleDeviceSharding(jax.devices()[0])
    assert (
        match_leaf(
            leaf(), jax.ShapeDtypeStruct((4, 2), jnp.float32, sharding=sharding), False
        ).sharding
        == sharding
    )
    assert match_leaf(leaf(), jnp.zeros((4, 2)), False).sharding is None
    assert (
        match_leaf(leaf(), jax.device_put(jnp.zeros((4, 2)), sharding), False).sharding == sharding
    )


@pytest.mark.parametrize(
    ("saved", "like", "expected"),
    [
        (
            leaf(),
            np.zeros((4, 3), np.float32),
            r"float32\[4, 3\], the checkpoint has float32\[4, 2\]",
        ),
        (
            leaf(),
            np.zeros((4, 2), np.float64),
            r"float64\[4, 2\], the checkpoint has float32\[4, 2\]",
        ),
        (leaf(), "text", "a Python str"),
        (leaf(), object(), "a object"),
        (LeafRecord("a.b", "str", value="x"), 3, "a Python int, the checkpoint has a Python str"),
        (LeafRecord("a.b", "int", value=300), np.int8(0), r"int8\[\], which cannot hold 300"),
        (LeafRecord("a.b", "int", value=9), jnp.int4(0), r"int4\[\], which cannot hold 9"),
        (
            LeafRecord("a.b", "int", value=2**24 + 1),
            np.float32(0),
            r"float32\[\], which cannot hold 16777217",
        ),
        (
            LeafRecord("a.b", "float", value=float("inf")),
            jnp.float8_e4m3fn(0),
            r"float8_e4m3fn\[\], which cannot hold inf",
        ),
    ],
)
def test_a_misfit_names_leaf_and_both_sides(saved: LeafRecord, like: Any, expected: str) -> None:
    """Another shape, dtype or type is a TreeMismatch with the leaf's path."""
    with pytest.raises(TreeMismatch, match=expected) as caught:
        match_leaf(saved, like, False)
    assert caught.value.leaf == "a.b"


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int2", "uint2", "int8"])
def test_a_whole_number_of_any_dtype_is_an_int(dtype: str, tmp_path: Path) -> None:
    """And no float, whose `like` is a TreeMismatch."""
    save(tmp_path, {"n": np.array(1, jnp.dtype(dtype))})
    back = load(tmp_path, {"n": 0})["n"]
    assert type(back) is int and back == 1
    with pytest.raises(TreeMismatch, match=rf"a Python float, the checkpoint has {dtype}\[\]"):
        load(tmp_path, {"n": 0.0})


def test_complex_numbers_are_not_cast_to_real_ones() -> None:
    """`cast` allows other dtypes, but an imaginary part is never dropped."""
    with pytest.raises(TreeMismatch, match="complex64"):
        match_leaf(leaf("complex64"), np.zeros((4, 2), np.float32), True)
    assert match_leaf(leaf(), np.zeros((4, 2), np.complex64), True).dtype == np.complex64


@given(st.sets(st.sampled_from("abcdef")), st.sets(st.sampled_from("abcdef")), st.booleans())
def test_paths_agree_or_the_error_lists_both_sides(
    saved: set[str], wanted: set[str], strict: bool
) -> None:
    """Every wanted leaf has to be saved and, if strict, every saved one wanted; the message has
    each that is not.
    """
    tree = describe(dict.fromkeys(saved, 1))[0]
    leaves = tuple(LeafRecord(path, "int", value=1) for path in sorted(saved))
    item = ItemRecord("state", "tree", (), tree, leaves)
    like = FlatTree.of(dict.fromkeys(wanted, 1))
    missing = wanted - saved
    unexpected = saved - wanted if strict else set()
    if not missing and not unexpected:
        check_paths(item, like.paths, like, strict=strict)
        return
    with pytest.raises(TreeMismatch) as caught:
        check_paths(item, like.paths, like, strict=strict)
    listed = re.findall(r"'(.)'", str(caught.value))
    assert set(listed) == {*sorted(missing)[:LISTED], *sorted(unexpected)[:LISTED]}
    assert caught.value.leaf == min(missing or unexpected)


def test_without_a_like() -> None:
    """Arrays come as numpy, or as jax on their saved sharding; values come as they are."""
    assert (
        request_as_saved(leaf(), on_devices=False).form == "numpy"
        and request_as_saved(leaf(kind="scalar", shape=()), on_devices=True).form == "scalar"
    )
    device = jax.devices()[0]
    found = request_as_saved(leaf(sharding={"device": device.id}), on_devices=True)
    assert (found.form, found.sharding) == ("jax", SingleDeviceSharding(device))
    assert request_as_saved(LeafRecord("n", "int", value=1), on_devices=True).form == "value"
    with pytest.raises(TreeMismatch, match="does not fit this job's"):
        request_as_saved(leaf(sharding={"device": 1 << 20}), on_devices=True)
    with pytest.raises(TreeMismatch, match="no copy here"):
        request_as_saved(leaf(refusal="no copy here"), on_devices=False)


def test_shown_for_people() -> None:
    """Dtype and shape, the kind of a key without the axis of its words, or the type of a value."""
    assert (
        show_leaf(leaf()) == "float32[4, 2]"
        and show_leaf(LeafRecord("n", "int", value=1)) == "a Python int"
    )
    assert show_leaf(leaf("uint32", (3, 2), "key", impl="threefry2x32")) == "key<threefry2x32>[3]"


def test_what_lies_on_one_process_does_not_span_several() -> None:
    """Neither numpy nor arrays of this process's devices do, nor SAVED in a job of one. (In jobs:
    tests/system/test_group_restores.py.)
    """
    here = SingleDeviceSharding(jax.devices()[0])
    for like in (
        {"a": np.zeros(3), "b": 1, "c": jnp.zeros(3)},
        jax.ShapeDtypeStruct((3,), jnp.float32, sharding=here),
        None,
        SAVED,
    ):
        assert not spans_processes(like)
