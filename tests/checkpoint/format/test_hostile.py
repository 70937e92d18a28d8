"""Hostile checkpoints: files made to hurt whoever opens them, with checksums that fit."""

from __future__ import annotations

import ast
import json
import resource
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from crc32c import crc32c

import holdfast.checkpoint
from holdfast.checkpoint import (
    SAVED,
    CheckpointError,
    Corrupt,
    HostileCheckpoint,
    NotEnoughMemory,
    TreeMismatch,
    load,
    save,
    structure,
    verify,
)
from holdfast.checkpoint.format.item_report import FileReport, ItemReport, pack_name
from holdfast.checkpoint.format.pack_header import ChunkChecksum, count_prefixes
from holdfast.checkpoint.format.record import MIN_ENTRY_BYTES
from holdfast.checkpoint.saving.pack_writer import plan_pack
from holdfast.checkpoint.saving.plan import Leaf, make_plan
from holdfast.checkpoint.saving.record_builder import RecordHead, build_record

Header = dict[str, Any]


def seal(folder: Path, record: dict[str, Any]) -> None:
    record.pop("crc32c", None)
    body = json.dumps(record, separators=(",", ":")).encode()[:-1]
    (folder / "checkpoint.json").write_bytes(body + b',"crc32c":"%08x"}\n' % crc32c(body))


def rewrite(
    folder: Path,
    change: Callable[[Header], Any],
    record: Callable[[dict[str, Any]], None] = lambda _: None,
) -> None:
    """Changes the header of the one pack, and makes sizes and checksums fit, as an attacker
    would.
    """
    (pack,) = folder.glob("state/*.safetensors")
    data = pack.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    changed = change(header)
    text = changed if isinstance(changed, bytes) else json.dumps(header).encode()
    head = len(text).to_bytes(8, "little") + text
    pack.write_bytes(head + data[8 + length :])
    told = json.loads((folder / "checkpoint.json").read_text())
    told["items"]["state"]["files"][0][1:] = [pack.stat().st_size, len(head), crc32c(head)]
    record(told)
    seal(folder, told)


def entry(name: str, **facts: Any) -> Callable[[Header], None]:
    return lambda header: header[name].update(facts)


HEADERS: dict[str, Callable[[Header], Any]] = {
    "offsets outside the file": entry("b", data_offsets=[32, 1 << 40]),
    "offsets before the file": entry("a", data_offsets=[-32, 32]),
    "overlapping chunks": entry("b", data_offsets=[16, 48]),
    "a hole": entry("b", data_offsets=[40, 72]),
    "backwards": entry("a", data_offsets=[32, 0]),
    "offsets of text": entry("a", data_offsets=["0", "32"]),
    "offsets of floats": entry("a", data_offsets=[0.0, 32.0]),
    "three offsets": entry("a", data_offsets=[0, 32, 64]),
    "another shape": entry("a", shape=[1 << 40]),
    "a shape of text": entry("a", shape=["4"]),
    "another dtype": entry("a", dtype="F16"),
    "a dtype of a list": entry("a", dtype=[]),
    "an unknown dtype": entry("a", dtype="PICKLE"),
    "no chunk": lambda header: header.pop("a"),
    "renamed chunk": lambda header: header.update(c=header.pop("a")),
    "no checksums": lambda header: header.pop("__metadata__"),
    "short checksums": lambda header: header["__metadata__"].update(crc32c="00"),
    "checksums of numbers": lambda header: header["__metadata__"].update(crc32c=5),
    "checksums that are none": lambda header: header["__metadata__"].update(crc32c="zzzzzzzz" * 2),
    "prefixes that nobody has": (
        lambda header: header["__metadata__"].update(crc32c_prefixes="AAAA" * 4)
    ),
    "prefixes of no base64": lambda header: header["__metadata__"].update(crc32c_prefixes="?"),
    "prefixes of numbers": lambda header: header["__metadata__"].update(crc32c_prefixes=[1]),
    "prefixes cut off": lambda header: header["__metadata__"].update(crc32c_prefixes="AAA="),
    "no JSON": lambda _: b"not json" * 40,
    "deep JSON": lambda _: b"[" * 100_000,
    "a list": lambda _: b"[]" + b" " * 300,
    "bytes that are no text": lambda _: b"\xff" * 640,
}


@pytest.mark.parametrize("kind", HEADERS)
def test_hostile_headers(tmp_path: Path, kind: str) -> None:
    """A pack whose header lies is a typed error naming it, for load and for verify, whatever its
    checksums say.
    """
    save(tmp_path / "c", {"a": np.arange(4), "b": np.arange(4)})
    rewrite(tmp_path / "c", HEADERS[kind])
    for read in (load, verify):
        with pytest.raises((HostileCheckpoint, Corrupt)) as caught:
            read(tmp_path / "c")
        assert ".safetensors" in str(caught.value)


def test_memory_is_bounded_by_what_is_there(tmp_path: Path) -> None:
    """A record of a terabyte over a pack of a few bytes is refused before memory is taken for
    it.
    """
    save(tmp_path / "c", {"a": np.arange(4), "b": np.arange(4)})
    big = 1 << 37

    def lie(record: dict[str, Any]) -> None:
        item = record["items"]["state"]
        for leaf in item["leaves"]:
            leaf |= {"shape": [big], "grid": [[big], [big]]}

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rewrite(
        tmp_path / "c",
        lambda header: [
            header[name].update(shape=[big], data_offsets=[0, 8 * big]) for name in "ab"
        ],
        lie,
    )
    with pytest.raises(NotEnoughMemory):  # where the machine's memory is asked first
        load(tmp_path / "c")
    with pytest.raises((HostileCheckpoint, Corrupt)):
        load(tmp_path / "c", host_memory_bytes=big)
    rewrite(
        tmp_path / "c",
        lambda _: None,
        lambda record: record["items"]["state"]["files"][0].__setitem__(1, 16 * big),
    )
    with pytest.raises((HostileCheckpoint, Corrupt)):
        load(tmp_path / "c", host_memory_bytes=big)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KiB


@pytest.mark.parametrize(
    "head", [None, 100_000_000], ids=["the real header", "a header as long as may be"]
)
def test_a_small_record_cannot_claim_many_chunks(tmp_path: Path, head: int | None) -> None:
    """A record of a few KB whose leaves claim 2^24 chunks each is refused by what the headers of
    its files could hold, with no work done.

    One whose claimed headers could hold them is refused by the headers that are there, before
    anything is made for each chunk.
    """
    save(tmp_path / "c", {name: np.arange(4) for name in "abcd"})
    claimed = 1 << 24 if head is None else 1 << 18

    def lie(record: dict[str, Any]) -> None:
        item = record["items"]["state"]
        item["cells"] = [[[0, 0, claimed]]]
        for leaf in item["leaves"]:
            leaf |= {"shape": [claimed], "grid": [[claimed], [1]], "cells": 0}
        if head is not None:
            item["files"][0][1:3] = [head, head]

    rewrite(tmp_path / "c", lambda _: None, lie)
    assert (tmp_path / "c" / "checkpoint.json").stat().st_size < 7000
    blocks = sys.getallocatedblocks()
    for read in (load, verify):
        tracemalloc.start()
        with pytest.raises((HostileCheckpoint, Corrupt)):
            read(tmp_path / "c")
        assert tracemalloc.get_traced_memory()[1] < 130_000_000
        tracemalloc.stop()
    assert sys.getallocatedblocks() - blocks < 100_000  # objects: there is none for each chunk


def test_leaves_that_share_their_chunks_claim_no_more_than_headers_hold(tmp_path: Path) -> None:
    """Each list of chunks may be as long as the headers allow. Many leaves that name one list claim
    it as often.
    """
    save(tmp_path / "c", {name: np.arange(4) for name in "abcd"})

    def lie(record: dict[str, Any]) -> None:
        item = record["items"]["state"]
        room = item["files"][0][2] // MIN_ENTRY_BYTES
        item["cells"] = [[[0, 0, room]]]
        for leaf in item["leaves"]:
            leaf |= {"shape": [room], "grid": [[room], [1]], "cells": 0}

    rewrite(tmp_path / "c", lambda _: None, lie)
    with pytest.raises(HostileCheckpoint, match="the headers of the files have room for"):
        load(tmp_path / "c")


@pytest.mark.slow
def test_sparse_packs_beyond_memory_are_typed_errors(tmp_path: Path) -> None:
    """Packs that are 137 GB of hole, with headers that fit, are an error that names one: for verify
    at its first step, for load at the latest where memory is asked for.
    """
    plan = make_plan(0, [Leaf("w", "array", "float64", (1 << 34,), 8)])
    (tmp_path / "state").mkdir()
    files = []
    for pack in plan.own:
        planned = plan_pack(plan, pack)
        header = planned.frame.join(
            [ChunkChecksum(5, (5,) * count_prefixes(chunk.nbytes)) for chunk in planned.chunks]
        )
        files.append(
            FileReport(pack_name(0, pack, "ab12cd34"), planned.size, len(header), crc32c(header))
        )
        with open(tmp_path / "state" / files[-1].name, "wb") as file:
            file.write(header)
            file.truncate(planned.size)
    report = ItemReport(0, plan.hash, tuple(files))
    record = build_record(
        RecordHead(0, writer="ab12cd34", processes=1, started_s=0, finished_s=1),
        {"state": (plan, [report])},
    )
    (tmp_path / "checkpoint.json").write_bytes(record)
    with pytest.raises(Corrupt, match="checksum of 'w"):
        verify(tmp_path)
    with pytest.raises(
        CheckpointError,
        match=r"checksum of 'w|no memory for the 137,438,953,472 bytes of 'w'|left in this machine",
    ):
        load(tmp_path)


def test_nothing_outside_the_root_is_read(tmp_path: Path) -> None:
    """Names that lead out of the step's folder, absolute, by dots, or through another item, are
    refused before anything is opened.
    """
    save(tmp_path / "c", {"a": np.arange(4)})
    (pack,) = (tmp_path / "c").glob("state/*.safetensors")
    outside = tmp_path / pack.name
    outside.write_bytes(pack.read_bytes())
    record = json.loads((tmp_path / "c" / "checkpoint.json").read_text())
    for name in (
        str(outside),
        f"../{pack.name}",
        f"state/../../{pack.name}",
        f"state//{pack.name}",
        f"other/{pack.name}",
        pack.name,
        "",
    ):
        record["items"]["state"]["files"][0][0] = name
        seal(tmp_path / "c", record)
        with pytest.raises(HostileCheckpoint, match="not a name of a file"):
            load(tmp_path / "c")


def test_keys_that_jax_cannot_make(tmp_path: Path) -> None:
    """Keys of an implementation that is not there, or of data that fit no key: an error that names
    the leaf, the data without it, and a structure that has the data.
    """
    save(tmp_path, {"key": jax.random.key(3)})
    record = json.loads((tmp_path / "checkpoint.json").read_text())
    record["items"]["state"]["leaves"][0]["impl"] = "none of jax's"
    seal(tmp_path, record)
    with pytest.raises(TreeMismatch, match="'key' is of keys of \"none of jax's\", and jax makes"):
        load(tmp_path, SAVED)
    assert load(tmp_path)["key"].shape == (2,)
    assert structure(tmp_path).items["state"].tree["key"].shape == (2,)


def test_no_pickle_and_no_imports_by_name() -> None:
    """No module of the room imports pickle or marshal, and none evaluates or imports what does not
    stand in it.
    """
    for path in Path(holdfast.checkpoint.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, (ast.Import, ast.ImportFrom))
                else []
            )
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {"pickle", "marshal", "shelve", "dill", "cloudpickle"} & set(names), path
            if isinstance(node, ast.Call):
                called = getattr(node.func, "id", getattr(node.func, "attr", ""))
                if called in ("eval", "exec", "__import__", "import_module"):
                    assert all(isinstance(value, ast.Constant) for value in node.args), path
                if called in ("load", "fromfile"):
                    assert not any(keyword.arg == "allow_pickle" for keyword in node.keywords), path
