"""Holds: how long a step is held, by whose clock, and that names alone say it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.checkpoint import CheckpointError
from holdfast.checkpoint.steps.claims import Writer
from holdfast.checkpoint.steps.garbage import sweep_files
from holdfast.checkpoint.steps.holds import (
    HOLDS,
    add_hold,
    drop_hold,
    held_steps,
    hold,
    letting_go,
    list_marks,
)
from holdfast.checkpoint.steps.object_claims import open_claims
from holdfast.checkpoint.storage.base import Entry, Storage
from holdfast.checkpoint.storage.counting import CountingStorage
from holdfast.checkpoint.storage.kvstore import KvStoreStorage
from holdfast.checkpoint.storage.local import LocalStorage

WRITER = "a" * 8


@pytest.fixture(params=["file", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    make: Callable[[], Storage] = {
        "file": lambda: LocalStorage(tmp_path),
        "memory": lambda: KvStoreStorage(f"memory://holds{tmp_path}"),
    }[request.param]
    return make()


def begin_step(storage: Storage, step: int) -> None:
    storage.write(f"{step}/checkpoint.json", 2, [(0, [memoryview(b"{}")])])


@pytest.mark.parametrize("seconds", [1e9, float("inf")])
def test_a_hold_may_be_for_good(storage: Storage, seconds: float) -> None:
    """Or for as long as a name can say."""
    add_hold(storage, 7, seconds)
    assert held_steps(storage) == {7}


def test_each_of_its_holds_holds_a_step(storage: Storage) -> None:
    """Several holds on a step are as good as one; it is free when the last is dropped. Dropping
    twice is no error.
    """
    assert held_steps(storage) == set()
    first = add_hold(storage, 7, 60)
    second = add_hold(storage, 7, 60)
    other = add_hold(storage, 10**17, 60)
    assert held_steps(storage) == {7, 10**17}
    drop_hold(storage, first)
    drop_hold(storage, first)
    assert held_steps(storage) == {7, 10**17}
    drop_hold(storage, second)
    drop_hold(storage, other)
    assert held_steps(storage) == set()


def test_a_block_holds_while_it_runs(storage: Storage) -> None:
    """`hold` ends with its block, by an exception too."""
    begin_step(storage, 3)

    def read_and_fail() -> None:
        with hold(storage, 3, "3", 60) as is_held:
            assert is_held
            assert held_steps(storage) == {3}
            raise KeyError

    with pytest.raises(KeyError):
        read_and_fail()
    assert held_steps(storage) == set()


def test_what_goes_is_not_held_and_what_is_held_does_not_go(storage: Storage) -> None:
    """A policy that lets steps go gets those that nobody holds, and until it has ended no reader
    takes a hold on them; nor on a step that is gone. Without steps it asks the store for nothing.
    """
    with letting_go(storage, [], WRITER) as going:
        assert going == [] and storage.list("") == []
    begin_step(storage, 3)
    begin_step(storage, 4)
    with hold(storage, 3, "3", 60), letting_go(storage, [3, 4], WRITER) as going:
        assert going == [4]
        for step in (3, 4):
            with hold(storage, step, str(step), 60) as is_held:
                assert not is_held
        assert held_steps(storage) == {3}
    with hold(storage, 4, "4", 60) as is_held, hold(storage, 5, "5", 60) as is_gone_held:
        assert is_held and not is_gone_held
    assert storage.list(HOLDS) == []


def test_marks_of_a_writer_that_died_go_with_its_claim(storage: Storage) -> None:
    """A sweep forgets them; those of a writer that stands stay, until it lets steps go again."""
    begin_step(storage, 3)
    claims = open_claims(storage)
    claims.take(Writer(id=WRITER))
    storage.write(f"{HOLDS}/3-goes-{WRITER}-00c0ffee", 1, [(0, [memoryview(b"\n")])])
    storage.write(f"{HOLDS}/3-goes-{'b' * 8}-00c0ffee", 1, [(0, [memoryview(b"\n")])])
    sweep_files(storage, claims)
    assert [mark[2] for mark in list_marks(storage).values()] == [WRITER]
    with letting_go(storage, [1], WRITER):
        pass
    assert not list_marks(storage)


def test_a_hold_whose_time_is_over_is_forgotten(storage: Storage) -> None:
    """Where listings have times, a hold counts from the store's; else from the second in its name.
    Its file goes once it is over.
    """
    made = int(time.time()) - 100
    for name in (f"{HOLDS}/1-50-{made}-00c0ffee", f"{HOLDS}/2-500-{made}-00c0ffee"):
        storage.write(name, 1, [(0, [memoryview(b"\n")])])
    if isinstance(storage, LocalStorage):
        assert held_steps(storage) == {1, 2}, "the files are new by the clock of the store"
        for entry in storage.list(HOLDS):
            os.utime(Path(storage.root) / entry.name, (made, made))
    assert held_steps(storage) == {2} and len(storage.list(HOLDS)) == 1


class _OtherClock(CountingStorage):
    """A folder of a server whose clock is wrong by so many seconds."""

    def __init__(self, path: Path, ahead_s: float) -> None:
        super().__init__(LocalStorage(path), lambda done_bytes: None)
        self._ahead_s = ahead_s

    def list(
        self, folder: str, *, recursive: bool = False, names_only: bool = False
    ) -> list[Entry]:
        found = super().list(folder, recursive=recursive, names_only=names_only)
        return [replace(each, modified_s=each.modified_s + self._ahead_s) for each in found]


@pytest.mark.parametrize("ahead_s", [-3600, 3600])
def test_the_clock_of_the_store_counts_alone(ahead_s: float, tmp_path: Path) -> None:
    """A hold neither ends early nor stays for an hour where the store's clock is not the host's."""
    storage = _OtherClock(tmp_path, ahead_s)
    name = add_hold(storage, 7, 60)
    assert held_steps(storage) == {7}
    made = time.time() - 100
    os.utime(tmp_path / name, (made, made))
    assert held_steps(storage) == set()
    assert storage.list(HOLDS) == []


def test_other_files_are_no_holds(storage: Storage) -> None:
    """A file that is not named like a hold holds nothing, and stays."""
    storage.write(f"{HOLDS}/notes.txt", 1, [(0, [memoryview(b"\n")])])
    assert held_steps(storage) == set() and len(storage.list(HOLDS)) == 1


def test_a_store_without_holds_is_a_typed_error(tmp_path: Path) -> None:
    """It names step and root and says how to do without; a hold that cannot be ended ends by
    itself.
    """
    storage = LocalStorage(tmp_path)
    (tmp_path / ".holdfast").mkdir()
    (tmp_path / ".holdfast" / "holds").write_text("no folder")
    with pytest.raises(
        CheckpointError, match=r"step 3 of .* cannot be held: .*expected .*hold_s=0"
    ) as caught:
        add_hold(storage, 3, 60)
    assert (caught.value.path, caught.value.step) == (str(tmp_path), 3)
    (tmp_path / ".holdfast" / "holds").unlink()
    begin_step(storage, 3)
    with hold(storage, 3, "3", 60):
        (tmp_path / ".holdfast").rename(tmp_path / "moved")
        (tmp_path / ".holdfast").symlink_to(tmp_path / "moved")
    assert len(list((tmp_path / "moved" / "holds").iterdir())) == 1
