"""Which layout a folder is in, which steps a root has, and what an opened path means."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import pytest

from holdfast.checkpoint import (
    CheckpointManager,
    Corrupt,
    HostileCheckpoint,
    KeepAnyOf,
    KeepEvery,
    KeepLast,
    Options,
    StepExists,
    StepGone,
    StepNotFound,
    convert,
    load,
    save,
    structure,
    verify,
)
from holdfast.checkpoint.format.step_folders import PLAIN_NAMES, list_steps, look_at_root
from holdfast.checkpoint.layouts.detect import (
    ForeignSteps,
    find_foreign_steps,
    find_steps,
    nothing_at,
    open_checkpoint,
    open_if_finished,
)
from holdfast.checkpoint.storage.base import Entry, Storage
from holdfast.checkpoint.storage.counting import CountingStorage
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.checkpoint.storage.path import StorePath, open_storage
from tests.support.layouts import LAYOUTS, write


def foreign_steps(storage: Storage) -> dict[int, str]:
    return find_foreign_steps(storage, look_at_root(storage, PLAIN_NAMES), PLAIN_NAMES)


def test_roots_tell_layouts_apart(tmp_path: Path) -> None:
    """One root may hold our steps and Orbax's; a folder of safetensors is never one beside them."""
    for number, layout in enumerate(LAYOUTS, 7):
        written = write(layout, str(tmp_path / layout))
        Path(written).rename(tmp_path / str(number))
    assert {
        step: layout.name for step, (_, layout) in find_steps(open_storage(tmp_path)).items()
    } == {7: "holdfast", 8: "orbax"}
    with CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [7, 8]
        for step in (7, 8):
            assert manager.restore(step, {"c": jnp.float16(0)}, partial=True)["c"] == 2.5


def test_a_root_means_its_latest_step(tmp_path: Path) -> None:
    """load and verify on a folder of steps take the newest that has a record; an empty folder named
    like a step is no step.
    """
    for step in (2, 10, 9):
        save(tmp_path / "root" / str(step), {"step": step}, step=step)
    (tmp_path / "root" / "11").mkdir()
    assert load(tmp_path / "root") == {"step": 10} and verify(tmp_path / "root").step == 10


def test_the_latest_step_is_of_any_layout(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """load, verify and open_checkpoint agree: the highest number that is finished, of ours and of
    Orbax's; the log says which.
    """
    for number, layout in ((7, "holdfast"), (9, "orbax"), (12, "safetensors")):
        Path(write(layout, str(tmp_path / layout))).rename(tmp_path / str(number))
        shutil.rmtree(tmp_path / layout)
    (tmp_path / "10").mkdir()
    with caplog.at_level(logging.INFO, "holdfast.checkpoint"):
        assert open_checkpoint(tmp_path).info.layout == "orbax" and verify(tmp_path).path == str(
            tmp_path / "9"
        )
    assert f"taking the latest, {tmp_path / '9'}" in caplog.text
    assert load(tmp_path)["c"] == 2.5
    with pytest.raises(StepNotFound, match=r"has no step 12; it has 7, 9\. 12 there is a"):
        open_checkpoint(tmp_path, 12)
    assert foreign_steps(LocalStorage(tmp_path)) == {9: "9"}
    assert list(find_steps(LocalStorage(tmp_path))) == [7, 9]


@pytest.mark.parametrize("looked_at", ["root", "step"])
@pytest.mark.parametrize("first", [0, 1])
def test_the_latest_step_beside_a_writer_that_keeps_one(
    tmp_path: Path, looked_at: str, first: int
) -> None:
    """A root whose newest step is replaced whenever the root, or that step, was listed: the latest
    is found, not an older one that is kept, and not nothing.
    """
    keep = KeepAnyOf(KeepLast(1), KeepEvery(1000))  # step 0 stays
    with CheckpointManager(tmp_path, keep_policy=keep) as writer:

        class Replacing(LocalStorage):
            def list(self, folder: str, **how: bool) -> list[Entry]:
                found = super().list(folder, **how)
                step = writer.latest_step()
                if step < 20 and (folder == "") == (looked_at == "root"):
                    writer.save(step + 1, {"n": step + 1})
                    writer.wait_until_finished()
                    writer._state.worker.wait(30)
                return found

        for step in range(first, 2):
            writer.save(step, {"n": step})
            writer.wait_until_finished()
        found = open_checkpoint(tmp_path, wrap=lambda storage: Replacing(storage.root))
        assert found.info.step == writer.latest_step() == 20


def test_a_list_beside_a_writer_is_no_older_than_its_beginning(tmp_path: Path) -> None:
    """The newest step is deleted for a newer one between the listing and the look at its record."""
    keep = KeepAnyOf(KeepLast(1), KeepEvery(1000))
    with CheckpointManager(tmp_path, keep_policy=keep) as writer:
        for step in range(2):
            writer.save(step, {"n": step})
            writer.wait_until_finished()

        class Replacing(LocalStorage):
            def list(self, folder: str, **how: bool) -> list[Entry]:
                found = super().list(folder, **how)
                step = writer.latest_step()
                if folder == "" and step < 5:
                    writer.save(step + 1, {"n": step + 1})
                    writer.wait_until_finished()
                    writer._state.worker.wait(30)
                return found

        assert list_steps(Replacing(tmp_path)) == [0, 5]


def test_the_latest_of_many_steps_is_found_without_listing_all(tmp_path: Path) -> None:
    """Opening a root lists the root, its own folder and the newest step's, not every step; and what
    was left behind.
    """

    listed: set[str] = set()

    class Listing(LocalStorage):
        def list(self, folder: str, **how: bool) -> list[Entry]:
            listed.add(folder)
            return super().list(folder, **how)

    for step in range(20):
        save(tmp_path / str(step), {"step": step}, step=step)
    assert open_checkpoint(tmp_path, wrap=lambda storage: Listing(storage.root)).info.step == 19
    assert listed == {"", ".holdfast", ".holdfast/left", "19"}


def test_ours_comes_first_where_two_claim_one_number(tmp_path: Path) -> None:
    """Of two folders with the same number ours is the step, whichever is listed first."""
    for name, layout in (("7", "holdfast"), ("a_7", "orbax"), ("000007", "orbax")):
        Path(write(layout, str(tmp_path / "made"))).rename(tmp_path / name)
        shutil.rmtree(tmp_path / "made")
    assert {
        step: (name, layout.name)
        for step, (name, layout) in find_steps(LocalStorage(tmp_path)).items()
    } == {7: ("7", "holdfast")}
    assert open_checkpoint(tmp_path).info.layout == "holdfast"
    assert foreign_steps(LocalStorage(tmp_path)) == {7: "000007"}


def test_a_store_may_be_put_in_front(tmp_path: Path) -> None:
    """`wrap` sees every byte that is read, of a folder and of a single file."""
    reported: list[int] = []
    for layout in ("holdfast", "safetensors"):
        path = Path(write(layout, str(tmp_path / layout)))
        for each in (path, *path.glob("model.safetensors")):
            reported.clear()
            open_checkpoint(
                each, wrap=lambda storage: CountingStorage(storage, reported.append)
            ).verify()
            assert sum(reported) > 240


def test_a_damaged_record_is_not_taken_for_nothing(tmp_path: Path) -> None:
    """A folder whose record is damaged is a checkpoint, and Corrupt; it is not passed over for an
    older step.
    """
    for step in (1, 2):
        save(tmp_path / str(step), {"n": step}, step=step)
    (tmp_path / "2/checkpoint.json").write_text("{}")
    with pytest.raises(Corrupt, match="checksum"):
        load(tmp_path)
    assert list(find_steps(LocalStorage(tmp_path))) == [1, 2]


def test_foreign_steps_that_go_meanwhile(tmp_path: Path) -> None:
    """A step that was there when the root was opened is StepGone once deleted; another number is
    StepNotFound.
    """
    Path(write("orbax", str(tmp_path / "made"))).rename(tmp_path / "3")
    storage = LocalStorage(tmp_path)
    steps = ForeignSteps(storage, foreign_steps(storage), PLAIN_NAMES)
    assert (
        list(steps) == [3]
        and 3 in steps
        and 4 not in steps
        and steps.open(3).info.layout == "orbax"
    )
    shutil.rmtree(tmp_path / "3")
    with pytest.raises(StepGone, match="was there when the root was listed"):
        steps.open(3)
    with pytest.raises(StepNotFound, match="no step 4"):
        steps.open(4)


def test_the_reason_why_nothing_is_there(tmp_path: Path) -> None:
    """Missing, empty, a file, another program's folder, an unfinished save of Orbax's: each has its
    own sentence.
    """
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.txt").write_text("x")
    (tmp_path / "orbax/5.orbax-checkpoint-tmp").mkdir(parents=True)
    reasons = {
        "none": r"there is nothing at .*; .* holds empty, file, orbax, other",
        "empty": "is empty: no checkpoint was saved there",
        "file": "is a file and no checkpoint",
        "other": r"is no checkpoint that holdfast knows .* it holds notes\.txt",
        "orbax": "was never completed by Orbax",
    }
    for name, reason in reasons.items():
        with pytest.raises(StepNotFound, match=reason):
            open_checkpoint(tmp_path / name)
        assert open_if_finished(StorePath(LocalStorage(tmp_path / name))) is None
    for step in (1, 2):
        save(tmp_path / f"steps/{step}", {"n": step}, step=step)
    assert "has no step 4; it has 1, 2" in nothing_at(LocalStorage(tmp_path / "steps"), 4)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("pytorch_model.bin", "it is a pickle"),
        ("model.pth", "it is a pickle"),
        ("__0_0.distcp", r"the index of PyTorch's DCP is a pickle"),
        ("flax_model.msgpack", "it is one message of flax's without ranges .*msgpack_restore"),
        ("checkpoint_100", "it is one message of flax's; .*restore_checkpoint"),
        ("model.keras", "it is Keras's own; load it with keras"),
        ("model.weights.h5", "it is HDF5"),
        ("weights.npz", "it is numpy's; write save"),
        ("model.eqx", "it is Equinox's; .*tree_deserialise_leaves"),
        ("params.pkl", "it is a pickle.*where you trust it"),
        ("last.ckpt", "it is a pickle"),
        ("model.gguf", "its blocks are of no dtype that jax has"),
    ],
)
def test_weights_in_other_forms_are_refused_by_name(
    name: str, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The message has the file, why it is not read, and what to do; a manager warns when it opens
    such a folder, and says so at the restore.
    """
    for other in ("config.json", "a", "b", "c", "d", name):
        (tmp_path / other).write_bytes(b"")
    message = rf"; {name} is not read: {why}"
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(StepNotFound, match=message):
            load(path)
    with CheckpointManager(tmp_path) as manager:
        (warning,) = [each.getMessage() for each in caplog.records]
        assert re.match(rf"{tmp_path} has no step that is read{message}", warning)
        with pytest.raises(StepNotFound, match=message):
            manager.restore()


def put(root: Path, name: str, layout: str) -> None:
    """Puts a checkpoint of TREE, in a layout, into a root under a name."""
    made = root.parent / f"made {name}"
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    Path(write(layout, str(made))).rename(root / name)
    shutil.rmtree(made)


def put_safetensors(root: Path) -> None:
    put(root, "other", "safetensors")
    (root / "other/model.safetensors").rename(root / "model.safetensors")
    (root / "other").rmdir()


def put_item(root: Path) -> None:
    put(root, "other", "orbax")
    (root / "other/state").rename(root / "export")
    shutil.rmtree(root / "other")


STRANGERS: dict[str, Callable[[Path], object]] = {
    "a safetensors file": put_safetensors,
    "half of one": lambda root: (root / "model.safetensors").write_bytes(b"\x10"),
    "an index alone": lambda root: (root / "model.safetensors.index.json").write_text("{"),
    "a folder of Orbax's": lambda root: put(root, "export", "orbax"),
    "an item of Orbax's": put_item,
    "Orbax's own files": lambda root: (root / "_CHECKPOINT_METADATA").write_text("{"),
    "half a record": lambda root: (root / "checkpoint.json").write_text('{"format":"hold'),
    "a name with a number": lambda root: put(root, "export_2024", "orbax"),
    "a model of a number": lambda root: put(root, "2024", "safetensors"),
    "our own, called otherwise": lambda root: put(root, "export_2024", "holdfast"),
    "files of a number": lambda root: (root / "2024").mkdir(),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_own_steps_come_before_what_lies_beside_them(stranger: str, tmp_path: Path) -> None:
    """Whatever lies in a root, it means its own newest step: to load, structure, verify, convert
    and a manager.
    """
    root = tmp_path / "root"
    for step in (1, 2):
        save(root / str(step), {"n": step}, step=step)
    STRANGERS[stranger](root)
    assert load(root) == {"n": 2}
    assert structure(root).step == verify(root).step == 2
    assert Path(convert(root, tmp_path / "to")).name == "2"
    assert list(find_steps(LocalStorage(root))) == [1, 2]
    with CheckpointManager(root) as manager:
        assert manager.all_steps() == [1, 2]
        assert manager.restore(None) == {"n": 2}
        assert manager.save(3, {"n": 3})
    assert load(root) == {"n": 3}


def test_orbax_steps_stay_steps_under_the_names_that_they_had(tmp_path: Path) -> None:
    """The first save of ours notes how Orbax calls its steps. What comes later under another name
    is none, but one that fits is; a manager that only looks notes nothing.
    """
    put(tmp_path, "checkpoint_5", "orbax")
    with CheckpointManager(tmp_path) as manager:
        assert manager.latest_step() == 5
    assert not (tmp_path / ".holdfast/foreign.json").exists()
    with CheckpointManager(tmp_path) as manager:
        manager.save(6, {"n": 6})
    assert (tmp_path / ".holdfast/foreign.json").read_text() == '{"prefix": "checkpoint_"}'
    put(tmp_path, "export_2024", "orbax")
    put(tmp_path, "checkpoint_0004", "orbax")
    put(tmp_path, "3", "orbax")
    with CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [3, 4, 5, 6] == list(find_steps(LocalStorage(tmp_path)))
        assert manager.restore(4, {"c": jnp.float16(0)}, partial=True)["c"] == 2.5
        with pytest.raises(StepNotFound, match=r"export_2024 there is a checkpoint \(orb"):
            manager.restore(2024)
    (tmp_path / ".holdfast/foreign.json").write_text('{"prefix": 7}')
    with pytest.raises(HostileCheckpoint, match="expected a prefix"):
        load(tmp_path)


def test_checkpoints_without_one_way_of_names_are_no_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In a folder where Orbax's are called in two ways none is the latest: they are named.
    `step_format` chooses one way, beside plain numbers.
    """
    put(tmp_path, "teacher_100", "orbax")
    assert open_checkpoint(tmp_path).info.path == str(tmp_path / "teacher_100")
    put(tmp_path, "student_200", "orbax")
    with pytest.raises(StepNotFound, match=r"student_200 \(orbax\), teacher_100 \(orbax\)"):
        load(tmp_path)
    with CheckpointManager(tmp_path, options=Options(read_only=True)) as manager:
        assert manager.all_steps() == []
    assert "has no steps, and is opened as a new root: student_200, teacher_100" in caplog.text
    with CheckpointManager(tmp_path, options=Options(step_format="student_{:d}")) as manager:
        assert manager.all_steps() == [200]
    put(tmp_path, "7", "orbax")
    assert list(find_steps(LocalStorage(tmp_path))) == [7, 200]


@pytest.mark.parametrize("beside", ["an item of Orbax's", "a safetensors file", "half a record"])
def test_a_root_of_orbax_is_a_root_too(beside: str, tmp_path: Path) -> None:
    """Steps of Orbax's come before a model, another checkpoint or half a record in their root."""
    put(tmp_path, "7", "orbax")
    STRANGERS[beside](tmp_path)
    assert open_checkpoint(tmp_path).info.path == str(tmp_path / "7")


@pytest.mark.parametrize("layout", ["orbax", "safetensors"])
def test_no_save_goes_into_another_librarys_checkpoint(layout: str, tmp_path: Path) -> None:
    """A manager's save and a conversion that come to such a folder, made before the opening or
    after it, are StepExists: nothing is written there.
    """
    put(tmp_path, "4", layout)
    files = sorted(tmp_path.rglob("*"))

    def save_step(manager: CheckpointManager, step: int) -> None:
        manager.save(step, {"n": step})
        manager.wait_until_finished()

    with CheckpointManager(tmp_path) as manager, pytest.raises(StepExists, match="another library"):
        save_step(manager, 4)
    made = tmp_path.parent / f"{tmp_path.name} made"
    save(made / "4", {"n": 4}, step=4)
    with pytest.raises(StepExists):
        convert(made / "4", tmp_path)
    assert sorted(tmp_path.rglob("*")) == files
    with CheckpointManager(tmp_path) as manager:
        put(tmp_path, "5", layout)
        files = sorted((tmp_path / "5").rglob("*"))
        with pytest.raises(StepExists, match="another library"):
            save_step(manager, 5)
    assert sorted((tmp_path / "5").rglob("*")) == files


def test_own_steps_come_first_in_a_bucket_too(tmp_path: Path) -> None:
    """Models in the root, under a step's number and under a newer one, and half a record."""
    url = f"memory://{tmp_path.name}/root"
    for step in (1, 2):
        save(f"{url}/{step}", {"n": step}, step=step)
    put_safetensors(tmp_path)
    model = (tmp_path / "model.safetensors").read_bytes()
    strangers = {
        "model.safetensors": model,
        "3/model.safetensors": model,
        "2024/model.safetensors": model,
        "checkpoint.json": b"{",
    }
    storage = open_storage(url)
    for name, data in strangers.items():
        storage.write(name, len(data), [(0, [memoryview(data)])])
    assert load(url) == {"n": 2} and list(find_steps(storage)) == [1, 2]
    with CheckpointManager(url) as manager:
        assert manager.all_steps() == [1, 2] and manager.restore(None) == {"n": 2}
        with pytest.raises(StepExists, match="another library"):
            manager.save(3, {"n": 3}).wait()
        manager.save(4, {"n": 4}).wait()
    assert load(url) == {"n": 4}
    assert {name: storage.fetch(name, 1 << 20) for name in strangers} == strangers


SAVES = """
import sys
import numpy as np
from holdfast.checkpoint import CheckpointManager
with CheckpointManager(sys.argv[1]) as manager:
    manager.save(1, {"w": np.zeros(3)})
    manager.wait_until_finished()
print("tensorstore" in sys.modules)
"""


def test_a_save_imports_nothing_of_other_layouts(tmp_path: Path) -> None:
    """It looks for others' checkpoints in its folder, which is not there yet."""
    run = [sys.executable, "-c", SAVES, str(tmp_path / "root")]
    ran = subprocess.run(run, capture_output=True, text=True, check=True, timeout=100)
    assert ran.stdout == "False\n", ran.stderr


def test_a_library_that_cannot_be_loaded_hides_no_missing_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without memory: what else stands there is only said where that is known."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": jnp.zeros(3)}).wait()
        shutil.rmtree(tmp_path / "1")
        (tmp_path / "1").mkdir()
        (tmp_path / "1" / "strange").touch()
        monkeypatch.setitem(sys.modules, "holdfast.checkpoint.layouts.orbax.read", None)
        with pytest.raises(StepNotFound):
            manager.metrics(1)


def test_a_single_file_has_no_step(tmp_path: Path) -> None:
    """A step that is asked for of one file of safetensors is StepNotFound, and not passed over."""
    file = next(Path(write("safetensors", str(tmp_path / "made"))).glob("*.safetensors"))
    assert open_checkpoint(file).info.layout == "safetensors"
    with pytest.raises(StepNotFound, match=r"is one file, and has no step 7$") as caught:
        open_checkpoint(file, 7)
    assert caught.value.step == 7
