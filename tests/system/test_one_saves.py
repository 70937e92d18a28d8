"""One process of a job does not call `save`: those that wait say who, and where that one is."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.support.checkpointing import run_together
from tests.support.paths import program

_UNKNOWN = "CommitUnknown: whether step 4 was saved is not known: process "


@pytest.mark.parametrize(
    ("count", "absent", "begins"),
    [
        (2, 1, "SaveFailed: step 4 was not saved: "),
        pytest.param(3, 0, _UNKNOWN, marks=pytest.mark.slow),
    ],
)
def test_who_has_not_called_save_is_named(
    count: int, absent: int, begins: str, tmp_path: Path
) -> None:
    """In the log of each that waits, and in the error that ends it, with the line of code. What
    people need stands in the first line and the last, with nothing between but the calls.
    """
    script = program("save_by_one")
    outputs = run_together(script, count, tmp_path / "run", absent)
    line = script.read_text().splitlines().index('        multihost.sync_global_processes("end")')
    where = f"process {absent} has not called save(4); it is in train, {script.name}:{line + 1}"
    for process, output in enumerate(outputs):
        who = (
            f":process {process} of {count} on host {socket.gethostname()} of job job, attempt 0, "
        )
        assert output.count(f"{who}coordinator 127.0.0.1:") == 1, output
    assert "waits" not in outputs.pop(absent)
    for output in outputs:
        assert f"step 4 waits: {where}\n" in output, output
        last = next(line for line in output.splitlines() if line.startswith(begins))
        assert f"{where}; call save on every process, not on one alone" in last, output
        before, mark, trace = output.partition("Traceback (most recent call last):\n")
        assert mark and f"step 4 waited in vain: {where}" in before.splitlines()[-1], output
        assert "direct cause" not in trace and trace.index(last) < 1500, output
