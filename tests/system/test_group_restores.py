"""Restores by several processes end alike on all of them: one set of steps, one answer, one typed
error that says who failed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpointing import run_in_turn, run_together
from tests.support.paths import program

# `damage(step, process)` flips the last byte of what that process wrote of a step. `Counted` counts
# the messages of a group.


def run(script: Path, count: int, root: Path, *arguments: object) -> None:
    run_together(script, count, root, *arguments)


# The fast programs come in turn in the processes of two jobs.


@pytest.fixture(scope="module")
def of_three(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    roots = tmp_path_factory.mktemp("three")
    programs = [
        ("group_restores_what_one_process_cannot", roots / "once", "once"),
        ("group_restores_mistake_one_process_error", roots / "mistake"),
    ]
    return run_in_turn(3, programs)


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    roots = tmp_path_factory.mktemp("two")
    programs = [
        ("group_restores_agreement_one_small_message", roots / "agreement"),
        ("group_restores_overwrite_between_not_mixed", roots / "overwrite"),
        ("group_restores_root_loaded_by_all", roots / "loaded"),
    ]
    return run_in_turn(2, programs)


@pytest.mark.slow
def test_what_one_cannot_read_fails_on_all_each(tmp_path: Path) -> None:
    """As the next one, where each process reads for itself."""
    run(
        program("group_restores_what_one_process_cannot"),
        3,
        tmp_path / "run",
        "each",
    )


def test_what_one_cannot_read_fails_on_all(of_three: dict[str, list[str]]) -> None:
    """One damaged shard is Corrupt on every process, naming the one that found it, before any
    collective; the next restore is in step.
    """
    outputs = of_three["group_restores_what_one_process_cannot"]
    assert [output.count("caught Corrupt") for output in outputs] == [2, 2, 2]


def test_one_mistake_fails_on_all(of_three: dict[str, list[str]]) -> None:
    """Another tree, another step, an iterator that refuses its state, on one process alone: typed
    on all, fallback or not, and named.
    """
    outputs = of_three["group_restores_mistake_one_process_error"]
    assert [output.count("caught TreeMismatch") for output in outputs] == [4, 4, 4]


def test_the_agreement_is_one_small_message_each(of_two: dict[str, list[str]]) -> None:
    """A restore of a given step costs one gather and one broadcast, of fewer than 200 bytes a
    process; reading once takes two more of each.
    """
    assert len(of_two["group_restores_agreement_one_small_message"]) == 2


def test_an_overwrite_in_between_is_not_mixed(of_two: dict[str, list[str]]) -> None:
    """A step is overwritten after one process has read it and before another does: StepGone on
    both, not an array of two saves.
    """
    outputs = of_two["group_restores_overwrite_between_not_mixed"]
    assert [output.count("caught StepGone") for output in outputs] == [1, 1]


def test_a_root_is_loaded_by_all_or_one(of_two: dict[str, list[str]]) -> None:
    """A step is saved between two processes' loads of a root: with a group both have the primary's
    step, and alone it is refused.
    """
    outputs = of_two["group_restores_root_loaded_by_all"]
    assert [output.count("caught ValueError") for output in outputs] == [2, 2]


@pytest.mark.slow
def test_a_process_missing_at_the_end_is_named(tmp_path: Path) -> None:
    """One process never restores: the others learn in the time given who is missing."""
    run(
        program("group_restores_process_does_not_come"),
        3,
        tmp_path / "run",
    )


@pytest.mark.slow
def test_steps_that_processes_know_differently(tmp_path: Path) -> None:
    """After a save of which one process did not hear, all restore the step that the primary lists;
    a step of its own choice is refused.
    """
    run(
        program("group_restores_steps_processes_know_differently"),
        2,
        tmp_path / "run",
    )


@pytest.mark.slow
def test_a_failed_listing_fails_on_all(tmp_path: Path) -> None:
    """The root cannot be listed any more: every process has the primary's error, at once."""
    run(
        program("group_restores_listing_fails_at_primary"),
        2,
        tmp_path / "run",
    )
