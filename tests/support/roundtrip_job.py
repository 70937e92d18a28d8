"""One process of a job that makes round trips on demand: it reads a request a line from a socket,
and answers with what went wrong.

A request's `tree` is of ["leaf", facts], ["none"], ["list" | "tuple" | "pair", nodes] and ["dict",
[[key, node]...]]; a place is {"devices", "sizes", "spec", "local"} (a mesh over devices of the job,
or of each process), {"device"} (one of this process's devices), "free" (uncommitted) or "numpy".
Every process makes the whole value of a leaf of its seed, so that each shard is checked where it
lies.
"""

from __future__ import annotations

import json
import math
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from holdfast.checkpoint import SAVED, TreeMismatch, load, save, verify
from holdfast.checkpoint.format.record import read_record
from holdfast.checkpoint.format.tree import FlatTree
from holdfast.checkpoint.saving import plan
from holdfast.checkpoint.storage.local import LocalStorage

CUTS = (plan.CHUNK_BYTES, plan.SHARED_CHUNK_BYTES, plan.SHARE_BYTES, plan.PACK_BYTES)


class Pair(NamedTuple):
    """A namedtuple, as a node of trees."""

    a: Any
    b: Any


def build(node: list[Any], make: Callable[[dict[str, Any]], Any]) -> Any:
    """Returns the tree that a request describes, with `make(facts)` as its leaves."""
    match node:
        case ["leaf", facts]:
            return make(facts)
        case ["none"]:
            return None
        case ["dict", pairs]:
            return {key: build(child, make) for key, child in pairs}
        case ["pair", children]:
            return Pair(*(build(child, make) for child in children))
    return {"list": list, "tuple": tuple}[node[0]](build(child, make) for child in node[1])


def truth(facts: dict[str, Any]) -> Any:
    """Returns a leaf's whole value on the host: of a typed key array its data, of a Python value
    itself.
    """
    if facts["kind"] == "value":
        return {
            "int": int,
            "float": float.fromhex,
            "bool": bool,
            "str": str,
            "bytes": bytes.fromhex,
        }[facts["type"]](facts["value"])
    dtype = jnp.dtype(facts["dtype"])
    random = np.random.default_rng(facts["seed"])
    shape = data_shape(facts)
    if facts["dtype"] in ("bool", "int4", "uint4"):
        return random.integers(0, 2 if facts["dtype"] == "bool" else 7, shape).astype(dtype)
    return np.frombuffer(random.bytes(math.prod(shape) * dtype.itemsize), dtype).reshape(
        shape
    )  # any bits, NaNs among them


def data_shape(facts: dict[str, Any]) -> tuple[int, ...]:
    return (*facts["shape"], 2) if facts["kind"] == "key" else tuple(facts["shape"])


def sharding_of(place: Any) -> Sharding | None:
    """Returns the sharding of a place; None where it says nothing of devices."""
    if isinstance(place, str):
        return None
    if "device" in place:
        local = jax.local_devices()
        return SingleDeviceSharding(local[place["device"] % len(local)])
    known = jax.local_devices() if place["local"] else jax.devices()
    devices = np.array([known[index] for index in place["devices"]], object).reshape(place["sizes"])
    spec = [tuple(axes) or None for axes in place["spec"]]
    return NamedSharding(Mesh(devices, tuple("xyz"[: devices.ndim])), PartitionSpec(*spec))


def put(facts: dict[str, Any]) -> Any:
    """Returns a leaf as it is to be saved."""
    value = truth(facts)
    place = facts.get("saved")
    if facts["kind"] == "value":
        return value
    if place == "numpy":
        return value[()] if facts["kind"] == "scalar" else value
    sharding = sharding_of(place)
    if sharding is None:
        array = jnp.asarray(value)
    else:
        array = jax.make_array_from_callback(
            value.shape, sharding, lambda index: value[index], dtype=value.dtype
        )
    return jax.random.wrap_key_data(array) if facts["kind"] == "key" else array


def like(facts: dict[str, Any]) -> Any:
    """Returns the `like` of a leaf: as it is wanted."""
    if facts["kind"] == "value":
        return truth(facts)
    if facts["wanted"] == "numpy":
        return (
            np.zeros((), facts["dtype"])[()]
            if facts["kind"] == "scalar"
            else np.zeros(facts["shape"], jnp.dtype(facts["dtype"]))
        )
    dtype = jax.random.key(0).dtype if facts["kind"] == "key" else jnp.dtype(facts["dtype"])
    return jax.ShapeDtypeStruct(tuple(facts["shape"]), dtype, sharding=sharding_of(facts["wanted"]))


def check(facts: dict[str, Any], found: Any, place: Any) -> None:
    """Asserts that a leaf came back bit by bit, where it was wanted. `place` None: numpy, or the
    sharding is not looked at.
    """
    whole = truth(facts)
    if facts["kind"] == "value":
        assert type(found) is type(whole) and found == whole, (facts, found)
        return
    if isinstance(found, jax.Array):
        sharding = None if place is None else sharding_of(place)
        assert sharding is None or found.sharding == sharding, (facts, found.sharding)
        found = jax.random.key_data(found) if facts["kind"] == "key" else found
        for shard in found.addressable_shards:
            assert np.asarray(shard.data).tobytes() == whole[shard.index].tobytes(), (
                facts,
                shard.index,
            )
    else:
        assert place in (None, "numpy") and isinstance(
            found, np.generic if facts["kind"] == "scalar" else np.ndarray
        ), (facts, type(found))
        assert found.tobytes() == whole.tobytes(), facts
    assert (found.dtype, found.shape) == (whole.dtype, whole.shape), (
        facts,
        found.dtype,
        found.shape,
    )


def check_tree(tree: list[Any], found: Any, place: Callable[[dict[str, Any]], Any]) -> None:
    """Asserts that all leaves came back, and in the structure that was saved."""
    leaves: list[dict[str, Any]] = []
    build(tree, lambda facts: leaves.append(facts))
    values = jax.tree_util.tree_leaves(found)
    assert len(values) == len(leaves), (len(values), len(leaves))
    order = jax.tree_util.tree_leaves(build(tree, lambda facts: json.dumps(facts)))
    for text, value in zip(order, values, strict=True):
        check(json.loads(text), value, place(json.loads(text)))


def do_save(request: dict[str, Any]) -> None:
    """Saves the tree, cut into pieces as small as asked for, and looks at it where it was saved."""
    for name, size in zip(
        ("CHUNK_BYTES", "SHARED_CHUNK_BYTES", "SHARE_BYTES", "PACK_BYTES"),
        request["cuts"] or CUTS,
        strict=True,
    ):
        setattr(plan, name, size)
    save(request["folder"], build(request["tree"], put))
    check_tree(request["tree"], load(request["folder"], SAVED), placed)


def placed(facts: dict[str, Any]) -> Any:
    """Returns the place that SAVED gives back: that of a mesh of the whole job; what is local to
    each process comes back anywhere.
    """
    place = facts.get("saved")
    return place if isinstance(place, dict) and not place.get("local", True) else None


def do_load(request: dict[str, Any]) -> None:
    """Loads it with a `like`, and without one."""
    folder = request["folder"]
    tree = request["tree"]
    wanted = build(tree, like)
    found = load(folder, wanted)
    assert jax.tree_util.tree_structure(found) == jax.tree_util.tree_structure(wanted)
    check_tree(tree, found, lambda facts: facts.get("wanted"))
    check_tree(tree, load(folder), lambda facts: None)
    verify(folder)


def do_load_once(request: dict[str, Any]) -> None:
    """Loads it, and every second leaf of it, with processes that pass on what they read."""
    folder = request["folder"]
    tree = request["tree"]
    found = load(folder, build(tree, like), read="once")
    check_tree(tree, found, lambda facts: facts.get("wanted"))
    paths = [leaf.path for leaf in read_record(LocalStorage(folder), "").items["state"].leaves]
    chosen = set(paths[::2])
    part = leaves_by_path(load(folder, partial=lambda path: path in chosen, read="once"))
    whole = leaves_by_path(load(folder, read="each"))
    for path, value in whole.items():
        assert (path in part) == (path in chosen), path
        if isinstance(value, np.ndarray | np.generic) and path in chosen:
            assert part[path].tobytes() == value.tobytes(), path


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """Returns the leaves by path, but those that were left out."""
    flat = FlatTree.of(tree)
    return dict(zip(flat.paths, flat.leaves, strict=True))


def do_refuse(request: dict[str, Any]) -> None:
    """Asks for a sharding that does not divide the one leaf, which is an error that names it."""
    with pytest.raises(TreeMismatch, match="divide") as caught:
        load(request["folder"], build(request["tree"], like))
    assert repr(caught.value.leaf) in str(caught.value)


DO = {
    "save": do_save,
    "load": do_load,
    "load_once": do_load_once,
    "refuse": do_refuse,
}


def main() -> None:
    index, count, coordinator, port = (int(text) for text in sys.argv[1:5])
    if count > 1:
        jax.distributed.initialize(f"127.0.0.1:{coordinator}", count, index)
    jax.devices()
    with (
        socket.create_connection(("127.0.0.1", port)) as connection,
        connection.makefile("rw") as stream,
    ):
        print(index, file=stream, flush=True)
        for line in stream:
            request = json.loads(line)
            trouble = ""
            try:
                DO[request["do"]](request)
            except Exception:
                trouble = traceback.format_exc()
            print(json.dumps(trouble), file=stream, flush=True)


main()
