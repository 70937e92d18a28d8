"""Saves and restores arrays on every kind of mesh, on 8 devices; prints what it has found, as JSON
by claim.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from claims import print_claims
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from orbax.checkpoint.experimental import v1

from holdfast.checkpoint import (
    SAVED,
    TreeMismatch,
    UnsupportedLeaf,
    convert,
    load,
    save,
    structure,
)
from holdfast.compat.orbax import StandardCheckpointer

folder = Path(sys.argv[3])
devices = np.array(jax.devices())
spec: Any = PartitionSpec
numbers = np.arange(32, dtype=np.float32).reshape(8, 4)


def mesh_of(*types: AxisType) -> Mesh:
    return Mesh(devices.reshape(4, 2), ("x", "y"), axis_types=types)


explicit = mesh_of(AxisType.Explicit, AxisType.Explicit)
mixed = mesh_of(AxisType.Explicit, AxisType.Auto)
auto = mesh_of(AxisType.Auto, AxisType.Auto)
SHARDINGS = {
    "explicit": NamedSharding(explicit, spec("x", "y")),
    "mixed": NamedSharding(mixed, spec(("y", "x"))),
    "auto": NamedSharding(auto, spec(None, "x")),
    "reduced": NamedSharding(explicit, spec("x", reduced={"y"})),
    "reduced twice": NamedSharding(explicit, spec(reduced={"x", "y"})),
    "some": NamedSharding(Mesh(devices[2:4], "d", axis_types=(AxisType.Explicit,)), spec("d")),
    "one": SingleDeviceSharding(devices[3]),
    "memory": NamedSharding(explicit, spec("x"), memory_kind="unpinned_host"),
    "memory of one": SingleDeviceSharding(devices[3], memory_kind="unpinned_host"),
}
STATE = {name: jax.device_put(numbers, sharding) for name, sharding in SHARDINGS.items()}
KEYS = {
    "key": jax.device_put(jax.random.key(3), NamedSharding(explicit, spec())),
    "keys": jax.device_put(
        jax.random.split(jax.random.key(3), 8), NamedSharding(explicit, spec("x"))
    ),
}


def data_of(leaf: Any) -> np.ndarray[Any, Any]:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def same(found: Any, wanted: dict[str, Any]) -> None:
    for name, leaf in wanted.items():
        np.testing.assert_array_equal(data_of(found[name]), data_of(leaf), name)
        check_sharding(name, found[name].sharding, leaf.sharding, leaf.ndim)


def check_sharding(name: str, found: Any, wanted: Any, rank: int) -> None:
    """P("x") and P("x", None) are one for an array of two axes; all else counts."""
    assert found.is_equivalent_to(wanted, rank), (name, found, wanted)
    assert found.memory_kind == wanted.memory_kind, (name, found, wanted)
    if isinstance(wanted, NamedSharding):
        assert found.mesh == wanted.mesh, (name, found, wanted)
        assert found.spec.reduced == wanted.spec.reduced, (name, found, wanted)


def tree_of(path: Path) -> Any:
    (item,) = structure(path).items.values()
    return item.tree


def as_saved(path: Path) -> None:
    """Shardings come back whole: as saved, as a structure says, as the arrays have them."""
    wanted = STATE | KEYS
    save(path, wanted)
    for like in (SAVED, tree_of(path), wanted):
        same(load(path, like), wanted)
    described = tree_of(path)
    for name, leaf in wanted.items():
        check_sharding(name, described[name].sharding, leaf.sharding, leaf.ndim)
    convert(path, f"{path} again", "holdfast")
    same(load(f"{path} again", SAVED), wanted)


def in_orbax(path: Path) -> None:
    """So they do in Orbax's layout, which Orbax still reads; and with Orbax's own words."""
    wanted = STATE | KEYS
    save(path / "ours", wanted, layout="orbax")
    for like in (SAVED, tree_of(path / "ours"), wanted):
        same(load(path / "ours", like), wanted)
    with StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "compat", STATE)
        checkpointer.wait_until_finished()
        same(checkpointer.restore(path / "compat"), STATE)
        same(checkpointer.restore(path / "compat", STATE), STATE)
    plain = {name: STATE[name] for name in ("explicit", "mixed", "auto", "some", "one")}
    same(v1.load(path / "ours", jax.tree.map(_struct, plain | KEYS | STATE)), plain)
    v1.save(path / "theirs", plain)
    same(load(path / "theirs", SAVED), plain)


def _struct(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)  # type: ignore[no-untyped-call]


def abstract(path: Path) -> None:
    """What eval_shape describes under a mesh lies on the mesh that is set; elsewhere the error
    says so.
    """
    wanted = {name: STATE[name] for name in ("explicit", "reduced")} | KEYS
    save(path, wanted)
    with jax.set_mesh(explicit):
        like = jax.eval_shape(lambda: jax.tree.map(jnp.copy, {"explicit": STATE["explicit"]}))
        assert not isinstance(like["explicit"].sharding.mesh, Mesh)
        same(load(path, like, partial=True), {"explicit": STATE["explicit"]})
        by_spec = {"explicit": jax.ShapeDtypeStruct((8, 4), np.float32, sharding=spec("x", "y"))}  # type: ignore[no-untyped-call]
        same(load(path, by_spec, partial=True), {"explicit": STATE["explicit"]})
        like = {name: jax.typeof(leaf) for name, leaf in wanted.items()}
        same(load(path, like), wanted)
    with jax.set_mesh(SHARDINGS["some"].mesh):  # type: ignore[union-attr]
        _refused(path, like, r"x=4 y=2, and d=2 is set; call this under jax.set_mesh\(mesh\)")
    _refused(path, like, "x=4 y=2, and none is set")
    _refused(path, by_spec, "'explicit' of `like` has no devices to lie on")
    nowhere = {"explicit": jax.typeof(jnp.asarray(numbers))}
    found = load(path, nowhere, partial=True)["explicit"]
    assert not found.committed


def _refused(path: Path, like: Any, words: str) -> None:
    try:
        load(path, like, partial=True)
    except TreeMismatch as error:
        assert re.search(words, str(error)), str(error)
        assert error.leaf in like, error.leaf
    else:
        raise AssertionError("a sharding without devices was taken")


def unreduced(path: Path) -> None:
    """Partial sums are no numbers: the error names the leaf, before a byte is written."""
    multiply = jax.jit(
        lambda a, b: jnp.einsum("ab,bc->ac", a, b, out_sharding=spec(None, None, unreduced={"x"}))
    )
    with jax.set_mesh(explicit):
        left = jax.device_put(numbers[:4, :4], NamedSharding(explicit, spec(None, "x")))
        right = jax.device_put(numbers[:4, :4], NamedSharding(explicit, spec("x", None)))
        partial = multiply(left, right)
    for layout in ("holdfast", "orbax"):
        try:
            save(path / layout, {"a": {"b": partial}}, layout=layout)
        except UnsupportedLeaf as error:
            assert error.leaf == "a.b" and "unreduced over x" in str(error), str(error)
        else:
            raise AssertionError("partial sums were saved")
        assert not list(path.rglob("*.safetensors"))


def odd_names(path: Path) -> None:
    """Axes that are named by other objects, as pmap's were, come back under texts."""
    odd = NamedSharding(Mesh(devices.reshape(4, 2), (0, ("b",))), spec(0))
    wanted = {"odd": jax.device_put(numbers, odd)}
    for layout in ("holdfast", "orbax"):
        for dtype in (None, jnp.float16):
            saved = path / f"{layout} {dtype is None}"
            save(saved, wanted, layout=layout, dtype=dtype)  # type: ignore[arg-type]
            found = load(saved, SAVED)["odd"]
            np.testing.assert_array_equal(np.asarray(found), numbers)
            assert found.sharding.is_equivalent_to(odd, 2), found.sharding
            same(load(saved, wanted, cast=True), wanted)
    mapped = {"mapped": jax.pmap(lambda x: x * 2)(numbers)}
    save(path / "pmap", mapped)
    for like in (SAVED, mapped):
        found = load(path / "pmap", like)["mapped"]
        assert found.sharding.is_equivalent_to(mapped["mapped"].sharding, 2), found.sharding


CLAIMS: dict[str, Callable[[Path], None]] = {
    claim.__name__: claim for claim in (as_saved, in_orbax, abstract, unreduced, odd_names)
}

print_claims(CLAIMS, folder)
