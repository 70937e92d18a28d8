"""Who is alive, and what do we agree on: the coordination service and its clients. Never imports
jax.
"""

import os

# gRPC's own handlers of a fork restart its threads in the child, which now and then waits for one
# of them for ever, before any code of Python. A child makes no use of a parent's connection. gRPC
# reads this when it is imported; what a user has set stands.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

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
