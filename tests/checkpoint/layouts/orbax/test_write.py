"""Checkpoints in Orbax's layout that we write: the real library restores them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp1
import pytest

from holdfast.checkpoint import SaveFailed, StepExists, UnsupportedLeaf, load, save, single_save
from holdfast.checkpoint.layouts.detect import find_steps
from holdfast.checkpoint.layouts.orbax.metadata import TEMPORARY
from holdfast.checkpoint.layouts.orbax.write import OrbaxWriter, described, save_orbax
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.checkpoint.storage.path import StorePath, open_storage
from holdfast.coordination import HoldfastError
from holdfast.multihost import Group
from tests.support.checkpointing import at_once, groups
from tests.support.ctrl_c import is_interrupted
from tests.support.object_servers import BUCKET, TensorStoreMemory, small_s3_server
from tests.support.orbax import assert_same, assert_same_leaf, rich_tree
from tests.support.paths import ROOT, program

pytestmark = pytest.mark.filterwarnings("ignore")  # Orbax's own


@pytest.mark.parametrize("item", ["state", "default"])
def test_what_we_write_the_real_orbax_restores(tmp_path: Path, item: str) -> None:
    """A checkpoint in Orbax's layout is restored, bit-exact, by the v0 manager and by v1's free
    functions, with and without a target.
    """
    tree = rich_tree()
    abstract = jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            if isinstance(x, jax.Array)
            else x
        ),
        tree,
    )
    save_orbax(
        StorePath(LocalStorage(tmp_path), "3"),
        {item: tree},
        json_items={"meta": {"x": 1}},
        metrics={"loss": 0.5},
        metadata={"who": "me"},
    )
    assert_same(ocp1.load(tmp_path / "3", abstract), tree)
    loaded = ocp1.load_checkpointables(tmp_path / "3")
    assert loaded["meta"] == {"x": 1} and loaded[item]["text"] == "hello"
    with ocp.CheckpointManager(tmp_path) as manager:
        assert (
            manager.all_steps() == [3]
            and manager.metrics(3) == {"loss": 0.5}
            and manager.metadata(3).custom_metadata == {"who": "me"}
        )
        if item == "default":
            restored = manager.restore(3, args=ocp.args.StandardRestore())
        else:
            restored = manager.restore(
                3,
                args=ocp.args.Composite(
                    state=ocp.args.StandardRestore(), meta=ocp.args.JsonRestore()
                ),
            )
            assert restored["meta"] == {"x": 1}
            restored = restored["state"]
    for key in ("sharded", "key", "keys", "f8", "i4", "c64", "nan", "layer/w", "a.dot", "np64"):
        assert_same_leaf(restored[key], tree[key])
    assert_same(load(tmp_path, tree, item=item), tree)


def test_save_layout_orbax_and_what_it_cannot_hold(tmp_path: Path) -> None:
    """`save(layout="orbax")` writes one checkpoint; arrays of size zero and bytes are refused by
    name, and nothing is left behind.
    """
    save(tmp_path / "1", {"w": jnp.arange(3)}, layout="orbax")
    assert_same(ocp1.load(tmp_path / "1"), {"w": jnp.arange(3)})
    with pytest.raises(StepExists):
        save(tmp_path / "1", {"w": jnp.arange(3)}, layout="orbax")
    with pytest.raises(UnsupportedLeaf, match=r"'deep.z', an array of shape \(0, 3\)"):
        save(tmp_path / "2", {"deep": {"z": jnp.zeros((0, 3))}}, layout="orbax")
    with pytest.raises(UnsupportedLeaf, match="'b', a Python bytes"):
        save(tmp_path / "2", {"b": b"x"}, layout="orbax")
    assert [
        path.name for path in tmp_path.iterdir() if any(file.is_file() for file in path.rglob("*"))
    ] == ["1"]


@pytest.mark.parametrize(
    ("name", "value"), [("step", 5), ("overwrite", True), ("per_process", lambda path: True)]
)
def test_what_orbax_has_no_place_for_is_refused(tmp_path: Path, name: str, value: object) -> None:
    """An argument that the layout cannot honour is a ValueError that names it, before anything is
    written; so is an unknown layout.
    """
    with pytest.raises(ValueError, match=f"layout='orbax' .*{name}=.*expected"):
        save(tmp_path / "1", {"w": jnp.arange(3)}, layout="orbax", **{name: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="layout='orbx': expected 'holdfast' or 'orbax'"):
        save(tmp_path / "1", {"w": jnp.arange(3)}, layout="orbx")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def _errors(path: Path, trees: list[object]) -> list[HoldfastError]:
    """Returns how a save of two processes fails on each of them; the test's own limit is far below
    the save's.
    """

    def fails(group: Group) -> HoldfastError:
        with pytest.raises(HoldfastError) as caught:
            save(path, trees[group.index], layout="orbax", group=group, timeout_s=600)
        return caught.value

    with groups(2) as both:
        return at_once([lambda group=group: fails(group) for group in both])


def test_a_step_that_exists_is_an_error_on_every_process(tmp_path: Path) -> None:
    """Nobody waits for the primary, which alone looks."""
    save(tmp_path / "1", {"w": jnp.arange(3)}, layout="orbax")
    errors = _errors(tmp_path / "1", [{"w": np.ones(2)}] * 2)
    assert [type(error) for error in errors] == [StepExists] * 2 and str(errors[0]) == str(
        errors[1]
    )
    assert load(tmp_path / "1")["w"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("failing", [0, 1])
def test_what_one_process_cannot_save_is_an_error_on_every_process(
    failing: int, tmp_path: Path
) -> None:
    """Nobody waits for it; the error names the leaf, and nothing is left behind."""
    errors = _errors(
        tmp_path / "1",
        [
            {"w": np.ones(2), "b": b"x"} if index == failing else {"w": np.ones(2)}
            for index in range(2)
        ],
    )
    assert isinstance(errors[failing], UnsupportedLeaf) and all(
        "'b', a Python bytes" in str(error) for error in errors
    )
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_fails_is_one_error_on_every_process(tmp_path: Path) -> None:
    """The operating system's error becomes SaveFailed that names the place and the process."""
    (tmp_path / "file").write_text("")
    errors = _errors(tmp_path / "file" / "1", [{"w": np.ones(2)}] * 2)
    assert [type(error) for error in errors] == [SaveFailed] * 2
    assert all(
        f"{tmp_path}/file/1 was not saved: process 0 failed" in str(error) for error in errors
    )


KILLED = [
    ("after", "_begin"),
    ("before", "run"),
    ("after", "run"),
    ("after", "add_record"),
    ("before", "finish"),
    ("before", "_remove_aside"),
    ("after", "_remove_aside"),
    ("before", "_rename"),
    ("after", "_rename"),
]


@pytest.mark.parametrize(
    ("when", "call"),
    [
        pytest.param(*point, marks=() if point == ("after", "run") else pytest.mark.slow)
        for point in KILLED
    ],
)
def test_a_job_that_is_killed_leaves_all_or_nothing(when: str, call: str, tmp_path: Path) -> None:
    """The checkpoint has its name when it is whole; what else is left goes with the next save."""
    path = tmp_path / "5"
    command = [sys.executable, str(program("orbax_save_killed")), str(path), when, call]
    done = subprocess.run(command, timeout=90, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == -signal.SIGKILL
    is_there = (when, call) == ("after", "_rename")
    assert path.exists() == is_there and list(find_steps(LocalStorage(tmp_path))) == [5] * is_there
    if is_there:
        with pytest.raises(StepExists):
            save(path, {"w": np.arange(4)}, layout="orbax")
    else:
        save(path, {"w": np.arange(4)}, layout="orbax")
    assert ocp1.load(path)["w"].tolist() == [0, 1, 2, 3]
    assert [each.name for each in tmp_path.iterdir()] == ["5"]


def test_what_the_primary_cannot_convert_is_an_error_on_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All hear it, however long the primary goes on before, and nothing stays."""

    def fails(writer: OrbaxWriter, **words: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(OrbaxWriter, "finish", fails)
    monkeypatch.setattr(single_save, "BEAT_S", 0.0)
    tree = {f"w{number}": np.full(4, number) for number in range(20)}
    errors = _errors(tmp_path / "1", [tree] * 2)
    assert all("No space left on device" in str(error) for error in errors)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("store", ["folder", "bucket"])
def test_what_two_processes_save_the_real_orbax_restores(store: str, tmp_path: Path) -> None:
    """All kinds of leaves, in a folder or an object store; what lay aside is gone."""
    TensorStoreMemory.register()
    path = f"{tmp_path}/5" if store == "folder" else f"tensorstore://{tmp_path.name}-two/5"
    tree = rich_tree()
    with groups(2) as both:
        at_once([lambda g=g: save(path, tree, layout="orbax", group=g) for g in both])
    root, _, name = path.rpartition("/")
    assert_same(load(path, tree, item="default"), tree)
    storage = open_storage(root)
    assert {entry.name.rstrip("/") for entry in storage.list("")} == {name}
    assert not [entry for entry in storage.list(name, recursive=True) if ".saved" in entry.name]
    if store == "folder":
        assert_same(ocp1.load(path, tree), tree)


def test_two_processes_save_to_the_server_that_the_url_names(tmp_path: Path) -> None:
    """What lies aside goes there too, and not to the one that such a bucket is on by itself."""
    with small_s3_server(tmp_path) as query, groups(2) as both:
        path = f"s3://{BUCKET}/5{query}"
        tree = {"w": np.arange(4)}
        at_once([lambda g=g: save(path, tree, layout="orbax", group=g) for g in both])
        assert load(path)["w"].tolist() == [0, 1, 2, 3]


def test_what_is_behind_a_link_stays(tmp_path: Path) -> None:
    """A link that has a temporary name is left alone, and so is what is behind it."""
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "lock").write_text("mine")
    (tmp_path / f"1{TEMPORARY}-0").symlink_to(tmp_path / "else")
    save(tmp_path / "1", {"w": jnp.arange(3)}, layout="orbax")
    assert (tmp_path / "else" / "lock").read_text() == "mine"
    assert not (tmp_path / "1").is_symlink()


def test_what_was_begun_is_invisible_until_it_is_finished(tmp_path: Path) -> None:
    """Until `finish` no folder has the checkpoint's name; `abandon` leaves nothing."""
    folder = StorePath(LocalStorage(tmp_path), "5")
    writer = OrbaxWriter(folder)
    writer.add_record(described("state", {"w": np.arange(3)})[0])
    (begun,) = tmp_path.iterdir()
    assert begun.name.startswith(f"5{TEMPORARY}-") and find_steps(folder.storage) == {}
    writer.abandon()
    assert list(tmp_path.iterdir()) == []


def _begun(folder: StorePath, value: int) -> OrbaxWriter:
    """Returns a writer that has written all, and has not finished."""
    return _written(OrbaxWriter(folder), value)


def _written(writer: OrbaxWriter, value: int) -> OrbaxWriter:
    record, (array,) = described("state", {"w": np.full(3, value)})
    (name,) = writer.add_record(record)
    writer.write("state", name, array)
    return writer


def test_of_two_writers_one_wins(tmp_path: Path) -> None:
    """Two writers of one checkpoint: the first that finishes has it, and the other is told."""
    folder = StorePath(LocalStorage(tmp_path), "5")
    first = _begun(folder, 1)
    second = _begun(folder, 2)
    first.finish()
    with pytest.raises(StepExists, match="was saved by another meanwhile; choose another place"):
        second.finish()
    second.abandon()
    assert [path.name for path in tmp_path.iterdir()] == ["5"]
    assert load(tmp_path / "5")["w"].tolist() == [1, 1, 1]
    assert not (tmp_path / "5" / "lock").exists()


def test_an_object_store_lets_one_writer_begin(tmp_path: Path) -> None:
    """There nothing can be renamed: the second writer is told at once, and deletes nothing."""
    TensorStoreMemory.register()
    url = f"tensorstore://{tmp_path.name}"
    folder = StorePath(open_storage(url), "5")
    first = OrbaxWriter(folder)
    with pytest.raises(StepExists, match=r"written by another, .*5\.orbax-checkpoint-tmp"):
        OrbaxWriter(folder)
    _written(first, 1).finish()
    assert load(url)["w"].tolist() == [1, 1, 1]
    with pytest.raises(StepExists, match="is there already"):
        OrbaxWriter(folder)
    assert not any(TEMPORARY in entry.name for entry in folder.storage.list(""))
    again = StorePath(folder.storage, "6")
    _begun(again, 2).abandon()
    assert folder.storage.list("6", recursive=True) == []
    _begun(again, 2).abandon()


def test_remains_of_dead_writers_are_removed(tmp_path: Path) -> None:
    """A lock that is free shows that its writer is dead; a writer that lives goes on."""
    folder = StorePath(LocalStorage(tmp_path), "5")
    dead = _begun(folder, 1)
    assert dead._lock is not None
    dead._drain()  # the dead write nothing more
    dead._lock.close()
    alive = _begun(folder, 2)
    save(tmp_path / "55", {"w": jnp.arange(3)}, layout="orbax")
    _begun(folder, 3).abandon()
    assert len([*tmp_path.glob(f"*{TEMPORARY}*")]) == 1
    alive.finish()
    assert load(tmp_path / "5")["w"].tolist() == [2, 2, 2]


def test_two_leaves_of_one_name_are_refused(tmp_path: Path) -> None:
    """Orbax joins keys by dots: leaves that only differ in that are an error that names them."""
    with pytest.raises(UnsupportedLeaf, match=r"two leaves are called 'a\.b'"):
        save_orbax(
            StorePath(LocalStorage(tmp_path), "1"),
            {"state": {"a": {"b": np.ones(2)}, "a.b": np.ones(2)}},
            json_items={},
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_of_a_save(tmp_path: Path) -> None:
    """At whatever moment: what is on its way when the folder is removed would make it anew."""
    tree = {f"w{index}": np.ones(64, np.float32) for index in range(1500)}
    interrupted = [
        is_interrupted(
            0.02 + 0.02 * number, partial(save, tmp_path / str(number), tree, layout="orbax")
        )
        for number in range(20)
    ]
    assert any(interrupted)
    assert not [path for path in tmp_path.iterdir() if TEMPORARY in path.name]
