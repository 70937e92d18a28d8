"""Makes plans of trees of arrays, and keeps the last ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._plan import Plan


class Planner:
    """Makes the plans of a manager's saves; plans are cached by (treedef, avals, shardings). For one thread at a time.

    `index` and `count` are the group's; `processes[rank]` is the runtime index of each member (default: range(count)). Plans depend on
    `max_file_bytes` (the store's) too, so all processes pass the same.
    """

    def __init__(
        self, index: int = 0, count: int = 1, *, processes: Sequence[int] | None = None, max_file_bytes: int | None = None
    ) -> None:
        raise NotImplementedError

    def plan(self, tree: Any) -> Plan:
        """Returns the plan of a tree; raises UnsupportedLeaf naming the leaf's path and what to do."""
        raise NotImplementedError
