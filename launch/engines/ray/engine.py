"""The engine of Ray: a placement group a gang, an actor a process, one a machine, one for the
coordinators.

`holdfast.launch.ray.run(fn, JobSpec(num_processes=4))` calls `fn` on every process; `run_command`
does the same for a command. Needs the extra `ray`.
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

from holdfast.coordination.process.job_folder import working_folder
from holdfast.multihost import Preempted, ProcessSpec
from holdfast.proto import session_pb2

from ...supervisor.engine import JobResult
from ...supervisor.job import (
    Capacity,
    Event,
    Exited,
    Job,
    Noticed,
    Rejoin,
    Reserve,
    Reserved,
    RestartPolicy,
    Unplaced,
    Waiting,
    renumbered,
)
from ...supervisor.ledger import Errand
from ...workers.coordinator import HEARTBEAT_TIMEOUT_S, end_attempt
from ...workers.output import Output, console_unless
from ...workers.secrets import JobSecrets, require_cryptography, shown
from ...workers.standby import StandbySettings
from ..base import MOST_LOOKS, BaseEngine, chosen
from .cluster import cluster_nodes, load_ray
from .placement import Node, Placement, place_gang
from .worker_actor import CoordinatorActor, HostActor, Program, WorkerActor, WorkerUpdate

_POLL_S = 0.5  # how often the cluster is asked
_UPDATE_S = 0.5  # how long an actor may hold back an update
_READY_S = 10.0  # for what is free to become ours
_TURN_S = 0.25  # how long a turn of the loop waits at most
_RELAYS_S = 5.0  # for those of the machines whose processes stay
_LOOK_S = 6.0  # at processes that are late

T = TypeVar("T")
Turns: TypeAlias = Generator[list[Event], None, T]
"""What takes longer than a turn of the loop: it yields the events of each."""


@dataclass(frozen=True)
class JobSpec:
    """What a job needs. `resources` are of one process.

    `num_slices` above 1 makes the job of that many TPU slices of equal size. With `min_processes`
    below `num_processes` the job goes on with fewer when machines are lost, and grows again when
    they return: in whole slices where there are slices. Places for `spares` processes more are held
    on other machines, for those whose machine is lost. A process that is silent for
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
    spares: int = 0
    standby: StandbySettings = field(default_factory=StandbySettings)

    def __post_init__(self) -> None:
        if self.num_slices < 1 or self.num_processes % self.num_slices:
            raise ValueError(
                f"num_processes={self.num_processes} in num_slices={self.num_slices}: expected"
                " slices of one size"
            )
        if self.spares < 0:
            raise ValueError(f"spares={self.spares}: expected 0 or more")
        if self.spares and self.num_slices > 1:
            raise ValueError(f"spares={self.spares}: of several slices no process is moved alone")
        if not any(amount > 0 for amount in self.resources.values()):
            raise ValueError(
                f"resources={dict(self.resources)}: a process needs at least some of one resource"
            )

    @property
    def least(self) -> int:
        """The fewest processes that it runs with."""
        return self.num_processes if self.min_processes is None else self.min_processes

    def job(self, job_id: str) -> Job:
        """Returns the job before its first attempt. ValueError: numbers that do not fit."""
        return Job(job_id, self.least, self.num_processes, self.restart)


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
    call = load_ray().cloudpickle.dumps((fn, tuple(args), dict(kwargs or {})))
    return _run(spec, Program(call=call, env=dict(spec.env)), None, address)


def run_command(
    command: Sequence[str], spec: JobSpec, *, output: Output | None = None, address: str = "auto"
) -> RayResult:
    """Runs `command` as the processes of a job on a Ray cluster. Blocks to its end."""
    return _run(spec, Program(list(command), env=dict(spec.env)), output, address)


def _run(spec: JobSpec, program: Program, output: Output | None, address: str) -> RayResult:
    ray = load_ray()
    if not spec.insecure:
        require_cryptography()
    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=False)
    job_id = spec.job_id or f"ray-{uuid.uuid4().hex[:12]}"
    job = spec.job(job_id)
    with console_unless(output, spec.num_processes) as lines:
        engine = RayEngine(job_id, spec, program, lines)
        return RayResult(engine.run(job), engine.values())


@dataclass
class Gang:
    """The machines of a job, what is reserved there, and its actors: one a process, and one a
    machine for its relay.
    """

    placement: Placement = field(default_factory=Placement)
    # Of each rank: Ray's group of what is reserved, and which of its bundles.
    bundles: list[tuple[Any, int]] = field(default_factory=list)
    actors: dict[int, Any] = field(default_factory=dict)  # by rank; made by `start_actors`
    hosts: dict[str, Any] = field(default_factory=dict)  # by machine

    @property
    def node_ids(self) -> list[str]:
        """The machine of each rank."""
        return [node.node_id for node in self.placement.nodes]

    def ranks_on(self, node_id: str) -> list[int]:
        """Returns the ranks whose machine it is."""
        return [rank for rank, its in enumerate(self.node_ids) if its == node_id]

    def start_actors(self, resources: Mapping[str, float]) -> None:
        """Starts the actors of processes that are not there: their start costs seconds."""
        for rank, (group, bundle) in enumerate(self.bundles):
            if rank not in self.actors:
                actor = _actor_in(group, bundle, resources, WorkerActor)
                self.actors[rank] = actor.remote(_folder())

    def host(self, node_id: str) -> Any:
        """Returns the actor of a machine, and starts it where there is none."""
        if node_id not in self.hosts:
            self.hosts[node_id] = _actor_on(node_id, HostActor).remote()
        return self.hosts[node_id]

    def lost_machines(self, ranks: Iterable[int] | None = None) -> list[Node]:
        """Returns the machines of ranks (None: all) that have gone, or are draining."""
        healthy = {node.node_id for node in cluster_nodes() if not node.draining}
        nodes = self.placement.nodes
        asked = range(len(nodes)) if ranks is None else ranks
        lost = {
            node.node_id: node for rank in asked if (node := nodes[rank]).node_id not in healthy
        }
        return list(lost.values())

    def move(self, ranks: Sequence[int], reserved: Gang) -> None:
        """Takes the machines of another gang for processes that have lost theirs, or are new, in
        the order of ranks.
        """
        nodes = list(self.placement.nodes)
        groups = self._groups
        for index, rank in enumerate(ranks):
            nodes[rank : rank + 1] = [reserved.placement.nodes[index]]
            self.bundles[rank : rank + 1] = [reserved.bundles[index]]
        self.placement = replace(self.placement, nodes=tuple(nodes))
        self._remove_unused(groups)

    @property
    def _groups(self) -> dict[int, Any]:
        return {id(group): group for group, _ in self.bundles}

    def _remove_unused(self, before: Mapping[int, Any]) -> None:
        for unused in before.keys() - self._groups:
            load_ray().util.remove_placement_group(before[unused])

    def close_up(self, numbers_before: Sequence[int]) -> None:
        """Goes on without the machines of those that have no number any more."""
        groups = self._groups
        nodes = [self.placement.nodes[rank] for rank in numbers_before]
        self.placement = replace(self.placement, nodes=tuple(nodes))
        self.bundles = [self.bundles[rank] for rank in numbers_before]
        self.actors = renumbered(self.actors, numbers_before)
        self._remove_unused(groups)

    def stands(self) -> Turns[bool]:
        """Returns whether every machine and every actor is still there, within 10 s."""
        ray = load_ray()
        if self.lost_machines():
            return False
        asked = [actor.pid.remote() for actor in [*self.actors.values(), *self.hosts.values()]]
        yield from _wait_for(asked, _READY_S)
        try:
            ray.get(asked, timeout=0)
        except ray.exceptions.RayError:  # one has died, or does not answer in time
            return False
        return True

    def give_back(self) -> None:
        """Ends the actors, and gives the machines back."""
        ray = load_ray()
        for actor in [*self.actors.values(), *self.hosts.values()]:
            ray.kill(actor)
        for group in self._groups.values():
            ray.util.remove_placement_group(group)


@dataclass(frozen=True)
class RayCoordinator:
    """The coordinator of one attempt, in its actor, and what the relays of machines have for it."""

    actor: Any
    attempt: int
    hosts: Mapping[str, Any]
    address: str = ""  # until it is open
    secrets: JobSecrets | None = None  # what its callers show

    def end_attempt(self, following: session_pb2.NextAttempt) -> None:
        """Says to those that outlive its attempt where the next one is; takes at most 1 s."""
        if self.address:
            with shown(self.secrets) as credentials:
                end_attempt(self.address, credentials, following)

    def close(self) -> None:
        """Ends it, and what is connected to it."""
        for actor in [self.actor, *self.hosts.values()]:
            actor.close.remote(self.attempt)


class RayEngine(BaseEngine):
    """Runs a job's processes as children of actors of a Ray cluster."""

    def __init__(self, job_id: str, spec: JobSpec, program: Program, output: Output) -> None:
        super().__init__(output, spec.restart)
        # The slices of a TPU job meet where their first hosts are: none of them is moved alone.
        self.replaces = spec.num_slices == 1
        self.errand = Errand(program.command)
        self._job_id = job_id
        self._spec = spec
        self._restarts = spec.job(job_id).may_restart
        self._program = program
        self._why_waiting = ""
        self._gang = Gang()
        self._kept: Gang | None = None  # of the attempt before, for the next
        # Reference to an update to come -> rank and life.
        self._pending: dict[Any, tuple[int, int]] = {}
        self._coordinators: Any = None  # their actor
        self._relays: dict[str, Any] = {}  # references to those of the attempt, by machine
        self._missed: set[int] = set()  # those that did not come, and are replaced
        self._spares: list[Gang] = []  # of one place each
        self._sparing: Turns[None] = _wait_for([], 0.0)  # goes on with each turn, too
        # By machine, those without a standby, once the attempt has made a step.
        self._cold: dict[str, list[int]] = {}
        # Finds room or starts an attempt: each turn of the loop goes on with it.
        self._work: Turns[None] = _wait_for([], 0.0)
        self._outcomes: dict[int, bytes | None] = {}  # of the last attempt, by rank
        self._noticed: set[str] = set()
        self._freed: Counter[str] = Counter()  # processes that machines have just let go
        self._free_at = 0.0  # when these have surely gone
        self._poll_at = 0.0

    # --- Actions

    def _reserve(self, action: Reserve) -> None:
        self._work = self._find_room(action)

    def _signal(self, number: signal.Signals, processes: frozenset[int] | None) -> None:
        for actor in chosen(self._gang.actors, processes):
            actor.signal.remote(int(number))

    def _kill(self, processes: frozenset[int] | None) -> None:
        for actor in chosen(self._gang.actors, processes):
            actor.kill.remote()

    def _launch(self) -> None:
        self._work = self._begin()

    def _begin(self) -> Turns[None]:
        """Starts an attempt; yields while actors have yet to answer."""
        deadline = time.monotonic() + self._spec.restart.startup_timeout_s
        everybody = range(self._num_processes)
        secured = not self._spec.insecure
        self._coordinators = actor_here(CoordinatorActor).remote(
            self._job_id, self._spec.heartbeat_timeout_s, secured=secured
        )
        opening = self._new_coordinator()
        self._gang.start_actors(self._spec.resources)
        yield []
        actors = self._gang.actors.values()
        yield from self._open_coordinator(opening, deadline)
        yield from self._answers([actor.pid.remote() for actor in actors], everybody, deadline)
        yield from self._start(everybody, deadline)

    def _new_coordinator(self) -> Any:
        """Has the attempt's coordinator start; returns the reference to where it is."""
        self._outcomes = dict.fromkeys(range(self._num_processes))
        self._relays = {}
        self._cold = {}
        self._sparing.close()
        self._coordinator = RayCoordinator(self._coordinators, self._attempt, self._gang.hosts)
        return self._coordinators.open.remote(self._attempt, self._num_processes)

    def _open_coordinator(self, opening: Any, deadline: float) -> Turns[None]:
        """Begins to watch the attempt's coordinator, once it is there."""
        [(address, secrets)] = yield from self._answers([opening], (), deadline)
        coordinator = self._coordinator
        assert isinstance(coordinator, RayCoordinator)
        self._coordinator = replace(coordinator, address=address, secrets=secrets)
        with shown(secrets) as credentials:
            self._open_watch(address, credentials)

    def _start(self, ranks: Sequence[int], deadline: float) -> Turns[None]:
        """Starts processes in their actors, which are there."""
        yield from self._answers(self._open_relays(ranks), ranks, deadline)
        actors = self._gang.actors
        started = [
            actors[rank].start.remote(self._program, self._process_spec(rank)) for rank in ranks
        ]
        replaced = yield from self._answers(started, ranks, deadline)
        for rank, lines in zip(ranks, replaced, strict=True):
            for line in lines:
                self._output.say(f"process {rank}: {line}")
            self._to_start.discard(rank)
            self._request_update(rank)

    def _answers(self, refs: Sequence[Any], ranks: Iterable[int], deadline: float) -> Turns[Any]:
        """Returns what the actors of an attempt that starts answer, in order.

        Ray keeps an actor waiting whose machine has gone. Raises Preempted for it, where the
        machine is that of one of the ranks.
        """
        ray = load_ray()
        missing = list(refs)
        while missing:
            answered, missing = ray.wait(missing, num_returns=len(missing), timeout=_TURN_S)
            # Before the errors of its actors, which come by a way of their own.
            if lost := self._gang.lost_machines(ranks):
                names = ", ".join(sorted(map(_name, lost)))
                raise Preempted(f"{names} went while the attempt started")
            ray.get(answered)  # a failed one is an error before the others have answered
            if not missing:
                break
            if time.monotonic() > deadline:
                limit_s = self._spec.restart.startup_timeout_s
                raise TimeoutError(
                    f"{len(missing)} of {len(refs)} actors did not answer within"
                    f" startup_timeout_s={limit_s:g}"
                )
            yield []
        return ray.get(list(refs))

    def _open_relays(self, ranks: Iterable[int]) -> list[Any]:
        """Has the relays of the ranks' machines serve the attempt, and returns what will be their
        addresses. Without secrets there are no relays.
        """
        coordinator = self._coordinator
        assert isinstance(coordinator, RayCoordinator)
        if coordinator.secrets is None:
            return []
        node_ids = self._gang.node_ids
        opening = []
        for node_id in dict.fromkeys(node_ids[rank] for rank in ranks):
            on_node = self._gang.ranks_on(node_id)
            serving = self._gang.host(node_id).serve.remote(
                self._attempt, coordinator.address, coordinator.secrets, on_node
            )
            self._relays[node_id] = serving
            opening.append(serving)
        return opening

    def _process_spec(self, rank: int) -> ProcessSpec:
        """Returns who a process is. Behind a relay, which has answered, that is its coordinator."""
        assert self._coordinator is not None
        placement = self._gang.placement
        node_ids = self._gang.node_ids
        node_id = node_ids[rank]
        coordinator = self._coordinator.address
        host_address = None
        if node_id in self._relays:
            coordinator, host_address = load_ray().get(self._relays[node_id])
        return ProcessSpec(
            job_id=self._job_id,
            attempt=self._attempt,
            process_id=rank,
            num_processes=len(node_ids),
            coordinator=coordinator,
            slice_id=placement.slice_of[rank],
            num_slices=placement.num_slices,
            slice_address=placement.nodes[0].address if placement.num_slices > 1 else None,
            local_rank=node_ids[:rank].count(node_id),
            local_count=node_ids.count(node_id),
            host_address=host_address,
            launched_ms=self.launched_ms,
        )

    # --- Those that stay, and those that are replaced

    def _rejoin(self, action: Rejoin) -> None:
        self._work.close()
        if action.numbers_before:
            self._close_up(action.numbers_before)
        opening = self._new_coordinator()
        self._work = self._come_again(action, opening)

    def _come_again(self, action: Rejoin, opening: Any) -> Turns[None]:
        """Opens an attempt, tells those that stay where it is, and starts the others."""
        deadline = time.monotonic() + self._spec.restart.startup_timeout_s
        yield from self._open_coordinator(opening, deadline)
        before = len(self._gang.node_ids)
        if new := range(before, action.num_processes):
            yield from self._move(new, deadline)
        # The machine of one that counts as alive may have gone: nobody waits for that one long.
        yield from _wait_for(self._open_relays(action.staying), _RELAYS_S)
        self._hand_over(action)
        yield from self._start_missing()

    def _close_up(self, numbers_before: Sequence[int]) -> None:
        """Has processes take the numbers of those that the job goes on without."""
        self._gang.close_up(numbers_before)
        self._missed.clear()
        self._pending = {
            update: (numbers_before.index(rank), life)
            for update, (rank, life) in self._pending.items()
            if rank in numbers_before
        }

    def _places(self) -> Mapping[int, session_pb2.Place]:
        node_ids = self._gang.node_ids
        counts = Counter(node_ids)
        before = Counter[str]()
        places = {}
        for rank, node_id in enumerate(node_ids):
            places[rank] = session_pb2.Place(
                process_id=rank, local_rank=before[node_id], local_count=counts[node_id]
            )
            before[node_id] += 1
        return {rank: places[rank] for rank in self._staying}

    def _replace(self, processes: frozenset[int], missed: frozenset[int]) -> None:
        self._missed |= missed

    def _start_missing(self) -> Turns[None]:
        """Starts the processes of an attempt that are not there, while others are. Never ends: a
        process that is there now may have to be replaced later.
        """
        exceptions = load_ray().exceptions
        while True:
            yield []
            deadline = time.monotonic() + self._spec.restart.startup_timeout_s
            while ranks := sorted(self._to_start):
                yield from self._say_missed()
                try:
                    yield from self._seat(ranks, deadline)
                    yield from self._start(ranks, deadline)
                except exceptions.RayTaskError:  # what an actor itself raises
                    raise
                except (exceptions.RayError, Preempted) as error:
                    # A machine or an actor has gone since: again, on another.
                    self._check_deadline(ranks, deadline, str(error))
                    yield from _pause()

    def _say_missed(self) -> Turns[None]:
        """Says where those are that did not come, while they can still be asked."""
        ray = load_ray()
        actors = self._gang.actors
        missed = [rank for rank in sorted(self._missed) if rank in actors][:MOST_LOOKS]
        self._missed.clear()
        asked = {actors[rank].place.remote(rank, self._pids.get(rank, 0)): rank for rank in missed}
        yield from _wait_for(list(asked), _LOOK_S)
        for ref, rank in asked.items():
            with contextlib.suppress(ray.exceptions.RayError):
                self._say_late(self._attempt, rank, ray.get(ref, timeout=0))

    def _seat(self, ranks: Sequence[int], deadline: float) -> Turns[None]:
        """Sees that processes have actors that answer: on other machines where theirs have gone.

        Raises what `_answers` does; an actor that has failed is there no more then.
        """
        ray = load_ray()
        gang = self._gang
        # Whether its machine has gone with an actor, Ray may know only later.
        self._take_spares([rank for rank in ranks if rank not in gang.actors])
        lost = {node.node_id for node in gang.lost_machines(ranks)}
        away = [rank for rank in ranks if gang.node_ids[rank] in lost]
        for rank in away:
            if (actor := gang.actors.pop(rank, None)) is not None:
                ray.kill(actor)
        if away:
            yield from self._move(away, deadline)
        gang.start_actors(self._spec.resources)
        asked = {rank: gang.actors[rank].pid.remote() for rank in ranks}
        try:
            yield from self._answers(list(asked.values()), ranks, deadline)
        except ray.exceptions.RayError:
            for rank, ref in asked.items():
                try:
                    ray.get(ref, timeout=0)
                except ray.exceptions.GetTimeoutError:
                    continue
                except ray.exceptions.RayError:
                    del gang.actors[rank]
            raise

    def _move(self, ranks: Sequence[int], deadline: float) -> Turns[None]:
        """Reserves machines for processes that have lost theirs, or are new; says where there is no
        room, and the job may go on without them. Raises TimeoutError after the deadline.
        """
        spec = self._spec
        told = ""
        ranks = self._take_spares(ranks)
        while ranks:
            count = len(ranks)
            placement = place_gang(cluster_nodes(), spec.resources, count, count)
            if placement.nodes:
                reserved = yield from self._reserved(placement)
                if reserved is not None:
                    self._gang.move(ranks, reserved)
                    return
            found = placement.why_not_more or "what was free is not any more"
            why = found if spec.spares else f"{found}; --spares would have held a place"
            others = max(len(self._gang.node_ids), ranks[-1] + 1) - count
            if others >= spec.least:
                full = f"{_those(ranks)} cannot be placed: {why}"
                yield [Unplaced(self._attempt, frozenset(ranks), full)]
            if why != told:
                told = why
                self._output.say(f"attempt {self._attempt}, {_those(ranks)}: {why}")
            self._check_deadline(ranks, deadline, why)
            yield from _pause()

    def _check_deadline(self, ranks: Collection[int], deadline: float, why: str) -> None:
        if time.monotonic() > deadline:
            limit_s = self._spec.restart.startup_timeout_s
            raise TimeoutError(
                f"{_those(ranks)} cannot be replaced within startup_timeout_s={limit_s:g}: {why}"
            )

    def _request_update(self, rank: int) -> None:
        update = self._gang.actors[rank].poll.remote(_UPDATE_S)
        self._pending[update] = rank, self._lives[rank]

    def _hold_spares(self) -> Turns[None]:
        """Holds a place on another machine for each spare, while the job has all its processes, and
        has a standby wait in it.
        """
        spec = self._spec
        told = ""
        while len(self._spares) < spec.spares and len(self._gang.node_ids) == spec.num_processes:
            ours = set(self._gang.node_ids)
            others = [node for node in cluster_nodes() if node.node_id not in ours]
            placement = place_gang(others, spec.resources, 1, 1)
            spare = None
            if placement.nodes:
                spare = yield from self._reserved(placement)
            if spare is None:
                if placement.why_not_more != told:
                    told = placement.why_not_more
                    self._output.say(f"no place for a spare: {told}, beside the job's own")
                yield []
                continue
            self._spares.append(spare)
            spare.start_actors(spec.resources)
            spare.actors[0].prepare.remote(self._program, self._process_spec(0))
            spare.actors[0].warm.remote(spec.standby, restarts=self._restarts)

    def _take_spares(self, ranks: Sequence[int]) -> list[int]:
        """Has processes take the places of spares; returns those that found none."""
        without = list(ranks)
        while without and self._spares:
            spare = self._spares.pop(0)
            if spare.lost_machines():
                spare.give_back()
                continue
            rank = without.pop(0)
            self._gang.move([rank], spare)
            self._gang.actors[rank] = spare.actors[0]
        return without

    def _release(self) -> None:
        """Ends the attempt. A whole gang keeps its actors: see `_take_kept`.

        What was asked to end has the grace time. Then its actor is killed, and its process with it.
        """
        deadline = time.monotonic() + self._spec.restart.grace_s
        while self._sent_sigterm and self._pending and time.monotonic() < deadline:
            self._poll_actors(0.1)
        self._work.close()
        self._sparing.close()
        while self._spares:
            self._give_back(self._spares.pop())
        self._close_coordinators()
        if len(self._gang.actors) == self._spec.num_processes:
            self._kill(None)
            self._kept = self._gang
        else:
            self._give_back(self._gang)
        self._gang = Gang()
        self._pending = {}
        self._noticed = set()

    def _give_back(self, gang: Gang) -> None:
        """Gives the machines of an attempt back, which takes them a moment."""
        gang.give_back()
        now = time.monotonic()
        if now > self._free_at:
            self._freed.clear()
        self._freed.update(gang.node_ids)
        self._free_at = now + _READY_S

    def _is_freeing(self, nodes: Iterable[Node]) -> bool:
        """Returns whether machines are not free yet that were given back; after 10 s somebody else
        may have them.
        """
        return time.monotonic() < self._free_at and any(
            node.room(self._spec.resources) < self._freed[node.node_id]
            for node in nodes
            if not node.draining
        )

    def _close_coordinators(self) -> None:
        super()._close_coordinators()
        if self._coordinators is not None:
            load_ray().kill(self._coordinators)
            self._coordinators = None

    def _take_kept(self, wanted: Reserve) -> Turns[bool]:
        """Takes over the gang of the attempt before, where it is whole; else gives it back."""
        gang = self._kept
        if gang is None:
            return False
        stands = wanted.max_processes == len(gang.actors) and (yield from gang.stands())
        self._kept = None
        if stands:
            self._gang = gang
        else:
            self._give_back(gang)
        return stands

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
        self._poll_actors(0.0 if events or self._to_start else wait_s)
        while not self._queue.empty():
            events += super().events(0)
        next(self._sparing, None)
        # Last: the ends that were seen before it go by the numbers that it changes.
        return sorted(events, key=lambda event: isinstance(event, Unplaced))

    def _on_first_step(self, *, can_stay: bool) -> None:
        self._cold = {each: self._gang.ranks_on(each) for each in self._gang.node_ids}
        for node_id in self._cold:
            self._warm_next(node_id)
        if self._restarts and can_stay:
            self._coordinators.prepare.remote(self._attempt + 1, self._num_processes)
        self._sparing = self._hold_spares()

    def _warm_next(self, node_id: str) -> None:
        """Has the next standby of a machine begin: the cores are for the steps."""
        cold = self._cold.get(node_id)
        if cold and (actor := self._gang.actors.get(cold.pop(0))) is not None:
            actor.warm.remote(self._spec.standby, restarts=self._restarts)

    def _go_on(self) -> list[Event]:
        """Goes on with what has begun; returns what comes of it."""
        try:
            return next(self._work, [])
        except Exception as error:
            # What an actor raises comes with its traceback there.
            return self._not_started(getattr(error, "cause", None) or error)

    def _call_off(self, processes: frozenset[int] | None, code: int) -> None:
        if self._to_start if processes is None else self._to_start & processes:
            super()._call_off(None, code)  # they start together, or not at all
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
            self._take_update(ref, *self._pending.pop(ref))

    def _take_update(self, ref: Any, rank: int, life: int) -> None:
        ray = load_ray()
        is_news = self._lives.get(rank) == life  # it has not been replaced
        try:
            update: WorkerUpdate = ray.get(ref)
        except ray.exceptions.RayError as error:
            if is_news:
                self._gang.actors.pop(rank, None)
            why = str(error).strip().splitlines()[0]
            self._report_exit(Exited(life, rank, -9, f"its actor is lost: {why}"))
            return
        for line in update.lines:
            self._output.line(rank, line)
        if update.warmed and is_news:
            self._warm_next(self._gang.node_ids[rank])
        if update.code is None:
            if is_news:
                self._request_update(rank)
            return
        if is_news:
            self._outcomes[rank] = update.outcome
        self._report_exit(Exited(life, rank, update.code, self._why(update)))

    def _why(self, update: WorkerUpdate) -> str:
        kind, value = _unpickled(update.outcome)
        return f"{type(value).__name__}: {value}" if kind == "error" else ""

    # --- The cluster

    def _poll_cluster(self) -> list[Event]:
        if not self._pending:
            return []
        nodes = {node.node_id: node for node in cluster_nodes()}
        self._drop_lost_spares(nodes)
        notices = self._drains(nodes)
        if notices and self._watch is not None:
            # Whom a notice is for hangs on who can stay, which the launcher may not have heard yet.
            self._watch.refresh()
        for notice in notices:
            self._queue.put(notice)
        return [] if notices else self._growth(nodes)

    def _drop_lost_spares(self, nodes: Mapping[str, Node]) -> None:
        """Gives back spares whose machines have gone, or are draining, and holds others."""
        for spare in self._spares.copy():
            [node_id] = spare.node_ids
            if node_id not in nodes or nodes[node_id].draining:
                self._spares.remove(spare)
                spare.give_back()
                self._sparing.close()
                self._sparing = self._hold_spares()

    def _drains(self, nodes: Mapping[str, Node]) -> list[Event]:
        """Returns a notice for each machine of ours that Ray drains since the last poll."""
        notices: list[Event] = []
        for node_id in dict.fromkeys(self._gang.node_ids):
            node = nodes.get(node_id)
            if node is not None and node.draining and node_id not in self._noticed:
                self._noticed.add(node_id)
                there = frozenset(self._gang.ranks_on(node_id))
                source = f"Ray drains {_name(node)}"
                notices.append(Noticed(source, _deadline(node), processes=there))
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
            nodes = cluster_nodes()
            placement = place_gang(
                nodes,
                spec.resources,
                wanted.min_processes,
                wanted.max_processes,
                num_slices=spec.num_slices,
            )
            why = placement.why_not_more
            if why and self._is_freeing(nodes):
                yield []
                continue
            if why and why != self._why_waiting:
                self._output.say(f"attempt {wanted.attempt}: {why}")
            self._why_waiting = why
            if placement.nodes:
                reserved = yield from self._reserved(placement)
                if stands := reserved is not None:
                    self._gang = reserved
            elif why != told:
                told = why
                yield [Waiting(wanted.attempt, why)]
            else:
                yield []
        yield [Reserved(wanted.attempt, len(self._gang.node_ids))]

    def _reserved(self, placement: Placement) -> Turns[Gang | None]:
        """Reserves machines; returns a gang there, None where they are free no more."""
        ray = load_ray()
        bundles = [dict(self._spec.resources) for _ in placement.nodes]
        pins = [{"ray.io/node-id": node.node_id} for node in placement.nodes]
        group = ray.util.placement_group(bundles, strategy="PACK", bundle_label_selector=pins)
        deadline = time.monotonic() + _READY_S
        while not group.wait(_TURN_S):
            # Somebody else may have been faster, or a node may have gone since it was listed.
            if time.monotonic() > deadline:
                ray.util.remove_placement_group(group)
                return None
            try:
                yield []
            except GeneratorExit:
                ray.util.remove_placement_group(group)
                raise
        return Gang(placement, [(group, bundle) for bundle in range(len(bundles))])

    def values(self) -> tuple[Any, ...]:
        """Returns what the calls of the last attempt returned, by rank."""
        values = []
        for outcome in self._outcomes.values():
            kind, value = _unpickled(outcome)
            values.append(value if kind == "value" else None)
        return tuple(values)

    def close(self) -> None:
        """Ends whatever still runs."""
        self._release()
        if self._kept is not None:
            self._kept.give_back()
            self._kept = None


def _pause() -> Turns[None]:
    """Waits for a turn: where processes have yet to start the loop itself does not."""
    threading.Event().wait(_TURN_S)
    yield []


def _wait_for(refs: list[Any], timeout_s: float) -> Turns[None]:
    """Waits until actors have answered, or a time is over."""
    deadline = time.monotonic() + timeout_s
    while refs and time.monotonic() < deadline:
        _, refs = load_ray().wait(refs, num_returns=len(refs), timeout=_TURN_S)
        yield []


def _those(ranks: Collection[int]) -> str:
    """Returns the processes of ranks by their numbers."""
    return f"{'process' if len(ranks) == 1 else 'processes'} {', '.join(map(str, sorted(ranks)))}"


def _folder() -> str:
    """Returns where this process is, and others are to be; "" where Ray says that of them."""
    given = load_ray().get_runtime_context().runtime_env
    return "" if given.get("working_dir") else working_folder()


def actor_here(kind: type) -> Any:
    """Returns the class of an actor that lives and dies with this process's machine. Softly placed,
    it is anywhere where this machine has no CPUs for others, as is advised for a head.
    """
    return _actor_on(load_ray().get_runtime_context().get_node_id(), kind, max_restarts=0)


def _actor_on(node_id: str, kind: type, max_restarts: int = -1) -> Any:
    """Returns the class of an actor of a machine, which Ray starts so often again there; -1: as
    often as it dies.
    """
    ray = load_ray()
    strategies = ray.util.scheduling_strategies
    strategy = strategies.NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(num_cpus=0, max_restarts=max_restarts, scheduling_strategy=strategy)(kind)


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
