"""What programs of tests/system/test_local_tier.py begin with."""

from __future__ import annotations

import os
import sys

from joined import index, port, root
from sharded_state import same, state

from holdfast.checkpoint import CheckpointManager, EveryNSteps, Local

folders = sys.argv[5]
names = sys.argv[6].split(",")
local = Local(
    os.path.join(folders, names[index]),
    save_policy=EveryNSteps(2),
    timeout_s=20,
    failure_domain=names[index],
)
manager = CheckpointManager(root, save_policy=EveryNSteps(1_000_000), local=local)
if port == "launched":
    tier = manager._catalog.tier
    meeting = tier._place.meeting
    print("parts by TLS", meeting.tls is not None, "at", meeting.server.address, flush=True)


def go_on():
    step = manager.latest_step()
    if step is None:
        return 0
    assert same(manager.restore(like=state(0)), step)
    print("restored", step, flush=True)
    return step
