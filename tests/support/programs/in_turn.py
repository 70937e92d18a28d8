"""Runs programs that join a job one after the other in the same processes: they join once.

argv[4] is JSON: of each program its name, its root and its further arguments. What it prints comes
after a line with its name. Modules of programs that it imported are imported anew by the next one.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import joined
import sharded_state  # noqa: F401 it knows of no root

from holdfast.multihost import sync_global_processes

HERE = Path(__file__).resolve().parent
known = set(sys.modules)
for name, root, *arguments in json.loads(joined.root):
    joined.root = root
    sys.argv[4:] = [root, *arguments]
    print(f"--- {name}", flush=True)
    runpy.run_path(str(HERE / f"{name}.py"), run_name="__main__")
    for module in set(sys.modules) - known:
        if Path(getattr(sys.modules[module], "__file__", None) or "/").parent == HERE:
            del sys.modules[module]
    sync_global_processes(f"end of {name}", timeout=60)
