"""One checkpoint without a manager: saved, loaded, replaced, and refused."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holdfast.checkpoint import (
    CheckpointManager,
    Corrupt,
    Files,
    Json,
    SaveFailed,
    StepExists,
    StepNotFound,
    TreeMismatch,
    UnsupportedLeaf,
    convert,
    load,
    load_async,
    save,
    structure,
    verify,
)
from holdfast.multihost import Group, Solo
from tests.support.checkpointing import at_once, groups


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    """A tree comes back like another, and as numpy without one; the folder holds the record, the
    packs and nothing else.
    """
    tree = {"w": jnp.arange(6.0).reshape(2, 3), "n": np.arange(3), "lr": 0.5}
    save(tmp_path / "a", tree, item="net", step=7, metadata={"run": "a"})
    found = load(tmp_path / "a", tree, item="net")
    assert (
        found["lr"] == 0.5
        and (found["w"] == tree["w"]).all()
        and type(found["w"]) is type(tree["w"])
    )
    assert (
        isinstance(load(tmp_path / "a", item="net")["w"], np.ndarray)
        and verify(tmp_path / "a").step == 7
    )
    assert [name.split("/")[0] for name in files(tmp_path / "a")] == ["checkpoint.json", "net"]
    with pytest.raises(StepNotFound, match="'state'"):
        load(tmp_path / "a")


def test_a_checkpoint_is_replaced_only_on_request(tmp_path: Path) -> None:
    """It is StepExists, and nothing changes; with `overwrite` the new files alone are there."""
    save(tmp_path, {"w": np.zeros(3)})
    before = files(tmp_path)
    with pytest.raises(
        StepExists,
        match=r"holds a checkpoint already; save to another folder, or pass overwrite=True",
    ) as caught:
        save(tmp_path, {"w": np.ones(3)})
    assert (
        files(tmp_path) == before
        and caught.value.path == str(tmp_path)
        and (load(tmp_path)["w"] == 0).all()
    )
    save(tmp_path, {"w": np.ones(3)}, overwrite=True)
    assert (
        len(files(tmp_path)) == len(before)
        and files(tmp_path) != before
        and (load(tmp_path)["w"] == 1).all()
    )


def test_what_fails_leaves_nothing(tmp_path: Path) -> None:
    """An unsupported leaf, or a store that refuses: the error, and no file; the error of the
    process itself where it is alone.
    """
    with pytest.raises(UnsupportedLeaf, match="'f'"):
        save(tmp_path / "a", {"w": np.zeros(3), "f": object()})
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "state").write_text("in the way")
    with pytest.raises(SaveFailed, match="step 0 was not saved: process 0 failed") as caught:
        save(tmp_path / "b", {"w": np.zeros(3)})
    assert isinstance(caught.value.__cause__, OSError)
    assert files(tmp_path) == ["b/state"] and not [
        name for name in os.listdir(tmp_path / "b") if name != "state"
    ]


def test_a_root_means_its_latest_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log says which; the latest is taken though it is damaged: an older one would be a
    surprise.
    """
    with CheckpointManager(tmp_path) as manager:
        for step in (9, 10):
            manager.save(step, items={"state": {"at": step}, "config": Json({"at": step})})
    with caplog.at_level(logging.INFO, "holdfast.checkpoint"):
        assert (
            load(tmp_path) == {"at": 10}
            and load(tmp_path / "9") == {"at": 9}
            and load(tmp_path, item="config") == {"at": 10}
        )
    assert any(
        "is a root of 2 steps: taking the latest" in record.message for record in caplog.records
    )
    (tmp_path / "10" / "checkpoint.json").write_text("{}")
    with pytest.raises(Corrupt):
        load(tmp_path)


def test_a_folder_that_is_called_like_a_step(tmp_path: Path) -> None:
    """Without a step any name will do; a step that is not the folder's is refused: no reader would
    take it.
    """
    save(tmp_path / "20261122", {"n": 1})
    save(tmp_path / "7", {"n": 7}, step=7)
    save(tmp_path / "007", {"n": 8}, step=8)
    assert (
        load(tmp_path / "20261122") == {"n": 1}
        and load(tmp_path / "7") == {"n": 7}
        and load(tmp_path / "007") == {"n": 8}
    )
    with pytest.raises(ValueError, match=r"the folder 5 is called as step 5 is, and step=4"):
        save(tmp_path / "5", {"n": 4}, step=4)
    assert not (tmp_path / "5").exists()


@pytest.mark.parametrize("root", ["here", "memory://called-so"])
def test_a_folder_that_is_called_like_a_file_of_safetensors(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was saved there is loaded: a folder is no file, whatever its name."""
    monkeypatch.chdir(tmp_path)
    save(f"{root}/a.safetensors", {"n": 1})
    with CheckpointManager(f"{root}/b.safetensors") as manager:
        manager.save(1, {"n": 2})
    found = [load(f"{root}/{name}.safetensors") for name in "ab"]
    assert found == [{"n": 1}, {"n": 2}]
    assert [verify(f"{root}/{name}.safetensors").step for name in "ab"] == [0, 1]
    with pytest.raises(StepNotFound, match=r"there is no file .*/c.safetensors"):
        load(f"{root}/c.safetensors")


def test_names_change_and_parts_come_alone(tmp_path: Path) -> None:
    """`rename` gives stored leaves the paths of `like`; `partial` takes some; `cast` changes the
    dtype.
    """
    save(tmp_path, {"old": {"w": np.arange(3.0)}, "rest": np.zeros(2)})
    like = {"new": {"w": np.zeros(3, np.float32)}}
    found = load(tmp_path, like, rename={"old.w": "new.w"}, partial=True, cast=True)
    assert found["new"]["w"].dtype == np.float32 and found["new"]["w"].tolist() == [0, 1, 2]


def test_a_group_saves_one_checkpoint(tmp_path: Path) -> None:
    """Two processes save once, with a value of each; the failure of one is the error of both, and
    nothing is there.
    """

    def saved(group: Group, root: Path, leaf: object) -> Exception | None:
        try:
            save(
                root,
                {"shared": np.arange(4), "mine": leaf},
                group=group,
                per_process=lambda path: path == "mine",
                timeout_s=60,
            )
        except Exception as error:
            return error
        return None

    with groups(2) as both:
        assert at_once(
            [lambda group=group: saved(group, tmp_path / "a", 10 + group.index) for group in both]
        ) == [None, None]
        leaves = [1, object()]
        errors = at_once(
            [
                lambda group=group: saved(group, tmp_path / "b", leaves[group.index])
                for group in both
            ]
        )
    assert [load(tmp_path / "a", process=index)["mine"] for index in range(2)] == [10, 11]
    with CheckpointManager(tmp_path / "of-steps") as manager:
        manager.save(1, {"w": 1}).wait()
        for call in (
            lambda: manager.restore(process=-1),
            lambda: load(tmp_path / "a", process=-1),
            lambda: convert(tmp_path / "a", tmp_path / "c", process=-1),
        ):
            with pytest.raises(ValueError, match="process=-1: expected the number of a process"):
                call()
    assert all(isinstance(error, SaveFailed) and error.process == 1 for error in errors), errors
    assert isinstance(errors[1].__cause__, UnsupportedLeaf) and files(tmp_path / "b") == []  # type: ignore[union-attr]


def test_the_group_of_one_is_the_default(tmp_path: Path) -> None:
    """Without a job the group is this process."""
    save(tmp_path, {"n": 1}, group=Solo())
    assert load(tmp_path) == {"n": 1}


def test_a_load_in_the_background_is_a_future(tmp_path: Path) -> None:
    """Its result is what `load` returns, its exception what it raises; a group is refused; an exit
    does not wait for it.
    """
    save(tmp_path / "a", items={"model": {"w": jnp.arange(3.0)}, "config": Json(1)})
    like = {"w": jnp.zeros(3)}
    assert load_async(tmp_path / "a", like, item="model").result(60)["w"].tolist() == [0, 1, 2]
    found = load_async(tmp_path / "a", items={"model": like, "config": None}).result(60)
    assert found["config"] == 1 and isinstance(found["model"]["w"], jax.Array)
    assert isinstance(load_async(tmp_path / "b").exception(60), StepNotFound)
    with pytest.raises(ValueError, match="load_async: group="):
        load_async(tmp_path / "a", group=Solo())


def test_names_of_safetensors_are_those_of_the_tree(tmp_path: Path) -> None:
    """Also where the header has such an entry, or the name has a character that is not printed."""
    tree = {"format": np.ones(2), "step": np.int32(3), "a\nb": np.zeros(1), "ax0ab": np.ones(1)}
    save(tmp_path / "a", tree)
    there = convert(tmp_path / "a", tmp_path / "b", "safetensors")
    found = load(there)
    assert found.keys() == tree.keys()
    for name, array in tree.items():
        assert np.array_equal(found[name], array)
    assert np.array_equal(load(convert(there, tmp_path / "c"))["a\nb"], tree["a\nb"])


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        ({"format": "jax"}, "'format' is a text, and the header .* says 'format'.*'pt'"),
        ({"step": "last"}, "'step' is a text, and the header .* says 'step'"),
        ({"who": "me"}, "'who' is a text, and the header .* says 'who'.*'you'"),
        ({"__metadata__": np.ones(1)}, "no array called '__metadata__'"),
        ({"a": "\ud800"}, "cannot hold 'a', the text .* not valid UTF-8"),
        ({"a": 2**70}, "cannot hold 'a' of dtype object"),
    ],
)
def test_what_a_header_cannot_say_is_refused(tree: Any, sentence: str, tmp_path: Path) -> None:
    """An entry of a header is never overwritten without a word, and nothing is left."""
    save(tmp_path / "a", tree, metadata={"who": "you"})
    with pytest.raises(UnsupportedLeaf, match=sentence):
        convert(tmp_path / "a", tmp_path / "b", "safetensors")
    assert not [*tmp_path.glob("b/*")]


def test_metadata_goes_into_the_header(tmp_path: Path) -> None:
    """Text as it is, all else as JSON; what is no dict under one name."""
    for metadata, header in (
        ({"a": "x", "b": [1, None]}, {"a": "x", "b": "[1, null]"}),
        ([1, "x"], {"metadata": '[1, "x"]'}),
        (None, {}),
    ):
        save(tmp_path / "a", {"w": np.ones(1)}, metadata=metadata, overwrite=True)
        there = convert(tmp_path / "a", tmp_path / str(len(header)), "safetensors")
        assert structure(there).metadata == {"format": "pt", "step": "0"} | header


def test_metadata_of_orbax_is_a_dict(tmp_path: Path) -> None:
    """Any other is refused, when it is saved and when it is converted: it was dropped."""
    with pytest.raises(UnsupportedLeaf, match="cannot hold the metadata, a list"):
        save(tmp_path / "o", {"w": np.ones(1)}, layout="orbax", metadata=[1])
    with pytest.raises(TypeError, match=r"the metadata.*keys are text"):
        save(tmp_path / "o", {"w": np.ones(1)}, layout="orbax", metadata={1: 2})
    save(tmp_path / "a", {"w": np.ones(1)}, metadata=[1])
    with pytest.raises(UnsupportedLeaf, match="cannot hold the metadata, a list"):
        convert(tmp_path / "a", tmp_path / "o", "orbax")
    assert not [*tmp_path.glob("o/*")]


@pytest.mark.parametrize(
    "leaf",
    [
        np.arange(3, dtype=">i4"),
        np.ma.masked_array([1, 2], [True, False]),
        np.zeros(1, "M8[ns]"),
        bytearray(b"a"),
        2**70,
    ],
    ids=["byte order", "mask", "time", "bytearray", "int"],
)
def test_a_leaf_that_would_change_is_refused_for_orbax(leaf: Any, tmp_path: Path) -> None:
    """As for holdfast's own layout; its layout would make another dtype or class of it."""
    with pytest.raises(UnsupportedLeaf, match=r"'?a\.b'?"):
        save(tmp_path / "o", {"a": {"b": leaf}}, layout="orbax")
    assert not [*tmp_path.glob("o*")]


def test_a_float64_of_numpy_goes_to_orbax(tmp_path: Path) -> None:
    """Though it is a float of Python's too."""
    save(tmp_path / "o", {"a": np.float64(0.1)}, layout="orbax")
    assert load(tmp_path / "o", {"a": np.float64(0)}, item="default")["a"] == np.float64(0.1)


class _Loader:
    def get_state(self) -> Any:
        return {"at": 1}

    def set_state(self, state: Any) -> None:
        raise NotImplementedError


def test_items_of_orbax_are_trees_and_json(tmp_path: Path) -> None:
    """Json is an item there too; what its layout has no place for is refused by its name."""
    save(tmp_path / "o", items={"s": {"w": np.ones(1)}, "j": Json({"a": (1,)})}, layout="orbax")
    assert load(tmp_path / "o", item="j") == {"a": [1]}
    for item in (_Loader(), Json(1, per_process=True), Files(write=lambda folder: None)):
        with pytest.raises(UnsupportedLeaf, match=r"does not take the item 'j', a \w+"):
            save(tmp_path / "x", items={"s": {"w": np.ones(1)}, "j": item}, layout="orbax")
    with pytest.raises(TypeError, match=r"the item 'j'.*keys are text"):
        save(tmp_path / "x", items={"j": Json({1: 2})}, layout="orbax")
    assert not [*tmp_path.glob("x*")]


def test_a_number_that_one_process_cannot_hold_is_raised_on_all(tmp_path: Path) -> None:
    """At the restore's agreement, by value: the error names the leaf and the process."""

    def loaded(group: Group, like: Any) -> Exception | None:
        try:
            load(tmp_path / "a", like, cast=True, group=group)
        except Exception as error:
            return error
        return None

    mine = [{"n": np.array([7])}, {"n": np.array([300])}]
    like = {"n": np.zeros(1, np.int8)}
    with groups(2) as both:
        at_once(
            [
                lambda group=group: save(
                    tmp_path / "a", mine[group.index], group=group, per_process=lambda path: True
                )
                for group in both
            ]
        )
        errors = at_once([lambda group=group: loaded(group, like) for group in both])
    for error in errors:
        assert isinstance(error, TreeMismatch)
        assert error.process == 1
        assert "'n' holds 300, which int8 cannot hold" in str(error)
