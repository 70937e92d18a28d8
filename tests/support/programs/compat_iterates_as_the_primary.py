"""Runs in the processes of tests/system/test_compat.py: a step comes between the looks of two."""

from __future__ import annotations

import os

from joined import index, root

from holdfast.compat import orbax as ocp

utils = ocp.checkpoint_utils
steps = utils.checkpoints_iterator(root, timeout=0)
if index == 0:
    print("step", next(steps), flush=True)
    os.rename(f"{root}/not-yet/2", f"{root}/2")
ocp.multihost.sync_global_processes("there")
for step in steps:
    print("step", step, flush=True)
with utils.wait_for_new_checkpoint(root, until_step=3, timeout=0) as step:
    print("step", step, flush=True)
