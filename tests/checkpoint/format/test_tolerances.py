"""What a reader of this version takes beside what a writer of it makes: the page of tolerances in
docs/format.md, line by line.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crc32c import crc32c

from holdfast.checkpoint import (
    CheckpointManager,
    Corrupt,
    HostileCheckpoint,
    Options,
    StepExists,
    load,
    save,
    verify,
)
from holdfast.checkpoint.format.record import read_record
from holdfast.checkpoint.format.step_folders import STEP_NAMES, StepNames
from holdfast.checkpoint.steps.garbage import sweep
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.checkpoint.storage.tombstone import sealed

OLD = {"frozen": np.arange(600_000, dtype=np.float32), "moving": np.arange(5.0)}
NEW = OLD | {"moving": np.arange(5.0) + 1}


def change(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Changes a record, and seals it anew."""
    record = json.loads((folder / "checkpoint.json").read_text())
    edit(record)
    del record["crc32c"]
    (folder / "checkpoint.json").write_bytes(
        sealed(json.dumps(record, separators=(",", ":")).encode()[:-1])
    )


def link_incrementally(root: Path) -> Path:
    """Makes of the steps `old` and `new` what an incremental save would: the pack of the old is
    linked, and one chunk of it lives on.
    """
    save(root / "old", OLD)
    save(root / "new", {"moving": NEW["moving"]})
    (old,), (new,) = root.glob("old/state/*"), root.glob("new/state/*")
    linked = root / "new" / "state" / f"00000-00001-{new.name[12:]}"
    linked.hardlink_to(old)
    (entry,) = json.loads((root / "old" / "checkpoint.json").read_text())["items"]["state"]["files"]
    tree = json.loads((root / "old" / "checkpoint.json").read_text())["items"]["state"]

    def edit(record: dict[str, Any]) -> None:
        (own,) = record["items"]["state"]["files"]
        for leaf in tree["leaves"]:
            leaf["cells"] = int(leaf["path"] == "frozen")
        files = [own, [f"state/{linked.name}", *entry[1:]]]
        record["items"]["state"] = tree | {"cells": [[[0, 0, 1]], [[1, 0, 1]]], "files": files}

    change(root / "new", edit)
    return linked


def test_chunks_that_no_record_names_are_passed_over(tmp_path: Path) -> None:
    """A pack, one inode with another step's, holds a chunk that the step has elsewhere: load and
    verify go by the record alone.
    """
    linked = link_incrementally(tmp_path)
    assert linked.stat().st_nlink == 2
    found = load(tmp_path / "new")
    assert all(found[name].tobytes() == NEW[name].tobytes() for name in NEW)
    assert verify(tmp_path / "new").leaves == 2
    data = bytearray(linked.read_bytes())
    data[-1] ^= 1  # the dead chunk is the last: it is small
    linked.write_bytes(data)
    assert load(tmp_path / "new")["moving"].tolist() == [1, 2, 3, 4, 5]
    verify(tmp_path / "new")
    with pytest.raises(Corrupt, match="'moving'"):
        load(tmp_path / "old")
    data[len(data) // 2] ^= 1  # and this one lives
    linked.write_bytes(data)
    for read in (load, verify):
        with pytest.raises(Corrupt, match="'frozen'"):
            read(tmp_path / "new")


def test_a_record_may_say_which_opening_wrote_it(tmp_path: Path) -> None:
    """`opening` is read where it is there; members that this version does not know are passed
    over.
    """
    save(tmp_path, OLD)
    assert read_record(LocalStorage(tmp_path), "").opening is None
    change(tmp_path, lambda record: record.update(opening=7, other={"of": "a later version"}))
    assert read_record(LocalStorage(tmp_path), "").opening == 7
    assert load(tmp_path)["moving"].tolist() == OLD["moving"].tolist()
    for wrong in (-1, "7", 1.5, True, None):
        change(tmp_path, lambda record, wrong=wrong: record.update(opening=wrong))  # type: ignore[misc]
        with pytest.raises(HostileCheckpoint, match="not a whole number"):
            load(tmp_path)


FILES = {"vocab.json": b'{"a":1}', "deep/er/merges.txt": b"a b", "empty": b""}


def add_files(folder: Path, names: Any = None) -> None:
    """Adds an item of files to a checkpoint."""
    (pack,) = folder.glob("state/*")
    entries = []
    (folder / "tokenizer").mkdir(exist_ok=True)
    for number, data in enumerate(FILES.values()):
        name = f"tokenizer/00000-{number:05d}-{pack.name.split('-')[2].partition('.')[0]}.bin"
        (folder / name).write_bytes(data)
        entries.append([name, len(data), 0, crc32c(data)])
    item = {"kind": "files", "names": list(FILES) if names is None else names, "files": entries}
    change(folder, lambda record: record["items"].update(tokenizer=item))


def test_an_item_of_files_keeps_their_names(tmp_path: Path) -> None:
    """Such files are called as ours are, and their own names stand in the record: they are
    restored, verified, kept by sweeps, deleted.
    """
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, OLD)
        manager.wait_until_finished()
        add_files(tmp_path / "1")
        sweep(tmp_path, force=False)
        assert manager.restore(1, item="tokenizer") == FILES
        assert manager.restore(1)["moving"].tolist() == OLD["moving"].tolist()
        assert verify(tmp_path).files == 4
        first, *_ = sorted((tmp_path / "1" / "tokenizer").iterdir())
        first.write_bytes(b'{"a":2}')
        with pytest.raises(Corrupt, match=first.name):
            manager.restore(1, item="tokenizer")
        with pytest.raises(Corrupt, match=first.name):
            verify(tmp_path)
        manager.delete(1)
    assert not (tmp_path / "1").exists()


@pytest.mark.parametrize(
    "names",
    [
        ["../a", "b", "c"],
        ["/a", "b", "c"],
        ["a", "a", "b"],
        ["a", "b"],
        ["a//b", "c", "d"],
        ["a\nb", "c", "d"],
        [1, 2, 3],
        ["", "a", "b"],
    ],
)
def test_own_names_that_could_lead_astray_are_refused(names: Any, tmp_path: Path) -> None:
    """A name of its own never leads out of a folder, nor is it there twice."""
    save(tmp_path, OLD)
    add_files(tmp_path, names)
    with pytest.raises(HostileCheckpoint):
        load(tmp_path)


def test_a_root_may_name_its_steps_otherwise(tmp_path: Path) -> None:
    """Where .holdfast/steps.json says how, steps are listed, restored and loaded under these names,
    and saved too.
    """
    names = StepNames("step_", 8)
    for step in (5, 12):
        save(tmp_path / names.name_of(step), {"x": np.full(3, step)}, step=step)
    (tmp_path / "step_7").mkdir()
    (tmp_path / ".holdfast").mkdir()
    (tmp_path / STEP_NAMES).write_text(json.dumps({"prefix": "step_", "width": 8, "more": 1}))
    assert load(tmp_path)["x"].tolist() == [12] * 3
    with CheckpointManager(tmp_path, options=Options(read_only=True)) as manager:
        assert manager.all_steps() == [5, 12] and manager.latest_step() == 12
        assert (
            manager.restore(5)["x"].tolist() == [5] * 3
            and manager.restore()["x"].tolist() == [12] * 3
        )
        with pytest.raises((StepExists, ValueError)):
            manager.save(5, OLD)
    with CheckpointManager(tmp_path) as manager:
        manager.save(13, OLD).wait()
        assert (
            manager.all_steps() == [5, 12, 13]
            and (tmp_path / "step_00000013" / "checkpoint.json").exists()
        )
    (tmp_path / STEP_NAMES).write_text('{"prefix": "../", "width": 8}')
    with pytest.raises(HostileCheckpoint, match=r"steps\.json"):
        load(tmp_path)


def test_names_of_steps_are_exact() -> None:
    """A name is a step's if it is what the root would call it, and nothing else."""
    names = StepNames("step_", 4)
    assert [names.step_of(name) for name in ("step_0005", "step_12345", "step_0000")] == [
        5,
        12345,
        0,
    ]
    assert [
        names.step_of(name)
        for name in (
            "step_5",
            "5",
            "0005",
            "step_00005",
            "step_",
            "step_000x",
            "step_-001",
            "ste_0005",
        )
    ] == [None] * 8
    assert (
        StepNames().step_of("12") == 12
        and StepNames().step_of("012") is None
        and StepNames().name_of(12) == "12"
    )


def test_other_files_beside_the_claims_are_left_alone(tmp_path: Path) -> None:
    """What a later version keeps in .holdfast/ is no claim: opening, saving and sweeping go past
    it.
    """
    others = [
        tmp_path / ".holdfast" / "openings" / "1.json",
        tmp_path / ".holdfast" / "openings" / "1.base.json",
    ]
    others[0].parent.mkdir(parents=True)
    for other in others:
        other.write_text("{}")
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, OLD)
        manager.wait_until_finished()
    sweep(tmp_path, force=True)
    assert all(other.read_text() == "{}" for other in others)
    assert verify(tmp_path).step == 1
