"""Restoring: what comes back is what the caller asked for, or an error that names the leaf and both
sides.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from holdfast.checkpoint import (
    SAVED,
    Cast,
    StepNotFound,
    TreeMismatch,
    convert,
    load,
    save,
    structure,
)
from holdfast.checkpoint.arrays.sharding import show_sharding
from holdfast.checkpoint.format.record import LeafRecord
from holdfast.checkpoint.restoring.match import saved_sharding

TREE = {
    "params": {
        "w": np.arange(12, dtype=np.float32).reshape(3, 4),
        "b": np.arange(4, dtype=np.float64),
    },
    "step": 7,
    "count": np.int32(3),
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(
        tmp_path / "c", TREE | {"key": jax.random.key(5), "device": jnp.arange(6, dtype=jnp.int32)}
    )
    return tmp_path / "c"


def test_a_leaf_comes_back_as_its_like(saved: Path) -> None:
    """numpy for numpy (64 bits stay), jax for jax or ShapeDtypeStruct, a scalar for one; values are
    equal.
    """
    like = {
        "params": {"w": jax.ShapeDtypeStruct((3, 4), jnp.float32), "b": np.zeros(4)},
        "step": jnp.int32(0),
        "count": 0,
        "key": jax.random.key(0),
        "device": np.zeros(6, np.int32),
    }
    found = load(saved, like)
    assert isinstance(found["params"]["w"], jax.Array) and not found["params"]["w"].committed
    assert type(found["params"]["b"]) is np.ndarray and found["params"]["b"].dtype == np.float64
    assert (
        isinstance(found["step"], jax.Array)
        and found["step"].dtype == jnp.int32
        and int(found["step"]) == 7
    )
    assert type(found["count"]) is int and found["count"] == 3
    assert (jax.random.key_data(found["key"]) == jax.random.key_data(jax.random.key(5))).all()
    assert type(found["device"]) is np.ndarray and (found["device"] == np.arange(6)).all()
    np.testing.assert_array_equal(found["params"]["w"], TREE["params"]["w"])  # type: ignore[index]


def test_arrays_that_come_back_can_be_written(saved: Path) -> None:
    """A numpy leaf is the caller's own memory."""
    found = load(saved)
    found["params"]["w"][0, 0] = 99
    assert load(saved)["params"]["w"][0, 0] == 0


FULL = TREE | {
    "key": jax.ShapeDtypeStruct((), jax.random.key(0).dtype),
    "device": np.zeros(6, np.int32),
}


@pytest.mark.parametrize(
    ("change", "leaf", "parts"),
    [
        ({"device": np.zeros(5, np.int32)}, "device", ["int32[5]", "int32[6]"]),
        ({"device": np.zeros(6, np.float32)}, "device", ["float32[6]", "int32[6]"]),
        ({"device": 3}, "device", ["Python int", "int32[6]"]),
        ({"step": 3.5}, "step", ["Python float", "Python int"]),
        ({"step": np.zeros(3)}, "step", ["float64[3]", "Python int"]),
        ({"count": 1.0}, "count", ["Python float", "int32[]"]),
        ({"count": object()}, "count", ["object", "int32[]"]),
        ({"key": np.zeros(2, np.uint32)}, "key", ["uint32[2]", "key<threefry2x32>[]"]),
        ({"device": jax.random.key(0)}, "device", ["key<threefry2x32>[]", "int32[6]"]),
        ({"more": 1}, "more", ["not in the checkpoint"]),
    ],
)
def test_a_misfit_names_the_leaf_and_both_sides(
    saved: Path, change: dict[str, Any], leaf: str, parts: list[str]
) -> None:
    """Shape, dtype, type and structure are compared before anything is read."""
    with pytest.raises(TreeMismatch) as caught:
        load(saved, FULL | change)
    assert caught.value.leaf == leaf and all(part in str(caught.value) for part in parts), (
        caught.value
    )


def test_strict_in_both_directions(saved: Path) -> None:
    """Missing and unexpected leaves are listed together; partial=True leaves the unexpected out,
    and still wants the rest.
    """
    like = {"params": {"w": np.zeros((3, 4), np.float32), "x": 1}}
    with pytest.raises(
        TreeMismatch,
        match=(
            r"1 leaf of `like` not in the checkpoint: 'params.x'; 5 leaves of the checkpoint not in"
            r" `like`"
        ),
    ):
        load(saved, like)
    with pytest.raises(TreeMismatch, match=r"params\.x"):
        load(saved, like, partial=True)
    found = load(saved, {"params": {"w": np.zeros((3, 4), np.float32)}}, partial=True)
    np.testing.assert_array_equal(found["params"]["w"], TREE["params"]["w"])  # type: ignore[index]


def test_a_predicate_chooses_leaves(saved: Path) -> None:
    """With a `like` the others stay as they are in it; without one they are None."""
    found = load(
        saved,
        {"params": {"w": np.zeros((3, 4), np.float32), "b": "mine"}, "new": 1},
        partial=lambda path: path == "params.w",
    )
    assert found["params"]["b"] == "mine" and found["new"] == 1 and found["params"]["w"][2, 3] == 11
    found = load(saved, partial=lambda path: path.startswith("params."))
    assert found["step"] is None and found["params"]["b"][3] == 3


def test_a_number_that_does_not_fit(tmp_path: Path) -> None:
    """A large Python int is not cut to the dtype of its `like`."""
    save(tmp_path, {"n": 2**40})
    with pytest.raises(TreeMismatch, match="cannot hold"):
        load(tmp_path, {"n": jnp.int32(0)})
    assert load(tmp_path, {"n": np.int64(0)})["n"] == 2**40


@pytest.mark.parametrize("like", [np.float32(0), jnp.float32(0), jnp.bfloat16(0), np.complex64(0)])
def test_a_number_that_would_be_infinite(tmp_path: Path, like: Any) -> None:
    """A finite number is not turned into inf or nan; those that were saved come back."""
    save(tmp_path, {"n": 1e300, "huge": 2**400, "inf": math.inf, "nan": math.nan, "x": 0.5})
    for name in ("n", "huge"):
        with pytest.raises(TreeMismatch, match=rf"'{name}'.*cannot hold"):
            load(tmp_path, {name: like}, partial=True)
    kept = {"inf": like, "nan": like, "x": like}
    found = load(tmp_path, kept, partial=True)
    assert np.isinf(found["inf"]) and np.isnan(found["nan"]) and found["x"] == 0.5


CASTS: list[tuple[Any, Any]] = [
    (np.array([1, 2**31]), np.zeros(2, np.int32)),
    (np.array([300]), np.zeros(1, np.uint8)),
    (np.array([-1], np.int8), np.zeros(1, np.uint16)),
    (np.array([1.0, math.nan], np.float32), np.zeros(2, np.int32)),
    (np.array([3e9], np.float32), jax.ShapeDtypeStruct((1,), jnp.int32)),
    (np.array([1e300]), np.zeros(1, np.float32)),
    (np.array([70_000], np.int32), np.zeros(1, np.float16)),
    (jnp.array([math.inf]), jax.ShapeDtypeStruct((1,), jnp.float8_e4m3fn)),
    (np.array([2], np.int8), np.zeros(1, bool)),
    (jnp.array([9], jnp.uint4), jax.ShapeDtypeStruct((1,), jnp.int4)),
]


@pytest.mark.parametrize(("value", "like"), CASTS)
def test_a_cast_is_by_value(value: Any, like: Any, tmp_path: Path) -> None:
    """A number that the other dtype cannot hold is refused, and the leaf is named: it is never
    wrapped. Rules that cast do the same.
    """
    save(tmp_path / "c", {"a": {"b": value}})
    dtype = jnp.dtype(like.dtype).name
    with pytest.raises(
        TreeMismatch, match=rf"'a\.b' holds .*, which {dtype} cannot hold"
    ) as raised:
        load(tmp_path / "c", {"a": {"b": like}}, cast=True)
    assert raised.value.leaf == "a.b"
    with pytest.raises(TreeMismatch, match=rf"'a\.b' holds .*, which {dtype} cannot hold"):
        load(tmp_path / "c", rules={r"a\.b": Cast(dtype)})


def test_a_cast_that_holds_the_numbers_goes_on(tmp_path: Path) -> None:
    """Counters of int64 as int32; digits of floats go."""
    save(tmp_path / "c", {"n": np.int64(7), "x": np.array([0.1, 1e-60, math.nan, math.inf])})
    found = load(tmp_path / "c", {"n": jnp.int32(0), "x": np.zeros(4, np.float32)}, cast=True)
    assert found["n"].dtype == jnp.int32
    assert int(found["n"]) == 7
    assert np.array_equal(
        found["x"], np.array([0.1, 0, math.nan, math.inf], np.float32), equal_nan=True
    )


def test_a_cast_by_rules_keeps_imaginary_parts(tmp_path: Path) -> None:
    """A rule that would drop them does not fit its leaf."""
    save(tmp_path / "c", {"z": np.array([1j])})
    with pytest.raises(TreeMismatch, match="'z': float32 cannot hold the imaginary parts"):
        load(tmp_path / "c", rules={"z": Cast("float32")})


def test_a_python_number_lies_where_its_like_does(tmp_path: Path) -> None:
    """On the mesh of the `like`, committed to it."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec())
    save(tmp_path / "c", {"step": 7})
    for like in (
        jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding),
        jax.device_put(jnp.int32(0), sharding),
    ):
        found = load(tmp_path / "c", {"step": like})["step"]
        assert int(found) == 7
        assert found.committed
        assert found.sharding == sharding


def test_an_array_is_as_weak_as_its_like(tmp_path: Path) -> None:
    """Weak where the `like` is; with SAVED, and by its structure, as it was. A strong one would
    make the next step's parameters wider.
    """
    mesh = Mesh(np.array(jax.devices()), ("x",))
    weak = jnp.asarray(0.5)
    tree = {
        "weak": weak,
        "wide": jnp.broadcast_to(weak, (4, 2)),
        "strong": jnp.float32(0.5),
        "meshed": jax.device_put(weak, NamedSharding(mesh, PartitionSpec())),
    }
    assert [leaf.weak_type for leaf in tree.values()] == [True, True, False, True]
    save(tmp_path / "c", tree)
    described = jax.tree.map(_describe, tree)
    for like in (tree, described, SAVED, structure(tmp_path / "c").items["state"].tree):
        found = load(tmp_path / "c", like)
        for name, leaf in tree.items():
            assert found[name].aval.weak_type == leaf.weak_type, name
            assert np.array_equal(found[name], leaf)
    step = load(tmp_path / "c", tree)["weak"] * jnp.ones(2, jnp.bfloat16)
    assert step.dtype == jnp.bfloat16
    swapped = tree | {"weak": jnp.float32(0), "strong": jnp.asarray(0.0)}
    found = load(tmp_path / "c", swapped)
    assert (found["weak"].weak_type, found["strong"].weak_type) == (False, True)
    assert type(load(tmp_path / "c")["weak"]) is np.ndarray


def _describe(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    sharding = leaf.sharding if leaf.committed else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=leaf.weak_type)


def test_weakness_travels_with_a_conversion(tmp_path: Path) -> None:
    """The record of a copy knows it too."""
    save(tmp_path / "c", {"lr": jnp.asarray(0.5)}, step=3)
    there = convert(tmp_path / "c", tmp_path / "d")
    assert load(there, SAVED)["lr"].weak_type


def test_cast(saved: Path) -> None:
    """cast=True changes the dtype on request; a complex array is never cut to its real part."""
    found = load(
        saved,
        FULL | {"device": jax.ShapeDtypeStruct((6,), jnp.bfloat16), "count": np.int64(0)},
        cast=True,
    )
    assert (
        found["device"].dtype == jnp.bfloat16
        and found["device"][5] == 5
        and type(found["count"]) is np.int64
    )
    save(saved.parent / "complex", {"c": np.array([1j])})
    with pytest.raises(TreeMismatch, match="complex128"):
        load(saved.parent / "complex", {"c": np.zeros(1)}, cast=True)


def test_64_bits_are_never_lost_in_silence(saved: Path) -> None:
    """jax without x64 has no float64: asked for as a jax.Array it is an error, and as SAVED it
    stays numpy, as it was.
    """
    like = {"params": {"b": jax.ShapeDtypeStruct((4,), np.float64)}}
    with pytest.raises(TreeMismatch, match="jax_enable_x64"):
        load(saved, like, partial=True)
    assert load(saved, SAVED)["params"]["b"].dtype == np.float64


def test_saved_shardings(saved: Path) -> None:
    """like=SAVED gives arrays back on their devices; a sharding that does not fit is an error."""
    found = load(saved, SAVED)
    assert (
        isinstance(found["device"], jax.Array)
        and type(found["params"]["w"]) is np.ndarray
        and found["step"] == 7
    )
    facts = {"axes": ["x"], "sizes": [512], "devices": list(range(512)), "spec": [["x"]]}
    with pytest.raises(TreeMismatch, match="does not fit this job's"):
        saved_sharding(LeafRecord("w", "array", "float32", (512,), sharding=facts))
    assert show_sharding(facts) == "(x) on x=512"


def test_a_sharding_that_cannot_divide(saved: Path) -> None:
    """A `like` whose sharding does not divide the shape is a TreeMismatch with the leaf's path."""
    mesh = jax.make_mesh((1,), ("x",))
    like = {
        "device": jax.ShapeDtypeStruct(
            (6,), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec("x"))
        )
    }
    assert load(saved, like, partial=True)["device"].sharding == like["device"].sharding


def test_what_is_not_there(saved: Path) -> None:
    """A missing checkpoint or item says what was looked for, and what is there."""
    with pytest.raises(StepNotFound, match="nothing"):
        load(saved.parent / "other")
    with pytest.raises(StepNotFound, match="state"):
        load(saved, item="other")
