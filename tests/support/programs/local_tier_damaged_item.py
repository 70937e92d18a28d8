"""Runs in the processes of tests/system/test_local_tier.py."""

from __future__ import annotations

import os
from pathlib import Path

from joined import index
from local_tier_start import folders, manager, names
from sharded_state import same, state

from holdfast.checkpoint.saving.stager import SaveOrder

SIZE = 1 << 19

items = {"first": state(1, SIZE), "second": state(2, SIZE)}
manager._parts.lanes[1].save(SaveOrder(5, items=items)).wait(60)
if index == 1:
    for pack in Path(folders, names[index]).rglob("second/*.safetensors"):
        at = pack.stat().st_size // 2
        with pack.open("r+b") as file:
            file.seek(at)
            file.write(os.urandom(at))
found = manager.restore(5, items=items, read="once")
assert same(found["first"], 1, SIZE)
assert same(found["second"], 2, SIZE)
print("restored", index, flush=True)
manager.close()
