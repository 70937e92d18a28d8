"""Runs in the processes of tests/checkpoint/tools/test_convert.py."""

from __future__ import annotations

import pathlib
import re
import sys

import jax

from holdfast.checkpoint.layouts.detect import open_checkpoint
from holdfast.checkpoint.storage.path import StorePath, open_storage
from holdfast.checkpoint.tools.convert import convert

jax.numpy.zeros(1).block_until_ready()


def peak():
    return int(re.search(r"VmHWM:\s+(\d+)", pathlib.Path("/proc/self/status").read_text())[1])


pathlib.Path("/proc/self/clear_refs").write_text(
    "5"
)  # the peak begins here; without, that of the process that forked this one counts
before = peak()
convert(open_checkpoint(sys.argv[1]), StorePath(open_storage(sys.argv[2])), sys.argv[3])
print(peak() - before >> 10)
