"""Items of files: what handlers leave is saved and comes back, and no name leads astray."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from holdfast.checkpoint import (
    CheckpointManager,
    Corrupt,
    Files,
    HostileCheckpoint,
    Json,
    Options,
    SaveFailed,
    StepNotFound,
    TreeMismatch,
    load,
    save,
    structure,
    verify,
)
from holdfast.checkpoint.format import own_files
from holdfast.checkpoint.format.own_files import is_own_name, put_files
from holdfast.checkpoint.layouts.detect import open_checkpoint
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.checkpoint.storage.path import StorePath
from holdfast.checkpoint.tools.convert import convert
from holdfast.multihost import ClusterGroup
from tests.support.checkpointing import at_once, groups

CONTENTS = {
    "vocab.json": b'{"a":1}',
    "deep/er/merges.txt": b"a b" * 3_000_000,
    "empty": b"",
    "namé 1": b"x",
}


@pytest.fixture(autouse=True)
def scratch(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which scratch folders are made; nothing stays in it."""
    folder = tmp_path_factory.mktemp("scratch")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def write(folder: Path) -> None:
    for name, data in CONTENTS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def read(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_what_a_handler_writes_its_reader_gets(tmp_path: Path, scratch: Path) -> None:
    """With a manager and alone, beside trees and JSON; without a reader as a dict; verified,
    replaced, deleted; scratch is left empty.
    """
    items = {"model": {"w": jnp.ones(3)}, "tokenizer": Files(write), "config": Json(1)}
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, items=items).wait()
        assert (
            manager.restore(1, item="tokenizer")
            == CONTENTS
            == manager.restore(1, Files(read=read), item="tokenizer")
        )
        found = manager.restore(
            items={"tokenizer": Files(read=len_of), "config": None, "model": None}
        )
        assert (
            found["tokenizer"] == 4
            and found["config"] == 1
            and found["model"]["w"].tolist() == [1, 1, 1]
        )
        assert (
            manager.structure(1).items["tokenizer"].kind == "files"
            and verify(tmp_path / "run").files == 6
        )
        manager.save(
            1,
            items=items | {"tokenizer": Files(lambda folder: (folder / "a").write_text("b"))},
            overwrite=True,
        ).wait()
        assert manager.restore(1, item="tokenizer") == {"a": b"b"}
        assert len(list((tmp_path / "run" / "1" / "tokenizer").iterdir())) == 1
        manager.delete(1)
        assert not (tmp_path / "run" / "1").exists()
    save(tmp_path / "one", items=items)
    assert (
        load(tmp_path / "one", item="tokenizer")
        == CONTENTS
        == load(tmp_path / "one", Files(read=read), item="tokenizer")
    )
    assert list(scratch.iterdir()) == []


def len_of(folder: Path) -> int:
    return len(read(folder))


def test_a_handler_writes_in_save_not_later(tmp_path: Path) -> None:
    """What it writes from may change once `save` has returned."""
    text = ["before"]
    with CheckpointManager(tmp_path) as manager:
        handle = manager.save(
            1, items={"notes": Files(lambda folder: (folder / "a").write_text(text[0]))}
        )
        text[0] = "after"
        handle.wait()
        assert manager.restore(item="notes") == {"a": b"before"}


def fails(folder: Path) -> None:
    (folder / "half").write_text("written")
    raise RuntimeError("no model")


def _becomes_a_link(folder: Path) -> None:
    folder.rmdir()
    folder.symlink_to("/etc")


def _becomes_a_file(folder: Path) -> None:
    folder.rmdir()
    folder.write_text("mine")


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (fails, "RuntimeError: no model"),
        (
            lambda folder: (folder / "a").symlink_to("/etc/hostname"),
            "'a' is no file and no folder; expected files, copied",
        ),
        (lambda folder: os.mkfifo(folder / "pipe"), "'pipe' is no file and no folder"),
        (lambda folder: (folder / "a\\b").write_text(""), "is no name for a file"),
        (lambda folder: (folder / "a\nb").write_text(""), "is no name for a file"),
        (_becomes_a_link, "is a link after it; expected the files in that folder"),
        (shutil.rmtree, "is gone after it; expected the files in that folder"),
        (_becomes_a_file, "is gone after it; expected the files in that folder"),
        (None, "an item of files expects a `write`"),
    ],
)
def test_a_handler_that_fails_makes_no_step(
    tmp_path: Path, scratch: Path, handler: Any, message: str
) -> None:
    """Item and process are named, nothing is written, scratch is empty, and the next save
    succeeds.
    """
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(
            SaveFailed,
            match=r"the item 'tokenizer' was not written by its handler on process 0: .*",
        ) as caught:
            manager.save(1, items={"tokenizer": Files(handler), "model": {"w": np.ones(3)}})
        assert message in str(caught.value) and caught.value.process == 0
        assert (
            manager.all_steps() == []
            and list(scratch.iterdir()) == []
            and not (tmp_path / "1").exists()
        )
        manager.save(1, items={"tokenizer": Files(write)}).wait()
        assert manager.all_steps() == [1]


def _saves(
    group: ClusterGroup, root: Path, *, per_process: bool, failing: int | None = None
) -> Any:
    def own(folder: Path) -> None:
        if group.index == failing:
            raise RuntimeError("no model")
        (folder / "state").write_text(f"of {group.index}")

    with CheckpointManager(root, group=group, options=Options(save_timeout_s=30)) as manager:
        try:
            manager.save(
                1, items={"reader": Files(own, per_process=per_process), "model": {"w": np.ones(3)}}
            ).wait()
        except SaveFailed as error:
            return error
        return manager.restore(1, item="reader")


def test_files_are_the_primarys_or_each_processs(tmp_path: Path) -> None:
    """With `per_process` each gets back what it wrote; on another number of processes one must be
    chosen; else the primary alone writes.
    """
    with groups(3) as three:
        own = at_once(
            [lambda group=group: _saves(group, tmp_path / "a", per_process=True) for group in three]
        )  # type: ignore[misc]
    assert own == [{"state": f"of {index}".encode()} for index in range(3)]
    with CheckpointManager(tmp_path / "a") as manager:
        with pytest.raises(
            TreeMismatch, match="has a state for each of 3 processes, and this job has 1"
        ):
            manager.restore(item="reader")
        assert (
            manager.restore(item="reader", process=2)
            == {"state": b"of 2"}
            == load(tmp_path / "a", item="reader", process=2)
        )
        with pytest.raises(TreeMismatch, match="for each of 3 processes, and none for process 3"):
            manager.restore(item="reader", process=3)
    with groups(2) as two:
        shared = at_once(
            [lambda group=group: _saves(group, tmp_path / "b", per_process=False) for group in two]
        )  # type: ignore[misc]
    assert shared == [{"state": b"of 0"}] * 2


def test_json_is_each_processs_own(tmp_path: Path) -> None:
    """With `per_process` each gets back the value that it wrote; on another number of processes
    one must be chosen.
    """

    def saves(group: ClusterGroup) -> Any:
        items = {"own": Json(group.index, per_process=True), "all": Json("x")}
        with CheckpointManager(tmp_path, group=group) as manager:
            manager.save(1, items=items).wait()
            return manager.restore(1, items={"own": None, "all": None})

    with groups(2) as two:
        found = at_once([lambda group=group: saves(group) for group in two])  # type: ignore[misc]
    assert found == [{"own": 0, "all": "x"}, {"own": 1, "all": "x"}]
    with pytest.raises(TreeMismatch, match="for each of 2 processes, and this job has 1"):
        load(tmp_path, item="own")
    assert load(tmp_path, item="own", process=1) == 1
    assert load(tmp_path, item="all") == "x"


def test_empty_folders_come_back(tmp_path: Path) -> None:
    """A folder without a file is saved, restored, verified, copied and converted."""

    def make(folder: Path) -> None:
        (folder / "a" / "empty").mkdir(parents=True)
        (folder / "b").mkdir()
        (folder / "b" / "c").write_text("d")

    def folders(folder: Path) -> list[str]:
        return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))

    save(tmp_path / "one", items={"data": Files(make)}, step=3)
    convert(
        open_checkpoint(tmp_path / "one"), StorePath(LocalStorage(tmp_path / "two")), "holdfast"
    )
    for path in (tmp_path / "one", tmp_path / "two"):
        verify(path)
        assert load(path, item="data") == {"a/empty/": b"", "b/c": b"d"}
        assert load(path, Files(read=folders), item="data") == ["a", "a/empty", "b", "b/c"]
    with groups(2) as both:
        items = {"data": Files(make_own, shared=True)}
        at_once(
            [lambda group=group: save(tmp_path / "c", items=items, group=group) for group in both]
        )  # type: ignore[misc]
    assert [*load(tmp_path / "c", item="data")] == []


def make_own(folder: Path) -> None:
    (folder / "same").mkdir()


def test_processes_write_files_together(tmp_path: Path) -> None:
    """With `shared` each gets the files of all, on any number of processes; two that write one
    name, or below it, fail the save.
    """

    def saves(group: Any, root: Path, names: list[str]) -> Any:
        def write(folder: Path) -> None:
            path = folder / names[group.index]
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"of {group.index}")

        try:
            save(root, items={"data": Files(write, shared=True)}, group=group)
        except SaveFailed as error:
            return error
        return load(root, item="data")

    def save_both(root: Path, *names: str) -> list[Any]:
        with groups(2) as both:
            return at_once([lambda group=group: saves(group, root, [*names]) for group in both])  # type: ignore[misc]

    ends = [
        save_both(tmp_path / "a", "x/0", "x/1"),
        save_both(tmp_path / "b", "x", "x"),
        save_both(tmp_path / "c", "x", "x/1"),
    ]
    assert (
        ends[0] == [{"x/0": b"of 0", "x/1": b"of 1"}] * 2 == [load(tmp_path / "a", item="data")] * 2
    )
    for error in [*ends[1], *ends[2]]:
        assert "item 'data': processes 0 and 1 both wrote 'x'" in str(error)
    assert not (tmp_path / "b/checkpoint.json").exists()
    with pytest.raises(ValueError, match="expected one of both"):
        Files(write, per_process=True, shared=True)


def test_a_handler_that_fails_fails_all_processes(tmp_path: Path) -> None:
    """All are told which process and which item."""
    with groups(2) as both:
        ends = at_once(
            [
                lambda group=group: _saves(group, tmp_path, per_process=True, failing=1)
                for group in both
            ]
        )  # type: ignore[misc]
    for error in ends:
        assert (
            isinstance(error, SaveFailed)
            and error.process == 1
            and "'reader'" in str(error)
            and "no model" in str(error)
        )
    assert not list(tmp_path.glob("*/checkpoint.json"))


def test_damage_is_found_before_a_byte_is_seen(tmp_path: Path, scratch: Path) -> None:
    """One bit in one file: the reader is not called."""
    save(tmp_path / "one", items={"tokenizer": Files(write)})
    largest = max((tmp_path / "one" / "tokenizer").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[-1] ^= 1
    largest.write_bytes(data)
    for like in (None, Files(read=lambda folder: pytest.fail("it was called"))):
        with pytest.raises(Corrupt, match=largest.name):
            load(tmp_path / "one", like, item="tokenizer")
    assert list(scratch.iterdir()) == []


def test_a_like_of_another_kind_is_a_mismatch(tmp_path: Path) -> None:
    """A tree for files, files for a tree, and files without a reader: each is named."""
    items = {"tokenizer": Files(write), "model": {"w": np.ones(3)}}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, items=items).wait()
        for restore in (manager.restore, lambda like, item: load(tmp_path, like, item=item)):
            with pytest.raises(
                TreeMismatch,
                match=(
                    "'tokenizer' is of kind 'files', and its `like` is a dict; an item of files"
                    " takes"
                ),
            ):
                restore(like={"w": np.ones(3)}, item="tokenizer")  # type: ignore[operator]
            with pytest.raises(
                TreeMismatch, match="'model' is of kind 'tree', and its `like` is a Files"
            ):
                restore(like=Files(read=read), item="model")  # type: ignore[operator]
            with pytest.raises(ValueError, match="expects a `read`"):
                restore(like=Files(write), item="tokenizer")  # type: ignore[operator]
        with pytest.raises(StepNotFound, match="'other'"):
            manager.restore(like=Files(read=read), item="other")


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "/a",
        "/",
        "a//",
        "a//b",
        "a/../b",
        "./a",
        "a\\b",
        "a\0b",
        "a\nb",
        "x" * 1025,
        7,
        None,
    ],
)
def test_names_that_could_lead_astray(name: Any) -> None:
    """No part of a name may be empty, `.` or `..`."""
    assert not is_own_name(name)
    assert is_own_name("a/b..c/.d/...") and is_own_name("an/empty/folder/")


def test_a_long_file_needs_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is too long for one object is the caller's own: the error says what to pass."""
    monkeypatch.setattr(own_files, "JSON_LIMIT_BYTES", 1000)
    save(tmp_path, items={"data": Files(lambda folder: (folder / "a").write_bytes(bytes(1001)))})
    with pytest.raises(TreeMismatch, match=r"'a' has more than 1,000 bytes.*pass a `like`: Files"):
        load(tmp_path, item="data")
    assert load(tmp_path, Files(read=len_of), item="data") == 1


@pytest.mark.parametrize("names", [["a", "a/b"], ["a/b", "a"], ["a", "a"]])
def test_names_that_cannot_be_beside_each_other(names: list[str], tmp_path: Path) -> None:
    """A file that is a folder to another is hostile, where files are put."""
    with pytest.raises(HostileCheckpoint, match=r"'a(/b)?' cannot be there beside the other files"):
        put_files(tmp_path, [(name, [memoryview(b"x")]) for name in names], "somewhere")


def test_conversions_carry_files_and_read_orbaxs(tmp_path: Path) -> None:
    """A conversion to holdfast keeps files; an item of Orbax's whose handler is its writer's own is
    one of files.
    """
    save(
        tmp_path / "a" / "3", items={"tokenizer": Files(write), "model": {"w": np.ones(3)}}, step=3
    )
    convert(
        open_checkpoint(tmp_path / "a" / "3"), StorePath(LocalStorage(tmp_path / "b")), "holdfast"
    )
    assert load(tmp_path / "b", item="tokenizer") == CONTENTS and verify(tmp_path / "b").files == 5

    class OwnHandler(ocp.CheckpointHandler):
        def save(self, directory: Any, args: Any) -> None:
            (directory / "deep").mkdir()
            (directory / "deep" / "a.txt").write_text(args.text)

        def restore(self, directory: Any, args: Any = None) -> Any:
            return (directory / "deep" / "a.txt").read_text()

    @ocp.args.register_with_handler(OwnHandler, for_save=True, for_restore=True)
    class OwnArgs(ocp.args.CheckpointArgs):
        def __init__(self, text: str = "") -> None:
            self.text = text

    with ocp.CheckpointManager(tmp_path / "orbax") as manager:
        manager.save(
            1,
            args=ocp.args.Composite(
                notes=OwnArgs("hello"), state=ocp.args.StandardSave({"w": np.ones(3)})
            ),
        )
        manager.wait_until_finished()
    assert structure(tmp_path / "orbax").items["notes"].kind == "files"
    assert load(tmp_path / "orbax", item="notes") == {"deep/a.txt": b"hello"}
    with CheckpointManager(tmp_path / "orbax") as native:
        assert native.restore(1, Files(read=read), item="notes") == {"deep/a.txt": b"hello"}


def test_a_folder_is_no_handler(tmp_path: Path) -> None:
    """A path where a function is wanted is a mistake of the caller, seen where it is made."""
    with pytest.raises(
        TypeError, match=r"Files: write= expects a function of a folder, found Posi"
    ):
        Files(tmp_path)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Files: read= expects .*shutil.copytree"):
        Files(read="folder")  # type: ignore[arg-type]
