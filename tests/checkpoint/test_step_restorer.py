"""Which step a restore takes: the one asked for, the newest, or with `fallback` the newest that is
whole. (Local ones: test_tier.py.)
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.checkpoint import (
    CheckpointError,
    CheckpointManager,
    Corrupt,
    Json,
    KeepLast,
    Options,
    StepExists,
    StepGone,
    StepNotFound,
    TreeMismatch,
    load,
)
from holdfast.checkpoint.format import record
from holdfast.checkpoint.step_catalog import StepCatalog
from holdfast.checkpoint.step_restorer import StepRestorer
from holdfast.checkpoint.storage.base import Entry, Part, Storage
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.multihost import Group
from tests.support.checkpointing import at_once, groups, pooled_blocks
from tests.support.garbage import freeze
from tests.support.told_stores import told_url


def tree(step: int) -> dict[str, object]:
    return {"w": np.arange(100.0) + step, "step": step}


def equal(found: dict[str, object], step: int) -> bool:
    return found["step"] == step and np.array_equal(found["w"], np.arange(100.0) + step)  # type: ignore[arg-type]


def test_falling_back_to_the_newest_whole_step(tmp_path: Path) -> None:
    """A damaged newest step is Corrupt, and with `fallback=True` the one before it."""
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, tree(step))
        manager.wait_until_finished()
        pack = next((tmp_path / "3" / "state").iterdir())
        pack.write_bytes(pack.read_bytes()[:-1] + b"!")
        (tmp_path / "2" / "checkpoint.json").write_text("{}")
        with pytest.raises(Corrupt):
            manager.restore(like=tree(0))
        assert equal(manager.restore(like=tree(0), fallback=True), 1)
        manager.delete(1)
        with pytest.raises(
            StepNotFound, match=r"no step of .* restores: step 3: Corrupt.*; step 2"
        ):
            manager.restore(like=tree(0), fallback=True)


def test_falling_back_from_a_step_that_is_not_there_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`restore(9, fallback=True)` where there is no step 9 says which step it has taken."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(3, tree(3)).wait()
        assert equal(manager.restore(3, like=tree(0), fallback=True), 3)
        assert not caplog.messages
        assert equal(manager.restore(9, like=tree(0), fallback=True), 3)
    assert caplog.messages == [f"{tmp_path} has no step 9: step 3 is restored"]


def test_a_step_that_is_passed_over_leaves_no_bytes(tmp_path: Path) -> None:
    """What was read of the damaged step is gone before the next one is read."""
    freeze()
    blocks: list[int] = []

    def before(verb: str, name: str, end_s: float) -> None:
        if verb == "read" and name.startswith("1/"):
            blocks.append(pooled_blocks())

    state = {name: np.zeros(1 << 18) for name in "abcd"}
    with CheckpointManager(told_url(tmp_path, before)) as manager:
        for step in (1, 2):
            manager.save(step, state).wait()
        pack = next((tmp_path / "2" / "state").iterdir())
        pack.write_bytes(pack.read_bytes()[:-1] + b"!")
        blocks.clear()
        manager.restore(fallback=True)
    assert max(blocks) == len(state)


def test_falling_back_passes_over_damage_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `like` or an item that does not fit is an error, not an older step; where a step goes away,
    the steps are listed again.
    """
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, items={"state": tree(1), "weights": tree(1)})
        manager.save(2, tree(2))
        manager.wait_until_finished()
        with pytest.raises(TreeMismatch, match="not in `like`"):
            manager.restore(like={"w": np.zeros((2, 4))}, fallback=True)
        with pytest.raises(StepNotFound, match=r"no item .weights."):
            manager.restore(like=tree(0), item="weights", fallback=True)
        manager.save(4, tree(4))
        manager.wait_until_finished()
        # 3 is deleted, and 4 saved, between the listing and the reading.
        once = iter([([1, 2, 3], list[int]())])
        look = StepCatalog.look
        monkeypatch.setattr(StepCatalog, "look", lambda catalog: next(once, None) or look(catalog))
        assert equal(manager.restore(like=tree(0), fallback=True), 4)


@pytest.mark.parametrize("count", [1, 2])
def test_the_newest_is_what_it_is_when_it_is_opened(count: int, tmp_path: Path) -> None:
    """A writer that keeps one step deletes the newest, for one that is newer still, after a reader
    has listed it and before it opens it: nobody has asked for its number.
    """
    with CheckpointManager(tmp_path, keep_policy=KeepLast(1)) as writer:
        writer.save(1, tree(1)).wait()
        listed = ["1/checkpoint.json"]

        def before(verb: str, name: str, end_s: float) -> None:
            if verb == "fetch" and name in listed:
                listed.remove(name)
                writer.save(2, tree(2)).wait()

        url = told_url(tmp_path, before)
        reads = Options(read_only=True)

        def restored(group: Group) -> bool:
            with CheckpointManager(url, group=group, options=reads) as reader:
                return equal(reader.restore(), 2)

        with groups(count) as all_of_them:
            found = at_once([lambda group=group: restored(group) for group in all_of_them])
        assert found == [True] * count and listed == []
        with CheckpointManager(url, options=reads) as reader:
            with pytest.raises(StepNotFound, match="there is no step 1 "):
                reader.restore(1)


def read_through(manager: CheckpointManager, storage: Storage) -> None:
    """Lets the manager restore from its root by another way to the store."""
    catalog = manager._catalog
    catalog = replace(catalog, root=replace(catalog.root, storage=storage))
    manager._parts = replace(manager._parts, restorer=StepRestorer(catalog))


class Failing(LocalStorage):
    """Fails the first `times` calls of a verb on names that end so."""

    def __init__(self, root: Path, verb: str, end: str, number: int, times: int) -> None:
        super().__init__(root)
        self._verb = verb
        self._end = end
        self._number = number
        self._left = times

    def _may_fail(self, verb: str, name: str) -> None:
        if verb == self._verb and self._end in name and self._left:
            self._left -= 1
            raise OSError(self._number, os.strerror(self._number), f"{self.root}/{name}")

    def read(self, name: str, offset: int, buffers: Sequence[memoryview]) -> int:
        self._may_fail("read", name)
        return super().read(name, offset, buffers)

    def fetch(self, name: str, limit_bytes: int) -> bytes:
        self._may_fail("fetch", name)
        return super().fetch(name, limit_bytes)

    def write(self, name: str, size: int, parts: Iterable[Part]) -> None:
        self._may_fail("write", name)
        super().write(name, size, parts)


RECORD = "2/checkpoint.json"
PACK = "2/state/"


def two_steps(root: Path) -> CheckpointManager:
    manager = CheckpointManager(root)
    for step in (1, 2):
        manager.save(step, tree(step)).wait()
    return manager


@pytest.mark.parametrize(
    ("verb", "end", "number", "times"),
    [
        ("fetch", RECORD, errno.EMFILE, 1),
        ("read", PACK, errno.EMFILE, 1000),
        ("read", PACK, errno.ESTALE, 1000),
        ("read", PACK, errno.ENOENT, 1000),  # a listing shows it
        ("write", ".holdfast/holds/2-", errno.ENOSPC, 1),
    ],
)
def test_falling_back_passes_over_no_passing_error(
    verb: str, end: str, number: int, times: int, tmp_path: Path
) -> None:
    """What says nothing of the step is raised, with the path; the step stays as it is, and a save
    does not replace it.
    """
    with two_steps(tmp_path) as manager:
        read_through(manager, Failing(tmp_path, verb, end, number, times))
        with pytest.raises(CheckpointError, match=str(tmp_path)) as caught:
            manager.restore(like=tree(0), fallback=True, hold_s=60)
        assert type(caught.value) is CheckpointError
        with pytest.raises(StepExists):
            manager.save(2, tree(20))
        assert equal(load(tmp_path), 2)


def test_falling_back_for_no_lack_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record that there is no memory for is not a hostile one."""

    def refuse(data: Any, path: str) -> Any:
        raise MemoryError

    with two_steps(tmp_path) as manager, monkeypatch.context() as patch:
        patch.setattr(record, "_parse", refuse)
        with pytest.raises(CheckpointError, match="no memory for this record of") as caught:
            manager.restore(like=tree(0), fallback=True)
        assert type(caught.value) is CheckpointError


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EIO])
@pytest.mark.parametrize(("verb", "end"), [("fetch", RECORD), ("read", RECORD), ("read", PACK)])
def test_an_error_that_goes_away_costs_no_step(
    verb: str, end: str, number: int, tmp_path: Path
) -> None:
    """A file that is not found or not read twice, and then is, is whole."""
    with two_steps(tmp_path) as manager:
        read_through(manager, Failing(tmp_path, verb, end, number, 2))
        assert equal(manager.restore(like=tree(0), fallback=True), 2)


@pytest.mark.parametrize(("verb", "end"), [("fetch", RECORD), ("read", PACK)])
def test_an_io_error_that_stays_is_damage(verb: str, end: str, tmp_path: Path) -> None:
    """A file that is listed and cannot be read: an older step comes back, and a save may replace
    the damaged one.
    """
    with two_steps(tmp_path) as manager:
        read_through(manager, Failing(tmp_path, verb, end, errno.EIO, 1000))
        with pytest.raises(Corrupt, match="cannot be read: Input/output error"):
            manager.restore(like=tree(0))
        assert equal(manager.restore(like=tree(0), fallback=True), 1)
        manager.save(2, tree(20)).wait()
        assert equal(load(tmp_path), 20)


@pytest.mark.parametrize("found", ["folders", "record", "packs"])
def test_falling_back_beside_a_writer(tmp_path: Path, found: str) -> None:
    """The only step is replaced by a newer one at the worst moments, many times in one restore: the
    newest comes back.
    """
    with CheckpointManager(tmp_path, keep_policy=KeepLast(1)) as writer:
        writer.save(1, tree(1))
        writer.wait_until_finished()
        with CheckpointManager(tmp_path, options=Options(read_only=True)) as reader:
            inner = reader._root.storage
            replaced = []

            class Replacing(LocalStorage):
                # Once the reader knows the newest step, from its folder, its record or one of its
                # packs, that step is gone.
                def _replace(self, name: str, result: object) -> object:
                    step = name.split("/")[0]
                    if len(replaced) < 20 and (
                        name == "" if found == "folders" else step == str(writer.latest_step())
                    ):
                        replaced.append(1)
                        writer.save(len(replaced) + 1, tree(len(replaced) + 1))
                        writer.wait_until_finished()
                        writer._state.worker.wait(30)
                    return result

                def list(self, folder: str, **how: bool) -> list[Entry]:
                    result = inner.list(folder, **how)
                    return self._replace(folder, result) if found == "folders" else result  # type: ignore[return-value]

                def fetch(self, name: str, limit_bytes: int) -> bytes:
                    result = inner.fetch(name, limit_bytes)
                    return self._replace(name, result) if found == "record" else result  # type: ignore[return-value]

                def read(self, name: str, offset: int, buffers: Sequence[memoryview]) -> int:
                    result = inner.read(name, offset, buffers)
                    return self._replace(name, result) if found == "packs" else result  # type: ignore[return-value]

            read_through(reader, Replacing(tmp_path))
            assert equal(reader.restore(like=tree(0), fallback=True), 21) and len(replaced) == 20


def test_a_writer_deletes_faster_than_reads(tmp_path: Path) -> None:
    """A restore that loses every step to the keep policy ends, and says what to do."""
    with CheckpointManager(tmp_path, keep_policy=KeepLast(1)) as writer:
        writer.save(1, tree(1))
        writer.wait_until_finished()
        with CheckpointManager(tmp_path, options=Options(read_only=True)) as reader:
            inner = reader._root.storage

            class Deleting(LocalStorage):
                def fetch(self, name: str, limit_bytes: int) -> bytes:
                    data = inner.fetch(name, limit_bytes)
                    step = writer.latest_step()
                    if name == f"{step}/checkpoint.json":
                        writer.save(step + 1, tree(step + 1))
                        writer.wait_until_finished()
                        writer._state.worker.wait(30)
                    return data

            read_through(reader, Deleting(tmp_path))
            with pytest.raises(
                StepGone, match="the step was deleted while it was being read"
            ) as caught:
                reader.restore(like=tree(0), fallback=True)
            assert caught.value.__notes__ == [
                "so were 63 steps before it; hold_s keeps a step while it is read"
            ]


def test_a_step_that_is_overwritten_under_a_reader(tmp_path: Path) -> None:
    """Its arrays, and its JSON, are StepGone once the record that was read has been replaced; with
    `fallback`, and as the newest step, the new save comes back.
    """
    with CheckpointManager(tmp_path) as writer:
        with CheckpointManager(tmp_path, options=Options(read_only=True)) as reader:

            class Overwriting(LocalStorage):
                def fetch(self, name: str, limit_bytes: int) -> bytes:
                    data = super().fetch(name, limit_bytes)
                    if not overwritten:
                        overwritten.append(name)
                        writer.save(
                            1, items={"state": tree(2), "config": Json({"n": 2})}, overwrite=True
                        )
                        writer.wait_until_finished()
                        writer._state.worker.wait(30)
                    return data

            read_through(reader, Overwriting(tmp_path))
            for item in ("state", "config"):
                like = tree(0) if item == "state" else None
                for step, fallback in ((1, False), (None, True), (None, False)):
                    writer.save(
                        1, items={"state": tree(1), "config": Json({"n": 1})}, overwrite=True
                    )
                    writer.wait_until_finished()
                    overwritten: list[str] = []
                    if step is not None:
                        with pytest.raises(
                            StepGone,
                            match=(
                                "the step was overwritten while it was being read; restore it again"
                            ),
                        ):
                            reader.restore(step, item=item)
                        continue
                    restored = reader.restore(like=like, item=item, fallback=fallback)
                    if item == "state":
                        assert equal(restored, 2)
                    else:
                        assert restored == {"n": 2}
