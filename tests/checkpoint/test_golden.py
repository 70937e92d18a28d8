"""Checkpoints that an earlier version wrote come back: golden/ holds them, and golden/write.py says
what is in them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from safetensors.numpy import load_file

from holdfast.checkpoint import SAVED, CheckpointManager, Node, Options, load, save, verify

GOLDEN = Path(__file__).parent / "golden"


def _module(name: str, file: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, GOLDEN / file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


golden = _module("golden", "write.py")
first_version = _module("golden_read", "read.py")

CLASSES = [golden.Net, golden.Pair]


def _files() -> dict[str, tuple[bytes, int]]:
    places = [
        path
        for name in ("root", "oneshot", "two", "incremental", "left")
        for path in sorted((GOLDEN / name).rglob("*"))
    ]
    return {
        str(path): (path.read_bytes() if path.is_file() else b"", path.stat().st_mtime_ns)
        for path in places
    }


@pytest.fixture(autouse=True)
def _reading_changes_nothing() -> Iterator[None]:
    """No file or folder of the golden checkpoints is made, changed, touched or removed by a
    test.
    """
    before = _files()
    assert len(before) > 20
    yield
    assert _files() == before


def _bits(leaf: Any) -> tuple[Any, ...]:
    """Returns a leaf as something that is equal to another's when type, shape and each bit are."""
    if isinstance(leaf, jax.Array):
        leaf = np.asarray(
            jax.random.key_data(leaf)
            if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else leaf
        )
    if isinstance(leaf, np.ndarray | np.generic):
        return isinstance(leaf, np.generic), leaf.dtype, leaf.shape, leaf.tobytes()
    if isinstance(leaf, float | complex):
        return type(leaf), np.asarray(leaf).tobytes()
    return type(leaf), leaf


def _same(found: Any, wanted: Any) -> None:
    """Asserts that `found` is the tree that `wanted` tells: Put where there may be an array of
    either kind.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(wanted)
    assert jax.tree_util.tree_structure(found) == structure
    assert len(leaves) >= 3
    for (path, want), leaf in zip(leaves, jax.tree_util.tree_leaves(found), strict=True):
        value = want.value if isinstance(want, golden.Put) else want
        assert _bits(leaf) == _bits(value), (
            f"{jax.tree_util.keystr(path)}: found {leaf!r}, expected {value!r}"
        )


def _untold(step: int) -> Any:
    """Returns the state of a step as it comes back without a `like`: nothing records a
    defaultdict's factory, so it is a dict.
    """
    tree = golden.state(step)
    ordered, default, *others = tree["kinds"]
    return tree | {"kinds": (ordered, dict(default), *others)}


def _like(tree: Any, sharding: Any) -> Any:
    """Returns the tree with a jax.ShapeDtypeStruct for each Put."""

    def describe(leaf: Any) -> Any:
        if not isinstance(leaf, golden.Put):
            return leaf
        if leaf.impl is None:
            return jax.ShapeDtypeStruct(leaf.value.shape, leaf.value.dtype, sharding=sharding(leaf))
        key = jax.eval_shape(lambda: jax.random.wrap_key_data(leaf.value, impl=leaf.impl))
        return jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=sharding(leaf))

    return jax.tree.map(describe, tree)


def _on_one_device(leaf: Any) -> Any:
    return SingleDeviceSharding(jax.devices()[0])


def _manager(name: str) -> CheckpointManager:
    return CheckpointManager(GOLDEN / name, options=Options(read_only=True))


@pytest.mark.parametrize("step", golden.STEPS)
def test_every_leaf_of_a_step_comes_back_bit_by_bit(step: int) -> None:
    """Without a `like` as numpy, with one on this machine's device: the tree is the one that was
    saved, and so is each bit.
    """
    wanted = golden.state(step)
    with _manager("root") as manager:
        _same(manager.restore(step, types=CLASSES), _untold(step))
        found = manager.restore(step, _like(wanted, _on_one_device))
    _same(found, wanted)
    for leaf, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert isinstance(leaf, jax.Array) == isinstance(want, golden.Put)


@pytest.mark.parametrize("step", golden.STEPS)
def test_everything_else_of_a_step_comes_back(step: int) -> None:
    """The JSON item, the iterator's state, metrics and metadata are what they were."""
    with _manager("root") as manager:
        assert (
            manager.all_steps() == list(golden.STEPS)
            and manager.best_step("loss") == golden.STEPS[-1]
        )
        assert manager.restore(step, item="config") == golden.CONFIG
        reader = manager.restore(step, like=golden.Reader(), item="data")
        order = reader.state.pop("order")
        want = golden.reader_state(step)
        assert (
            _bits(order) == _bits(want.pop("order"))
            and reader.state == want
            and isinstance(reader.state["pair"], tuple)
        )
        assert manager.metrics(step) == {"loss": 1 / step, "steps": step}
        assert manager.metadata(step) == golden.METADATA


def test_classes_that_nobody_passes_come_back_as_nodes() -> None:
    """A class is named in the record by module and name, and is never imported."""
    found = load(GOLDEN / "root", item="state")
    assert isinstance(found["params"], Node) and found["params"].type_name == "golden:Net"
    assert _bits(found["params"].fields["kernel"]) == _bits(
        golden.state(golden.STEPS[-1])["params"].kernel.value
    )
    first, second = found["moments"]
    assert type(found["moments"]).__name__ == "Pair" and found["moments"]._fields == (
        "first",
        "second",
    )
    assert [part.dtype.name for part in (first, second)] == ["bfloat16", "float32"]


def test_a_checkpoint_of_one_call_comes_back() -> None:
    """What `save` wrote without a manager, `load` reads."""
    wanted = golden.oneshot()
    _same(load(GOLDEN / "oneshot", item="params"), wanted)
    _same(load(GOLDEN / "oneshot", _like(wanted, _on_one_device), item="params"), wanted)


@pytest.mark.parametrize("index", [0, 1])
def test_what_each_process_kept_comes_back(index: int) -> None:
    """Of two processes' checkpoint one process gets what they shared, and either's own values."""
    wanted = golden.shared() | {"reader": golden.own(index)}
    with _manager("two") as manager:
        _same(manager.restore(1, process=index), wanted)
        _same(manager.restore(1, _like(wanted, _on_one_device), process=index), wanted)
        assert manager.metadata(1) == golden.METADATA and manager.metrics(1) == {"loss": 0.25}


@pytest.mark.parametrize("step", golden.INCREMENTAL_STEPS)
def test_incremental_steps_come_back(step: int) -> None:
    """A step that had linked the files of another is whole by itself, wherever it was copied."""
    with _manager("incremental") as manager:
        assert manager.all_steps() == list(golden.INCREMENTAL_STEPS)
        _same(manager.restore(step), golden.changing(step))
    first, later = (
        {path.read_bytes() for path in (GOLDEN / "incremental" / str(number) / "state").iterdir()}
        for number in golden.INCREMENTAL_STEPS[:2]
    )
    assert first < later


@pytest.mark.parametrize(
    "name", ["root/1", "root/20", "root", "oneshot", "two", "incremental/1", "incremental/3"]
)
def test_verify_finds_no_fault(name: str) -> None:
    """Every byte is read and agrees with its sums."""
    verify(GOLDEN / name)


def test_the_first_version_reads_what_is_written_today(tmp_path: Path) -> None:
    """A step with large chunks, whose packs say more than they did then, is read by that version's
    code, and by the safetensors library.
    """
    tree = {
        "large": np.arange(1 << 19, dtype=np.float32),
        "odd": np.arange(700_001, dtype=np.int16),
        "small": np.arange(5.0),
    }
    save(tmp_path, tree)
    chunks = first_version.read_chunks(tmp_path, "state")
    assert chunks == {name: array.tobytes() for name, array in tree.items()}
    found: dict[str, Any] = {}
    for pack in tmp_path.glob("state/*.safetensors"):
        assert b'"crc32c_prefixes":"' in pack.read_bytes()
        found |= load_file(pack)
    assert {name: array.tobytes() for name, array in found.items()} == chunks
    assert first_version.read_chunks(GOLDEN / "oneshot", "params").keys() >= {"w[0:2,0:4]", "b"}


def test_what_was_left_behind_is_not_the_newest() -> None:
    """A root with a mark: its newest step is the branch's, what was left comes back by its number,
    and an older reader finds whole steps beside files that it does not know.
    """
    _, newest, left = golden.LEFT_STEPS
    _same(load(GOLDEN / "left"), golden.branching(newest, is_branch=True))
    with _manager("left") as manager:
        assert manager.latest_step() == newest
        assert manager.left_steps() == [left]
        _same(manager.restore(left), golden.branching(left, is_branch=False))
    for step in golden.LEFT_STEPS:
        chunks = first_version.read_chunks(GOLDEN / "left" / str(step), "state")
        wanted = golden.branching(step, is_branch=step == newest)
        assert chunks["w"] == wanted["w"].tobytes()
    (mark,) = (GOLDEN / "left/.holdfast/left").iterdir()
    saves = first_version.read_marks(GOLDEN / "left")
    record = json.loads((GOLDEN / f"left/{newest}/checkpoint.json").read_bytes())
    assert saves.keys() == {newest, left}
    assert saves[newest] != record["writer"] == mark.stem


def on_eight_devices() -> None:
    """Restores with the saved shardings and with others; run in a process of its own, as jax counts
    its devices once.
    """
    assert jax.device_count() == 8
    crossed = Mesh(np.array(jax.devices()[:4][::-1]), ("z",))
    for step in golden.STEPS:
        wanted = golden.state(step)
        with _manager("root") as manager:
            found = manager.restore(step, SAVED, types=CLASSES)
            other = manager.restore(
                step,
                _like(
                    wanted,
                    lambda leaf: NamedSharding(
                        crossed, PartitionSpec(*("z" for _ in leaf.spec[:1]))
                    ),
                ),
            )
        _same(found, _untold(step))
        _same(other, wanted)
        for leaf, want in zip(jax.tree.leaves(found), jax.tree.leaves(_untold(step)), strict=True):
            assert not isinstance(want, golden.Put) or leaf.sharding == golden.on_mesh(want), (
                leaf.sharding
            )


def test_shardings_come_back() -> None:
    """On as many devices every array comes back in its saved sharding, and in another one on fewer
    devices, bit by bit.
    """
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    code = "import runpy, sys; runpy.run_path(sys.argv[1])['on_eight_devices']()"
    ran = subprocess.run(
        [sys.executable, "-c", code, __file__],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
