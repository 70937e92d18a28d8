"""What a service is started with. Pure values."""

from __future__ import annotations

from dataclasses import dataclass, field

from ._limits import Limits


@dataclass(frozen=True)
class Config:
    """What a service is started with."""

    num_tasks: int
    incarnation: int
    job: str = ""
    attempt: int = 0
    heartbeat_timeout_s: float = 100.0
    shutdown_timeout_s: float = 300.0
    recoverable: bool = False
    survivable: bool = False
    limits: Limits = field(default_factory=Limits)
