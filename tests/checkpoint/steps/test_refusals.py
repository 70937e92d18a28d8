"""Roots that are refused: of two processes of a launched job that have not called `initialize()`,
and the folder of one step. What is most often a mistake is told at the opening, nothing else is.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from holdfast.checkpoint import (
    CheckpointError,
    CheckpointManager,
    Options,
    StepExists,
    StepNotFound,
    load,
    save,
    save_async,
    wait_for_new_step,
)
from holdfast.multihost import ProcessSpec, Solo
from tests.support.checkpointing import run_together
from tests.support.paths import program


def _environment(process: int, count: int = 2) -> dict[str, str]:
    spec = ProcessSpec(
        process_id=process, num_processes=count, coordinator="127.0.0.1:1", attempt=1
    )
    return spec.to_env()


@contextlib.contextmanager
def _running(name: str, *arguments: object) -> Iterator[tuple[str, int]]:
    """Runs a program as process 0 of the job, until the end; yields its first line and its pid."""
    with subprocess.Popen(
        [sys.executable, program(name), *map(str, arguments)],
        env=os.environ | _environment(0) | {"JAX_PLATFORMS": "cpu"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        yield process.stdout.readline(), process.pid
        process.stdin.close()


@pytest.fixture(scope="module")
def holder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """A root that process 0 of the job has open, and its pid."""
    root = tmp_path_factory.mktemp("run")
    with _running("root_holder", 0, 2, root) as (line, pid):
        assert line == "open Solo\n"
        yield root, pid


@pytest.fixture
def unjoined(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is process 1 of the same job, and has not joined it."""
    for name, value in _environment(1).items():
        monkeypatch.setenv(name, value)


def test_the_second_is_refused(holder: tuple[Path, int], unjoined: None) -> None:
    """With what to call; it leaves nothing in the root."""
    root, pid = holder
    before = sorted(root.rglob("*"))
    with pytest.raises(CheckpointError) as caught:
        CheckpointManager(root)
    assert str(caught.value) == (
        f"{root} is open in process 0 of this job (host {socket.gethostname()}, pid {pid}), and"
        " process 1 has not joined it: call holdfast.multihost.initialize() at the start of the"
        " program, so that all save as one, or open another folder in each process"
    )
    assert sorted(root.rglob("*")) == before


@pytest.mark.parametrize("call", [save, save_async])
def test_a_save_without_a_manager_is_refused(
    call: Callable[..., object], holder: tuple[Path, int], unjoined: None
) -> None:
    """It would overwrite what the other saves; it leaves nothing in the folder."""
    root, _ = holder
    before = sorted(root.rglob("*"))
    with pytest.raises(CheckpointError, match="process 1 has not joined it: call"):
        call(root, {"w": np.ones(2)})
    assert sorted(root.rglob("*")) == before


def test_a_save_in_orbaxs_layout_is_refused(tmp_path: Path, unjoined: None) -> None:
    """While another process of the job saves there, in the same words; it leaves nothing."""
    path = tmp_path / "3"
    with _running("orbax_writer_holder", path) as (line, pid):
        assert line == "begun\n"
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(CheckpointError) as caught:
            save(path, {"w": np.ones(2)}, layout="orbax")
        assert str(caught.value).startswith(
            f"{path} is open in process 0 of this job (host {socket.gethostname()}, pid"
            f" {pid}), and process 1 has not joined it: call"
            " holdfast.multihost.initialize() at the start of the program"
        )
        assert sorted(tmp_path.rglob("*")) == before
        save(path, {"w": np.ones(2)}, layout="orbax", group=Solo())  # as is meant
    assert load(path)["w"].tolist() == [1, 1]
    assert list(tmp_path.iterdir()) == [path]


def _open(root: Path, **settings: object) -> None:
    CheckpointManager(root, **settings).close()  # type: ignore[arg-type]


def _in_a_child(root: Path) -> None:
    """As in a worker of a data loader."""
    child = multiprocessing.get_context("spawn").Process(target=_open, args=(root,))
    child.start()
    child.join(60)
    assert child.exitcode == 0


UNTOUCHED: dict[str, Callable[[Path], None]] = {
    "a root of its own": lambda root: _open(root / "1" / "own"),
    "a checkpoint of its own": lambda root: save(root / "1" / "best", {"w": np.ones(2)}),
    "an evaluator that only reads": lambda root: _open(root, options=Options(read_only=True)),
    "a group that is given": lambda root: _open(root, group=Solo()),
    "a child of a data loader": _in_a_child,
}


@pytest.mark.parametrize("who", UNTOUCHED)
def test_what_is_meant_is_untouched(who: str, holder: tuple[Path, int], unjoined: None) -> None:
    """It opens as ever."""
    UNTOUCHED[who](holder[0])


def test_a_program_that_process_0_starts_is_untouched(
    holder: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the environment of process 0, whose root it may write to."""
    for name, value in _environment(0).items():
        monkeypatch.setenv(name, value)
    _open(holder[0])


def test_a_job_of_one_process_need_not_join(
    holder: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor one that nobody of ours has launched."""
    for name, value in _environment(0, count=1).items():
        monkeypatch.setenv(name, value)
    _open(holder[0])
    monkeypatch.delenv("HOLDFAST_PROCESS_ID")
    monkeypatch.delenv("HOLDFAST_NUM_PROCESSES")
    monkeypatch.delenv("HOLDFAST_COORDINATOR")
    _open(holder[0])


@pytest.mark.slow
def test_plain_jax_distributed_is_untouched(tmp_path: Path) -> None:
    """Under the launcher, too: its processes are one group."""
    outputs = run_together(
        program("root_of_jax_distributed"), 2, tmp_path / "run", env_of=_environment
    )
    assert outputs == ["open ClusterGroup\n"] * 2


# --- The folder of one step

TREE = {"w": np.ones(4)}


@pytest.mark.parametrize("read_only", [False, True])
def test_a_steps_folder_is_no_root(read_only: bool, tmp_path: Path) -> None:
    """Whatever its number is, and whatever the root calls it; nothing is written there."""
    options = Options(step_format="step_{:04d}")
    with CheckpointManager(tmp_path / "run", options=options) as manager:
        for step in (0, 7):
            manager.save(step, TREE)
    for step in (0, 7):
        folder = tmp_path / "run" / f"step_{step:04d}"
        before = sorted(folder.rglob("*"))
        with pytest.raises(CheckpointError) as caught:
            CheckpointManager(folder, options=Options(read_only=read_only))
        assert str(caught.value) == (
            f"{folder} is the folder of step {step}, and no root of steps: open {folder.parent}"
            f" and restore({step}), or load({str(folder)!r})"
        )
        assert sorted(folder.rglob("*")) == before
    record = tmp_path / "run" / "step_0007" / "checkpoint.json"
    record.write_bytes(record.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="is the folder of step step_0007, and no root"):
        CheckpointManager(record.parent)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_root_of_steps_takes_no_checkpoint_by_itself(overwrite: bool, tmp_path: Path) -> None:
    """It would hide the steps from `load`; a folder in the root does not."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(3, TREE)
    with pytest.raises(StepExists, match=r"is a root of steps, the latest 3: .* hide them"):
        save(tmp_path, TREE, overwrite=overwrite)
    assert not (tmp_path / "checkpoint.json").exists()
    save(tmp_path / "export", TREE)
    with CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [3]


def test_a_checkpoint_by_itself_may_be_a_root(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What a one-shot save wrote, copies and conversions included; not where it has a number. A
    warning says that `load` of the folder stays with it.
    """
    save(tmp_path / "whole", TREE)
    with CheckpointManager(tmp_path / "whole") as manager:
        manager.save(3, TREE | {"more": np.ones(1)})
    (warning,) = warnings_of(caplog)
    assert f"load({str(tmp_path / 'whole')!r}) gives that one, also where steps" in warning
    assert "more" not in load(tmp_path / "whole")
    save(tmp_path / "whole", TREE, overwrite=True)
    with CheckpointManager(tmp_path / "whole") as manager:
        assert manager.all_steps() == [3]
    save(tmp_path / "numbered", TREE, step=5)
    with pytest.raises(CheckpointError, match=r"numbered is the folder of step 5, and no root"):
        CheckpointManager(tmp_path / "numbered")


def test_a_root_in_a_store_is_told_from_its_steps() -> None:
    """By the same rule, where a URL has a folder above it."""
    object_root = "memory://mistakes/run"
    with CheckpointManager(object_root) as manager:
        for step in (0, 7):
            manager.save(step, TREE).wait()
            message = f"/{step} is the folder of step {step}, and no root"
            with pytest.raises(CheckpointError, match=message):
                CheckpointManager(f"{object_root}/{step}")


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
        expected = f"no step (7 )?in {root}, which is not there; {tmp_path}/run has steps"
        for step in (None, 7):
            with pytest.raises(StepNotFound, match=expected):
                reader.restore(step)
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
