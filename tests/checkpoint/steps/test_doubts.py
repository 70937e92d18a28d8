"""What is most often a mistake when a root is opened is told there, and nothing else is."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from holdfast.checkpoint import (
    CheckpointManager,
    Options,
    StepNotFound,
    load,
    wait_for_new_step,
)


def train(root: Path) -> None:
    with CheckpointManager(root) as manager:
        manager.save(1, {"w": np.ones(1)}).wait()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    caplog.clear()
    return found


@pytest.mark.parametrize("mistyped", ["runs/exprt-1", "runs/Expert_1", "rnus/expert-1"])
def test_a_mistyped_root_is_told_where_it_is_made(
    mistyped: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With the root that was meant, also where a folder above is mistyped; so is a restore from
    it, a load, and a wait for its steps.
    """
    train(tmp_path / "runs" / "expert-1")
    meant = f"{tmp_path}/runs/expert-1 has steps, and much the same name"
    wrong = tmp_path / mistyped
    with pytest.raises(StepNotFound, match=f"there is nothing at {wrong}; {meant}"):
        load(wrong)
    assert wait_for_new_step(wrong, timeout_s=0) is None
    assert [meant in warning for warning in warnings_of(caplog)] == [True]
    with CheckpointManager(wrong) as manager:
        (warning,) = warnings_of(caplog)
        assert f"{wrong} is not there, and is made as a new root" in warning and meant in warning
        with pytest.raises(StepNotFound, match=f"there is no step in {wrong}"):
            manager.restore()
    with CheckpointManager(wrong):
        assert warnings_of(caplog) == []  # it is there by now


def test_runs_of_a_sweep_are_no_mistakes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Names with other numbers, other names, and folders without steps are not spoken of."""
    (tmp_path / "rune-7").mkdir()
    for name in ("run-7", "run-8", "run-80", "lr0.1-s1", "lr0.01-s1", "baseline"):
        train(tmp_path / name)
    assert warnings_of(caplog) == []


def test_a_reader_of_no_root_is_told_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At its opening, since an evaluator may be first; the error comes with the restore. Nothing
    is made.
    """
    train(tmp_path / "run")
    root = tmp_path / "runn"
    with CheckpointManager(root, options=Options(read_only=True)) as reader:
        (warning,) = warnings_of(caplog)
        assert warning.startswith(f"{root} is not there: nothing can be restored from it until a")
        assert f"{tmp_path}/run has steps" in warning
        assert reader.latest_step() is None and not root.exists()
        expected = f"no step in {root}, which is not there; {tmp_path}/run has steps"
        with pytest.raises(StepNotFound, match=expected):
            reader.restore()
        train(root)
        assert reader.restore()["w"] == 1
    caplog.clear()
    with CheckpointManager(root, options=Options(read_only=True)):
        assert warnings_of(caplog) == []
    memory = "memory://a-root-that-nobody-has-made"
    with CheckpointManager(memory, options=Options(read_only=True)):
        assert "is not there" in warnings_of(caplog)[0]


TRAINER = """
import sys, numpy
from holdfast.checkpoint import CheckpointManager
manager = CheckpointManager(sys.argv[1])
manager.save(1, {"w": numpy.ones(1)}).wait()
print("open", flush=True)
sys.stdin.read()
"""


def test_a_second_trainer_is_told_at_its_opening(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By pid and host of the first. An evaluator is not, nor who comes after one that was killed or
    has closed.
    """
    root = tmp_path / "run"
    command = [sys.executable, "-c", TRAINER, str(root)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None and first.stdout.readline() == "open\n"
        with CheckpointManager(root, options=Options(read_only=True)) as reader:
            assert reader.latest_step() == 1 and warnings_of(caplog) == []
        with CheckpointManager(root):
            (warning,) = warnings_of(caplog)
            assert f"{root} is open for writing already, by pid {first.pid} on host" in warning
        first.kill()
    for _ in range(2):
        with CheckpointManager(root):
            assert warnings_of(caplog) == []
    with CheckpointManager(root), CheckpointManager(root):
        assert "by this same process. Two trainers" in warnings_of(caplog)[0]
