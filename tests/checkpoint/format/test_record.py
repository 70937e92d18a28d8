"""The record: what is written is what is read, and no other bytes are accepted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint import Corrupt, HostileCheckpoint
from holdfast.checkpoint.format.record import SeenRecord, chunk_runs, expand_runs, parse_record
from holdfast.checkpoint.format.tree import FlatTree
from holdfast.checkpoint.saving.item_files import ItemTarget, write_json
from holdfast.checkpoint.saving.pack_writer import write_snapshot
from holdfast.checkpoint.saving.planner import Planner
from holdfast.checkpoint.saving.record_builder import RecordHead, build_record
from holdfast.checkpoint.saving.snapshot import take_snapshot
from holdfast.checkpoint.storage.local import LocalStorage

TREE = {"w": np.arange(6.0).reshape(2, 3), "n": 3, "none": None}


def record_of(tmp_path: Path, **options: Any) -> bytes:
    storage = LocalStorage(tmp_path)
    tree = FlatTree.of(TREE)
    plan = Planner().plan(tree)
    report = write_snapshot(
        take_snapshot(plan, tree), ItemTarget(storage, "7", "state", "ab12cd34")
    )
    extra = write_json(ItemTarget(storage, "7", "data", "ab12cd34"), 0, b'{"at":5}')
    facts: dict[str, Any] = {
        "writer": "ab12cd34",
        "processes": 1,
        "started_s": 1.0,
        "finished_s": 2.0,
    } | options
    return build_record(
        RecordHead(7, **facts), {"state": (plan, [report]), "data": (None, [extra])}
    )


def sealed(record: dict[str, Any]) -> bytes:
    """Returns a record with a checksum that fits."""
    record.pop("crc32c", None)
    body = json.dumps(record, separators=(",", ":")).encode()[:-1]
    return body + b',"crc32c":"%08x"}\n' % crc32c(body)


def test_a_record_is_read_as_it_was_built(tmp_path: Path) -> None:
    """All that is put in comes out; the record is one JSON object with its checksum last."""
    data = record_of(tmp_path, metrics={"loss": 0.5}, metadata={"run": [1, None]})
    found = parse_record(data, "p")
    assert (found.step, found.writer_id, found.processes, found.started_s, found.finished_s) == (
        7,
        "ab12cd34",
        1,
        1.0,
        2.0,
    )
    assert (found.metrics, found.metadata, found.path) == ({"loss": 0.5}, {"run": [1, None]}, "p")
    assert found.file_names() == [
        "state/00000-00000-ab12cd34.safetensors",
        "data/00000-j-ab12cd34.json",
    ]
    assert [leaf.path for leaf in found.items["state"].leaves] == ["n", "w"] and found.items[
        "state"
    ].leaves[0].value == 3
    assert list(json.loads(data))[-1] == "crc32c"
    assert set(found.versions) == {"python", "jax", "numpy", "holdfast"}


def test_any_changed_byte_is_found(tmp_path: Path) -> None:
    """Each byte of a record changed, and each truncation, is Corrupt."""
    data = record_of(tmp_path)
    for at in range(len(data)):
        for changed in (data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], data[:at]):
            with pytest.raises((Corrupt, HostileCheckpoint)):
                parse_record(changed, "p")
    with pytest.raises(Corrupt, match="checksum"):
        parse_record(data + b" ", "p")


def change(path: str, value: Any) -> Any:
    """Returns a function that sets one place of a record."""

    def apply(record: dict[str, Any]) -> None:
        *parents, last = path.split("/")
        place: Any = record
        for key in parents:
            place = place[int(key) if isinstance(place, list) else key]
        place[int(last) if isinstance(place, list) else last] = value

    return apply


LEAF = "items/state/leaves/1"
HOSTILE = {
    "format": change("format", "holdfast/9"),
    "step of text": change("step", "7"),
    "negative step": change("step", -1),
    "absolute name": change("items/state/files/0/0", "/etc/passwd"),
    "dots in name": change("items/state/files/0/0", "state/../../x.safetensors"),
    "other item's folder": change("items/state/files/0/0", "data/00000-00000-ab12cd34.safetensors"),
    "odd name": change("items/state/files/0/0", "state/x.pickle"),
    "size of text": change("items/state/files/0/1", "1"),
    "header beyond file": change("items/state/files/0/2", 1 << 50),
    "crc too large": change("items/state/files/0/3", 1 << 32),
    "shape of 2^40": change(f"{LEAF}/shape", [1 << 40, 1 << 40]),
    "negative shape": change(f"{LEAF}/shape", [-2, 3]),
    "shape of floats": change(f"{LEAF}/shape", [2.0, 3]),
    "65 axes": change(f"{LEAF}/shape", [1] * 65),
    "grid that does not divide": change(f"{LEAF}/grid", [[2, 2], [2, 2]]),
    "grid of zeros": change(f"{LEAF}/grid", [[0, 0], [0, 0]]),
    "grid of another rank": change(f"{LEAF}/grid", [[2], [2]]),
    "2^40 cells": change("items/state/cells/0", [[0, 0, 1 << 40]]),
    "cells in no file": change("items/state/cells/0", [[5, 0, 1]]),
    "negative cells": change("items/state/cells/0", [[0, 0, -1]]),
    "unknown dtype": change(f"{LEAF}/dtype", "object"),
    "dtype of a class": change(f"{LEAF}/dtype", "os.system"),
    "unknown kind": change(f"{LEAF}/kind", "pickle"),
    "path of a number": change(f"{LEAF}/path", 5),
    "same path twice": change(f"{LEAF}/path", "n"),
    "no such table": change(f"{LEAF}/cells", 9),
    "no such sharding": change(f"{LEAF}/sharding", 9),
    "sharding of more axes": change(
        "items/state/shardings/0",
        {"axes": ["x"], "sizes": [1], "devices": [0], "spec": [[], [], ["x"]]},
    ),
    "sharding of text": change("items/state/shardings/0", "x"),
    "axis types of what has no mesh": change(
        "items/state/shardings/0", {"device": 0, "axis_types": ["Auto"]}
    ),
    "statics of a list": change("items/state/statics", []),
    "statics that are no numbers": change("items/state/statics", {"a": ["int", "zz"]}),
    "too many values": change("items/state/values", [["int", "0x3"], ["int", "0x3"]]),
    "no values": change("items/state/values", []),
    "value of another type": change("items/state/values", [["str", "x"]]),
    "value that is no number": change("items/state/values", [["int", "zz"]]),
    "tree without leaves": change("items/state/tree", None),
    "leaf twice": change("items/state/tree/nodes/0", 1),
    "tree of text": change("items/state/tree", "x"),
    "tree of no kind": change("items/state/tree/kind", "eval"),
    "keys of lists": change("items/state/tree/keys", [[], "none", "w"]),
    "keys of two types": change("items/state/tree/keys", ["n", 7, "w"]),
    "keys missing": change("items/state/tree/keys", []),
    "item kind": change("items/state/kind", "pickle"),
    "item name": lambda record: record["items"].update({"../x": record["items"].pop("state")}),
    "writer that is a path": change("writer", "../../x"),
    "writer of another alphabet": change("writer", "ab12cd3g"),
    "writer of a number": change("writer", 12345678),
    "file of another writer's alphabet": change("items/state/files/0/0", "state/00000-00000-x.bin"),
    "items of a list": change("items", []),
    "files of null": change("items/state/files", None),
    "processes of null": change("processes", None),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_records_are_refused(tmp_path: Path, kind: str) -> None:
    """A record whose checksum fits but which no writer of ours makes is a typed error that names
    the file.
    """
    record = json.loads(record_of(tmp_path))
    HOSTILE[kind](record)
    with pytest.raises((HostileCheckpoint, Corrupt)) as caught:
        parse_record(sealed(record), "root/7/checkpoint.json")
    assert "root/7/checkpoint.json" in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"null",
        b"[]",
        b'"x"',
        b"\xff\xfe",
        b"1e999",
        b"9" * 5000,
    ],
)
def test_json_that_is_no_record(body: bytes) -> None:
    """JSON nested 100,000 deep, of other types, or none at all, with a checksum that fits."""
    with pytest.raises((HostileCheckpoint, Corrupt)):
        parse_record(body + b',"crc32c":"%08x"}\n' % crc32c(body), "p")


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_runs_expand_to_what_they_were(where: list[int]) -> None:
    """Runs of chunks are exact for any assignment."""
    assert expand_runs([chunk_runs(np.array(where))], 6)[0].tolist() == where


def test_a_record_that_was_shown_is_not_parsed_again(tmp_path: Path) -> None:
    """Whoever reads the same bytes of the same step next has the very record; other bytes, and
    another look, are parsed.
    """
    storage = LocalStorage(tmp_path)
    seen = SeenRecord()
    for step in (7, 8):
        (tmp_path / str(step)).mkdir()
        (tmp_path / str(step) / "checkpoint.json").write_bytes(record_of(tmp_path / f"made{step}"))
    shown = seen.show(storage, "7")
    assert seen.read(storage, "7") is shown
    assert seen.show(storage, "7") is not shown
    with pytest.raises(Corrupt, match="record of step 7, in the folder of step 8"):
        seen.read(storage, "8")
    (tmp_path / "7" / "checkpoint.json").write_bytes(b"{}")
    with pytest.raises(Corrupt):
        seen.read(storage, "7")
