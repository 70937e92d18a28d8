"""The seam for layouts: one contract, kept by each of them, on a disk and on an object store."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

from holdfast.checkpoint import CheckpointManager, Corrupt, StepNotFound, TreeMismatch, load, verify
from holdfast.checkpoint.layouts.detect import open_checkpoint
from holdfast.checkpoint.layouts.restore import restore_checkpoint
from holdfast.checkpoint.restoring.reader import ReadRequest
from holdfast.checkpoint.restoring.restore import allocate
from holdfast.checkpoint.storage.path import open_storage
from holdfast.cli.entry import main
from tests.support.layouts import LAYOUTS, TREE, write
from tests.support.object_servers import BUCKET, TensorStoreMemory, s3_server

_numbers = itertools.count()


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["disk", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "disk":
        return str(tmp_path)
    # Other libraries' arrays are read through tensorstore, which has a memory of its own.
    TensorStoreMemory.register()
    return f"tensorstore://layouts/{next(_numbers)}"


def test_a_checkpoint_describes_itself_and_fills_any_region(layout: str, root: str) -> None:
    """Info, item and reader of every layout: names, shapes, dtypes, and the bytes of any region."""
    checkpoint = open_checkpoint(write(layout, root))
    assert checkpoint.info.layout == layout and checkpoint.info.items["state"] == "tree"
    item = checkpoint.item("state")
    leaves = {leaf.path: leaf for leaf in item.leaves}
    assert {path: (leaf.dtype, leaf.shape) for path, leaf in leaves.items()} == {
        "a.w": ("float32", (5, 12)),
        "a.b": ("int8", (4,)),
        "c": ("float16", ()),
    }
    regions = [
        ((0, 5), (0, 12)),
        ((1, 3), (0, 12)),
        ((0, 5), (4, 8)),
        ((4, 5), (11, 12)),
        ((2, 2), (0, 12)),
    ]
    reads = [ReadRequest(leaves["a.w"], region) for region in regions] + [
        ReadRequest(leaves["c"], ())
    ]
    checkpoint.reader("state").fill(reads, allocate)
    for read, region in zip(reads, regions, strict=False):
        expected = TREE["a"]["w"][tuple(slice(*bounds) for bounds in region)]  # type: ignore[index]
        assert (
            read.array is not None
            and read.array.tobytes() == expected.tobytes()
            and read.array.shape == expected.shape
        )
    assert reads[-1].array is not None and reads[-1].array[()] == 2.5
    assert checkpoint.verify().leaves == 3


def test_restore_means_the_same_for_every_layout(layout: str, root: str) -> None:
    """`like`, `partial`, `cast`, strictness and messages do not depend on the layout."""
    path = write(layout, root)
    mesh = jax.make_mesh((1,), ("d",))
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, jax.P())),
        TREE,
    )
    for one, two in zip(jax.tree.leaves(load(path, like)), jax.tree.leaves(TREE), strict=True):
        assert isinstance(one, jax.Array) and np.asarray(one).tobytes() == np.asarray(two).tobytes()
    assert load(path, {"c": jnp.float16(0)}, partial=True)["c"] == 2.5
    assert load(path, {"a": {"b": jnp.zeros(4, jnp.int32)}}, partial=True, cast=True)["a"][
        "b"
    ].tolist() == [0, 1, 2, 3]
    with pytest.raises(
        TreeMismatch, match=r"'a\.b' was expected as int32\[4\], the checkpoint has int8\[4\]"
    ):
        load(path, {"a": {"b": jnp.zeros(4, jnp.int32)}}, partial=True)
    with pytest.raises(
        TreeMismatch, match=r"2 leaves of the checkpoint not in `like`: 'a\.\w', 'a\.\w'"
    ):
        load(path, {"c": jnp.float16(0)})
    with pytest.raises(StepNotFound, match="has no item 'other'; it has: state"):
        restore_checkpoint(open_checkpoint(path), "other")
    assert (
        load(path, {"x": {"w": TREE["a"]["w"]}}, partial=True, rename={"a.w": "x.w"})["x"][
            "w"
        ].sum()
        == TREE["a"]["w"].sum()
    )  # type: ignore[index]


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as query:
        yield query


def test_the_commands_on_s3(s3: str, tmp_path: Path) -> None:
    """cp to s3:// and back, ls, show, verify, diff and convert there, against a real server over
    HTTP.
    """

    def run(*arguments: object, code: int = 0) -> Any:
        result = CliRunner().invoke(main, [str(argument) for argument in arguments])
        assert result.exit_code == code and "Traceback" not in result.output, (
            arguments,
            result.output,
            result.exception,
        )
        return result

    def url(name: str) -> str:
        return f"s3://{BUCKET}/{name}{s3}"

    with CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 2):
            manager.save(step, jax.tree.map(jnp.asarray, TREE), metrics={"loss": 1.0})
            manager.wait_until_finished()
    run("cp", tmp_path / "run", url("run"))
    assert json.loads(run("cp", tmp_path / "run", url("run"), "--json").output)["written"] == []
    rows = json.loads(run("ls", url("run"), "--json").output)["steps"]
    assert [(row["step"], row["state"]) for row in rows] == [(1, "whole"), (2, "whole")]
    assert "a.w" in run("show", url("run")).output
    run("verify", url("run"), "--all")
    run("diff", tmp_path / "run", url("run"))
    run("cp", url("run"), tmp_path / "back")
    run("diff", tmp_path / "run", tmp_path / "back")
    run("convert", url("run"), url("st"), "--to", "safetensors")
    assert load(url("st"))["c"] == 2.5
    assert verify(url("st")).leaves == 3
    assert "there is nothing at" in run("ls", url("nothing"), code=3).output
    run("prune", url("run"), "--keep", "last:1")
    rows = json.loads(run("ls", url("run"), "--json").output)["steps"]
    assert [(row["name"], row["state"]) for row in rows] == [("2", "whole")], open_storage(
        url("run")
    ).list("", recursive=True)


def test_damage_is_told_alike(layout: str, tmp_path: Path) -> None:
    """A file cut off in the middle is Corrupt in every layout, naming a file, never other
    numbers.
    """
    path = Path(write(layout, str(tmp_path)))
    files = [
        file
        for file in path.rglob("*")
        if file.is_file() and file.stat().st_size > 100 and file.suffix != ".json"
    ]
    largest = max(files, key=lambda file: (file.parent.name == "d", file.stat().st_size))
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    with pytest.raises(Corrupt) as caught:
        verify(path)
    assert str(path) in caught.value.file
