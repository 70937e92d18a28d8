"""Orbax to holdfast to Orbax and back, over random trees, dtypes, shardings and meshes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cluster import run_processes
from tests.support.paths import program

SCRIPT = program("convert_matrix_script")


def trials(first: int, last: int) -> None:
    (output,) = run_processes(SCRIPT, 1, arguments=[first, last], devices=8, timeout_s=170)
    assert f"done {last - first}" in output


def test_some_random_trees_there_and_back() -> None:
    """Orbax's own values come back bit-exact from us, ours from Orbax, with the shardings asked
    for: three random trees.
    """
    trials(0, 3)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("first", range(100, 400, 20))
def test_random_trees_there_and_back(first: int, tmp_path: Path) -> None:
    """The same for three hundred random trees."""
    trials(first, first + 20)
