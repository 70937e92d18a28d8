"""CheckpointManager, alone: what its calls do, return and raise. (In a group:
tests/system/test_group_saves.py.)
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holdfast.checkpoint import (
    SAVED,
    CheckpointError,
    CheckpointManager,
    Corrupt,
    EveryNSteps,
    Files,
    Json,
    KeepLast,
    Options,
    SaveFailed,
    StepExists,
    StepNotFound,
    TreeMismatch,
    UnsupportedLeaf,
    iterate_steps,
    load,
    register_storage,
    save,
    verify,
    wait_for_new_step,
)
from holdfast.checkpoint.storage.counting import CountingStorage
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.checkpoint.storage.tombstone import RECORD_NAME
from tests.support.cluster import run_processes
from tests.support.paths import program


def tree(step: int) -> dict[str, object]:
    return {"w": jnp.arange(100.0) + step, "n": np.full(3, step), "lr": 0.5, "step": step}


def equal(got: object, step: int) -> bool:
    want = tree(step)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    return all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    )


def files(root: Path) -> list[str]:
    return sorted(
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.is_file() and ".holdfast" not in path.parts
    )


def test_a_notebook_needs_a_path_and_nothing_else(tmp_path: Path) -> None:
    """Save, list and restore with one argument to the constructor; a new manager finds all of
    it.
    """
    with CheckpointManager(tmp_path / "run") as manager:
        assert manager.latest_step() is None and manager.all_steps() == []
        for step in (0, 5, 10):
            assert manager.save(step, tree(step))
        manager.wait_until_finished()
        assert manager.all_steps() == [0, 5, 10] and equal(manager.restore(5, like=tree(0)), 5)
    with CheckpointManager(tmp_path / "run") as manager:
        assert manager.latest_step() == 10 and equal(manager.restore(like=tree(0)), 10)
        assert equal(manager.restore(), 10)


def test_items_metrics_metadata(tmp_path: Path) -> None:
    """Several items in one step: trees, JSON and a data iterator; metrics and metadata come
    back.
    """

    class Reader:
        def __init__(self) -> None:
            self.at = 0

        def get_state(self) -> object:
            return {"at": self.at, "key": b"\0\xff", "shape": (1, 2), 7: np.arange(3)}

        def set_state(self, state: dict[object, object]) -> None:
            assert (
                state["key"] == b"\0\xff"
                and state["shape"] == (1, 2)
                and np.array_equal(state[7], np.arange(3))
            )  # type: ignore[arg-type]
            self.at = state["at"]  # type: ignore[assignment]

    reader = Reader()
    reader.at = 41
    with CheckpointManager(tmp_path) as manager:
        items = {
            "state": tree(1),
            "ema": tree(2),
            "config": Json({"$layers": [1, None, "x"]}),
            "data": reader,
        }
        manager.save(
            1, items=items, metrics={"loss": jnp.float32(2)}, metadata={"run": "a", "tags": [1]}
        )
        reader.at = 99
        manager.wait_until_finished()
        assert equal(manager.restore(1, like=tree(0)), 1) and equal(
            manager.restore(1, like=tree(0), item="ema"), 2
        )
        assert manager.restore(item="config") == {"$layers": [1, None, "x"]}
        again = manager.restore(like=Reader(), item="data")
        assert isinstance(again, Reader) and again.at == 41
        assert manager.metrics(1) == {"loss": 2.0} and manager.metadata(1) == {
            "run": "a",
            "tags": [1],
        }
        with pytest.raises(StepNotFound, match="ghost"):
            manager.restore(1, item="ghost")


def test_the_last_step_once_more_after_the_loop(tmp_path: Path) -> None:
    """A policy does not want what the program has just saved, or restored, and is there. Who has
    done neither hears that the step exists; who forces it, saves other items, or stays at a step
    does too.
    """

    def opened() -> CheckpointManager:
        return CheckpointManager(tmp_path, save_policy=EveryNSteps(2))

    with opened() as manager:
        for step in range(1, 5):
            manager.save(step, tree(step))
        assert not manager.save(4, tree(4))
        assert manager.all_steps() == [2, 4]
        with pytest.raises(StepExists, match=r"save only `if manager.latest_step\(\) != 4`"):
            manager.save(4, tree(5))
        manager.save(6, tree(6))
        with pytest.raises(StepExists):
            manager.save(6, tree(7), force=True)
        manager.save(8, tree(8))
        with pytest.raises(StepExists):
            manager.save(8, items={"ema": tree(8)})
    with opened() as manager:
        for _ in range(2):
            with pytest.raises(StepExists):
                manager.save(8, tree(5))
        manager.restore(like=tree(0))
        manager.restore(item="state")
        assert not manager.save(8, tree(8))
        assert manager.statistics()["saves_skipped"] == 1
        manager.restore(like=tree(0))
        manager.delete(8)
        assert manager.save(8, tree(7))
        manager.save(8, tree(6), overwrite=True).wait()
        assert equal(manager.restore(8, like=tree(0)), 6)


def test_a_last_step_that_failed_is_saved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not there is wanted, though the program has begun to save it."""
    with CheckpointManager(tmp_path, save_policy=EveryNSteps(2)) as manager:
        with monkeypatch.context() as patched:

            def full(*_: Any, **__: Any) -> None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            patched.setattr(os, "fsync", full)
            manager.save(2, tree(1))
            with pytest.raises(SaveFailed):
                manager.wait_until_finished()
        assert manager.save(2, tree(2))
    assert equal(load(tmp_path, like=tree(0)), 2)


def test_a_step_that_exists(tmp_path: Path) -> None:
    """It is StepExists and nothing changes, unless `overwrite=True`, which leaves the new files
    only.
    """
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, tree(1))
        manager.wait_until_finished()
        before = files(tmp_path)
        with pytest.raises(
            StepExists,
            match=(
                r"step 1 is already in .*; nothing was written. To replace it, pass overwrite=True;"
            ),
        ):
            manager.save(1, tree(2))
        assert files(tmp_path) == before
        manager.save(1, tree(3), overwrite=True)
        manager.wait_until_finished()
        assert (
            equal(manager.restore(1, like=tree(0)), 3)
            and len(files(tmp_path)) == len(before)
            and files(tmp_path) != before
        )


def test_callers_mistakes_write_nothing(tmp_path: Path) -> None:
    """Wrong arguments, unsupported leaves and wrong `like`s: one clear error each, nothing
    half-written.
    """
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(ValueError, match="either a state or items"):
            manager.save(1)
        with pytest.raises(ValueError, match="expected 0 to"):
            manager.save(-1, tree(0))
        with pytest.raises(UnsupportedLeaf, match="f"):
            manager.save(1, {"f": object()})
        with pytest.raises(StepNotFound, match="no step"):
            manager.restore()
        with pytest.raises(StepNotFound):
            manager.delete(3)
        assert files(tmp_path) == [] and manager.all_steps() == []
        manager.save(1, {"w": jnp.zeros((2, 3))})
        manager.wait_until_finished()
        with pytest.raises(TreeMismatch, match=r"w.*\[2, 4\].*\[2, 3\]") as caught:
            manager.restore(1, like={"w": jnp.zeros((2, 4))})
        assert caught.value.leaf == "w"
    with pytest.raises(ValueError, match="is closed"):
        manager.save(2, tree(2))


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    """Opening says so, names it, and says how to only read; reading only works."""
    (tmp_path / "file").write_text("")
    with pytest.raises(
        CheckpointError, match=r"cannot write a checkpoint in .*file.*Options\(read_only=True\)"
    ):
        CheckpointManager(tmp_path / "file")
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(3, tree(3))
    with CheckpointManager(tmp_path / "run", options=Options(read_only=True)) as reader:
        assert reader.latest_step() == 3 and equal(reader.restore(like=tree(0)), 3)
        with pytest.raises(ValueError, match="read_only"):
            reader.save(4, tree(4))
    assert os.listdir(tmp_path / "run" / ".holdfast") == []


def test_a_step_that_was_copied_under_another_number(tmp_path: Path) -> None:
    """After `cp -r 4 5` step 5 is Corrupt wherever it is read, and can be deleted; under a name
    that is no number it is well.
    """
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(4, tree(4), metrics={"loss": 1})
        manager.wait_until_finished()
        shutil.copytree(tmp_path / "run/4", tmp_path / "run/5")
        shutil.copytree(tmp_path / "run/4", tmp_path / "best")
        for read in (
            lambda: manager.restore(5, like=tree(0)),
            lambda: manager.restore(like=tree(0)),
            lambda: manager.metrics(5),
            lambda: manager.metadata(5),
            lambda: load(tmp_path / "run"),
            lambda: load(tmp_path / "run/5"),
            lambda: verify(tmp_path / "run/5"),
        ):
            with pytest.raises(
                Corrupt,
                match=(
                    r"run/5/checkpoint.json: this is the record of step 4, in the folder of step 5;"
                    r" .* as step 4 again"
                ),
            ):
                read()
        assert equal(manager.restore(like=tree(0), fallback=True), 4) and equal(
            load(tmp_path / "best", tree(0)), 4
        )
        manager.save(6, tree(6))
        manager.wait_until_finished()
        assert equal(manager.restore(4, like=tree(0)), 4)
        manager.delete(5)
        assert files(tmp_path / "run" / "5") == [] and manager.all_steps() == [4, 6]


def test_a_copied_step_of_a_root_with_names(tmp_path: Path) -> None:
    """After `cp -r step_0004 step_0005` step 5 is Corrupt wherever it is read, also where its
    folder is opened by itself; under a name that is no step's it is well.
    """
    options = Options(step_format="step_{:04d}")
    with CheckpointManager(tmp_path, options=options) as manager:
        manager.save(4, tree(4), metrics={"loss": 1})
        manager.wait_until_finished()
        shutil.copytree(tmp_path / "step_0004", tmp_path / "step_0005")
        shutil.copytree(tmp_path / "step_0004", tmp_path / "best_5")
        for read in (
            lambda: manager.restore(5, like=tree(0)),
            lambda: manager.metrics(5),
            lambda: load(tmp_path),
            lambda: load(tmp_path / "step_0005"),
        ):
            with pytest.raises(Corrupt, match="the record of step 4, in the folder of step 5"):
                read()
        assert equal(manager.restore(like=tree(0), fallback=True), 4)
        assert equal(load(tmp_path / "best_5", tree(0)), 4)
    with pytest.raises(ValueError, match="called as step 7 is"):
        save(tmp_path / "step_0007", tree(8), step=8)


def test_an_empty_folder_is_no_step(tmp_path: Path) -> None:
    """Only a record makes a step."""
    (tmp_path / "8").mkdir()
    with CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == []


def test_a_leaked_manager_warns(tmp_path: Path) -> None:
    """A manager that is dropped without close() is a ResourceWarning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        manager = CheckpointManager(tmp_path)
        manager._state.worker.wait(60)
        del manager
        gc.collect()
    assert any(
        "was not closed" in str(warning.message)
        for warning in caught
        if warning.category is ResourceWarning
    )


def test_an_exit_waits_for_the_save(tmp_path: Path) -> None:
    """A script that ends, or dies of an exception, right after `save` leaves the step behind."""
    for how, code in (("end", 0), ("raise", 1)):
        command = [
            sys.executable,
            "-W",
            "ignore::ResourceWarning",
            str(program("manager_ends_while_it_saves")),
            str(tmp_path / how),
            how,
        ]
        done = subprocess.run(
            command,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert done.returncode == code, done.stderr
        with CheckpointManager(tmp_path / how, options=Options(read_only=True)) as manager:
            assert manager.all_steps() == [7] and float(manager.restore(7)["w3"][5]) == 7
        assert os.listdir(tmp_path / how / ".holdfast") == []


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
@pytest.mark.parametrize("saves", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_saves_in_a_row_leave_no_trace(tmp_path: Path, saves: int) -> None:
    """KeepLast(3) over many saves: as many threads and file handles as before, and memory that does
    not grow with their number. In a process of its own: nothing else comes and goes there.
    """
    found = json.loads(run_processes(program("many_saves"), 1, arguments=[tmp_path, saves])[0])
    assert found["steps"] == [saves - 3, saves - 2, saves - 1]
    threads, handles, resident = zip(*found["loads"], strict=True)
    assert max(threads) <= threads[0] and max(handles) <= handles[0], found
    assert resident[3] - resident[1] < 4096, f"KiB after each quarter: {resident}"


def test_one_restore_of_several_items(tmp_path: Path) -> None:
    """`items` gives a dict of trees, JSON and an iterator's state, all of one step; one that is not
    there is StepNotFound, naming it.
    """
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(
                step,
                items={"model": tree(step), "ema": tree(step + 1), "config": Json({"lr": step})},
            ).wait()
        found = manager.restore(items={"model": tree(0), "config": None, "ema": None})
        assert (
            list(found) == ["model", "config", "ema"]
            and equal(found["model"], 2)
            and found["config"] == {"lr": 2}
        )
        assert isinstance(found["ema"]["w"], np.ndarray) and found["ema"]["step"] == 3
        assert manager.statistics()["restores"] == 1
        assert manager.restore(1, items={"config": None}, fallback=True) == {"config": {"lr": 1}}
        with pytest.raises(StepNotFound, match="'optimizer'"):
            manager.restore(items={"model": None, "optimizer": None})
        with pytest.raises(ValueError, match="either `item` and `like`, or `items`"):
            manager.restore(like=tree(0), items={"model": None})


class Sized:
    """Has its size by a method, as no array has."""

    def nbytes(self) -> int:
        return 8


def test_what_reads_files_returns_anything(tmp_path: Path) -> None:
    """The restore counts the bytes of arrays, and nothing of what it cannot count."""

    def write(folder: Path) -> None:
        (folder / "file").write_bytes(b"")

    with CheckpointManager(tmp_path) as manager:
        manager.save(1, items={"a": {"w": np.ones(3)}, "tok": Files(write)}).wait()
        for value in ({"a": 1, 2: 3}, Sized()):
            wanted = {"a": None, "tok": Files(read=lambda folder, value=value: value)}  # type: ignore[misc]
            assert manager.restore(items=wanted)["tok"] is value
        assert manager.statistics()["restore_bytes"] == 2 * 24


class _Loader:
    """An iterator whose state is its position."""

    def __init__(self, at: Any) -> None:
        self.at = at

    def get_state(self) -> Any:
        return self.at

    def set_state(self, state: Any) -> None:
        self.at = state


def test_a_restore_that_fails_moves_no_iterator(tmp_path: Path) -> None:
    """Whichever item is first: a `like` that does not fit, an item that is not there, another
    state that does not read.
    """
    with CheckpointManager(tmp_path) as manager:
        items = {"data": _Loader(7), "eval": _Loader(np.int32(8)), "state": tree(1)}
        manager.save(1, items=items).wait()
        data = _Loader(0)
        others: list[dict[str, Any]] = [{"state": {"no": np.ones(1)}}, {"none": None}]
        for other in others:
            for wanted in ({"data": data} | other, other | {"data": data}):
                with pytest.raises(CheckpointError):
                    manager.restore(items=wanted)
                with pytest.raises(CheckpointError):
                    load(tmp_path, items=wanted)
        with pytest.raises(TreeMismatch, match="chooses no leaf"):
            manager.restore(items={"data": data, "state": None}, partial=lambda path: False)
        assert data.at == 0
        found = manager.restore(items={"data": data, "eval": _Loader(0), "state": tree(0)})
        assert found["data"] is data and data.at == 7 and found["eval"].at == 8
        assert equal(found["state"], 1)


def test_the_like_of_a_json_item_is_json(tmp_path: Path) -> None:
    """Or the class of what is. A tree of arrays, or an object that takes no state, is not: it would
    get something else.
    """
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, items={"config": Json({"lr": 1e-3, "tags": ["a"]})}).wait()
        for like in (
            None,
            SAVED,
            Json,
            Json({"lr": 1}),
            {"lr": np.float32(1), "tags": (), "new": None},
        ):
            assert manager.restore(items={"config": like})["config"]["lr"] == 1e-3
        struct = jax.ShapeDtypeStruct((), jnp.float32)
        for like in ({"lr": jnp.zeros(3), "tags": []}, {"lr": struct}, object()):
            with pytest.raises(TreeMismatch, match="the item 'config' is JSON, and its `like` is"):
                manager.restore(items={"config": like})


def test_a_restore_renames_leaves(tmp_path: Path) -> None:
    """`rename` gives stored leaves the paths of `like`, of holdfast's steps as of others; without a
    `like` a flat dict comes back.
    """
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"old": {"w": jnp.arange(3.0)}, "step": 7}).wait()
        found = manager.restore(
            like={"new": {"w": jnp.zeros(3)}, "step": 0}, rename={"old.w": "new.w"}
        )
        assert found["new"]["w"].tolist() == [0, 1, 2] and found["step"] == 7
        assert set(manager.restore(rename=[(r"old\.(.*)", r"\1")])) == {"w", "step"}
        with pytest.raises(ValueError, match="the same name"):
            manager.restore(rename=lambda path: "x")


@pytest.mark.parametrize("incremental", [False, True])
def test_steps_live_under_the_names_of_the_root(tmp_path: Path, incremental: bool) -> None:
    """Saved, listed, kept, held, restored, read without a manager, watched, replaced, swept and
    deleted under the root's format.
    """
    options = Options(step_format="checkpoint_{:04d}", incremental=incremental)
    with CheckpointManager(tmp_path, keep_policy=KeepLast(2), options=options) as manager:
        for step in (1, 2, 30000):
            manager.save(step, tree(step), metrics={"loss": step}).wait()
        assert manager.all_steps() == [2, 30000] and equal(
            manager.restore(2, like=tree(0), hold_s=60), 2
        )
        assert (
            manager.structure(2).step == 2
            and manager.metrics(2) == {"loss": 2}
            and manager.best_step("loss") == 2
        )
        with pytest.raises(StepExists, match="step 2 is already in"):
            manager.save(2, tree(2))
        manager.save(2, tree(3), overwrite=True).wait()
        assert equal(manager.restore(2, like=tree(0)), 3)
    assert {name.split("/")[0] for name in files(tmp_path)} == {
        "checkpoint_0002",
        "checkpoint_30000",
    }
    assert equal(load(tmp_path, tree(0)), 30000) and verify(tmp_path / "checkpoint_0002").step == 2
    assert (
        next(iterate_steps(tmp_path, timeout_s=1)) == 30000
        and wait_for_new_step(tmp_path, after=2, timeout_s=1) == 30000
    )
    (tmp_path / "checkpoint_0005" / "state").mkdir(parents=True)
    (
        tmp_path / "checkpoint_0005" / "state" / "00000-00000-0123456700000001.safetensors"
    ).write_text("left behind")
    with CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [2, 30000] and manager.latest_step() == 30000
        manager.save(30001, tree(4)).wait()
        manager.delete(30000)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".holdfast",
        "checkpoint_0002",
        "checkpoint_30001",
    ]
    with CheckpointManager(tmp_path, options=Options(read_only=True)) as manager:
        assert manager.all_steps() == [2, 30001]


def test_known_steps_need_no_look(tmp_path: Path) -> None:
    """What another manager saves or deletes is known from `reload` on; what this one does, at
    once.
    """
    with CheckpointManager(tmp_path) as other, CheckpointManager(tmp_path) as manager:
        other.save(1, {"x": 1})
        other.wait_until_finished()
        manager.save(2, {"x": 2})
        manager.wait_until_finished()
        assert manager.known_steps() == [2] and manager.all_steps() == [1, 2]
        manager.reload()
        manager.delete(1)
        assert manager.known_steps() == [2] and other.known_steps() == [1]


class _HangingDeletes(CountingStorage):
    """A folder whose packs are deleted only when `go_on` is set."""

    def __init__(self, path: str, go_on: threading.Event) -> None:
        super().__init__(LocalStorage(path), lambda done_bytes: None)
        self._go_on = go_on

    def delete(self, names: Sequence[str]) -> None:
        if any(name.endswith(".safetensors") for name in names):
            assert self._go_on.wait(60)
        super().delete(names)


def test_a_manager_that_closes_keeps_no_record_open(tmp_path: Path) -> None:
    """Though the deletions of its steps hang, and are dropped."""
    go_on = threading.Event()
    register_storage("hanging", lambda url, _: _HangingDeletes(url.partition("://")[2], go_on))
    options = Options(exit_timeout_s=0.5)
    try:
        with CheckpointManager(
            f"hanging://{tmp_path}", keep_policy=KeepLast(1), options=options
        ) as manager:
            for step in range(6):
                manager.save(step, {"w": jnp.ones(3)}).wait()
        end = time.monotonic() + 20
        while len(_open_records(tmp_path)) > 1 and time.monotonic() < end:
            time.sleep(0.01)
        # The one at whose deletion the thread hangs may be open still.
        assert len(_open_records(tmp_path)) <= 1
    finally:
        go_on.set()
    while (tmp_path / "0").exists():  # what looks through the folder next meets no deletion
        time.sleep(0.01)


def _open_records(root: Path) -> list[str]:
    """Returns the records below a root that this process has open."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(os.readlink(entry))
    return [name for name in found if name.startswith(str(root)) and RECORD_NAME in name]
