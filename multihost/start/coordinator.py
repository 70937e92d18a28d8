"""The coordinator of a job that no launcher of ours started: process 0 starts it, and nobody joins one of an earlier start."""

from __future__ import annotations

import logging
import time

from holdfast.coordination import CoordinationError, CoordinationService, StatusClient

from ..errors import StartupFailed
from ..group.group_client import Deadline
from ..spec import ProcessSpec

_log = logging.getLogger(__name__)

_POLL_S = 0.5
_STATUS_TIMEOUT_S = 2.0
# How soon a coordinator whose processes have all died ends: the next start of the program wants its address.
_LINGER_S = 2.0
_HEARTBEAT_TIMEOUT_S = 100.0
_started: list[CoordinationService] = []  # they end by themselves, after all have left


def find_coordinator(spec: ProcessSpec, deadline: Deadline, heartbeat_timeout_s: float | None) -> None:
    """Returns when a coordinator that has not yet had all its processes can be joined at the address; process 0 starts it.

    One that has had them is of an earlier start, whose processes died without leaving: waits until it ends. Raises StartupFailed when
    it does not, CoordinationError when the address cannot be bound.
    """
    waited = False
    while (phase := phase_at(spec.coordinator)) not in (None, "", "gathering"):
        if not deadline.remaining_s():
            raise StartupFailed(
                f"the coordinator at {spec.coordinator} is {phase}: it belongs to an earlier start; let it end, or take another port",
                elapsed_s=deadline.elapsed_s(),
                timeout_s=deadline.timeout_s,
                knob="timeout_s",
            )
        if not waited:
            _log.warning("the coordinator at %s belongs to an earlier start; waiting for it to end", spec.coordinator)
            waited = True
        time.sleep(min(_POLL_S, deadline.remaining_s()))
    if phase is None and spec.process_id == 0:
        _start(spec, heartbeat_timeout_s)


def phase_at(address: str) -> str | None:
    """Returns how far the job at an address is ("gathering", "running", "ending"), "" where it does not say, None where nobody answers."""
    try:
        with StatusClient(address, timeout_s=_STATUS_TIMEOUT_S) as client:
            return client.status().phase
    except CoordinationError as error:
        return None if error.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED") else ""


def _start(spec: ProcessSpec, heartbeat_timeout_s: float | None) -> None:
    host, _, port = spec.coordinator.rpartition(":") if not spec.coordinator.startswith("unix:") else (spec.coordinator, "", "0")
    service = CoordinationService.spawn(
        spec.num_processes,
        host=host.strip("[]"),
        port=int(port),
        job=spec.job_id,
        attempt=spec.attempt,
        recoverable=True,
        survivable=True,
        heartbeat_timeout_s=heartbeat_timeout_s or _HEARTBEAT_TIMEOUT_S,
        linger_s=_LINGER_S,
    )
    _started.append(service)
