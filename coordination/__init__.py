"""Who is alive, and what do we agree on: the coordination service and its client. Never imports jax."""

from .client.client import CoordinationClient
from .client.processes import ProcessInfo
from .credentials import Credentials
from .deadline import Deadline
from .errors import BarrierTimeout, CoordinationError, CoordinatorLost, Fenced, HoldfastError, ProcessLost
from .process.relay import Relay
from .process.spawn import CoordinationService

__all__ = [
    "BarrierTimeout",
    "CoordinationClient",
    "CoordinationError",
    "CoordinationService",
    "CoordinatorLost",
    "Credentials",
    "Deadline",
    "Fenced",
    "HoldfastError",
    "ProcessInfo",
    "ProcessLost",
    "Relay",
]
