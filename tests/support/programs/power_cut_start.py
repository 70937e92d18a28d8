"""What programs of tests/system/test_power_cut.py begin with."""

from __future__ import annotations

import sys

from holdfast.checkpoint import EveryNSteps, KeepLast, Local, Options

incremental = sys.argv[3] == "incremental"
settings = {"keep_policy": KeepLast(2), "options": Options(incremental=incremental)}
if sys.argv[3] == "local":
    settings |= {
        "save_policy": EveryNSteps(1000),
        "local": Local(sys.argv[1] + "-host", save_policy=EveryNSteps(1), sync=True),
    }
