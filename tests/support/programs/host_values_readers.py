"""Each process saves the state of a reader of its own."""

from __future__ import annotations

from joined import index, root
from reader import Reader
from sharded_state import goes

from holdfast.checkpoint import CheckpointManager, Json, SaveFailed

with CheckpointManager(root) as manager:
    manager.save(
        1,
        items={
            "data": Reader(70 + index),
            "note": Json({"of": index}, per_process=True),
            "same": Json([1]),
        },
    )
    manager.wait_until_finished()
    assert manager.restore(1, item="same") == manager.restore(1, item="same", process=1) == [1]
    manager.save(2, items={"data": Reader(70 + index), "note": Json({"of": index})})
    error = goes(manager.wait_until_finished, SaveFailed)
    assert (
        error.process == 1
        and "'note': its JSON on processes [1] differs from that of process 0" in str(error)
    ), error
    assert manager.restore(1, like=Reader(0), item="data").at == 70 + index
    assert manager.restore(1, like=Reader(0), item="data", process=1).at == 71
    assert manager.restore(1, item="note") == {"of": index}
    assert manager.restore(1, item="note", process=1) == {"of": 1}
