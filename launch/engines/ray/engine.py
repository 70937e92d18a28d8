"""The engine of Ray: one placement group an attempt, one seat (a plain actor) a process, one more for the coordinator.

`holdfast.launch.ray.run(fn, JobSpec(num_processes=4))` calls `fn` on every process; `run_command` does the same for a command. Needs
the extra holdfast[ray].
"""

from __future__ import annotations

import pickle
import queue
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.multihost import ProcessSpec

from ...supervisor.engine import JobResult, supervise
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
    Stop,
    Terminate,
    Waiting,
)
from ...view import LiveView, reporter
from ...workers.coordinator import ProcessProgress, ProgressWatch
from ...workers.output import ConsoleOutput, Output
from ...workers.signals import passing_on
from .cluster import cluster_nodes, load_ray
from .placement import Node, Seats, seats
from .worker_actor import CoordinatorActor, WorkerActor, WorkerUpdate

_LOOK_S = 0.5  # between two looks at the cluster
_NEWS_S = 0.5  # how long a seat may hold back an answer
_READY_S = 10.0  # for what is free to become ours


@dataclass(frozen=True)
class JobSpec:
    """Says what a job needs. `resources` are of one process; `slices` above 1 makes the job of that many TPU slices of equal size.

    With `min_processes` below `num_processes` the job goes on with fewer when machines are lost, and grows again when they return: in
    whole slices where there are slices.
    """

    num_processes: int
    min_processes: int | None = None
    resources: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    slices: int = 1
    restart: RestartPolicy = field(default_factory=lambda: RestartPolicy(max_failures=3, max_preemptions=100))
    job_id: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.slices < 1 or self.num_processes % self.slices:
            raise ValueError(f"num_processes={self.num_processes} in slices={self.slices}: expected slices of one size")
        if not any(amount > 0 for amount in self.resources.values()):
            raise ValueError(f"resources={dict(self.resources)}: a process needs at least some of one resource")


@dataclass(frozen=True)
class RayResult:
    """Says how the job ended; `values` are what the calls of the last attempt returned, by rank (None where none did)."""

    job: JobResult
    values: tuple[Any, ...]

    @property
    def outcome(self) -> str:
        """Is "done", "preempted" or "failed"."""
        return self.job.outcome


def run(
    fn: Callable[..., Any], spec: JobSpec, *, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, address: str = "auto"
) -> RayResult:
    """Calls `fn(*args, **kwargs)` on `spec.num_processes` processes of the Ray cluster, to the end of the job. Blocks.

    The cluster is the one that this process is connected to, else the one at `address`.

    `fn` is pickled by value where it must be, runs in a process of its own with its ProcessSpec in the environment, and calls
    `multihost.initialize()`. A return means done, unless a notice of preemption came before: then the job is started again. It raises
    Preempted (or exits with 75) to say that it was preempted, Fatal to say that a restart cannot help. Nothing is raised for a job that
    fails: see `result.job.error`.
    """
    return _run(spec, call=load_ray().cloudpickle.dumps((fn, tuple(args), dict(kwargs or {}))), output=None, address=address)


def run_command(command: Sequence[str], spec: JobSpec, *, output: Output | None = None, address: str = "auto") -> RayResult:
    """Runs `command` as the processes of a job on a Ray cluster, as `holdfast run --ray ADDRESS` does. Blocks."""
    return _run(spec, command=list(command), output=output, address=address)


def _run(spec: JobSpec, *, command: list[str] | None = None, call: bytes | None = None, output: Output | None, address: str) -> RayResult:
    ray = load_ray()
    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=False)
    job_id = spec.job_id or f"ray-{uuid.uuid4().hex[:12]}"
    least = spec.min_processes or spec.num_processes
    job = Job(job_id, least, spec.num_processes, spec.restart)
    output = output or ConsoleOutput(sys.stdout, sys.stderr, spec.num_processes)
    engine = RayEngine(job_id, spec, command=command, call=call, output=output)
    if isinstance(output, LiveView):
        output.progress = engine.progress
    with passing_on(engine.forward):
        result = supervise(job, engine, on_decision=reporter(output, first_attempt=1))
    return RayResult(result, engine.values())


class RayEngine:
    """Carries out a job on a Ray cluster. Everything but `forward` belongs to the thread that made it."""

    def __init__(self, job_id: str, spec: JobSpec, *, command: list[str] | None, call: bytes | None, output: Output) -> None:
        self._job_id, self._spec, self._command, self._call, self._output = job_id, spec, command, call, output
        self._queue: queue.SimpleQueue[Event | int] = queue.SimpleQueue()
        self._reserve: Reserve | None = None
        self._why_not = ""
        self._seats = Seats()
        self._group: Any = None
        self._actors: dict[int, Any] = {}
        self._pending: dict[Any, int] = {}  # an answer to come -> whose
        self._coordinator: Any = None
        self._watch: ProgressWatch | None = None
        self._attempt = 0
        self._outcomes: dict[int, bytes | None] = {}
        self._noticed: set[str] = set()
        self._signals = 0
        self._look_at = 0.0

    # ---- Actions

    def carry_out(self, action: Action) -> None:
        if isinstance(action, Reserve):
            self._reserve, self._attempt = action, action.attempt
        elif isinstance(action, Launch):
            self._launch(action.attempt)
        elif isinstance(action, Notify | Terminate):
            self._tell("signal", 15)
        elif isinstance(action, Kill):
            self._tell("kill")
        elif isinstance(action, Release):
            self._release()

    def _tell(self, method: str, *arguments: object) -> None:
        for actor in self._actors.values():
            getattr(actor, method).remote(*arguments)

    def _launch(self, attempt: int) -> None:
        ray = load_ray()
        chosen = self._seats
        here = ray.get_runtime_context().get_node_id()
        self._coordinator = _actor(CoordinatorActor, node_id=here).remote(self._job_id, attempt, len(chosen.nodes))
        actors = [
            _actor(WorkerActor, group=self._group, bundle=rank, need=self._spec.resources).remote() for rank in range(len(chosen.nodes))
        ]
        self._actors = dict(enumerate(actors))
        left_s = self._spec.restart.startup_timeout_s
        address = ray.get(self._coordinator.address.remote(), timeout=left_s)
        ray.get([actor.pid.remote() for actor in actors], timeout=left_s)
        self._watch = ProgressWatch(address, attempt, self._queue.put)
        started = [
            actor.start.remote(self._command, self._call, self._process_spec(rank, attempt, address), self._spec.env)
            for rank, actor in self._actors.items()
        ]
        for rank, lines in enumerate(ray.get(started, timeout=left_s)):
            for line in lines:
                self._output.say(f"process {rank}: {line}")
        self._outcomes = {}
        for rank in self._actors:
            self._listen(rank)

    def _process_spec(self, rank: int, attempt: int, coordinator: str) -> ProcessSpec:
        chosen = self._seats
        return ProcessSpec(
            job_id=self._job_id,
            attempt=attempt,
            process_id=rank,
            num_processes=len(chosen.nodes),
            coordinator=coordinator,
            slice_id=chosen.slice_of[rank],
            num_slices=chosen.num_slices,
            slice_address=chosen.nodes[0].address if chosen.num_slices > 1 else None,
        )

    def _listen(self, rank: int) -> None:
        self._pending[self._actors[rank].news.remote(_NEWS_S)] = rank

    def _release(self) -> None:
        ray = load_ray()
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
        if self._coordinator is not None:
            self._coordinator.close.remote()
            ray.kill(self._coordinator)
            self._coordinator = None
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors, self._pending, self._reserve = {}, {}, None
        self._noticed = set()
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
            self._group = None

    # ---- Events

    def progress(self) -> tuple[ProcessProgress, ...]:
        """Returns what the processes of this attempt last reported."""
        watch = self._watch
        return watch.processes if watch is not None else ()

    def forward(self, number: int) -> None:
        """Takes a signal of the driver: the first asks the job to stop, the second repeats SIGTERM, the third kills. Signal-safe."""
        self._queue.put(number)

    def events(self, timeout_s: float | None) -> Sequence[Event]:
        """Returns news of seats, cluster, coordinator and signals; asks each of them at least twice a second."""
        found: list[Event] = []
        if time.monotonic() >= self._look_at:
            found += self._look()
            self._look_at = time.monotonic() + _LOOK_S
        wait_s = 0.0 if found or timeout_s == 0 else min(_LOOK_S / 2, _LOOK_S if timeout_s is None else timeout_s)
        found += self._news(wait_s)
        while not self._queue.empty():
            news = self._queue.get()
            found += self._on_signal() if isinstance(news, int) else [news]
        return found

    def _news(self, wait_s: float) -> list[Event]:
        ray = load_ray()
        if not self._pending:
            if wait_s:
                threading.Event().wait(wait_s)
            return []
        ready, _ = ray.wait(list(self._pending), num_returns=1, timeout=wait_s)
        ready += [ref for ref in ray.wait(list(self._pending), num_returns=len(self._pending), timeout=0)[0] if ref not in ready]
        return [event for ref in ready for event in self._hear(ref, self._pending.pop(ref))]

    def _hear(self, ref: Any, rank: int) -> list[Event]:
        ray = load_ray()
        try:
            news: WorkerUpdate = ray.get(ref)
        except ray.exceptions.RayError as error:
            why = str(error).strip().splitlines()[0]
            return self._exited(Exited(self._attempt, rank, -9, f"its seat is gone: {why}"))
        for line in news.lines:
            self._output.line(rank, line)
        if news.code is None:
            self._listen(rank)
            return []
        self._outcomes[rank] = news.outcome
        return self._exited(Exited(self._attempt, rank, news.code, self._why(news)))

    def _exited(self, event: Exited) -> list[Event]:
        if self._watch is not None:
            self._watch.refresh()
        found: list[Event] = []
        while not self._queue.empty():
            news = self._queue.get()
            found += self._on_signal() if isinstance(news, int) else [news]
        return [*found, event]

    def _why(self, news: WorkerUpdate) -> str:
        kind, value = pickle.loads(news.outcome) if news.outcome else ("", None)
        return f"{type(value).__name__}: {value}" if kind == "error" else ""

    def _on_signal(self) -> list[Event]:
        self._signals += 1
        if self._signals == 1:
            return [Stop("a signal to the driver")]
        self._tell("signal", 15) if self._signals == 2 else self._tell("kill")
        return []

    # ---- The cluster

    def _look(self) -> list[Event]:
        if self._reserve is not None:
            return self._try_to_reserve(self._reserve)
        if not self._actors:
            return []
        nodes = {node.node_id: node for node in cluster_nodes()}
        ours = {node.node_id: node for node in self._seats.nodes}
        found: list[Event] = []
        for node_id in ours:
            now = nodes.get(node_id)
            if now is not None and now.draining and node_id not in self._noticed:
                self._noticed.add(node_id)
                found.append(Notice(f"Ray drains {now.address} ({node_id[:8]})", _deadline(now)))
        return found or self._growth(nodes)

    def _growth(self, nodes: Mapping[str, Node]) -> list[Event]:
        """Says how large a gang would fit if ours gave its seats back."""
        spec, count = self._spec, len(self._seats.nodes)
        if count == spec.num_processes:
            return []
        freed = [_with(node, spec.resources, sum(seat.node_id == node.node_id for seat in self._seats.nodes)) for node in nodes.values()]
        larger = len(seats(freed, spec.resources, count, spec.num_processes, spec.slices).nodes)
        return [Capacity(larger)] if larger > count else []

    def _try_to_reserve(self, reserve: Reserve) -> list[Event]:
        ray = load_ray()
        spec = self._spec
        chosen = seats(cluster_nodes(), spec.resources, reserve.least, reserve.most, spec.slices)
        if chosen.why_not and chosen.why_not != self._why_not:
            self._output.say(f"attempt {reserve.attempt}: {chosen.why_not}")
        self._why_not = chosen.why_not
        if not chosen.nodes:
            return [Waiting(reserve.attempt, chosen.why_not)]
        bundles = [dict(spec.resources) for _ in chosen.nodes]
        pins = [{"ray.io/node-id": node.node_id} for node in chosen.nodes]
        group = ray.util.placement_group(bundles, strategy="PACK", bundle_label_selector=pins)
        if not group.wait(_READY_S):  # somebody else was faster, or a node has gone since
            ray.util.remove_placement_group(group)
            return []
        self._group, self._seats, self._reserve = group, chosen, None
        return [Reserved(reserve.attempt, len(chosen.nodes))]

    def values(self) -> tuple[Any, ...]:
        """Returns what the calls of the last attempt returned, by rank."""
        outcomes = [self._outcomes.get(rank) for rank in range(len(self._seats.nodes))]
        pairs = [pickle.loads(data) if data else ("", None) for data in outcomes]
        return tuple(value if kind == "value" else None for kind, value in pairs)

    def close(self) -> None:
        """Ends whatever is left: what was asked to end has the grace time, then its actor is killed, and its process with it."""
        deadline = time.monotonic() + self._spec.restart.grace_s
        while self._pending and time.monotonic() < deadline:
            self._news(0.1)
        self._tell("kill")
        self._release()


def _actor(kind: type, *, group: Any = None, bundle: int = 0, need: Mapping[str, float] | None = None, node_id: str = "") -> Any:
    ray = load_ray()
    strategies = ray.util.scheduling_strategies
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0}
    if group is None:
        options["scheduling_strategy"] = strategies.NodeAffinitySchedulingStrategy(node_id, soft=True)
    else:
        special = {name: amount for name, amount in (need or {}).items() if name not in ("CPU", "GPU", "memory")}
        options |= {"num_cpus": (need or {}).get("CPU", 0), "num_gpus": (need or {}).get("GPU", 0), "resources": special}
        options["scheduling_strategy"] = strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    return ray.remote(**options)(kind)


def _with(node: Node, need: Mapping[str, float], count: int) -> Node:
    return replace(node, available={name: node.available.get(name, 0.0) + count * need.get(name, 0.0) for name in need})


def _deadline(node: Node) -> float | None:
    """Returns the drain's deadline on the monotonic clock."""
    return None if node.deadline_unix_s is None else time.monotonic() + node.deadline_unix_s - time.time()
