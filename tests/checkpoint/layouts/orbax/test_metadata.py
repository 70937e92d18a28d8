"""Orbax's JSON files, parsed and taken back: pure functions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint import Corrupt, HostileCheckpoint
from holdfast.checkpoint.layouts.orbax.metadata import (
    MAX_DEPTH,
    TEMPORARY,
    StoredLeaf,
    build_tree,
    empty_value,
    parse_tree_metadata,
    prng_name,
    read_sharding,
    sharding_json,
    step_of,
)


def entry(keys: list[tuple[str, int]], **about: Any) -> dict[str, Any]:
    return {
        "key_metadata": [{"key": key, "key_type": kind} for key, kind in keys],
        "value_metadata": about,
    }


def test_a_tree_is_parsed() -> None:
    """Keys with their kinds, the value's type, and whether it has data; flags are None where the
    file has none.
    """
    lines = {
        "('a', '0')": entry([("a", 2), ("0", 1)], value_type="np.ndarray"),
        "('e',)": entry([("e", 2)], value_type="Dict", skip_deserialize=True),
    }
    found = parse_tree_metadata(
        json.dumps({"tree_metadata": lines, "use_zarr3": True}).encode(), "f"
    )
    assert found.leaves == (
        StoredLeaf((("a", False), ("0", True)), "np.ndarray", False),
        StoredLeaf((("e", False),), "Dict", True),
    )
    assert (found.use_ocdbt, found.use_zarr3, found.fills) == (None, True, True) and found.leaves[
        0
    ].name == "a.0"


OTHERS = (
    b"",
    b"[]",
    b"{}",
    b'{"tree_metadata": []}',
    b'{"tree_metadata": {"x": {}}}',
    b'{"tree_metadata": {"x": 1}}',
    b"[" * 100_000,
)


@pytest.mark.parametrize("data", OTHERS)
def test_other_files_are_corrupt(data: bytes) -> None:
    """What does not describe a tree of Orbax's is Corrupt and names the file."""
    with pytest.raises(Corrupt) as caught:
        parse_tree_metadata(data, "the/file")
    assert caught.value.file == "the/file"


def test_a_leaf_too_deep_is_hostile() -> None:
    """A path of more keys than any tree has is refused before anything is built of it."""
    lines = {"x": entry([("a", 2)] * (MAX_DEPTH + 1))}
    with pytest.raises(HostileCheckpoint, match=f"{MAX_DEPTH + 1} keys deep"):
        parse_tree_metadata(json.dumps({"tree_metadata": lines}).encode(), "f")


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, min_size=1, max_size=12) | st.dictionaries(
        st.text("ab", min_size=1), inner, min_size=1
    )


TREES = st.recursive(st.integers(), containers, max_leaves=20)


@given(TREES)
def test_trees_are_built_of_their_keys(tree: Any) -> None:
    """Nested dicts and lists come back from the keys of their leaves, in the order of the
    indices.
    """

    def leaves(
        node: Any, keys: tuple[tuple[str, bool], ...]
    ) -> Iterator[tuple[tuple[tuple[str, bool], ...], Any]]:
        if isinstance(node, dict):
            for key, value in node.items():
                yield from leaves(value, (*keys, (key, False)))
        elif isinstance(node, list):
            for index, value in enumerate(node):
                yield from leaves(value, (*keys, (str(index), True)))
        else:
            yield keys, node

    assert build_tree(dict(leaves(tree, ()))) == tree


NAMES = {
    "5": 5,
    "005": 5,
    "ck_5": 5,
    "a_b_007": 7,
    "ck5": None,
    "5a": None,
    "": None,
    f"5{TEMPORARY}": None,
    "1" * 19: None,
}


@pytest.mark.parametrize(("name", "step"), NAMES.items())
def test_names_of_steps(name: str, step: int | None) -> None:
    """A step's folder is a number with or without zeros and a prefix; what is unfinished is
    none.
    """
    assert step_of(name) == step


def test_shardings_there_and_back() -> None:
    """A sharding of a record is written as Orbax has it and read as it was, whole; what it has no
    words for lies on the usual device. What cannot be read is None.
    """
    description = {
        "axes": ["x", "y", "z"],
        "sizes": [2, 2, 1],
        "devices": [3, 1, 2, 0],
        "spec": [["x", "y"], [], ["z"]],
    }
    names = {0: "TFRT_CPU_0", 3: "TFRT_CPU_3"}
    details = {"axis_types": ["Explicit", "Auto", "Auto"], "memory_kind": "pinned_host"}
    reduced = {"spec": [["x"], []], "reduced": ["y", "z"]}
    for each in (
        description,
        description | details,
        description | details | reduced,
        {"device": 3},
        {"device": 3, "memory_kind": "pinned_host"},
    ):
        written = sharding_json(each, names, 0)
        assert read_sharding(json.loads(json.dumps(written))) == each
    for unknown in (None, {"other": "odd"}, {"device": 7}):
        assert read_sharding(sharding_json(unknown, names, 0)) == {"device": 0}
    assert read_sharding({"sharding_type": "SingleDeviceSharding", "device_str": "TFRT_CPU_3"}) == {
        "device": 3
    }
    assert read_sharding({"sharding_type": "Other"}) is None and read_sharding({}) is None
    assert (
        empty_value("Dict") == {}
        and empty_value("Tuple") == ()
        and empty_value("None") is None
        and prng_name("fry") == "threefry2x32"
    )
