"""The stand-ins in a job of two processes: sharded state, policies and barriers, restored on one
process by holdfast and by its face.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from holdfast.checkpoint import load, save
from tests.support.checkpointing import run_together
from tests.support.paths import program


def test_two_processes_save_and_restore(tmp_path: Path) -> None:
    """Every process calls the same; shardings come back, the listing is alike, an item's metadata
    is a target.
    """
    script = program("compat_two_processes_save_restore")
    run_together(script, 2, tmp_path)
    found = load(tmp_path / "2", item="state")
    assert np.array_equal(found["w"][0], np.arange(1 << 10) + 2) and int(found["n"]) == 2


def test_handlers_of_two_processes_write_together(tmp_path: Path) -> None:
    """Each process's handler writes its own file, and reads the files of both; so does a stateful
    checkpointable.
    """
    script = program("compat_handlers_two_processes_write")
    run_together(script, 2, tmp_path)
    assert load(tmp_path / "1", item="own") == {"of 0": b"0", "of 1": b"10"}


def test_what_one_process_alone_has_holds_up_no_other(tmp_path: Path) -> None:
    """Metadata of the root is the primary's; a step that it cannot put aside stays, and all say
    so.
    """
    script = program("compat_what_one_process_alone_has")
    told = ["metadata {'run': 'a'}", "error step 1 could not be put into trash", "steps [1]"]
    for output in run_together(script, 2, tmp_path, timeout_s=40):
        assert [line for line in output.splitlines() if line in told] == told, output


def test_all_processes_iterate_as_the_primary_does(tmp_path: Path) -> None:
    """A step that comes after the primary's look and before another's is the next one of both."""
    save(tmp_path / "1", {"x": 1})
    save(tmp_path / "not-yet" / "2", {"x": 2})
    for output in run_together(program("compat_iterates_as_the_primary"), 2, tmp_path):
        steps = [line for line in output.splitlines() if line.startswith("step ")]
        assert steps == ["step 1", "step 2", "step -1"], output
