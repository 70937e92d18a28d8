"""A hang, or none, under a watchdog that ends the process. argv: index, count, case."""

from __future__ import annotations

import ctypes
import sys
import threading

from holdfast.multihost import watchdog


def the_guilty_function(case: str) -> None:
    if case == "waits":
        threading.Event().wait()
    else:
        ctypes.PyDLL(None).sleep(100)  # which keeps the GIL


if sys.argv[3] == "ends in time":
    with watchdog(0.2, exit=True):
        pass
    threading.Event().wait(0.6)  # a timer that was left would act now
else:
    with watchdog(0.4, exit=True):
        the_guilty_function(sys.argv[3])
