"""Runs in the processes of tests/system/test_shared_restores.py: three waves that peers share.

The store of process 1 hangs at the header of the pack until a pipe has a writer, and process 2
stops itself after a wave.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from joined import index, root

from holdfast.checkpoint.agreement.restore_verdict import RestoreAgreement
from holdfast.checkpoint.format.record import read_record
from holdfast.checkpoint.restoring.reader import ReadRequest
from holdfast.checkpoint.restoring.restore import allocate
from holdfast.checkpoint.restoring.restore_peers import RestorePeers
from holdfast.checkpoint.restoring.shared_reader import SharedReader
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.multihost import default_group

WAVES = 3
HANGS = 1
STOPS = 2


class Hanging(LocalStorage):
    """A store that does not bring the header of a pack before it is let go."""

    def read(self, name: str, offset: int, buffers: Sequence[memoryview]) -> int:
        if offset == 0 and sum(buffer.nbytes for buffer in buffers) < 1 << 20:
            pipe.open("rb").close()
        return super().read(name, offset, buffers)


pipe = Path(f"{root}.pipe")
storage = LocalStorage(root)
item = read_record(storage, "").items["state"]
agreement = RestoreAgreement(default_group(), "restore", "the state", 60.0)
with RestorePeers(default_group(), agreement, "once", address="127.0.0.1") as peers:
    reader = SharedReader(Hanging(root) if index == HANGS else storage, "", item, peers)
    leaves = sorted(item.leaves, key=lambda leaf: leaf.path)
    reads = [ReadRequest(leaf, tuple((0, size) for size in leaf.shape)) for leaf in leaves]

    def restore() -> None:
        reader.foresee(reads)
        for wave in range(WAVES):
            reader.fill(reads[wave::WAVES], allocate)
            print(f"wave {wave} held", flush=True)
            if index == STOPS and wave == 0:
                os.kill(os.getpid(), signal.SIGSTOP)
        print("all held", flush=True)
        reader.finish()

    _, verdict = agreement.run(restore, root)
if verdict.error is not None:
    raise verdict.error
for number, read in enumerate(reads):
    want = np.random.default_rng(number).standard_normal((2048, 512))
    assert np.array_equal(read.array, want), number
print(dict(peers.counts), "done", flush=True)
