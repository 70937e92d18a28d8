"""read_once: each byte of the store is read once in the whole job, and spread over the
interconnect.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpointing import run_together
from tests.support.paths import program

SCRIPT = program("read_once_script")


@pytest.mark.parametrize("gaps", ["exact", pytest.param("gaps", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("count", "devices"),
    [(2, 2), *(pytest.param(4, each, marks=pytest.mark.slow) for each in (1, 2))],
)
def test_replicated_arrays_are_read_once(
    tmp_path: Path, count: int, devices: int, gaps: str
) -> None:
    """Over all processes the bytes read are those of the arrays, evenly shared; without it every
    process reads them all.
    """
    run_together(SCRIPT, count, tmp_path, gaps, devices=devices)
