"""The stand-ins in a job of two processes: sharded state, policies and barriers, restored on one
process by holdfast and by its face.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from holdfast.checkpoint import load
from tests.support.checkpointing import run_together


def test_two_processes_save_and_restore(tmp_path: Path) -> None:
    """Every process calls the same; shardings come back, the listing is alike, an item's metadata
    is a target.
    """
    script = """
    from holdfast.compat import orbax as ocp
    from holdfast.compat.orbax import v1
    options = ocp.CheckpointManagerOptions(save_interval_steps=2, max_to_keep=1)
    with ocp.CheckpointManager(root, options=options, item_names=("state", "meta")) as manager:
        for step in range(4):
            items = ocp.args.Composite(state=ocp.args.StandardSave(state(step)), meta=ocp.args.JsonSave({"step": step}))
            assert manager.save(step, args=items) == (step % 2 == 0)
        manager.wait_until_finished()
        assert list(manager.all_steps()) == [2], manager.all_steps()
        target = jax.tree.map(lambda leaf: ocp.utils.to_shape_dtype_struct(leaf) if hasattr(leaf, "shape") else leaf, state(0))
        both = manager.restore(None, args=ocp.args.Composite(state=ocp.args.StandardRestore(target), meta=ocp.args.JsonRestore()))
        assert same(both["state"], 2) and both["meta"] == {"step": 2}
        assert manager.item_metadata(2)["state"]["w"].sharding == state(0)["w"].sharding
        ocp.multihost.sync_global_processes("done")
    v1.save(root + "/v1", {"w": state(7)["w"]})
    rows = v1.load(root + "/v1", {"w": state(0)["w"]})["w"].addressable_shards[0].data
    assert np.array_equal(rows, state(7)["w"].addressable_shards[0].data)
    assert v1.delete(root + "/v1") and not os.path.exists(root + "/v1")
    """
    run_together(script, 2, tmp_path)
    found = load(tmp_path / "2", item="state")
    assert np.array_equal(found["w"][0], np.arange(1 << 10) + 2) and int(found["n"]) == 2


def test_handlers_of_two_processes_write_together(tmp_path: Path) -> None:
    """Each process's handler writes its own file, and reads the files of both; so does a stateful
    checkpointable.
    """
    script = """
    from dataclasses import dataclass
    from holdfast.compat import orbax as ocp
    from holdfast.compat.orbax import v1

    class Handler(ocp.CheckpointHandler):
        def save(self, directory, args):
            (directory / f"of {index}").write_text(str(args.item))
        def restore(self, directory, args):
            return sorted((path.name, path.read_text()) for path in directory.iterdir())

    @ocp.args.register_with_handler(Handler, for_save=True, for_restore=True)
    @dataclass
    class Own(ocp.args.CheckpointArgs):
        item: object = None

    expected = [("of 0", "0"), ("of 1", "10")]
    with ocp.CheckpointManager(root) as manager:
        assert manager.save(1, args=ocp.args.Composite(own=Own(index * 10), state=ocp.args.StandardSave(state(1))))
        manager.wait_until_finished()
        assert manager.restore(1, args=ocp.args.Composite(own=Own()))["own"] == expected

    class Stateful:
        async def save(self, directory):
            ((await directory.await_creation()) / f"of {index}").write_text(str(index * 10))
        async def load(self, directory):
            self.found = sorted((path.name, path.read_text()) for path in directory.iterdir())

    v1.save_checkpointables(root + "/v1", {"state": {"w": state(7)["w"]}, "own": Stateful()})
    fresh = Stateful()
    v1.load_checkpointables(root + "/v1", {"own": fresh})
    assert fresh.found == expected
    """
    run_together(script, 2, tmp_path)
    assert load(tmp_path / "1", item="own") == {"of 0": b"0", "of 1": b"10"}
