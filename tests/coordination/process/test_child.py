"""Children of this process, on real ones: no end is guessed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from holdfast.coordination.process.child import UNKNOWN_CODE, Child


def started(code: str) -> Child[bytes]:
    return Child([sys.executable, "-S", "-c", code])


def test_a_childs_code_is_its_own() -> None:
    """An exit code, a signal, and a child that still runs; asked again, it is the same."""
    assert started("raise SystemExit(3)").wait() == 3
    with started("import time; time.sleep(600)") as child:
        assert child.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0)
        child.kill()
        assert [child.wait(20), child.wait(), child.poll()] == [-9, -9, -9]
        assert not child.is_unknown


def test_a_code_that_somebody_else_took_is_no_success() -> None:
    """A handler of SIGCHLD that waits for all children takes codes away."""
    for timeout_s in (None, 20.0):
        child = started("raise SystemExit(0)")
        os.waitpid(child.pid, 0)
        assert child.wait(timeout_s) == UNKNOWN_CODE and child.is_unknown
