"""What programs of tests/system/test_group_restores.py begin with."""

from __future__ import annotations

import glob

from joined import root
from sharded_state import state


def damage(step, process):
    (name,) = glob.glob(f"{root}/{step}/state/{process:05d}-*.safetensors")
    with open(name, "r+b") as file:
        data = file.read()
        file.seek(-1, 2)
        file.write(bytes([data[-1] ^ 1]))
    return name


class Counted:
    def __init__(self, group):
        self.group = group
        self.index = group.index
        self.count = group.count
        self.calls = []

    def barrier(self, *args, **options):
        self.calls.append(("barrier", args))
        return self.group.barrier(*args, **options)

    def gather(self, *args, **options):
        self.calls.append(("gather", args))
        return self.group.gather(*args, **options)

    def broadcast(self, *args, **options):
        self.calls.append(("broadcast", args))
        return self.group.broadcast(*args, **options)

    def report(self, **progress):
        pass


def shards(step):
    # Only what is sharded over the processes: each reads what it wrote itself, and nothing of the
    # others.
    return {"w": state(step)["w"]}
