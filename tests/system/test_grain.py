"""Data of grain in jobs that are killed and go on with another number of processes: no element
comes twice, none is missing.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

from holdfast.checkpoint import CheckpointManager, TreeMismatch, load, save
from holdfast.multihost import ClusterGroup
from tests.support.checkpointing import at_once, groups, run_together, together
from tests.support.libraries import need
from tests.support.paths import program

grain = need("grain", "make setup")
handlers = need("grain.checkpoint", "make setup")
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


def shuffled() -> Any:
    return iter(grain.MapDataset.range(20).shuffle(seed=7).to_iter_dataset())


def test_iterators_of_grain_in_roots_of_orbax_go_on(tmp_path: Path) -> None:
    """Their handler's file of this process is the state; of another number of processes it says
    which file is missing.
    """
    own = shuffled()
    other = shuffled()
    first = [next(own) for _ in range(3)]
    with ocp.CheckpointManager(tmp_path / "orbax") as manager:
        manager.save(
            1,
            args=ocp.args.Composite(
                data=handlers.CheckpointSave(own), state=ocp.args.StandardSave({"w": np.ones(3)})
            ),
        )
        manager.wait_until_finished()
    assert load(tmp_path / "orbax", other, item="data") is other
    rest = list(other)
    assert rest == list(own) and sorted(first + rest) == list(range(20))
    (file,) = (tmp_path / "orbax" / "1" / "data").glob("process_0*")
    file.rename(file.with_name("process_0-of-4.json"))
    with pytest.raises(
        TreeMismatch,
        match=r"has 'process_0-of-4\.json', and none is process 0's; expected process_0-of-1\.json",
    ):
        load(tmp_path / "orbax", shuffled(), item="data")
    assert load(tmp_path / "orbax", other, item="data", process=0) is other and list(other) == rest


def test_a_load_gives_an_iterator_its_state(tmp_path: Path) -> None:
    """As a manager's restore does."""
    own, other = (iter(grain.MapDataset.range(9).to_iter_dataset()) for _ in range(2))
    next(own), next(own)
    save(tmp_path / "one", items={"data": own})
    assert load(tmp_path / "one", other, item="data") is other and list(other) == list(own)
