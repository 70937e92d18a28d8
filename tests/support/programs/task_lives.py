"""Joins its job, and leaves what it was told in the folder of its arguments. In its first life it
then waits for a process that never comes, with a value at the coordinator that nobody has read.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import jax

from holdfast import multihost

folder = Path(sys.argv[1])
life = sys.argv[2]
multihost.initialize(timeout_s=60)
index = jax.process_index()
group = multihost.default_group()
is_first = life == "first"
told = []
if not index or not is_first:
    told.append(group.broadcast("life", None if index else life.encode(), timeout_s=60).decode())
told.append(str(multihost.global_max([index])[0]))
(folder / f"{life}.{index}").write_text(f"{os.getpid()} {' '.join(told)}")
if is_first:
    group.barrier(f"never {index}", timeout_s=300)
multihost.shutdown()
