"""A whole job under one seeded clock: the service's own machine, simulated clients, a network that misbehaves, crashes with replay.

Nothing here waits or runs in parallel: one heap of events in virtual time, one random generator. The same seed gives the same run, to
the last event, so a failing seed is a reproduction. What is simulated is our session (one stream per client, resent on the next stream
when it breaks), with losses, duplicates and reordering that are worse than TCP's.

Invariants, checked at every reply of the machine and at the end:
1. a barrier releases only when every participant of that instance has come;
2. all who learn the result of an instance learn the same one;
3. a key whose writing was acknowledged is there, with its value, ever after;
4. nobody waits past a deadline.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from holdfast.coordination import _rows
from holdfast.coordination._barriers import Arrival
from holdfast.coordination._outcome import Code, Refusal, Reply
from holdfast.coordination._state import Config, Machine

SERVICE_INCARNATION = 77
RESEND_S = 3.0
HEARTBEAT_TIMEOUT_S = 20.0
TICK_S = 0.25


@dataclass(frozen=True)
class Faults:
    """How badly the world behaves. Rates of messages are probabilities; crashes and pauses are expected counts in one run."""

    delay_s: float = 0.05
    loss: float = 0.02
    duplication: float = 0.03
    breaks: float = 2.0
    client_crashes: float = 1.0
    client_pauses: float = 0.5
    service_crashes: float = 1.0


class Violation(AssertionError):
    """Says that an invariant does not hold, with the seed and the last events."""


@dataclass(eq=False)
class Call:
    """One delivery of a request: what the machine knows a waiting caller by."""

    client: Client
    stream: int
    request: Request
    deadline: float


@dataclass(eq=False)
class Request:
    """One request of a client, sent once or again."""

    number: int
    method: str
    argument: Any
    sent_counter: int = 0
    on_reply: Callable[[Reply], None] | None = None
    again: bool = True
    done: bool = False
    sent_before: bool = False


@dataclass(eq=False)
class Client:
    """One simulated process: a script of steps, at most one step at a time, and a stream."""

    task_id: int
    incarnation: int = 0
    life: int = 0
    stream: int = 0  # 0: none is open
    opening: int = 0
    paused_until: float = 0.0
    dead: bool = False
    finished: bool = False
    step: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    pending: dict[int, Request] = field(default_factory=dict)


class Simulation:
    """Runs one job of `processes` clients, each through `steps` steps, and checks the invariants. `trace` is what happened."""

    def __init__(
        self,
        seed: int,
        processes: int = 4,
        steps: int = 6,
        faults: Faults | None = None,
        *,
        recoverable: bool = True,
        journal: bool = True,
        unison: bool = False,
    ) -> None:
        self.seed, self.steps, self.recoverable = seed, steps, recoverable
        self.random = random.Random(seed)
        self.faults = faults if faults is not None else Faults()
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.numbers = itertools.count(1)
        self.trace: list[str] = []
        self.hash = hashlib.sha256()
        self.clients = [Client(task_id) for task_id in range(processes)]
        self.config = Config(
            processes, SERVICE_INCARNATION, heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S, recoverable=recoverable, survivable=True
        )
        self.disk = Disk(self.config) if journal else None
        self.crash_unwritten = False
        self.unison = unison  # every step is a barrier of all
        self.everyone = frozenset(range(processes))
        self.machine: Machine | None = Machine(self.config, 0.0)
        self.streams: dict[int, int] = {}  # the service's side: task to stream
        self.calls: dict[Call, None] = {}
        self.truth = Truth(self)

    # ---- The clock -----------------------------------------------------------------------------------------------------------------

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        """Runs `action` after a delay."""
        heapq.heappush(self.events, (self.now + delay_s, next(self.order), action))

    def note(self, text: str) -> None:
        """Adds a line to the trace, and to its hash."""
        line = f"{self.now:.6f} {text}"
        self.hash.update(line.encode())
        self.trace.append(line)
        if len(self.trace) > 400:
            del self.trace[:200]

    def fail(self, what: str) -> None:
        """Raises a Violation."""
        raise Violation(f"seed {self.seed}: {what}\n" + "\n".join(self.trace[-40:]))

    def run(self, most_s: float = 3_000.0) -> str:
        """Runs to the end and returns the hash of all that happened."""
        for client in self.clients:
            self.at(self.random.uniform(0, 1), lambda client=client: self.begin_life(client))
        self.plan_faults()
        self.at(TICK_S, self.tick)
        while self.events and not all(client.finished for client in self.clients):
            self.now, _, action = heapq.heappop(self.events)
            if self.now > most_s:
                self.fail(f"not finished after {most_s} s: {[(c.task_id, c.step, c.dead) for c in self.clients if not c.finished]}")
            action()
        self.truth.at_end()
        return self.hash.hexdigest()

    def plan_faults(self) -> None:
        """Spreads crashes, pauses and broken streams over the run."""
        span_s = 4.0 * self.steps
        for rate, fault in (
            (self.faults.breaks, self.break_stream),
            (self.faults.client_crashes if self.recoverable else 0.0, self.crash_client),
            (self.faults.client_pauses if self.recoverable else 0.0, self.pause_client),
            (self.faults.service_crashes if self.disk else 0.0, self.crash_service),
        ):
            for _ in range(round(self.random.uniform(0, 2 * rate))):
                self.at(self.random.uniform(1, span_s), fault)

    def tick(self) -> None:
        """Lets the machine look at its clocks, as the service's loop does."""
        if self.machine is not None:
            self.machine.tick(self.now)
            self.truth.nobody_is_late(self.machine)
            self.flush()
        self.at(TICK_S, self.tick)

    # ---- Faults --------------------------------------------------------------------------------------------------------------------

    def pick(self) -> Client:
        return self.random.choice(self.clients)

    def break_stream(self) -> None:
        client = self.pick()
        self.note(f"break {client.task_id}")
        self.lose_stream(client, told=self.random.random() < 0.5)

    def crash_client(self) -> None:
        client = self.pick()
        if client.dead or client.finished:
            return
        self.note(f"crash {client.task_id}")
        client.dead = True
        for request in client.pending.values():
            request.done = True
        client.pending.clear()
        self.lose_stream(client, told=self.random.random() < 0.5)
        self.at(self.random.uniform(0.1, 30), lambda: self.begin_life(client))

    def pause_client(self) -> None:
        client = self.pick()
        client.paused_until = self.now + self.random.uniform(1, 40)
        self.note(f"pause {client.task_id} until {client.paused_until:.3f}")

    def crash_service(self) -> None:
        if self.machine is None:
            return
        if self.random.random() < 0.5:  # between the machine's decision and the journal: the next answer is never given
            self.crash_unwritten = True
            return
        self.end_service()

    def end_service(self) -> None:
        """Loses all that is not in the journal."""
        self.note("service crashes")
        self.machine, self.crash_unwritten = None, False
        self.calls.clear()
        self.streams.clear()
        for client in self.clients:
            self.at(self.random.uniform(0, 0.2), lambda client=client: self.lose_stream(client, told=False))
        self.at(self.random.uniform(0.1, 10), self.restart_service)

    def restart_service(self) -> None:
        assert self.disk is not None
        self.machine = self.disk.load(self.now)
        self.note("service is back")
        self.truth.after_replay()

    def lose_stream(self, client: Client, *, told: bool) -> None:
        """Ends a client's stream; the service hears of it only where it is `told`."""
        stream, client.stream, client.opening = client.stream, 0, 0
        if told and stream and self.streams.get(client.task_id) == stream:
            self.at(self.delay_s(), lambda: self.drop_calls(client.task_id, stream))
        if not client.dead and not client.finished:
            self.at(self.random.uniform(0.02, 1.0), lambda life=client.life: self.open_stream(client, life))

    def drop_calls(self, task_id: int, stream: int) -> None:
        """Makes the machine forget what a dead stream waits for."""
        if self.machine is None:
            return
        for call in [call for call in self.calls if call.client.task_id == task_id and call.stream == stream]:
            del self.calls[call]
            self.machine.drop(call)
        self.flush()

    # ---- The network ---------------------------------------------------------------------------------------------------------------

    def delay_s(self) -> float:
        return self.random.expovariate(1 / self.faults.delay_s)

    def send(self, deliver: Callable[[], None], *, twice: bool) -> None:
        """Delivers a message once, never, or (where it may) twice; each after a delay of its own."""
        if self.random.random() < self.faults.loss:
            return
        self.at(self.delay_s(), deliver)
        if twice and self.random.random() < self.faults.duplication:
            self.at(self.delay_s() * 3, deliver)

    # ---- The client's side ---------------------------------------------------------------------------------------------------------

    def begin_life(self, client: Client) -> None:
        client.dead, client.life = False, client.life + 1
        client.incarnation = self.random.getrandbits(62) | 1
        client.counters = {}
        self.note(f"start {client.task_id} life {client.life}")
        self.open_stream(client, client.life)
        self.beat(client, client.life)
        self.next_step(client)

    def open_stream(self, client: Client, life: int) -> None:
        if client.dead or client.finished or client.stream or client.life != life:
            return
        stream = client.opening = next(self.numbers)
        self.send(lambda: self.serve_open(client, life, stream, client.incarnation), twice=False)
        self.at(RESEND_S, lambda: None if client.opening != stream or client.stream else self.open_stream(client, life))

    def opened(self, client: Client, life: int, stream: int, refusal: Refusal | None) -> None:
        if client.life != life or client.opening != stream:
            return
        if refusal is not None:
            self.note(f"refused {client.task_id}: {refusal.message}")
            self.finish(client)
            return
        client.stream = stream
        for request in list(client.pending.values()):
            if not request.sent_before or request.again:
                self.post(client, request)
            else:
                self.answer(client, request, Reply(None, None, Refusal(Code.UNAVAILABLE, "broken")))

    def beat(self, client: Client, life: int) -> None:
        if client.dead or client.finished or client.life != life:
            return
        if self.now >= client.paused_until and client.stream:
            stream = client.stream
            self.send(lambda: self.serve_beat(client, stream), twice=True)
        self.at(HEARTBEAT_TIMEOUT_S / 4, lambda: self.beat(client, life))

    def ask(
        self, client: Client, method: str, argument: Any, on_reply: Callable[[Reply], None], *, again: bool = True, counter: int = 0
    ) -> None:
        request = Request(next(self.numbers), method, argument, counter, on_reply, again)
        client.pending[request.number] = request
        self.post(client, request)

    def post(self, client: Client, request: Request) -> None:
        """Sends a request on the present stream, and again while there is no answer."""
        if request.done or client.dead:
            return
        if self.now < client.paused_until:
            self.at(client.paused_until - self.now, lambda: self.post(client, request))
            return
        if not client.stream:
            return  # sent when the next stream opens
        if request.sent_before and not request.again:
            self.answer(client, request, Reply(None, None, Refusal(Code.UNAVAILABLE, "no answer")))
            return
        stream, request.sent_before = client.stream, True
        self.send(lambda: self.serve(client, stream, request), twice=request.again)
        self.at(RESEND_S * self.random.uniform(1, 2), lambda: self.post(client, request))

    def answer(self, client: Client, request: Request, reply: Reply) -> None:
        """Takes the first answer to a request."""
        if request.done or client.dead:
            return
        stolen = reply.refusal is not None and reply.refusal.code == Code.CANCELLED and reply.refusal.barrier is None
        if stolen and request.method == "barrier":
            return  # a duplicate took this one's place: one of them will be answered
        request.done = True
        client.pending.pop(request.number, None)
        assert request.on_reply is not None
        request.on_reply(reply)

    # ---- The script ----------------------------------------------------------------------------------------------------------------

    def next_step(self, client: Client) -> None:
        if client.step >= self.steps:
            return self.ask(client, "leave", None, lambda reply: self.finish(client))
        client.step += 1
        if self.unison:
            self.wait_at(client, ("all", self.everyone), 600.0)
            return None
        doing = self.random.random()
        if doing < 0.55:
            return self.wait_at(client, self.barrier_of(client))
        if doing < 0.75:
            return self.set_key(client)
        if doing < 0.85:
            return self.set_first(client)
        if doing < 0.9:
            return self.ask(client, "increment", "count", lambda reply: self.counted(client, reply), again=False)
        if doing < 0.96:
            key = f"key/{self.random.randrange(len(self.clients))}/1/{self.random.randrange(1, self.steps + 1)}"
            return self.ask(client, "get", (key, self.random.uniform(0, 10)), lambda reply: self.next_step(client))
        name = self.barrier_of(client)[0]
        counter = client.counters.get(name, 0)
        return self.ask(client, "cancel", (name, counter), lambda reply: self.next_step(client))

    def barrier_of(self, client: Client) -> tuple[str, frozenset[int]]:
        """Returns a barrier that this client takes part in: its name fixes who the others are."""
        everyone = self.everyone
        if self.random.random() < 0.7 or len(everyone) < 3:
            return "all", everyone
        other = self.random.choice(sorted(everyone - {client.task_id}))
        pair = frozenset({client.task_id, other})
        return f"pair/{min(pair)}-{max(pair)}", pair

    def wait_at(self, client: Client, barrier: tuple[str, frozenset[int]], timeout_s: float | None = None) -> None:
        name, participants = barrier
        counter = client.counters[name] = client.counters.get(name, -1) + 1
        limit_s = self.random.uniform(2, 20) if timeout_s is None else timeout_s
        argument = (name, participants, limit_s)
        self.ask(client, "barrier", argument, lambda reply: self.barrier_over(client, name, reply), counter=counter)

    def barrier_over(self, client: Client, name: str, reply: Reply) -> None:
        found = reply.value if reply.refusal is None else (reply.refusal.barrier or (name, client.counters[name]))[1]
        client.counters[name] = found
        self.note(f"{client.task_id} leaves {name} {found} {'OK' if reply.refusal is None else reply.refusal.code.name}")
        self.next_step(client)

    def set_key(self, client: Client) -> None:
        key, value = f"key/{client.task_id}/{client.life}/{client.step}", f"{client.incarnation}".encode()
        self.ask(client, "set", (key, value), lambda reply: self.key_set(client, key, value, reply))

    def set_first(self, client: Client) -> None:
        key, value = f"first/{self.random.randrange(3)}", f"{client.task_id}:{client.incarnation}".encode()
        self.ask(client, "set", (key, value), lambda reply: self.key_set(client, key, value, reply))

    def key_set(self, client: Client, key: str, value: bytes, reply: Reply) -> None:
        if reply.refusal is None:
            self.truth.acknowledged[key] = value
        self.note(f"{client.task_id} set {key} {'OK' if reply.refusal is None else reply.refusal.code.name}")
        self.next_step(client)

    def counted(self, client: Client, reply: Reply) -> None:
        self.truth.counted(reply)
        self.next_step(client)

    def finish(self, client: Client) -> None:
        self.note(f"finish {client.task_id}")
        client.finished = True

    # ---- The service's side --------------------------------------------------------------------------------------------------------

    def serve_open(self, client: Client, life: int, stream: int, incarnation: int) -> None:
        if self.machine is None or stream < self.streams.get(client.task_id, 0):
            return
        refusal = self.machine.open_session(client.task_id, incarnation, f"h{client.task_id}", 1, self.now)
        if refusal is None:
            older = self.streams.get(client.task_id, 0)
            self.streams[client.task_id] = stream
            self.drop_calls(client.task_id, older)
        if self.machine is None:
            return
        self.flush()
        if self.machine is None:
            return
        self.send(lambda: self.opened(client, life, stream, refusal), twice=False)

    def serve_beat(self, client: Client, stream: int) -> None:
        if self.machine is not None and self.streams.get(client.task_id) == stream:
            self.machine.seen(client.task_id, self.now)

    def serve(self, client: Client, stream: int, request: Request) -> None:
        machine = self.machine
        if machine is None or self.streams.get(client.task_id) != stream:
            return
        machine.seen(client.task_id, self.now)
        call = Call(client, stream, request, float("inf"))
        self.calls[call] = None
        task_id, argument = client.task_id, request.argument
        if request.method == "barrier":
            name, participants, limit_s = argument
            call.deadline = self.truth.arrives(client, name, request, self.now + limit_s)
            who = frozenset() if len(participants) == len(self.clients) else participants
            machine.barrier(Arrival(call, task_id, client.incarnation, name, request.sent_counter, self.now + limit_s, who), self.now)
        elif request.method == "set":
            machine.keys.insert(call, *argument, False)
        elif request.method == "get":
            call.deadline = self.now + argument[1]
            machine.keys.get(call, task_id, argument[0], self.now, call.deadline)
        elif request.method == "increment":
            self.truth.increments += 1
            machine.keys.increment(call, argument, 1)
        elif request.method == "cancel":
            machine.barriers.cancel(call, task_id, *argument, self.now)
        else:
            machine.shut_down(call, task_id, True, self.now, None if self.recoverable else 60.0)
        self.flush()

    def flush(self) -> None:
        """Writes the journal, then sends the replies; a service may crash between the two."""
        assert self.machine is not None
        if self.crash_unwritten and self.machine.replies:
            self.end_service()
            return
        replies, self.machine.replies[:] = list(self.machine.replies), []
        if self.disk is not None:
            self.disk.write(self.machine)
        for reply in replies:
            call: Call = reply.call
            self.calls.pop(call, None)
            self.truth.replied(call, reply)
            self.send(lambda call=call, reply=reply: self.reach(call, reply), twice=True)

    def reach(self, call: Call, reply: Reply) -> None:
        """Brings a reply to its client, if that still listens on this stream."""
        client = call.client
        if client.stream != call.stream or client.dead:
            return
        if self.now < client.paused_until:
            self.at(client.paused_until - self.now, lambda: self.reach(call, reply))
            return
        if (
            call.request.method == "set"
            and reply.refusal is not None
            and reply.refusal.code == Code.ALREADY_EXISTS
            and self.machine is not None
        ):
            key, value = call.request.argument  # what the client's reading back finds
            if self.machine.keys.values.get(key) == value:
                reply = Reply(call, None, None)
        self.answer(client, call.request, reply)


class Disk:
    """The journal's rows, kept as the service keeps them in SQLite: what `drain` gave before the crash, `load` gets after it."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.rows: dict[tuple[str, str], bytes] = {}

    def write(self, machine: Machine) -> None:
        """Writes what has changed."""
        for row in _rows.drain(machine, 0.0):
            if row.value is None:
                self.rows.pop(row[:2], None)
            else:
                self.rows[row[:2]] = row.value

    def load(self, now: float) -> Machine:
        """Returns the machine that the rows tell of."""
        machine = Machine(self.config, now)
        _rows.load(machine, [_rows.Row(*key, value) for key, value in self.rows.items()], now, 0.0)
        return machine


class Truth:
    """What an onlooker knows, and holds the machine's replies against."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.acknowledged: dict[str, bytes] = {}
        self.increments = 0
        self.counts_told: list[int] = []
        self.arrivals: dict[str, dict[int, tuple[int, int]]] = defaultdict(dict)  # name: request: (task, counter)
        self.latest: dict[str, float] = {}  # name: the latest deadline of those who came
        self.results: dict[tuple[str, int], str] = {}
        self.answered: dict[int, int] = {}  # request: the instance whose result it has had

    def arrives(self, client: Client, name: str, request: Request, deadline: float) -> float:
        """Notes that a task has come to a barrier, and returns when it must know: the deadline of whoever came first is everyone's.

        One request is one coming, to the one instance that answers it: a late duplicate comes to no other.
        """
        self.arrivals[name][request.number] = (client.task_id, request.sent_counter)
        self.latest[name] = max(deadline, self.latest.get(name, 0.0))
        return self.latest[name]

    def replied(self, call: Call, reply: Reply) -> None:
        """Checks one reply of the machine."""
        if call.request.method != "barrier":
            return
        name, participants, _ = call.request.argument
        outcome = self._outcome(name, reply)
        if outcome is None:
            return
        counter, result = outcome
        self.answered.setdefault(call.request.number, counter)
        before = self.results.get((name, counter))
        if before is not None and before != result:
            self.simulation.fail(f"barrier {name} {counter} ended {before} for some and {result} for process {call.client.task_id}")
        if before is None:
            self.results[name, counter] = result
            if result == "OK":
                self._all_had_come(name, counter, participants)
            stale = [number for number in self.arrivals[name] if self.answered.get(number, counter) < counter]
            for number in stale:
                del self.arrivals[name][number]

    def _outcome(self, name: str, reply: Reply) -> tuple[int, str] | None:
        refusal = reply.refusal
        if refusal is None:
            return reply.value, "OK"
        if refusal.barrier is None or refusal.code == Code.INVALID_ARGUMENT or (refusal.code == Code.INTERNAL and not refusal.missing):
            return None  # a refusal of this call alone
        return refusal.barrier[1], refusal.code.name

    def _all_had_come(self, name: str, counter: int, participants: frozenset[int]) -> None:
        comings = self.arrivals[name].items()
        came = {task for number, (task, sent) in comings if sent in (counter, 0) and self.answered.get(number, counter) == counter}
        if not participants <= came:
            self.simulation.fail(f"barrier {name} {counter} released, but {sorted(participants - came)} had not come")

    def counted(self, reply: Reply) -> None:
        """Checks that no two acknowledged increments got the same number."""
        if reply.refusal is None:
            number = int(reply.value[1])
            if number in self.counts_told:
                self.simulation.fail(f"two increments were told {number}")
            self.counts_told.append(number)

    def nobody_is_late(self, machine: Machine) -> None:
        """Checks that what the machine holds has time left; called right after its tick."""
        answered = {id(reply.call) for reply in machine.replies}
        for call in self.simulation.calls:
            if call.deadline < self.simulation.now and id(call) not in answered:
                self.simulation.fail(f"process {call.client.task_id} waits in {call.request.method} past its deadline {call.deadline:.3f}")

    def after_replay(self) -> None:
        """Checks that what was acknowledged is there."""
        machine = self.simulation.machine
        assert machine is not None
        for key, value in self.acknowledged.items():
            if machine.keys.values.get(key) != value:
                self.simulation.fail(f"key {key} was acknowledged with {value!r}, and is {machine.keys.values.get(key)!r}")

    def at_end(self) -> None:
        """Checks keys and counts once all is quiet."""
        simulation = self.simulation
        if simulation.machine is None:
            simulation.restart_service()
        self.after_replay()
        assert simulation.machine is not None
        total = int(simulation.machine.keys.values.get("count", b"0"))
        if not len(self.counts_told) <= total <= self.increments:
            simulation.fail(f"{len(self.counts_told)} increments acknowledged, {self.increments} arrived, the sum is {total}")
