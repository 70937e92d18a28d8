"""Copying: what is there is kept, what is copied is verified, and the record comes last."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest

from holdfast.checkpoint import (
    CheckpointError,
    CheckpointManager,
    Corrupt,
    StepExists,
    load,
    save,
)
from holdfast.checkpoint.layouts.detect import open_checkpoint
from holdfast.checkpoint.steps.claims import this_writer
from holdfast.checkpoint.steps.object_claims import open_claims
from holdfast.checkpoint.storage.counting import CountingStorage
from holdfast.checkpoint.storage.kvstore import KvStoreStorage
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.checkpoint.storage.path import StorePath, open_storage
from holdfast.checkpoint.tools.copy import copy_checkpoint, file_sizes
from tests.support.layouts import write


def test_a_damaged_source_never_becomes_a_step(tmp_path: Path) -> None:
    """The copy is read back before its record is written, and the error says which of the two is
    damaged.
    """
    save(tmp_path / "a", {"w": jnp.ones((64, 64))})
    (pack,) = (tmp_path / "a/state").iterdir()
    whole = pack.read_bytes()
    pack.write_bytes(whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
    target = open_storage(tmp_path / "b")
    claims = open_claims(target)
    with pytest.raises(Corrupt) as caught:
        copy_checkpoint(StorePath(LocalStorage(tmp_path / "a")), StorePath(target), claims)
    assert caught.value.file == str(pack) and not (tmp_path / "b/checkpoint.json").exists()
    pack.write_bytes(whole)
    with pytest.raises(
        Corrupt, match="The source is whole: delete this file of the copy"
    ) as caught:
        copy_checkpoint(StorePath(LocalStorage(tmp_path / "a")), StorePath(target), claims)
    Path(caught.value.file).unlink()
    copy_checkpoint(StorePath(LocalStorage(tmp_path / "a")), StorePath(target), claims)
    assert load(tmp_path / "b")["w"].sum() == 64 * 64


def test_a_root_of_steps_takes_no_copy_by_itself(tmp_path: Path) -> None:
    """It would hide the steps from `load`; nothing is written."""
    save(tmp_path / "a", {"n": 5})
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(3, {"n": 3})
    target = open_storage(tmp_path / "run")
    with pytest.raises(StepExists, match="is a root of steps, the latest 3"):
        copy_checkpoint(
            StorePath(open_storage(tmp_path / "a")), StorePath(target), open_claims(target)
        )
    assert load(tmp_path / "run")["n"] == 3


def test_no_step_gets_the_name_of_another(tmp_path: Path) -> None:
    """A copy into a folder that is called as another step is refused before anything is written; by
    any other name it is a checkpoint.
    """
    save(tmp_path / "a" / "5", {"n": 5}, step=5)
    source = StorePath(LocalStorage(tmp_path / "a"), "5")
    target = LocalStorage(tmp_path / "b")
    with pytest.raises(
        CheckpointError,
        match=r"b/6 is called as another step than .*a/5, which is step 5; choose another name",
    ):
        copy_checkpoint(source, StorePath(target, "6"), open_claims(target))
    assert not (tmp_path / "b").exists()
    copy_checkpoint(source, StorePath(target, "best"), open_claims(target))
    assert load(tmp_path / "b/best") == {"n": 5}


def test_a_sweep_leaves_a_copy_under_way_alone(tmp_path: Path) -> None:
    """While a copy runs its packs are claimed: a manager that opens the target does not take them
    for a dead writer's.
    """
    from holdfast.checkpoint import sweep

    save(tmp_path / "a" / "5", {"w": jnp.ones(300), "v": jnp.ones(3)}, step=5)
    target = open_storage(tmp_path / "b")
    claims = open_claims(target)
    swept = []
    source = StorePath(LocalStorage(tmp_path / "a"), "5")
    copy_checkpoint(
        source, StorePath(target, "5"), claims, lambda done: swept.append(sweep(tmp_path / "b"))
    )
    assert swept and all(
        not found.files and not found.fenced and len(found.standing) == 2 for found in swept
    )
    assert load(tmp_path / "b" / "5")["w"].sum() == 300
    other = replace(this_writer(), id=open_checkpoint(tmp_path / "a" / "5").record.writer_id)  # type: ignore[attr-defined]
    claims.take(other)
    with pytest.raises(CheckpointError, match="somebody else is copying"):
        copy_checkpoint(source, StorePath(target, "5"), claims)
    claims.fence(other.id)


@pytest.mark.parametrize("layout", ["holdfast", "orbax", "safetensors"])
def test_a_copy_is_the_same_and_goes_on(layout: str, tmp_path: Path) -> None:
    """Every layout is copied file for file; a second copy writes nothing, a file that is cut off or
    gone is copied again.
    """
    source = StorePath.of(write(layout, str(tmp_path / "a")))
    storage = open_storage(tmp_path / "b")
    target = StorePath(storage, "7")
    claims = open_claims(storage)
    done = copy_checkpoint(source, target, claims)
    assert sorted(done.written) == sorted(file_sizes(source)) and done.skipped == []
    assert file_sizes(target) == file_sizes(source) and done.bytes <= sum(
        file_sizes(source).values()
    )
    assert (
        load(tmp_path / "b/7")["c"] == 2.5 and copy_checkpoint(source, target, claims).written == []
    )
    largest = max(
        file_sizes(target).items(), key=lambda pair: (not pair[0].endswith(".json"), pair[1])
    )[0]
    (tmp_path / "b/7" / largest).write_bytes(b"cut")
    assert copy_checkpoint(source, target, claims).written == [largest]
    assert load(tmp_path / "b/7")["c"] == 2.5


@pytest.mark.parametrize("layout", ["holdfast", "orbax", "safetensors"])
def test_sizes_are_found_where_listings_have_none(layout: str, tmp_path: Path) -> None:
    """In an object store the files have the sizes that they have on a disk, but for our record,
    which is written anew.
    """
    local = StorePath.of(write(layout, str(tmp_path)))
    storage = KvStoreStorage(f"memory://copies/{layout}")
    copy_checkpoint(local, StorePath(storage, "7"), open_claims(storage))
    assert file_sizes(StorePath(storage, "7")) == file_sizes(local) | (
        {"checkpoint.json": 0} if layout == "holdfast" else {}
    )


@pytest.mark.parametrize("layout", ["orbax", "safetensors"])
def test_a_file_of_equal_size_is_compared(layout: str, tmp_path: Path) -> None:
    """Other layouts have no checksums: one with other contents is of another checkpoint, of which
    nothing is changed. One that was cut off is copied again.
    """
    source = StorePath.of(write(layout, str(tmp_path / "a")))
    storage = open_storage(tmp_path / "b")
    target = StorePath(storage, "7")
    claims = open_claims(storage)
    copy_checkpoint(source, target, claims)
    sizes = file_sizes(target)
    largest = max(sizes, key=lambda name: (not name.endswith(".json"), sizes[name]))
    file = tmp_path / "b/7" / largest
    whole = file.read_bytes()
    other = whole[:-1] + bytes([whole[-1] ^ 1])
    for found in (other, other + b"more"):
        file.write_bytes(found)
        with pytest.raises(StepExists, match=f"{re.escape(largest)} has other bytes than"):
            copy_checkpoint(source, target, claims)
        assert file.read_bytes() == found
    file.write_bytes(other[:-1])
    assert copy_checkpoint(source, target, claims).written == [largest]
    assert file.read_bytes() == whole


def test_another_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    """Where another checkpoint stands, nothing is changed."""
    for name in ("a", "b"):
        save(tmp_path / name, {"w": name})
    storage = open_storage(tmp_path / "b")
    with pytest.raises(StepExists, match="is another checkpoint than"):
        copy_checkpoint(
            StorePath(LocalStorage(tmp_path / "a")), StorePath(storage), open_claims(storage)
        )
    assert load(tmp_path / "b") == {"w": "b"}


def test_a_file_too_long_for_the_store_is_refused_with_a_hint(tmp_path: Path) -> None:
    """A file of another layout cannot be divided by a copy: the error says which conversion
    does.
    """

    class Short(CountingStorage):
        @property
        def max_file_bytes(self) -> int | None:
            return 100

    source = StorePath.of(write("safetensors", str(tmp_path / "a")))
    local = open_storage(tmp_path / "b")
    with pytest.raises(CheckpointError, match="--to safetensors"):
        copy_checkpoint(source, StorePath(Short(local, lambda done: None), "7"), open_claims(local))


@pytest.mark.parametrize("layouts", [("holdfast", "orbax"), ("orbax", "holdfast")])
def test_two_layouts_do_not_come_into_one_folder(layouts: tuple[str, str], tmp_path: Path) -> None:
    """A copy onto another library's checkpoint is StepExists, and so the other way round: the
    folder stays as it was.
    """
    source = Path(write(layouts[0], str(tmp_path / "source")))
    target = Path(write(layouts[1], str(tmp_path / "target")))
    files = {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}
    storage = open_storage(target.parent)
    with pytest.raises(StepExists, match="in another layout"):
        copy_checkpoint(StorePath.of(source), StorePath(storage, target.name), open_claims(storage))
    assert files == {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}
