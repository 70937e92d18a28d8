"""Bytes read follow bytes needed: processes that each need some rows of the same large chunks read
these, checked, and little more.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from holdfast.checkpoint import save
from tests.support.checkpointing import run_together
from tests.support.paths import program

SCRIPT = program("ranged_reads_script")


@pytest.mark.slow
def test_eight_processes_read_an_eighth_each(tmp_path: Path) -> None:
    """Of two chunks of 58 MB, no multiple of a block, each of 8 processes reads at most 1.05 of its
    eighth, headers and all; and a flipped byte is Corrupt for the process that needs it, and for no
    other.
    """
    column = (np.arange(232) % 251)[:, None]
    tree = {
        "w": np.broadcast_to(column, (232, 62_501)).astype(np.float32),
        "z": np.broadcast_to(column, (232, 125_002)).astype(np.uint16),
    }
    assert all(array.nbytes == 58_000_928 for array in tree.values())
    save(tmp_path, tree)
    run_together(SCRIPT, 8, tmp_path)
