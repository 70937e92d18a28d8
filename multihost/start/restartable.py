"""Outlives attempts: a process whose peers are replaced joins the next attempt by itself.

What is kept is what takes long: the interpreter, its imports, and what jax has compiled and cached
on disk. Backends, arrays and the coordination client are of one attempt, and go with it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import re
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import jax
from jax._src import xla_bridge

from holdfast.coordination import (
    CoordinationClient,
    CoordinationError,
    HoldfastError,
    StatusClient,
)
from holdfast.coordination.address import beside
from holdfast.coordination.names import DECIDES, GROW_KEY, LOCAL_DEVICES, NEXT_KEY
from holdfast.proto.session_pb2 import NextAttempt, Place

from ..job import AttemptOver, Job, clear_caches, current_job, forget_job, settle_all
from ..liveness.health import health
from ..liveness.vitals import last_vitals
from ..parent import spec_of_launcher
from ..preemption.preemption import Preemption, current
from ..spec import ProcessSpec
from ..threads import start_daemon
from .departure import Departure
from .start import Membership, initialize, shutdown

_log = logging.getLogger(__name__)
T = TypeVar("T")

_STATUS = re.compile(r"[A-Z]+(_[A-Z]+)*: ")
_BACKENDS = "jax.extend.backend"  # brings Pallas along, which most programs do without
_MARGIN_S = 1.0  # beside the heartbeat timeout, after which a death is known
_FOR_EVER_MS = 10**10  # four months
_THREADS_END_S = 0.1  # after what they waited for was closed
_LOOK_S = 0.005


def run_restartable(train: Callable[[], T], **settings: Any) -> T:
    """Joins the job, calls `train`, and calls it again after another process has died.

    `settings` are those of `initialize()`. `train` is a function of no arguments that begins anew
    each time: it restores what was saved, makes its own data iterator, and lets every error out of
    it, with all that it opened closed. What outlives it, such as a logger, is made before.
    When it returns, the process leaves the job, and this returns what it returned. Whoever is
    replaced is waited for as long as the launcher does, its `startup_timeout_s`.

    The launcher decides: `holdfast run`, `ray` and `slurm` replace the process that died, and this
    one is in the next attempt without a start of its own; with another number, where the job goes
    on with fewer processes. They do so, too, where some processes
    have a notice of preemption, or the job is to have more or fewer of them, and `train` returns at
    the step at which all stop: this returns in those that leave, and calls `train` again in the
    others. One that sits in a call for a second,
    while no save needs it, ends itself and is replaced too; so is one that does not come within
    `rejoin_timeout_s`. Where a process did not call `run_restartable`, all are started again.
    Under other launchers, and alone, `train` is called once. An error that no other's death can
    cause is raised at once, any other when nobody has died within the heartbeat timeout. Call it
    from the main thread. It calls `gc.freeze()`, also after each attempt.
    """
    spec = spec_of_launcher() if DECIDES in os.environ else None
    importlib.import_module(_BACKENDS)  # now: the way back has no time for it
    gc.freeze()  # without a collection, for which the others of an attempt would wait
    while True:
        try:
            initialize(**settings)
            _stay()
            result = train()
        except SystemExit:
            member = current_job().get(Membership)
            if member is not None and member.failure():
                shutdown()  # now: no hook is told of it, and would wait for the others
            raise
        except (Exception, AttemptOver) as error:
            following = None if spec is None else _next_attempt(spec, error)
            if spec is None or following is None:
                raise
            # Before its frames go, and with them a manager that was left open.
            current_job().end()
            _clear_frames(error)
        else:
            following = None if spec is None else _hold(spec)
            if spec is None or following is None:
                shutdown()
                return result
            current_job().end()
            del result  # with its arrays
        _log.warning("this process stays, for attempt %d", following.attempt)
        _leave()
        _keep_out_of_collections()
        spec = _following_spec(spec, following)
        os.environ.update(spec.to_env())
        # There may be room for who is new only later than this process would wait by itself.
        if following.startup_timeout_s:  # an older launcher does not say it
            settings["timeout_s"] = max(settings.get("timeout_s", 0.0), following.startup_timeout_s)


def _following_spec(spec: ProcessSpec, following: NextAttempt) -> ProcessSpec:
    """Returns who this process is in the next attempt."""
    coordinator = following.coordinator
    if spec.host_address is not None:  # a relay stands between, with a socket for each attempt
        coordinator = beside(spec.coordinator, f"{following.attempt}")
    unmoved = Place(
        process_id=spec.process_id, local_rank=spec.local_rank, local_count=spec.local_count
    )
    place = following.places.get(spec.process_id, unmoved)
    if place.devices:
        os.environ[LOCAL_DEVICES] = place.devices
    return replace(
        spec,
        attempt=following.attempt,
        coordinator=coordinator,
        process_id=place.process_id,
        num_processes=following.num_processes,
        local_rank=place.local_rank,
        local_count=place.local_count,
    )


def _stay() -> None:
    """Says that this process can outlive the attempt, and listens for the attempt's end."""
    job = current_job()
    member = job.get(Membership)
    if member is None:
        return
    assert job.spec is not None
    departure = Departure(job.spec, member.client)
    job.put(departure)
    job.outlive()
    member.client.report(restartable=1)
    start_daemon("attempt", _listen, job, member.client, departure)
    if job.spec.process_id == 0:
        start_daemon("grow", _listen_for_room, current(), member.client)


def _listen(job: Job, client: CoordinationClient, departure: Departure) -> None:
    # It ends with the client: a call is then cancelled.
    with contextlib.suppress(CoordinationError):
        following = _wait_for_next(client)
        if client.process_id in following.staying:
            job.note_over(following.why)
            departure.see_off(following)


def _listen_for_room(preemption: Preemption, client: CoordinationClient) -> None:
    """Has all stop once the launcher says that there is room for more. Not by a signal: its notice
    would stand in the next attempt, too.
    """
    with contextlib.suppress(CoordinationError):
        client.blocking_key_value_get_bytes(GROW_KEY, _FOR_EVER_MS)
        preemption.grow(client)


def _wait_for_next(client: CoordinationClient) -> NextAttempt:
    return NextAttempt.FromString(client.blocking_key_value_get_bytes(NEXT_KEY, _FOR_EVER_MS))


def _hold(spec: ProcessSpec) -> NextAttempt | None:
    """Waits for what becomes of this process after a notice, where its loop was told to stop.

    Returns where it goes, None where it leaves.
    """
    member = current_job().get(Membership)
    running = current_job().get(Preemption)
    if member is None or running is None or not running.stops:
        return None
    running.set_waiting(True)
    settle_all(member.shutdown_timeout_s)
    try:
        member.client.report(held=1, **last_vitals())
        following = _wait_for_next(member.client)
    except CoordinationError:
        return None
    if spec.process_id in following.staying:
        return following
    if following.attempt:  # the others stay, and come to no barrier
        shutdown(0.0)
    return None


def _next_attempt(spec: ProcessSpec, error: BaseException) -> NextAttempt | None:
    """Returns where this process goes, None where the attempt is not over, or goes on without it.

    Blocks for at most the heartbeat timeout and a second: gloo's error comes before the death that
    caused it is known.
    """
    if not any(map(_may_come_from_another, _chain(error))):
        return None
    member = current_job().get(Membership)
    known_s = _MARGIN_S + (60.0 if member is None else member.client.heartbeat_timeout_s)
    if not isinstance(error, AttemptOver):  # for which the launcher has said it
        text = "waiting for at most %.0f s until the launcher says whether a death has caused %r"
        _log.warning(text, known_s, error)
    with (
        contextlib.suppress(CoordinationError),
        StatusClient(spec.coordinator, spec.new_credentials()) as client,
    ):
        told = client.wait_for_key(NEXT_KEY, timeout_s=known_s)
        following = NextAttempt.FromString(told)
        return following if spec.process_id in following.staying else None
    return None


def _may_come_from_another(error: BaseException) -> bool:
    """Returns whether the death of another process can cause the error: a call of ours that needs
    it, or a collective, whose error jax raises by several classes, with a status for a text.
    """
    if isinstance(error, HoldfastError):
        return error._may_follow_death
    is_known = isinstance(error, AttemptOver | jax.errors.JaxRuntimeError)
    return is_known or _STATUS.match(str(error)) is not None


def _chain(error: BaseException) -> list[BaseException]:
    """Returns an error, and those that led to it. One may be its own cause."""
    found: list[BaseException] = []
    known: BaseException | None = error
    while known is not None and known not in found:
        found.append(known)
        known = known.__cause__ or known.__context__
    return found


def _clear_frames(error: BaseException) -> None:
    """Lets go of what the frames of `train` hold: arrays of backends that are about to end."""
    for each in _chain(error):
        traceback.clear_frames(each.__traceback__)
        each.with_traceback(None)


def _leave() -> None:
    """Leaves the attempt, but for the notices of preemption, which the next one has to know."""
    job = current_job()
    departure = job.take(Departure)
    if departure is not None:
        departure.leave()
    # First of all: others wait at the backend's sockets, in collectives that reach the dead process
    # only by way of this one.
    _drop_backends()
    if job.client is not None:
        health().close()
    member = job.take(Membership)
    if member is not None:
        member.leave()
    kept = forget_job().get(Preemption)
    if kept is not None:
        kept.leave()
        current_job().put(kept)


def _keep_out_of_collections() -> None:
    """Has later collections look at nothing that is alive now, such as modules: leaving an attempt
    collects twice, others wait for that, and the modules of a trainer take 0.2 s each time. What
    is alive and goes with a later attempt would stay for good: nothing may hold a client now.
    """
    gc.collect()  # a save in flight has ended only now that its group has, and it held arrays
    until = time.monotonic() + _THREADS_END_S
    while _anything_left() and time.monotonic() < until:
        time.sleep(_LOOK_S)
        gc.collect()
    gc.freeze()


_left: list[weakref.ref[Any]] = []  # the backends of the attempt before, and its client


def _anything_left() -> bool:
    return any(kept() is not None for kept in _left)


def _drop_backends() -> None:
    if _anything_left():
        # A thread has let go of a save or the like only after that was kept out of collections.
        gc.unfreeze()
    _left.clear()
    if (client := current_job().client) is not None:
        _left.append(weakref.ref(client))
    if xla_bridge.backends_are_initialized():
        _left.extend(map(weakref.ref, xla_bridge.backends().values()))
    clear_caches()
    untyped: Any = jax
    untyped.clear_caches()
    importlib.import_module(_BACKENDS).clear_backends()
    gc.collect()  # cycles may hold a backend, and its sockets stay open with it
