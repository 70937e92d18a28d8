"""Repacking: the same chunks in more and shorter packs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holdfast.checkpoint import StepExists, load, save, verify
from holdfast.checkpoint.format.pack_header import HEADER_BYTES
from holdfast.checkpoint.format.record import parse_record, read_record
from holdfast.checkpoint.layouts.detect import open_checkpoint
from holdfast.checkpoint.steps.object_claims import open_claims
from holdfast.checkpoint.storage.counting import CountingStorage
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.checkpoint.storage.path import StorePath, open_storage
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
    jobs, new = repack(storage, "", record, data, limit)
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
    assert repack(storage, "", record, data, limit) == (jobs, new)


@pytest.mark.parametrize("limit", [None, 1 << 40])
def test_what_fits_stays_as_it_is(limit: int | None, tmp_path: Path) -> None:
    """Without a limit, or under it, files and record are the old ones, byte for byte."""
    save(tmp_path, {"w": np.arange(9)})
    storage = LocalStorage(tmp_path)
    record = read_record(storage, "")
    data = storage.fetch("checkpoint.json", 1 << 30)
    jobs, new = repack(storage, "", record, data, limit)
    assert new == data and [(job.name, job.source, job.offset, job.head) for job in jobs] == [
        (name, name, 0, b"") for name in record.file_names()
    ]
