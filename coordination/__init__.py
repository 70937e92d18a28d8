"""Who is alive, and what do we agree on: the coordination service and its client. Never imports jax."""

from ._client import CoordinationClient
from ._credentials import Credentials
from ._deadline import Deadline
from ._errors import BarrierTimeout, CoordinationError, CoordinatorLost, Fenced, HoldfastError, ProcessLost
from ._processes import ProcessInfo
from ._relay import Relay
from ._spawn import CoordinationService

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
