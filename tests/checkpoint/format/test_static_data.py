"""Static data of nodes whose children go by position: the canonical form, what is compared, and
what a restore says where they differ.
"""

from __future__ import annotations

import collections
import enum
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint import (
    SAVED,
    CheckpointManager,
    TreeMismatch,
    convert,
    load,
    save,
    structure,
)
from holdfast.checkpoint.format.static_data import (
    are_alike,
    canonical_static_data,
    parse_static_data,
    show_static_data,
)
from holdfast.checkpoint.storage.path import StorePath
from holdfast.checkpoint.tools.merge import merge_checkpoints


class Named(dict[str, Any]):
    """A dict that is registered without keys."""


jax.tree_util.register_pytree_node(
    Named,
    lambda node: (tuple(node.values()), tuple(node)),
    lambda keys, of: Named(zip(keys, of, strict=True)),
)


class Module:
    """A module whose arrays are children in the order of their assignment, all else static."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)

    def flatten(self) -> tuple[tuple[Any, ...], Any]:
        arrays = {name: own for name, own in vars(self).items() if hasattr(own, "shape")}
        rest = {name: own for name, own in vars(self).items() if name not in arrays}
        return tuple(arrays.values()), (tuple(arrays), rest)

    @classmethod
    def unflatten(cls, names: Any, children: Any) -> Module:
        return cls(**dict(zip(names[0], children, strict=True)), **names[1])


jax.tree_util.register_pytree_node(Module, Module.flatten, Module.unflatten)


class SameKeys:
    """A node that gives all its children one key."""

    def __init__(self, names: tuple[str, ...], children: Any) -> None:
        self.names = names
        self.children = children


jax.tree_util.register_pytree_with_keys(
    SameKeys,
    lambda node: ([(jax.tree_util.GetAttrKey("w"), own) for own in node.children], node.names),
    SameKeys,
)


class Mode(enum.StrEnum):
    FAST = "fast"


class Level(enum.IntEnum):
    ONE = 1


Q = np.arange(3.0)
K = Q + 10


@pytest.mark.parametrize(
    ("saved", "like", "expected", "found"),
    [
        (Named(q=Q, k=K), Named(k=K, q=Q), "('k', 'q')", "('q', 'k')"),
        (Module(q=Q, k=K), Module(k=K, q=Q), "(('k', 'q'), {})", "(('q', 'k'), {})"),
        (
            Module(q=Q, n=4, mode=Mode.FAST),
            Module(q=Q, n=5, mode="fast"),
            "(('q'), {'mode': 'fast', 'n': 5})",
            "(('q'), {'mode': 'fast', 'n': 4})",
        ),
        (SameKeys(("q", "k"), [Q, K]), SameKeys(("k", "q"), [K, Q]), "('k', 'q')", "('q', 'k')"),
    ],
)
def test_children_do_not_swap(
    tmp_path: Path, saved: Any, like: Any, expected: str, found: str
) -> None:
    """Dict subclasses, modules, and nodes whose keys are equal: other static data are an error
    that names the node and both sides, for a manager too; the same come back.
    """
    with CheckpointManager(tmp_path / "m") as manager:
        manager.save(1, {"net": [saved, 5]}).wait()
        with pytest.raises(TreeMismatch, match=r"the children of 'net\.0' go by .* positions") as e:
            manager.restore(like={"net": [like, 5]})
        assert (e.value.leaf, e.value.expected, e.value.found) == ("net.0", expected, found)
        back = manager.restore(like={"net": [saved, 5]})["net"][0]
        assert type(back) is type(saved)
        for one, other in zip(jax.tree.leaves(back), jax.tree.leaves(saved), strict=True):
            np.testing.assert_array_equal(one, other)
    save(tmp_path / "root", saved)
    with pytest.raises(TreeMismatch, match="the children of 'the root'"):
        load(tmp_path / "root", like)


def test_what_is_not_compared(tmp_path: Path) -> None:
    """Functions, objects and records of before; nodes of which no leaf is wanted; what a rename
    says; restores without a class.
    """
    save(tmp_path / "f", Module(q=Q, act=lambda x: x, shape=object()))
    assert load(tmp_path / "f", Module(q=K, act=abs, shape=5)).act is abs
    saved = {"a": Named(q=Q, k=K), "b": Q}
    swapped = {"a": Named(k=K, q=Q), "b": K}
    save(tmp_path / "c", saved)
    kept = load(tmp_path / "c", swapped, partial=lambda path: path == "b")
    assert kept["a"]["k"] is swapped["a"]["k"] and (kept["b"] == Q).all()
    named = load(tmp_path / "c", swapped, rename={"a.0": "a.1", "a.1": "a.0"})
    assert (named["a"]["k"] == K).all() and (named["a"]["q"] == Q).all()
    for like in (None, SAVED, structure(tmp_path / "c").items["state"].tree):
        found = load(tmp_path / "c", like)["a"]
        assert (found[0] == Q).all() and (found[1] == K).all()
    path = tmp_path / "c" / "checkpoint.json"
    record = json.loads(path.read_bytes())
    assert record["items"]["state"].pop("statics")
    path.write_bytes(_sealed(record))
    assert (load(tmp_path / "c", swapped)["a"]["k"] == Q).all()


def _sealed(record: dict[str, Any]) -> bytes:
    from holdfast.checkpoint.storage.tombstone import sealed

    del record["crc32c"]
    return sealed(json.dumps(record).encode()[:-1])


def test_tools_keep_static_data(tmp_path: Path) -> None:
    """A conversion and a merge have them too."""
    save(tmp_path / "a", {"a": Named(q=Q, k=K)})
    save(tmp_path / "b", {"b": Named(x=Q, y=K)})
    convert(tmp_path / "a", tmp_path / "converted", "holdfast")
    parts = [f"{tmp_path}/{name}" for name in "ab"]
    merge_checkpoints(parts, StorePath.of(tmp_path / "merged"), "state")
    for name, like in (
        ("converted", {"a": Named(k=K, q=Q)}),
        ("merged", {"a": Named(q=Q, k=K), "b": Named(y=K, x=Q)}),
    ):
        with pytest.raises(TreeMismatch, match="go by their positions"):
            load(tmp_path / name, like)
    assert (load(tmp_path / "merged", {"a": Named(q=Q, k=K)}, partial=True)["a"]["k"] == K).all()


def test_static_enums_are_nodes(tmp_path: Path) -> None:
    """Enums that are texts or numbers, registered as static, are no leaves, whatever was seen of
    their class before.
    """

    class Kind(enum.StrEnum):
        A = "a"

    class Rank(enum.IntEnum):
        A = 1

    for member in (Kind.A, Rank.A):
        with pytest.raises(Exception, match="which cannot be saved"):
            save(tmp_path / "unregistered", {"m": member, "w": Q})
        jax.tree_util.register_static(type(member))
        path = tmp_path / type(member).__name__
        save(path, {"m": member, "w": Q})
        found = load(path, {"m": member, "w": K})
        assert found["m"] is member and (found["w"] == Q).all()
        assert (load(path)["w"] == Q).all()


ARRAYS: dict[str, Callable[[], Any]] = {
    "numpy": lambda: np.arange(3),
    "jax": lambda: jnp.arange(3),
    "in a dict": lambda: {"table": np.arange(3)},
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_static_arrays_are_saved_over_and_over(tmp_path: Path, kind: str) -> None:
    """Static data whose comparison fails are another plan, and no error."""
    with CheckpointManager(tmp_path) as manager:
        for step in range(3):
            manager.save(step, Module(w=Q + step, table=[ARRAYS[kind]()])).wait()
        found = manager.restore(like=Module(w=Q, table=[ARRAYS[kind]()]))
    np.testing.assert_array_equal(found.w, Q + 2)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(VALUES, VALUES)
def test_forms_are_canonical(one: Any, other: Any) -> None:
    """Equal data have one form, whatever the order of their dicts; it survives JSON, and readers
    take it; forms of texts and whole numbers are alike only where the data are equal.
    """
    form = canonical_static_data(one)
    assert parse_static_data(json.loads(json.dumps(form))) == form
    assert are_alike(form, form) and isinstance(show_static_data(form), str)
    if isinstance(one, dict):
        assert canonical_static_data(dict(reversed(one.items()))) == form
    theirs = canonical_static_data(other)
    assert are_alike(form, theirs) == are_alike(theirs, form)
    if one is not None and other is not None and are_alike(form, theirs):
        assert repr(one) == repr(other) or _same(one, other), (one, other)


def _same(one: Any, other: Any) -> bool:
    """Compares as `==` does, but that NaN is NaN."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return bool(one == other) or (one != one and other != other)


def test_forms_for_people_and_readers() -> None:
    """Enums are their values; what is long has a digest; what a later version writes is equal to
    all; a form that no writer makes is refused.
    """
    assert canonical_static_data((Mode.FAST, Level.ONE, np.int8(3))) == canonical_static_data(
        ["fast", 1, 3]
    )
    assert are_alike(canonical_static_data((1,)), canonical_static_data((1.0,)))
    assert not are_alike(canonical_static_data((1,)), canonical_static_data(("1",)))
    ordered = collections.OrderedDict(b=1, a=2)
    assert show_static_data(canonical_static_data((ordered, None, abs))) == (
        "({'a': 2, 'b': 1}, None, ...)"
    )
    long = canonical_static_data(tuple(range(10_000)))
    assert len(json.dumps(long)) < 100 and are_alike(long, long)
    assert not are_alike(long, canonical_static_data(tuple(range(1, 10_001))))
    assert "SHA-256" in show_static_data(long)
    assert parse_static_data({"tuple": [["decimal", "1"], {"set": []}, 5]}) == {
        "tuple": [None, None, None]
    }
    with pytest.raises(ValueError, match="zz"):
        parse_static_data({"tuple": [["int", "zz"]]})
    nested: Any = ()
    for _ in range(500):
        nested = (nested,)
    assert are_alike(canonical_static_data(nested), canonical_static_data((nested,)))
