"""The engine of Ray: a placement group an attempt, an actor a process, one for the coordinator.

`holdfast.launch.ray.run(fn, JobSpec(num_processes=4))` calls `fn` on every process; `run_command`
does the same for a command. Needs the extra `ray`.
"""

from __future__ import annotations

import pickle
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

from holdfast.coordination import Credentials
from holdfast.coordination.process.job_folder import JobFolder
from holdfast.multihost import Preempted, ProcessSpec

from ...supervisor.engine import JobResult, start_failed
from ...supervisor.job import (
    Capacity,
    Event,
    Exited,
    Job,
    Noticed,
    Reserve,
    Reserved,
    RestartPolicy,
    Waiting,
)
from ...supervisor.ledger import Errand
from ...workers.coordinator import HEARTBEAT_TIMEOUT_S
from ...workers.output import Output, console_unless
from ...workers.secrets import JobSecrets, credentials_in, require_cryptography
from ..base import NOT_STARTED, BaseEngine, run_job
from .cluster import cluster_nodes, load_ray
from .placement import Node, Placement, place_gang
from .worker_actor import CoordinatorActor, WorkerActor, WorkerUpdate

_POLL_S = 0.5  # how often the cluster is asked
_UPDATE_S = 0.5  # how long an actor may hold back an update
_READY_S = 10.0  # for what is free to become ours
_TURN_S = 0.25  # how long a turn of the loop waits at most

T = TypeVar("T")
Turns: TypeAlias = Generator[list[Event], None, T]
"""What takes longer than a turn of the loop: it yields the events of each."""


@dataclass(frozen=True)
class JobSpec:
    """What a job needs. `resources` are of one process.

    `num_slices` above 1 makes the job of that many TPU slices of equal size. With `min_processes`
    below `num_processes` the job goes on with fewer when machines are lost, and grows again when
    they return: in whole slices where there are slices. A process that is silent for
    `heartbeat_timeout_s` is lost. The job has a token and certificates of its own, which its actors
    get by Ray's channel, unless `insecure`.
    """

    num_processes: int
    min_processes: int | None = None
    resources: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    num_slices: int = 1
    restart: RestartPolicy = field(
        default_factory=lambda: RestartPolicy(max_failures=3, max_preemptions=100)
    )
    job_id: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S
    insecure: bool = False

    def __post_init__(self) -> None:
        if self.num_slices < 1 or self.num_processes % self.num_slices:
            raise ValueError(
                f"num_processes={self.num_processes} in num_slices={self.num_slices}: expected"
                " slices of one size"
            )
        if not any(amount > 0 for amount in self.resources.values()):
            raise ValueError(
                f"resources={dict(self.resources)}: a process needs at least some of one resource"
            )


@dataclass(frozen=True)
class RayResult:
    """How the job ended, and what the calls of its last attempt returned."""

    job: JobResult
    values: tuple[Any, ...]  # by rank; None where a call returned nothing

    @property
    def outcome(self) -> str:
        """How the job ended: "done", "preempted" or "failed"."""
        return self.job.outcome


def run(
    fn: Callable[..., Any],
    spec: JobSpec,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    address: str = "auto",
) -> RayResult:
    """Calls `fn(*args, **kwargs)` on every process of a job on a Ray cluster. Blocks to its end.

    The cluster is the one that this process is connected to, else the one at `address`.

    `fn` is pickled by value where it must be, runs in a process of its own with its ProcessSpec in
    the environment, and calls `multihost.initialize()`. A return means done, unless a notice of
    preemption came before: then the job is started again. It raises Preempted (or exits with 75)
    when it was preempted, Fatal when a restart cannot help. Nothing is raised for a job that fails:
    see `result.job.error`.
    """
    return _run(
        spec,
        call=load_ray().cloudpickle.dumps((fn, tuple(args), dict(kwargs or {}))),
        output=None,
        address=address,
    )


def run_command(
    command: Sequence[str], spec: JobSpec, *, output: Output | None = None, address: str = "auto"
) -> RayResult:
    """Runs `command` as the processes of a job on a Ray cluster. Blocks to its end."""
    return _run(spec, command=list(command), output=output, address=address)


def _run(
    spec: JobSpec,
    *,
    command: list[str] | None = None,
    call: bytes | None = None,
    output: Output | None,
    address: str,
) -> RayResult:
    ray = load_ray()
    if not spec.insecure:
        require_cryptography()
    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=False)
    job_id = spec.job_id or f"ray-{uuid.uuid4().hex[:12]}"
    job = Job(job_id, spec.min_processes or spec.num_processes, spec.num_processes, spec.restart)
    with console_unless(output, spec.num_processes) as lines:
        engine = RayEngine(job_id, spec, command=command, call=call, output=lines)
        return RayResult(run_job(job, engine, lines), engine.values())


@dataclass(frozen=True)
class Gang:
    """The machines of an attempt, Ray's group of what is reserved there, and an actor a process."""

    placement: Placement = field(default_factory=Placement)
    group: Any = None
    actors: dict[int, Any] = field(default_factory=dict)  # by rank; made by `start_actors`

    @property
    def node_ids(self) -> list[str]:
        """The machine of each rank."""
        return [node.node_id for node in self.placement.nodes]

    def start_actors(self, resources: Mapping[str, float]) -> None:
        """Starts the actors, unless they are there: their start costs seconds."""
        if not self.actors:
            for rank in range(len(self.placement.nodes)):
                actor = _actor_in(self.group, rank, resources, WorkerActor)
                self.actors[rank] = actor.remote()

    def lost_machines(self) -> list[str]:
        """Returns the names of the machines that have gone, or are draining."""
        healthy = {node.node_id for node in cluster_nodes() if not node.draining}
        lost = {_name(node) for node in self.placement.nodes if node.node_id not in healthy}
        return sorted(lost)

    def stands(self) -> Turns[bool]:
        """Returns whether every machine and every actor is still there, within 10 s."""
        ray = load_ray()
        if self.lost_machines():
            return False
        asked = [actor.pid.remote() for actor in self.actors.values()]
        deadline = time.monotonic() + _READY_S
        missing = asked
        while missing and time.monotonic() < deadline:
            _, missing = ray.wait(missing, num_returns=len(missing), timeout=_TURN_S)
            yield []
        try:
            ray.get(asked, timeout=0)
        except ray.exceptions.RayError:  # one has died, or does not answer in time
            return False
        return True

    def give_back(self) -> None:
        """Ends the actors, and gives the machines back."""
        ray = load_ray()
        for actor in self.actors.values():
            ray.kill(actor)
        if self.group is not None:
            ray.util.remove_placement_group(self.group)


class RayEngine(BaseEngine):
    """Runs a job's processes as children of actors of a Ray cluster."""

    def __init__(
        self,
        job_id: str,
        spec: JobSpec,
        *,
        command: list[str] | None,
        call: bytes | None,
        output: Output,
    ) -> None:
        super().__init__(output, spec.restart)
        self.errand = Errand(command or ())
        self._job_id = job_id
        self._spec = spec
        self._command = command
        self._call = call
        self._why_waiting = ""
        self._gang = Gang()
        self._lost_actor = False
        self._kept: Gang | None = None  # of the attempt before, for the next
        self._pending: dict[Any, int] = {}  # reference to an update to come -> rank
        self._coordinator: Any = None
        self._folder: JobFolder | None = None  # of the credentials that the watch shows
        # Finds room or starts an attempt: each turn of the loop goes on with it.
        self._work: Turns[None] = _nothing()
        self._outcomes: dict[int, bytes | None] = {}  # of the last attempt, by rank
        self._noticed: set[str] = set()
        self._poll_at = 0.0

    # --- Actions

    def _reserve(self, action: Reserve) -> None:
        self._work = self._find_room(action)

    def _signal(self, number: signal.Signals, processes: frozenset[int] | None) -> None:
        for actor in self._chosen(processes):
            actor.signal.remote(int(number))

    def _kill(self, processes: frozenset[int] | None = None) -> None:
        for actor in self._chosen(processes):
            actor.kill.remote()

    def _chosen(self, processes: frozenset[int] | None) -> list[Any]:
        """Returns the actors of those of the processes (None: all) that there are."""
        actors = self._gang.actors.items()
        return [actor for rank, actor in actors if processes is None or rank in processes]

    def _launch(self, attempt: int, num_processes: int) -> None:
        self._work = self._start(attempt, num_processes)

    def _start(self, attempt: int, num_processes: int) -> Turns[None]:
        """Starts an attempt; yields while actors have yet to answer."""
        try:
            yield from self._begin(attempt, num_processes)
        except BaseException:
            # Some of the actors may have a process by now, which nobody has heard of.
            self._gang.give_back()
            self._gang = Gang()
            raise

    def _begin(self, attempt: int, num_processes: int) -> Turns[None]:
        deadline = time.monotonic() + self._spec.restart.startup_timeout_s
        self._coordinator = _actor_near(CoordinatorActor).remote(
            self._job_id,
            attempt,
            num_processes,
            self._spec.heartbeat_timeout_s,
            secured=not self._spec.insecure,
        )
        self._gang.start_actors(self._spec.resources)
        yield []
        actors = self._gang.actors
        endpoint = yield from self._answers([self._coordinator.endpoint.remote()], deadline)
        [(address, secrets)] = endpoint
        yield from self._answers([actor.pid.remote() for actor in actors.values()], deadline)
        self._open_watch(address, attempt, self._credentials(secrets))
        relays = yield from self._start_relays(address, secrets, deadline)
        specs = self._process_specs(attempt, address, relays)
        started = [
            actor.start.remote(self._command, self._call, specs[rank], self._spec.env)
            for rank, actor in actors.items()
        ]
        replaced = yield from self._answers(started, deadline)
        for rank, lines in enumerate(replaced):
            for line in lines:
                self._output.say(f"process {rank}: {line}")
        self._outcomes = dict.fromkeys(actors)
        for rank in actors:
            self._request_update(rank)
        self._to_start.clear()

    def _answers(self, refs: Sequence[Any], deadline: float) -> Turns[Any]:
        """Returns what the actors of an attempt that starts answer, in order.

        Ray keeps an actor waiting whose machine has gone. Raises Preempted for it.
        """
        ray = load_ray()
        missing = list(refs)
        while missing:
            answered, missing = ray.wait(missing, num_returns=len(missing), timeout=_TURN_S)
            ray.get(answered)  # a failed one is an error before the others have answered
            if not missing:
                break
            if lost := self._gang.lost_machines():
                raise Preempted(f"{', '.join(lost)} went while the attempt started")
            if time.monotonic() > deadline:
                limit_s = self._spec.restart.startup_timeout_s
                raise TimeoutError(
                    f"{len(missing)} of {len(refs)} actors did not answer within"
                    f" startup_timeout_s={limit_s:g}"
                )
            yield []
        return ray.get(list(refs))

    def _credentials(self, secrets: JobSecrets | None) -> Credentials | None:
        if secrets is None:
            return None
        self._folder = JobFolder.create()
        return credentials_in(self._folder, secrets)

    def _start_relays(
        self, address: str, secrets: JobSecrets | None, deadline: float
    ) -> Turns[dict[str, tuple[str, str]]]:
        """Starts a relay on each machine, in the actor of its first process.

        Returns, by machine, the relay's address and the machine's own. Without secrets there are no
        relays.
        """
        if secrets is None:
            return {}
        ranks: dict[str, list[int]] = {}
        for rank, node_id in enumerate(self._gang.node_ids):
            ranks.setdefault(node_id, []).append(rank)
        starting = [
            self._gang.actors[on_node[0]].start_relay.remote(address, secrets, on_node)
            for on_node in ranks.values()
        ]
        addresses = yield from self._answers(starting, deadline)
        return dict(zip(ranks, addresses, strict=True))

    def _process_specs(
        self, attempt: int, address: str, relays: Mapping[str, tuple[str, str]]
    ) -> list[ProcessSpec]:
        """Returns who each process is, by rank. Behind a relay, that is its coordinator."""
        placement = self._gang.placement
        node_ids = self._gang.node_ids
        specs = []
        for rank, node_id in enumerate(node_ids):
            coordinator, host_address = relays.get(node_id, (address, None))
            spec = ProcessSpec(
                job_id=self._job_id,
                attempt=attempt,
                process_id=rank,
                num_processes=len(node_ids),
                coordinator=coordinator,
                slice_id=placement.slice_of[rank],
                num_slices=placement.num_slices,
                slice_address=placement.nodes[0].address if placement.num_slices > 1 else None,
                local_rank=node_ids[:rank].count(node_id),
                local_count=node_ids.count(node_id),
                host_address=host_address,
            )
            specs.append(spec)
        return specs

    def _request_update(self, rank: int) -> None:
        self._pending[self._gang.actors[rank].poll.remote(_UPDATE_S)] = rank

    def _release(self) -> None:
        """Ends the attempt. A whole gang keeps its actors: see `_take_kept`."""
        self._work.close()
        self._close_coordinator()
        if len(self._gang.actors) == self._spec.num_processes and not self._lost_actor:
            self._kill()
            self._kept = self._gang
        else:
            self._gang.give_back()
        self._forget_attempt()

    def _close_coordinator(self) -> None:
        self._close_watch()
        if self._folder is not None:
            self._folder.remove()
            self._folder = None
        if self._coordinator is not None:
            self._coordinator.close.remote()
            load_ray().kill(self._coordinator)
            self._coordinator = None

    def _forget_attempt(self) -> None:
        self._gang = Gang()
        self._pending = {}
        self._noticed = set()
        self._lost_actor = False

    def _take_kept(self, wanted: Reserve) -> Turns[bool]:
        """Takes over the gang of the attempt before, where it is whole; else gives it back."""
        gang = self._kept
        if gang is None:
            return False
        stands = wanted.max_processes == len(gang.actors) and (yield from gang.stands())
        self._kept = None
        if not stands:
            gang.give_back()
            return False
        self._gang = gang
        return True

    # --- Events

    def events(self, timeout_s: float | None) -> Sequence[Event]:
        """Returns what has happened to actors, cluster, coordinator and launcher.

        Polls each of them at least twice a second.
        """
        events: list[Event] = []
        if time.monotonic() >= self._poll_at:
            events += self._poll_cluster()
            self._poll_at = time.monotonic() + _POLL_S
        events += self._go_on()
        wait_s = _TURN_S if timeout_s is None else min(_TURN_S, timeout_s)
        self._poll_actors(0.0 if events else wait_s)
        while not self._queue.empty():
            events += super().events(0)
        return events

    def _go_on(self) -> list[Event]:
        """Goes on with what has begun; returns what comes of it."""
        try:
            return next(self._work, [])
        except Exception as error:
            self._call_off(None, NOT_STARTED)
            return [start_failed(self._attempt, error)]

    def _call_off(self, processes: frozenset[int] | None, code: int) -> None:
        if self._to_start:  # they start together, or not at all
            super()._call_off(None, code)
            self._work.close()

    def _poll_actors(self, wait_s: float) -> None:
        ray = load_ray()
        if not self._pending:
            if wait_s:
                threading.Event().wait(wait_s)
            return
        ready, others = ray.wait(list(self._pending), num_returns=1, timeout=wait_s)
        if others:
            ready += ray.wait(others, num_returns=len(others), timeout=0)[0]
        for ref in ready:
            self._take_update(ref, self._pending.pop(ref))

    def _take_update(self, ref: Any, rank: int) -> None:
        ray = load_ray()
        try:
            update: WorkerUpdate = ray.get(ref)
        except ray.exceptions.RayError as error:
            self._lost_actor = True
            why = str(error).strip().splitlines()[0]
            self._report_exit(Exited(self._attempt, rank, -9, f"its actor is lost: {why}"))
            return
        for line in update.lines:
            self._output.line(rank, line)
        if update.code is None:
            self._request_update(rank)
            return
        self._outcomes[rank] = update.outcome
        self._report_exit(Exited(self._attempt, rank, update.code, self._why(update)))

    def _why(self, update: WorkerUpdate) -> str:
        kind, value = _unpickled(update.outcome)
        return f"{type(value).__name__}: {value}" if kind == "error" else ""

    # --- The cluster

    def _poll_cluster(self) -> list[Event]:
        if not self._pending:
            return []
        nodes = {node.node_id: node for node in cluster_nodes()}
        return self._drains(nodes) or self._growth(nodes)

    def _drains(self, nodes: Mapping[str, Node]) -> list[Event]:
        """Returns a notice for each machine of ours that Ray drains since the last poll."""
        notices: list[Event] = []
        for node_id in dict.fromkeys(self._gang.node_ids):
            node = nodes.get(node_id)
            if node is not None and node.draining and node_id not in self._noticed:
                self._noticed.add(node_id)
                notices.append(Noticed(f"Ray drains {_name(node)}", _deadline(node)))
        return notices

    def _growth(self, nodes: Mapping[str, Node]) -> list[Event]:
        """Returns how large a gang would fit if ours gave its machines back, where it is larger."""
        spec = self._spec
        num_processes = len(self._gang.node_ids)
        if num_processes == spec.num_processes:
            return []
        used = Counter(self._gang.node_ids)
        freed = [_with(node, spec.resources, used[node.node_id]) for node in nodes.values()]
        placement = place_gang(
            freed, spec.resources, num_processes, spec.num_processes, num_slices=spec.num_slices
        )
        larger = len(placement.nodes)
        return [Capacity(larger)] if larger > num_processes else []

    def _find_room(self, wanted: Reserve) -> Turns[None]:
        """Reserves the largest gang that fits; yields, once for each reason, why it waits."""
        spec = self._spec
        told = ""
        stands = yield from self._take_kept(wanted)
        while not stands:
            placement = place_gang(
                cluster_nodes(),
                spec.resources,
                wanted.min_processes,
                wanted.max_processes,
                num_slices=spec.num_slices,
            )
            why = placement.why_not_more
            if why and why != self._why_waiting:
                self._output.say(f"attempt {wanted.attempt}: {why}")
            self._why_waiting = why
            if placement.nodes:
                stands = yield from self._take(placement)
            elif why != told:
                told = why
                yield [Waiting(wanted.attempt, why)]
            else:
                yield []
        yield [Reserved(wanted.attempt, len(self._gang.node_ids))]

    def _take(self, placement: Placement) -> Turns[bool]:
        """Reserves the machines of a gang; returns whether they are still free."""
        ray = load_ray()
        bundles = [dict(self._spec.resources) for _ in placement.nodes]
        pins = [{"ray.io/node-id": node.node_id} for node in placement.nodes]
        group = ray.util.placement_group(bundles, strategy="PACK", bundle_label_selector=pins)
        deadline = time.monotonic() + _READY_S
        while not group.wait(_TURN_S):
            # Somebody else may have been faster, or a node may have gone since it was listed.
            if time.monotonic() > deadline:
                ray.util.remove_placement_group(group)
                return False
            try:
                yield []
            except GeneratorExit:
                ray.util.remove_placement_group(group)
                raise
        self._gang = Gang(placement, group)
        return True

    def values(self) -> tuple[Any, ...]:
        """Returns what the calls of the last attempt returned, by rank."""
        values = []
        for outcome in self._outcomes.values():
            kind, value = _unpickled(outcome)
            values.append(value if kind == "value" else None)
        return tuple(values)

    def close(self) -> None:
        """Ends whatever still runs.

        What was asked to end has the grace time. Then its actor is killed, and its process with it.
        """
        deadline = time.monotonic() + self._spec.restart.grace_s
        while self._pending and time.monotonic() < deadline:
            self._poll_actors(0.1)
        self._work.close()
        self._kill()
        self._close_coordinator()
        self._gang.give_back()
        self._forget_attempt()
        if self._kept is not None:
            self._kept.give_back()
            self._kept = None


def _nothing() -> Turns[None]:
    yield from ()


def _actor_near(kind: type) -> Any:
    """Returns the class of an actor beside this process, where there is room for it."""
    ray = load_ray()
    strategies = ray.util.scheduling_strategies
    here = ray.get_runtime_context().get_node_id()
    strategy = strategies.NodeAffinitySchedulingStrategy(here, soft=True)
    return ray.remote(num_cpus=0, max_restarts=0, scheduling_strategy=strategy)(kind)


def _actor_in(group: Any, bundle: int, resources: Mapping[str, float], kind: type) -> Any:
    """Returns the class of an actor that takes all of a bundle of a placement group."""
    ray = load_ray()
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=bundle
    )
    others = {
        name: amount for name, amount in resources.items() if name not in ("CPU", "GPU", "memory")
    }
    return ray.remote(
        num_cpus=resources.get("CPU", 0),
        num_gpus=resources.get("GPU", 0),
        resources=others,
        max_restarts=0,
        scheduling_strategy=strategy,
    )(kind)


def _unpickled(outcome: bytes | None) -> tuple[str, Any]:
    """Returns ("value", what a call returned) or ("error", what it raised).

    What only its process can read is an error that says so.
    """
    if not outcome:
        return "", None
    try:
        kind, value = pickle.loads(outcome)
    except Exception as error:  # whatever a class of the user's does here
        what = f"what the call left cannot be read here: {type(error).__name__}: {error}"
        return "error", TypeError(what)
    return kind, value


def _name(node: Node) -> str:
    """Returns what tells a machine from others in a message."""
    return f"{node.address} ({node.node_id[:8]})"


def _with(node: Node, resources: Mapping[str, float], count: int) -> Node:
    """Returns a node with the resources of `count` more processes free."""
    available = {
        name: node.available.get(name, 0.0) + count * amount for name, amount in resources.items()
    }
    return replace(node, available=available)


def _deadline(node: Node) -> float | None:
    """Returns the drain's deadline on the monotonic clock."""
    if node.deadline_unix_s is None:
        return None
    return time.monotonic() + node.deadline_unix_s - time.time()
