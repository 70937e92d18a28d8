"""The engine of Ray: one placement group an attempt, one actor a process, one more for the
coordinator.

`holdfast.launch.ray.run(fn, JobSpec(num_processes=4))` calls `fn` on every process; `run_command`
does the same for a command. Needs the extra `ray`.
"""

from __future__ import annotations

import pickle
import signal
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.coordination import Credentials
from holdfast.coordination.process.job_folder import JobFolder
from holdfast.multihost import ProcessSpec

from ...supervisor.engine import JobResult
from ...supervisor.job import (
    Action,
    Capacity,
    Event,
    Exited,
    Job,
    Kill,
    Launch,
    Notice,
    Notify,
    Release,
    Reserve,
    Reserved,
    RestartPolicy,
    Terminate,
    Waiting,
)
from ...workers.coordinator import HEARTBEAT_TIMEOUT_S
from ...workers.output import ConsoleOutput, Output
from ...workers.secrets import JobSecrets, credentials_in, require_cryptography
from ..base import BaseEngine, run_job
from .cluster import cluster_nodes, load_ray
from .placement import Node, Placement, place_gang
from .worker_actor import CoordinatorActor, WorkerActor, WorkerUpdate

_POLL_S = 0.5  # how often the cluster is asked
_UPDATE_S = 0.5  # how long an actor may hold back an update
_READY_S = 10.0  # for what is free to become ours


@dataclass(frozen=True)
class JobSpec:
    """What a job needs. `resources` are of one process; `num_slices` above 1 makes the job of that
    many TPU slices of equal size.

    With `min_processes` below `num_processes` the job goes on with fewer when machines are lost,
    and grows again when they return: in whole slices where there are slices. A process that is
    silent for `heartbeat_timeout_s` is lost. The job has a token and certificates of its own, which
    its actors get by Ray's channel, unless `insecure`.
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
    """How the job ended; `values` are what the calls of the last attempt returned, by rank (None
    where none did).
    """

    job: JobResult
    values: tuple[Any, ...]

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
    """Calls `fn(*args, **kwargs)` on `spec.num_processes` processes of the Ray cluster, to the end
    of the job. Blocks.

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
    """Runs `command` as the processes of a job on a Ray cluster, as `holdfast run --ray ADDRESS`
    does. Blocks.
    """
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
    output = output or ConsoleOutput(sys.stdout, sys.stderr, spec.num_processes)
    engine = RayEngine(job_id, spec, command=command, call=call, output=output)
    return RayResult(run_job(job, engine, output), engine.values())


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
        self._job_id = job_id
        self._spec = spec
        self._command = command
        self._call = call
        self._reserve: Reserve | None = None
        self._why_waiting = ""
        self._placement = Placement()
        self._group: Any = None
        self._actors: dict[int, Any] = {}
        self._lost_actor = False
        self._kept: tuple[Placement, Any, dict[int, Any]] | None = (
            None  # of the attempt before, for the next
        )
        self._pending: dict[Any, int] = {}  # reference to an update to come -> rank
        self._coordinator: Any = None
        self._folder: JobFolder | None = None  # of the credentials that the watch shows
        self._attempt = 0
        self._outcomes: dict[int, bytes | None] = {}
        self._noticed: set[str] = set()
        self._poll_at = 0.0

    # --- Actions

    def carry_out(self, action: Action) -> None:
        if isinstance(action, Reserve):
            self._reserve = action
            self._attempt = action.attempt
        elif isinstance(action, Launch):
            self._launch(action.attempt)
        elif isinstance(action, Notify):
            self._terminate()
        elif isinstance(action, Terminate):
            self._terminate(processes=action.processes)
        elif isinstance(action, Kill):
            self._kill(action.processes)
        elif isinstance(action, Release):
            self._release(keep=True)

    def _signal(self, number: signal.Signals, processes: frozenset[int] | None) -> None:
        for rank in self._actors if processes is None else processes:
            self._actors[rank].signal.remote(int(number))

    def _kill(self, processes: frozenset[int] | None = None) -> None:
        for rank in self._actors if processes is None else processes:
            self._actors[rank].kill.remote()

    def _launch(self, attempt: int) -> None:
        ray = load_ray()
        num_processes = len(self._placement.nodes)
        here = ray.get_runtime_context().get_node_id()
        self._coordinator = _actor(CoordinatorActor, node_id=here).remote(
            self._job_id,
            attempt,
            num_processes,
            self._spec.heartbeat_timeout_s,
            not self._spec.insecure,
        )
        if not self._actors:
            resources = self._spec.resources
            actors = [
                _actor(WorkerActor, group=self._group, bundle=rank, resources=resources).remote()
                for rank in range(num_processes)
            ]
            self._actors = dict(enumerate(actors))
        actors = list(self._actors.values())
        timeout_s = self._spec.restart.startup_timeout_s
        address, secrets = ray.get(self._coordinator.endpoint.remote(), timeout=timeout_s)
        ray.get([actor.pid.remote() for actor in actors], timeout=timeout_s)
        self._open_watch(address, attempt, self._credentials(secrets))
        reached = self._start_relays(address, secrets, timeout_s)
        started = [
            actor.start.remote(
                self._command,
                self._call,
                self._process_spec(rank, attempt, *reached[rank]),
                self._spec.env,
            )
            for rank, actor in self._actors.items()
        ]
        for rank, lines in enumerate(ray.get(started, timeout=timeout_s)):
            for line in lines:
                self._output.say(f"process {rank}: {line}")
        self._outcomes = {}
        for rank in self._actors:
            self._request_update(rank)

    def _credentials(self, secrets: JobSecrets | None) -> Credentials | None:
        if secrets is None:
            return None
        self._folder = JobFolder.create()
        return credentials_in(self._folder, secrets)

    def _start_relays(
        self, address: str, secrets: JobSecrets | None, timeout_s: float
    ) -> list[tuple[str, str | None]]:
        """Starts a relay on each machine, in the actor of its first process.

        Returns where each process reaches the coordinator, and the address of its machine behind a
        relay.
        """
        nodes = [node.node_id for node in self._placement.nodes]
        if secrets is None:
            return [(address, None)] * len(nodes)
        ranks = {
            node: [rank for rank, other in enumerate(nodes) if other == node] for node in nodes
        }
        relays = {
            node: self._actors[on_node[0]].start_relay.remote(address, secrets, on_node)
            for node, on_node in ranks.items()
        }
        addresses = dict(
            zip(relays, load_ray().get(list(relays.values()), timeout=timeout_s), strict=True)
        )
        return [addresses[node] for node in nodes]

    def _process_spec(
        self, rank: int, attempt: int, coordinator: str, host_address: str | None
    ) -> ProcessSpec:
        placement = self._placement
        return ProcessSpec(
            job_id=self._job_id,
            attempt=attempt,
            process_id=rank,
            num_processes=len(placement.nodes),
            coordinator=coordinator,
            slice_id=placement.slice_of[rank],
            num_slices=placement.num_slices,
            slice_address=placement.nodes[0].address if placement.num_slices > 1 else None,
            local_rank=[node.node_id for node in placement.nodes[:rank]].count(
                placement.nodes[rank].node_id
            ),
            host_address=host_address,
        )

    def _request_update(self, rank: int) -> None:
        self._pending[self._actors[rank].poll.remote(_UPDATE_S)] = rank

    def _release(self, *, keep: bool = False) -> None:
        """Ends the attempt. With `keep` a whole gang keeps its actors, whose start costs seconds:
        see `_take_kept`.
        """
        ray = load_ray()
        self._close_watch()
        if self._folder is not None:
            self._folder.remove()
            self._folder = None
        if self._coordinator is not None:
            self._coordinator.close.remote()
            ray.kill(self._coordinator)
            self._coordinator = None
        if keep and len(self._actors) == self._spec.num_processes and not self._lost_actor:
            self._kill()
            self._kept = self._placement, self._group, self._actors
        else:
            self._give_back(self._group, self._actors)
        self._actors = {}
        self._group = None
        self._pending = {}
        self._reserve = None
        self._noticed, self._lost_actor = set(), False

    def _give_back(self, group: Any, actors: Mapping[int, Any]) -> None:
        ray = load_ray()
        for actor in actors.values():
            ray.kill(actor)
        if group is not None:
            ray.util.remove_placement_group(group)

    def _take_kept(self, reserve: Reserve) -> bool:
        """Takes over the gang of the attempt before where all of it still stands and is as large as
        is wanted; else gives it back.
        """
        if self._kept is None:
            return False
        ray, (placement, group, actors) = load_ray(), self._kept
        self._kept = None
        healthy = {node.node_id for node in cluster_nodes() if not node.draining}
        stands = reserve.max_processes == len(actors) and all(
            node.node_id in healthy for node in placement.nodes
        )
        try:
            ray.get(
                [actor.pid.remote() for actor in actors.values()] if stands else [],
                timeout=_READY_S,
            )
        except ray.exceptions.RayError:  # one has died, or does not answer in time
            stands = False
        if stands:
            self._placement = placement
            self._group = group
            self._actors = actors
            self._reserve = None
        else:
            self._give_back(group, actors)
        return stands

    # --- Events

    def events(self, timeout_s: float | None) -> Sequence[Event]:
        """Returns what has happened to actors, cluster, coordinator and launcher; polls each of
        them at least twice a second.
        """
        found: list[Event] = []
        if time.monotonic() >= self._poll_at:
            found += self._poll_cluster()
            self._poll_at = time.monotonic() + _POLL_S
        wait_s = (
            0.0
            if found or timeout_s == 0
            else min(_POLL_S / 2, _POLL_S if timeout_s is None else timeout_s)
        )
        self._poll_actors(wait_s)
        while not self._queue.empty():
            found += super().events(0)
        return found

    def _poll_actors(self, wait_s: float) -> None:
        ray = load_ray()
        if not self._pending:
            if wait_s:
                threading.Event().wait(wait_s)
            return
        ready, _ = ray.wait(list(self._pending), num_returns=1, timeout=wait_s)
        ready += [
            ref
            for ref in ray.wait(list(self._pending), num_returns=len(self._pending), timeout=0)[0]
            if ref not in ready
        ]
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
        if self._reserve is not None:
            return self._try_to_reserve(self._reserve)
        if not self._actors:
            return []
        nodes = {node.node_id: node for node in cluster_nodes()}
        ours = {node.node_id: node for node in self._placement.nodes}
        found: list[Event] = []
        for node_id in ours:
            now = nodes.get(node_id)
            if now is not None and now.draining and node_id not in self._noticed:
                self._noticed.add(node_id)
                found.append(Notice(f"Ray drains {now.address} ({node_id[:8]})", _deadline(now)))
        return found or self._growth(nodes)

    def _growth(self, nodes: Mapping[str, Node]) -> list[Event]:
        """Returns how large a gang would fit if ours gave its machines back, where that is
        larger.
        """
        spec, num_processes = self._spec, len(self._placement.nodes)
        if num_processes == spec.num_processes:
            return []
        used = Counter(node.node_id for node in self._placement.nodes)
        freed = [_with(node, spec.resources, used[node.node_id]) for node in nodes.values()]
        larger = len(
            place_gang(
                freed, spec.resources, num_processes, spec.num_processes, spec.num_slices
            ).nodes
        )
        return [Capacity(larger)] if larger > num_processes else []

    def _try_to_reserve(self, reserve: Reserve) -> list[Event]:
        ray = load_ray()
        spec = self._spec
        if self._take_kept(reserve):
            return [Reserved(reserve.attempt, len(self._placement.nodes))]
        placement = place_gang(
            cluster_nodes(),
            spec.resources,
            reserve.min_processes,
            reserve.max_processes,
            spec.num_slices,
        )
        if placement.why_not_more and placement.why_not_more != self._why_waiting:
            self._output.say(f"attempt {reserve.attempt}: {placement.why_not_more}")
        self._why_waiting = placement.why_not_more
        if not placement.nodes:
            return [Waiting(reserve.attempt, placement.why_not_more)]
        bundles = [dict(spec.resources) for _ in placement.nodes]
        pins = [{"ray.io/node-id": node.node_id} for node in placement.nodes]
        group = ray.util.placement_group(bundles, strategy="PACK", bundle_label_selector=pins)
        if not group.wait(_READY_S):  # somebody else was faster, or a node has gone since
            ray.util.remove_placement_group(group)
            return []
        self._group = group
        self._placement = placement
        self._reserve = None
        return [Reserved(reserve.attempt, len(placement.nodes))]

    def values(self) -> tuple[Any, ...]:
        """Returns what the calls of the last attempt returned, by rank."""
        outcomes = [self._outcomes.get(rank) for rank in range(len(self._placement.nodes))]
        return tuple(
            value if kind == "value" else None for kind, value in map(_unpickled, outcomes)
        )

    def close(self) -> None:
        """Ends whatever still runs: what was asked to end has the grace time, then its actor is
        killed, and its process with it.
        """
        deadline = time.monotonic() + self._spec.restart.grace_s
        while self._pending and time.monotonic() < deadline:
            self._poll_actors(0.1)
        self._kill()
        self._release()
        if self._kept is not None:
            self._give_back(*self._kept[1:])
            self._kept = None


def _actor(
    kind: type,
    *,
    group: Any = None,
    bundle: int = 0,
    resources: Mapping[str, float] | None = None,
    node_id: str = "",
) -> Any:
    ray = load_ray()
    strategies = ray.util.scheduling_strategies
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0}
    if group is None:
        options["scheduling_strategy"] = strategies.NodeAffinitySchedulingStrategy(
            node_id, soft=True
        )
    else:
        others = {
            name: amount
            for name, amount in (resources or {}).items()
            if name not in ("CPU", "GPU", "memory")
        }
        options |= {
            "num_cpus": (resources or {}).get("CPU", 0),
            "num_gpus": (resources or {}).get("GPU", 0),
            "resources": others,
        }
        options["scheduling_strategy"] = strategies.PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=bundle
        )
    return ray.remote(**options)(kind)


def _unpickled(outcome: bytes | None) -> tuple[str, Any]:
    """Returns ("value", what a call returned) or ("error", what it raised); what only its process
    can read is an error that says so.
    """
    if not outcome:
        return "", None
    try:
        kind, value = pickle.loads(outcome)
    except Exception as error:  # whatever a class of the user's does here
        return "error", TypeError(
            f"what the call left cannot be read here: {type(error).__name__}: {error}"
        )
    return kind, value


def _with(node: Node, resources: Mapping[str, float], count: int) -> Node:
    """Returns a node with the resources of `count` more processes free."""
    return replace(
        node,
        available={
            name: node.available.get(name, 0.0) + count * resources.get(name, 0.0)
            for name in resources
        },
    )


def _deadline(node: Node) -> float | None:
    """Returns the drain's deadline on the monotonic clock."""
    return (
        None
        if node.deadline_unix_s is None
        else time.monotonic() + node.deadline_unix_s - time.time()
    )
