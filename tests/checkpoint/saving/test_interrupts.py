"""Ctrl-C at any line of a save: the manager goes on, and no later call waits for a save that was
never begun.
"""

from __future__ import annotations

import gc
import itertools
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from holdfast.checkpoint import CheckpointManager, KeepLast, verify

STATE = {"x": np.arange(3.0)}
FILES = ("manager.py", "lanes.py", "async_saver.py", "stager.py")


class _Interrupt:
    """Raises KeyboardInterrupt in the main thread, at the nth line that it runs in the files of a
    save's beginning.
    """

    def __init__(self, line: int) -> None:
        self._remaining = line
        self.reached = ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.endswith(FILES) or "holdfast" not in frame.f_globals.get(
            "__name__", ""
        ):
            return None
        if event == "line" and not self.reached:
            self._remaining -= 1
            if self._remaining < 0:
                self.reached = f"{frame.f_code.co_name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self


@pytest.mark.timeout(100)
@pytest.mark.parametrize("kind", ["disk", pytest.param("memory", marks=pytest.mark.slow)])
def test_a_manager_survives_an_interrupt_at_any_line(kind: str, tmp_path: Path) -> None:
    """Each line that the calling thread runs in `save` is interrupted once; the next save is there
    in time, and every step is whole. Behind a network arrays are copied while they are written.
    """
    for line in itertools.count():
        root = f"{tmp_path}/{line}" if kind == "disk" else f"memory://interrupts/{line}"
        interrupt = _Interrupt(line)
        with CheckpointManager(root, keep_policy=KeepLast(5)) as manager:
            manager.save(1, STATE)
            manager.wait_until_finished()
            state = {"x": np.full(1 << 16, 2.0)}
            gc.disable()  # what is left of an earlier manager would be interrupted in __del__
            sys.settrace(interrupt)
            try:
                manager.save(2, state)
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)
                gc.enable()
            state["x"][:] = 0.0
            manager.wait_until_finished(10)
            manager.save(3, STATE)
            manager.wait_until_finished(10)
            assert {1, 3} <= set(manager.all_steps()) <= {1, 2, 3}, interrupt.reached
            for step in manager.all_steps():
                verify(f"{root}/{step}")
            if 2 in manager.all_steps():
                assert (manager.restore(2)["x"] == 2.0).all(), interrupt.reached
        if not interrupt.reached:
            assert line > 30, "no line was interrupted"
            return
