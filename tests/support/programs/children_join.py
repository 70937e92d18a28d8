"""Joins its job where every child comes by, and starts children: `children_join.py INDEX COUNT
[ADDRESS]`; a child of its own has the argument "alone" or "joins" besides.
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import tempfile

import jax
from starting import count, index

from holdfast import multihost
from holdfast.checkpoint import CheckpointManager

*arguments, role = [*sys.argv[3:], "" if sys.argv[-1] not in ("alone", "joins") else None]
if role is None:
    role = arguments.pop()


def join() -> None:
    if arguments:
        multihost.initialize(arguments[0], count, index)
    else:
        multihost.initialize()


def saves_alone() -> None:
    with tempfile.TemporaryDirectory() as folder, CheckpointManager(folder) as manager:
        manager.save(1, {"x": 1.0}).wait()
        print("saved", manager.latest_step(), flush=True)


if role == "alone":
    multihost.initialize(num_processes=1)
    print("alone", jax.process_count(), flush=True)
    saves_alone()
else:
    join()

if __name__ == "__main__" and not role:
    if index == 0:
        for method in ("spawn", "forkserver"):
            child = multiprocessing.get_context(method).Process(target=saves_alone)
            child.start()
            child.join()
            print(method, "ended with", child.exitcode, flush=True)
        for role in ("joins", "alone"):
            code = subprocess.run([sys.executable, *sys.argv, role], check=False).returncode
            print(role, "ended with", code, flush=True)
    multihost.sync_global_processes("unharmed")
    assert multihost.global_max([index]) == [count - 1]
    multihost.shutdown()
