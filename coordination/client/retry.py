"""When a client tries again: after what pauses, and whether anybody listens."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

from ..address import connect

PROBE_S = 1.0

SPREAD_S_PER_PROCESS = 0.001
MOST_SPREAD_S = 1.0


_FIRST_S = 0.02
_FACTOR = 1.6
_MOST_S = 1.0


def pauses() -> Iterator[float]:
    """Yields pauses in seconds, for ever: each between half and all of a bound that grows to a
    second. So the processes of a job do not come back as one wave.
    """
    bound_s = _FIRST_S
    while True:
        # The module's generator: making one takes longer than a call.
        yield bound_s * random.uniform(0.5, 1.0)
        bound_s = min(_MOST_S, bound_s * _FACTOR)


def first_reconnect_s(num_processes: int, heartbeat_timeout_s: float) -> float:
    """Draws the seconds to wait before the first attempt to come back.

    A millisecond a process of the job, at most a second, and a small part of the heartbeat
    timeout: so a coordinator that was restarted meets the processes one after the other.
    """
    most_s = min(SPREAD_S_PER_PROCESS * num_processes, MOST_SPREAD_S, heartbeat_timeout_s / 20)
    return random.uniform(0.0, most_s)


def accepts_connections(address: str) -> bool:
    """Returns within `PROBE_S` whether somebody listens at host:port or unix:PATH.

    The kernel accepts connections for a process that stands still.
    """
    try:
        connect(address, PROBE_S).close()
    except (OSError, ValueError):
        return False
    return True


def why_unreachable(address: str) -> str:
    """Returns what a connection to an address shows, and what to look at. Blocks for PROBE_S."""
    try:
        connect(address, PROBE_S).close()
    except (ConnectionRefusedError, FileNotFoundError):
        return "nobody listens there: is it running, and is the address right?"
    except socket.gaierror:
        return "this host does not know that name: is the address right?"
    except TimeoutError:
        return "nothing comes back from there: is a firewall in between, or the host down?"
    except (OSError, ValueError) as error:
        return f"it cannot be reached ({error})"
    return (
        "somebody listens there who does not answer as a coordinator: is it another program, is it"
        " stopped, or does it want other certificates?"
    )
