"""Joins a job and leaves it: our client first, then jax.distributed on the same coordinator.

The two hooks of this room stand here, where all parts of a job are known: at the end of the
interpreter, and in a forked child.
"""

from __future__ import annotations

import atexit
import dataclasses
import gc
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType

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
from holdfast.coordination.client.fork import keep_for_ever
from holdfast.coordination.diagnosis.summary import counted
from holdfast.coordination.names import LAST_WORDS
from holdfast.coordination.vitals import ENDS_WITH, LEAVES_AS_ASKED, fill_standard_streams

from ..compiled.folder import keep_compiled
from ..compiled.travel import TravellingPrograms
from ..errors import JobError, Preempted, StartupTimeout, failed_start
from ..group.group import default_group
from ..group.group_client import Deadline, forget_group_client, group_client_of
from ..group.ids import forget_ids, initialize_ids
from ..instruments import Phase
from ..job import current_job, forget_job, settle_all
from ..liveness.health import health
from ..liveness.vitals import Vitals, last_vitals
from ..parent import mark_children, refuse_child, unmark_children
from ..preemption import preemption
from ..preemption.preemption import Preemption
from ..preemption.sources import Source
from ..preemption.step_agreement import close_sync_points
from ..ray_train import is_worker
from ..spec import ProcessSpec
from ..threads import start_daemon
from .bounded import ended_by_loss
from .coordinator import find_coordinator, gather_workers
from .discovery import GIVEN, DiscoveredProcess, discover_process
from .held_place import HeldPlace
from .jax_agent import (
    abandon_jax,
    end_jax,
    own_tls,
    set_collective_timeout,
    show_devices,
    start_jax,
)

_log = logging.getLogger(__name__)

# How long an interpreter that exits without shutdown() waits for the others.
_EXIT_TIMEOUT_S = 10.0
# that the others were lost before all had come to `shutdown`
_left_alone = threading.Event()


class Membership:
    """The part of a job that `initialize()` leaves for `shutdown()`: how this process goes."""

    def __init__(
        self, client: CoordinationClient, shutdown_timeout_s: float, attempt: Phase
    ) -> None:
        self.client = client
        self.shutdown_timeout_s = shutdown_timeout_s
        self.relay: Relay | None = None
        self._attempt = attempt
        self._handled = sys.exception()  # before there was a job: no failure of it

    def failure(self) -> str:
        """Returns the error that is in flight, or is being handled: "" for none, and for a
        departure that was planned.
        """
        error = sys.exception()
        if error is None or error is self._handled or isinstance(error, Preempted):
            return ""
        if isinstance(error, SystemExit) and error.code in (None, 0, Preempted.exit_code):
            return ""
        return _described(error)

    def address_for_agent(self, spec: ProcessSpec, credentials: Credentials) -> str:
        """Returns where jaxlib's agent reaches the coordinator. Starts a relay where the agent
        cannot show what it has to.
        """
        if credentials.empty or own_tls(spec):
            return spec.coordinator
        self.relay = Relay.spawn(spec.coordinator, credentials, [spec.process_id])
        return self.relay.address

    def leave(self, why: str = "") -> None:
        """Leaves the job; as a failure, where a reason is given."""
        if why:
            self._attempt.failed(RuntimeError(why))
        self._attempt.end()
        # jaxlib's agent goes first: it would end the process if its task were in error.
        end_jax()
        if self.relay is not None:
            self.relay.close()
        unmark_children()
        job = current_job()
        for part in (TravellingPrograms, Vitals, HeldPlace):
            job.close(part)
        job.leave()
        forget_group_client(self.client)
        forget_ids()
        try:
            if why:
                self.client.report_error(why)
            else:
                self.client.shutdown()
        except CoordinationError as error:
            _log.warning("the coordinator did not record that this process leaves: %s", error)
        finally:
            self.client.close()

    def abandon(self) -> None:
        """Leaves the job to the parent, in a forked child."""
        abandon_jax()
        if self.relay is not None:
            self.relay.abandon()


class Alone:
    """The part of a job that `initialize()` leaves in a process without others."""


# More than eight parameters: the names that callers know from jax.distributed.initialize, and the
# settings of a whole job, which a program gives in one place.
def initialize(  # noqa: PLR0913
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
    """Joins the other processes of the job; alone, it only watches for preemption notices.

    Who this process is comes from the arguments (a whole `spec`, or the three that
    `jax.distributed.initialize` takes), then from the environment of `holdfast run` or another
    launcher of ours, then from Ray Train, then from what other launchers say and jax detects (PMI,
    jax's own variables, Slurm, Open MPI, TPU, Kubernetes, LeaderWorkerSet). `num_processes=1` is
    alone, whatever they say. A launcher of ours has started the coordinator; else process 0 does,
    as a process of its own, unless one of this job listens at the address already.

    Call it once, from the main thread (in Ray Train: from the training function), before any
    computation. It blocks until all are there, at most `timeout_s`, and logs how many are missing.
    A process that is silent for the heartbeat timeout is dead to the others. It is the
    coordinator's: `heartbeat_timeout_s` sets it (default 100) where process 0 starts the
    coordinator, and must be left out or equal where a launcher did. On CPU a collective ends with
    an error when a peer has not come for `collective_timeout_s` (default: the heartbeat timeout),
    unless XLA_FLAGS says otherwise.

    Raises StartupTimeout naming the missing processes, ProcessLost naming one that died on the way,
    StartupFailed for a job that is smaller than asked for, at an address of another job that lives,
    and in a child of the process that has joined as this one (call it under
    `if __name__ == "__main__":`), ValueError where a launcher says that there are others but not
    where, CoordinatorLost, Fenced when the coordinator belongs to another job or attempt,
    CoordinationError (FAILED_PRECONDITION) when it has another heartbeat timeout, and RuntimeError
    when called twice or too late. A signal that means preemption ends the process until all have
    come, and is a notice from then on. `preemption_sources` come on top of those that fit this
    machine, such as SIGTERM; `[]` is none at all.
    """
    _check_early()
    deadline = Deadline(timeout_s)
    arguments = dict(zip(GIVEN, (coordinator_address, num_processes, process_id), strict=True))
    given = {field: value for field, value in arguments.items() if value is not None}
    devices = [local_device_ids] if isinstance(local_device_ids, int) else local_device_ids
    fill_standard_streams()
    _excepthook.install()
    discovered = discover_process(spec, given, devices, timeout_s)
    if discovered.spec is not None:
        refuse_child(discovered.spec)
    notices = preemption.start(None, sources=preemption_sources)
    try:
        spec = discovered.spec
        if discovered.worker is not None:
            spec = gather_workers(discovered.worker, deadline, heartbeat_timeout_s)
        if spec is None or (spec.num_processes == 1 and not discovered.launched):
            _log.info("process 0 of 1 on host %s, alone: no coordinator", socket.gethostname())
            show_devices(devices or ())
            current_job().put(Alone())
            return
        notices.set_waiting(True)
        _left_alone.clear()
        timeouts = Timeouts(heartbeat_s=heartbeat_timeout_s, shutdown_s=shutdown_timeout_s)
        with Phase("initialize", trace=_trace_of(spec), process=spec.process_id):
            _join(discovered, spec, timeouts, deadline, collective_s=collective_timeout_s)
    except BaseException as error:
        _give_up(_described(error))
        raise
    notices.set_waiting(False)


def _check_early() -> None:
    member = current_job().get(Membership)
    if member is not None or distributed.global_state.client is not None:
        hint = ""
        if is_worker():
            hint = "; JaxTrainer leaves it to initialize() where it is given jax_config=JaxConfig()"
        raise RuntimeError(
            "this process has joined a job already: call initialize() once, and"
            f" jax.distributed.initialize() never{hint}"
        )
    if xla_bridge.backends_are_initialized():
        raise RuntimeError(
            "initialize() comes before any computation, jax.devices() and the like: the backend is"
            " up already"
        )


def shutdown(timeout_s: float | None = None) -> None:
    """Leaves the job in order: waits until all have come here, then disconnects.

    It waits for at most `timeout_s` (default: `initialize()`'s), first for the saves that this
    process has in flight, which need the others. Called while an error is raised or handled, in a
    `finally` or an `except`, it waits for these saves alone: the others hear of the error at once,
    since they may need this process where they are. To leave in order after an error that was dealt
    with, call it after the `except` block. `Preempted`, and `sys.exit()` with 0 or 75, are no such
    errors. While it waits, a signal that means preemption is still a notice, on which the others
    agree; afterwards signals are as before `initialize()`. A process that is alone, or has never
    joined, only stops watching for notices. Never raises because of another process: what went
    wrong is logged. Then somebody waits for this process to be gone, and the interpreter ends
    without its last search for cycles of objects. A second call does nothing.
    """
    member = current_job().get(Membership)
    if member is not None:
        deadline = Deadline(member.shutdown_timeout_s if timeout_s is None else timeout_s)
        preemption.current().set_waiting(True)
        settle_all(deadline.remaining_s())
        current_job().take(Membership)
        why = member.failure()
        try:
            if not why:
                _wait_for_others(member.client, deadline)
        except BaseException as error:  # of a Ctrl-C, or of a handler of the program's
            why = _described(error)
            raise
        finally:
            member.leave(why)
            preemption.close()
    current_job().take(Alone)
    preemption.close()


def _wait_for_others(client: CoordinationClient, deadline: Deadline) -> None:
    health().close()  # from the barrier on the others leave, which is no loss
    try:
        # A launcher that sees another process fail lets this one end with its own exit code. Its
        # last step may be newer than what it has reported of itself every few seconds.
        client.report(leaving=1, **last_vitals())
        if preemption.current().leaves:
            _say(client, LEAVES_AS_ASKED)
        client.wait_at_barrier("holdfast/shutdown", deadline.remaining_ms())
    except CoordinationError as error:
        _log.warning("leaving without the others: %s", error)
        _left_alone.set()


def is_initialized() -> bool:
    """Returns whether `initialize()` has returned, also alone, with no `shutdown()` since."""
    job = current_job()
    return job.get(Membership) is not None or job.get(Alone) is not None


def _join(
    discovered: DiscoveredProcess,
    spec: ProcessSpec,
    timeouts: Timeouts,
    deadline: Deadline,
    *,
    collective_s: float | None,
) -> None:
    """Does what `initialize()` promises, once it is known who this process is."""
    job = current_job()
    if discovered.launched:
        for line in spec.set_slices(os.environ):
            _log.warning("stale variable %s", line)
        job.put(HeldPlace(spec))
    # One object, with one key, for the client and the relay: both are this process.
    credentials = spec.new_credentials()
    with preemption.current().gathering():
        if not discovered.launched:
            find_coordinator(spec, deadline, timeouts.heartbeat_s)
        client = _connect(spec, credentials, deadline, timeouts, discovered.counted_by)
    attempt = Phase("attempt", trace=_trace_of(spec), process=spec.process_id)
    member = Membership(client, timeouts.shutdown_s, attempt)
    job.put(member)
    job.join(client, spec)
    mark_children(spec)
    job.put(Vitals(client, spec.process_id, spec.num_processes))
    if spec.num_slices > 1:
        client.report(num_slices=spec.num_slices)
    preemption.start(client, spec.process_id, spec.num_processes)
    set_collective_timeout(collective_s or client.heartbeat_timeout_s)
    lost = ended_by_loss(group_client_of(client), spec, credentials, deadline)
    with lost, _own_name_resolves(spec):
        address = member.address_for_agent(spec, credentials)
        folder = keep_compiled()
        start_jax(
            spec,
            address,
            discovered.devices,
            deadline,
            shutdown_timeout_s=timeouts.shutdown_s,
        )
        initialize_ids(client=client, timeout_s=deadline.remaining_s())
        if spec.num_processes > 1:
            programs = TravellingPrograms(default_group(), client, folder)
            job.put(programs)
            programs.meet(deadline.remaining_s())
    health()  # watches from here on: a life that ends before somebody asks is noticed too
    _log.info(
        f"process {spec.process_id} of {spec.num_processes} on host {socket.gethostname()}"
        f" of job {spec.job_id}, attempt {spec.attempt}, coordinator {spec.coordinator}"
    )


def _trace_of(spec: ProcessSpec) -> str:
    """Returns what the spans of an attempt have in common, on all processes."""
    return f"{spec.job_id}/{spec.attempt}"


@contextmanager
def _own_name_resolves(spec: ProcessSpec) -> Iterator[None]:
    """Says why jax's backend did not start where it was this: gloo listens at the host's name."""
    try:
        yield
    except RuntimeError as error:
        name = socket.gethostname()
        try:
            socket.getaddrinfo(name, None)
        except OSError:
            raise failed_start(
                spec,
                f"this host's own name, {name!r}, leads to no address, and jax's processes on CPU"
                f" meet at it: add it to /etc/hosts, as in '127.0.1.1 {name}'",
            ) from error
        raise


def _connect(
    spec: ProcessSpec,
    credentials: Credentials,
    deadline: Deadline,
    timeouts: Timeouts,
    counted_by: str,
) -> CoordinationClient:
    arrivals = Arrivals(spec.num_processes, counted_by)
    client = CoordinationClient(
        spec.coordinator,
        spec.process_id,
        job=JobIdentity(num_processes=spec.num_processes, name=spec.job_id, attempt=spec.attempt),
        timeouts=dataclasses.replace(timeouts, init_s=deadline.remaining_s()),
        credentials=credentials,
    )
    client.watch_processes(arrivals.update)
    start_daemon("arrivals", arrivals.warn_late)
    try:
        client.connect()
    except CoordinationError as error:
        if error.code == "UNIMPLEMENTED":
            raise failed_start(
                spec,
                f"what listens at {spec.coordinator} is no coordinator of holdfast's: a job of"
                " jax.distributed's, whose processes would end if this one came to it, or another"
                " server; let it end, or give this job another address",
            ) from error
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
    finally:
        arrivals.over.set()
    arrivals.all_arrived()
    return client


WARN_AFTER_S = 10.0
"""A start that takes longer is said at WARNING."""


class Arrivals:
    """Logs how many processes have arrived, until all have: each time that as many again as lack
    now have come, or gone. So a process of a job of thousands logs a dozen lines.

    `update` is called from a thread of the client.
    """

    def __init__(self, num_processes: int, counted_by: str) -> None:
        self.missing = tuple(range(num_processes))
        self._num_processes = num_processes
        self._counted_by = counted_by
        self.over = threading.Event()  # the wait for them
        self._logged: int | None = None  # how many were missing in the latest line
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return arrival_line(self.missing, self._num_processes)

    def update(self, processes: Sequence[ProcessInfo]) -> None:
        here = {process.process_id for process in processes if process.alive}
        self._set(tuple(each for each in range(self._num_processes) if each not in here))

    def warn_late(self) -> None:
        """Logs that the start takes long, if it does, and who says how many processes there are."""
        if not self.over.wait(WARN_AFTER_S):
            what = "%s; that there are %d is said by %s"
            _log.warning(what, self, self._num_processes, self._counted_by)

    def all_arrived(self) -> None:
        self._set(())

    def _set(self, missing_now: tuple[int, ...]) -> None:
        with self._lock:
            if not self.missing or missing_now == self.missing:
                return
            self.missing = missing_now
            missing = len(missing_now)
            before = self._logged
            if before is not None and before < 2 * missing and missing < 2 * before:
                return
            self._logged = missing
            line = str(self)
        _log.info("%s", line)


MAX_NAMED = 40
"""A line names at most this many processes: a job may have ten thousand."""


def arrival_line(missing: Sequence[int], num_processes: int) -> str:
    """Returns how far a start is, such as "3 of 4 processes, waiting for 2"."""
    named = list(map(str, missing[:MAX_NAMED]))
    if len(missing) > MAX_NAMED:
        named.append(f"and {len(missing) - MAX_NAMED} more")
    waiting = f", waiting for {', '.join(named)}" if named else ""
    return f"{num_processes - len(missing):,} of {counted(num_processes, 'process')}{waiting}"


def _give_up(why: str) -> None:
    """Leaves at once, and reports why to the others."""
    member = current_job().take(Membership)
    if member is not None:
        member.leave(why)
    current_job().close(HeldPlace)
    preemption.close()


def _end_soon() -> None:
    """Spares a process that was left alone the last search for cycles: with jax imported it takes
    a second of a core, and a launcher that starts the job again waits for this process to end.
    """
    if _left_alone.is_set():
        gc.freeze()


class _Excepthook:
    """Hears of the exception that ends the program, and has it end with the code that it asks for.

    `sys.last_value` may be of one that ended nothing, as at a prompt or in a suite of tests.
    """

    def __init__(self) -> None:
        self._before: Callable[..., object] | None = None
        self._error: BaseException | None = None

    def install(self) -> None:
        """Goes before what is there. Does nothing when called again."""
        if self._before is None:
            self._before = sys.excepthook
            vars(sys).update(excepthook=self)

    def __call__(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        assert self._before is not None
        self._before(kind, error, traceback)
        if hasattr(sys, "ps1"):  # a prompt goes on
            return
        self._error = error
        if isinstance(error, JobError) and error.exit_code != 1:
            raise SystemExit(error.exit_code)

    @property
    def error(self) -> BaseException | None:
        """The exception that ends the program, as far as that is known."""
        is_asked = sys.excepthook is self  # and not one that the program has put in its place
        return self._error if is_asked else getattr(sys, "last_value", None)


_excepthook = _Excepthook()


def _last_words() -> str:
    """Returns what this process says of the exception that ends it, "" where none does, and where
    it leaves as a notice asks it to.
    """
    error = _excepthook.error
    if error is None or isinstance(error, Preempted):
        return ""
    return ENDS_WITH + _described(error)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _at_main_end() -> None:
    """Says at once that an exception has left the main thread: other threads and hooks of the
    program's may keep the process for as long as they like.
    """
    member = current_job().get(Membership)
    words = _last_words()
    if member is not None and words:
        with suppress(CoordinationError):
            member.client.report(trouble=words, **last_vitals())
            _say(member.client, words)


def _say(client: CoordinationClient, words: str) -> None:
    """Leaves the last words of this process for whoever has started it."""
    client.key_value_set(f"{LAST_WORDS}/{client.process_id}", words)


# Hooks of `threading` come before the other threads have ended.
getattr(threading, "_register_atexit", atexit.register)(_at_main_end)


@atexit.register
def _at_exit() -> None:
    """Leaves in order after a program that ended well, at once after one that died of an error."""
    with ExitStack() as stack:
        stack.callback(_end_soon)
        # A thread that comes back from jaxlib into an ending interpreter aborts the process, so
        # those that wait there are ended; last, since the others may still agree on a notice.
        stack.callback(close_sync_points)
        stack.callback(preemption.stop)
        words = _last_words()
        if is_initialized() and words:
            _give_up(words)
        elif is_initialized():
            shutdown(_EXIT_TIMEOUT_S)


def _in_child() -> None:
    """Takes a forked child out of the job: the child is not a process of it.

    The child neither speaks for its parent nor leaves in its place. jax's own exit does not either.
    """
    job = forget_job()
    keep_for_ever(job)  # destroying a client waits for threads that the child does not have
    running = job.get(Preemption)
    if running is not None:
        running.abandon()
    job.close(HeldPlace)
    member = job.get(Membership)
    if member is not None:
        member.abandon()


os.register_at_fork(after_in_child=_in_child)
