"""Orbax's checkpoints, read and written: against the real library and the fixtures that it ships."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp1
import pytest

from holdfast.checkpoint import CheckpointError, CheckpointManager, Corrupt, StepExists, StepNotFound, UnsupportedLeaf, load, save, verify
from holdfast.checkpoint.layouts.detect import find_steps, open_checkpoint, restore_checkpoint
from holdfast.checkpoint.layouts.orbax.write import save_orbax
from holdfast.checkpoint.restoring.match import SAVED
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.checkpoint.storage.path import StorePath
from tests.support.cluster import run_processes

pytestmark = pytest.mark.filterwarnings("ignore")  # Orbax's own

FIXTURES = Path(ocp.__file__).parent / "experimental/v1/_src/testing/compatibility/checkpoints"
CASES = sorted(path for pattern in ("v0*/*/*/*", "v1*/*/*/*") for path in FIXTURES.glob(pattern) if path.is_dir())
Pair = namedtuple("Pair", "mu nu")


def name(path: Path) -> str:
    return "/".join(path.relative_to(FIXTURES).parts)


def assert_same(found: Any, expected: Any) -> None:
    """Asserts two trees equal bit by bit: structure, types of containers, dtypes and values."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_same_leaf(one, two)


def assert_same_leaf(one: Any, two: Any) -> None:
    if hasattr(two, "dtype") and jnp.issubdtype(two.dtype, jax.dtypes.prng_key):
        assert jax.random.key_impl(one) == jax.random.key_impl(two)
        one, two = jax.random.key_data(one), jax.random.key_data(two)
    if hasattr(two, "dtype"):
        one, two = np.asarray(one), np.asarray(two)
        assert (one.dtype, one.shape) == (two.dtype, two.shape)
        assert one.tobytes() == two.tobytes()
    else:
        assert type(one) is type(two) and one == two


def test_the_wheel_still_carries_fixtures() -> None:
    """The fixtures that these tests stand on are there: valid and damaged ones, v0 and v1."""
    assert len(CASES) >= 40
    assert any("critical_metadata" in name(path) for path in CASES) and any("v1_checkpoints" in name(path) for path in CASES)


@pytest.mark.parametrize("path", CASES, ids=name)
def test_every_fixture_loads_with_orbax_values_or_says_what_is_missing(path: Path) -> None:
    """A fixture that Orbax restores comes back with Orbax's own values; one that it cannot is an error naming the missing file."""
    direct = "direct_checkpoint" in name(path)
    item = path if direct else path / "state"
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            expected = checkpointer.restore(item)
    except (ValueError, FileNotFoundError, OSError):
        with pytest.raises(CheckpointError) as caught:
            load(path)
        ends = {"file_manifest.ocdbt": "manifest.ocdbt is missing", "dir_d": "/d/", "deleted_checkpointable": "no item 'state'"}
        missing = next((said for end, said in ends.items() if name(path).endswith(end)), "_METADATA is missing")
        assert missing in str(caught.value)
        assert isinstance(caught.value, Corrupt | StepNotFound)
        return
    assert_same(load(path), jax.tree.map(np.asarray, expected))
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), expected)
    assert_same(load(path, like), expected)
    if not direct and "missing_item_handlers" not in name(path):
        assert open_checkpoint(path).json("metadata") == {"metadata": "json_data"}


def rich_tree() -> dict[str, Any]:
    mesh = jax.make_mesh((jax.device_count(),), ("d",))
    sharded = jax.NamedSharding(mesh, jax.P("d"))
    return {
        "sharded": jax.device_put(jnp.arange(16 * jax.device_count(), dtype=jnp.float32), sharded),
        "list": [jnp.ones((2, 3), jnp.bfloat16), {"x": jnp.int32(3)}],
        "none": None,
        "dict": {},
        "empty": [],
        "tuple": (),
        "pair": Pair(jnp.zeros(2), np.arange(3)),
        "text": "hello",
        "int": 3,
        "float": 2.5,
        "bool": True,
        "a.dot": jnp.ones(2),
        "layer/w": jnp.ones((3, 4)),
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(8, impl="rbg"), 3),
        "f8": jnp.arange(4).astype(jnp.float8_e4m3fn),
        "i4": jnp.arange(4).astype(jnp.int4),
        "c64": jnp.ones(3, jnp.complex64) * 1j,
        "nan": jnp.array([jnp.nan, -0.0, jnp.inf]),
        "zeros": jnp.zeros((5, 5)),
        "np64": np.arange(3, dtype=np.float64),
    }


def write_v0(path: Path, tree: Any, **handler: Any) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**handler)) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree))


WRITERS = {
    "v0": lambda path, tree: write_v0(path, tree),
    "v0-zarr3": lambda path, tree: write_v0(path, tree, use_zarr3=True),
    "v0-files": lambda path, tree: write_v0(path, tree, use_ocdbt=False),
    "v1": lambda path, tree: ocp1.save(path, tree),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_what_orbax_writes_comes_back_bit_exact(tmp_path: Path, writer: str) -> None:
    """OCDBT or plain files, zarr v2 or v3, v0 or v1: every kind of leaf that Orbax holds comes back as it was, onto a `like`."""
    tree = rich_tree()
    if writer == "v0-files":
        tree = {key: value for key, value in tree.items() if key not in ("key", "keys", "dict", "layer/w")}
    WRITERS[writer](tmp_path / "c", tree)
    assert_same(load(tmp_path / "c", tree), tree)
    plain = load(tmp_path / "c")
    assert plain["pair"].keys() == {"mu", "nu"} and plain["text"] == "hello" and type(plain["int"]) is int and plain["bool"] is True
    assert plain["none"] is None and plain["empty"] == [] and plain["tuple"] == ()
    assert isinstance(plain["sharded"], np.ndarray)
    back = load(tmp_path / "c", SAVED)
    assert back["sharded"].sharding.spec == jax.P("d")
    assert verify(tmp_path / "c").leaves == len(jax.tree.leaves(tree))


def test_item_kinds_and_step_names_of_a_manager(tmp_path: Path) -> None:
    """A v0 root with a prefix, padding, JSON, a single array, random keys and metrics opens as what it is."""
    options = ocp.CheckpointManagerOptions(step_prefix="ck", step_format_fixed_length=6, best_fn=lambda metrics: metrics["loss"])
    items = ("state", "meta", "arr", "rk", "nrk")
    np.random.seed(3)
    state = np.random.get_state()
    with ocp.CheckpointManager(tmp_path / "r", item_names=items, options=options) as manager:
        for step in (5, 10):
            arguments = {
                "state": ocp.args.StandardSave({"w": jnp.full(3, step)}),
                "meta": ocp.args.JsonSave({"step": step}),
                "arr": ocp.args.ArraySave(jnp.arange(3)),
                "rk": ocp.args.JaxRandomKeySave(jax.random.key(3)),
                "nrk": ocp.args.NumpyRandomKeySave(state),
            }
            manager.save(step, args=ocp.args.Composite(**arguments), metrics={"loss": step / 10}, custom_metadata={"who": "me"})
    root = tmp_path / "r"
    (root / "ck_000015.orbax-checkpoint-tmp").mkdir()
    assert list(find_steps(LocalStorage(root))) == [5, 10]
    source = open_checkpoint(root, 5)
    assert source.info.metadata == {"who": "me"} and source.info.metrics == {"loss": 0.5} and source.info.step == 5
    assert load(root, item="meta") == {"step": 10}
    assert_same(load(root, item="arr"), np.arange(3, dtype=np.int32))
    assert_same(restore_checkpoint(source, "rk", SAVED), jax.random.key(3))
    found = load(root, item="nrk")
    assert found[0] == "MT19937" and found[1].tobytes() == state[1].tobytes() and tuple(found[2:]) == tuple(state[2:])
    with pytest.raises(StepNotFound, match="has no step 7; it has 5, 10"):
        open_checkpoint(root, 7)


def test_a_manager_goes_on_where_orbax_stopped(tmp_path: Path) -> None:
    """CheckpointManager restores the Orbax steps of its root, saves its own beside them, and never deletes or overwrites Orbax's."""
    from holdfast.checkpoint import KeepLast

    with ocp.CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, args=ocp.args.StandardSave({"w": jnp.full(3, step)}))
    before = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    with CheckpointManager(tmp_path, keep_policy=KeepLast(1)) as ours:
        assert ours.all_steps() == [1, 2] and ours.latest_step() == 2
        assert_same(ours.restore(None, {"w": jnp.zeros(3, jnp.int32)}), {"w": jnp.full(3, 2)})
        for step in (3, 4):
            ours.save(step, {"w": jnp.full(3, step)})
        ours.wait_until_finished()
        assert ours.all_steps() == [1, 2, 4]
        assert_same(ours.restore(1), {"w": np.full(3, 1, np.int32)})
        with pytest.raises(CheckpointError, match="written by another library"):
            ours.delete(1)
        with pytest.raises(StepExists, match="written by another library"):
            ours.save(2, {"w": jnp.zeros(3)}, overwrite=True)
    assert set(before) <= {path for path in tmp_path.rglob("*") if path.is_file()}
    with ocp.CheckpointManager(tmp_path) as manager:
        assert_same(manager.restore(2, args=ocp.args.StandardRestore()), {"w": jnp.full(3, 2)})


@pytest.mark.parametrize("item", ["state", "default"])
def test_what_we_write_the_real_orbax_restores(tmp_path: Path, item: str) -> None:
    """A checkpoint in Orbax's layout is restored, bit-exact, by the v0 manager and by v1's free functions, with and without a target."""
    tree = rich_tree()
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) if isinstance(x, jax.Array) else x, tree)
    save_orbax(
        StorePath(LocalStorage(tmp_path), "3"), {item: tree}, json_items={"meta": {"x": 1}}, metrics={"loss": 0.5}, metadata={"who": "me"}
    )
    assert_same(ocp1.load(tmp_path / "3", abstract), tree)
    loaded = ocp1.load_checkpointables(tmp_path / "3")
    assert loaded["meta"] == {"x": 1} and loaded[item]["text"] == "hello"
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [3] and manager.metrics(3) == {"loss": 0.5} and manager.metadata(3).custom_metadata == {"who": "me"}
        if item == "default":
            restored = manager.restore(3, args=ocp.args.StandardRestore())
        else:
            restored = manager.restore(3, args=ocp.args.Composite(state=ocp.args.StandardRestore(), meta=ocp.args.JsonRestore()))
            assert restored["meta"] == {"x": 1}
            restored = restored["state"]
    for key in ("sharded", "key", "keys", "f8", "i4", "c64", "nan", "layer/w", "a.dot", "np64"):
        assert_same_leaf(restored[key], tree[key])
    assert_same(load(tmp_path, tree, item=item), tree)


def test_save_layout_orbax_and_what_it_cannot_hold(tmp_path: Path) -> None:
    """`save(layout="orbax")` writes one checkpoint; arrays of size zero and bytes are refused by name, and nothing is left behind."""
    save(tmp_path / "1", {"w": jnp.arange(3)}, layout="orbax")
    assert_same(ocp1.load(tmp_path / "1"), {"w": jnp.arange(3)})
    with pytest.raises(StepExists):
        save(tmp_path / "1", {"w": jnp.arange(3)}, layout="orbax")
    with pytest.raises(UnsupportedLeaf, match=r"'deep.z', an array of shape \(0, 3\)"):
        save(tmp_path / "2", {"deep": {"z": jnp.zeros((0, 3))}}, layout="orbax")
    with pytest.raises(UnsupportedLeaf, match="'b', a Python bytes"):
        save(tmp_path / "2", {"b": b"x"}, layout="orbax")
    assert [path.name for path in tmp_path.iterdir() if any(file.is_file() for file in path.rglob("*"))] == ["1"]


def test_damage_is_an_error_that_names_file_and_leaf(tmp_path: Path) -> None:
    """Missing chunks, a cut-off database and a wrong description are errors with names, never the fill value."""
    write_v0(tmp_path / "c", {"w": jnp.arange(1000.0), "v": jnp.ones(3)}, use_ocdbt=False)
    shutil.copytree(tmp_path / "c", tmp_path / "lost")
    (tmp_path / "lost" / "w" / "0").unlink()
    with pytest.raises(Corrupt, match="the leaf 'w'") as caught:
        load(tmp_path / "lost")
    assert caught.value.leaf == "w"
    (tmp_path / "lost" / "w" / ".zarray").unlink()
    with pytest.raises(Corrupt, match=r"w/\.zarray is missing"):
        load(tmp_path / "lost")
    (tmp_path / "lost" / "_METADATA").write_text("{")
    with pytest.raises(Corrupt, match="_METADATA is not JSON"):
        load(tmp_path / "lost")
    (tmp_path / "lost" / "_METADATA").write_text(json.dumps({"tree_metadata": {"('..',)": entry("../../etc")}, "use_ocdbt": False}))
    with pytest.raises(CheckpointError, match="outside of its folder"):
        load(tmp_path / "lost")
    (tmp_path / "lost" / "_METADATA").write_text(json.dumps({"tree_metadata": {"('w',)": {}}}))
    with pytest.raises(Corrupt, match="in a way that Orbax does not"):
        load(tmp_path / "lost")


def entry(key: str) -> dict[str, Any]:
    return {"key_metadata": [{"key": key, "key_type": 2}], "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False}}


def test_four_processes_write_and_read_orbax(tmp_path: Path) -> None:
    """Arrays sharded over four processes are saved in Orbax's layout by all of them, restored by the real Orbax in one, by us in four."""
    script = """
        import sys, jax, jax.numpy as jnp, numpy as np
        from holdfast.checkpoint import load, save
        index, count, path, port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
        jax.distributed.initialize(f"127.0.0.1:{port}", count, index)
        mesh = jax.make_mesh((8,), ("d",))
        sharding = jax.NamedSharding(mesh, jax.P("d"))
        whole = np.arange(8 * 16, dtype=np.float32).reshape(8, 16)
        array = jax.make_array_from_callback(whole.shape, sharding, lambda i: whole[i])
        other = jax.make_array_from_callback(whole.shape, jax.NamedSharding(mesh, jax.P()), lambda i: whole[i] + 1)
        save(path, {"sharded": array, "replicated": other, "step": 5}, layout="orbax")
        like = jax.ShapeDtypeStruct(whole.shape, np.float32, sharding=jax.NamedSharding(mesh, jax.P(None, "d")))
        back = load(path, {"sharded": like, "replicated": like, "step": 0})
        for shard in back["sharded"].addressable_shards:
            assert (np.asarray(shard.data) == whole[shard.index]).all()
        print("exact", back["step"])
    """
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    outputs = run_processes(script, 4, arguments=[tmp_path / "c", port], devices=2)
    assert all("exact 5" in output for output in outputs)
    whole = np.arange(8 * 16, dtype=np.float32).reshape(8, 16)
    like = jax.ShapeDtypeStruct(whole.shape, np.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    restored = ocp1.load(tmp_path / "c", {"sharded": like, "replicated": like, "step": 0})
    assert (np.asarray(restored["sharded"]) == whole).all() and (np.asarray(restored["replicated"]) == whole + 1).all()
