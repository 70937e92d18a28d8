"""Conversions: in bounded memory, with nothing left of one that failed, and with what a tree is
kept as it was.
"""

from __future__ import annotations

import collections
import errno
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holdfast.checkpoint import (
    SAVED,
    CheckpointError,
    Corrupt,
    Files,
    Json,
    SaveFailed,
    UnsupportedLeaf,
    load,
    save,
    verify,
)
from holdfast.checkpoint.format.grid import Grid
from holdfast.checkpoint.format.pack_header import parse_header
from holdfast.checkpoint.format.record import ItemRecord, parse_record
from holdfast.checkpoint.layouts.detect import open_checkpoint
from holdfast.checkpoint.restoring.per_process import PerProcessSelection, leaves_of_process
from holdfast.checkpoint.restoring.reader import ReadRequest
from holdfast.checkpoint.saving.item_files import ItemTarget
from holdfast.checkpoint.saving.record_builder import RecordHead, build_record
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.checkpoint.storage.path import StorePath
from holdfast.checkpoint.tools.convert import convert
from holdfast.checkpoint.tools.diff import compare
from holdfast.checkpoint.tools.to_holdfast import write_item
from tests.support.checkpointing import at_once, groups
from tests.support.paths import program

Pair = collections.namedtuple("Pair", "mu nu")
MAKE = program("convert_make")
CONVERT = program("convert_convert")


def run(script: Path, *arguments: object) -> str:
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "MALLOC_ARENA_MAX": "2",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }
    command = [sys.executable, script, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from Linux's /proc")
def test_a_gibibyte_passes_through_little_memory(tmp_path: Path) -> None:
    """1 GiB of holdfast's, sharded along its last axis, to each layout, and back from each, in less
    than 400 MiB of memory (Orbax: 500).

    With two heaps, so that what is measured is what is held: what tensorstore's threads free stays
    with the heap of each.
    """
    run(MAKE, tmp_path / "ours")
    extra = {}
    for layout in ("safetensors", "orbax"):
        extra[f"to {layout}"] = int(run(CONVERT, tmp_path / "ours", tmp_path / layout, layout))
        extra[f"from {layout}"] = int(
            run(CONVERT, tmp_path / layout, tmp_path / "back", "holdfast")
        )
        shutil.rmtree(tmp_path / layout)
        shutil.rmtree(tmp_path / "back")
    extra["to holdfast"] = int(run(CONVERT, tmp_path / "ours", tmp_path / "again", "holdfast"))
    print(extra)
    assert all(0 < size < (500 if "orbax" in name else 400) for name, size in extra.items()), extra


def tree() -> dict[str, Any]:
    sharded = jax.device_put(
        jnp.arange(64.0).reshape(8, 8), jax.NamedSharding(jax.make_mesh((1,), ("d",)), jax.P("d"))
    )
    numbers = {
        "i": 3,
        "f": 2.5,
        "b": True,
        "c": 1 + 2j,
        "raw": b"\x00\xff",
        "s": "text",
        "none": None,
        "empty": ({}, [], ()),
    }
    arrays = {
        "np": np.arange(3),
        "np0": np.float16(2.5),
        "int4": jnp.ones(5, jnp.int4),
        "zero": jnp.ones((0, 3)),
        "keys": jax.random.key(3),
    }
    return {
        "b": numbers,
        "a": arrays | {"sharded": sharded},
        "pair": Pair([1], (jnp.ones(2),)),
        "odd.name[0]": jnp.arange(3),
    }


def test_a_step_of_ours_stays_what_it_was(tmp_path: Path) -> None:
    """holdfast to holdfast: the tree with its types, values, dtypes, keys and shardings, bit for
    bit, and the folder has no traces.
    """
    save(tmp_path / "a", tree(), step=3, metadata={"x": 1})
    convert(open_checkpoint(tmp_path / "a"), StorePath(LocalStorage(tmp_path / "b")), "holdfast")
    assert sorted(os.listdir(tmp_path / "b")) == ["3"]
    one, two = (load(tmp_path / name, types=[Pair]) for name in ("a", "b/3"))
    assert jax.tree.structure(one) == jax.tree.structure(two) == jax.tree.structure(tree())
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert type(a) is type(b) and (
            a.tobytes() == b.tobytes() if isinstance(a, np.ndarray) else a == b
        )
    assert load(tmp_path / "b/3", SAVED)["a"]["sharded"].sharding.spec == jax.P("d")
    assert (
        jax.random.key_data(load(tmp_path / "b/3", SAVED)["a"]["keys"]).tolist()
        == jax.random.key_data(jax.random.key(3)).tolist()
    )
    assert open_checkpoint(tmp_path / "b/3").info.metadata == {"x": 1}


def test_large_leaves_are_read_in_pieces(tmp_path: Path) -> None:
    """Leaves of several chunks, cut along either axis, of sizes that fit no power of two, come out
    bit for bit from every layout.
    """
    mesh = jax.make_mesh((1,), ("d",))
    big = np.random.default_rng(0).integers(
        0, 255, (5, 7, (3 << 20) + 1), dtype=np.uint8
    )  # 105 MB: several chunks
    save(
        tmp_path / "a",
        {"big": jax.device_put(big, jax.NamedSharding(mesh, jax.P())), "x": jnp.ones(3)},
        step=1,
    )
    for layout in ("holdfast", "orbax", "safetensors"):
        convert(open_checkpoint(tmp_path / "a"), StorePath(LocalStorage(tmp_path / layout)), layout)
        convert(
            open_checkpoint(tmp_path / layout),
            StorePath(LocalStorage(tmp_path / f"{layout}-back")),
            "holdfast",
        )
        back = tmp_path / f"{layout}-back"
        verify(back)
        assert load(back)["big"].tobytes() == big.tobytes()
        shutil.rmtree(tmp_path / layout)
        shutil.rmtree(back)


def test_what_can_be_read_only_whole_is_read_once(tmp_path: Path) -> None:
    """An array whose chunk is larger than ours is read once, not once for each of our chunks."""
    save(tmp_path / "a", {"w": np.arange(60 << 20, dtype=np.uint16).reshape(60, 1 << 20)})
    checkpoint = open_checkpoint(tmp_path / "a")
    item = checkpoint.item("state")
    leaf = item.leaves[0]
    whole = replace(item, leaves=(replace(leaf, grid=Grid(leaf.shape, leaf.shape, leaf.shape)),))
    sizes = []

    class Reader:
        def fill(self, reads: Any, allocate: Any) -> None:
            sizes.extend(read.nbytes for read in reads)
            inner = [ReadRequest(leaf, read.region) for read in reads]
            checkpoint.reader("state").fill(inner, allocate)
            for read, filled in zip(reads, inner, strict=True):
                read.array = filled.array

    storage = LocalStorage(tmp_path / "b")
    target = ItemTarget(storage, "1", "state", "00c0ffee")
    plan, (report,) = write_item(whole, Reader(), target, lambda done: None)
    assert plan.total_bytes == leaf.nbytes == 120 << 20
    assert set(sizes) == {leaf.nbytes} and len(sizes) <= len(report.files)
    for file in report.files:
        data = (tmp_path / "b/1/state" / file.name).read_bytes()
        assert parse_header(data[: file.head], file.size, file.name)


@pytest.mark.parametrize("layout", ["holdfast", "orbax", "safetensors"])
def test_nothing_is_left_of_a_conversion_that_failed(layout: str, tmp_path: Path) -> None:
    """A damaged source is Corrupt, and the target's folder is as if nothing had been tried."""
    save(tmp_path / "a", {"w": jnp.ones((512, 512)), "z": jnp.zeros(4)})
    (pack,) = (tmp_path / "a/state").iterdir()
    data = bytearray(pack.read_bytes())
    data[-5] ^= 1
    pack.write_bytes(data)
    with pytest.raises(Corrupt):
        convert(open_checkpoint(tmp_path / "a"), StorePath(LocalStorage(tmp_path / "b")), layout)
    assert not (tmp_path / "b").exists() or os.listdir(tmp_path / "b") == []


@pytest.mark.parametrize("name", ["shards", "shard_bytes"])
@pytest.mark.parametrize("bound", [0, -1, 1.5])
def test_a_bound_of_files_is_a_whole_number(name: str, bound: float, tmp_path: Path) -> None:
    """Above 0; nothing is written."""
    save(tmp_path / "a", {"w": np.ones(4)})
    target = StorePath.of(tmp_path / "b")
    with pytest.raises(
        ValueError, match=rf"convert: {name}={bound}: expected a whole number above"
    ):
        convert(open_checkpoint(tmp_path / "a"), target, "safetensors", **{name: bound})
    assert not (tmp_path / "b").exists()


def test_files_are_not_left_out_in_silence(tmp_path: Path) -> None:
    """A folder of files that Orbax's layout cannot hold is refused by name, unless the items to
    take are named.
    """
    layout = "orbax"
    model = {"w": np.ones(3)}
    tokenizer = Files(lambda folder: (folder / "vocabulary").write_text("a b"))
    save(tmp_path / "c", items={"model": model, "tokenizer": tokenizer})
    with pytest.raises(
        UnsupportedLeaf,
        match=(
            f"'tokenizer' of .* is a folder of files, which {layout} does not hold; name the items"
        ),
    ):
        convert(open_checkpoint(str(tmp_path / "c")), StorePath.of(tmp_path / layout), layout)
    convert(
        open_checkpoint(str(tmp_path / "c")),
        StorePath.of(tmp_path / layout),
        layout,
        items=["model"],
    )


def save_of_each(path: Path, say: str = "I am") -> None:
    """Saves, as three processes, a tree, and JSON and files of which each keeps its own."""

    def write(folder: Path, index: int) -> None:
        (folder / "deep").mkdir()
        (folder / "deep" / "vocabulary").write_text(f"{say} {index}")

    def own(index: int) -> dict[str, Any]:
        data = Json({say: index}, per_process=True)
        files = Files(lambda folder: write(folder, index), per_process=True)
        return {"state": {"w": np.ones(3)}, "data": data, "files": files, "config": Json({"lr": 1})}

    with groups(3) as members:
        at_once(
            [
                lambda member=member: save(path, items=own(member.index), group=member)
                for member in members
            ]
        )  # type: ignore[misc]


def test_what_each_process_keeps_is_converted(tmp_path: Path) -> None:
    """JSON items and items of files come out with the copy of every process, or with the one that
    is asked for.
    """
    save_of_each(tmp_path / "a")
    files = {"data": None, "files": None, "config": None}
    for whose, process in (("all", None), ("one", 2)):
        root = StorePath(LocalStorage(tmp_path / whose))
        convert(open_checkpoint(tmp_path / "a"), root, "holdfast", process=process)
        assert verify(tmp_path / whose).files == verify(tmp_path / "a").files - (
            4 if process else 0
        )
        for index in range(3) if process is None else [process]:
            found = load(tmp_path / whose, items=files, process=index if process is None else 0)
            assert found == {
                "data": {"I am": index},
                "files": {"deep/vocabulary": f"I am {index}".encode()},
                "config": {"lr": 1},
            }
    assert not list(compare(open_checkpoint(tmp_path / "a"), open_checkpoint(tmp_path / "all")))


def test_what_each_process_keeps_is_not_left_out_in_silence(tmp_path: Path) -> None:
    """Orbax's layout holds one value of a JSON item: whose is to be said."""
    save_of_each(tmp_path / "a")
    source = open_checkpoint(tmp_path / "a")
    target = StorePath(LocalStorage(tmp_path / "b"))
    with pytest.raises(
        UnsupportedLeaf, match=r"'data' of .* has a value of each of 3 processes.*--process N"
    ):
        convert(source, target, "orbax", items=["state", "data"])
    convert(source, target, "orbax", items=["state", "data"], process=1)
    assert load(tmp_path / "b", item="data") == {"I am": 1}


@pytest.mark.parametrize("layout", ["holdfast", "orbax", "safetensors"])
def test_only_the_named_items_are_taken(layout: str, tmp_path: Path) -> None:
    """Neither JSON nor files come along where the items are named, of whatever kind these are."""
    save_of_each(tmp_path / "a")
    source = open_checkpoint(tmp_path / "a")
    convert(source, StorePath(LocalStorage(tmp_path / "b")), layout, items=["state"])
    assert [*open_checkpoint(tmp_path / "b").info.items] == ["state"]
    target = StorePath(LocalStorage(tmp_path / "c"))
    if layout == "safetensors":
        with pytest.raises(UnsupportedLeaf, match=r"'config' of .* is JSON, which safetensors"):
            convert(source, target, layout, items=["state", "config"])
    else:
        convert(source, target, layout, items=["config"])
        assert [*open_checkpoint(tmp_path / "c").info.items] == ["config"]


def test_an_interrupt_after_the_commit_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C once the record has its name: the step is there, whole."""
    save(tmp_path / "a", {"w": jnp.arange(4)}, step=3)
    real = os.link

    def link(source: Any, target: Any, **more: Any) -> None:
        real(source, target, **more)
        if str(target).endswith("checkpoint.json"):
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(KeyboardInterrupt):
        convert(
            open_checkpoint(tmp_path / "a"), StorePath(LocalStorage(tmp_path / "b")), "holdfast"
        )
    assert verify(tmp_path / "b" / "3").step == 3


def test_a_full_disk_is_an_error_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENOSPC while a pack is written, or for the record: SaveFailed that says which step of what,
    and nothing is left.
    """
    save(tmp_path / "a", {"w": jnp.arange(4)}, step=3)
    for call in ("fsync", "link"):
        real = getattr(os, call)

        def full(what: Any, *more: Any, real: Any = real) -> None:
            if not more or str(more[0]).endswith("checkpoint.json"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(what, *more)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            with pytest.raises(SaveFailed, match=r"step 3 was not saved: .*No space left"):
                convert(
                    open_checkpoint(tmp_path / "a"),
                    StorePath(LocalStorage(tmp_path / "b")),
                    "holdfast",
                )
        assert not any(path.is_file() for path in (tmp_path / "b").rglob("*"))


def test_values_of_three_processes(tmp_path: Path) -> None:
    """The record of a conversion tells of every process's values and rows, as the one that it was
    made of did.
    """
    save(tmp_path / "a", {"n": 1, "rows": np.arange(12).reshape(3, 4), "w": jnp.ones(2)})
    checkpoint = open_checkpoint(tmp_path / "a")
    item = checkpoint.item("state")
    n, rows, w = item.leaves
    own = (replace(n, value=(5, 6, 7), per_process=True), replace(rows, per_process=True), w)
    storage = LocalStorage(tmp_path / "b")
    target = ItemTarget(storage, "1", "state", "00c0ffee")
    plan, reports = write_item(
        replace(item, leaves=own), checkpoint.reader("state"), target, lambda done: None
    )
    data = build_record(
        RecordHead(1, writer="00c0ffee", processes=3, started_s=0.0, finished_s=0.0),
        {"state": (plan, reports)},
    )
    found = parse_record(data, "x").items["state"].leaves
    assert len(reports) == 3 and [leaf.per_process for leaf in found] == [True, True, False]
    assert found[0].value == (5, 6, 7) and found[1].shape == (3, 4)
    assert [
        leaf.value
        for leaf in leaves_of_process(
            ItemRecord("state", "tree", (), 0, found), PerProcessSelection(2)
        ).leaves[:1]
    ] == [7]


def test_leaves_kept_per_process(tmp_path: Path) -> None:
    """They stay so in our layout; another layout gets the copies of the process that was named."""
    from holdfast.multihost import Solo

    state = {"rng": np.arange(4), "seed": 7, "w": jnp.ones(3)}
    save(tmp_path / "a", state, group=Solo(), per_process=lambda path: path in ("rng", "seed"))
    convert(open_checkpoint(tmp_path / "a"), StorePath(LocalStorage(tmp_path / "b")), "holdfast")
    assert [leaf.per_process for leaf in open_checkpoint(tmp_path / "b").item("state").leaves] == [
        True,
        True,
        False,
    ]
    assert load(tmp_path / "b", state)["seed"] == 7
    with pytest.raises(UnsupportedLeaf, match="say whose copy to take"):
        convert(open_checkpoint(tmp_path / "a"), StorePath(LocalStorage(tmp_path / "c")), "orbax")
    convert(
        open_checkpoint(tmp_path / "a"), StorePath(LocalStorage(tmp_path / "c")), "orbax", process=0
    )
    found = load(tmp_path / "c")
    assert found["rng"].tolist() == [0, 1, 2, 3] and found["seed"] == 7
    with pytest.raises(CheckpointError, match="kept per process and is there for 1 processes"):
        convert(
            open_checkpoint(tmp_path / "a"),
            StorePath(LocalStorage(tmp_path / "d")),
            "orbax",
            process=1,
        )


@pytest.mark.parametrize("layout", ["holdfast", "orbax"])
def test_a_folder_called_as_a_step_is_that_step(layout: str, tmp_path: Path) -> None:
    """A checkpoint that was saved alone becomes the step that its folder is called, else step 0."""
    for name, step in (("3", "3"), ("best", "0")):
        save(tmp_path / name, {"w": np.ones(2)})
        root = StorePath(LocalStorage(tmp_path / f"of-{name}"))
        convert(open_checkpoint(tmp_path / name), root, layout)
        assert os.listdir(tmp_path / f"of-{name}") == [step]
