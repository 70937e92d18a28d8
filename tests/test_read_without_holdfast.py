"""docs/read_without_holdfast.py restores steps from what docs/format.md says, and nothing else."""

from __future__ import annotations

import ast
import importlib.util
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from holdfast.checkpoint import CheckpointManager, Files, Json, Options, load, save
from tests.support.paths import ROOT

SCRIPT = ROOT / "docs" / "read_without_holdfast.py"
GOLDEN = ROOT / "tests" / "checkpoint" / "golden"
DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bfloat16", "int2", "uint4"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e3m4", "float4_e2m1fn", "int4", "float6_e2m3fn"),
]


def _load_script() -> Any:
    spec = importlib.util.spec_from_file_location("read_without_holdfast", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reader = _load_script()


def _leaves(tree: Any) -> Iterator[Any]:
    """Yields the leaves of what the script returns, in the record's order of leaves."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if not isinstance(tree, list):
        yield tree
        return
    for child in tree:
        if child is not None:
            yield from _leaves(child)


def _bits(leaf: Any) -> Any:
    """Returns shape and bytes of an array, and any other leaf with its type."""
    if isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, np.ndarray | np.generic | jax.Array):
        array = np.asarray(leaf)
        return array.shape, array.itemsize, array.tobytes()
    if isinstance(leaf, float | complex):
        return type(leaf), np.asarray(leaf).tobytes()
    return type(leaf), leaf


def _same(step: Path, item: str = "state", process: int = 0) -> None:
    """Asserts that the script finds in a tree what holdfast does, bit by bit."""
    found = [_bits(leaf) for leaf in _leaves(reader.restore(step, process)[item])]
    wanted = jax.tree.leaves(load(step, item=item, process=process))
    assert len(found) >= 3
    assert found == [_bits(leaf) for leaf in wanted]


def test_it_is_short_and_needs_numpy_alone() -> None:
    """At most 100 lines; what it imports is numpy and the standard library."""
    text = SCRIPT.read_text()
    assert len(text.splitlines()) <= 100
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module).split(".")[0])
    assert names - set(sys.stdlib_module_names) == {"numpy"}


@pytest.mark.parametrize(
    ("step", "item", "process"),
    [
        ("root/1", "state", 0),
        ("root/20", "state", 0),
        ("oneshot", "params", 0),
        ("two/1", "state", 0),
        ("two/1", "state", 1),
        ("incremental/1", "state", 0),
        ("incremental/3", "state", 0),
    ],
)
def test_golden_steps(step: str, item: str, process: int) -> None:
    """Leaves over 8 devices, of two processes, those of each process, and linked files."""
    _same(GOLDEN / step, item, process)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype: str, tmp_path: Path) -> None:
    """Arrays, empty ones and those without axes too."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    some = (np.arange(12).reshape(3, 4) % 2).astype(kind)
    save(tmp_path, {"a": some, "b": some[:0], "c": some[2, 3], "d": 7})
    _same(tmp_path)


def test_incremental_steps_and_large_arrays(tmp_path: Path) -> None:
    """Each step is as it was saved, though its files hold older values of some chunks."""
    large = np.arange(20 << 20, dtype=np.float32).reshape(5, -1)  # two chunks
    with CheckpointManager(tmp_path, options=Options(incremental=True)) as manager:
        for step in range(4):
            tree = {"large": large, "small": np.full(9, step), "step": step}
            manager.save(step, tree).wait()
    assert len(list((tmp_path / "3" / "state").iterdir())) > 1, "nothing was linked"
    for step in range(4):
        _same(tmp_path / str(step))


def test_other_items(tmp_path: Path) -> None:
    """JSON and files come too."""

    def write(folder: Path) -> None:
        (folder / "words.txt").write_text("a b")

    items = {"config": Json({"a": [1, None]}), "words": Files(write)}
    save(tmp_path, items=items)
    found = reader.restore(tmp_path)
    assert list(found["config"].values()) == [{"a": [1, None]}]
    assert found["words"] == {"words.txt": b"a b"}


def test_a_changed_byte_is_noticed(tmp_path: Path) -> None:
    """In the record, in a header and in the data."""
    copy = tmp_path / "step"
    shutil.copytree(GOLDEN / "oneshot", copy)
    record = json.loads((copy / "checkpoint.json").read_text())
    name, size, head, _ = record["items"]["params"]["files"][0]
    for path, at in [(copy / "checkpoint.json", 30), (copy / name, 20), (copy / name, head + 1)]:
        before = path.read_bytes()
        damaged = bytearray(before)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(AssertionError, match="is damaged"):
            reader.restore(copy)
        path.write_bytes(before)
    assert size > head
