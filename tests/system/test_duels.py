"""Two managers on one root: one wins each step, never a mixture; a paused writer that was fenced
harms nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from holdfast.checkpoint import CheckpointManager, sweep, verify
from tests.support.cluster import Processes
from tests.support.paths import program

DUELS = 50
ROUNDS_OF_DUELS = 20  # 1,000 duels
PAUSES = 10
ROUNDS_OF_PAUSES = 10

DUELLIST = program("duels_duellist")


@pytest.mark.parametrize(
    "turn",
    [pytest.param(n, marks=[pytest.mark.slow] if n else []) for n in range(ROUNDS_OF_DUELS)],
)
def test_duels_have_one_winner(tmp_path: Path, turn: int) -> None:
    """Two managers save the same steps: exactly one is acknowledged each, readable, all of it the
    winner's. In odd turns incrementally.
    """
    root = tmp_path / "run"
    first = turn * DUELS
    last = (turn + 1) * DUELS
    for index in range(2):
        os.mkfifo(f"{root}.go{index}")
    with (
        # For reading, too: so nobody waits for the other side, and it is open throughout.
        open(f"{root}.go0", "r+b", buffering=0) as one,
        open(f"{root}.go1", "r+b", buffering=0) as two,
        Processes(DUELLIST, 2, arguments=[root, first, last, turn % 2]) as both,
    ):
        for step in range(first, last):
            for index in range(2):
                both.wait_for(index, f"ready {step}\n")
            one.write(b"!")
            two.write(b"!")
        finished = both.wait()
    assert [one.code for one in finished] == [0, 0], finished
    won = [set(json.loads(one.output.split("won ")[1].splitlines()[0])) for one in finished]
    assert won[0] | won[1] == set(range(first, last)) and not won[0] & won[1]
    with CheckpointManager(root) as manager:
        assert manager.all_steps() == list(range(first, last))
        for step in range(first, last):
            got = manager.restore(step)
            assert np.all(got["who"] == (step in won[1])) and np.all(got["step"] == step)
    sweep(str(root))
    writers = [
        {path.name.split("-")[2][:8] for path in (root / str(step) / "state").iterdir()}
        for step in range(first, last)
    ]
    assert all(len(each) == 1 for each in writers), "the loser's packs stayed"


SLEEPER = program("duels_sleeper")


@contextlib.contextmanager
def _sleeper(root: Path, steps: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(SLEEPER), str(root), str(steps)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    "turn",
    [pytest.param(n, marks=[pytest.mark.slow] if n else []) for n in range(ROUNDS_OF_PAUSES)],
)
def test_a_writer_paused_fenced_and_resumed_harms_nothing(tmp_path: Path, turn: int) -> None:
    """SIGSTOP in a save, fence, another saves the same step, SIGCONT: the first gets Fenced, the
    step is the second's.
    """
    root = tmp_path / "run"
    with _sleeper(root, PAUSES) as sleeper:
        assert sleeper.stdout is not None
        for step in range(PAUSES):
            assert os.WIFSTOPPED(os.waitpid(sleeper.pid, os.WUNTRACED)[1])
            assert len(sweep(str(root), force=True).fenced) == 1
            with CheckpointManager(root) as other:
                other.save(step, {"who": np.ones(1000)})
                other.wait_until_finished()
                sleeper.send_signal(signal.SIGCONT)
                assert sleeper.stdout.readline() == "fenced\n"
                assert np.all(other.restore(step)["who"] == 1)
                verify(root / str(step))
    with CheckpointManager(root) as manager:
        assert manager.all_steps() == list(range(PAUSES))
        assert all(np.all(manager.restore(step)["who"] == 1) for step in range(PAUSES))
    assert len(list(root.rglob("*.safetensors"))) == PAUSES
