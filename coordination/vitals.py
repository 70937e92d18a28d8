"""The file in memory by which a process lets others of its host look at it."""

from __future__ import annotations

import signal

LOOK_SIGNAL = int(getattr(signal, "SIGRTMAX", 64)) - 2
"""Has a process of a job write its stacks from C into its file of vitals, though some thread holds
its interpreter.
"""
VITALS_INTERVAL_S = 0.5
"""So often a process whose interpreter runs touches its file of vitals."""


def vitals_file(process_id: int, thread: int) -> str:
    """Returns the name of the file in memory by which a process lets others of its host look at it;
    `thread` takes LOOK_SIGNAL.
    """
    return f"holdfast-vitals-{process_id}-{thread}"
