"""One CheckpointManager in each process of a job: saves, failures and decisions that all share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpointing import run_together


def files(root: Path) -> list[str]:
    return sorted(
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.is_file() and ".holdfast" not in path.parts
    )


def test_four_processes_save_and_restore_as_one(tmp_path: Path) -> None:
    """Four processes save a sharded tree, list alike, restore it, and two restore it again onto
    their own mesh.
    """
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
    """A process whose disk fails, and one whose tree differs, is named on every process; old steps
    stay and the next save succeeds.
    """
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
    """A save that one process does not join fails on the others after the time given, names it, and
    leaves nothing.
    """
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
    outputs = run_together(
        "goes(lambda: CheckpointManager(root), CheckpointError)", 2, tmp_path / "file"
    )
    assert all("cannot write a checkpoint in" in output for output in outputs)


@pytest.mark.parametrize("which", ["clock", "load"])
def test_a_clock_and_a_load_are_agreed_on(tmp_path: Path, which: str) -> None:
    """EveryNSeconds and on_busy="skip" save the same steps on all processes, though their loops run
    at different moments.
    """
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
    """With on_busy="skip" no process of two blocks, and none saves, while the primary's save is in
    flight; then both save the same step.
    """
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


def test_a_preempted_job_saves_one_step_everywhere(tmp_path: Path) -> None:
    """SIGTERM to one process: all save the same step, once, and stop at it; a policy of none or
    steps needs not name preemption.
    """
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


def test_a_group_of_some_processes_saves_what_is_theirs(tmp_path: Path) -> None:
    """Processes 0 and 2 of three save an array on their own devices as a group of two; the other
    takes no part.
    """
    run_together(
        """
        from holdfast.multihost import ClusterGroup, current_client, sync_global_processes
        if index != 1:
            group = ClusterGroup(current_client(), [0, None, 1][index], 2, processes=[0, 2])
            assert list(group.processes) == [0, 2]
            pair = Mesh(np.array([device for device in jax.devices() if device.process_index != 1]), ("x",))
            whole = np.arange(8.0, dtype=np.float32)
            place = NamedSharding(pair, P("x"))
            made = jax.make_array_from_callback((8,), place, lambda where: whole[where])
            with CheckpointManager(root, group=group) as manager:
                manager.save(1, {"w": made})
                manager.wait_until_finished()
                got = manager.restore(1, {"w": made})["w"]
                for shard in got.addressable_shards:
                    assert np.array_equal(np.asarray(shard.data), whole[shard.index])
        sync_global_processes("end", timeout=30)
        """,
        3,
        tmp_path / "run",
    )
    assert len([name for name in files(tmp_path / "run") if name.endswith(".safetensors")]) == 2


def test_the_next_save_has_the_same_number_on_all(tmp_path: Path) -> None:
    """Whatever `save` raises on one process (a bad step, a bad name, an interrupt), the others fail
    at once and the next save is good.
    """
    run_together(
        """
        import time
        with CheckpointManager(root, options=Options(save_timeout_s=60)) as manager:
            def interrupted(*_):
                raise KeyboardInterrupt
            mistakes = [
                (lambda: manager.save("7", state(7)), TypeError),
                (lambda: manager.save(7, items={"a/b": state(7)}), ValueError),
                (lambda: manager.save(7, state(7), metadata={1, 2}), TypeError),
                (lambda: manager.save(7), ValueError),
            ]
            began = time.monotonic()
            for step, (mistake, kind) in enumerate(mistakes, 1):
                if index == 1:
                    goes(mistake, kind)
                else:
                    manager.save(7, state(7))
                    error = goes(manager.wait_until_finished, SaveFailed)
                    assert error.process == 1 and kind.__name__ in str(error), error
                manager.save(step, state(step))
                manager.wait_until_finished()
            if index == 1:
                stage, manager._stager.stage = manager._stager.stage, interrupted
                goes(lambda: manager.save(7, state(7)), KeyboardInterrupt)
                manager._stager.stage = stage
            else:
                manager.save(7, state(7))
                assert "interrupted" in str(goes(manager.wait_until_finished, SaveFailed))
            manager.save(9, state(9))
            manager.wait_until_finished()
            assert manager.all_steps() == [1, 2, 3, 4, 9] and time.monotonic() - began < 45
        """,
        3,
        tmp_path,
    )


def test_processes_that_know_other_steps_learn_them_with_the_next_save(tmp_path: Path) -> None:
    """A process that was not told of a commit, and could not read its record either, lists it again
    after the next save.
    """
    run_together(
        """
        from holdfast.checkpoint.saving import commit
        from holdfast.checkpoint.agreement.save_protocol import Hear, ReadRecord, RecordUnreadable, Failed
        with CheckpointManager(root) as manager:
            manager.save(1, state(1))
            manager.wait_until_finished()
            perform = commit.EffectPerformer.perform
            def deaf(part, effect):
                event = perform(part, effect)
                if isinstance(effect, Hear):
                    return Failed(TimeoutError("nothing came"))
                return RecordUnreadable() if isinstance(effect, ReadRecord) else event
            if index == 1:
                commit.EffectPerformer.perform = deaf
            manager.save(2, state(2))
            if index == 1:
                goes(manager.wait_until_finished, CommitUnknown)
                commit.EffectPerformer.perform = perform
                assert manager.all_steps() == [1]
            manager.save(3, state(3))
            manager.wait_until_finished()
            assert manager.all_steps() == [1, 2, 3], manager.all_steps()
        """,
        2,
        tmp_path,
    )


def test_a_mistake_of_one_process_in_a_single_save_is_known_to_all(tmp_path: Path) -> None:
    """One-shot `save` of a group ends alike where one process passes a bad step or name: at once,
    naming it, and nothing is left.
    """
    run_together(
        """
        for number, more in enumerate([{"step": -1}, {"item": "a/b"}, {"metadata": {1}}]):
            path = f"{root}/{number}"
            error = goes(lambda: save(path, state(1), **(more if index == 1 else {})), HoldfastError)
            assert error.process == 1, error
            save(path, state(2))
            assert same(load(path, state(0)), 2)
        """,
        2,
        tmp_path,
    )
