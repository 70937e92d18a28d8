"""Restores by several processes end alike on all of them: one set of steps, one answer, one typed
error that says who failed.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.support.checkpointing import run_together

# `damage(step, process)` flips the last byte of what that process wrote of a step. `Counted` counts
# the messages of a group.
START = """
import glob
from holdfast.multihost import Solo, default_group, sync_global_processes

def damage(step, process):
    (name,) = glob.glob(f"{root}/{step}/state/{process:05d}-*.safetensors")
    data = open(name, "rb").read()
    with open(name, "r+b") as file:
        file.seek(-1, 2)
        file.write(bytes([data[-1] ^ 1]))
    return name

class Counted:
    def __init__(self, group):
        self.group, self.index, self.count, self.calls = group, group.index, group.count, []
    def gather(self, *args, **options):
        self.calls.append(("gather", args))
        return self.group.gather(*args, **options)
    def broadcast(self, *args, **options):
        self.calls.append(("broadcast", args))
        return self.group.broadcast(*args, **options)
    def report(self, **progress):
        pass

def shards(step):
    # Only what is sharded over the processes: each reads what it wrote itself, and nothing of the others.
    return {"w": state(step)["w"]}
"""


def run(script: str, count: int, root: Path, *arguments: object) -> None:
    run_together(START + textwrap.dedent(script), count, root, *arguments)


@pytest.mark.parametrize("read_once", ["", "read_once"])
def test_what_one_process_cannot_read_is_an_error_on_all(tmp_path: Path, read_once: str) -> None:
    """One damaged shard is Corrupt on every process, naming the one that found it, before any
    collective; the next restore is in step.
    """
    run(
        """
        once = bool(sys.argv[5])
        with CheckpointManager(root) as manager:
            for step in (1, 2):
                manager.save(step, shards(step) | {"r": state(step)["r"]})
            manager.wait_until_finished()
            if index == 0:
                damage(2, 1)
            sync_global_processes("damaged", timeout=30)
            like = shards(0) | {"r": state(0)["r"]}
            error = goes(lambda: manager.restore(2, like, read_once=once), Corrupt)
            assert error.process == 1 and "00001-00000" in error.file, (error, error.process, error.file)
            assert index == 1 or str(error).startswith("process 1: "), error
            got = manager.restore(1, like, read_once=once)
            assert np.array_equal(np.asarray(got["w"].addressable_shards[0].data), np.asarray(shards(1)["w"].addressable_shards[0].data))
            error = goes(lambda: manager.restore(like=like, read_once=once), Corrupt)
            assert error.process == 1
            got = manager.restore(like=like, read_once=once, fallback=True)
            assert float(got["r"].addressable_shards[0].data[0]) == 1
        """,
        3,
        tmp_path / "run",
        read_once,
    )


def test_a_mistake_of_one_process_is_an_error_on_all(tmp_path: Path) -> None:
    """Another tree, another step, an iterator that refuses its state, on one process alone: typed
    on all, fallback or not, and named.
    """
    run(
        """
        class Refusing:
            def get_state(self):
                return {"at": 1}
            def set_state(self, state):
                if index == 2:
                    raise RuntimeError("no such file in this shard")

        with CheckpointManager(root) as manager:
            for step in (1, 2):
                manager.save(step, items={"state": shards(step), "data": Refusing()})
            manager.wait_until_finished()
            like = shards(0)
            wrong = {"w": like["w"], "v": like["w"]} if index == 1 else like
            for fallback in (False, True):
                error = goes(lambda: manager.restore(2, wrong, fallback=fallback), TreeMismatch)
                assert error.process == 1 and error.leaf == "v", (error.process, error.leaf)
                kind = RuntimeError if index == 2 else CheckpointError
                error = goes(lambda: manager.restore(2, Refusing(), item="data", fallback=fallback), kind)
                assert "no such file in this shard" in str(error) and (index == 2 or error.process == 2), error
            error = goes(lambda: manager.restore(1 if index == 1 else 2, like), CheckpointError)
            assert error.process == 1 and "step 1" in str(error) and "step 2" in str(error), error
            assert int(np.asarray(manager.restore(2, like)["w"].addressable_shards[0].data)[0, 0]) == 2 + (index << 10)
        """,
        3,
        tmp_path / "run",
    )


def test_the_agreement_is_one_small_message_of_each_process(tmp_path: Path) -> None:
    """A restore of a given step costs one gather and one broadcast, of fewer than 200 bytes a
    process; read_once one more of each.
    """
    run(
        """
        group = Counted(default_group())
        with CheckpointManager(root, group=group) as manager:
            manager.save(1, shards(1))
            manager.wait_until_finished()
            for read_once in (False, True):
                group.calls.clear()
                manager.restore(1, shards(0), read_once=read_once)
                agreements = ["gather", "broadcast"] * (1 + read_once)
                assert [name for name, _ in group.calls] == ["broadcast", *agreements], group.calls  # the record comes first
                assert all(len(args[1] or b"") < 200 for _, args in group.calls[1:]), group.calls
        """,
        2,
        tmp_path / "run",
    )


def test_a_process_that_does_not_come_to_the_end_is_named(tmp_path: Path) -> None:
    """One process never restores: the others learn in the time given who is missing."""
    run(
        """
        with CheckpointManager(root, options=Options(restore_timeout_s=2)) as manager:
            manager.save(1, shards(1))
            manager.wait_until_finished()
            if index != 1:
                error = goes(lambda: manager.restore(1, shards(0)), BarrierTimeout)
                assert error.missing == (1,), error.missing
            sync_global_processes("end", timeout=60)
        """,
        3,
        tmp_path / "run",
    )


def test_steps_that_processes_know_differently(tmp_path: Path) -> None:
    """After a save of which one process did not hear, all restore the step that the primary lists;
    a step of its own choice is refused.
    """
    run(
        """
        with CheckpointManager(root) as manager:
            manager.save(1, shards(1))
            manager.wait_until_finished()
            manager.save(2, shards(2))
            manager.wait_until_finished()
            if index == 1:
                manager._state.index.remove([2])  # as after CommitUnknown: the record appeared later
                assert manager.latest_step() == 1
            for fallback in (False, True):
                got = manager.restore(like=shards(0), fallback=fallback)
                assert int(np.asarray(got["w"].addressable_shards[0].data)[0, 0]) == 2 + (index << 10)
            error = goes(lambda: manager.restore(manager.latest_step(), shards(0)), CheckpointError)
            assert error.process == 1, error
        """,
        2,
        tmp_path / "run",
    )


def test_a_listing_that_fails_at_the_primary_fails_on_all(tmp_path: Path) -> None:
    """The root cannot be listed any more: every process has the primary's error, at once."""
    run(
        """
        with CheckpointManager(root) as manager:
            manager.save(1, shards(1))
            manager.wait_until_finished()
            listing = manager._root.storage.list
            if index == 0:
                def list(folder, **options):
                    raise PermissionError(13, "Permission denied", root)
                manager._root.storage.list = list
            for fallback in (False, True):
                error = goes(lambda: manager.restore(like=shards(0), fallback=fallback), CheckpointError)
                assert "Permission denied" in str(error) and root in str(error), error
            manager._root.storage.list = listing
            manager.restore(like=shards(0))
        """,
        2,
        tmp_path / "run",
    )


def test_an_overwrite_in_between_is_not_mixed(tmp_path: Path) -> None:
    """A step is overwritten after one process has read it and before another does: StepGone on
    both, not an array of two saves.
    """
    run(
        """
        with CheckpointManager(root) as manager:
            manager.save(1, shards(1))
            manager.wait_until_finished()
        with CheckpointManager(root, options=Options(read_only=True)) as manager:
            if index == 1:
                sync_global_processes("read", timeout=60)
                save(f"{root}/1", {"w": np.zeros((2, 1 << 10), np.float32)}, step=1, overwrite=True, group=Solo())
            else:
                gather = manager._root.group.gather
                def late(*args, **options):
                    sync_global_processes("read", timeout=60)
                    manager._root.group.gather = gather
                    return gather(*args, **options)
                manager._root.group.gather = late
            error = goes(lambda: manager.restore(1, shards(0)), StepGone)
            assert "overwritten" in str(error), error
            assert float(manager.restore(1, shards(0), fallback=True)["w"].addressable_shards[0].data[0, 0]) == 0
        """,
        2,
        tmp_path / "run",
    )


def test_a_root_is_loaded_by_all_or_by_one_alone(tmp_path: Path) -> None:
    """A step is saved between two processes' loads of a root: with a group both have the primary's
    step, and alone it is refused.
    """
    run(
        """
        class SavingMeanwhile(Counted):
            # Once the primary's answer is known here, a newer step appears.
            def broadcast(self, *args, **options):
                answer = self.group.broadcast(*args, **options)
                if index == 1 and not os.path.exists(f"{root}/2"):
                    save(f"{root}/2", {"w": np.zeros((2, 1 << 10), np.float32)}, step=2, group=Solo())
                return answer

        with CheckpointManager(root) as manager:
            manager.save(1, shards(1))
        got = load(root, shards(0), group=SavingMeanwhile(default_group()))
        assert int(np.asarray(got["w"].addressable_shards[0].data)[0, 0]) == 1 + (index << 10)
        for like in (shards(0), SAVED):
            error = goes(lambda: load(root, like), ValueError)
            assert "group=" in str(error) and root in str(error), error
        for step in (1, 2):
            got = load(f"{root}/{step}", shards(0))
            assert int(np.asarray(got["w"].addressable_shards[0].data)[0, 0]) == (1 + (index << 10) if step == 1 else 0)
        assert load(root)["w"].shape == (2, 1 << 10)  # numpy, alone: any step is a whole one

        sync_global_processes("loaded", timeout=30)
        if index == 0:
            damage(1, 1)
        sync_global_processes("damaged", timeout=30)
        error = goes(lambda: load(f"{root}/1", shards(0), group=default_group()), Corrupt)
        assert error.process == 1, error
        error = goes(lambda: load(f"{root}/none", shards(0), group=default_group()), StepNotFound)
        assert "there is nothing at" in str(error), error
        """,
        2,
        tmp_path / "run",
    )
