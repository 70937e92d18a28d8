"""Going back: what a branch leaves behind, who sees that, and what may be deleted then."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from holdfast.checkpoint import (
    CheckpointManager,
    Corrupt,
    EveryNSteps,
    KeepAll,
    KeepAnyOf,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepPolicy,
    Local,
    Options,
    StepExists,
    StepNotFound,
    StepOutOfOrder,
    convert,
    iterate_steps,
    load,
    save,
    structure,
    wait_for_new_step,
)
from holdfast.checkpoint.format.step_folders import list_steps
from holdfast.checkpoint.steps.holds import add_hold
from holdfast.checkpoint.steps.left_behind import LEFT, Mark, goes_on_from, read_marks
from holdfast.checkpoint.storage.path import open_storage
from holdfast.checkpoint.storage.tombstone import sealed
from holdfast.cli.entry import main
from holdfast.compat.orbax import CheckpointManager as Facade
from holdfast.compat.orbax import CheckpointManagerOptions
from holdfast.compat.orbax import args as ocp_args
from tests.support.checkpointing import at_once, groups


def value(number: int) -> dict[str, Any]:
    return {"w": np.full(3, float(number))}


def number_of(tree: Any) -> int:
    return int(tree["w"][0])


def saved(root: Any, *steps: int, **words: Any) -> None:
    """Saves steps in a manager of their own, each with its number as its value."""
    with CheckpointManager(root, **words) as manager:
        for step in steps:
            manager.save(step, value(step)).wait()


def gone_back(root: Any, base: int, *steps: int, **words: Any) -> CheckpointManager:
    """Returns a manager that has restored `base`, and saved steps with -1 as their values."""
    manager = CheckpointManager(root, **words)
    manager.restore(base)
    for step in steps:
        manager.save(step, value(-1)).wait()
    return manager


@pytest.fixture(params=["folder", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "run") if request.param == "folder" else f"memory://{tmp_path.name}/run"


def test_new_saves_stay_and_the_next_run_goes_on_from_them(root: str) -> None:
    """With KeepLast(2), steps 200 and 300, and a job that went back to 200."""
    policy = KeepLast(2)
    saved(root, 200, 300, keep_policy=policy)
    with gone_back(root, 200, 210, 220, 230, keep_policy=policy) as manager:
        assert manager.all_steps() == [220, 230, 300]
        assert manager.left_steps() == [300]
        assert manager.latest_step() == 230
        assert number_of(manager.restore(300)) == 300
    with CheckpointManager(root, keep_policy=policy) as manager:
        assert manager.latest_step() == 230
        assert number_of(manager.restore()) == -1
        assert manager.left_steps() == [300]
        manager.save(300, value(7)).wait()
        assert manager.left_steps() == []
        assert manager.all_steps() == [230, 300]
        assert number_of(manager.restore()) == 7


def test_who_goes_back_is_told_what_is_left(root: str, caplog: pytest.LogCaptureFixture) -> None:
    """Once, by the first save of the branch, where there is anything to leave."""
    saved(root, 100, 200, 300, 400)
    with gone_back(root, 200, 210, 220):
        assert [record.getMessage() for record in caplog.records] == [
            f"{root}: saves go on from step 200, and leave behind what is above it, up to step 400"
            " (2 in all): each is restored by its number alone, until a save of that number or a"
            " keep policy takes it"
        ]


def test_who_else_looks_does_not_take_what_was_left(root: str, tmp_path: Path) -> None:
    """A reader, `load`, `structure`, `verify`, `convert`, `ls`, and Orbax's face."""
    saved(root, 200, 300)
    gone_back(root, 200, 210).close()
    with CheckpointManager(root, options=Options(read_only=True)) as manager:
        assert manager.latest_step() == 210
        assert number_of(manager.restore(fallback=True)) == -1
        assert manager.left_steps() == [300]
    assert number_of(load(root)) == -1
    assert structure(root).step == 210
    converted = convert(root, tmp_path / "converted")
    assert list_steps(open_storage(tmp_path / "converted")) == [210], converted
    listed = CliRunner().invoke(main, ["ls", root, "--json"])
    rows = {row["step"]: row for row in json.loads(listed.stdout)["steps"]}
    assert [rows[step]["state"] for step in (200, 210, 300)] == ["whole", "whole", "left behind"]
    assert [rows[step]["left_behind"] for step in (200, 210, 300)] == [False, False, True]
    if "://" not in root:
        options = CheckpointManagerOptions()
        with Facade(root, options=options) as facade:
            assert facade.latest_step() == 210
            assert facade.save(220, args=ocp_args.StandardSave(value(1)))
            assert facade.latest_step() == 220


def test_the_base_is_the_highest_that_was_restored_below(root: str) -> None:
    """A lower one, and a higher one, are restored for a look."""
    saved(root, 100, 200, 300, 400)
    manager = CheckpointManager(root)
    for step in (400, 200, 100):
        manager.restore(step)
    with manager:
        manager.save(210, value(-1)).wait()
        assert manager.left_steps() == [300, 400]
        assert manager.latest_step() == 210


def test_what_is_restored_for_a_look_changes_nothing(root: str) -> None:
    """Where saves above the newest step follow; nor may later ones come out of order for it."""
    saved(root, 200, 300)
    with gone_back(root, 200, 310, 320) as manager:
        assert manager.left_steps() == []
        assert manager.latest_step() == 320
        with pytest.raises(StepOutOfOrder):
            manager.save(315, value(0))
    assert read_marks(open_storage(root)) == []


def test_a_run_from_scratch_in_an_old_folder_is_refused(root: str) -> None:
    """Before a byte is written, and saying what to do; the remedies work."""
    saved(root, 200, 300)
    storage = open_storage(root)
    with CheckpointManager(root) as manager:
        before = {entry.name for entry in storage.list("", recursive=True)}
        with pytest.raises(StepOutOfOrder) as raised:
            manager.save(10, value(1))
        assert {entry.name for entry in storage.list("", recursive=True)} == before
        error = raised.value
        assert (error.step, error.newest, error.path) == (10, 300, storage.root)
        told = str(error)
        for part in ("step 10", "step 300", "restore", "another folder", "delete", "out_of_order"):
            assert part in told
        with pytest.raises(StepExists):
            manager.save(300, value(1))
        manager.delete(300)
        manager.save(250, value(1)).wait()
        assert manager.latest_step() == 250
    with CheckpointManager(root, options=Options(out_of_order=True)) as manager:
        manager.save(10, value(1)).wait()
        assert manager.all_steps() == [10, 200, 250]
        # Steps without an order are no line: nothing is left.
        manager.restore(200)
        manager.save(210, value(1)).wait()
        assert manager.left_steps() == []
        with pytest.raises(StepExists):
            manager.save(200, value(1))


def test_overwriting_begins_nothing(root: str) -> None:
    """It replaces one step, also after a lower one was restored; the branch may still begin."""
    saved(root, 100, 200, 300)
    with CheckpointManager(root) as manager:
        manager.restore(100)
        manager.save(200, value(-2), overwrite=True).wait()
        assert manager.left_steps() == []
        assert manager.latest_step() == 300
        assert number_of(manager.restore(200)) == -2


def test_a_number_that_is_saved_again_is_no_longer_left(root: str) -> None:
    """Also the newest itself, with the first save of the branch."""
    saved(root, 200, 250, 300)
    with gone_back(root, 200, 300) as manager:
        assert manager.left_steps() == [250]
        assert number_of(manager.restore()) == -1
    with CheckpointManager(root) as manager:
        assert manager.left_steps() == [250]
        assert manager.latest_step() == 300


def test_a_branch_of_a_branch(root: str) -> None:
    """The second leaves what the first has saved, and the first one's left steps stay left."""
    saved(root, 100, 200, 300)
    with gone_back(root, 200, 210, 220) as manager:
        manager.restore(100)
        manager.save(110, value(-2)).wait()
        assert manager.left_steps() == [200, 210, 220, 300]
        assert manager.latest_step() == 110
    with CheckpointManager(root) as manager:
        assert manager.left_steps() == [200, 210, 220, 300]
        # What was left may be gone back to.
        manager.restore(220)
        manager.save(230, value(-3)).wait()
        assert manager.latest_step() == 230


def _steps_after(policy: KeepPolicy, root: Path, *steps: int) -> list[int]:
    losses = {200: 0.5, 290: 0.3, 300: 0.1}
    with CheckpointManager(root, keep_policy=KeepAll()) as manager:
        for step, loss in losses.items():
            manager.save(step, value(step), metrics={"loss": loss}).wait()
    with CheckpointManager(root, keep_policy=policy) as manager:
        manager.restore(200)
        for step in steps:
            manager.save(step, value(-1), metrics={"loss": 1.0}).wait()
        manager.wait_until_finished()
        return manager.all_steps()


@pytest.mark.parametrize(
    ("policy", "steps", "stay"),
    [
        (KeepLast(1), (210,), [210, 290, 300]),
        (KeepLast(1), (210, 290), [290, 300]),
        (KeepLast(2), (210, 295), [210, 295, 300]),
        (KeepLast(3), (210, 295, 301), [210, 295, 301]),
        (KeepBest(1, "loss"), (210,), [200, 210, 290, 300]),
        (KeepBest(1, "loss"), (210, 301), [200, 301]),
        (KeepAnyOf(KeepLast(2), KeepEvery(100)), (210, 301), [200, 210, 301]),
        (KeepAll(), (210, 301), [200, 210, 290, 300, 301]),
        (KeepAnyOf(KeepLast(1), KeepAll()), (210, 301), [200, 210, 290, 300, 301]),
    ],
    ids=str,
)
def test_what_was_left_stays_until_it_is_overtaken(
    policy: KeepPolicy, steps: tuple[int, ...], stay: list[int], tmp_path: Path
) -> None:
    """Then it goes first, and counts for no policy that lets something go."""
    assert _steps_after(policy, tmp_path, *steps) == stay


def test_a_hold_keeps_what_was_left(tmp_path: Path) -> None:
    """A reader never loses the step that it reads."""
    saved(tmp_path, 200, 300)
    add_hold(open_storage(tmp_path), 300, 3600)
    with gone_back(tmp_path, 200, 210, 310, keep_policy=KeepLast(1)) as manager:
        assert manager.all_steps() == [300, 310]


def test_prune_lets_go_first_what_was_left(tmp_path: Path) -> None:
    """And keeps it until then."""
    saved(tmp_path, 200, 290, 300)
    gone_back(tmp_path, 200, 210, 295).close()
    result = CliRunner().invoke(main, ["prune", str(tmp_path), "--keep", "last:2", "--json"])
    assert json.loads(result.stdout)["deleted"] == [290, 200]
    assert list_steps(open_storage(tmp_path)) == [210, 295, 300]


# --- Copies


def test_a_mark_goes_with_the_root(tmp_path: Path) -> None:
    """By `cp -r`, by a move, and by `holdfast cp`; it holds for no other save of that number."""
    first = tmp_path / "first"
    saved(first, 200, 300)
    gone_back(first, 200, 210).close()
    shutil.copytree(first, tmp_path / "copied")
    os.rename(first, tmp_path / "moved")
    target = f"memory://{tmp_path.name}/cp"
    assert CliRunner().invoke(main, ["cp", str(tmp_path / "moved"), target]).exit_code == 0
    for each in (tmp_path / "copied", tmp_path / "moved", target):
        with CheckpointManager(each) as manager:
            assert (manager.latest_step(), manager.left_steps()) == (210, [300]), each
    shutil.rmtree(tmp_path / "moved" / "300")
    save(tmp_path / "moved" / "300", value(9), step=300)
    with CheckpointManager(tmp_path / "moved") as manager:
        assert (manager.latest_step(), manager.left_steps()) == (300, [])


def test_one_step_that_is_copied_by_its_number_was_not_left_there(tmp_path: Path) -> None:
    """The mark stays with the root that has the branch."""
    saved(tmp_path / "run", 200, 300)
    gone_back(tmp_path / "run", 200, 210).close()
    arguments = ["cp", str(tmp_path / "run"), str(tmp_path / "one"), "--step", "300"]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    assert number_of(load(tmp_path / "one")) == 300


def test_a_mirror_that_is_copied_step_by_step_has_the_marks(tmp_path: Path) -> None:
    """A step that was copied before the job went back is not the newest once a later one comes."""
    saved(tmp_path / "run", 200, 300)
    copy = ["cp", str(tmp_path / "run"), str(tmp_path / "mirror"), "--step"]
    assert CliRunner().invoke(main, [*copy, "300"]).exit_code == 0
    gone_back(tmp_path / "run", 200, 210).close()
    assert CliRunner().invoke(main, [*copy, "210"]).exit_code == 0
    with CheckpointManager(tmp_path / "mirror") as manager:
        assert (manager.latest_step(), manager.left_steps()) == (210, [300])


def test_conversion_of_all_steps_leaves_out_what_was_left(tmp_path: Path) -> None:
    """In the other root it would be the newest."""
    saved(tmp_path / "run", 200, 300)
    gone_back(tmp_path / "run", 200, 210).close()
    target = tmp_path / "orbax"
    words = ["convert", str(tmp_path / "run"), str(target), "--all", "--to", "orbax"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0
    assert "step 300 was left behind" in result.stderr
    assert sorted(path.name for path in target.iterdir() if path.name.isdigit()) == ["200", "210"]


def test_steps_of_orbax_are_left_behind_too(tmp_path: Path) -> None:
    """A job that came from Orbax goes back as any other."""
    saved(tmp_path / "ours", 200, 300)
    words = ["convert", str(tmp_path / "ours"), str(tmp_path / "run"), "--all", "--to", "orbax"]
    assert CliRunner().invoke(main, words).exit_code == 0
    with gone_back(tmp_path / "run", 200, 210) as manager:
        assert (manager.latest_step(), manager.left_steps()) == (210, [300])
    assert number_of(load(tmp_path / "run")) == -1
    with CheckpointManager(tmp_path / "run") as manager:
        assert (manager.latest_step(), manager.left_steps()) == (210, [300])


# --- Crashes


def _break(monkeypatch: pytest.MonkeyPatch, storage: Any, fails: Callable[[str], bool]) -> None:
    """Has commits of a store fail whose names say so, before anything is written."""
    commit = type(storage).commit

    def broken(self: Any, name: str, *arguments: Any, **words: Any) -> None:
        if fails(name):
            raise OSError(5, "broken on purpose", name)
        commit(self, name, *arguments, **words)

    monkeypatch.setattr(type(storage), "commit", broken)


@pytest.mark.parametrize("fails", ["mark", "record"])
def test_a_job_that_ends_before_the_first_commit(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the mark nothing has happened. After it the next run goes on from the base: the job
    had gone back. Nothing is lost either way.
    """
    saved(tmp_path, 200, 300)
    with CheckpointManager(tmp_path, keep_policy=KeepLast(1)) as manager:
        manager.restore(200)
        with monkeypatch.context() as patch:
            _break(
                patch,
                manager._root.storage,
                lambda name: name.startswith(LEFT) == (fails == "mark"),
            )
            handle = manager.save(210, value(-1))
            with pytest.raises(Exception, match="broken on purpose"):
                handle.wait()
    newest = 300 if fails == "mark" else 200
    with CheckpointManager(tmp_path, keep_policy=KeepLast(1)) as manager:
        assert manager.all_steps() == [200, 300]
        assert manager.latest_step() == newest
        assert number_of(manager.restore()) == newest
        if newest == 200:
            assert number_of(load(tmp_path)) == 200
            manager.save(210, value(-1)).wait()
            assert manager.all_steps() == [210, 300]


def _leave_and_fail(manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes back to 200; the first save of the branch marks what it leaves, and then fails."""
    manager.restore(200)
    with monkeypatch.context() as patch:
        _break(patch, manager._root.storage, lambda name: not name.startswith(LEFT))
        with pytest.raises(Exception, match="broken on purpose"):
            manager.save(210, value(-1)).wait()


def test_a_save_that_failed_after_its_mark_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same manager, and above or at the number that failed."""
    saved(tmp_path, 200, 300)
    with CheckpointManager(tmp_path) as manager:
        _leave_and_fail(manager, monkeypatch)
        manager.save(220, value(-2)).wait()
        assert (manager.latest_step(), manager.left_steps()) == (220, [300])
        manager.save(230, value(-3)).wait()
        with pytest.raises(StepOutOfOrder):
            manager.save(225, value(0))


def test_a_damaged_mark_is_an_error_that_names_it(tmp_path: Path) -> None:
    """What it said is not known: nothing is taken for the newest in silence."""
    saved(tmp_path, 200, 300)
    gone_back(tmp_path, 200, 210).close()
    (mark,) = (tmp_path / LEFT).iterdir()
    flipped = bytearray(mark.read_bytes())
    flipped[20] ^= 1
    for data in (sealed(b'{"steps":' + b"[" * 9999), flipped):
        mark.write_bytes(data)
        with pytest.raises(Corrupt, match=mark.name):
            load(tmp_path)
    with pytest.raises(Corrupt, match="delete it"):
        CheckpointManager(tmp_path)
    mark.unlink()
    assert number_of(load(tmp_path)) == 300


def test_nothing_but_what_was_left(tmp_path: Path) -> None:
    """Where the base was deleted too: the error names what there is."""
    saved(tmp_path, 200, 300)
    with gone_back(tmp_path, 200, 210) as manager:
        manager.delete(210)
        manager.delete(200)
        with pytest.raises(StepNotFound, match="300"):
            manager.restore()
        assert manager.latest_step() is None
    with pytest.raises(StepNotFound, match="300"):
        load(tmp_path)
    with CheckpointManager(tmp_path) as manager:
        assert number_of(manager.restore(300)) == 300
        manager.save(10, value(1)).wait()
        assert manager.latest_step() == 10


# --- Others


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Any]]:
    with groups(2) as members:
        yield list(members)


def test_all_processes_know_what_was_left(pair: list[Any], tmp_path: Path) -> None:
    """By the save that leaves it, with the launcher's view, and from the next opening on; what one
    refuses all refuse.
    """

    def go_back(group: Any) -> Any:
        with CheckpointManager(tmp_path, group=group, keep_policy=KeepLast(2)) as manager:
            for step in (200, 300):
                manager.save(step, value(step)).wait()
            manager.restore(200)
            manager.save(210, value(-1)).wait()
            told = [(manager.latest_step(), manager.left_steps(), manager.all_steps())]
            try:
                manager.save(205, value(-1))
            except StepOutOfOrder as error:
                told.append(("refused", error.newest))
            manager.save(300, value(-2)).wait()
            told.append((manager.latest_step(), manager.left_steps(), manager.all_steps()))
        return told

    found = at_once([lambda group=group: go_back(group) for group in pair])
    assert found[0] == found[1]
    assert found[0] == [(210, [300], [200, 210, 300]), ("refused", 210), (300, [], [210, 300])]


def test_another_manager_sees_the_branch(root: str) -> None:
    """One that was open before it, alone: each call looks at the store."""
    saved(root, 200, 300)
    with CheckpointManager(root, options=Options(read_only=True)) as reader:
        assert reader.latest_step() == 300
        gone_back(root, 200, 210).close()
        assert reader.latest_step() == 210
        assert number_of(reader.restore()) == -1
        reader.reload()
        assert reader.left_steps() == [300]


def test_steps_that_others_saved_are_left_too(root: str) -> None:
    """What is in the store by then, also what this manager does not know."""
    saved(root, 200)
    with CheckpointManager(root) as manager:
        saved(root, 300)
        manager.restore(200)
        manager.save(210, value(-1)).wait()
        assert manager.latest_step() == 210
    with CheckpointManager(root) as manager:
        assert (manager.latest_step(), manager.left_steps()) == (210, [300])


def test_watchers_get_the_steps_of_the_branch(root: str) -> None:
    """By their commits: also those with lower numbers, and a number that comes again."""
    saved(root, 200, 300)
    assert wait_for_new_step(root, 300, timeout_s=0) is None
    seen = iterate_steps(root, timeout_s=0.5)
    assert next(seen) == 300
    with gone_back(root, 200, 210) as manager:
        assert wait_for_new_step(root, 300, timeout_s=0) == 210
        assert wait_for_new_step(root, 210, timeout_s=0) is None
        assert next(seen) == 210
        manager.save(300, value(-2)).wait()
        assert next(seen) == 300
        assert wait_for_new_step(root, 210, timeout_s=0) == 300
    assert list(seen) == []


def test_watchers_of_every_step_get_each_of_the_branch(root: str) -> None:
    """Once, ascending, and nothing that was left."""
    saved(root, 100, 200, 300)
    seen = iterate_steps(root, timeout_s=0.5, skip_to_newest=False)
    assert [next(seen) for _ in range(3)] == [100, 200, 300]
    gone_back(root, 200, 210, 220).close()
    gone_back(root, 100, 105, 110).close()
    assert list(seen) == [105, 110]
    late = iterate_steps(root, after=300, timeout_s=0, skip_to_newest=False)
    assert list(late) == [105, 110]


def test_a_mark_without_a_step_shows_watchers_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the branch has one, there is nothing new."""
    saved(tmp_path, 200, 300)
    with CheckpointManager(tmp_path) as manager:
        _leave_and_fail(manager, monkeypatch)
        assert wait_for_new_step(tmp_path, 300, timeout_s=0) is None
        assert wait_for_new_step(tmp_path, 200, timeout_s=0) is None
        manager.save(210, value(-1)).wait()


def test_where_a_step_goes_on_from() -> None:
    """Through branches of branches, by the ids of saves where they are known."""
    marks = [
        Mark("c1", 200, "b", {300: "x", 400: "y"}),
        Mark("c2", 100, "a", {200: "b", 210: "c1"}),
        Mark("c3", 250, "z", {300: "w"}),
    ]
    assert goes_on_from([], 300, "") == 300
    assert goes_on_from(marks, 300, "other") == 300
    assert goes_on_from(marks, 300, "w") == 250
    assert goes_on_from(marks, 300, "x") == 100
    assert goes_on_from(marks, 300, "") == 100
    assert goes_on_from([Mark("c", 300, "x", {300: "x"})], 300, "x") == 300  # hostile


# --- Hosts


def _local(tmp_path: Path) -> dict[str, Any]:
    local = Local(tmp_path / "host", save_policy=EveryNSteps(1), keep=2, strict=True)
    return {"save_policy": EveryNSteps(100), "local": local}


def test_local_steps_go_by_the_same_order(tmp_path: Path) -> None:
    """A local save may begin the branch; what the store has above its base is left."""
    root = tmp_path / "run"
    with CheckpointManager(root, **_local(tmp_path)) as manager:
        for step in (200, 300, 305):
            manager.save(step, value(step)).wait()
        manager.restore(200)
        manager.save(205, value(-1)).wait()
        assert manager.local_steps() == [205]
        assert (manager.latest_step(), manager.left_steps()) == (205, [300])
        with pytest.raises(StepOutOfOrder):
            manager.save(203, value(0))
    with CheckpointManager(root, **_local(tmp_path)) as manager:
        assert (manager.latest_step(), manager.left_steps()) == (205, [300])
        assert number_of(manager.restore()) == -1
        manager.save(206, value(-2)).wait()
        manager.save(300, value(-3)).wait()
        assert (manager.latest_step(), manager.left_steps()) == (300, [])


def test_a_local_step_of_a_number_that_was_left(tmp_path: Path) -> None:
    """It is there beside what was left, and comes back by its number."""
    root = tmp_path / "run"
    with CheckpointManager(root) as manager:
        for step in (200, 301):
            manager.save(step, value(step)).wait()
    with CheckpointManager(root, **_local(tmp_path)) as manager:
        manager.restore(200)
        manager.save(301, value(-1)).wait()
        assert manager.local_steps() == [301]
        assert number_of(manager.restore(301)) == -1
        assert number_of(manager.restore()) == -1


def test_a_look_at_an_older_step_keeps_the_local_ones(tmp_path: Path) -> None:
    """The branch of the local tier goes on from the newest then, as that of the store does."""
    with CheckpointManager(tmp_path / "run", **_local(tmp_path)) as manager:
        for step in (200, 300, 305):
            manager.save(step, value(step)).wait()
        manager.restore(200)
        manager.save(306, value(-1)).wait()
        assert manager.local_steps() == [305, 306]


def test_a_save_under_way_is_left_too(tmp_path: Path) -> None:
    """One that was begun before the restore is waited for: it is known, and marked."""
    saved(tmp_path, 200)
    begun = threading.Event()
    go_on = threading.Event()

    def wait(progress: Any) -> None:
        begun.set()
        assert go_on.wait(20)

    options = Options(progress=wait)
    with CheckpointManager(tmp_path, options=options) as manager:
        manager.save(300, value(300))
        assert begun.wait(20)
        manager.restore(200)
        go_on.set()
        manager.save(210, value(-1)).wait()
        assert (manager.latest_step(), manager.left_steps()) == (210, [300])


def test_a_number_that_was_left_is_none_that_is_there(root: str) -> None:
    """Out of order it is refused as any other, and the sentence names what to do."""
    saved(root, 200, 300, 400)
    with gone_back(root, 200, 350) as manager:
        with pytest.raises(StepOutOfOrder, match="step 300"):
            manager.save(300, value(0))
        with pytest.raises(StepExists):
            manager.save(350, value(0))
