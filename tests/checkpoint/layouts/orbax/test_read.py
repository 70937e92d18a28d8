"""Orbax's checkpoints, read: against the real library and the fixtures that it ships."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp1
import pytest

from holdfast.checkpoint import (
    CheckpointError,
    CheckpointManager,
    Corrupt,
    Files,
    StepExists,
    StepNotFound,
    load,
    save,
    verify,
)
from holdfast.checkpoint.layouts.detect import find_steps, open_checkpoint
from holdfast.checkpoint.layouts.restore import restore_checkpoint
from holdfast.checkpoint.restoring.match import SAVED
from holdfast.checkpoint.storage.local import LocalStorage
from tests.support.orbax import assert_same, rich_tree

pytestmark = pytest.mark.filterwarnings("ignore")  # Orbax's own

FIXTURES = Path(ocp.__file__).parent / "experimental/v1/_src/testing/compatibility/checkpoints"
CASES = sorted(
    path
    for pattern in ("v0*/*/*/*", "v1*/*/*/*")
    for path in FIXTURES.glob(pattern)
    if path.is_dir()
)


def name(path: Path) -> str:
    return "/".join(path.relative_to(FIXTURES).parts)


def test_the_wheel_still_carries_fixtures() -> None:
    """The fixtures that these tests stand on are there: valid and damaged ones, v0 and v1."""
    assert len(CASES) >= 40
    assert any("critical_metadata" in name(path) for path in CASES) and any(
        "v1_checkpoints" in name(path) for path in CASES
    )


@pytest.mark.parametrize("path", CASES, ids=name)
def test_every_fixture_loads_with_orbax_values_or_says_what_is_missing(path: Path) -> None:
    """A fixture that Orbax restores comes back with Orbax's own values; one that it cannot is an
    error naming the missing file.
    """
    direct = "direct_checkpoint" in name(path)
    item = path if direct else path / "state"
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            expected = checkpointer.restore(item)
    except (ValueError, FileNotFoundError, OSError):
        with pytest.raises(CheckpointError) as caught:
            load(path)
        ends = {
            "file_manifest.ocdbt": "manifest.ocdbt is missing",
            "dir_d": "/d/",
            "deleted_checkpointable": "no item 'state'",
        }
        missing = next(
            (said for end, said in ends.items() if name(path).endswith(end)), "_METADATA is missing"
        )
        assert missing in str(caught.value)
        assert isinstance(caught.value, Corrupt | StepNotFound)
        return
    assert_same(load(path), jax.tree.map(np.asarray, expected))
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), expected)
    assert_same(load(path, like), expected)
    if not direct and "missing_item_handlers" not in name(path):
        assert open_checkpoint(path).json("metadata") == {"metadata": "json_data"}


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
    """OCDBT or plain files, zarr v2 or v3, v0 or v1: every kind of leaf that Orbax holds comes back
    as it was, onto a `like`.
    """
    tree = rich_tree()
    if writer == "v0-files":
        tree = {
            key: value
            for key, value in tree.items()
            if key not in ("key", "keys", "dict", "layer/w")
        }
    WRITERS[writer](tmp_path / "c", tree)
    assert_same(load(tmp_path / "c", tree), tree)
    plain = load(tmp_path / "c")
    assert (
        plain["pair"].keys() == {"mu", "nu"}
        and plain["text"] == "hello"
        and type(plain["int"]) is int
        and plain["bool"] is True
    )
    assert plain["none"] is None and plain["empty"] == [] and plain["tuple"] == ()
    assert isinstance(plain["sharded"], np.ndarray)
    back = load(tmp_path / "c", SAVED)
    assert back["sharded"].sharding.spec == jax.P("d")
    assert verify(tmp_path / "c").leaves == len(jax.tree.leaves(tree))


def test_a_checkpoint_of_one_array_comes_back(tmp_path: Path) -> None:
    """A tree that is a single leaf has no name in Orbax's layout: its array stands at the item's
    folder itself.
    """
    ocp1.save(tmp_path / "x", jnp.arange(5.0))
    assert load(tmp_path / "x").tolist() == [0, 1, 2, 3, 4]
    assert isinstance(load(tmp_path / "x", jax.ShapeDtypeStruct((5,), jnp.float32)), jax.Array)
    assert verify(tmp_path / "x").leaves == 1


def test_item_kinds_and_step_names_of_a_manager(tmp_path: Path) -> None:
    """A v0 root with a prefix, padding, JSON, a single array, random keys and metrics opens as what
    it is.
    """
    options = ocp.CheckpointManagerOptions(
        step_prefix="ck", step_format_fixed_length=6, best_fn=lambda metrics: metrics["loss"]
    )
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
            manager.save(
                step,
                args=ocp.args.Composite(**arguments),
                metrics={"loss": step / 10},
                custom_metadata={"who": "me"},
            )
    root = tmp_path / "r"
    (root / "ck_000015.orbax-checkpoint-tmp").mkdir()
    assert list(find_steps(LocalStorage(root))) == [5, 10]
    checkpoint = open_checkpoint(root, 5)
    assert (
        checkpoint.info.metadata == {"who": "me"}
        and checkpoint.info.metrics == {"loss": 0.5}
        and checkpoint.info.step == 5
    )
    assert load(root, item="meta") == {"step": 10}
    assert_same(load(root, item="arr"), np.arange(3, dtype=np.int32))
    assert_same(restore_checkpoint(checkpoint, "rk", SAVED), jax.random.key(3))
    found = load(root, item="nrk")
    assert (
        found[0] == "MT19937"
        and found[1].tobytes() == state[1].tobytes()
        and tuple(found[2:]) == tuple(state[2:])
    )
    with pytest.raises(StepNotFound, match="has no step 7; it has 5, 10"):
        open_checkpoint(root, 7)


def test_a_manager_goes_on_where_orbax_stopped(tmp_path: Path) -> None:
    """CheckpointManager restores the Orbax steps of its root, saves its own beside them, and never
    deletes or overwrites Orbax's.
    """
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


def test_damage_is_an_error_that_names_file_and_leaf(tmp_path: Path) -> None:
    """Missing chunks, a cut-off database and a wrong description are errors with names, never the
    fill value.
    """
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
    (tmp_path / "lost" / "_METADATA").write_text(
        json.dumps({"tree_metadata": {"('..',)": entry("../../etc")}, "use_ocdbt": False})
    )
    with pytest.raises(CheckpointError, match="outside of its folder"):
        load(tmp_path / "lost")
    (tmp_path / "lost" / "_METADATA").write_text(json.dumps({"tree_metadata": {"('w',)": {}}}))
    with pytest.raises(Corrupt, match="in a way that Orbax does not"):
        load(tmp_path / "lost")


def entry(key: str) -> dict[str, Any]:
    return {
        "key_metadata": [{"key": key, "key_type": 2}],
        "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
    }


def test_a_file_of_another_handler_may_be_long(tmp_path: Path) -> None:
    """What a handler of the user's has written is no metadata: a file of any length is given."""
    save(tmp_path / "1", {"w": np.ones(4)}, layout="orbax")
    nbytes = (256 << 20) + 1
    (tmp_path / "1/blob").mkdir()
    with (tmp_path / "1/blob/data.bin").open("wb") as file:
        file.truncate(nbytes)
    about = tmp_path / "1/_CHECKPOINT_METADATA"
    said = json.loads(about.read_text())
    said["item_handlers"]["blob"] = "their.Handler"
    about.write_text(json.dumps(said))
    files = Files(read=lambda folder: {path.name: path.stat().st_size for path in folder.iterdir()})
    assert load(tmp_path / "1", files, item="blob") == {"data.bin": nbytes}
