"""The id maps in real processes, with numbers that differ as they do on TPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cluster import free_port, run_processes
from tests.support.paths import program


def run(script: Path, count: int) -> list[str]:
    return run_processes(script, count, arguments=[free_port()])


@pytest.mark.slow
def test_numbers_that_differ() -> None:
    """Where runtime and distributed ids differ, the maps hold what each process said of itself, in
    both orders; no key stays.
    """
    run(
        program("ids_numbers_differ"),
        4,
    )


@pytest.mark.slow
def test_subsets_and_errors_speak_in_runtime_numbers() -> None:
    """With ids that differ, the maps hold them, a barrier of runtime processes reaches the right
    tasks, and who is missing is named by runtime number.
    """
    outputs = run(
        program("ids_subsets_errors_speak_runtime"),
        4,
    )
    assert ["missing (3,)" in output for output in outputs] == [True, True, False, True]


def test_two_that_claim_one_number() -> None:
    """Processes that claim one runtime number get an error that says so."""
    outputs = run(
        program("ids_two_claim_one_number"),
        2,
    )
    assert all(
        "the runtime numbers of the processes are [0, 0], expected 0 to 1: two processes claim one"
        " number" in output
        for output in outputs
    )


@pytest.mark.slow
def test_flag_that_counts_by_distributed_ids() -> None:
    """Where Orbax's flag is registered and set, processes are counted by distributed id, devices
    and subsets too; we never define it.
    """
    run(
        program("ids_flag_counts_by_distributed"),
        4,
    )
