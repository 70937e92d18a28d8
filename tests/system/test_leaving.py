"""A save at a preemption is planned over the processes that stay: those that leave are not needed
for what others hold too.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.checkpoint import load
from holdfast.coordination import CoordinationService, StatusClient
from tests.support.cluster import Processes
from tests.support.paths import program

COUNT = 4
LEAVER = 3

# argv: index, count, address, root, the leaves; whoever has something to write begins, and goes on
# when there is a file named go
SCRIPT = program("leaving_script")


def writers(step: Path) -> set[int]:
    """Returns the processes that have written files of a step."""
    return {int(name[:5]) for name in os.listdir(step / "state")}


@contextmanager
def preempted(root: Path, leaves: str) -> Iterator[tuple[Processes, CoordinationService]]:
    """Yields four processes of which the last has its notice, in the save that all begin."""
    with CoordinationService.spawn(
        COUNT, recoverable=True, survivable=True, arguments=("--reconnect-grace-s=1",)
    ) as service:
        with Processes(SCRIPT, COUNT, arguments=[service.address, root, leaves]) as processes:
            for index in range(COUNT):
                processes.wait_for(index, "steps")
            processes.kill(LEAVER, signal.SIGTERM)
            for index in range(LEAVER):
                processes.wait_for(index, "writes")
            yield processes, service


def test_a_process_that_leaves_is_not_needed(tmp_path: Path) -> None:
    """Four hold all of the state, one has SIGTERM: the others write it, and it may die before they
    have; the step is there, whole.
    """
    with (
        preempted(tmp_path, "replicated") as (processes, service),
        StatusClient(service.address) as status,
    ):
        while all(
            waiting.task_id != LEAVER
            for barrier in status.status().barriers
            for waiting in barrier.waiting
        ):  # its report is there
            assert processes.popens[LEAVER].poll() is None and "writes" not in processes.output(
                LEAVER
            )
            time.sleep(0.02)
        processes.kill(LEAVER)
        processes.popens[LEAVER].wait(30)
        (tmp_path / "go").touch()
        finished = processes.wait()
    committed = {one.output.split("committed ")[1].strip() for one in finished[:LEAVER]}
    assert len(committed) == 1, [one.output for one in finished]
    step = tmp_path / "run" / committed.pop()
    assert load(step)["replicated"].shape == (COUNT, 1 << 22)
    assert writers(step) == {0, 1, 2}


@pytest.mark.slow
def test_what_a_leaving_process_loses_is_named(tmp_path: Path) -> None:
    """A leaf of which the leaving process alone has a part: it writes that part; where it dies
    first, the error has the leaf's path.
    """
    with preempted(tmp_path, "replicated,sharded") as (processes, _):
        processes.wait_for(LEAVER, "writes")
        processes.kill(LEAVER)
        processes.popens[LEAVER].wait(30)
        (tmp_path / "go").touch()
        finished = processes.wait()
    for one in finished[:LEAVER]:
        assert "failed step" in one.output and "process 3" in one.output, one.output
        assert "nobody else held all of sharded" in one.output


@pytest.mark.slow
def test_a_living_process_writes_what_it_holds(tmp_path: Path) -> None:
    """The same leaves, and the leaving process lives long enough: nothing is missing, and of the
    replicated leaf it has written nothing.
    """
    with preempted(tmp_path, "replicated,sharded") as (processes, _):
        (tmp_path / "go").touch()
        finished = processes.wait()
    committed = {one.output.split("committed ")[1].strip() for one in finished}
    assert len(committed) == 1, [one.output for one in finished]
    step = tmp_path / "run" / committed.pop()
    found = load(step)
    assert (found["sharded"] == found["replicated"]).all()
    own = [name for name in os.listdir(step / "state") if name.startswith(f"{LEAVER:05d}-")]
    assert sum((step / "state" / name).stat().st_size for name in own) < found[
        "sharded"
    ].nbytes / COUNT + (1 << 20)
