"""Saves in Orbax's layout as a job of two whose processes are threads, and is killed on the way.

argv has the path, and the call before or after which it is killed.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import numpy as np

from holdfast.checkpoint import save
from holdfast.checkpoint.layouts.orbax.write import OrbaxWriter
from holdfast.checkpoint.single_save import SingleSave
from tests.support.checkpointing import at_once, groups

path, when, call = sys.argv[1:]
owner: Any = SingleSave if call == "run" else OrbaxWriter
real = getattr(owner, call)


def killed(*arguments: Any, **words: Any) -> Any:
    if when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    value = real(*arguments, **words)
    if when == "after":
        os.kill(os.getpid(), signal.SIGKILL)
    return value


setattr(owner, call, killed)
with groups(2) as both:
    at_once([lambda g=g: save(path, {"w": np.arange(4)}, layout="orbax", group=g) for g in both])
