"""Reports of what a process wrote."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from holdfast.checkpoint.format.item_report import ItemReport
from holdfast.checkpoint.format.tree import FlatTree
from holdfast.checkpoint.saving.item_files import ItemTarget
from holdfast.checkpoint.saving.pack_writer import write_snapshot
from holdfast.checkpoint.saving.planner import Planner
from holdfast.checkpoint.saving.snapshot import take_snapshot
from holdfast.checkpoint.storage.local import LocalStorage

TREE = {"w": np.arange(6.0).reshape(2, 3), "n": 3, "none": None}


def test_reports_travel_as_json(tmp_path: Path) -> None:
    """A report is the same after the gather; other bytes are a ValueError."""
    tree = FlatTree.of(TREE)
    plan = Planner().plan(tree)
    report = write_snapshot(
        take_snapshot(plan, tree), ItemTarget(LocalStorage(tmp_path), "1", "state", "ab")
    )
    assert ItemReport.from_json(json.loads(json.dumps(report.to_json()))) == report
    for data in ("", [], {"process": 1}):
        with pytest.raises(ValueError):
            ItemReport.from_json(data)
