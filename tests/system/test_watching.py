"""A save of several processes is one trace, whoever looks at it."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from tests.support.cluster import free_port, run_processes
from tests.support.paths import SUPPORT

PROGRAM = SUPPORT / "programs" / "one_trace.py"


def test_a_save_of_four_processes_is_one_trace(tmp_path: Path) -> None:
    """So is their restore, and their attempt; each is told by all four."""
    outputs = run_processes(PROGRAM, 4, arguments=[free_port(), tmp_path / "root"])
    traces: dict[str, list[str]] = defaultdict(list)
    for output in outputs:
        for line in output.splitlines():
            if line.startswith("span "):
                _, trace, name = line.split()
                traces[trace].append(name)
    wholes = sorted(
        name for names in traces.values() for name in set(names) if name.count(".") == 1
    )
    assert wholes == [
        "holdfast.attempt",
        "holdfast.initialize",
        "holdfast.restore",
        "holdfast.save",
    ]
    assert len(traces) == 3  # initialize and attempt are one
    for names in traces.values():
        assert all(names.count(name) % 4 == 0 for name in names if name.count(".") == 1)
    (save,) = [names for names in traces.values() if "holdfast.save" in names]
    assert {"holdfast.save.write", "holdfast.save.gather", "holdfast.save.commit"} <= set(save)
    assert save.count("holdfast.save.commit") == 1
