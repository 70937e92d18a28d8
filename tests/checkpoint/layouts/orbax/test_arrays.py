"""The arrays of Orbax's items: what their zarr metadata says, and where tensorstore finds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensorstore as ts

from holdfast.checkpoint import CheckpointError, Corrupt, HostileCheckpoint
from holdfast.checkpoint.format.grid import Grid
from holdfast.checkpoint.layouts.orbax.arrays import _describe, context_of, kvstore_of
from holdfast.checkpoint.storage.counting import CountingStorage
from holdfast.checkpoint.storage.kvstore import KvStoreStorage
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.checkpoint.storage.path import StorePath


def test_zarr_metadata_of_both_versions() -> None:
    """Shape, dtype and equal chunks of zarr v2 and v3; chunks that do not divide the shape are left
    to tensorstore.
    """
    assert _describe({"shape": [4, 6], "dtype": "<f4", "chunks": [2, 6]}, "f", "w") == (
        (4, 6),
        "float32",
        Grid((4, 6), (2, 6), (2, 6)),
    )
    v3 = {
        "shape": [4],
        "data_type": "bfloat16",
        "chunk_grid": {"configuration": {"chunk_shape": [4]}},
    }
    assert _describe(v3, "f", "w") == ((4,), "bfloat16", Grid((4,), (4,), (4,)))
    assert _describe({"shape": [5], "dtype": "|i1", "chunks": [2]}, "f", "w").grid.num_chunks == 1
    assert (
        _describe({"shape": [0, 3], "dtype": "|i1", "chunks": [1, 3]}, "f", "w").grid.num_chunks
        == 1
    )


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ({}, Corrupt),
        ([], Corrupt),
        ({"shape": "x", "dtype": "<f4", "chunks": []}, Corrupt),
        ({"shape": [1], "dtype": "<U3", "chunks": [1]}, Corrupt),
        ({"shape": [1 << 60], "dtype": "<f4", "chunks": [1]}, HostileCheckpoint),
        ({"shape": [-1], "dtype": "<f4", "chunks": [1]}, HostileCheckpoint),
        ({"shape": [1] * 33, "dtype": "<f4", "chunks": [1]}, HostileCheckpoint),
    ],
)
def test_metadata_that_describes_no_array(spec: Any, kind: type[CheckpointError]) -> None:
    """What is no array is Corrupt, and what no writer makes is hostile; both name the file."""
    with pytest.raises(kind) as caught:
        _describe(spec, "the/file", "w")
    assert getattr(caught.value, "file", "") == "the/file"


def test_where_tensorstore_finds_a_folder(tmp_path: Path) -> None:
    """A local folder is the file driver's; an object store's is its own, with its connections, also
    behind a counting one.
    """
    assert kvstore_of(StorePath(LocalStorage(tmp_path), "a")) == {
        "driver": "file",
        "path": f"{tmp_path}/a/",
    }
    memory = KvStoreStorage("memory://arrays/x")
    folder = StorePath(CountingStorage(memory, lambda done: None), "a")
    assert kvstore_of(folder) == {"driver": "memory", "path": "arrays/x/a/"}
    memory.write("a/b", 2, [(0, [memoryview(b"hi")])])
    assert (
        ts.KvStore.open(kvstore_of(folder), context=context_of(folder))
        .result()
        .read("b")
        .result()
        .value
        == b"hi"
    )
