"""Begins to save argv[1] in Orbax's layout, says so, and goes no further until its input ends."""

from __future__ import annotations

import sys

from holdfast.checkpoint.layouts.orbax.write import OrbaxWriter
from holdfast.checkpoint.storage.path import StorePath

writer = OrbaxWriter(StorePath.of(sys.argv[1]))
print("begun", flush=True)
sys.stdin.read()
writer.abandon()
