"""Shardings in the record: described in JSON types, parsed, and shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from holdfast.checkpoint import SAVED, load, save, structure
from holdfast.checkpoint.arrays.sharding import (
    axes_of,
    describe_sharding,
    parse_sharding,
    show_sharding,
)


@pytest.mark.parametrize("spec", [(), ("x",), (None, "x"), (("x", "y"), None)])
def test_a_sharding_survives_json(spec: tuple[Any, ...]) -> None:
    """A NamedSharding's description is JSON, is parsed as itself, and has axes, sizes, devices and
    spec.
    """
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("x", "y"))
    description = describe_sharding(NamedSharding(mesh, PartitionSpec(*spec)), 2)
    assert parse_sharding(json.loads(json.dumps(description))) == description
    assert (
        description["axes"] == ["x", "y"]
        and description["sizes"] == [1, 1]
        and description["devices"] == [jax.devices()[0].id]
    )
    assert description["spec"] == [list(axes_of(entry)) for entry in spec]


def test_other_shardings_are_described_too() -> None:
    """One device is its id; what is neither has a text, which is shown as it is; an array without
    sharding is local.
    """
    device = jax.devices()[0]
    assert (
        describe_sharding(SingleDeviceSharding(device), 1)
        == {"device": device.id}
        == parse_sharding({"device": device.id})
    )
    assert (
        show_sharding({"device": 3}) == "device 3"
        and show_sharding({"other": "odd"}) == "odd"
        and show_sharding(None) == "local"
    )
    assert parse_sharding(None) is None and parse_sharding({"other": "odd"}) == {"other": "odd"}


def test_a_memory_kind_is_kept(tmp_path: Path) -> None:
    """An array in another memory than its devices' default comes back there as saved; the default
    is not in the description.
    """
    device = jax.devices()[0]
    other = next(
        memory.kind
        for memory in device.addressable_memories()
        if memory.kind != device.default_memory().kind
    )
    mesh = Mesh(np.array([device]), ("x",))
    shardings = [
        SingleDeviceSharding(device, memory_kind=other),
        NamedSharding(mesh, PartitionSpec("x"), memory_kind=other),
    ]
    for sharding in shardings:
        description = describe_sharding(sharding, 1)
        assert description["memory_kind"] == other and parse_sharding(description) == description
        assert show_sharding(description).endswith(f" in {other}")
    default = SingleDeviceSharding(device, memory_kind=device.default_memory().kind)
    assert "memory_kind" not in describe_sharding(default, 1)
    saved = [jax.device_put(np.arange(4.0), sharding) for sharding in shardings]
    save(tmp_path / "c", saved)
    restored = load(tmp_path / "c", SAVED)
    assert [array.sharding for array in restored] == shardings
    assert all(np.array_equal(array, np.arange(4.0)) for array in restored)


def test_a_spec_may_be_longer_than_the_shape(tmp_path: Path) -> None:
    """jax takes P(None) for a scalar: it is saved, comes back on its mesh, and is a target; in
    Orbax's layout too.
    """
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("x",)), PartitionSpec(None))
    step = jax.make_array_from_callback((), sharding, lambda _: np.asarray(7))
    assert len(step.sharding.spec) > step.ndim
    assert describe_sharding(sharding, 0)["spec"] == []
    for layout in ("holdfast", "orbax"):
        save(tmp_path / layout, {"step": step}, layout=layout)
        for like in (SAVED, {"step": step}):
            restored = load(tmp_path / layout, like)["step"]
            assert restored == 7 and restored.sharding.is_equivalent_to(sharding, 0)
        assert structure(tmp_path / layout).items


def test_orbax_notes_a_longer_spec(tmp_path: Path) -> None:
    """A scalar that Orbax saved with P(None) is read, and its structure is shown."""
    from orbax.checkpoint.experimental import v1

    sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("x",)), PartitionSpec(None))
    v1.save(
        tmp_path / "c", {"n": jax.make_array_from_callback((), sharding, lambda _: np.asarray(7))}
    )
    assert load(tmp_path / "c", SAVED)["n"].sharding.is_equivalent_to(sharding, 0)
    found = structure(tmp_path / "c").items["state"].tree["n"]
    assert (found.shape, found.sharding.spec) == ((), PartitionSpec())


def test_shown_for_people() -> None:
    """The spec and the mesh are one line; an array that no axis divides is replicated."""
    facts = {"axes": ["x", "y"], "sizes": [2, 4], "devices": list(range(8))}
    assert show_sharding(facts | {"spec": [["x", "y"], []]}) == "(x+y, -) on x=2 y=4"
    assert show_sharding(facts | {"spec": [[], []]}) == "replicated on x=2 y=4"
    details = {"spec": [["x"]], "axis_types": ["Explicit", "Auto"], "reduced": ["y"]}
    assert show_sharding(facts | details) == "(x) on x=2 y=4 (Explicit, Auto), reduced over y"


MESH = {"axes": ["x"], "sizes": [2], "devices": [0, 1], "spec": [["x"]]}


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"axes": []},
        {"axes": [], "sizes": [], "devices": [], "spec": "x"},
        {"device": 1, "other": ""},
        {"device": 1, "memory_kind": 5},
        {"device": "1"},
        {"other": 5},
        MESH | {"spec": [[{}], []]},
        MESH | {"spec": [["y"]]},
        MESH | {"spec": [["x"], ["x"]]},
        MESH | {"sizes": [1]},
        MESH | {"devices": [0]},
        MESH | {"axes": ["x", "x"], "sizes": [1, 2]},
        MESH | {"axis_types": ["Explicit", "Auto"]},
        MESH | {"axis_types": "Auto"},
        MESH | {"reduced": ["x"]},
        MESH | {"reduced": [5]},
        {"device": 1, "axis_types": []},
    ],
)
def test_what_is_no_description_is_refused(value: Any) -> None:
    """A description with other members, or of other types, is a ValueError."""
    with pytest.raises(ValueError, match="not one that holdfast writes"):
        parse_sharding(value)


def test_entries_of_a_spec() -> None:
    """None and UNCONSTRAINED are no axes, a name is one, a tuple several."""
    assert [axes_of(entry) for entry in (None, PartitionSpec.UNCONSTRAINED, "x", ("x", "y"))] == [
        (),
        (),
        ("x",),
        ("x", "y"),
    ]
