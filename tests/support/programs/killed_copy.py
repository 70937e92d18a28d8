"""Copies or converts a checkpoint, and dies in between: `SOURCE TARGET cp|LAYOUT CALLS`."""

from __future__ import annotations

import os
import sys

from holdfast.checkpoint.layouts.detect import open_checkpoint
from holdfast.checkpoint.steps.object_claims import open_claims
from holdfast.checkpoint.storage.path import StorePath, open_storage
from holdfast.checkpoint.tools.convert import convert
from holdfast.checkpoint.tools.copy import copy_checkpoint


class Death:
    """Ends the process at a call."""

    def __init__(self, calls: int) -> None:
        self._left = calls

    def __call__(self, done_bytes: int) -> None:
        self._left -= 1
        if self._left == 0:
            os._exit(9)


source, target, what, calls = sys.argv[1:]
store = open_storage(target)
claims = open_claims(store)
die = Death(int(calls))
if what == "cp":
    copy_checkpoint(StorePath(open_storage(source)), StorePath(store, "0"), claims, die)
else:
    convert(open_checkpoint(source), StorePath(store), what, claims=claims, progress=die)
