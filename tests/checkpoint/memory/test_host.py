from __future__ import annotations

from holdfast.checkpoint.memory import host
from holdfast.checkpoint.memory.budget import MemoryBudget
from holdfast.checkpoint.memory.levels import UNLIMITED_BYTES


def test_this_machine_says_something() -> None:
    """On Linux there is always the machine's own level."""
    assert host.look_at_memory()[-1].name == "this machine"
    assert all(number > 0 for number in host.cgroup_numbers().values())
    assert 0 < MemoryBudget().free().nbytes < UNLIMITED_BYTES
