"""What is particular to local folders: vectored I/O, commits by link or rename, folders that come
and go.
"""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import numpy as np
import pytest

from holdfast.checkpoint import CheckpointManager
from holdfast.checkpoint.storage import local
from holdfast.checkpoint.storage.base import NameTaken
from holdfast.checkpoint.storage.local import FOLDER_TRIES, IOV_MAX, LocalStorage
from holdfast.checkpoint.storage.tombstone import RECORD_NAME
from holdfast.coordination import Fenced


def test_more_buffers_than_one_call_takes(tmp_path: Path) -> None:
    """Thousands of buffers of odd sizes, empty ones among them, are written and read as one
    stretch.
    """
    storage = LocalStorage(tmp_path)
    lengths = [index % 7 for index in range(3 * IOV_MAX)]
    data = bytes(index % 251 for index in range(sum(lengths)))
    ends = list(itertools.accumulate(lengths))
    buffers = [
        memoryview(data[end - length : end]) for end, length in zip(ends, lengths, strict=True)
    ]
    storage.write("a", len(data), [(0, buffers)])
    assert (tmp_path / "a").read_bytes() == data
    into = [memoryview(bytearray(length)) for length in lengths]
    assert storage.read("a", 0, into) == len(data) and b"".join(into) == data
    assert storage.read("a", 5, into) == len(data) - 5


@pytest.mark.parametrize("single_writer", [False, True])
def test_a_commit_makes_whole_files_once(single_writer: bool, tmp_path: Path) -> None:
    """By link or by rename: the second commit is refused, `replace` replaces, and the claim's
    folder is left empty.
    """
    storage = LocalStorage(tmp_path, single_writer=single_writer)
    (tmp_path / "claim").mkdir()
    storage.commit("1/record", b"one", "claim")
    with pytest.raises(NameTaken):
        storage.commit("1/record", b"two", "claim")
    assert (tmp_path / "1/record").read_bytes() == b"one"
    storage.commit("1/record", b"three", "claim", replace=True)
    assert (tmp_path / "1/record").read_bytes() == b"three" and list(
        (tmp_path / "claim").iterdir()
    ) == []


def test_a_commit_without_its_claim_is_fenced(tmp_path: Path) -> None:
    """Where the claim's folder is gone, nothing is committed."""
    with pytest.raises(Fenced, match="was taken away"):
        LocalStorage(tmp_path).commit("1/record", b"one", "claim")
    assert not (tmp_path / "1").exists()


def test_sizes_are_of_files(tmp_path: Path) -> None:
    """A file's size is returned, a folder is IsADirectoryError, and the root may be missing
    altogether.
    """
    storage = LocalStorage(tmp_path / "root")
    assert storage.list("") == [] and storage.list("a", recursive=True) == []
    storage.write("a/b", 3, [(0, [memoryview(b"abc")])])
    assert storage.size("a/b") == 3
    with pytest.raises(IsADirectoryError):
        storage.size("a")
    assert storage.list("a/b") == []


def test_a_file_that_is_deleted_while_listing_and_folders_that_are_not_empty(
    tmp_path: Path,
) -> None:
    """Folders with something in them stay, empty ones go, and a missing name is done."""
    storage = LocalStorage(tmp_path)
    storage.write("a/b/c", 0, [])
    storage.delete(["a/b/", "a/", "none", "none/", "a/b/c/d"])
    assert (tmp_path / "a/b/c").exists()
    storage.delete(["a/b/c", "a/b/", "a/"])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_swept_away_is_made_again(tmp_path: Path) -> None:
    """While a sweep removes the empty folder of a write, fewer times than are tried, no write
    fails.
    """
    storage = LocalStorage(tmp_path)

    def sweep() -> None:
        for _ in range(FOLDER_TRIES - 2):
            storage.delete(["1/state/", "1/"])

    for number in range(30):
        sweeper = threading.Thread(target=sweep)
        sweeper.start()
        storage.write(f"1/state/{number}", 1, [(0, [memoryview(b"x")])])
        sweeper.join()
        storage.delete([f"1/state/{number}"])


def test_a_folder_is_synced_once_for_all_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within `synced_once` no write syncs its folder; the end does, once, unless there was an
    error. Other folders are synced by each write, as without it.
    """
    synced: list[str] = []
    sync_folder = local.sync_folder

    def counted(folder: Path) -> None:
        synced.append(Path(folder).name)
        sync_folder(folder)

    storage = LocalStorage(tmp_path)
    storage.write("item/first", 1, [(0, [memoryview(b"1")])])
    monkeypatch.setattr(local, "sync_folder", counted)
    with storage.synced_once("item"):
        for number in range(4):
            storage.write(f"item/{number}", 1, [(0, [memoryview(b"1")])])
        assert synced == []
        storage.write("other", 1, [(0, [memoryview(b"1")])])
        assert synced == [tmp_path.name]
    assert synced == [tmp_path.name, "item"]
    storage.write("item/last", 1, [(0, [memoryview(b"1")])])
    assert synced == [tmp_path.name, "item", "item"]
    with pytest.raises(KeyError), storage.synced_once("item"):
        raise KeyError
    with storage.synced_once("nothing"):
        pass
    assert synced == [tmp_path.name, "item", "item"]


def test_a_save_syncs_the_folder_of_an_item_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four packs take one sync of their folder, which comes before the record."""
    synced: list[str] = []
    sync_folder = local.sync_folder

    def counted(folder: Path) -> None:
        path = Path(folder)
        synced.append(path.relative_to(tmp_path).as_posix())
        if path.name == "state":
            assert len(list(path.iterdir())) == 4
            assert not (path.parent / RECORD_NAME).exists()
        sync_folder(folder)

    with CheckpointManager(tmp_path) as manager:
        (tmp_path / "1" / "state").mkdir(parents=True)
        monkeypatch.setattr(local, "sync_folder", counted)
        manager.save(1, {name: np.zeros(2 << 20) for name in "abcd"}).wait()
    assert synced.count("1/state") == 1, synced
