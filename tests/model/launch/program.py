"""What the processes of a job do where nothing happens to them."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Program:
    """A training loop. Its processes make their steps together."""

    steps: int = 20
    step_s: float = 1.0
    save_every: int = 3  # steps; 0: saves nothing
    write_s: float = 1.0  # for the share of one process
    commit_s: float = 0.5
    shutdown_s: float = 0.3
    leaves_with: int = 75  # after a notice
    patience_s: float = math.inf  # a process fails so long after another has gone
    says_done: bool = False
    echoes: bool = True  # a SIGTERM comes back as the process's own notice
    strangers: tuple[int, ...] = ()  # processes without a client
    outlives: bool = False  # its processes call `run_restartable`


def shown(value: Any) -> str:
    """Returns a value as it is written, without what is as by default."""
    if isinstance(value, float) and math.isinf(value):
        return "math.inf"
    if not hasattr(value, "__dataclass_fields__"):
        return repr(value)
    named = []
    for each in fields(value):
        if getattr(value, each.name) != each.default:
            named.append(f"{each.name}={shown(getattr(value, each.name))}")
    return f"{type(value).__name__}({', '.join(named)})"
