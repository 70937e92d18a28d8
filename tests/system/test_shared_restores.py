"""Restores of several processes that pass on what they read."""

from __future__ import annotations

from pathlib import Path

from tests.support.checkpointing import run_together
from tests.support.paths import program


def test_replicated_state_comes_from_the_store_once(tmp_path: Path) -> None:
    """FSDP-2 x DP-2 with a numpy leaf: at most 1.1 of the step is read, bit for bit."""
    outputs = run_together(program("shared_restore"), 4, tmp_path, devices=1)
    assert "once" in outputs[0]
