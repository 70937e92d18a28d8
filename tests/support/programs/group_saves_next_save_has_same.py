"""Runs in the processes of tests/system/test_group_saves.py."""

from __future__ import annotations

import time

from joined import index, root
from sharded_state import goes, state

from holdfast.checkpoint import CheckpointManager, Options, SaveFailed

with CheckpointManager(root, options=Options(save_timeout_s=60)) as manager:

    def interrupted(*_):
        raise KeyboardInterrupt

    mistakes = [
        (lambda: manager.save("7", state(7)), TypeError),
        (lambda: manager.save(7, items={"a/b": state(7)}), ValueError),
        (lambda: manager.save(7, state(7), metadata={1, 2}), TypeError),
        (lambda: manager.save(7), ValueError),
    ]
    began = time.monotonic()
    for step, (mistake, kind) in enumerate(mistakes, 1):
        if index == 1:
            goes(mistake, kind)
        else:
            manager.save(7, state(7))
            error = goes(manager.wait_until_finished, SaveFailed)
            assert error.process == 1 and kind.__name__ in str(error), error
        manager.save(step, state(step))
        manager.wait_until_finished()
    if index == 1:
        stage, manager._durable._stager.stage = manager._durable._stager.stage, interrupted
        goes(lambda: manager.save(7, state(7)), KeyboardInterrupt)
        manager._durable._stager.stage = stage
    else:
        manager.save(7, state(7))
        assert "interrupted" in str(goes(manager.wait_until_finished, SaveFailed))
    manager.save(9, state(9))
    manager.wait_until_finished()
    assert manager.all_steps() == [1, 2, 3, 4, 9] and time.monotonic() - began < 45
