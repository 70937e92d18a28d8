"""CheckpointManager, alone and in a group of real processes."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holdfast.checkpoint import (
    CheckpointError,
    CheckpointManager,
    Corrupt,
    EveryNSeconds,
    EveryNSteps,
    Json,
    KeepBest,
    KeepLast,
    OnPreemption,
    Options,
    Progress,
    SaveFailed,
    StepExists,
    StepNotFound,
    TreeMismatch,
    UnsupportedLeaf,
)
from tests.support.checkpointing import run_together


def tree(step: int) -> dict[str, object]:
    return {"w": jnp.arange(100.0) + step, "n": np.full(3, step), "lr": 0.5, "step": step}


def equal(got: object, step: int) -> bool:
    want = tree(step)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and ".holdfast" not in path.parts)


def test_a_notebook_needs_a_path_and_nothing_else(tmp_path: Path) -> None:
    """Save, list and restore with one argument to the constructor; a new manager finds all of it."""
    with CheckpointManager(tmp_path / "run") as manager:
        assert manager.latest_step() is None and manager.all_steps() == []
        for step in (0, 5, 10):
            assert manager.save(step, tree(step))
        manager.wait_until_finished()
        assert manager.all_steps() == [0, 5, 10] and equal(manager.restore(5, like=tree(0)), 5)
    with CheckpointManager(tmp_path / "run") as manager:
        assert manager.latest_step() == 10 and equal(manager.restore(like=tree(0)), 10)
        assert equal(manager.restore(), 10)


def test_save_returns_whether_the_policy_wanted_it(tmp_path: Path) -> None:
    """`save` returns False and writes nothing for a step that the policy does not want; `force` saves it."""
    with CheckpointManager(tmp_path, save_policy=EveryNSteps(10)) as manager:
        assert [step for step in range(25) if manager.save(step, tree(step))] == [0, 10, 20]
        assert not manager.should_save(25) and manager.save(25, tree(25), force=True)
        manager.wait_until_finished()
        assert manager.all_steps() == [0, 10, 20, 25]
    with CheckpointManager(tmp_path / "clock", save_policy=EveryNSeconds(3600)) as manager:
        assert not manager.save(0, tree(0))
    with CheckpointManager(tmp_path / "notice", save_policy=OnPreemption()) as manager:
        assert not manager.save(0, tree(0)) and not manager.reached_preemption(0)


def test_the_keep_policy_deletes_after_the_commit(tmp_path: Path) -> None:
    """KeepLast(2) leaves two steps, and no file of the others; KeepBest keeps the best and the newest."""
    with CheckpointManager(tmp_path / "last", keep_policy=KeepLast(2)) as manager:
        for step in range(6):
            manager.save(step, tree(step))
        manager.wait_until_finished()
        assert manager.all_steps() == [4, 5]
    assert {name.split("/")[0] for name in files(tmp_path / "last")} == {"4", "5"}
    assert sorted(os.listdir(tmp_path / "last")) == [".holdfast", "4", "5"]
    with CheckpointManager(tmp_path / "best", keep_policy=KeepBest(1, "loss")) as manager:
        for step, loss in enumerate([3.0, 1.0, 2.0, 4.0]):
            manager.save(step, tree(step), metrics={"loss": np.float32(loss)})
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 3] and manager.best_step() == 1 and manager.best_step("loss", "max") == 3
    with CheckpointManager(tmp_path / "best", keep_policy=KeepBest(1, "loss")) as manager:
        manager.save(4, tree(4), metrics={"loss": 0.5})
        manager.wait_until_finished()
        assert manager.all_steps() == [4] and manager.metrics(4) == {"loss": 0.5}


def test_items_metrics_metadata(tmp_path: Path) -> None:
    """Several items in one step: trees, JSON and a data iterator; metrics and metadata come back."""

    class Reader:
        def __init__(self) -> None:
            self.at = 0

        def get_state(self) -> object:
            return {"at": self.at, "key": b"\0\xff", "shape": (1, 2), 7: np.arange(3)}

        def set_state(self, state: dict[object, object]) -> None:
            assert state["key"] == b"\0\xff" and state["shape"] == (1, 2) and np.array_equal(state[7], np.arange(3))  # type: ignore[arg-type]
            self.at = state["at"]  # type: ignore[assignment]

    reader = Reader()
    reader.at = 41
    with CheckpointManager(tmp_path) as manager:
        items = {"state": tree(1), "ema": tree(2), "config": Json({"$layers": [1, None, "x"]}), "data": reader}
        manager.save(1, items=items, metrics={"loss": jnp.float32(2)}, metadata={"run": "a", "tags": [1]})
        reader.at = 99
        manager.wait_until_finished()
        assert equal(manager.restore(1, like=tree(0)), 1) and equal(manager.restore(1, like=tree(0), item="ema"), 2)
        assert manager.restore(item="config") == {"$layers": [1, None, "x"]}
        again = manager.restore(like=Reader(), item="data")
        assert isinstance(again, Reader) and again.at == 41
        assert manager.metrics(1) == {"loss": 2.0} and manager.metadata(1) == {"run": "a", "tags": [1]}
        with pytest.raises(StepNotFound, match="ghost"):
            manager.restore(1, item="ghost")


def test_a_step_that_exists(tmp_path: Path) -> None:
    """It is StepExists and nothing changes, unless `overwrite=True`, which leaves the new files only."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, tree(1))
        manager.wait_until_finished()
        before = files(tmp_path)
        with pytest.raises(StepExists, match=r"step 1 is already in .*; nothing was written. To replace it, pass overwrite=True"):
            manager.save(1, tree(2))
        assert files(tmp_path) == before
        manager.save(1, tree(3), overwrite=True)
        manager.wait_until_finished()
        assert equal(manager.restore(1, like=tree(0)), 3) and len(files(tmp_path)) == len(before) and files(tmp_path) != before


def test_callers_mistakes_are_told_at_once_and_write_nothing(tmp_path: Path) -> None:
    """Wrong arguments, unsupported leaves and wrong `like`s: one clear error each, nothing half-written."""
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
    """Opening says so, names it, and tells how to read only; reading only works."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write a checkpoint in .*file.*Options\(read_only=True\)"):
        CheckpointManager(tmp_path / "file")
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(3, tree(3))
    with CheckpointManager(tmp_path / "run", options=Options(read_only=True)) as reader:
        assert reader.latest_step() == 3 and equal(reader.restore(like=tree(0)), 3)
        with pytest.raises(ValueError, match="read_only"):
            reader.save(4, tree(4))
    assert os.listdir(tmp_path / "run" / ".holdfast") == []


def test_a_failed_save_is_raised_at_the_next_call_and_blocks_nothing(tmp_path: Path) -> None:
    """Its step is never listed, the next save begins and succeeds, and nothing of the failed one stays."""
    with CheckpointManager(tmp_path) as manager:
        (tmp_path / "1").write_text("in the way")
        manager.save(1, tree(1))
        with pytest.raises(SaveFailed, match=r"step 1 was not saved: process 0 failed") as caught:
            manager.save(2, tree(2))
        assert caught.value.process == 0 and isinstance(caught.value.__cause__, OSError)
        assert caught.value.__notes__ == ["the save of step 2 was begun nevertheless"]
        manager.wait_until_finished()
        manager.check_for_errors()
        assert manager.latest_step() == 2 and manager.statistics()["saves_failed"] == 1
        (tmp_path / "1").unlink()
        manager.save(1, tree(1))
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 2] and equal(manager.restore(1, like=tree(0)), 1)


def test_close_raises_what_failed_but_not_over_another_error(tmp_path: Path) -> None:
    """`close()` raises the failure of a save in flight; leaving the block by an exception carries it as a note."""
    (tmp_path / "1").write_text("in the way")
    manager = CheckpointManager(tmp_path)
    manager.save(1, tree(1))
    with pytest.raises(SaveFailed):
        manager.close()
    manager.close()

    def leave() -> None:
        with CheckpointManager(tmp_path) as manager:
            manager.save(1, tree(1))
            raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        leave()
    assert "besides, a save failed" in caught.value.__notes__[0]


def test_too_little_space_is_told_before_a_byte_is_written(tmp_path: Path) -> None:
    """A save larger than what is free fails with both numbers."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": np.broadcast_to(np.int8(0), 1)})
        manager.wait_until_finished()
        from holdfast.checkpoint.saving import commit

        spare, commit.SPARE_BYTES = commit.SPARE_BYTES, 1 << 60
        try:
            manager.save(2, tree(2))
            with pytest.raises(SaveFailed, match=r"step 2 needs 1,152,921,504,606,\d{3},\d{3} bytes, [\d,]+ are free"):
                manager.wait_until_finished()
        finally:
            commit.SPARE_BYTES = spare
    assert sorted(os.listdir(tmp_path)) == [".holdfast", "1"]


def test_falling_back_to_the_newest_whole_step(tmp_path: Path) -> None:
    """A damaged newest step is Corrupt, and with `fallback=True` the one before it."""
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, tree(step))
        manager.wait_until_finished()
        pack = next((tmp_path / "3" / "state").iterdir())
        pack.write_bytes(pack.read_bytes()[:-1] + b"!")
        (tmp_path / "2" / "checkpoint.json").write_text("{}")
        with pytest.raises(Corrupt):
            manager.restore(like=tree(0))
        assert equal(manager.restore(like=tree(0), fallback=True), 1)
        manager.delete(1)
        with pytest.raises(StepNotFound, match=r"no step of .* restores: step 3: process 0: Corrupt.*; step 2"):
            manager.restore(like=tree(0), fallback=True)


def test_a_damaged_step_is_never_deleted_by_a_policy(tmp_path: Path) -> None:
    """A record that does not read keeps its step where it is; foreign files and folders stay too."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, tree(1))
    (tmp_path / "1" / "checkpoint.json").write_text("{}")
    foreign = ["2/_CHECKPOINT_METADATA", "2/default/d/00000-00000-0123456789", "7/state/notes.txt", "notes/1", "3.tmp/x"]
    for name in foreign:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine")
    before = files(tmp_path)
    with CheckpointManager(tmp_path, keep_policy=KeepLast(1)) as manager:
        for step in (10, 11, 12):
            manager.save(step, tree(step))
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 2, 12]  # 2 is Orbax's
    assert [name for name in files(tmp_path) if not name.startswith("12/")] == before


def test_an_empty_folder_named_like_a_step_is_no_step(tmp_path: Path) -> None:
    """Only a record makes a step."""
    (tmp_path / "8").mkdir()
    with CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == []


def test_on_busy_skip_never_blocks(tmp_path: Path) -> None:
    """With on_busy="skip" a save that meets another in flight returns False; `force` waits for it."""
    gate, entered = threading.Event(), threading.Event()

    def progress(seen: Progress) -> None:
        entered.set()
        gate.wait(60)

    with CheckpointManager(tmp_path, options=Options(on_busy="skip", progress=progress)) as manager:
        assert manager.save(1, tree(1))
        assert entered.wait(60)
        assert not manager.save(2, tree(2)) and not manager.save(3, tree(3))
        with pytest.raises(TimeoutError, match="step 1 is still in flight"):
            manager.wait_until_finished(timeout_s=0.01)
        gate.set()
        assert manager.save(4, tree(4), force=True)
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 4]


def test_progress_counts_to_the_end(tmp_path: Path) -> None:
    """The callback hears the step and, at last, all of its bytes."""
    heard: list[Progress] = []
    with CheckpointManager(tmp_path, options=Options(progress=heard.append)) as manager:
        manager.save(1, {"w": jnp.zeros(1 << 20)})
    assert heard[-1].step == 1 and heard[-1].done_bytes >= heard[-1].total_bytes >= 4 << 20


def test_statistics_are_what_the_demo_prints(tmp_path: Path) -> None:
    """Counts, seconds and bytes of saves and restores, in JSON types."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": jnp.zeros(1000)})
        manager.wait_until_finished()
        manager.restore(1)
        found = manager.statistics()
    assert (found["saves"], found["restores"], found["restore_bytes"]) == (1, 1, 4000) and found["save_bytes"] >= 4000
    assert found["save_s"] > 0 and found["save_blocked_s"] > 0 and found["restore_s"] > 0


def test_a_leaked_manager_warns(tmp_path: Path) -> None:
    """A manager that is dropped without close() is a ResourceWarning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        manager = CheckpointManager(tmp_path)
        manager._worker.wait(60)
        del manager
        gc.collect()
    assert any("was not closed" in str(warning.message) for warning in caught if warning.category is ResourceWarning)


def test_an_exit_with_a_save_in_flight_waits_for_it(tmp_path: Path) -> None:
    """A script that ends, or dies of an exception, right after `save` leaves the step behind."""
    script = """
    import sys, jax.numpy as jnp
    from holdfast.checkpoint import CheckpointManager
    manager = CheckpointManager(sys.argv[1])
    manager.save(7, {f"w{i}": jnp.full(1 << 20, 7.0) for i in range(8)})
    if sys.argv[2] == "raise":
        raise KeyError("mine")
    """
    for how, code in (("end", 0), ("raise", 1)):
        command = [sys.executable, "-W", "ignore::ResourceWarning", "-c", textwrap.dedent(script), str(tmp_path / how), how]
        done = subprocess.run(command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=90, check=False)
        assert done.returncode == code, done.stderr
        with CheckpointManager(tmp_path / how, options=Options(read_only=True)) as manager:
            assert manager.all_steps() == [7] and float(manager.restore(7)["w3"][5]) == 7
        assert os.listdir(tmp_path / how / ".holdfast") == []


def test_four_processes_save_and_restore_as_one(tmp_path: Path) -> None:
    """Four processes save a sharded tree, list alike, restore it, and two restore it again onto their own mesh."""
    run_together(
        """
        with CheckpointManager(root, save_policy=EveryNSteps(2), keep_policy=KeepLast(2)) as manager:
            saved = [step for step in range(9) if manager.save(step, state(step), metrics={"loss": step})]
            assert saved == [0, 2, 4, 6, 8], saved
            manager.wait_until_finished()
            assert manager.all_steps() == [6, 8] and manager.latest_step() == 8
            assert same(manager.restore(like=state(0)), 8) and same(manager.restore(6, like=state(0)), 6)
            assert manager.restore()["w"].shape == (8, 1 << 10)
            got = goes(lambda: manager.save(8, state(8), force=True), StepExists)
            assert got.step == 8
            manager.save(10, state(10))
            manager.delete(8)
            assert manager.all_steps() == [10]
        """,
        4,
        tmp_path / "run",
        devices=2,
    )
    assert {name.split("/")[0] for name in files(tmp_path / "run")} == {"10"}
    run_together(
        """
        with CheckpointManager(root, keep_policy=KeepLast(2)) as manager:
            assert manager.latest_step() == 10
            like = {"w": jax.ShapeDtypeStruct((8, 1 << 10), jnp.float32, sharding=NamedSharding(mesh, P(None, "x"))),
                    "r": jax.ShapeDtypeStruct((1 << 10,), jnp.float32, sharding=NamedSharding(mesh, P("x"))),
                    "n": np.int32(0), "name": ""}
            got = manager.restore(10, like=like)
            want = np.arange(8 << 10, dtype=np.float32).reshape(8, 1 << 10) + 10
            for shard in got["w"].addressable_shards:
                assert np.array_equal(np.asarray(shard.data), want[shard.index])
            manager.save(12, state(12))
        """,
        2,
        tmp_path / "run",
    )


def test_the_failure_of_one_process_is_an_error_on_all(tmp_path: Path) -> None:
    """A process whose disk fails, and one whose tree differs, is named on every process; old steps stay and the next save succeeds."""
    outputs = run_together(
        """
        with CheckpointManager(root, options=Options(save_timeout_s=30)) as manager:
            manager.save(1, state(1))
            manager.wait_until_finished()
            if index == 2:
                write = manager._storage.write
                def full(*args, **options):
                    raise OSError(28, "No space left on device")
                manager._storage.write = full
            manager.save(2, state(2))
            error = goes(manager.wait_until_finished, SaveFailed)
            assert error.process == 2 and "process 2 failed: OSError: [Errno 28] No space left" in str(error), error
            if index == 2:
                manager._storage.write = write
            assert manager.latest_step() == 1
            different = state(3) | ({"more": jnp.zeros(3)} if index == 1 else {})
            manager.save(3, different)
            error = goes(manager.wait_until_finished, SaveFailed)
            assert error.process == 1, error
            if index == 3:
                goes(lambda: manager.save(4, state(4) | {"bad": object()}), UnsupportedLeaf)
            else:
                manager.save(4, state(4))
                error = goes(manager.wait_until_finished, SaveFailed)
                assert error.process == 3 and "bad" in str(error), error
            manager.save(2, state(2))
            manager.wait_until_finished()
            assert manager.all_steps() == [1, 2] and same(manager.restore(2, like=state(0)), 2)
        """,
        4,
        tmp_path,
    )
    assert all("caught SaveFailed" in output for output in outputs)
    assert {name.split("/")[0] for name in files(tmp_path)} == {"1", "2"}, files(tmp_path)


def test_a_process_that_never_comes_is_named(tmp_path: Path) -> None:
    """A save that one process does not join fails on the others after the time given, names it, and leaves nothing."""
    run_together(
        """
        manager = CheckpointManager(root, options=Options(save_timeout_s=3))
        manager.save(1, state(1))
        manager.wait_until_finished()
        if index != 1:
            manager.save(2, state(2))
            error = goes(manager.wait_until_finished, SaveFailed)
            assert error.process == 1 and manager.latest_step() == 1, error
            manager._group.barrier("end", timeout_s=60)
        else:
            manager._group.barrier("end", timeout_s=60)
        manager.close()
        """,
        3,
        tmp_path,
    )
    assert {name.split("/")[0] for name in files(tmp_path)} == {"1"}


def test_an_opening_that_fails_fails_on_all(tmp_path: Path) -> None:
    """The primary's trouble with the root is every process's error."""
    (tmp_path / "file").write_text("")
    outputs = run_together("goes(lambda: CheckpointManager(root), CheckpointError)", 2, tmp_path / "file")
    assert all("cannot write a checkpoint in" in output for output in outputs)


@pytest.mark.parametrize("which", ["clock", "load"])
def test_a_clock_and_a_load_are_agreed_on(tmp_path: Path, which: str) -> None:
    """EveryNSeconds and on_busy="skip" save the same steps on all processes, though their loops run at different moments."""
    outputs = run_together(
        """
        policy, options = (EveryNSeconds(0.2), Options()) if sys.argv[5] == "clock" else (EveryNSteps(3), Options(on_busy="skip"))
        with CheckpointManager(root, save_policy=policy, options=options) as manager:
            step, saved = 0, []
            while step < 2000 and len(saved) < 4:
                time.sleep(0.002 * (index + 1))
                if manager.save(step, state(step)):
                    saved.append(step)
                step += 1
            manager.wait_until_finished()
            assert saved == manager.all_steps() and len(saved) == 4, (saved, manager.all_steps())
            print("saved", saved)
        """,
        3,
        tmp_path,
        which,
    )
    assert len({output.splitlines()[-1] for output in outputs}) == 1


def test_a_busy_primary_skips_for_all(tmp_path: Path) -> None:
    """With on_busy="skip" no process of two blocks, and none saves, while the primary's save is in flight; then both save the same step."""
    outputs = run_together(
        """
        import threading
        gate, entered = threading.Event(), threading.Event()
        def progress(seen):
            entered.set()
            assert gate.wait(60)
        options = Options(on_busy="skip", progress=None if index else progress)
        with CheckpointManager(root, options=options) as manager:
            step, saved, skipped = 0, [], 0
            while step < 20_000 and len(saved) < 3:
                if manager.save(step, state(step)):
                    saved.append(step)
                elif entered.is_set() and not gate.is_set():
                    skipped += 1
                if skipped == 100:
                    gate.set()
                step += 1
                time.sleep(0.002)
            manager.wait_until_finished()
            assert saved == manager.all_steps() and len(saved) == 3, (saved, manager.all_steps())
            assert index or (skipped == 100 and saved[1] - saved[0] > 100), (skipped, saved)
            assert manager.save(30_000, state(7), force=True)
            manager.wait_until_finished()
            assert manager.latest_step() == 30_000
            print("saved", saved)
        """,
        2,
        tmp_path,
    )
    assert len({output.splitlines()[-1] for output in outputs}) == 1


def _load() -> tuple[int, int, int]:
    """Returns what this process holds: threads, file handles, resident KiB."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024
    return threading.active_count(), len(os.listdir("/proc/self/fd")), resident


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
@pytest.mark.parametrize("saves", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_saves_in_a_row_leave_no_trace(tmp_path: Path, saves: int) -> None:
    """KeepLast(3) over many saves: as many threads and file handles as before, and memory that does not grow with their number."""
    state = {f"layer{i}": {"w": jnp.ones((64, 64)), "n": np.ones(10)} for i in range(10)}
    with CheckpointManager(tmp_path, keep_policy=KeepLast(3)) as manager:
        loads = []
        for step in range(saves):
            manager.save(step, state)
            if step % (saves // 4) == saves // 4 - 1:
                manager.wait_until_finished()
                manager._worker.wait(60)
                loads.append(_load())
        assert manager.all_steps() == [saves - 3, saves - 2, saves - 1] and manager._index.steps() == manager.all_steps()
        threads, handles, resident = zip(*loads, strict=True)
        assert max(threads) <= threads[0] and max(handles) <= handles[0], loads
        assert resident[3] - resident[1] < 4096, f"KiB after each quarter: {resident}"


def test_a_preempted_job_saves_one_step_everywhere(tmp_path: Path) -> None:
    """SIGTERM to one process: all save the same step, once, and stop at it; a policy of none or steps needs not name preemption."""
    outputs = run_together(
        """
        with CheckpointManager(root, save_policy=EveryNSteps(1_000_000)) as manager:
            saved = []
            for step in range(1, 100_000):
                if step == 20 and index == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                if manager.save(step, state(step)):
                    saved.append(step)
                if manager.reached_preemption(step):
                    break
                time.sleep(0.001 * (1 + index))
            manager.wait_until_finished()
            assert saved == [step] == manager.all_steps(), (saved, step)
            print("stopped at", step, flush=True)
        """,
        3,
        tmp_path,
    )
    assert len({output.split("stopped at")[1].split()[0] for output in outputs}) == 1, outputs
