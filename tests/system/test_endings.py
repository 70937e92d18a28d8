"""How a failed attempt ends, on real processes: at once for all who have nothing to do, and not in
the middle of a commit.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from holdfast.checkpoint import iterate_steps, verify
from holdfast.launch import RestartPolicy, RunSettings, run_local
from tests.support.cluster import CollectedOutput
from tests.support.paths import program

GRACE_S = 60.0
"""Far above what the tests wait for: nothing is ended by its end."""

STUBBORN = program("endings_stubborn")


def test_who_is_settled_is_ended_at_once() -> None:
    """SIGKILL of one of three: the others, which would ignore SIGTERM, are gone before its grace is
    over.
    """
    output = CollectedOutput()
    settings = RunSettings(restart=RestartPolicy(grace_s=GRACE_S))
    result = run_local([sys.executable, str(STUBBORN)], 3, settings, output=output)
    assert (result.outcome, result.exit_code) == ("failed", 137)
    assert result.elapsed_s < GRACE_S, output.text


SAVING = program("endings_saving")


def test_a_commit_under_way_is_not_interrupted(tmp_path: Path) -> None:
    """A process that had reported its share dies while the primary commits: the step is there and
    counts, then all are ended at once.
    """
    output = CollectedOutput()
    folder = tmp_path / "steps"
    restart = RestartPolicy(grace_s=GRACE_S, commit_grace_s=GRACE_S)
    command = [sys.executable, str(SAVING), str(folder)]
    result = run_local(command, 3, RunSettings(restart=restart), output=output)
    assert (result.outcome, result.exit_code, result.saved_step) == ("failed", 137, 1), output.text
    assert result.elapsed_s < GRACE_S / 2, output.text
    assert list(iterate_steps(folder, timeout_s=0)) == [1] and verify(folder / "1")
    assert "preempt" not in output.text, output.text
    told = {
        process
        for process, text in output.lines
        if "process 2 (host" in text and "ended by signal 9" in text
    }
    assert told == {0, 1}, output.text


ALONE = program("endings_alone")


def test_a_job_of_one_is_heard_of(tmp_path: Path) -> None:
    """What its process saves counts as progress, as in a larger job."""
    output = CollectedOutput()
    command = [sys.executable, str(ALONE), str(tmp_path / "steps")]
    result = run_local(command, 1, RunSettings(), output=output)
    assert (result.outcome, result.exit_code, result.saved_step) == ("failed", 3, 1), output.text


FINISHED = program("endings_finished")


def test_who_has_shut_down_may_live_on(tmp_path: Path) -> None:
    """A program that saves with metrics, leaves its job in order, and lives on, is done, at once.
    While it ran, everybody could ask how it is.
    """
    output = CollectedOutput()
    command = [sys.executable, str(FINISHED), str(tmp_path / "steps")]
    settings = RunSettings(
        restart=RestartPolicy(max_failures=1, stall_timeout_s=600), log_dir=tmp_path / "logs"
    )
    result = run_local(command, 1, settings, output=output)
    assert (result.outcome, result.exit_code, result.attempts) == ("done", 0, 1), output.text
    assert (result.step, result.saved_step) == (3, 3), output.text
    said = [text for process, text in output.lines if process == 0]
    assert said[-2:] == ["step 2 is the best of 3, by 0.5", "it has left its job"], said


RARELY_SAVES = program("endings_rarely_saves")


@pytest.mark.parametrize("asks", [pytest.param("save", marks=pytest.mark.slow), "should_save"])
def test_steps_are_reported_of_who_rarely_saves(asks: str, tmp_path: Path) -> None:
    """A process alone that asks its manager at each step is heard of at each, saved or not."""
    output = CollectedOutput()
    command = [sys.executable, str(RARELY_SAVES), str(tmp_path / "steps"), asks]
    result = run_local(command, 1, RunSettings(), output=output)
    assert (result.outcome, result.step, result.saved_step) == ("done", 7, -1), output.text


IN_FLIGHT = program("endings_in_flight")


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("shutdown", 0),
        pytest.param("end", 0, marks=pytest.mark.slow),
        pytest.param("error", 1, marks=pytest.mark.slow),
    ],
)
def test_who_leaves_with_saves_in_flight_waits_for_them(
    how: str, code: int, tmp_path: Path
) -> None:
    """By `shutdown()` or by its end, whoever holds the managers: the steps are there, and nobody
    hears of threads and hooks.
    """
    output = CollectedOutput()
    command = [sys.executable, str(IN_FLIGHT), str(tmp_path), how]
    result = run_local(command, 2, RunSettings(), output=output)
    assert result.exit_code == code, output.text
    assert [verify(tmp_path / name / name).step for name in "12"] == [1, 2], output.text
    assert not [text for text in output.text.splitlines() if "gnored in" in text], output.text
    assert output.text.count("Traceback") == 2 * code, output.text


DO_NOT_RESTART = program("endings_do_not_restart")


def test_a_peers_exit_does_not_overtake_93() -> None:
    """A process leaves with 93 and waits for the others in its exit hook when a peer fails: the job
    ends with 93, and is not started again.
    """
    output = CollectedOutput()
    settings = RunSettings(restart=RestartPolicy(max_failures=2, grace_s=GRACE_S))
    result = run_local([sys.executable, str(DO_NOT_RESTART)], 2, settings, output=output)
    assert (result.outcome, result.exit_code, result.attempts) == ("failed", 93, 1), output.text
    assert result.elapsed_s < GRACE_S, output.text


RAISED = program("endings_raised")


@pytest.mark.parametrize(
    ("kind", "processes", "outcome", "code"),
    [
        ("Preempted", 2, "preempted", 75),
        pytest.param("Fatal", 2, "failed", 93, marks=pytest.mark.slow),
        pytest.param("Fatal", 1, "failed", 93, marks=pytest.mark.slow),
        pytest.param("Preempted", 1, "preempted", 75, marks=pytest.mark.slow),
        pytest.param("Hang", 1, "failed", 124, marks=pytest.mark.slow),
    ],
)
def test_an_error_of_the_job_says_what_is_to_follow(
    kind: str, processes: int, outcome: str, code: int
) -> None:
    """A program that ends by `multihost.Fatal` is not started again; by `Preempted` it was
    preempted, and by `Hang` it hangs.
    """
    output = CollectedOutput()
    budget = 2 if kind == "Fatal" else 0
    settings = RunSettings(restart=RestartPolicy(max_failures=budget, grace_s=GRACE_S))
    command = [sys.executable, str(RAISED), kind]
    result = run_local(command, processes, settings, output=output)
    assert (result.outcome, result.exit_code, result.attempts) == (outcome, code, 1), output.text
    assert result.elapsed_s < GRACE_S, output.text
    assert f"{kind} was meant" in output.text


PLAIN = program("endings_plain")


@pytest.mark.slow
def test_a_signal_at_the_end_is_no_notice() -> None:
    """Under plain jax.distributed nothing is known of a process's saves, so it gets SIGTERM: it
    logs that the attempt is over, and why.
    """
    output = CollectedOutput()
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    settings = RunSettings(env=env, restart=RestartPolicy(grace_s=3))
    result = run_local([sys.executable, str(PLAIN)], 2, settings, output=output)
    assert (result.outcome, result.exit_code) == ("failed", 137), output.text
    said = [text for process, text in output.lines if process == 0]
    assert any(
        "attempt 1 is over: process 1 of 2 was ended by signal 9" in text for text in said
    ), output.text
    assert "preemption notice" not in output.text, output.text
