"""A save of several processes is one trace, whoever looks at it."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.support.cluster import free_port, run_processes
from tests.support.paths import ROOT, SUPPORT

PROGRAM = SUPPORT / "programs" / "one_trace.py"


def _tree(spans: list[dict[str, Any]]) -> str:
    """Shows a trace as viewers do: each process's span, and its parts as they began."""
    spans = sorted(spans, key=lambda span: span["start_time"])
    lines = []
    for whole in sorted(filter(_is_whole, spans), key=_process):
        lines.append(f"{whole['name']}, process {_process(whole)}")
        own = whole["context"]["span_id"]
        lines += [f"  {span['name']}" for span in spans if span["parent_id"] == own]
    return "\n".join(lines)


def _process(span: dict[str, Any]) -> int:
    return int(span["attributes"]["holdfast.process"])


def _is_whole(span: dict[str, Any]) -> bool:
    return bool(span["name"].count(".") == 1)


def test_a_save_of_four_processes_is_one_trace(tmp_path: Path) -> None:
    """So is their restore, and their attempt; each is told by all four. The page shows the save."""
    outputs = run_processes(PROGRAM, 4, arguments=[free_port(), tmp_path / "root"])
    traces: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for output in outputs:
        for line in output.splitlines():
            if line.startswith("span "):
                span = json.loads(line.removeprefix("span "))
                traces[span["context"]["trace_id"]].append(span)
    shown = []
    for spans in traces.values():
        shown.append(_tree(spans))
        print(shown[-1])
        for name in {span["name"] for span in spans if _is_whole(span)}:
            assert sum(span["name"] == name for span in spans) == 4
    assert len(traces) == 3  # initialize and attempt are one
    (save,) = [tree for tree in shown if tree.startswith("holdfast.save")]
    assert save in (ROOT / "docs" / "watching.md").read_text()
