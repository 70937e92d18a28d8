"""A job whose processes reach the core of their coordinator through a tree of relays, under one
seeded clock. docs/adr/0012-a-tree-of-relays.md has the rules. The product has no such relays.

The core's machine is the real one. Relays die, stand still, are replaced, and what they have sent
comes late; clients go elsewhere when theirs says nothing. Invariants:

1. the core never takes a process for heard later than the process spoke;
2. a process that lives, and finds a relay or the core in time, is never lost;
3. one that has died is lost within what a relay may stand still, the grace and a report;
4. a barrier is passed only when each of its participants has arrived at that counter, and all are
   told the same;
5. a value is never older than the last write that ended before it was asked for;
6. the table that a process goes by never goes back.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from holdfast.coordination.core.barriers import Arrival
from holdfast.coordination.core.calls import Call
from holdfast.coordination.core.machine import Machine
from holdfast.coordination.core.status import Code, Status
from holdfast.coordination.limits import Config
from tests.support.simulated_world import Faults, World

TIMEOUT_S = 20.0
BEAT_S = 2.0  # between a client's signs of life, and between a relay's reports
PATIENCE_S = 3.0  # without a word from its relay, after which a client goes elsewhere
GRACE_S = 12.0  # reconnect_grace_s: two relays may be tried in vain
STALL_S = 30.0  # a relay that stands still for so long hands on, when it wakes, what came meanwhile
LOST_S = STALL_S + GRACE_S + 2 * BEAT_S  # after its death a process counts as lost
PINGS_KEPT = 8
KEY = "value"


@dataclass(frozen=True)
class Mutations:
    """Defects that the invariants are to catch."""

    relay_speaks_for_all: bool = False  # its report counts as a sign of life of all its processes
    late_reports_are_fresh: bool = False  # ages count from when a report comes
    arrivals_are_counted: bool = False  # a call that comes again arrives at the next instance
    stale_table: bool = False  # a process takes the table of whatever relay it comes to
    values_are_kept: bool = False  # a relay answers with what it has fetched before
    latest_open_wins: bool = False  # by when it comes, not by its client's own number


NONE = Mutations()


@dataclass
class Link:
    """A connection: messages come in order, or no more once it is broken."""

    world: World
    open: bool = True
    _last: float = 0.0

    def send(self, deliver: Callable[[], None], delay_s: float | None = None) -> None:
        took_s = self.world.delay_s() if delay_s is None else delay_s
        self._last = max(self._last, self.world.now + took_s)
        self.world.at_time(self._last, lambda: deliver() if self.open else None)

    def cut(self, *told: Callable[[], None]) -> None:
        """Breaks the connection; both sides hear of it, each when it does."""
        if self.open:
            self.open = False
            for tell in told:
                self.world.at(self.world.delay_s(), tell)


@dataclass(frozen=True)
class Request:
    """What a client keeps until the core has answered it: a barrier of all, a get or a set."""

    task_id: int
    life: int
    number: int
    method: str
    counter: int = 0
    deadline: float = math.inf
    value: bytes = b""


@dataclass
class Report:
    """What a relay says of its clients: how long ago it heard each, and how long ago the core's
    last pings came.
    """

    since_pings_s: dict[int, float]
    silent_s: dict[tuple[int, int], float]


class Asked(Call):
    """A request at the core."""

    def __init__(self, request: Request, *who: Any, **facts: Any) -> None:
        super().__init__(*who, **facts)
        self.request = request


class Core:
    """The core: the machine, and its peers. A peer is a relay, or a client that found none."""

    def __init__(self, tree: Tree, count: int) -> None:
        self._tree = tree
        self._world = tree.world
        config = Config(count, 77, heartbeat_timeout_s=TIMEOUT_S, reconnect_grace_s=GRACE_S)
        self.machine = Machine(config, 0.0)
        self._peers: dict[int, Peer] = {}  # by task: where its answers go
        self.pings: dict[int, float] = {}
        self._sent_version = -1
        self._opened: Counter[int] = Counter()

    def open(self, peer: Peer, task_id: int, life: int, number: int) -> None:
        """A process has come, through a peer; its key would be checked here. What a client sent
        through a relay that it has left since may come last, and must not take its place.
        """
        now = self._world.now
        if number < self._opened[task_id] and not self._tree.mutations.latest_open_wins:
            return
        self._opened[task_id] = number
        status = self.machine.registration.open_session(task_id, life, f"h{task_id}", 1, now)
        if status is None:
            self._peers[task_id] = peer
        peer.down(lambda: peer.opened(task_id, life, status))
        self._table(peer)
        self.flush()

    def closed(self, peer: Peer, tasks: Iterable[int]) -> None:
        """A peer is gone: those that came through it, and nowhere else since, are suspect."""
        for task_id in tasks:
            if self._peers.get(task_id) is peer:
                del self._peers[task_id]
                self.machine.suspect(task_id, self._world.now)
                self.machine.detach(task_id)

    def report(self, report: Report) -> None:
        """Takes what a relay heard. Its clock is not the core's, and it may speak late. So its ages
        count from when our ping left, and the time since then by the relay's clock: that is never
        too late, and of several pings the fastest says most.
        """
        now = self._world.now
        sent_at = max(self.pings[ping] + since_s for ping, since_s in report.since_pings_s.items())
        if self._tree.mutations.late_reports_are_fresh:
            sent_at = now
        for (task_id, life), silent_s in report.silent_s.items():
            task = self.machine.task_table.tasks[task_id]
            heard_at = sent_at - silent_s
            if self._tree.mutations.relay_speaks_for_all:
                heard_at = now
            if task.session == life and heard_at > (task.last_seen or 0.0):
                task.heard(heard_at)
                self._tree.check_heard(task_id, life, heard_at)

    def arrive(self, requests: Iterable[Request]) -> None:
        """Takes a union of arrivals: each is of one process, one life and one counter."""
        machine = self.machine
        for request in requests:
            task = machine.task_table.tasks[request.task_id]
            if task.session != request.life:
                continue
            counter = request.counter
            if self._tree.mutations.arrivals_are_counted:
                counter = machine.barriers.counter_for("all", request.task_id)
            call = self._call(request)
            call.wait_until(request.deadline)
            machine.barrier(Arrival(call, "all", counter))
        self.flush()

    def get(self, peer: Peer, serve: Callable[[bytes], None]) -> None:
        value = self.machine.keys.values.get(KEY, b"")
        peer.down(lambda: serve(value))

    def put(self, peer: Peer, request: Request) -> None:
        """Takes a write: what its process sent through a relay that it has left since may come
        after its next write, and would undo that.
        """
        if self._peers.get(request.task_id) is not peer:
            return
        self.machine.keys.insert(self._call(request), KEY, request.value, True)
        self.flush()

    def _call(self, request: Request) -> Asked:
        life = self.machine.task_table.life_of(request.task_id, request.life)
        return Asked(request, self.machine.answers, request.task_id, self._world.now, life=life)

    def tick(self) -> None:
        self.machine.tick(self._world.now)
        self.flush()
        if self.machine.task_table.version > self._sent_version:
            self._sent_version = self.machine.task_table.version
            for peer in dict.fromkeys(self._peers.values()):  # in one order, of each seed
                self._table(peer)

    def ping(self, peer: Peer) -> None:
        number = next(self._world.numbers)
        self.pings[number] = self._world.now
        peer.down(lambda: peer.pinged(number))

    def _table(self, peer: Peer) -> None:
        version = self.machine.task_table.version
        lost = frozenset(self.machine.task_table.lost)
        peer.down(lambda: peer.told(version, lost))

    def flush(self) -> None:
        """Sends answers to where each process is now, one message to a peer for all of a kind."""
        grouped: dict[tuple[Peer, Any, Status | None], list[Request]] = {}
        for call in self.machine.take_answers():
            assert isinstance(call, Asked)
            request = call.request
            # A union that came again took the place of the first; its client still waits.
            if call.status is not None and call.status.code is Code.CANCELLED:
                continue
            if request.method == "barrier":
                self._tree.check_barrier(request, call.status)
            peer = self._peers.get(request.task_id)
            if peer is not None:
                key = (peer, call.value, call.status)
                grouped.setdefault(key, []).append(request)
        for (peer, _, status), requests in grouped.items():
            peer.down(lambda peer=peer, r=requests, s=status: peer.answer(r, s))  # type: ignore[misc]


class Peer:
    """One side that the core speaks to: a relay. Holds nothing that a reconnect does not bring."""

    def __init__(self, tree: Tree, number: int) -> None:
        self.tree = tree
        self.number = number
        self.alive = True
        self.stalled_until = 0.0
        self.clients: dict[tuple[int, int], tuple[Client, Link]] = {}
        self._heard: dict[tuple[int, int], float] = {}
        self._up = Link(tree.world)
        self._pings: deque[tuple[int, float]] = deque(maxlen=PINGS_KEPT)
        self._gathered: list[Request] = []
        self._fetching: list[Request] = []  # for whom a get is under way
        self._next: list[Request] = []  # who asked after it had left: the next get is theirs
        self._kept: bytes | None = None
        self._table = (-1, frozenset[int]())
        tree.core.ping(self)
        tree.world.at(BEAT_S, self._beat)

    def _soon(self, act: Callable[[], None]) -> None:
        """Acts once this relay does not stand still any more."""
        if not self.alive:
            return
        wait_s = self.stalled_until - self.tree.world.now
        if wait_s <= 0:
            act()
        else:
            self.tree.world.at(wait_s + 0.001, lambda: self._soon(act))

    def up(self, act: Callable[[], None]) -> None:
        """Sends to the core; sometimes what is sent is long on its way."""
        late = self.number >= 0 and self.tree.world.random.random() < self.tree.late
        self._up.send(act, self.tree.world.random.uniform(1.0, 8.0) if late else None)

    def down(self, act: Callable[[], None]) -> None:
        """Is sent something by the core."""
        self._up.send(lambda: self._soon(act))

    def _beat(self) -> None:
        if not self.alive:
            return
        self._soon(self._report)
        self.tree.world.at(BEAT_S, self._beat)

    def _report(self) -> None:
        now = self.tree.world.now
        if self._pings:
            since_pings_s = {number: now - came_at for number, came_at in self._pings}
            silent_s = {key: now - heard for key, heard in self._heard.items()}
            report = Report(since_pings_s, silent_s)
            self.up(lambda: self.tree.core.report(report))

    def pinged(self, number: int) -> None:
        self._pings.append((number, self.tree.world.now))
        self.up(lambda: self.tree.world.at(BEAT_S, lambda: self.tree.core.ping(self)))

    # --- From clients

    def come(self, client: Client, life: int, number: int, link: Link) -> None:
        def act() -> None:
            key = (client.task_id, life)
            self.clients[key] = (client, link)
            self._note(key)
            self.up(lambda: self.tree.core.open(self, client.task_id, life, number))
            version, lost = self._table
            self._to(key, lambda: client.told(version, lost))

        self._soon(act)

    def hear(self, task_id: int, life: int, request: Request | None) -> None:
        self._soon(lambda: self._hear((task_id, life), request))

    def _hear(self, key: tuple[int, int], request: Request | None) -> None:
        if key not in self.clients:
            return
        self._note(key)
        client, _ = self.clients[key]
        if request is None:
            self._to(key, client.echoed)
        elif request.method == "set":
            self.up(lambda: self.tree.core.put(self, request))
        elif request.method == "get":
            self._get(request)
        else:
            # What comes within a moment goes up as one union.
            if not self._gathered:
                self.tree.world.at(0.05, lambda: self._soon(self._send_union))
            self._gathered.append(request)

    def _note(self, key: tuple[int, int]) -> None:
        self._heard[key] = self.tree.world.now
        self.tree.heard[key] = self.tree.world.now

    def _send_union(self) -> None:
        union = tuple(dict.fromkeys(self._gathered))
        self._gathered = []
        self.up(lambda: self.tree.core.arrive(union))

    def _get(self, request: Request) -> None:
        if self.tree.mutations.values_are_kept and self._kept is not None:
            self._hand_on([request], self._kept)
        elif self._fetching:
            self._next.append(request)
        else:
            self._fetching = [request]
            self.up(lambda: self.tree.core.get(self, self._fetched))

    def _fetched(self, value: bytes) -> None:
        self._kept = value
        self._hand_on(self._fetching, value)
        self._fetching = self._next
        self._next = []
        if self._fetching:
            self.up(lambda: self.tree.core.get(self, self._fetched))

    # --- To clients

    def _hand_on(self, requests: list[Request], value: bytes) -> None:
        for request in requests:
            key = (request.task_id, request.life)
            if key in self.clients:
                client, _ = self.clients[key]
                self._to(key, lambda c=client, r=request: c.answered(r, None, value))  # type: ignore[misc]

    def _to(self, key: tuple[int, int], act: Callable[[], None]) -> None:
        _, link = self.clients[key]
        link.send(act)

    def opened(self, task_id: int, life: int, status: Status | None) -> None:
        if (task_id, life) in self.clients:
            client, _ = self.clients[task_id, life]
            self._to((task_id, life), lambda: client.opened(status))

    def answer(self, requests: list[Request], status: Status | None) -> None:
        for request in requests:
            key = (request.task_id, request.life)
            if key in self.clients:
                client, _ = self.clients[key]
                self._to(key, lambda c=client, r=request: c.answered(r, status, b""))  # type: ignore[misc]

    def told(self, version: int, lost: frozenset[int]) -> None:
        if version > self._table[0]:
            self._table = (version, lost)
        for key, (client, _) in self.clients.items():
            self._to(key, lambda c=client: c.told(version, lost))  # type: ignore[misc]

    def left(self, task_id: int, life: int, link: Link) -> None:
        """Hears that a client's connection is gone: it has died, or has gone elsewhere."""

        def act() -> None:
            if self.clients.get((task_id, life), (None, None))[1] is not link:
                return
            del self.clients[task_id, life]
            del self._heard[task_id, life]
            self.up(lambda: self.tree.core.closed(self, [task_id]))

        self._soon(act)

    def die(self) -> None:
        self.alive = False
        tasks = [task_id for task_id, _ in self.clients]
        self._up.cut(lambda: self.tree.core.closed(self, tasks))
        for client, link in self.clients.values():
            link.cut(lambda c=client, li=link: c.broken(li))  # type: ignore[misc]


class Client:
    """One process: sets or gets a value, meets all, and again; keeps what has no answer."""

    def __init__(self, tree: Tree, task_id: int) -> None:
        self.tree = tree
        self.task_id = task_id
        self.life = 1000 + task_id
        self.alive = True
        self.failed: Status | None = None
        self.step = 0
        self.version = -1
        self.lost: frozenset[int] = frozenset()
        self._heard_at = 0.0
        self._peer: Peer | None = None
        self._link = Link(tree.world)
        self._request: Request | None = None
        self._tries = 0
        self._is_open = False
        tree.world.at(tree.world.random.uniform(0, 1), self._connect)
        tree.world.at(BEAT_S, self._beat)

    def _connect(self) -> None:
        if not self.alive:
            return
        peers = [peer for peer in self.tree.relays if peer.alive]
        # After two in vain it goes to the core itself.
        direct = self._tries >= 2 or not peers
        self._tries += 1
        self._peer = self.tree.direct() if direct else self.tree.world.random.choice(peers)
        self._link = Link(self.tree.world)
        self._heard_at = self.tree.world.now
        self._is_open = False
        peer = self._peer
        link = self._link
        number = next(self.tree.world.numbers)
        self._link.send(lambda: peer.come(self, self.life, number, link))

    def _beat(self) -> None:
        if not self.alive:
            return
        now = self.tree.world.now
        if now - self._heard_at > PATIENCE_S and self._peer is not None:
            self._leave()
            self._connect()
        self._say(None)
        self.tree.world.at(BEAT_S, self._beat)

    def _leave(self) -> None:
        peer = self._peer
        link = self._link
        assert peer is not None
        link.cut(lambda: peer.left(self.task_id, self.life, link))

    def _say(self, request: Request | None) -> None:
        peer = self._peer
        if peer is None:
            return
        self._link.send(lambda: peer.hear(self.task_id, self.life, request))

    def broken(self, link: Link) -> None:
        if self.alive and link is self._link:
            self._connect()

    def opened(self, status: Status | None) -> None:
        self._heard_at = self.tree.world.now
        self._is_open = True
        if status is not None:
            self.failed = status
        elif self._request is not None:
            self._say(self._request)
        elif self.step == 0:
            self._go_on()

    def echoed(self) -> None:
        # A relay's word counts once the core has said that the process is there through it.
        if self._is_open:
            self._heard_at = self.tree.world.now
            self._tries = 0

    def told(self, version: int, lost: frozenset[int]) -> None:
        if version <= self.version and not self.tree.mutations.stale_table:
            return
        self.tree.check_table(self, version, lost)
        self.version = version
        self.lost = lost

    # --- The program: set or wait, meet, get, meet

    def _go_on(self) -> None:
        kind = ("set", "barrier", "get", "barrier")[self.step % 4]
        if self.step >= 4 * self.tree.rounds:
            self._request = None
            return
        if kind == "set" and self.task_id != 0:
            self.step += 1
            kind = "barrier"
        round_number = self.step // 4
        self._request = Request(
            self.task_id,
            self.life,
            next(self.tree.world.numbers),
            kind,
            counter=2 * round_number + (self.step % 4 == 3),
            deadline=self.tree.world.now + 600.0,
            value=str(round_number).encode(),
        )
        if kind == "barrier":
            self.tree.arrived[self._request.counter].add(self.task_id)
        self._say(self._request)

    def answered(self, request: Request, status: Status | None, value: bytes) -> None:
        self._heard_at = self.tree.world.now
        if not self.alive or request != self._request or self.failed is not None:
            return
        if request.method == "barrier":
            self.tree.check_told(request, status)
        if status is not None:
            self.failed = status
            return
        if request.method == "get" and value != request.value:
            self.tree.world.fail(f"process {self.task_id} read {value!r}, not {request.value!r}")
        self.step += 1
        self._go_on()

    def die(self) -> None:
        self.alive = False
        if self._peer is not None:
            self._leave()


@dataclass
class Tree:
    """A job of so many processes behind so many relays; `run` raises Violation."""

    seed: int
    count: int
    rounds: int = 3
    deaths: int = 0
    relay_faults: float = 3.0
    late: float = 0.02
    mutations: Mutations = NONE
    fan_in: int = 8
    arrived: dict[int, set[int]] = field(init=False)
    happened: Counter[str] = field(init=False, default_factory=Counter)
    heard: dict[tuple[int, int], float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.world = World(self.seed, Faults(delay_s=0.03))
        self.arrived = {counter: set() for counter in range(2 * self.rounds)}
        self._told: dict[int, Status | None] = {}
        self._died: dict[int, float] = {}
        self.core = Core(self, self.count)
        self.relays = [Peer(self, number) for number in range(max(2, self.count // self.fan_in))]
        self.clients = [Client(self, task_id) for task_id in range(self.count)]
        self._numbers = len(self.relays)

    def direct(self) -> Peer:
        """Returns the core's own door: a peer for one process, that never stands still."""
        self.happened["direct"] += 1
        return Peer(self, -1)

    def run(self) -> None:
        world = self.world
        for _ in range(self.deaths):
            world.at(world.random.uniform(5.0, 25.0), self._kill_client)
        for _ in range(int(world.random.expovariate(1 / self.relay_faults))):
            world.at(world.random.uniform(1.0, 30.0), self._harm_relay)
        self._tick()
        while world.now < 120.0 and not self._over():
            world.step()
        self._check_end()

    def _tick(self) -> None:
        self.core.tick()
        lost = self.core.machine.task_table.lost
        for task_id, died in self._died.items():
            if self.world.now > died + LOST_S and task_id not in lost:
                self.world.fail(f"process {task_id} died at {died}, and is not lost")
        for client in self.clients:
            if client.alive and client.task_id in lost:
                self.world.fail(f"process {client.task_id} lives, and is lost")
        self.world.at(0.5, self._tick)

    def _kill_client(self) -> None:
        alive = [client for client in self.clients if client.alive]
        if len(alive) > 1:
            client = self.world.random.choice(alive)
            self.world.note("client dies", client.task_id)
            self._died[client.task_id] = self.world.now
            client.die()

    def _harm_relay(self) -> None:
        world = self.world
        alive = [relay for relay in self.relays if relay.alive]
        if not alive:
            return
        relay = world.random.choice(alive)
        if world.random.random() < 0.5:
            until = world.now + world.random.uniform(1.0, STALL_S)
            relay.stalled_until = max(relay.stalled_until, until)
            self.happened["stall"] += 1
            world.note("relay stalls", (relay.number, relay.stalled_until))
            return
        self.happened["relay dies"] += 1
        world.note("relay dies", relay.number)
        relay.die()
        if world.random.random() < 0.7:
            self._numbers += 1
            self.relays.append(Peer(self, self._numbers))
            self.happened["replaced"] += 1

    # --- Invariants

    def check_heard(self, task_id: int, life: int, heard_at: float) -> None:
        truly_at = self.heard[task_id, life]
        if heard_at > truly_at + 1e-6:
            self.world.fail(
                f"process {task_id} was heard at {truly_at}, and counts from {heard_at}"
            )

    def check_barrier(self, request: Request, status: Status | None) -> None:
        if status is None and len(self.arrived[request.counter]) < self.count:
            self.world.fail(f"barrier {request.counter} was passed by {self.arrived}")

    def check_told(self, request: Request, status: Status | None) -> None:
        first = self._told.setdefault(request.counter, status)
        if (first is None) != (status is None):
            self.world.fail(f"barrier {request.counter} ended with {first} and {status}")

    def check_table(self, client: Client, version: int, lost: frozenset[int]) -> None:
        if version < client.version:
            what = f"process {client.task_id} went back from {client.version} to {version}"
            self.world.fail(what)

    def _over(self) -> bool:
        if self._died.keys() - self.core.machine.task_table.lost:
            return False
        return self.world.now > 30.0 and all(
            not client.alive or client.failed is not None or client.step >= 4 * self.rounds
            for client in self.clients
        )

    def _check_end(self) -> None:
        if not self._over():
            at = [(client.task_id, client.step) for client in self.clients if client.alive]
            self.world.fail(f"somebody waits for ever: {at}")
        if self._died:
            return
        for client in self.clients:
            if client.failed is not None:
                self.world.fail(f"process {client.task_id} failed: {client.failed}")
