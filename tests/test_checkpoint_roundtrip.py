"""The round trip: trees x shardings x topologies, bit-exact, with real processes and real devices."""

from __future__ import annotations

import itertools
import json
import socket
from pathlib import Path

import pytest
from cluster import run_processes

# One process with 8 devices: hypothesis draws meshes over 1 to 8 of them, with 1 to 3 axes, and a spec for save and for restore.
PROPERTIES = """
import itertools, math, sys, tempfile
import jax, numpy as np, ml_dtypes
from hypothesis import given, seed, settings, strategies as st, HealthCheck
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from holdfast.checkpoint import SAVED, load, save, verify

DTYPES = ["float32", "bfloat16", "int8", "bool", "uint32", "float8_e4m3fn", "complex64", "float16", "int4"]
MESHES = [shape for rank in (1, 2, 3) for shape in itertools.product((1, 2, 4, 8), repeat=rank) if math.prod(shape) <= 8]

@st.composite
def shardings(draw, shape):
    if draw(st.integers(0, 5)) == 0:
        return SingleDeviceSharding(draw(st.sampled_from(jax.devices())))
    sizes = draw(st.sampled_from(MESHES))
    devices = draw(st.permutations(jax.devices()))[: math.prod(sizes)]
    mesh = Mesh(np.array(devices).reshape(sizes), tuple("xyz"[: len(sizes)]))
    spec, free = [], list(mesh.axis_names)
    for size in shape:
        axes = []
        for name in draw(st.lists(st.sampled_from(free), unique=True, max_size=2)) if free else []:
            if size % (math.prod(mesh.shape[a] for a in axes) * mesh.shape[name]) == 0:
                axes.append(name)
                free.remove(name)
        spec.append(tuple(axes) or None)
    return NamedSharding(mesh, PartitionSpec(*spec))

@st.composite
def leaves(draw):
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 8, 16, 24]), max_size=3)))
    dtype = np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name := draw(st.sampled_from(DTYPES))) else np.dtype(name)
    raw = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 2 if name == "bool" else 8 if name == "int4" else 120, shape)
    return raw.astype(dtype), draw(shardings(shape)), draw(shardings(shape))

@seed(int(sys.argv[4]))
@settings(max_examples=int(sys.argv[3]), deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.lists(leaves(), min_size=1, max_size=6))
def check(drawn):
    tree = {f"l{i}": jax.device_put(value, sharding) for i, (value, sharding, _) in enumerate(drawn)}
    with tempfile.TemporaryDirectory() as folder:
        save(folder, tree)
        verify(folder)
        like = {f"l{i}": jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=s) for i, (v, _, s) in enumerate(drawn)}
        found, same, plain = load(folder, like), load(folder, SAVED), load(folder)
    for i, (value, first, second) in enumerate(drawn):
        name = f"l{i}"
        for array, sharding in ((found[name], second), (same[name], first)):
            assert array.sharding == sharding and array.dtype == value.dtype and array.shape == value.shape
            for shard in array.addressable_shards:
                assert np.asarray(shard.data).tobytes() == value[shard.index].tobytes()
        assert plain[name].tobytes() == value.tobytes() and plain[name].dtype == value.dtype

check()
print("held")
"""


@pytest.mark.parametrize(("examples", "draw"), [(60, 0), *(pytest.param(300, draw, marks=pytest.mark.slow) for draw in range(1, 6))])
@pytest.mark.timeout(200)
def test_any_sharding_to_any_other(examples: int, draw: int) -> None:
    """Whatever the tree, the saved sharding and the wanted one over 1 to 8 devices in meshes of 1 to 3 axes, every bit comes back."""
    assert "held" in run_processes(PROPERTIES, 1, arguments=[examples, draw], devices=8, timeout_s=170)[0]


# Several processes: all draw the same tree from a seed; arrays are functions of their index, so that each shard is checked where it lies.
TOPOLOGY = """
import random, sys
import jax, jax.numpy as jnp, numpy as np
index, count, port, mode, folder, seed = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6], int(sys.argv[6])
if count > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", count, index)
from jax.sharding import NamedSharding, PartitionSpec
from holdfast.checkpoint import SaveFailed, load, save, verify
from holdfast.checkpoint._engine import read_record, restore_item
from holdfast.checkpoint._local import LocalStorage

values, place = random.Random(seed), random.Random(f"{seed} {mode} {count} {jax.device_count()}")

def mesh():
    left, sizes = jax.device_count(), []
    while len(sizes) < 2:
        sizes.append(place.choice([n for n in (1, 2, 4, 8) if left % n == 0]))
        left //= sizes[-1]
    return jax.make_mesh((*sizes, left), ("x", "y", "z"))

def sharding(shape):
    axes = place.sample(["x", "y", "z", None, ("x", "y"), ("z", "x")], 6)
    spec, used = [], set()
    for _ in shape:
        axis = next(a for a in axes if a is None or not used & set(a if isinstance(a, tuple) else (a,)))
        used |= set(() if axis is None else axis if isinstance(axis, tuple) else (axis,))
        axes.remove(axis)
        axes.append(None)
        spec.append(axis)
    return NamedSharding(MESH, PartitionSpec(*spec))

tree, like, truth = {}, {}, {}
for i in range(12):
    MESH = mesh()
    shape = tuple(values.choice([8, 16, 64]) for _ in range(values.randint(1, 3)))
    dtype = values.choice(["float32", "bfloat16", "int8", "uint16"])
    value = np.arange(np.prod(shape)).reshape(shape) * (i + 1) % 117
    truth[f"a{i}"] = value = value.astype(jnp.dtype(dtype))
    where = sharding(shape)
    tree[f"a{i}"] = jax.make_array_from_callback(shape, where, lambda index: value[index])
    like[f"a{i}"] = jax.ShapeDtypeStruct(shape, value.dtype, sharding=where)
host = {"count": jnp.int32(5), "numpy": np.arange(7.0), "text": "t", "none": None, "keys": jax.random.split(jax.random.key(3), 4)}
if mode == "save":
    save(folder, {"arrays": tree, "host": host})
    try:
        save(folder + "-bad", {"arrays": tree, "mine": np.arange(3) + index})
        assert count == 1
    except SaveFailed as error:
        assert "'mine'" in str(error) and error.process == 1, error
found = load(folder, {"arrays": like, "host": host})
for name, array in found["arrays"].items():
    assert array.sharding == like[name].sharding
    for shard in array.addressable_shards:
        assert np.asarray(shard.data).tobytes() == truth[name][shard.index].tobytes(), name
assert int(found["host"]["count"]) == 5 and (found["host"]["numpy"] == np.arange(7.0)).all() and found["host"]["text"] == "t"
assert (jax.random.key_data(found["host"]["keys"]) == jax.random.key_data(host["keys"])).all()
store = LocalStorage(folder)
once = restore_item(store, "", read_record(store, ""), "state", {"arrays": like}, partial=True, read_once=True)
for name, array in once["arrays"].items():
    assert array.sharding == like[name].sharding
    for shard in array.addressable_shards:
        assert np.asarray(shard.data).tobytes() == truth[name][shard.index].tobytes(), name
plain = load(folder)["arrays"]
assert all(plain[name].tobytes() == value.tobytes() for name, value in truth.items())
verify(folder)
print("held")
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(count: int, devices: int, mode: str, folder: Path, seed: int) -> None:
    outputs = run_processes(TOPOLOGY, count, arguments=[free_port(), mode, folder, seed], devices=devices, timeout_s=110)
    assert all("held" in output for output in outputs)


def test_four_processes_to_two_and_one(tmp_path: Path) -> None:
    """Saved by 4 processes of 2 devices, restored by 2 of 2 and by 1 of 8, with other shardings; a host-local difference is named."""
    run(4, 2, "save", tmp_path / "c", 1)
    run(2, 2, "load", tmp_path / "c", 1)
    run(1, 8, "load", tmp_path / "c", 1)
    record = json.loads((tmp_path / "c" / "checkpoint.json").read_text())
    assert record["processes"] == 4 and len({file[0].split("/")[1][:5] for file in record["items"]["state"]["files"]}) == 4
    assert not (tmp_path / "c-bad" / "checkpoint.json").exists()


TOPOLOGIES = [(1, 1), (1, 4), (1, 8), (2, 1), (2, 4), (4, 1), (4, 2)]


PAIRS = [pair for pair in itertools.product(TOPOLOGIES, repeat=2) if pair[0] != pair[1]]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("saver", "loader"), PAIRS, ids=[f"{a}x{b}-{c}x{d}" for (a, b), (c, d) in PAIRS])
def test_any_topology_to_any_other(tmp_path: Path, saver: tuple[int, int], loader: tuple[int, int]) -> None:
    """Saved by (processes, devices each) and restored by another such pair."""
    seed = hash((saver, loader)) % 1000
    run(*saver, "save", tmp_path / "c", seed)
    run(*loader, "load", tmp_path / "c", seed)
