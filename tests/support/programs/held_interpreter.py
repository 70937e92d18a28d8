"""A process with vitals: waits for a line, then holds its interpreter in a second function."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from holdfast.multihost.liveness.vitals import Vitals


class Nobody:
    """Takes reports, and tells nobody."""

    def report(self, **values: Any) -> None:
        pass


def the_innocent_function() -> None:
    print("there", flush=True)
    sys.stdin.readline()


def the_guilty_function() -> None:
    print("held", flush=True)
    ctypes.PyDLL(None).sleep(600)


vitals = Vitals(Nobody(), 5, 1)  # type: ignore[arg-type]
the_innocent_function()
the_guilty_function()
