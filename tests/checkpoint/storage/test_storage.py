"""The contract of a Storage: every store passes the same tests, over HTTP where it is a
server's.
"""

from __future__ import annotations

import itertools
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from holdfast.checkpoint import CheckpointError, CheckpointManager, Json, KeepLast, Options
from holdfast.checkpoint.steps.claims import Claims, Writer, this_writer
from holdfast.checkpoint.steps.garbage import sweep_files
from holdfast.checkpoint.steps.object_claims import open_claims
from holdfast.checkpoint.storage.base import NameTaken, Storage
from holdfast.checkpoint.storage.object import ObjectStorage
from holdfast.checkpoint.storage.path import open_storage
from holdfast.coordination import Fenced
from tests.support.object_servers import AZURITE, BUCKET, azure_server, gcs_server, s3_server

_numbers = itertools.count()
LOOSE = (  # its emulator ignores conditions: allowed by name, with the promise of a single writer
    "gs"
)


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, str]]:
    with s3_server() as query, gcs_server():
        yield {"s3": query, "gs": ""}


@pytest.fixture(scope="module")
def azure() -> Iterator[str]:
    if shutil.which(AZURITE) is None:
        pytest.skip("Azurite is not installed: npm install -g azurite")
    with azure_server() as query:
        yield query


@pytest.fixture(params=["local", "memory", "s3", "gs", "az"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    kind, number = request.param, next(_numbers)
    if kind in ("local", "memory"):
        return str(tmp_path / "root") if kind == "local" else f"memory://contract/{number}"
    query = (
        request.getfixturevalue("azure")
        if kind == "az"
        else request.getfixturevalue("servers")[kind]
    )
    return f"{kind}://{BUCKET}/contract/{number}{query}"


@pytest.fixture
def opened(url: str) -> Iterator[tuple[Storage, Claims, Writer]]:
    storage = open_storage(url, single_writer=url.startswith(LOOSE))
    claims = open_claims(storage, single_writer=url.startswith(LOOSE))
    writer = this_writer()
    claims.take(writer)
    yield storage, claims, writer
    claims.fence(writer.id)


def put(storage: Storage, name: str, data: bytes) -> None:
    storage.write(name, len(data), [(0, [memoryview(data)])])


def test_what_is_written_is_read(opened: tuple[Storage, Claims, Writer]) -> None:
    """Parts in any order, many buffers, typed buffers and empty ones; ranges read back, fewer bytes
    only at the end.
    """
    storage, _, _ = opened
    numbers = np.arange(1000, dtype="<u4")
    buffers = [memoryview(numbers[i : i + 1]) for i in range(1000)]
    storage.write(
        "1/state/a",
        4008,
        iter([(8, buffers), (0, [memoryview(b"head"), memoryview(b""), memoryview(b"line")])]),
    )
    assert storage.fetch("1/state/a", 4008) == b"headline" + numbers.tobytes()
    first, second = bytearray(3), np.zeros(2, "<u4")
    assert storage.read("1/state/a", 5, [memoryview(first), memoryview(second)]) == 11
    assert bytes(first) == b"ine" and list(second) == [0, 1]
    rest = bytearray(16)
    assert (
        storage.read("1/state/a", 4000, [memoryview(rest)]) == 8
        and rest[:8] == numbers[-2:].tobytes()
    )
    assert storage.read("1/state/a", 4008, [memoryview(rest)]) == 0
    put(storage, "1/state/a", b"new")
    assert storage.fetch("1/state/a", 3) == b"new"
    if not storage.root.startswith(LOOSE):  # its emulator never answers an empty upload
        put(storage, "1/state/empty", b"")
        assert storage.fetch("1/state/empty", 10) == b""


def test_missing_and_too_long(opened: tuple[Storage, Claims, Writer]) -> None:
    """A missing name is FileNotFoundError; a file over the limit is OverflowError."""
    storage, _, _ = opened
    with pytest.raises(FileNotFoundError):
        storage.fetch("1/none", 10)
    with pytest.raises(FileNotFoundError):
        storage.read("1/none", 0, [memoryview(bytearray(1))])
    put(storage, "1/state/a", b"12345")
    with pytest.raises(OverflowError):
        storage.fetch("1/state/a", 4)
    with pytest.raises(FileNotFoundError):
        storage.size("1/none")


def test_sizes(opened: tuple[Storage, Claims, Writer]) -> None:
    """The size of a short file and of a long one; a listing has the same, or None."""
    storage, _, _ = opened
    sizes = {"1/state/a": 5, "1/state/b": 1 << 20, "1/state/c": (3 << 20) + 17}
    for name, size in sizes.items():
        put(storage, name, bytes(size))
    assert {name: storage.size(name) for name in sizes} == sizes
    assert all(
        entry.size in (None, sizes[entry.name]) for entry in storage.list("1", recursive=True)
    )


def test_an_error_while_writing_leaves_at_most_an_unnamed_file(
    opened: tuple[Storage, Claims, Writer],
) -> None:
    """An exception from the parts comes through."""
    storage, _, _ = opened

    def parts() -> Iterator[tuple[int, list[memoryview]]]:
        yield 0, [memoryview(b"12")]
        raise KeyError("mine")

    with pytest.raises(KeyError):
        storage.write("1/state/a", 4, parts())


def test_listing_and_deleting(opened: tuple[Storage, Claims, Writer]) -> None:
    """Folders end in a slash, names are sorted and relative to the root; deleting what is missing
    is done.
    """
    storage, _, _ = opened
    assert storage.list("1") == [] and storage.list("1", recursive=True) == []
    for name in ("1/b/y", "1/b/x", "1/a", "10/z"):
        put(storage, name, b"1")
    assert [entry.name for entry in storage.list("1")] == ["1/a", "1/b/"]
    assert [entry.name for entry in storage.list("1", recursive=True)] == ["1/a", "1/b/x", "1/b/y"]
    assert [entry.name for entry in storage.list("")] == [".holdfast/", "1/", "10/"]
    storage.delete(["1/b/x", "1/b/none", "1/b/", "1/"])
    assert [entry.name for entry in storage.list("1", recursive=True)] == ["1/a", "1/b/y"]
    storage.delete(["1/b/y", "1/a", "1/b/", "1/", "7/"])
    assert storage.list("1") == [] and [entry.name for entry in storage.list("10")] == ["10/z"]


def test_a_listing_of_names_alone(opened: tuple[Storage, Claims, Writer]) -> None:
    """It has the same names, and no sizes or times: nothing is asked about each file."""
    storage, _, _ = opened
    for name in ("1/b/y", "1/a"):
        put(storage, name, b"1")
    for recursive in (False, True):
        names = storage.list("1", recursive=recursive, names_only=True)
        assert [entry.name for entry in names] == [
            entry.name for entry in storage.list("1", recursive=recursive)
        ]
        assert {
            (entry.size, entry.modified_s) for entry in names if not entry.name.endswith("/")
        } == {(None, 0.0)}


def test_a_commit_happens_once(opened: tuple[Storage, Claims, Writer]) -> None:
    """The first of many commits of a name wins, all others are refused; `replace` replaces."""
    storage, _, writer = opened
    claim = f".holdfast/{writer.id}"
    name = "1/checkpoint.json"
    outcomes: list[str] = []
    several = 1 if storage.root.startswith(LOOSE) else 6

    def commit(data: bytes) -> None:
        try:
            storage.commit(name, data, claim)
            outcomes.append(data.decode())
        except (NameTaken, FileExistsError):
            outcomes.append("")

    threads = [
        threading.Thread(target=commit, args=(str(number).encode(),)) for number in range(several)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    won = [outcome for outcome in outcomes if outcome]
    assert len(won) == 1 and len(outcomes) == several and storage.fetch(name, 10) == won[0].encode()
    commit(b"late")
    assert outcomes[-1] == ""
    storage.commit(name, b"replaced", claim, replace=True)
    assert storage.fetch(name, 10) == b"replaced"


def test_a_commit_needs_its_claim(opened: tuple[Storage, Claims, Writer]) -> None:
    """A writer whose claim was taken away gets Fenced and changes nothing."""
    storage, claims, _ = opened
    other = this_writer()
    claims.take(other)
    assert other.id in claims.standing()
    claims.fence(other.id)
    assert other.id not in claims.standing()
    with pytest.raises(Fenced, match="open a new manager"):
        storage.commit("1/checkpoint.json", b"1", f".holdfast/{other.id}")
    with pytest.raises(FileNotFoundError):
        storage.fetch("1/checkpoint.json", 10)
    claims.forget_fenced()


def test_a_manager_runs_on_it(url: str) -> None:
    """Saves, deletions, overwriting, restoring and opening again are the same on every store."""
    options = Options(single_writer=url.startswith(LOOSE))
    with CheckpointManager(url, keep_policy=KeepLast(2), options=options) as manager:
        for step in range(4):
            manager.save(step, {"w": np.arange(100.0) + step}, metrics={"loss": step})
        manager.save(3, {"w": np.arange(5.0)}, overwrite=True)
        manager.wait_until_finished()
        assert manager.all_steps() == [2, 3] and np.array_equal(
            manager.restore()["w"], np.arange(5.0)
        )
    with CheckpointManager(url, options=options) as manager:
        manager._worker.wait(60)
        assert manager.all_steps() == [2, 3] and np.array_equal(
            manager.restore(2)["w"], np.arange(100.0) + 2
        )
        assert manager.metrics(2) == {"loss": 2.0}
        manager.delete(3)
        assert manager.latest_step() == 2
        left = {
            entry.name
            for entry in manager._storage.list("", recursive=True)
            if not entry.name.startswith(".holdfast")
        }
    assert {name.split("/")[0] for name in left} == {"2"} and len(left) == 2


def test_what_a_dead_writer_left_goes(url: str) -> None:
    """Packs of a save and of an overwrite that never came to their commit are swept, and all that
    told of them; the step stays.
    """
    options = Options(single_writer=url.startswith(LOOSE))
    with CheckpointManager(url, options=options) as manager:
        manager.save(5, {"w": np.arange(9.0)}, metadata={"a": [1]})
    storage = open_storage(url, single_writer=options.single_writer)
    claims = open_claims(storage, single_writer=options.single_writer, claim_age_s=1e-6)
    before = {entry.name for entry in storage.list("", recursive=True)}
    dead, packs = (
        this_writer(),
        [
            "5/state/00000-00000-{}.safetensors",
            "6/state/00000-00000-{}.safetensors",
            "6/data/00000-j-{}.json",
        ],
    )
    claims.take(dead)
    packs = [name.format(dead.id) for name in packs]
    for name in packs:
        put(storage, name, b"half")
    assert sweep_files(storage, claims) == [], "its writer lives"
    claims.fence(dead.id)
    assert sorted(sweep_files(storage, claims)) == sorted(packs)
    assert (
        sweep_files(storage, claims) == []
        and {entry.name for entry in storage.list("", recursive=True)} == before
    )
    with pytest.raises(Fenced):
        storage.commit("5/checkpoint.json", b"late", f".holdfast/{dead.id}", replace=True)
    if isinstance(storage, ObjectStorage):
        assert list(storage.keys("6/")) == (
            [] if storage.deletes_on_condition else ["6/checkpoint.json"]
        )
    with CheckpointManager(url, options=options) as manager:
        assert (
            manager.all_steps() == [5]
            and np.array_equal(manager.restore()["w"], np.arange(9.0))
            and manager.metadata(5) == {"a": [1]}
        )
        manager.save(5, {"w": np.ones(2)}, overwrite=True)
        manager.save(6, {"w": np.ones(3)})
        manager.wait_until_finished()
        assert manager.restore(5)["w"].shape == (2,) and manager.restore(6)["w"].shape == (3,)
    assert len(storage.list("", recursive=True)) == 4


def test_a_store_that_ignores_conditions_is_refused(servers: dict[str, str]) -> None:
    """Opening for writing says what the store did and what to promise; with the promise it
    works.
    """
    url = f"gs://{BUCKET}/refused"
    with pytest.raises(
        CheckpointError,
        match=r"ignores the condition of a conditional write .*Options\(single_writer=True\)",
    ):
        CheckpointManager(url)
    with CheckpointManager(url, options=Options(single_writer=True)) as manager:
        manager.save(1, {"w": np.ones(3)})


def test_files_and_folders_have_the_modes_that_were_asked_for(tmp_path: Path) -> None:
    """Under any umask: root, steps, items, packs, records and JSON; saves over a step, sweeps and
    deletions still work.
    """
    options = Options(file_mode=0o640, folder_mode=0o750)
    before = os.umask(0o077)
    try:
        with CheckpointManager(tmp_path / "run", options=options) as manager:
            for overwrite in (False, True):
                manager.save(
                    1, items={"a": {"w": np.ones(3)}, "b": Json(1)}, overwrite=overwrite
                ).wait()
            manager.save(2, {"w": np.ones(3)}).wait()
            manager.delete(2)
    finally:
        os.umask(before)
    made = [
        tmp_path / "run",
        *(path for path in (tmp_path / "run").rglob("*") if ".holdfast" not in path.parts),
    ]
    assert {path.name for path in made} > {"run", "1", "a", "b", "checkpoint.json"}
    assert {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in made} == {
        (True, 0o750),
        (False, 0o640),
    }


def test_modes_that_have_no_effect_or_lock_the_writer_out_are_refused() -> None:
    """A store of objects has none; a writer needs to read what it has written."""
    with pytest.raises(ValueError, match="memory://a/ has no modes"):
        CheckpointManager("memory://a/", options=Options(file_mode=0o640))
    for wrong in ({"file_mode": 0o040}, {"folder_mode": 0o640}, {"file_mode": "640"}):
        with pytest.raises(ValueError, match="expects a mode that has at least"):
            Options(**wrong)  # type: ignore[arg-type]
