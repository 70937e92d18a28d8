"""Damage: no byte of a checkpoint can change, vanish or be added without an error that names it."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from holdfast.checkpoint import (
    Corrupt,
    HostileCheckpoint,
    StepGone,
    StepNotFound,
    load,
    save,
    verify,
)
from holdfast.checkpoint.format.record import read_record
from holdfast.checkpoint.layouts.holdfast import HoldfastCheckpoint
from holdfast.checkpoint.layouts.restore import restore_checkpoint
from holdfast.checkpoint.storage.local import LocalStorage

RNG = np.random.default_rng(0)
TREE: dict[str, Any] = {
    "large": RNG.standard_normal((600, 600)).astype(np.float32),  # read straight to where it goes
    "half": jnp.asarray(RNG.standard_normal((300, 7)), jnp.bfloat16),
    "small": {f"s{i}": RNG.integers(0, 99, (i,)) for i in range(20)},
    "empty": np.zeros((0, 3)),
    "n": 5,
    "text": "x",
}


def equal(found: Any) -> bool:
    """Returns whether what was read is bit by bit what was saved."""
    return (
        found["large"].tobytes() == TREE["large"].tobytes()
        and found["half"].tobytes() == np.asarray(TREE["half"]).tobytes()
        and all(
            found["small"][name].tobytes() == value.tobytes()
            for name, value in TREE["small"].items()
        )
        and found["empty"].shape == (0, 3)
        and (found["n"], found["text"]) == (5, "x")
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "c"
    save(folder, TREE)
    assert equal(load(folder))
    return folder


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def read_error(folder: Path) -> Exception | None:
    """Returns the error of a load, or None after one that gave the saved numbers: there is nothing
    between.
    """
    try:
        found = load(folder)
    except (Corrupt, HostileCheckpoint) as error:
        return error
    assert equal(found), "other numbers without an error"
    return None


def flip_many(folder: Path, count: int, seed: int) -> tuple[int, int]:
    """Flips one byte at each of `count` random positions, small files as likely as large ones;
    returns (errors, unaffected).
    """
    rng = random.Random(seed)
    errors = 0
    unaffected = 0
    for _ in range(count):
        path = rng.choice(files_of(folder))
        size = path.stat().st_size
        at = rng.randrange(min(size, 4096)) if rng.random() < 0.3 else rng.randrange(size)
        with open(path, "r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ (1 << rng.randrange(8))]))
            file.flush()
            error = read_error(folder)
            errors = errors + (error is not None)
            unaffected = unaffected + (error is None)
            if error is not None:
                assert path.name in str(error), error
            if error is not None and path.suffix == ".safetensors" and "header" not in str(error):
                assert isinstance(error, Corrupt) and error.leaf and error.file.endswith(path.name)
            file.seek(at)
            file.write(bytes([byte]))
    assert equal(load(folder))
    return errors, unaffected


def test_a_flipped_byte_is_an_error(whole: Path, tmp_path: Path) -> None:
    """Each of 300 flipped bytes is found, in the record, the headers and the data; the error names
    file and leaf.
    """
    folder = tmp_path / "c"
    shutil.copytree(whole, folder)
    errors, unaffected = flip_many(folder, 300, 1)
    assert errors == 300 and unaffected == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_five_thousand_flipped_bytes(whole: Path, tmp_path: Path, seed: int) -> None:
    """5,000 flipped bytes, 1,000 a seed: each read raises, or its bytes are those that were
    saved.
    """
    folder = tmp_path / "c"
    shutil.copytree(whole, folder)
    errors, unaffected = flip_many(folder, 1000, 100 + seed)
    print(f"{errors} errors, {unaffected} unaffected")
    assert errors + unaffected == 1000


def truncate(path: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 1)


def halve(path: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def grow(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"\0")


def to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [truncate, halve, empty, grow, Path.unlink, to_folder])
def test_every_damaged_file_is_an_error(
    whole: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """Each file cut by a byte, halved, emptied, grown by a byte, deleted or replaced: an error for
    load and for verify, never silence.
    """
    for number, path in enumerate(files_of(whole)):
        folder = tmp_path / str(number) / "c"
        shutil.copytree(whole, folder)
        damage(folder / path.relative_to(whole))
        for read in (load, verify):
            with pytest.raises((Corrupt, HostileCheckpoint, StepNotFound)) as caught:
                read(folder)
            assert path.name in str(caught.value) or (
                isinstance(caught.value, StepNotFound) and str(folder) in str(caught.value)
            )


def test_a_damaged_step_says_which_files(whole: Path, tmp_path: Path) -> None:
    """A missing pack is Corrupt, a missing record StepNotFound, and a record that goes while packs
    are read StepGone.
    """
    folder = tmp_path / "c"
    shutil.copytree(whole, folder)
    storage = LocalStorage(folder)
    record = read_record(storage, "")
    (pack,) = folder.glob("state/*.safetensors")
    pack.unlink()
    with pytest.raises(Corrupt, match="the file is missing"):
        restore_checkpoint(HoldfastCheckpoint(storage, record=record))
    (folder / "checkpoint.json").unlink()
    with pytest.raises(StepGone, match="deleted while"):
        restore_checkpoint(HoldfastCheckpoint(storage, record=record))
    with pytest.raises(StepNotFound):
        load(folder)


def test_empty_chunks_do_not_hide_others(tmp_path: Path) -> None:
    """An array without elements shares its place in the file with the next one: both are
    verified.
    """
    for number, names in enumerate(("ab", "ba")):
        save(tmp_path / str(number), {names[0]: np.zeros((0, 3)), names[1]: np.arange(3)})
        verify(tmp_path / str(number))
        assert load(tmp_path / str(number))[names[1]].tolist() == [0, 1, 2]


def test_swapped_files_are_found(tmp_path: Path) -> None:
    """Two packs of the same shape that change places are found by their headers' checksums."""
    for name, value in (("a", 1), ("b", 2)):
        save(tmp_path / name, {"w": np.full(100, value)})
    (left,), (right,) = (sorted((tmp_path / name).glob("state/*.safetensors")) for name in "ab")
    data = left.read_bytes()
    left.write_bytes(right.read_bytes())
    with pytest.raises(Corrupt, match="checksum of the header"):
        load(tmp_path / "a")
    right.write_bytes(data)
    with pytest.raises(Corrupt, match="checksum of the header"):
        load(tmp_path / "b")
