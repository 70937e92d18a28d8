"""Joins a job and leaves it: our client first, jax.distributed on top of the same coordinator, and
the checks that all are there.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import math
import os
import sys
import threading
from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax._src import distributed, xla_bridge

from holdfast.coordination import (
    CoordinationClient,
    CoordinationError,
    Credentials,
    JobIdentity,
    ProcessInfo,
    Relay,
    Timeouts,
)
from holdfast.coordination.client.connection import keep_for_ever

from ..errors import StartupFailed, StartupTimeout
from ..group.group_client import Deadline, forget_group_client, group_client_of
from ..group.ids import forget_ids, initialize_ids
from ..group.runtime import set_client
from ..liveness.health import health
from ..liveness.vitals import forget_vitals, start_vitals, stop_vitals
from ..preemption import preemption
from ..preemption.sources import Source
from ..ray_train import is_worker
from ..spec import ProcessSpec
from .bounded import end_jax, ended_by_loss
from .coordinator import find_coordinator, gather_workers
from .discovery import GIVEN, DiscoveredProcess, discover_process, own_tls, set_collective_timeout

_log = logging.getLogger(__name__)

# jaxlib's agent ends its process when the coordinator is silent for so long; ours decides about
# that instead.
_AGENT_HEARTBEAT_S = 86400
# How long an interpreter that exits without shutdown() waits for the others.
_EXIT_TIMEOUT_S = 10.0


@dataclasses.dataclass(frozen=True)
class _Timeouts:
    """How long silence, a collective (both None: as the coordinator says) and leaving the job may
    take.
    """

    heartbeat_s: float | None
    collective_s: float | None
    shutdown_s: float


@dataclasses.dataclass(frozen=True)
class _Job:
    """What `initialize()` leaves for `shutdown()`."""

    spec: ProcessSpec
    client: CoordinationClient
    shutdown_timeout_s: float
    relay: Relay | None = None


_job: _Job | None = None


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: int | Sequence[int] | None = None,
    spec: ProcessSpec | None = None,
    timeout_s: float = 300.0,
    heartbeat_timeout_s: float | None = None,
    shutdown_timeout_s: float = 300.0,
    collective_timeout_s: float | None = None,
    preemption_sources: Sequence[Source] | None = None,
) -> None:
    """Joins the other processes of the job; alone, it only starts to watch for preemption notices.

    Who this process is comes from the arguments (a whole `spec`, or the three that
    `jax.distributed.initialize` takes), then from the environment of `holdfast run` or another
    launcher of ours, then from Ray Train, then from what jax detects (Slurm, Open MPI, TPU,
    Kubernetes). A launcher of ours has started the coordinator; else process 0 does, as a process
    of its own, unless one listens at the address already.

    Call it once, from the main thread (in Ray Train: from the training function), before any
    computation. It blocks until all are there, at most `timeout_s`, and logs how many are missing.
    A process that is silent for the heartbeat timeout is dead to the others. It is the
    coordinator's: `heartbeat_timeout_s` sets it (default 100) where process 0 starts the
    coordinator, and must be left out or equal where a launcher did. On CPU a collective ends with
    an error when a peer has not come for `collective_timeout_s` (default: the heartbeat timeout),
    unless XLA_FLAGS says otherwise.

    Raises StartupTimeout naming the missing processes, ProcessLost naming one that died on the way,
    StartupFailed for a job that is smaller than asked for, CoordinatorLost, Fenced when the
    coordinator belongs to another job or attempt, CoordinationError (FAILED_PRECONDITION) when it
    has another heartbeat timeout, and RuntimeError when called twice or too late. A signal that
    means preemption ends the process until all have come, and is a notice from then on.
    """
    if _job is not None or distributed.global_state.client is not None:
        hint = (
            "; JaxTrainer leaves it to initialize() where it is given jax_config=JaxConfig()"
            if is_worker()
            else ""
        )
        raise RuntimeError(
            "this process has joined a job already: call initialize() once, and"
            f" jax.distributed.initialize() never{hint}"
        )
    if xla_bridge.backends_are_initialized():
        raise RuntimeError(
            "initialize() comes before any computation, jax.devices() and the like: the backend is"
            " up already"
        )
    deadline = Deadline(timeout_s)
    given = dict(zip(GIVEN, (coordinator_address, num_processes, process_id), strict=True))
    devices = [local_device_ids] if isinstance(local_device_ids, int) else local_device_ids
    discovered = discover_process(
        spec,
        {field: value for field, value in given.items() if value is not None},
        devices,
        timeout_s,
    )
    preemption.start(None, sources=preemption_sources)
    if discovered.worker is not None:
        discovered = dataclasses.replace(
            discovered, spec=gather_workers(discovered.worker, deadline, heartbeat_timeout_s)
        )
    if discovered.spec is None or (discovered.spec.num_processes == 1 and not discovered.launched):
        return
    preemption.set_waiting(True)
    try:
        _join(
            discovered,
            discovered.spec,
            _Timeouts(heartbeat_timeout_s, collective_timeout_s, shutdown_timeout_s),
            deadline,
        )
    except BaseException as error:
        _give_up(f"{type(error).__name__}: {error}")
        raise
    preemption.set_waiting(False)


def shutdown(timeout_s: float | None = None) -> None:
    """Leaves the job in order: waits until all have come here (at most `timeout_s`, default:
    `initialize()`'s), then disconnects.

    While it waits, a signal that means preemption is still a notice, on which the others agree;
    afterwards signals are as before `initialize()`. A process that is alone, or has never joined,
    only stops watching for notices. Never raises because of another process: what went wrong is
    logged. A second call does nothing.
    """
    global _job
    job = _job
    _job = None
    if job is not None:
        preemption.set_waiting(True)
        health().close()  # from the barrier on the others leave, which is no loss
        deadline = Deadline(job.shutdown_timeout_s if timeout_s is None else timeout_s)
        try:
            job.client.wait_at_barrier("holdfast/shutdown", deadline.remaining_ms())
        except CoordinationError as error:
            _log.warning("leaving without the others: %s", error)
        _leave(job)
    preemption.close()


def is_initialized() -> bool:
    """Returns whether `initialize()` has joined a job of several processes."""
    return _job is not None


def _join(
    discovered: DiscoveredProcess, spec: ProcessSpec, timeouts: _Timeouts, deadline: Deadline
) -> None:
    """Does what `initialize()` promises, once it is known who this process is."""
    global _job
    if discovered.launched:
        for line in spec.set_slices(os.environ):
            _log.warning("stale variable %s", line)
    with preemption.gathering():
        if not discovered.launched:
            find_coordinator(spec, deadline, timeouts.heartbeat_s)
        client = _connect(spec, spec.credentials, deadline, timeouts)
    _job = _Job(spec, client, timeouts.shutdown_s)
    set_client(client, spec)
    start_vitals(client, spec.process_id, spec.num_processes)
    group_client = group_client_of(client)
    group_client.loss_known_s = client.heartbeat_timeout_s + 1
    preemption.start(client, spec.process_id, spec.num_processes, lost=group_client.lost_tasks)
    set_collective_timeout(timeouts.collective_s or client.heartbeat_timeout_s)
    with ended_by_loss(group_client, spec, spec.credentials, deadline):
        address, tls = _reach_for_jax(spec, spec.credentials)
        _start_jax(spec, address, tls, discovered.devices, deadline, timeouts.shutdown_s)
        initialize_ids(client=client, timeout_s=deadline.remaining_s())
    health()  # watches from here on: a life that ends before somebody asks is noticed too
    _log.info(
        "process %d of %d, coordinator %s, attempt %d",
        spec.process_id,
        spec.num_processes,
        spec.coordinator,
        spec.attempt,
    )


def _reach_for_jax(spec: ProcessSpec, credentials: Credentials) -> tuple[str, dict[str, str]]:
    """Returns where jaxlib's agent reaches the coordinator, and with which options: by itself, by
    its own TLS, or through a relay.
    """
    global _job
    if credentials.empty:
        return spec.coordinator, {}
    if options := own_tls(spec):
        return spec.coordinator, options
    assert _job is not None
    relay = Relay.spawn(spec.coordinator, credentials, [spec.process_id])
    _job = dataclasses.replace(_job, relay=relay)
    return relay.address, {}


def _connect(
    spec: ProcessSpec, credentials: Credentials, deadline: Deadline, timeouts: _Timeouts
) -> CoordinationClient:
    arrivals = _Arrivals(spec.num_processes)
    client = CoordinationClient(
        spec.coordinator,
        spec.process_id,
        job=JobIdentity(num_processes=spec.num_processes, name=spec.job_id, attempt=spec.attempt),
        timeouts=Timeouts(
            heartbeat_s=timeouts.heartbeat_s,
            init_s=deadline.remaining_s(),
            shutdown_s=timeouts.shutdown_s,
        ),
        credentials=credentials,
    )
    client.watch_processes(arrivals.update)
    try:
        client.connect()
    except CoordinationError as error:
        if error.code != "DEADLINE_EXCEEDED":
            raise
        raise StartupTimeout(
            f"the job did not start in {deadline.timeout_s:g} s: {arrivals}",
            attempt=spec.attempt,
            processes=arrivals.missing,
            elapsed_s=deadline.elapsed_s(),
            timeout_s=deadline.timeout_s,
            knob="timeout_s",
        ) from error
    arrivals.all_arrived()
    return client


class _Arrivals:
    """Logs how many processes have arrived, until all have. `update` is called from a thread of the
    client.
    """

    def __init__(self, num_processes: int) -> None:
        self._num_processes = num_processes
        self._here: frozenset[int] = frozenset()
        self._lock = threading.Lock()

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(process for process in range(self._num_processes) if process not in self._here)

    def __str__(self) -> str:
        return arrival_line(self._here, self._num_processes)

    def update(self, processes: Sequence[ProcessInfo]) -> None:
        self._set(frozenset(process.process_id for process in processes if process.alive))

    def all_arrived(self) -> None:
        self._set(frozenset(range(self._num_processes)))

    def _set(self, here: frozenset[int]) -> None:
        with self._lock:
            if here == self._here or len(self._here) == self._num_processes:
                return
            self._here = here
        _log.info("%s", self)


def arrival_line(here: Collection[int], num_processes: int) -> str:
    """Returns how far a start is, such as "3 of 4 processes, waiting for 2"."""
    missing = [str(process) for process in range(num_processes) if process not in here]
    return f"{len(here)} of {num_processes} processes" + (
        f", waiting for {', '.join(missing)}" if missing else ""
    )


def _start_jax(
    spec: ProcessSpec,
    address: str,
    tls: dict[str, str],
    devices: Sequence[int] | None,
    deadline: Deadline,
    shutdown_timeout_s: float,
) -> None:
    """Puts jax.distributed on our coordinator, and refuses a job that is smaller than asked for
    (INIT-1). Brings the backend up.
    """
    configure: Any = jax.config.update  # jax does not type it
    configure("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        address,
        spec.num_processes,
        spec.process_id,
        local_device_ids=devices,
        cluster_detection_method="deactivate",
        initialization_timeout=max(1, math.ceil(deadline.remaining_s())),
        heartbeat_timeout_seconds=_AGENT_HEARTBEAT_S,
        shutdown_timeout_seconds=math.ceil(shutdown_timeout_s),
        coordinator_bind_address="127.0.0.1:0",  # process 0's own service idles on a spare port
        partition_index=spec.slice_id if spec.num_slices > 1 else None,
        **tls,  # type: ignore[arg-type]
    )
    if (found := jax.process_count()) != spec.num_processes:
        raise StartupFailed(
            f"{spec.num_processes} processes were asked for, but jax sees {found}: its platform"
            f" {jax.default_backend()!r} has not joined; check JAX_PLATFORMS and, on CPU,"
            " jax_cpu_collectives_implementation",
            attempt=spec.attempt,
            processes=(spec.process_id,),
        )


def _leave(job: _Job, why: str = "") -> None:
    """Leaves the job: jaxlib's agent first, which would end the process if its task were in error.
    With a reason, leaves as a failure.
    """
    end_jax()
    if job.relay is not None:
        job.relay.close()
    stop_vitals()
    set_client(None)
    forget_group_client(job.client)
    forget_ids()
    try:
        if why:
            job.client.report_error(why)
        else:
            job.client.shutdown()
    except CoordinationError as error:
        _log.warning("the coordinator did not record that this process leaves: %s", error)
    finally:
        job.client.close()


def _give_up(why: str) -> None:
    """Leaves at once, and reports why to the others."""
    global _job
    job = _job
    _job = None
    if job is not None:
        _leave(job, why)
    preemption.close()


@atexit.register
def _at_exit() -> None:
    """Leaves in order after a program that ended well, at once after one that died of an
    exception.
    """
    error = getattr(sys, "last_value", None)
    if _job is not None and error is not None:
        _give_up(f"the process ends with {type(error).__name__}: {error}")
    elif _job is not None:
        shutdown(_EXIT_TIMEOUT_S)


def _forget_in_child() -> None:
    """Leaves a forked child as nobody: it neither speaks for its parent nor leaves in its place,
    and jax's own exit does not either.
    """
    global _job
    job = _job
    _job = None
    if job is None:
        return
    state = distributed.global_state
    for inherited in (
        state.preemption_sync_manager,
        state.client,
        state.service,
        *xla_bridge._backends.values(),
    ):
        keep_for_ever(inherited)  # destroying them waits for threads that the child does not have
    state.preemption_sync_manager = state.client = state.service = None
    if job.relay is not None:
        job.relay.abandon()
    forget_vitals()
    set_client(None)
    forget_ids()


os.register_at_fork(after_in_child=_forget_in_child)
