"""Restores of several processes that pass on what they read."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest

from holdfast.checkpoint import save
from holdfast.multihost import Solo
from tests.support.checkpointing import run_together, together
from tests.support.paths import program


def test_replicated_state_comes_from_the_store_once(tmp_path: Path) -> None:
    """FSDP-2 x DP-2, with a numpy leaf and one that each process keeps: at most 1.1 of the
    step is read, bit for bit. So are rows, a part, another process's copy, and what a peer sends
    damaged; what the store has damaged is Corrupt for all.
    """
    outputs = run_together(program("shared_restore"), 4, tmp_path, devices=1)
    assert "once" in outputs[0]
    damaged = [re.findall("^Corrupt: .*", output, re.MULTILINE) for output in outputs]
    assert damaged == [damaged[0]] * 4 and len(damaged[0]) == 1


@pytest.mark.slow
def test_nobody_waits_for_a_process_that_stands_still(tmp_path: Path) -> None:
    """Four processes read three waves. One has no header from its store, and one is stopped after
    its first wave: the others hold all their bytes meanwhile, and all end alike once these go on.
    """
    random = [np.random.default_rng(number) for number in range(9)]
    state = {f"w{number}": each.standard_normal((2048, 512)) for number, each in enumerate(random)}
    save(tmp_path / "step", state, group=Solo())
    os.mkfifo(tmp_path / "step.pipe")
    with together(program("shared_restore_waves"), 4, tmp_path / "step") as processes:
        for index in (0, 3):
            processes.wait_for(index, "all held", timeout_s=90)
        assert "wave 0 held" not in processes.output(1)
        assert "wave 1 held" not in processes.output(2)
        os.close(os.open(tmp_path / "step.pipe", os.O_WRONLY))
        os.kill(processes.popens[2].pid, signal.SIGCONT)
        for index in range(4):
            processes.wait_for(index, "done", timeout_s=60)
