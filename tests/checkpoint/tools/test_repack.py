"""Repacking: the same chunks in more and shorter packs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holdfast.checkpoint import (
    CheckpointManager,
    Corrupt,
    Options,
    StepExists,
    load,
    save,
    verify,
)
from holdfast.checkpoint.format.pack_header import HEADER_BYTES
from holdfast.checkpoint.format.record import parse_record, read_record
from holdfast.checkpoint.layouts.detect import open_checkpoint
from holdfast.checkpoint.steps.object_claims import open_claims
from holdfast.checkpoint.storage.counting import CountingStorage
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.checkpoint.storage.path import StorePath, open_storage
from holdfast.checkpoint.storage.tombstone import sealed_json
from holdfast.checkpoint.tools import copy
from holdfast.checkpoint.tools.copy import copy_checkpoint, file_sizes
from holdfast.checkpoint.tools.repack import repack


class Bounded(CountingStorage):
    """A store that takes short files only."""

    limit_bytes = 17 << 20

    @property
    def max_file_bytes(self) -> int | None:
        return self.limit_bytes

    def write(self, name: str, size: int, parts: Any) -> None:
        assert size <= self.limit_bytes, (name, size)
        super().write(name, size, parts)


def test_packs_that_are_too_long_are_divided(tmp_path: Path) -> None:
    """To a store that takes no file as long as a pack, the chunks go into more packs; all is
    verified, restored alike, and resumed.
    """
    rng = np.random.default_rng(0)
    tree = {f"w{i}": rng.integers(0, 255, (2 << 20) + i % 5, dtype=np.uint8) for i in range(40)}
    tree |= {f"x{i}": np.full(3 + i % 4, i, np.float16) for i in range(50)}
    save(
        tmp_path / "a", {**tree, "n": 7, "long": [jnp.ones((3, 5))]}, step=4, metadata={"who": "me"}
    )
    source = StorePath(LocalStorage(tmp_path / "a"))
    packs = [size for name, size in file_sizes(source).items() if name.endswith(".safetensors")]
    assert max(packs) > Bounded.limit_bytes
    local = open_storage(tmp_path / "b")
    claims = open_claims(local)
    target = StorePath(Bounded(local, lambda done: None))
    reported: list[int] = []
    done = copy_checkpoint(source, target, claims, reported.append)
    assert len(done.written) > len(packs) + 1 and sum(reported) >= 80 << 20
    assert verify(tmp_path / "b").leaves == len(tree) + 2
    one = load(tmp_path / "a")
    two = load(tmp_path / "b")
    assert (
        jax.tree.structure(one) == jax.tree.structure(two)
        and two["n"] == 7
        and open_checkpoint(tmp_path / "b").info.metadata == {"who": "me"}
    )
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert copy_checkpoint(source, target, claims).written == []
    (tmp_path / "b/checkpoint.json").unlink()
    victim = tmp_path / "b" / done.written[3]
    victim.unlink()
    assert sorted(copy_checkpoint(source, target, claims).written) == sorted(
        [done.written[3], "checkpoint.json"]
    )
    assert not (tmp_path / "b/.holdfast").exists()
    save(tmp_path / "c", tree, step=4)
    with pytest.raises(StepExists, match="another checkpoint"):
        copy_checkpoint(StorePath(LocalStorage(tmp_path / "c")), target, claims)


class Wider(Bounded):
    """A store that takes files of three of the chunks below."""

    limit_bytes = HEADER_BYTES + (3 << 20)


def _save_incremental(root: Path) -> dict[str, Any]:
    """Saves steps 0 to 3, of which some values change; returns the last tree."""
    rng = np.random.default_rng(0)
    tree = {f"w{i:02}": rng.integers(0, 255, 1 << 20, dtype=np.uint8) for i in range(80)}
    with CheckpointManager(root, options=Options(incremental=True)) as manager:
        for step, changed in enumerate([[], [0, 1, 2, 3, 4, 20, 21], [3], [2]]):
            tree |= {f"w{i:02}": np.full(1 << 20, 16 * step + i, np.uint8) for i in changed}
            manager.save(step, tree)
    return tree


@pytest.mark.parametrize("store", [Bounded, Wider])
def test_of_an_incremental_step_each_value_is_copied_as_it_is_now(
    store: type[Bounded], tmp_path: Path
) -> None:
    """A file that was linked has values of before too, of leaves that are in newer files by now.
    None comes back, whichever of the files are divided.
    """
    tree = _save_incremental(tmp_path / "a")
    source = StorePath(LocalStorage(tmp_path / "a"), "3")
    local = open_storage(tmp_path / "b")
    target = StorePath(store(local, lambda done: None), "3")
    copy_checkpoint(source, target, open_claims(local))
    copied = load(tmp_path / "b")
    assert [name for name in tree if copied[name].tobytes() != tree[name].tobytes()] == []


def test_a_record_that_names_other_values_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole as they are: the copy's chunks are compared with those of the source."""
    _save_incremental(tmp_path / "a")

    def repack_wrongly(*arguments: Any) -> Any:
        jobs, data = repack(*arguments)
        about = json.loads(data)
        leaves = {leaf["path"]: leaf for leaf in about["items"]["state"]["leaves"]}
        # In whose file a chunk of before lies too.
        leaves["w03"]["cells"] = leaves["w05"]["cells"]
        del about["crc32c"]
        return jobs, sealed_json(about)

    monkeypatch.setattr(copy, "repack", repack_wrongly)
    source = StorePath(LocalStorage(tmp_path / "a"), "3")
    local = open_storage(tmp_path / "b")
    target = StorePath(Wider(local, lambda done: None), "3")
    with pytest.raises(Corrupt, match="would have other values than"):
        copy_checkpoint(source, target, open_claims(local))
    assert not (tmp_path / "b/3/checkpoint.json").exists()


def test_the_new_files_hold_each_chunk_once(tmp_path: Path) -> None:
    """No file is longer than the limit, the data is the old bytes in the old order, and the record
    is valid and alike each time.
    """
    rng = np.random.default_rng(0)
    save(
        tmp_path,
        {f"w{i}": rng.integers(0, 255, (2 << 20) + i, dtype=np.uint8) for i in range(40)}
        | {"n": 3},
    )
    storage = LocalStorage(tmp_path)
    limit = HEADER_BYTES + (3 << 20)
    record = read_record(storage, "")
    data = storage.fetch("checkpoint.json", 1 << 30)
    jobs, new = repack(StorePath(storage), record, data, limit)
    assert (
        max(job.size for job in jobs) <= limit
        and len(jobs) > len(record.file_names())
        and len({job.name for job in jobs}) == len(jobs)
    )
    found = parse_record(new, "p")
    assert [(file.name, file.size) for file in found.items["state"].files] == [
        (job.name, job.size) for job in jobs
    ]
    for job in jobs:
        with open(tmp_path / job.source, "rb") as source:
            source.seek(job.offset)
            (tmp_path / "again" / job.name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "again" / job.name).write_bytes(job.head + source.read(job.length))
    (tmp_path / "again/checkpoint.json").write_bytes(new)
    assert verify(tmp_path / "again").leaves == 41
    assert repack(StorePath(storage), record, data, limit) == (jobs, new)


@pytest.mark.parametrize("limit", [None, 1 << 40])
def test_what_fits_stays_as_it_is(limit: int | None, tmp_path: Path) -> None:
    """Without a limit, or under it, files and record are the old ones, byte for byte."""
    save(tmp_path, {"w": np.arange(9)})
    storage = LocalStorage(tmp_path)
    record = read_record(storage, "")
    data = storage.fetch("checkpoint.json", 1 << 30)
    jobs, new = repack(StorePath(storage), record, data, limit)
    assert new == data and [(job.name, job.source, job.offset, job.head) for job in jobs] == [
        (name, name, 0, b"") for name in record.file_names()
    ]
