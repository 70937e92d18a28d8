"""Data of grain in jobs that are killed and go on with another number of processes: no element
comes twice, none is missing.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from holdfast.checkpoint import CheckpointManager, TreeMismatch
from holdfast.multihost import ClusterGroup
from tests.support.checkpointing import at_once, groups, run_together, together
from tests.support.libraries import need
from tests.support.paths import program

grain = need("grain", "make setup")
experimental = need("grain.experimental", "make setup")

from tests.support.programs.elastic_reader import NUM_ELEMENTS, reader  # noqa: E402


def begin(group: ClusterGroup, root: Path) -> list[int]:
    """Takes three batches, saves, and takes two more, which are lost; returns the elements before
    the save.
    """
    own = reader(group.index, group.count)
    seen = list[int]()
    with CheckpointManager(root, group=group) as manager:
        for _ in range(3):
            seen += next(own).tolist()
        manager.save(3, items={"reader": own}).wait()
        next(own), next(own)
    return seen


def go_on(group: ClusterGroup, root: Path) -> list[int]:
    """Goes on from the save to the end; returns the elements."""
    own = reader(group.index, group.count)
    with CheckpointManager(root, group=group) as manager:
        if group.count != 4:
            with pytest.raises(
                TreeMismatch,
                match=(
                    rf"a state for each of 4 processes, and this job has {group.count}.*process=0"
                ),
            ):
                manager.restore(3, own, item="reader")
        manager.restore(3, own, item="reader", process=0)
    return [element for batch in own._default_iterator for element in batch.tolist()]


@pytest.mark.parametrize("count", [2, 4, 8])
def test_an_elastic_iterator_goes_on_anywhere(tmp_path: Path, count: int) -> None:
    """Saved by four processes, restored by fewer, as many and more: together they see every element
    once.
    """
    with groups(4) as four:
        before = at_once([lambda group=group: begin(group, tmp_path) for group in four])  # type: ignore[misc]
    with groups(count) as some:
        after = at_once([lambda group=group: go_on(group, tmp_path) for group in some])  # type: ignore[misc]
    assert sorted(element for part in [*before, *after] for element in part) == list(
        range(NUM_ELEMENTS)
    )


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 8])
def test_a_killed_job_goes_on_with_another_number(tmp_path: Path, count: int) -> None:
    """The same with processes that die by SIGKILL after the save, batches ahead of it."""
    script = program("grain_killed")
    with together(script, 4, tmp_path / "run") as processes:
        ended = processes.wait(100)
    assert [each.code for each in ended] == [-signal.SIGKILL] * 4, ended
    script = program("grain_continued")
    outputs = [*(each.output for each in ended), *run_together(script, count, tmp_path / "run")]
    seen = [
        json.loads(line.removeprefix("seen "))
        for output in outputs
        for line in output.splitlines()
        if line.startswith("seen ")
    ]
    assert len(seen) == 4 + count
    assert sorted(element for part in seen for element in part) == list(range(NUM_ELEMENTS))
