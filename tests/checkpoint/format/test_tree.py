"""Trees: every kind of container and leaf, described, named and rebuilt."""

from __future__ import annotations

import collections
import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint import (
    SAVED,
    CheckpointManager,
    Node,
    TreeMismatch,
    UnsupportedLeaf,
    load,
    save,
)
from holdfast.checkpoint.format.tree import describe, flatten, rebuild


class Point(NamedTuple):
    x: Any
    y: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    first: Any
    second: Any


@flax.struct.dataclass
class Train:
    step: Any
    params: Any
    name: str = flax.struct.field(pytree_node=False, default="run")


class Numbered:
    """A pytree whose fields have numbers for keys."""

    def __init__(self, *fields: Any) -> None:
        self.fields = fields


jax.tree_util.register_pytree_node(
    Numbered, lambda node: (node.fields, None), lambda _, fields: Numbered(*fields)
)


class Plain:
    """A class that jax does not know."""


def same(left: Any, right: Any) -> None:
    """Asserts that two trees are equal in structure, types, dtypes and bits."""
    assert jax.tree_util.tree_structure(left) == jax.tree_util.tree_structure(right)
    for a, b in zip(jax.tree_util.tree_leaves(left), jax.tree_util.tree_leaves(right), strict=True):
        assert type(a) is type(b)
        if isinstance(a, jax.Array) and jax.numpy.issubdtype(a.dtype, jax.dtypes.prng_key):
            a = jax.random.key_data(a)
            b = jax.random.key_data(b)
        if hasattr(a, "dtype"):
            assert (
                a.dtype == b.dtype
                and a.shape == b.shape
                and np.asarray(a).tobytes() == np.asarray(b).tobytes()
            )
        else:
            assert a == b or (a != a and b != b)


TREES = {
    "dict": {"a": np.arange(3), "b": {"c": np.float32(2)}},
    "int keys": {1: np.arange(2), 10: np.arange(3), 2: {}},
    "list and tuple": [np.arange(2), (np.arange(3), None, [], (), {})],
    "namedtuple": Point(np.arange(2), Point(None, 3)),
    "dataclass": Pair(np.arange(2), Pair(1.5, "text")),
    "flax.struct": Train(np.int32(3), {"w": np.ones((2, 2), np.float32)}),
    "ordered": collections.OrderedDict(z=np.arange(2), a=np.arange(3)),
    "values": [
        0,
        -(2**80),
        True,
        1.5,
        float("nan"),
        float("-inf"),
        -0.0,
        2 - 3j,
        "",
        "ü\n\ud800",
        b"",
        b"\x00\xff",
    ],
    "scalars": [np.float16(1.5), np.int8(-3), np.bool_(True), np.complex128(1 + 2j)],
    "leaf": np.arange(5),
    "empty": {},
    "odd keys": {
        "": 1,
        ".": 2,
        "a.b": 3,
        "a": {"b": 4},
        "[0:1]": 5,
        "__metadata__": np.arange(2),
        "\\": 6,
        "\n": 7,
    },
}


@pytest.mark.parametrize("kind", TREES)
def test_a_tree_comes_back_with_a_like(tmp_path: Path, kind: str) -> None:
    """Structure, types and bits are those that were saved."""
    save(tmp_path, TREES[kind])
    same(load(tmp_path, TREES[kind]), TREES[kind])


@pytest.mark.parametrize("kind", sorted(set(TREES) - {"dataclass", "flax.struct", "namedtuple"}))
def test_plain_trees_come_back_without_a_like(tmp_path: Path, kind: str) -> None:
    """Dicts (int keys too), lists, tuples, None and empty containers need no `like`; arrays are
    numpy.
    """
    save(tmp_path, TREES[kind])
    same(load(tmp_path), TREES[kind])


def test_classes_without_a_like(tmp_path: Path) -> None:
    """A namedtuple is made on the spot, another class is a Node, and `types` names those that may
    be rebuilt.
    """
    save(tmp_path, {"n": Point(1, 2), "d": Pair(3, None)})
    found = load(tmp_path)
    assert (
        found["n"]._fields == ("x", "y")
        and tuple(found["n"]) == (1, 2)
        and type(found["n"]).__name__ == "Point"
    )
    assert found["d"] == Node(f"{__name__}:Pair", {"first": 3, "second": None})
    found = load(tmp_path, types=[Point, Pair])
    assert found == {"n": Point(1, 2), "d": Pair(3, None)} and type(found["n"]) is Point


class _Scaled(NamedTuple):
    w: Any
    unit: str


jax.tree_util.register_pytree_node(
    _Scaled,
    lambda scaled: ((scaled.w,), scaled.unit),
    lambda unit, children: _Scaled(*children, unit),
)


def test_a_namedtuple_may_have_static_fields(tmp_path: Path) -> None:
    """Where its class is registered by itself, it has fewer children than fields."""
    save(tmp_path, {"scaled": _Scaled(np.arange(3), "m")})
    back = load(tmp_path, {"scaled": _Scaled(np.zeros(3, int), "m")})["scaled"]
    assert type(back) is _Scaled and back.w.tolist() == [0, 1, 2] and back.unit == "m"
    node = load(tmp_path)["scaled"]
    assert isinstance(node, Node) and node.type_name.endswith(":_Scaled")


def test_a_namedtuple_may_be_called_by_a_keyword(tmp_path: Path) -> None:
    """Python has no class of that name: without the class it comes back as a `Tuple`."""
    odd = collections.namedtuple("odd", "x")
    odd.__qualname__ = "class"
    save(tmp_path, odd(1))
    assert load(tmp_path) == (1,) and type(load(tmp_path)).__name__ == "Tuple"


def test_states_of_libraries(tmp_path: Path) -> None:
    """equinox modules, optax states and nnx states come back bit-exact."""
    module = eqx.nn.MLP(3, 2, 4, 2, key=jax.random.key(0))
    params = eqx.filter(module, eqx.is_array)
    optimizer = optax.chain(
        optax.clip(1.0),
        optax.masked(optax.adamw(1e-3), mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)),
    )
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    tree = {
        "eqx": params,
        "optax": optimizer.init(params),
        "nnx": nnx.state(model),
        "keys": jax.random.split(jax.random.key(1), 3),
    }
    save(tmp_path, tree)
    same(load(tmp_path, tree), tree)


@pytest.mark.parametrize(
    ("tree", "path", "advice"),
    [
        ({"a": {"b": object()}}, "a.b", "register its class"),
        ({"a": [Plain()]}, "a.0", "register its class"),
        ({"a": np.array(["x"])}, "a", "number dtype"),
        ({"a": np.arange(2, dtype=">i4")}, "a", "little-endian"),
        ({"a": np.datetime64("2020-01-01")}, "a", "number dtype"),
        ({"a": jax.ShapeDtypeStruct((2,), jnp.float32)}, "a", "save the array"),
        ({(1, 2): 3}, "", "must be str or int"),
        ({"t": {1: 1, "b": 2}}, "t", "use str or int alone"),
        ([3, Pair(1, Numbered({1: 1, "b": 2}))], "1.second.0", "use str or int alone"),
        ({"t": {"\ud800": 1}}, "'\\ud800'", "not valid UTF-8"),
    ],
)
def test_what_cannot_be_saved(tmp_path: Path, tree: Any, path: str, advice: str) -> None:
    """An unsupported leaf or key is named, with what to do, and nothing is left behind."""
    with pytest.raises(UnsupportedLeaf, match=advice) as caught:
        save(tmp_path, tree)
    assert caught.value.leaf == path
    assert list(tmp_path.iterdir()) == []


def test_a_donated_array_is_named(tmp_path: Path) -> None:
    """An array that was donated before the save is an UnsupportedLeaf."""
    array = jnp.arange(4.0)
    array.delete()
    with pytest.raises(UnsupportedLeaf, match="donated"):
        save(tmp_path, {"w": array})


def test_types_that_cannot_be_called(tmp_path: Path) -> None:
    """A class in `types` whose constructor wants something else says so."""

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Strict:
        value: Any

        def __init__(self) -> None:
            self.value = 1

    save(tmp_path, Strict())
    with pytest.raises(TreeMismatch, match="pass a `like`"):
        load(tmp_path, types=[Strict])


keys = st.text(max_size=4) | st.sampled_from(["a.b", "a", "b", "\\", "[", "__metadata__", ""])
trees = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(trees)
def test_paths_are_distinct_and_trees_rebuild(tree: Any) -> None:
    """However keys are chosen, no two leaves share a path, and the description rebuilds the
    tree.
    """
    leaves, _ = flatten(tree)
    description, paths = describe(tree)
    assert len(paths) == len(set(paths)) == len(leaves) and "__metadata__" not in paths
    assert rebuild(description, leaves) == tree


def test_plain_trees_have_dicts_and_lists_for_classes(tmp_path: Path) -> None:
    """With `plain=True` namedtuples and objects are dicts, numbered ones lists; classes that are
    known are made as before.
    """
    tree = {
        "p": Point(np.ones(1), (2, [3])),
        "t": Train(4, {"w": 5}),
        "n": Numbered(6, Pair(7, 8)),
        "e": optax.EmptyState(),
    }
    save(tmp_path / "c", tree)
    found = load(tmp_path / "c", plain=True)
    assert type(found["p"]) is dict and found["p"]["y"] == (2, [3])
    assert found | {"p": 0} == {
        "p": 0,
        "t": {"params": {"w": 5}, "step": 4},
        "n": [6, {"first": 7, "second": 8}],
        "e": {},
    }
    assert load(tmp_path / "c", plain=True, types=[Pair])["n"][1] == Pair(7, 8)
    with CheckpointManager(tmp_path / "root") as manager:
        manager.save(1, tree)
        manager.wait_until_finished()
        assert (
            manager.restore(plain=True)["t"]
            == found["t"]
            == manager.restore(like=SAVED, plain=True)["t"]
        )
        with pytest.raises(ValueError, match=r"plain=True is for a restore without a `like`"):
            manager.restore(like=tree, plain=True)


def test_a_node_is_a_mapping_of_its_fields(tmp_path: Path) -> None:
    """A Node may be indexed, iterated and asked for its keys."""
    save(tmp_path / "c", Train(4, {"w": 5}))
    node = load(tmp_path / "c")
    assert (
        isinstance(node, Node)
        and node["params"]["w"] == 5
        and "step" in node
        and set(node) == {"params", "step"}
        and len(node) == 2
    )
    with pytest.raises(KeyError):
        node["name"]
