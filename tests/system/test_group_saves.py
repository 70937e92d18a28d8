"""One CheckpointManager in each process of a job: saves, failures and decisions that all share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpointing import run_in_turn, run_together
from tests.support.paths import program


def files(root: Path) -> list[str]:
    return sorted(
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.is_file() and ".holdfast" not in path.parts
    )


# The fast programs come in turn in the processes of three jobs: of four, three and two.


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the roots, one a program."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def of_four(runs: Path) -> dict[str, list[str]]:
    programs = [
        ("group_saves_four_processes_save_restore", runs / "run"),
        ("group_saves_failure_one_process_error", runs / "failure"),
    ]
    return run_in_turn(4, programs, devices=2)


@pytest.fixture(scope="module")
def of_three(runs: Path) -> dict[str, list[str]]:
    programs = [
        ("group_saves_misses", runs / "misses"),
        ("group_saves_group_some_processes_saves", runs / "some"),
    ]
    return run_in_turn(3, programs)


@pytest.fixture(scope="module")
def of_two(runs: Path, of_four: dict[str, list[str]]) -> dict[str, list[str]]:
    (runs / "file").write_text("")
    assert {name.split("/")[0] for name in files(runs / "run")} == {"10"}
    programs = [
        ("group_saves_four_processes_save_restore_2", runs / "run"),
        ("group_saves_opening_fails_fails_all", runs / "file"),
        ("group_saves_busy_primary_skips_for", runs / "busy"),
        ("group_saves_processes_know_other_steps", runs / "unknown"),
        ("group_saves_last_step_twice", runs / "twice"),
    ]
    return run_in_turn(2, programs)


@pytest.mark.usefixtures("of_four", "of_two")
def test_four_processes_save_and_restore_as_one(runs: Path) -> None:
    """Four processes save a sharded tree, list alike, restore it, and two restore it again onto
    their own mesh and go on.
    """
    assert {name.split("/")[0] for name in files(runs / "run")} == {"10", "12"}


def test_the_failure_of_one_fails_on_all(runs: Path, of_four: dict[str, list[str]]) -> None:
    """A process whose disk fails, and one whose tree differs, is named on every process; old steps
    stay and the next save succeeds.
    """
    outputs = of_four["group_saves_failure_one_process_error"]
    assert len(outputs) == 4 and all("caught SaveFailed" in output for output in outputs)
    steps = {name.split("/")[0] for name in files(runs / "failure")}
    assert steps == {"1", "2"}, files(runs / "failure")


@pytest.mark.usefixtures("of_three")
def test_misses_are_alike_on_all(runs: Path) -> None:
    """With on_save_error="warn" a full disk of one is a miss on all, as often as is allowed; a
    mistake of one is raised by all.
    """
    assert {name.split("/")[0] for name in files(runs / "misses")} == {"4", "7"}


@pytest.mark.usefixtures("of_three")
def test_a_group_of_some_saves_what_is_theirs(runs: Path) -> None:
    """Processes 0 and 2 of three save an array on their own devices as a group of two; the other
    takes no part.
    """
    assert len([name for name in files(runs / "some") if name.endswith(".safetensors")]) == 2


def test_an_opening_that_fails_fails_on_all(of_two: dict[str, list[str]]) -> None:
    """The primary's trouble with the root is every process's error."""
    outputs = of_two["group_saves_opening_fails_fails_all"]
    assert len(outputs) == 2
    assert all("cannot write a checkpoint in" in output for output in outputs)


def test_a_busy_primary_skips_for_all(of_two: dict[str, list[str]]) -> None:
    """With on_busy="skip" no process of two blocks, and none saves, while the primary's save is in
    flight; then both save the same step.
    """
    outputs = of_two["group_saves_busy_primary_skips_for"]
    (saved,) = {line for output in outputs for line in output.splitlines() if "saved" in line}
    assert saved.startswith("saved [")


@pytest.mark.usefixtures("of_two")
def test_the_last_step_once_more_after_the_loop(runs: Path) -> None:
    """No policy wants what the job has just saved, or restored: on no process."""
    assert {name.split("/")[0] for name in files(runs / "twice")} == {"2", "4", "6"}


def test_unknown_steps_are_learnt_with_the_next_save(
    runs: Path, of_two: dict[str, list[str]]
) -> None:
    """A process that was not told of a commit, and could not read its record either, lists it again
    after the next save.
    """
    outputs = of_two["group_saves_processes_know_other_steps"]
    assert "caught CommitUnknown" in outputs[1] and "caught" not in outputs[0]
    assert {name.split("/")[0] for name in files(runs / "unknown")} == {"1", "2", "3"}


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


@pytest.mark.slow
def test_a_job_that_went_back_is_preempted(tmp_path: Path) -> None:
    """At a step that all had asked about before they went back, and by the clock it saves there."""
    outputs = run_together(program("group_saves_preempted_after_going_back"), 3, tmp_path)
    assert len({output.split("saved [")[1] for output in outputs}) == 1, outputs


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
