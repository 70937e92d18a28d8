"""Structures: what a checkpoint holds, seen without reading its arrays, and taken as a `like`."""

from __future__ import annotations

import os
from collections import namedtuple
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from holdfast.checkpoint import (
    CheckpointManager,
    Json,
    StepNotFound,
    TreeMismatch,
    load,
    save,
    structure,
)
from holdfast.checkpoint.layouts.detect import open_checkpoint
from holdfast.checkpoint.layouts.inspection import ItemStructure, Structure, structure_of
from holdfast.checkpoint.storage.counting import CountingStorage
from tests.support.layouts import LAYOUTS, write
from tests.support.orbax import assert_same, rich_tree

Moments = namedtuple("Moments", "mu nu")


def test_a_tree_has_shapes_dtypes_and_shardings(tmp_path: Path) -> None:
    """Arrays are ShapeDtypeStructs with their saved shardings, values are themselves, and the
    containers are those saved.
    """
    sharding = jax.NamedSharding(jax.sharding.Mesh(np.array(jax.devices()), "d"), jax.P("d"))
    sharded = jax.device_put(jnp.zeros((jax.device_count() * 2, 3), jnp.bfloat16), sharding)
    state = {
        "m": Moments(sharded, (np.zeros(3), [np.float16(2)])),
        "key": jax.random.split(jax.random.key(1, impl="rbg"), 3),
        "lr": 0.5,
        "none": None,
    }
    save(tmp_path / "c", state, step=3, metadata={"run": "a"})
    found = structure(tmp_path / "c")
    assert (found.layout, found.step, found.metadata, found.metrics) == (
        "holdfast",
        3,
        {"run": "a"},
        {},
    )
    assert found.items["state"].kind == "tree"
    tree = found.items["state"].tree
    assert type(tree["m"]).__name__ == "Moments" and tree["lr"] == 0.5 and tree["none"] is None
    mu, (nu, (scale,)), key = tree["m"].mu, tree["m"].nu, tree["key"]
    assert (mu.shape, mu.dtype, mu.sharding) == (sharded.shape, sharded.dtype, sharding)
    assert (nu.shape, nu.dtype, nu.sharding, scale.dtype) == ((3,), np.float64, None, np.float16)
    assert (key.shape, key.dtype) == ((3,), state["key"].dtype)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in (mu, nu, scale, key))
    assert found.items["state"].nbytes == sharded.nbytes + 24 + 2 + 3 * 16


def only_item(found: Structure) -> ItemStructure:
    (item,) = found.items.values()
    return item


@pytest.mark.parametrize("layout", ["holdfast", "orbax"])
def test_an_items_tree_is_a_like(layout: Any, tmp_path: Path) -> None:
    """Restoring like the structure gives every leaf back as it was saved: bits, kinds and
    shardings.
    """
    tree = rich_tree() | (
        {"bytes": b"\0x", "complex": 2j, "scalar": np.float32(2), "nothing": jnp.zeros((0, 3))}
        if layout == "holdfast"
        else {}
    )
    save(tmp_path / "c", tree, layout=layout)
    like = only_item(structure(tmp_path / "c")).tree
    found = load(tmp_path / "c", like)
    expected = (
        tree
        if layout == "holdfast"
        else load(tmp_path / "c", tree) | {"tuple": (), "pair": dict(tree["pair"]._asdict())}
    )
    assert_same(jax.tree.leaves(found), jax.tree.leaves(expected))
    assert found["sharded"].sharding.is_equivalent_to(tree["sharded"].sharding, 1)
    assert type(found["np64"]) is np.ndarray and isinstance(found["zeros"], jax.Array)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_a_structure_and_no_array_is_read(layout: str, tmp_path: Path) -> None:
    """Shapes and dtypes of holdfast's, Orbax's and safetensors checkpoints; the reads are those of
    the records alone.
    """
    state = {"w": jnp.zeros((256, 1024)), "n": jnp.int8(3)}
    save(tmp_path / "h", state)
    path = tmp_path / "h"
    if layout == "orbax":
        save(path := tmp_path / "o", state, layout="orbax")
    elif layout == "safetensors":
        path = Path(write("safetensors", str(tmp_path / "s")))
    read: list[int] = []
    found = structure_of(
        open_checkpoint(path, wrap=lambda storage: CountingStorage(storage, read.append))
    )
    assert found.layout == layout and sum(read) < 64 << 10
    tree = only_item(found).tree
    leaves = jax.tree.leaves(tree)
    shapes = [leaf.shape for leaf in leaves]
    assert shapes == ([(4,), (5, 12), ()] if layout == "safetensors" else [(), (256, 1024)])
    assert_same([leaf.shape for leaf in jax.tree.leaves(load(path, tree))], shapes)


def test_a_manager_has_the_structure_of_each_step(tmp_path: Path) -> None:
    """Items of each kind by name, with metrics and metadata; of steps of another library too; a
    step that is not there is StepNotFound.
    """
    save(tmp_path / "4", {"x": jnp.ones(3)}, layout="orbax")
    with CheckpointManager(tmp_path) as manager:
        manager.save(
            5,
            items={"state": {"w": jnp.ones(2)}, "config": Json({"a": 1})},
            metrics={"loss": 2.0},
            metadata=[1],
        )
        manager.wait_until_finished()
        found = manager.structure(5)
        assert {name: item.kind for name, item in found.items.items()} == {
            "state": "tree",
            "config": "json",
        }
        assert (found.step, found.metrics, found.metadata, found.items["config"].tree) == (
            5,
            {"loss": 2.0},
            [1],
            None,
        )
        assert found.path == os.path.join(tmp_path, "5") and found.finished_s is not None
        theirs = manager.structure(4)
        assert theirs.layout == "orbax"
        assert theirs.items["default"].tree["x"].shape == (3,)
        with pytest.raises(StepNotFound, match="6"):
            manager.structure(6)


def test_a_sharding_that_does_not_fit_here_is_left_out(tmp_path: Path) -> None:
    """A record of more devices than there are gives shapes without shardings: where jax puts
    them.
    """
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), "d")
    save(
        tmp_path / "c", {"w": jax.device_put(jnp.arange(4.0), jax.NamedSharding(mesh, jax.P("d")))}
    )
    checkpoint: Any = open_checkpoint(tmp_path / "c")
    (leaf,) = checkpoint.item("state").leaves
    leaf.sharding["devices"][0] = 10**6
    found = structure_of(checkpoint).items["state"].tree["w"]
    assert found.sharding is None and found.shape == (4,)


def test_a_node_of_the_structure_is_a_like(tmp_path: Path) -> None:
    """A class that the record names is a Node in the structure, and restores as one."""

    class State(struct.PyTreeNode):  # type: ignore[misc]
        w: Any
        step: int

    save(tmp_path / "c", State(jnp.ones(2), 3))
    like = structure(tmp_path / "c").items["state"].tree
    assert like["w"].shape == (2,) and load(tmp_path / "c", like)["step"] == 3
    with pytest.raises(TreeMismatch, match="'w'"):
        load(tmp_path / "c", {"w": like["w"].update(shape=(3,)), "step": 0})
