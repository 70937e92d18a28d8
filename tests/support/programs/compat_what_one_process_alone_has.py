"""Runs in the processes of tests/system/test_compat.py."""

from __future__ import annotations

from pathlib import Path

from joined import index, root

from holdfast.compat import orbax as ocp

metadata = None if index else {"run": "a"}
options = ocp.CheckpointManagerOptions(todelete_subdir="trash")
with ocp.CheckpointManager(root, options=options, metadata=metadata) as manager:
    print("metadata", manager.metadata().custom_metadata)
    manager.save(1, args=ocp.args.StandardSave({"x": 1}))
    manager.wait_until_finished()
    if index == 0:
        Path(root, "trash").write_text("a file, where a folder is to be")
    try:
        manager.delete(1)
    except OSError as error:
        print("error", error)
    print("steps", manager.all_steps(), flush=True)
