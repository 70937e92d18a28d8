"""Runs in the processes of tests/system/test_compat.py."""

from __future__ import annotations

from dataclasses import dataclass

from joined import index, root
from sharded_state import state

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
    assert manager.save(
        1, args=ocp.args.Composite(own=Own(index * 10), state=ocp.args.StandardSave(state(1)))
    )
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
