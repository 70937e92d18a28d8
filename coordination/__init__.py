"""Who is alive, and what do we agree on: the coordination service and its clients. Never imports
jax.
"""

from .client.client import CoordinationClient
from .client.processes import ProcessInfo
from .client.status import StatusClient
from .credentials import Credentials
from .errors import (
    BarrierTimeout,
    CoordinationError,
    CoordinatorLost,
    Fenced,
    HoldfastError,
    ProcessLost,
)
from .process.relay import Relay
from .process.spawn import CoordinationService
from .settings import Endpoint, JobIdentity, ServiceTimeouts, Timeouts

__all__ = [
    "BarrierTimeout",
    "CoordinationClient",
    "CoordinationError",
    "CoordinationService",
    "CoordinatorLost",
    "Credentials",
    "Endpoint",
    "Fenced",
    "HoldfastError",
    "JobIdentity",
    "ProcessInfo",
    "ProcessLost",
    "Relay",
    "ServiceTimeouts",
    "StatusClient",
    "Timeouts",
]
