"""Leaf types of one's own: saved as their fields, made again where they are registered, Nodes where
not.
"""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holdfast.checkpoint import (
    CheckpointManager,
    Node,
    TreeMismatch,
    UnsupportedLeaf,
    load,
    register_leaf_type,
    save,
    structure,
)
from holdfast.checkpoint.format import leaf_types


class Quantized:
    """A leaf: int8 values and a scale."""

    def __init__(self, data: Any, scale: Any) -> None:
        self.data = data
        self.scale = scale

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Quantized)
            and bool((self.data == other.data).all())
            and bool(self.scale == other.scale)
        )

    __hash__ = None  # type: ignore[assignment]


def to_fields(value: Quantized) -> dict[str, Any]:
    return {"data": value.data, "scale": value.scale}


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    monkeypatch.setattr(leaf_types, "_by_class", {})
    monkeypatch.setattr(leaf_types, "_by_name", {})


def register() -> None:
    register_leaf_type(Quantized, to_fields, lambda fields: Quantized(**fields), name="quantized/1")
    register_leaf_type(
        datetime,
        lambda when: {"at": when.timestamp()},
        lambda fields: datetime.fromtimestamp(fields["at"], UTC),
    )


def tree(scale: float = 0.5) -> dict[str, Any]:
    return {
        "layers": [Quantized(jnp.arange(4, dtype=jnp.int8), np.float32(scale)), jnp.ones(2)],
        "when": datetime(2026, 1, 2, tzinfo=UTC),
    }


def test_values_come_back_as_what_they_were(tmp_path: Path) -> None:
    """With a `like` of values, and without one, plain or not; renamed leaves and other items do not
    mind.
    """
    register()
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, tree(step)).wait()
        like = tree()
        found = manager.restore(2, like)
        assert found["layers"][0] == tree(2)["layers"][0] and isinstance(
            found["layers"][0].data, jax.Array
        )
        assert found["when"] == like["when"] and like["layers"][0].scale == 0.5
        for plain in (True, False):
            found = manager.restore(1, plain=plain)
            assert found["layers"][0] == tree(1)["layers"][0] and isinstance(
                found["layers"][0].data, np.ndarray
            )
        assert (
            load(tmp_path, structure(tmp_path).items["state"].tree)["layers"][0]
            == tree(2)["layers"][0]
        )


def test_a_reader_without_the_type_sees_fields(tmp_path: Path) -> None:
    """A Node, or a dict; a `like` that has such a value is told how to register; and no reader
    imports a thing.
    """
    register()
    save(tmp_path, tree())
    leaf_types._by_class.clear()
    leaf_types._by_name.clear()
    node = load(tmp_path)["layers"][0]
    assert (
        isinstance(node, Node)
        and node.type_name == "quantized/1"
        and node["scale"] == 0.5
        and node["data"].tolist() == [0, 1, 2, 3]
    )
    assert load(tmp_path, plain=True)["layers"][0]["data"].tolist() == [0, 1, 2, 3]
    with pytest.raises(
        TreeMismatch,
        match=(
            r"the leaf 'layers\.0' of `like` is a .*:Quantized, and saved as a tree; register its"
            r" class"
        ),
    ):
        load(tmp_path, tree() | {"when": Node("datetime:datetime", {"at": 0.0})})
    with pytest.raises(
        UnsupportedLeaf,
        match=r"'layers\.0' is a .*:Quantized, which cannot be saved; .*register_leaf_type",
    ):
        save(tmp_path / "more", tree())
    look = "assert not any('test_leaf' in name for name in sys.modules)"
    code = f"import sys; from holdfast.checkpoint import load; load({str(tmp_path)!r}); {look}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_leaf_types_may_hold_each_other(tmp_path: Path) -> None:
    """A field may be a tree with values of registered types."""
    register()

    class Pair:
        def __init__(self, items: list[Any]) -> None:
            self.items = items

    register_leaf_type(
        Pair, lambda pair: {"items": pair.items}, lambda fields: Pair(fields["items"]), name="pair"
    )
    save(tmp_path, {"pair": Pair([Quantized(jnp.ones(2), 1.0), {"x": 3}])})
    for like in (None, {"pair": Pair([Quantized(jnp.zeros(2), 0.0), {"x": 0}])}):
        found = load(tmp_path, like)["pair"]
        assert (
            type(found) is Pair
            and found.items[0] == Quantized(jnp.ones(2), 1.0)
            and found.items[1] == {"x": 3}
        )


def test_functions_that_fail_are_named(tmp_path: Path) -> None:
    """Which leaf could not be taken apart, and which type could not be made of which fields."""
    register_leaf_type(
        Quantized,
        lambda value: {"data": value.data},
        lambda fields: Quantized(fields["data"], fields["scale"]),
        name="q",
    )
    save(tmp_path, {"a": Quantized(jnp.ones(2), 1.0)})
    with pytest.raises(
        TreeMismatch,
        match=r"the leaf type 'q' cannot be made of its fields \['data'\]: KeyError: 'scale'",
    ):
        load(tmp_path)
    register_leaf_type(
        Quantized, lambda value: value.nothing, lambda fields: Quantized(**fields), name="q"
    )
    with pytest.raises(
        UnsupportedLeaf,
        match=r"the leaf 'a' is a .*Quantized, whose to_fields failed: AttributeError",
    ):
        save(tmp_path / "more", {"a": Quantized(jnp.ones(2), 1.0)})


def test_a_name_is_one_class_s() -> None:
    """The same class may be registered again."""
    register()
    register()
    with pytest.raises(ValueError, match="the name 'quantized/1' is another class's"):
        register_leaf_type(
            Path,
            lambda path: {"path": str(path)},
            lambda fields: Path(fields["path"]),
            name="quantized/1",
        )


@pytest.mark.parametrize("fields", [{1: 2, "1": 3}, {0: 2}, {True: 2}])
def test_fields_are_called_by_strings(tmp_path: Path, fields: dict[Any, Any]) -> None:
    """A field of another name would come back as another one: it is refused by name."""
    register_leaf_type(datetime, lambda when: fields, lambda found: found)
    with pytest.raises(UnsupportedLeaf, match=r"'when' .* a field is called .*, expected a str"):
        save(tmp_path, {"when": datetime(2026, 1, 2, tzinfo=UTC)})
    assert list(tmp_path.iterdir()) == []
