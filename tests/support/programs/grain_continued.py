"""Runs in the processes of tests/system/test_grain.py."""

from __future__ import annotations

import json

from elastic_reader import reader
from joined import count, index, root

from holdfast.checkpoint import CheckpointManager

own = reader(index, count)
with CheckpointManager(root) as manager:
    manager.restore(3, own, item="reader", process=0)
print(
    "seen",
    json.dumps([element for batch in own._default_iterator for element in batch.tolist()]),
    flush=True,
)
