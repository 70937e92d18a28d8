"""Runs in the processes of tests/system/test_clients.py."""

from __future__ import annotations

import json
import sys

import grain
import orbax.checkpoint as ocp
from grain.checkpoint import CheckpointRestore, CheckpointSave


def batches():
    return iter(grain.MapDataset.range(100).shuffle(seed=7).batch(4).to_iter_dataset())


def read(root):
    with ocp.CheckpointManager(root) as manager:
        restored = manager.restore(1, args=ocp.args.Composite(data=CheckpointRestore(batches())))[
            "data"
        ]
        return [batch.tolist() for batch in restored]


root = sys.argv[1]
others = sys.argv[2:]
data = batches()
for _ in range(3):
    next(data)
with ocp.CheckpointManager(root) as manager:
    manager.save(
        1,
        args=ocp.args.Composite(data=CheckpointSave(data), state=ocp.args.StandardSave({"w": 1.0})),
    )
    manager.wait_until_finished()
print(json.dumps([[batch.tolist() for batch in data], *map(read, [root, *others])]))
