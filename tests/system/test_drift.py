"""Replicas that have drifted apart, found at a save: jobs of several processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpointing import run_together
from tests.support.paths import program


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lane", "by"),
    [("durable", "numpy"), ("durable", "program"), ("incremental", "numpy"), ("local", "program")],
)
def test_a_flipped_bit_is_named(tmp_path: Path, lane: str, by: str) -> None:
    """One bit of one replica of one leaf, on a process or on one device: leaf, process and host are
    named at that save; equal replicas of any bytes and shardings are no alarm, donated or not.
    """
    outputs = run_together(program("drift_named"), 4, tmp_path, lane, by, devices=2)
    assert sum("have drifted apart" in output for output in outputs) == 1
