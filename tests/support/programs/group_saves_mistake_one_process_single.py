"""Runs in the processes of tests/system/test_group_saves.py."""

from __future__ import annotations

from joined import index, root
from sharded_state import goes, same, state

from holdfast.checkpoint import load, save
from holdfast.coordination import HoldfastError

for number, more in enumerate([{"step": -1}, {"item": "a/b"}, {"metadata": {1}}]):
    path = f"{root}/{number}"
    error = goes(lambda: save(path, state(1), **(more if index == 1 else {})), HoldfastError)
    assert error.process == 1, error
    save(path, state(2))
    assert same(load(path, state(0)), 2)
