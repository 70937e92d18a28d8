"""One CheckpointManager in each process of a job: saves, failures and decisions that all share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpointing import run_together
from tests.support.paths import program


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
        program("group_saves_four_processes_save_restore"),
        4,
        tmp_path / "run",
        devices=2,
    )
    assert {name.split("/")[0] for name in files(tmp_path / "run")} == {"10"}
    run_together(
        program("group_saves_four_processes_save_restore_2"),
        2,
        tmp_path / "run",
    )


def test_the_failure_of_one_fails_on_all(tmp_path: Path) -> None:
    """A process whose disk fails, and one whose tree differs, is named on every process; old steps
    stay and the next save succeeds.
    """
    outputs = run_together(
        program("group_saves_failure_one_process_error"),
        4,
        tmp_path,
    )
    assert all("caught SaveFailed" in output for output in outputs)
    assert {name.split("/")[0] for name in files(tmp_path)} == {"1", "2"}, files(tmp_path)


def test_misses_are_alike_on_all(tmp_path: Path) -> None:
    """With on_save_error="warn" a full disk of one is a miss on all, as often as is allowed; a
    mistake of one is raised by all.
    """
    run_together(program("group_saves_misses"), 3, tmp_path)
    assert {name.split("/")[0] for name in files(tmp_path)} == {"4", "7"}


@pytest.mark.slow
def test_a_process_that_never_comes_is_named(tmp_path: Path) -> None:
    """A save that one process does not join fails on the others after the time given, names it, and
    leaves nothing.
    """
    run_together(
        program("group_saves_process_never_comes_named"),
        3,
        tmp_path,
    )
    assert {name.split("/")[0] for name in files(tmp_path)} == {"1"}


def test_an_opening_that_fails_fails_on_all(tmp_path: Path) -> None:
    """The primary's trouble with the root is every process's error."""
    (tmp_path / "file").write_text("")
    outputs = run_together(program("group_saves_opening_fails_fails_all"), 2, tmp_path / "file")
    assert all("cannot write a checkpoint in" in output for output in outputs)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["clock", "goodput", "load"])
def test_a_clock_and_a_load_are_agreed_on(tmp_path: Path, which: str) -> None:
    """EveryNSeconds, SaveForGoodput and on_busy="skip" save the same steps on all processes, though
    their loops run at different moments.
    """
    outputs = run_together(
        program("group_saves_clock_load_agreed"),
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
        program("group_saves_busy_primary_skips_for"),
        2,
        tmp_path,
    )
    assert len({output.splitlines()[-1] for output in outputs}) == 1


@pytest.mark.slow
def test_a_preempted_job_saves_one_step_everywhere(tmp_path: Path) -> None:
    """SIGTERM to one process: all save the same step, once, and stop at it; a policy of none or
    steps needs not name preemption.
    """
    outputs = run_together(
        program("group_saves_preempted_job_saves_one"),
        3,
        tmp_path,
    )
    assert len({output.split("stopped at")[1].split()[0] for output in outputs}) == 1, outputs


def test_a_group_of_some_saves_what_is_theirs(tmp_path: Path) -> None:
    """Processes 0 and 2 of three save an array on their own devices as a group of two; the other
    takes no part.
    """
    run_together(
        program("group_saves_group_some_processes_saves"),
        3,
        tmp_path / "run",
    )
    assert len([name for name in files(tmp_path / "run") if name.endswith(".safetensors")]) == 2


@pytest.mark.slow
def test_the_next_save_is_numbered_alike(tmp_path: Path) -> None:
    """Whatever `save` raises on one process (a bad step, a bad name, an interrupt), the others fail
    at once and the next save is good.
    """
    run_together(
        program("group_saves_next_save_has_same"),
        3,
        tmp_path,
    )


def test_unknown_steps_are_learnt_with_the_next_save(tmp_path: Path) -> None:
    """A process that was not told of a commit, and could not read its record either, lists it again
    after the next save.
    """
    run_together(
        program("group_saves_processes_know_other_steps"),
        2,
        tmp_path,
    )


@pytest.mark.slow
def test_a_mistake_in_a_single_save_is_known(tmp_path: Path) -> None:
    """One-shot `save` of a group ends alike where one process passes a bad step or name: at once,
    naming it, and nothing is left.
    """
    run_together(
        program("group_saves_mistake_one_process_single"),
        2,
        tmp_path,
    )
