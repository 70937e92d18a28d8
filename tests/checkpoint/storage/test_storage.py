"""Every store of holdfast's passes the contract, over HTTP where it is a server's."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from holdfast.checkpoint import (
    CheckpointError,
    CheckpointManager,
    Json,
    Options,
    Storage,
    register_storage,
)
from holdfast.checkpoint.storage.base import CopiesFiles
from holdfast.checkpoint.storage.counting import CountingStorage
from holdfast.checkpoint.storage.path import open_storage
from holdfast.testing import StorageContract
from holdfast.testing.storage_contract import put
from tests.support.object_servers import (
    BUCKET,
    TensorStoreMemory,
    azure_server,
    gcs_server,
    rclone_server,
    s3_server,
    small_s3_server,
)

_numbers = itertools.count()


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, str]]:
    with s3_server() as query, gcs_server():
        yield {"s3": query, "gs": ""}


@pytest.fixture(scope="module")
def azure() -> Iterator[str]:
    with azure_server() as query:
        yield query


@pytest.fixture(scope="module")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with rclone_server(tmp_path_factory.mktemp("rclone")) as query:
        yield query


@pytest.fixture(scope="module")
def small_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with small_s3_server(tmp_path_factory.mktemp("small")) as query:
        yield query


class TestLocal(StorageContract):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return str(tmp_path / "root")


class TestLocalWithoutLinks(StorageContract):
    single_writer = True

    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return str(tmp_path / "root")


class TestCounting(StorageContract):
    """A store behind another one passes on what that one can do."""

    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        def opened(url: str, single_writer: bool) -> Storage:
            root = url.removeprefix("counting://")
            return CountingStorage(open_storage(root, single_writer=single_writer), count)

        def count(done: int) -> None:
            assert done >= 0

        register_storage("counting", opened)
        return f"counting://{tmp_path}/root"


class TestMemory(StorageContract):
    @pytest.fixture
    def url(self) -> str:
        return f"memory://contract/{next(_numbers)}"


class TestS3(StorageContract):
    @pytest.fixture
    def url(self, servers: dict[str, str]) -> str:
        return f"s3://{BUCKET}/contract/{next(_numbers)}{servers['s3']}"


class TestGcs(StorageContract):
    """Its emulator ignores conditions, and never answers an empty upload."""

    single_writer = True
    stores_empty_files = False

    @pytest.fixture
    def url(self, servers: dict[str, str]) -> str:
        return f"gs://{BUCKET}/contract/{next(_numbers)}{servers['gs']}"


class TestKvStore(StorageContract):
    """tensorstore's memory honours conditions, which the emulator of gs:// ignores."""

    @pytest.fixture
    def url(self) -> str:
        TensorStoreMemory.register()
        return f"tensorstore://contract/{next(_numbers)}"


class TestRclone(StorageContract):
    """A server that is none of Amazon's; it ignores conditions."""

    single_writer = True

    @pytest.fixture
    def url(self, rclone: str) -> str:
        return f"s3://{BUCKET}/contract/{next(_numbers)}{rclone}"


class TestSmallS3(StorageContract):
    """The server of the benchmarks."""

    @pytest.fixture
    def url(self, small_s3: str) -> str:
        return f"s3://{BUCKET}/contract/{next(_numbers)}{small_s3}"

    def test_a_file_is_copied(self, storage: Storage) -> None:
        """It copies by itself, as an incremental save asks; what is not there is not found."""
        assert isinstance(storage, CopiesFiles)
        put(storage, "1/state/a b", b"12345")
        storage.copy("1/state/a b", "2/state/a b")
        storage.delete(["1/state/a b"])
        assert storage.fetch("2/state/a b", 5) == b"12345"
        with pytest.raises(FileNotFoundError):
            storage.copy("1/state/a b", "3/state/a b")


class TestAzure(StorageContract):
    @pytest.fixture
    def url(self, azure: str) -> str:
        return f"az://{BUCKET}/contract/{next(_numbers)}{azure}"


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
