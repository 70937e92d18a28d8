"""What every store has to pass, whoever wrote it.

A store's author registers the store's URLs and makes a class of the suite:

    register_storage("mine", lambda url, single_writer: MyStorage(url))

    class TestMyStorage(StorageContract):
        @pytest.fixture
        def url(self) -> str:
            return f"mine://bucket/{uuid.uuid4().hex}"
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import ClassVar

import numpy as np
import pytest

from holdfast.checkpoint import CheckpointManager, KeepLast, Options, Storage
from holdfast.checkpoint.steps.claims import Claims, Writer, this_writer
from holdfast.checkpoint.steps.garbage import sweep_files
from holdfast.checkpoint.steps.object_claims import open_claims
from holdfast.checkpoint.storage.base import ConditionalWrites, NameTaken, Part, PosixFolder
from holdfast.checkpoint.storage.path import open_storage
from holdfast.coordination import Fenced

RACERS = 6
RECORD = "1/checkpoint.json"
WAIT_S = 60.0


def put(storage: Storage, name: str, data: bytes) -> None:
    """Writes a small file."""
    storage.write(name, len(data), [(0, [memoryview(data)])])


def names(storage: Storage, folder: str, *, recursive: bool = False) -> list[str]:
    """Returns the names of a listing."""
    return [entry.name for entry in storage.list(folder, recursive=recursive)]


class StorageContract:
    """The tests that each store runs. A subclass overrides the fixture `url`.

    A store whose server ignores the conditions of writes is allowed by name: `single_writer` is
    then the promise that nobody else writes, and nothing races. `stores_empty_files` is False where
    a server cannot take an empty file.
    """

    single_writer: ClassVar[bool] = False
    stores_empty_files: ClassVar[bool] = True

    @pytest.fixture
    def url(self) -> str:
        """Returns the path or URL of a root in which nothing is; another one for each test."""
        raise NotImplementedError("override the fixture `url`")

    @pytest.fixture
    def storage(self, url: str) -> Storage:
        return open_storage(url, single_writer=self.single_writer)

    @pytest.fixture
    def claims(self, storage: Storage) -> Claims:
        return open_claims(storage, single_writer=self.single_writer)

    @pytest.fixture
    def writer(self, claims: Claims) -> Iterator[Writer]:
        """A writer that holds a claim."""
        writer = this_writer()
        claims.take(writer)
        yield writer
        claims.fence(writer.id)

    @pytest.fixture
    def options(self) -> Options:
        return Options(single_writer=self.single_writer)

    # --- What a store says of itself

    def test_it_says_what_it_can_do(self, storage: Storage) -> None:
        """It has a name for messages, some concurrency, and a way to keep writers apart."""
        assert storage.root
        assert storage.max_concurrency >= 1
        assert storage.max_file_bytes is None or storage.max_file_bytes >= 1 << 20
        assert storage.posix is not None or storage.conditions is not None

    # --- Files

    def test_what_is_written_is_read(self, storage: Storage) -> None:
        """Parts come in any order, with many buffers, typed ones and empty ones."""
        numbers = np.arange(1000, dtype="<u4")
        buffers = [numbers[index : index + 1].data for index in range(1000)]
        head = [memoryview(b"head"), memoryview(b""), memoryview(b"line")]
        parts: list[Part] = [(8, buffers), (0, head)]
        storage.write("1/state/a", 4008, iter(parts))
        assert storage.fetch("1/state/a", 4008) == b"headline" + numbers.tobytes()

    def test_ranges_are_read(self, storage: Storage) -> None:
        """Buffers are filled in turn; there are fewer bytes only at the end of the file."""
        data = bytes(range(256)) * 16
        put(storage, "1/state/a", data)
        first = bytearray(3)
        second = np.zeros(2, "<u4")
        assert storage.read("1/state/a", 5, [memoryview(first), second.data]) == 11
        assert bytes(first) == data[5:8]
        assert second.tobytes() == data[8:16]
        rest = bytearray(16)
        assert storage.read("1/state/a", len(data) - 8, [memoryview(rest)]) == 8
        assert rest[:8] == data[-8:]
        assert storage.read("1/state/a", len(data), [memoryview(rest)]) == 0

    def test_a_write_replaces_a_file(self, storage: Storage) -> None:
        """The whole file is replaced, by a shorter one too."""
        put(storage, "1/state/a", b"a long one")
        put(storage, "1/state/a", b"new")
        assert storage.size("1/state/a") == 3
        assert storage.fetch("1/state/a", 3) == b"new"

    def test_an_empty_file_is_a_file(self, storage: Storage) -> None:
        """It is listed and read, with no bytes."""
        if not self.stores_empty_files:
            pytest.skip("this store cannot take an empty file")
        put(storage, "1/state/empty", b"")
        assert storage.fetch("1/state/empty", 10) == b""
        assert names(storage, "1/state") == ["1/state/empty"]

    def test_a_missing_name_is_not_found(self, storage: Storage) -> None:
        """FileNotFoundError, whatever is asked of the name."""
        with pytest.raises(FileNotFoundError):
            storage.fetch("1/none", 10)
        with pytest.raises(FileNotFoundError):
            storage.read("1/none", 0, [memoryview(bytearray(1))])
        with pytest.raises(FileNotFoundError):
            storage.size("1/none")

    def test_a_longer_file_is_not_fetched(self, storage: Storage) -> None:
        """A file over the limit is OverflowError; one of the limit's size is read."""
        put(storage, "1/state/a", b"12345")
        with pytest.raises(OverflowError):
            storage.fetch("1/state/a", 4)
        assert storage.fetch("1/state/a", 5) == b"12345"

    def test_sizes(self, storage: Storage) -> None:
        """A short file and long ones have their sizes; a listing has the same, or None."""
        sizes = {"1/state/a": 5, "1/state/b": 1 << 20, "1/state/c": (3 << 20) + 17}
        for name, size in sizes.items():
            put(storage, name, bytes(size))
        assert {name: storage.size(name) for name in sizes} == sizes
        for entry in storage.list("1", recursive=True):
            assert entry.size in (None, sizes[entry.name])

    def test_an_error_of_the_parts_comes_through(self, storage: Storage) -> None:
        """It leaves at most a file that no record names."""

        def parts() -> Iterator[Part]:
            yield 0, [memoryview(b"12")]
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            storage.write("1/state/a", 4, parts())

    def test_threads_write_and_read_at_once(self, storage: Storage) -> None:
        """Each thread reads what it wrote, in one folder that all of them need first."""
        wrong: list[int] = []

        def work(number: int) -> None:
            name = f"1/state/{number}"
            data = bytes([number]) * 1000
            put(storage, name, data)
            if storage.fetch(name, 1000) != data:
                wrong.append(number)

        run_together(work)
        assert wrong == []
        assert len(names(storage, "1/state")) == RACERS

    # --- Names

    def test_a_listing_has_files_and_folders(self, storage: Storage) -> None:
        """Folders end in a slash; names are sorted, and relative to the root."""
        assert storage.list("1") == []
        assert storage.list("1", recursive=True) == []
        for name in ("1/b/y", "1/b/x", "1/a", "10/z"):
            put(storage, name, b"1")
        assert names(storage, "1") == ["1/a", "1/b/"]
        assert names(storage, "1", recursive=True) == ["1/a", "1/b/x", "1/b/y"]
        assert names(storage, "") == ["1/", "10/"]

    def test_a_listing_of_names_alone(self, storage: Storage) -> None:
        """It has the same names, and no sizes or times: nothing is asked about each file."""
        for name in ("1/b/y", "1/a"):
            put(storage, name, b"1")
        for recursive in (False, True):
            entries = storage.list("1", recursive=recursive, names_only=True)
            assert [entry.name for entry in entries] == names(storage, "1", recursive=recursive)
            for entry in entries:
                if not entry.name.endswith("/"):
                    assert (entry.size, entry.modified_s) == (None, 0.0)

    def test_deleting(self, storage: Storage) -> None:
        """Missing names and folders with something in them are passed over; empty folders go."""
        for name in ("1/b/y", "1/b/x", "1/a", "10/z"):
            put(storage, name, b"1")
        storage.delete(["1/b/x", "1/b/none", "1/b/", "1/"])
        assert names(storage, "1", recursive=True) == ["1/a", "1/b/y"]
        storage.delete(["1/b/y", "1/a", "1/b/", "1/", "7/"])
        assert storage.list("1") == []
        assert names(storage, "") == ["10/"]

    # --- Commits

    def test_a_commit_happens_once(self, storage: Storage, writer: Writer) -> None:
        """The first of many commits of a name wins, all others are refused."""
        outcomes: list[bytes | None] = []

        def commit(number: int) -> None:
            data = b"%d" % number
            try:
                storage.commit(RECORD, data, f".holdfast/{writer.id}")
                outcomes.append(data)
            except (NameTaken, FileExistsError):
                outcomes.append(None)

        racers = 1 if self.single_writer else RACERS
        run_together(commit, racers)
        won = [outcome for outcome in outcomes if outcome is not None]
        assert len(won) == 1
        assert len(outcomes) == racers
        assert storage.fetch(RECORD, 10) == won[0]
        commit(99)
        assert outcomes[-1] is None
        assert storage.fetch(RECORD, 10) == won[0]

    def test_a_commit_replaces_where_it_says_so(self, storage: Storage, writer: Writer) -> None:
        """With `replace` another record takes the name."""
        claim = f".holdfast/{writer.id}"
        storage.commit(RECORD, b"first", claim)
        storage.commit(RECORD, b"replaced", claim, replace=True)
        assert storage.fetch(RECORD, 10) == b"replaced"

    def test_a_commit_needs_its_claim(self, storage: Storage, claims: Claims) -> None:
        """A writer whose claim was taken away gets Fenced and changes nothing."""
        other = this_writer()
        claims.take(other)
        assert other.id in claims.standing()
        claims.fence(other.id)
        assert other.id not in claims.standing()
        with pytest.raises(Fenced, match="open a new manager"):
            storage.commit(RECORD, b"1", f".holdfast/{other.id}")
        with pytest.raises(FileNotFoundError):
            storage.fetch(RECORD, 10)
        claims.forget_fenced()

    # --- What a store can do besides

    @pytest.fixture
    def posix(self, storage: Storage) -> PosixFolder:
        if storage.posix is None:
            pytest.skip("this store is no POSIX folder")
        return storage.posix

    @pytest.fixture
    def conditions(self, storage: Storage) -> ConditionalWrites:
        if storage.conditions is None:
            pytest.skip("this store has no conditional writes")
        return storage.conditions

    def test_a_link_is_a_second_name(self, storage: Storage, posix: PosixFolder) -> None:
        """It outlives the first name, and is refused for a file of another size."""
        if not posix.can_link:
            pytest.skip("this store has no hard links")
        put(storage, "1/state/a", b"12345")
        with pytest.raises(OSError, match="no file of 4 bytes"):
            posix.link("1/state/a", "2/state/b", 4)
        posix.link("1/state/a", "2/state/b", 5)
        posix.make_durable("2/state")
        storage.delete(["1/state/a"])
        assert storage.fetch("2/state/b", 5) == b"12345"

    def test_a_value_is_written_on_a_condition(self, conditions: ConditionalWrites) -> None:
        """A generation that is not the last one stops a write."""
        if self.single_writer:
            pytest.skip("a single writer sets no conditions")
        nothing, absent = conditions.get("v")
        assert nothing is None
        assert conditions.put("v", b"one", absent)
        assert not conditions.put("v", b"two", absent)
        value, first = conditions.get("v")
        assert value == b"one"
        assert conditions.put("v", b"three", first)
        assert not conditions.put("v", b"four", first)
        assert conditions.get("v")[0] == b"three"
        assert conditions.put("v", b"five")
        assert conditions.get("v")[0] == b"five"
        assert list(conditions.keys("")) == ["v"]

    # --- Managers

    def test_a_manager_runs_on_it(self, url: str, options: Options) -> None:
        """Steps are saved, deleted, overwritten and restored, and known to the next manager."""
        with CheckpointManager(url, keep_policy=KeepLast(2), options=options) as manager:
            for step in range(4):
                manager.save(step, {"w": np.arange(100.0) + step}, metrics={"loss": step})
            manager.save(3, {"w": np.arange(5.0)}, overwrite=True)
            manager.wait_until_finished()
            assert manager.all_steps() == [2, 3]
            assert np.array_equal(manager.restore()["w"], np.arange(5.0))
        with CheckpointManager(url, options=options) as manager:
            assert manager.all_steps() == [2, 3]
            assert np.array_equal(manager.restore(2)["w"], np.arange(100.0) + 2)
            assert manager.metrics(2) == {"loss": 2.0}
            manager.delete(3)
            assert manager.latest_step() == 2
        storage = open_storage(url, single_writer=self.single_writer)
        kept = [name for name in names(storage, "", recursive=True) if name[0] != "."]
        assert len(kept) == 2
        assert {name.split("/")[0] for name in kept} == {"2"}

    def test_what_a_dead_writer_left_is_swept(
        self, url: str, storage: Storage, options: Options
    ) -> None:
        """Packs that never came to their commit go, and the late commit is stopped."""
        with CheckpointManager(url, options=options) as manager:
            manager.save(5, {"w": np.arange(9.0)}, metadata={"a": [1]})
        claims = open_claims(storage, single_writer=self.single_writer, claim_age_s=1e-6)
        before = names(storage, "", recursive=True)
        dead = this_writer()
        claims.take(dead)
        packs = [
            f"5/state/00000-00000-{dead.id}.safetensors",
            f"6/data/00000-j-{dead.id}.json",
            f"6/state/00000-00000-{dead.id}.safetensors",
        ]
        for name in packs:
            put(storage, name, b"half")
        assert sweep_files(storage, claims) == [], "its writer lives"
        claims.fence(dead.id)
        assert sorted(sweep_files(storage, claims)) == packs
        assert sweep_files(storage, claims) == []
        assert names(storage, "", recursive=True) == before
        with pytest.raises(Fenced):
            storage.commit("5/checkpoint.json", b"late", f".holdfast/{dead.id}", replace=True)
        self._check_tombstones(storage)
        self._check_saves_after_a_sweep(url, options)
        hints = {".holdfast/saved.json"}  # for those who wait for steps, on a store with conditions
        assert len({*names(storage, "", recursive=True)} - hints) == 4

    def _check_tombstones(self, storage: Storage) -> None:
        """A tombstone stays until the next writer of its step."""
        if storage.conditions is not None:
            assert list(storage.conditions.keys("6/")) == ["6/checkpoint.json"]

    def _check_saves_after_a_sweep(self, url: str, options: Options) -> None:
        with CheckpointManager(url, options=options) as manager:
            assert manager.all_steps() == [5]
            assert np.array_equal(manager.restore()["w"], np.arange(9.0))
            assert manager.metadata(5) == {"a": [1]}
            manager.save(5, {"w": np.ones(2)}, overwrite=True)
            manager.save(6, {"w": np.ones(3)})
            manager.wait_until_finished()
            assert manager.restore(5)["w"].shape == (2,)
            assert manager.restore(6)["w"].shape == (3,)


def run_together(work: Callable[[int], None], count: int = RACERS) -> None:
    """Does `work(0)`, `work(1)`, ... on threads that begin together."""
    barrier = threading.Barrier(count)

    def run(number: int) -> None:
        barrier.wait(WAIT_S)
        work(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
