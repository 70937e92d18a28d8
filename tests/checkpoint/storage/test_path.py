"""Paths: which store a path or URL means, and folders in a store."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from holdfast.checkpoint import CheckpointManager, Corrupt, Storage, load, register_storage
from holdfast.checkpoint.storage.bucket import BucketStorage
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.checkpoint.storage.path import StorePath, open_storage, split


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
