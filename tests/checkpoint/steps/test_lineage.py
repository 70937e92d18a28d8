"""Branches: written before the first commit, one after the other, and none where no local tier was
ever used.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from holdfast.checkpoint import CheckpointManager, Options
from holdfast.checkpoint.agreement.save_protocol import SaveKey
from holdfast.checkpoint.format.record import read_record
from holdfast.checkpoint.steps.claims import Writer
from holdfast.checkpoint.steps.left_behind import NOTHING
from holdfast.checkpoint.steps.lineage import (
    BRANCHES,
    KEPT_BRANCHES,
    Branch,
    Lineage,
    Position,
    read_branches,
    run_of,
    where_of,
)
from holdfast.checkpoint.steps.object_claims import open_claims
from holdfast.checkpoint.storage.base import Storage
from holdfast.checkpoint.storage.path import open_storage
from holdfast.checkpoint.storage.tombstone import sealed
from holdfast.coordination import Fenced

STATE = {"w": np.arange(4.0)}
KEY = SaveKey("0" * 16, 1, 100)


@pytest.fixture(params=["folder", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return open_storage(tmp_path if request.param == "folder" else f"memory://{tmp_path.name}")


def _lineage(storage: Storage, number: int = 1, *, begins: bool = True) -> Lineage:
    writer = Writer(f"{number:08x}")
    open_claims(storage).take(writer)
    return Lineage(storage, writer.id, begins=begins)


def test_an_opening_is_durable_before_it_is_named(storage: Storage) -> None:
    """The first save begins one that goes on from what was restored; the next saves belong to it;
    the root keeps its id.
    """
    first = _lineage(storage)
    branch = first.current(KEY, Position())
    assert branch is not None
    assert (branch.number, branch.writer, branch.base) == (1, "00000001", NOTHING)
    assert first.current(KEY, Position()) == branch
    assert read_branches(storage) == [branch]
    second = _lineage(storage, 2)
    second.restored()
    assert second.current(KEY, Position(40)) == Branch(
        branch.run, 2, "00000002", 40, where=branch.where
    )
    assert second.current(KEY, Position(60)) == second.current(KEY, Position())
    assert second.current(KEY, Position(20, is_branch=True)) == Branch(
        branch.run, 3, "00000002", 20, where=branch.where
    )
    assert [found.number for found in read_branches(storage)] == [1, 2, 3]


def test_two_writers_never_have_one_number(storage: Storage) -> None:
    """Each of two that begin side by side gets a number of its own."""
    assert [
        found.number
        for lineage in (_lineage(storage), _lineage(storage, 2))
        if (found := lineage.current(KEY, Position()))
    ] == [1, 2]


def test_a_fenced_writer_begins_nothing(storage: Storage) -> None:
    """Without its claim it has no branch, as it has no commit."""
    lineage = _lineage(storage)
    open_claims(storage).fence("00000001")
    with pytest.raises(Fenced):
        lineage.current(KEY, Position())
    assert read_branches(storage) == []


def test_a_root_without_a_local_tier_has_no_branches(storage: Storage) -> None:
    """Who does not begin them goes on with those that there are."""
    plain = _lineage(storage, begins=False)
    assert plain.current(KEY, Position()) is None
    assert _lineage(storage, 2).current(KEY, Position()) is not None
    plain.restored()
    found = plain.current(KEY, Position(5))
    assert found is not None
    assert (found.number, found.base) == (2, 5)


def test_an_opening_that_found_no_branches_spares_one_look(storage: Storage) -> None:
    """The first save goes by what the opening saw; one after a restore looks, and who begins
    branches always does.
    """
    begun = _lineage(storage).current(KEY, Position())
    assert begun is not None
    plain = Lineage(storage, "00000001", begins=False, found_none=True)
    assert plain.current(KEY, Position()) is None
    plain.restored()
    found = plain.current(KEY, Position(5))
    assert found is not None
    assert (found.number, found.base) == (2, 5)
    beginning = Lineage(storage, "00000001", begins=True, found_none=True).current(KEY, Position())
    assert beginning is not None
    assert (beginning.number, beginning.run) == (3, begun.run)


def test_deleting_the_newest_step_is_a_rollback(storage: Storage) -> None:
    """A branch below it begins at once; a restore that has not been gone on from counts for the
    next save all the same.
    """
    lineage = _lineage(storage)
    lineage.restored()
    lineage.deleting_newest(50)
    assert [found.base for found in read_branches(storage)] == [49]
    found = lineage.current(KEY, Position(30))
    assert found is not None
    assert (found.number, found.base) == (2, 30)
    lineage.deleting_newest(45)
    again = lineage.current(KEY, Position())
    assert again is not None
    assert (again.number, again.base) == (3, 44)


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b'{"run":"x"', b"\xff" * 100, sealed(b'{"run":' + b"[" * 9999)],
    ids=["empty", "nothing", "torn", "noise", "deep"],
)
def test_a_damaged_opening_went_on_from_nothing(data: bytes, storage: Storage) -> None:
    """What it went on from is not known: nothing from before it comes back, and numbers go on above
    it.
    """
    first = _lineage(storage).current(KEY, Position())
    assert first is not None
    storage.write(f"{BRANCHES}/2.json", len(data), [(0, [memoryview(data)])])
    assert read_branches(storage)[1] == Branch(first.run, 2, "", NOTHING)
    assert run_of(read_branches(storage)) == first.run
    third = _lineage(storage, 3).current(KEY, Position())
    assert third is not None
    assert (third.number, third.run) == (3, first.run)


def test_an_opening_of_another_root_counts_as_unknown(storage: Storage) -> None:
    """Files that were copied together from two roots: the newest says which root it is."""
    open_claims(storage).take(Writer("00000001"))
    where = where_of(storage)
    for number, run in enumerate("ab", 1):
        data = Branch(run * 32, number, "00000001", 7, where=where).to_bytes()
        storage.write(f"{BRANCHES}/{number}.json", len(data), [(0, [memoryview(data)])])
    assert read_branches(storage) == [
        Branch("b" * 32, 1, "", NOTHING),
        Branch("b" * 32, 2, "00000001", 7, where=where),
    ]


@pytest.mark.parametrize("preserves", [True, False])
def test_a_copy_is_another_root(preserves: bool, tmp_path: Path) -> None:
    """It begins a run of its own; the root that was copied keeps its run, moved and seen through a
    link too.
    """
    first = _lineage(open_storage(tmp_path / "a")).current(KEY, Position())
    assert first is not None
    copy_function = shutil.copy2 if preserves else shutil.copy
    shutil.copytree(tmp_path / "a", tmp_path / "b", copy_function=copy_function)
    copied = open_storage(tmp_path / "b")
    assert run_of(read_branches(copied)) == ""
    second = _lineage(copied, 2).current(KEY, Position())
    assert second is not None
    assert second.number == 2 and second.run != first.run
    assert run_of(read_branches(copied)) == second.run
    (tmp_path / "a").rename(tmp_path / "moved")
    (tmp_path / "link").symlink_to(tmp_path / "moved")
    for name in ("moved", "link"):
        assert read_branches(open_storage(tmp_path / name)) == [first]


def test_only_the_newest_branches_are_kept(storage: Storage) -> None:
    """They stay few however often a root is opened."""
    lineage = _lineage(storage)
    for _ in range(KEPT_BRANCHES + 8):
        lineage.restored()
        lineage.current(KEY, Position())
    numbers = [found.number for found in read_branches(storage)]
    assert numbers == list(range(9, KEPT_BRANCHES + 9))


def test_records_say_of_which_opening_they_are(tmp_path: Path) -> None:
    """A manager without a local tier goes on with the branches of its root, from what it restored;
    a fresh root gets none.
    """
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, STATE)
    storage = open_storage(tmp_path)
    assert read_record(storage, "1").opening is None
    assert read_branches(storage) == []
    _lineage(storage).current(KEY, Position())
    with CheckpointManager(tmp_path) as manager:
        manager.restore()
        manager.save(2, STATE)
        manager.wait_until_finished()
        manager.delete(2)
        manager.save(3, STATE)
    assert read_record(storage, "3").opening == 3
    assert [found.base for found in read_branches(storage)] == [NOTHING, 1, 1]


def test_a_reader_begins_nothing(tmp_path: Path) -> None:
    """A manager that only reads leaves the root as it is."""
    storage = open_storage(tmp_path)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, STATE)
    branch = _lineage(storage).current(KEY, Position())
    with CheckpointManager(tmp_path, options=Options(read_only=True)) as reader:
        reader.restore()
    assert read_branches(storage) == [branch]
    assert json.loads((tmp_path / BRANCHES / "1.json").read_text())["base"] == NOTHING
