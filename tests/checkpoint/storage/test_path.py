"""Paths: which store a path or URL means, and folders in a store."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.checkpoint import (
    CheckpointManager,
    Corrupt,
    EveryNSteps,
    Local,
    Storage,
    convert,
    iterate_steps,
    load,
    load_async,
    register_storage,
    save,
    save_async,
    structure,
    sweep,
    verify,
    wait_for_new_step,
)
from holdfast.checkpoint.storage.bucket import BucketStorage
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.checkpoint.storage.path import StorePath, absolute, open_storage, split


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/a/b", ("/a", "b")),
        ("/a/b/", ("/a", "b")),
        ("/a", ("/", "a")),
        ("gs://bucket/a/b", ("gs://bucket/a", "b")),
        ("s3://bucket/a/b/?endpoint=http://h:1", ("s3://bucket/a?endpoint=http://h:1", "b")),
    ],
)
def test_a_path_has_a_parent_and_a_name(path: str, expected: tuple[str, str]) -> None:
    """The last part is the name; what follows a `?` in a URL stays with the folder."""
    assert split(path) == expected


def test_a_relative_path_is_made_absolute() -> None:
    """A path without a root is one in the working directory."""
    assert split("a") == (os.getcwd(), "a")


def test_a_path_means_a_store(tmp_path: Path) -> None:
    """A folder, with or without file://, is a local store; gs://, s3:// and memory:// are object
    stores; another scheme is refused.
    """
    for path in (tmp_path, f"file://{tmp_path}"):
        storage = open_storage(path)
        assert isinstance(storage, LocalStorage) and storage.root == str(tmp_path)
    memory = open_storage("memory://paths/a", single_writer=True)
    assert (
        isinstance(memory, BucketStorage)
        and memory.root == "memory://paths/a"
        and memory.single_writer
    )
    with pytest.raises(
        ValueError, match="expected a folder, gs://, gcs_grpc://, s3://, az:// or memory://"
    ):
        open_storage("http://host/a")


def test_a_file_url_is_what_others_write(tmp_path: Path) -> None:
    """As `Path.as_uri` has it, of this machine: another host, or a relative path, is refused."""
    folder = tmp_path / os.fsdecode(b"a b#%20\xff")
    for url in (folder.as_uri(), folder.as_uri().replace("file://", "file://localhost")):
        assert open_storage(url).root == str(folder)
    for url in ("file://data/x", "file://./x", "file://~/x"):
        with pytest.raises(ValueError, match=r"found 'file://.*; expected file:///folder"):
            open_storage(url)
    for url in ("file://", "file://localhost"):
        with pytest.raises(ValueError, match="which is empty"):
            open_storage(url)


def test_every_letter_of_a_url_is_one_of_a_name() -> None:
    """Roots that differ by a `#` or a `%` alone are two, and a folder is the same one whether it
    is named by its own URL or in its parent's store.
    """
    urls = [f"memory://letters{end}/run{end}" for end in ("", "#1", "#2", "%201", " 1", "%23")]
    for number, url in enumerate(urls):
        save(url, {"w": np.full(3, number)})
    assert [load(url)["w"][0] for url in urls] == list(range(len(urls)))
    assert all("checkpoint.json" in StorePath.of(url).names() for url in urls)


def test_a_scheme_of_somebody_elses(tmp_path: Path) -> None:
    """A registered scheme means the opener's store, which managers and loads use like any other."""

    def opened(url: str, single_writer: bool) -> Storage:
        assert not single_writer
        return LocalStorage(tmp_path / url.removeprefix("elsewhere://"))

    register_storage("elsewhere", opened)
    with CheckpointManager("elsewhere://run") as manager:
        manager.save(1, {"w": np.arange(3.0)}).wait()
    assert load("elsewhere://run")["w"].tolist() == [0, 1, 2]
    assert (tmp_path / "run/1/checkpoint.json").exists()


def test_a_folder_lists_its_names_and_fetches_its_files(tmp_path: Path) -> None:
    """Names are relative to the folder; a file that is missing, or too large to be metadata, is
    Corrupt and named.
    """
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/file").write_bytes(b"0123456789")
    folder = StorePath.of(tmp_path) / "a"
    assert (
        str(folder) == f"{tmp_path}/a"
        and folder.basename == "a"
        and folder.name == f"{tmp_path.name}/a"
    )
    assert {name: entry.size for name, entry in folder.names().items()} == {"b/": 0, "file": 10}
    assert (folder / "none").names() == {} and list(StorePath(LocalStorage(tmp_path)).names()) == [
        "a/"
    ]
    buffer = bytearray(4)
    assert (
        folder.fetch("file") == b"0123456789"
        and folder.read("file", 7, [memoryview(buffer)]) == 3
        and buffer[:3] == b"789"
    )
    with pytest.raises(Corrupt, match="is missing") as caught:
        folder.fetch("gone")
    assert caught.value.file == f"{tmp_path}/a/gone"
    with pytest.raises(Corrupt, match=r"is no metadata file: .* has 10 bytes; at most 9"):
        folder.fetch("file", 9)


# --- as callers give it

TREE = {"w": np.arange(3)}
TAKES_PATH: dict[str, Callable[[Any], object]] = {
    "save": lambda path: save(path, TREE),
    "save_async": lambda path: save_async(path, TREE),
    "load": load,
    "load_async": load_async,
    "verify": verify,
    "structure": structure,
    "convert": lambda path: convert(path, "target"),
    "convert to": lambda path: convert("source", path),
    "sweep": sweep,
    "iterate_steps": iterate_steps,
    "wait_for_new_step": wait_for_new_step,
    "CheckpointManager": CheckpointManager,
    "Local": lambda path: Local(path, save_policy=EveryNSteps(1)),
}


@pytest.mark.parametrize("call", TAKES_PATH)
def test_what_is_no_path_is_refused_at_the_call(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is written: an empty text, bytes, a tree, a URL that pathlib has cut."""
    monkeypatch.chdir(tmp_path)
    take = TAKES_PATH[call]
    with pytest.raises(
        ValueError, match=r"the path '', which is empty; expected a folder or a URL"
    ):
        take("")
    with pytest.raises(
        TypeError, match=r"found bytes .* as the path; .* write os.fsdecode\(path\)"
    ):
        take(b"folder")
    with pytest.raises(TypeError, match=r"found dict .* as the path; expected text or a pathlib"):
        take(TREE)
    with pytest.raises(ValueError, match="found the path 's3:/b/x'; expected s3://"):
        take(Path("s3://b/x"))
    assert not list(tmp_path.iterdir())


def test_the_current_folder_is_that_of_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for what begins later: a thread, a generator, a local tier."""
    here = tmp_path / "here"
    there = tmp_path / "there"
    for folder, size in ((here, 3), (there, 4)):
        save(folder / "x", {"w": np.arange(size)})
    monkeypatch.chdir(here)
    future = load_async("x")
    saved = save_async("y", TREE)
    steps = iterate_steps("x", timeout_s=0.01)
    local = Local("fast", save_policy=EveryNSteps(1))
    manager = CheckpointManager("root")
    monkeypatch.chdir(there)
    with manager:
        manager.save(1, TREE)
    saved.wait()
    assert future.result()["w"].shape == (3,)
    assert list(steps) == []
    assert local.path == str(here / "fast")
    assert sorted(os.listdir(here)) == ["root", "x", "y"] and os.listdir(there) == ["x"]


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a shell: at the beginning alone."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    save("~/x", TREE)
    save(Path("~", "y"), TREE)
    assert sorted(os.listdir(tmp_path / "home")) == ["x", "y"] and os.listdir(tmp_path) == ["home"]
    assert absolute("./~/x") == str(tmp_path / "~" / "x")


def test_links_stay_but_those_that_dots_lead_out_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path is opened as the kernel opens it."""
    (tmp_path / "far" / "folder").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "folder")
    monkeypatch.chdir(tmp_path)
    assert absolute("link/x") == str(tmp_path / "link" / "x")
    assert absolute("link/../x") == str(tmp_path / "far" / "x")
    assert absolute("./a//b/") == str(tmp_path / "a" / "b")
    assert absolute("s3://bucket/a/../b") == "s3://bucket/a/../b"
    save("link/../x", TREE)
    assert (tmp_path / "far" / "x" / "checkpoint.json").exists()
