"""The record of a step travels from the primary: the store is asked once, and all processes restore
the same save.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.checkpoint import CheckpointError, Corrupt, StepGone, StepNotFound, save
from holdfast.checkpoint.agreement.group_record import MESSAGE_BYTES, read_record_together
from holdfast.checkpoint.format.record import Record
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.multihost import Group
from tests.support.checkpointing import at_once, groups

COUNT = 3


class Fetches(LocalStorage):
    """A local store that counts the records that are fetched, and calls `before` ahead of the
    first.
    """

    def __init__(self, root: Path, before: Any = None) -> None:
        super().__init__(root)
        self.names: list[str] = []
        self._before = before

    def fetch(self, name: str, limit_bytes: int) -> bytes:
        if self._before is not None and not self.names:
            self._before()
        self.names.append(name)
        return super().fetch(name, limit_bytes)


def read_all(stores: list[Fetches]) -> list[Record | CheckpointError]:
    """Returns what each process of a group reads, or the error that it raises."""

    def read(group: Group, storage: Fetches) -> Record | CheckpointError:
        try:
            return read_record_together(storage, "1", group, "record", timeout_s=20).record
        except CheckpointError as error:
            return error

    with groups(COUNT) as members:
        return at_once(
            [
                lambda group=group, storage=storage: read(group, storage)
                for group, storage in zip(members, stores, strict=True)
            ]
        )  # type: ignore[misc]


def test_the_primary_alone_asks_the_store(tmp_path: Path) -> None:
    """A record that is small once compressed is read by the primary, and all processes have it."""
    save(tmp_path / "1", {f"leaf{i}": np.arange(i) for i in range(5000)}, step=1)
    assert (tmp_path / "1" / "checkpoint.json").stat().st_size > 2 * MESSAGE_BYTES
    stores = [Fetches(tmp_path) for _ in range(COUNT)]
    found = read_all(stores)
    assert [len(storage.names) for storage in stores] == [1, 0, 0]
    for record in found:
        assert isinstance(record, Record) and record.path == str(tmp_path / "1" / "checkpoint.json")
        assert record.step == 1 and len(record.items["state"].leaves) == 5000


def test_a_large_record_is_read_by_each(tmp_path: Path) -> None:
    """One that stays large is not sent; whoever finds another save there by then says so."""
    noise = os.urandom(MESSAGE_BYTES).hex()
    save(tmp_path / "1", {"a": np.arange(3)}, metadata=noise)
    stores = [Fetches(tmp_path) for _ in range(COUNT)]
    assert [
        record.metadata if isinstance(record, Record) else record for record in read_all(stores)
    ] == [noise] * COUNT
    assert [len(storage.names) for storage in stores] == [1, 1, 1]
    other = tmp_path / "other"
    save(other / "1", {"a": np.arange(3)}, metadata=noise)
    first, second, third = read_all([Fetches(tmp_path), Fetches(tmp_path), Fetches(other)])
    assert isinstance(first, Record) and isinstance(second, Record)
    assert isinstance(
        third, StepGone
    ) and "overwritten while it was being read; restore it again" in str(third)


def test_what_the_primary_cannot_read_each_finds_out(tmp_path: Path) -> None:
    """A record that is missing or damaged is the same typed error on every process, and nobody
    waits.
    """
    assert {type(error) for error in read_all([Fetches(tmp_path) for _ in range(COUNT)])} == {
        StepNotFound
    }
    save(tmp_path / "1", {"a": np.arange(3)})
    path = tmp_path / "1" / "checkpoint.json"
    path.write_bytes(path.read_bytes().replace(b'"step":0', b'"step":1'))
    assert {type(error) for error in read_all([Fetches(tmp_path) for _ in range(COUNT)])} == {
        Corrupt
    }


@pytest.mark.parametrize("count", [1])
def test_a_process_alone_sends_nothing(count: int, tmp_path: Path) -> None:
    """Without others the record is read as ever."""
    save(tmp_path / "1", {"a": np.arange(3)})
    with groups(count) as (group,):
        assert (
            read_record_together(
                LocalStorage(tmp_path), "1", group, "record", timeout_s=20
            ).record.step
            == 0
        )


def test_all_hear_whether_there_is_room(tmp_path: Path) -> None:
    """By the primary's word, whatever another would have found; and never without the record."""
    save(tmp_path / "1", {"a": np.arange(3)})
    save(tmp_path / "2", {"a": np.arange(3)}, metadata=os.urandom(MESSAGE_BYTES).hex())

    def ask(group: Group, step: str, *, has_room: bool) -> bool:
        return read_record_together(
            LocalStorage(tmp_path),
            step,
            group,
            "record",
            timeout_s=20,
            find_room=lambda record: has_room is (group.index == 0),
        ).has_room

    with groups(COUNT) as members:

        def found(step: str, *, has_room: bool) -> list[bool]:
            return at_once([partial(ask, group, step, has_room=has_room) for group in members])

        assert found("1", has_room=True) == [True] * COUNT
        assert found("1", has_room=False) == [False] * COUNT
        assert found("2", has_room=True) == [False] * COUNT
