"""The preemption sync point: notices of all processes in, one step out at which all of them stop.

A notice belongs to the process and source that got it and stands until that source withdraws it.
Each process with a standing notice writes it below `holdfast/sync/preemption/notices/`; the sync
point's log only carries "raised" and "lowered". Both go by level, not by edge: after each decided
round every process compares what it has with what the log says. So a notice that comes in while
another is being withdrawn is not lost, and a thousand processes notified at once make one round,
not a thousand.
"""

from __future__ import annotations

import json
import logging
import operator
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from queue import SimpleQueue
from typing import Any

import jax
from jax._src import distributed

from holdfast.coordination.names import GROWING, OVER_FOLDER

from ..group.group_client import Client, GroupClient, group_client_of
from ..job import current_job
from ..liveness.vitals import note_asked, note_step
from ..liveness.watchdog import progress
from ..threads import on_thread, start_daemon
from .signals import Signals
from .sources import GceMetadata, Notice, Polled, RayTrain, SlurmEnd, Source
from .step_agreement import SyncPoint

_log = logging.getLogger(__name__)

EVENT = "/jax/orbax/write/preemption"
RAISED = "raised"
LOWERED = "lowered"
# The key by which JAX's own sync point (TSL's PreemptionSyncManager) notifies its processes.
_JAX_KEY = "RECEIVED_PREEMPTION_NOTICE"
_RETRY_S = 0.5
# For the coordinator to answer whether a signal is the end of the attempt; a notice waits for that.
_OVER_S = 0.5


class Preemption:
    """The preemption sync point of one process: its sources, its notices and the log they feed.

    Thread-safe. It begins alone; `join` makes it one of a job's, with the sources that it has and
    the notices that stand.
    """

    def __init__(self, sources: Sequence[Source] | None = None) -> None:
        self._group_client: GroupClient | None = None
        self._mine: dict[Source | None, Notice] = {}
        # A handler of the program's may notify from within any line of the main thread: hence this
        # kind of lock, and the queue.
        self._lock = threading.RLock()  # guards _mine
        self._joining = threading.Lock()  # guards what `join` sets
        self._grows = False  # the launcher has room for more: a notice of this attempt alone
        self._published: Notice | None = None
        self._known: dict[str, Notice] = {}  # of all, as last told
        self._withdrew = False  # a notice that others may have seen
        self._news = SimpleQueue[None]()
        self.closed = False
        self._heard = False  # the program has asked whether it is to stop
        self._waiting = False  # in initialize() or shutdown(), which have timeouts of their own
        self.stops = False  # the loop was told to, when it last asked
        self._asked_s = time.monotonic()
        self._sync = SyncPoint(None, "preemption", on_change=self._on_change)
        # A thread of its own: publishing calls the coordinator, and a signal's reader thread must
        # stay free for the next signal.
        self._publisher = start_daemon("preemption", self._publish_news)
        self._sources: list[Source] = []
        for source in with_defaults(sources):
            self.add_source(source)

    def join(
        self,
        client: Client,
        *,
        process_id: int,
        num_processes: int,
        timeout_s: float = 60.0,
    ) -> None:
        """Becomes one of the sync points of a job.

        What it was notified of before is everybody's from here on.
        """
        group_client = group_client_of(client)
        sync = SyncPoint(
            client,
            "preemption",
            process_id=process_id,
            tasks=range(num_processes),
            timeout_s=timeout_s,
            lost=group_client.lost_tasks_now,
            on_change=self._on_change,
        )
        self._become(sync, group_client)
        for signals in self.signals():
            self._start(signals)  # once more, where it was added outside the main thread
        if process_id == 0 and all(source.name != "jax" for source in self._sources):
            self.add_source(Polled("jax", self._poll_jax, every_s=1.0))
        self._news.put(None)

    def leave(self) -> None:
        """Becomes alone again, with its sources and standing notices, until it joins others."""
        self._become(SyncPoint(None, "preemption", on_change=self._on_change))

    def _become(self, sync: SyncPoint, group_client: GroupClient | None = None) -> None:
        with self._joining:
            before = self._sync
            self._sync = sync
            self._group_client = group_client
            self._published = None
            self._known = {}
            self._grows = False
            self.stops = False
        before.close()

    @property
    def client(self) -> Client | None:
        """The client by which it is one of a job's sync points, None while it is alone."""
        return None if self._group_client is None else self._group_client.client

    def set_waiting(self, waiting: bool) -> None:
        """Notes whether this process waits in initialize() or shutdown(): there a repeated signal
        does not find it stuck.
        """
        self._waiting = waiting
        self._asked_s = time.monotonic()

    def _seconds_idle(self) -> float:
        return 0.0 if self._waiting else time.monotonic() - self._asked_s

    def add_source(self, source: Source) -> None:
        """Starts a source, unless it is one of ours already, from an attempt before this. Signals
        only from the main thread.
        """
        if source in self._sources:
            return
        if isinstance(source, Signals):
            source.ask_idle(self._seconds_idle)
        self._sources.append(source)
        self._start(source)

    def _start(self, source: Source) -> None:
        source.start(lambda notice: self._take(notice, source))

    def _take(self, notice: Notice | None, source: Source) -> None:
        """Takes the notice of a source."""
        told = self._told_by_launcher() if isinstance(source, Signals) else {}
        # A launcher that has given the attempt up ends its processes by signals: no preemption.
        if over := told.get("over", b"").decode():
            _log.error("%s", over)
            return
        # It signals processes for reasons of its own, such as a Ctrl-C.
        if notice is not None and (why := told.get("notice", b"").decode()):
            notice = replace(notice, reason=why)
        self.notify(notice, source)

    def _told_by_launcher(self) -> Mapping[str, bytes]:
        """Returns what a launcher has told of this attempt; nothing where none has, or the
        coordinator does not answer at once.
        """
        group_client = self._group_client
        if group_client is None:
            return {}
        with suppress(Exception):
            return on_thread("over", lambda: group_client.list(OVER_FOLDER)).result(_OVER_S)
        return {}

    def _on_change(self, value: str) -> None:
        self._news.put(None)

    def notify(self, notice: Notice | None, source: Source | None = None) -> None:
        """Gives the notice of one source as it now stands, or withdraws it (None).

        Returns at once. Raises TypeError for what is no notice.
        """
        if not isinstance(notice, Notice | None):
            raise TypeError(
                f"preemption: expected a Notice or None, found {notice!r}; write Notice(reason)"
            )
        name = "program" if source is None else source.name
        with self._lock:
            if notice is None:
                self._mine.pop(source, None)
            else:
                self._mine[source] = notice
        _log.warning(
            "preemption notice: %s", f"{name} withdraws" if notice is None else notice.reason
        )
        # Alone there is nobody to ask: it holds from here on, and not once a thread has its turn.
        # Without a wait: a signal's handler may be here, in a thread that has the lock.
        if self._joining.acquire(blocking=False):
            try:
                if self._group_client is None:
                    self._reconcile()
            finally:
                self._joining.release()
        self._news.put(None)

    def grow(self, client: Client | None) -> None:
        """Has all of the attempt of `client` stop, to come back as more. Returns at once."""
        with self._joining:
            self._grows = self.client is client
        _log.warning("there is room for more processes: all stop, to come back as more")
        self._news.put(None)

    def count_anew(self, num_processes: int) -> None:
        """Has steps count anew, where so many are all of the job: see `SyncPoint.count_anew`."""
        if num_processes == len(self._sync.tasks):
            self._sync.count_anew()

    def reached(self, step: int) -> bool:
        """Returns whether the job has to stop at `step`: see `reached_preemption`."""
        self._asked_s = time.monotonic()
        try:
            reached = self._sync.ask(step).value == RAISED
        finally:
            self._asked_s = time.monotonic()
        if reached and not self.stops:
            _log.warning("preemption sync point reached at step %d", step)
        self.stops = reached
        return reached

    def notice(self) -> Notice | None:
        """Returns the standing notices of all processes as one: the earliest deadline wins.

        Asks the coordinator.
        """
        # A notice of this process that is not published yet counts too.
        return merge(list(self._standing().values())) or self._merged()

    def noticed(self) -> tuple[int, ...]:
        """Returns the processes that have given notice, by runtime index. Asks the coordinator."""
        if self._group_client is None:
            return (0,) if self._merged() else ()
        standing = self._standing().items()
        # Who has room for more stays.
        tasks = [int(task) for task, notice in standing if notice.reason != GROWING]
        return tuple(sorted(map(self._group_client.process, tasks)))

    def _standing(self) -> dict[str, Notice]:
        """Returns what `_published_everywhere` does; once this is closed, as it last was."""
        if not self.closed:
            self._known = self._published_everywhere()
        return self._known

    def close(self) -> None:
        """Stops the sources and the threads; questions are answered from what is known.

        From the main thread, to give signals back. A second call does nothing.
        """
        with self._lock:
            if self.closed:
                return
            self.closed = True
        for source in reversed(self._sources):
            if not isinstance(source, Signals):
                source.close()
        self._news.put(None)
        self._sync.close()
        self._publisher.join(2.0)
        for signals in reversed(self.signals()):  # last: until then one must not end the process
            signals.close()

    def abandon(self) -> None:
        """Gives the signals back in a forked child.

        The child has none of the threads and must not touch the connection.
        """
        self.closed = True
        for signals in reversed(self.signals()):
            signals.close()

    def signals(self) -> list[Signals]:
        """Returns those of its sources that are signals."""
        return [source for source in self._sources if isinstance(source, Signals)]

    @property
    def has_notice(self) -> bool:
        """Whether a notice of this process stands."""
        return self._merged() is not None

    def hear(self) -> None:
        """Notes that the program asks for notices, also for those who watch the job."""
        self._heard = True
        note_asked()

    @property
    def leaves(self) -> bool:
        """Whether the program, when it last asked, was told to save and stop."""
        return self._heard and self.stops

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Runs a block in which this process joins its job.

        A signal before the end of the block ends the process, as before there was a sync point.
        """
        joined = threading.Event()
        for signals in self.signals():
            signals.end_until(joined)
        try:
            yield
        finally:
            joined.set()

    def _merged(self) -> Notice | None:
        with self._lock:
            mine = merge(list(self._mine.values()))
        # Who has a notice of its own too does not stay: others have to hear that.
        return Notice(GROWING) if mine is None and self._grows else mine

    def _publish_news(self) -> None:
        while True:
            self._news.get()
            if self.closed:
                return
            while not self._news.empty():
                self._news.get()
            try:
                with self._joining:
                    self._reconcile()
            except Exception as error:
                _log.warning("the notice cannot be passed on: %s; trying again", error)
                time.sleep(_RETRY_S)
                self._news.put(None)

    def _reconcile(self) -> None:
        """Makes the log agree with the notices: raised while any stands, lowered when none is."""
        mine = self._merged()
        raised = self._sync.latest == RAISED
        # Published before the change is proposed: whoever learns of the change may ask why.
        if mine != self._published:
            self._publish(mine)
        if mine and not raised:
            if self._sync.propose(RAISED):
                self._notify_jax()
        elif raised and not mine and self._may_lower() and not self._published_everywhere():
            self._sync.propose(LOWERED)
            self._withdrew = False

    def _may_lower(self) -> bool:
        # To see whether any notice stands is one task's work, and that of those who withdraw: a
        # thousand need not list the notices.
        return self._withdrew or self._sync.process_id == 0

    def _publish(self, mine: Notice | None) -> None:
        if self._group_client is not None:
            key = f"{self._sync.folder}/notices/{self._sync.process_id}"
            if mine:
                self._group_client.set(key, json.dumps(asdict(mine)).encode())
                self._known[str(self._sync.process_id)] = mine
            else:
                self._group_client.delete(key)
        self._withdrew = self._withdrew or mine is None
        self._published = mine

    def _published_everywhere(self) -> dict[str, Notice]:
        """Returns the standing notices of a job by task; none of a process that is alone."""
        if self._group_client is None:
            return {}
        listing = self._group_client.list(f"{self._sync.folder}/notices")
        return {task: Notice(**json.loads(text)) for task, text in listing.items()}

    def _notify_jax(self) -> None:
        """Notifies JAX's own sync point, where its service is on: its C handler got no signal."""
        if self._group_client is None or _jax_client() is None:
            return
        now = datetime.now(UTC).isoformat()
        with suppress(Exception):  # somebody else has notified it already, or it is shutting down
            # First, so that no process takes what we write into JAX's key for a notice of JAX's.
            self._group_client.set(f"{self._sync.folder}/told-jax", now.encode())
            _jax_client().key_value_set(_JAX_KEY, now)

    def _poll_jax(self) -> Notice | None:
        """Returns the notice that JAX's own sync point got from another source than us."""
        client = _jax_client()
        if self._group_client is None or client is None:
            return None
        try:
            seen = str(client.key_value_try_get(_JAX_KEY))
        except Exception as error:
            if str(error).startswith("NOT_FOUND"):
                return None
            raise
        ours = self._group_client.list(self._sync.folder).get("told-jax", b"").decode()
        return None if seen == ours else Notice("JAX's preemption service was notified")


def default_sources(environment: Mapping[str, str] = os.environ) -> list[Source]:
    """Returns the sources that fit this process: SIGTERM, and those of Slurm and of GCE.

    Slurm's end time inside a Slurm job, GCE's metadata on GCE. In a worker of Ray Train what Ray
    says stands for SIGTERM: the training function runs beside the main thread, whose signals are
    Ray's.
    """
    sources: list[Source] = [RayTrain() if RayTrain.is_here() else Signals()]
    end_unix_s = environment.get("SLURM_JOB_END_TIME", "")
    if end_unix_s.isdigit():
        sources.append(SlurmEnd(float(end_unix_s)))
    if GceMetadata.is_here():
        sources.append(GceMetadata())
    return sources


def with_defaults(given: Sequence[Source] | None) -> list[Source]:
    """Returns the sources that were given, and those of `default_sources` whose names they do not
    have; none for an empty list.
    """
    names = {source.name for source in given or ()}
    defaults = default_sources() if given or given is None else []
    return [*(each for each in defaults if each.name not in names), *(given or ())]


def merge(notices: Sequence[Notice]) -> Notice | None:
    """Returns several notices as one: that with the earliest deadline, None for no notice."""

    def deadline_unix_s(notice: Notice) -> float:
        return float("inf") if notice.deadline_unix_s is None else notice.deadline_unix_s

    return min(notices, key=deadline_unix_s, default=None)


def _jax_client() -> Any:
    """Returns jax.distributed's client where JAX's preemption service was left on, else None."""
    state = distributed.global_state
    return None if state.preemption_sync_manager is None else state.client


def start(
    client: Client | None,
    process_id: int = 0,
    num_processes: int = 1,
    *,
    sources: Sequence[Source] | None = None,
    timeout_s: float = 60.0,
) -> Preemption:
    """Starts the preemption sync point of this process, or has the one that runs join `client`.

    `initialize()` calls it, from the main thread. `process_id` is the task id, `sources` come on
    top of those that run; where none runs, `with_defaults`.
    """
    job = current_job()
    with job.lock:
        running = job.get(Preemption)
        if running is None or running.closed:
            running = Preemption(sources)
            job.put(running)
        else:
            for source in sources or ():
                running.add_source(source)
        # Two threads may have found it alone: a second join would be a second sync point, which
        # the other processes do not have.
        if client is not None and running.client is not client:
            running.join(
                client,
                process_id=process_id,
                num_processes=num_processes,
                timeout_s=timeout_s,
            )
        return running


def close() -> None:
    """Stops the running sync point and gives the signals back.

    What is asked later is answered from what it knew.
    """
    running = current_job().get(Preemption)
    if running is not None:
        running.close()


def stop() -> None:
    """Stops the running sync point as `close` does; the next `reached_preemption` starts anew."""
    close()
    current_job().take(Preemption)


def current() -> Preemption:
    """Returns the running sync point; starts one where none runs.

    One that is alone joins jax.distributed's client as soon as there is one.
    """
    running = current_job().get(Preemption)
    state = distributed.global_state
    if running is not None and (running.client is not None or state.client is None):
        return running
    return start(state.client, state.process_id, state.num_processes)


def reached_preemption(step: int) -> bool:
    """Returns whether a preemption notice holds at `step`: save and stop.

    Alike in every process that asks about the same step. First true, everywhere, at the first step
    asked about that is not below the agreed one, which is ahead of every step for which any process
    got False; then true until the notice is withdrawn. Takes a few microseconds; while a notice is
    being agreed on it waits for the other processes' background threads (never for their main
    threads). Every process has to ask, or at least to have called `initialize()`. Steps may
    grow in any stride, and begin anew where all open a manager or restore with one.
    Thread-safe. Raises BarrierTimeout when the agreement does not come about.

    Without jax.distributed the answer is of this process alone.
    """
    current().hear()
    return ask_sync_point(operator.index(step))  # of a train state it is an array of jax's


def ask_sync_point(step: int) -> bool:
    """Returns what `reached_preemption` does, for a manager: its program may never ask itself, and
    goes on then.
    """
    current_job().raise_if_over()
    reached = current().reached(step)
    progress()
    note_step(step)
    if reached:
        jax.monitoring.record_event(EVENT)
    return reached


def count_anew(num_processes: int) -> None:
    """Has the steps asked about from now on come after all before, whatever their numbers, where so
    many processes are all of the job. Each of them calls it at the same place of its program.
    """
    running = current_job().get(Preemption)
    if running is not None:
        running.count_anew(num_processes)


def has_notice() -> bool:
    """Returns whether this process has a notice of its own. Asks nobody."""
    running = current_job().get(Preemption)
    return running is not None and running.has_notice


def preemption_notice() -> Notice | None:
    """Returns the standing notices of all processes as one, that with the earliest deadline.

    None when there is none. Asks the coordinator.
    """
    running = current()
    running.hear()
    return running.notice()


def preempted_processes() -> tuple[int, ...]:
    """Returns the processes, by runtime index, whose machines are taken. Asks the coordinator.

    They have a notice of their own standing: all processes of a job that was notified as a whole,
    none while no notice stands.
    """
    return current().noticed()


def notify_preemption(notice: Notice | None) -> None:
    """Gives the program's own notice, or withdraws it (None). Returns at once; from any thread, and
    from a handler of a signal. Raises TypeError for what is no notice.
    """
    current().notify(notice)


def add_preemption_source(source: Source) -> None:
    """Adds a source of notices to this process's sync point, before `initialize()` or after.

    Signals only from the main thread.
    """
    current().add_source(source)
