"""Parts of a local save, written for tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from holdfast.checkpoint.format.tree import FlatTree
from holdfast.checkpoint.local_tier.parts import (
    LocalKey,
    Part,
    StepHead,
)
from holdfast.checkpoint.saving.item_files import ItemTarget
from holdfast.checkpoint.saving.pack_writer import write_snapshot
from holdfast.checkpoint.saving.planner import Planner
from holdfast.checkpoint.saving.record_builder import tree_text
from holdfast.checkpoint.saving.snapshot import take_snapshot
from holdfast.checkpoint.storage.local import LocalStorage

RUN = "0123456789abcdef" * 2
SAVE = "0000000100000001"


def saved_parts(folder: Path, count: int = 2, save_id: str = SAVE, step: int = 7) -> list[Part]:
    """Returns the parts of a save of a small tree that `count` processes have written."""
    tree = {"w": np.arange(6.0).reshape(2, 3), "n": 3, "name": "net"}
    key = LocalKey(step, 1, save_id, count)
    parts = []
    for rank in range(count):
        flat = FlatTree.of(tree)
        plan = Planner(rank, count).plan(flat)
        target = ItemTarget(LocalStorage(folder), key.folder, "state", save_id)
        report = write_snapshot(take_snapshot(plan, flat), target)
        head = (
            StepHead({"state": tree_text(plan)}, 1.0, 2.0, {"loss": float("nan")}, {"a": [1]})
            if rank == 0
            else None
        )
        parts.append(Part(RUN, key, rank, {"state": report}, head))
    return parts
