"""Three clients of the real machine, with its journal: one event at a time, in whatever order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from holdfast.coordination.core.barriers import Arrival
from holdfast.coordination.core.calls import Call
from holdfast.coordination.core.machine import Machine
from holdfast.coordination.core.status import EVENT, Code, Status
from holdfast.coordination.limits import Config
from tests.model.promise import need
from tests.support.simulated_service import Disk

CLIENTS = 3
NAME = "b"
WAIT_S = 5.0
HEARTBEAT_S = 100.0  # no life ends by silence within a story
FAULTS = frozenset({"cancel", "die", "break", "restart", "forget", "late", "live"})
EVERYBODY = frozenset(range(CLIENTS))
OK = "OK"


class Ask:
    """One coming of a process to the barrier, and the instance that answered it."""

    def __init__(self, task_id: int) -> None:
        self.task_id = task_id
        self.instance: int | None = None  # that it was told of
        self.counted: int | None = None  # that has passed because it had come

    @property
    def place(self) -> int | None:
        """The instance that it belongs to, once that is known."""
        return self.counted if self.instance is None else self.instance


def _is_own(status: Status) -> bool:
    """Says whether a status is of its call alone, and tells of no instance."""
    return status.code is Code.INVALID_ARGUMENT or (
        status.code is Code.INTERNAL and not status.missing
    )


class Client:
    """One process: at which instance it is, what it waits for, and what it was told."""

    def __init__(self, task_id: int) -> None:
        self.task_id = task_id
        self.counter = 0  # of the next instance
        self.asks = False  # has asked, and has no answer yet
        self.last_ask: Ask | None = None
        self.call: Call | None = None
        self.living: Call | None = None
        self.is_up = True  # has a stream
        self.is_dead = False
        self.told: list[str] = []  # outcomes, by instance


class Bounds(NamedTuple):
    """How far a search goes: barriers in a row, and which faults there may be, each once, and how
    many of them.
    """

    rounds: int
    faults: frozenset[str]
    most: int
    recoverable: bool = True


class World:
    """The machine, its journal, its clients, and what an onlooker knows."""

    def __init__(self, bounds: Bounds) -> None:
        self.now = 0.0
        self.bounds = bounds
        self.used: set[str] = set()
        self.config = Config(
            CLIENTS, incarnation=7, heartbeat_timeout_s=HEARTBEAT_S, recoverable=bounds.recoverable
        )
        self.disk = Disk(self.config)
        self.machine = Machine(self.config, self.now)
        self.clients = [Client(task_id) for task_id in range(CLIENTS)]
        self.results: dict[int, str] = {}  # by instance, once somebody was told
        self.asks: list[Ask] = []
        self.living: dict[int, tuple[int, ...]] = {}  # the answers about who is alive, by process
        for client in self.clients:
            self._open(client)
        self._settle()

    # --- What may happen

    def events(self) -> Iterator[str]:
        """Yields what may happen next."""
        for client in self.clients:
            name = str(client.task_id)
            if client.is_dead:
                continue
            if not client.is_up:
                yield f"reconnect {name}"
                continue
            if not client.asks and len(client.told) < self.bounds.rounds:
                yield f"arrive {name}"
            if "live" in self.used and client.task_id not in self.living and not client.living:
                yield f"live {name}"
        allowed = self.bounds.faults - self.used
        if "live" in allowed:
            yield "live"
        if len(self.used - {"live"}) >= self.bounds.most:
            return
        for fault in sorted(allowed - {"live"}):
            yield from self._faults(fault)

    def _faults(self, fault: str) -> Iterator[str]:
        alive = [client for client in self.clients if not client.is_dead]
        if fault == "cancel" and self.clients[0] in alive and self.clients[0].is_up:
            yield fault
        if fault == "die":
            yield from (f"die {client.task_id}" for client in alive[1:])
        if fault == "break":
            yield from (f"break {client.task_id}" for client in alive[1:] if client.is_up)
        if fault == "restart" or (fault == "forget" and any(client.asks for client in alive)):
            yield fault
        if fault == "late" and any(client.call for client in alive):
            yield fault

    def happen(self, event: str) -> None:
        """Has an event happen. Raises Broken."""
        name, _, who = event.partition(" ")
        client = self.clients[int(who or 0)]
        if name not in ("arrive", "reconnect") and not (name == "live" and who):
            self.used.add(name)
        handler: Callable[[Client], None] = getattr(self, f"_{name}")
        handler(client)
        if name != "forget":
            self._settle()
        self._check()

    def _arrive(self, client: Client) -> None:
        client.asks = True
        client.last_ask = Ask(client.task_id)
        self.asks.append(client.last_ask)
        self._ask(client)

    def _ask(self, client: Client) -> None:
        call = self._call(client, WAIT_S)
        client.call = call
        self.machine.barrier(Arrival(call, NAME, client.counter))

    def _live(self, client: Client) -> None:
        if "live" in self.used and client.task_id not in self.living:
            call = self._call(client, WAIT_S)
            client.living = call
            self.machine.liveness.arrive(call, EVERYBODY)

    def _cancel(self, client: Client) -> None:
        self.machine.barriers.cancel(self._call(client, WAIT_S), NAME, client.counter)

    def _die(self, client: Client) -> None:
        client.is_dead = True
        self._drop(client)
        client.asks = False
        self.machine.report_exit(client.task_id, -9, self.now)

    def _break(self, client: Client) -> None:
        self.machine.suspect(client.task_id, self.now)
        self._drop(client)

    def _reconnect(self, client: Client) -> None:
        client.is_up = True
        self._open(client)
        if client.asks:
            self._ask(client)  # again, with the same number

    def _restart(self, client: Client) -> None:
        """The service dies after it has written, and before anybody hears of anything more."""
        self.machine = self.disk.load(self.now)
        for each in self.clients:
            if not each.is_dead:
                each.call = None
                each.living = None
                each.is_up = False

    def _forget(self, client: Client) -> None:
        """The next to ask is taken in, and the service dies before that is written."""
        waiting = [each for each in self.clients if not each.asks and each.is_up]
        for each in waiting[:1]:
            if len(each.told) < self.bounds.rounds and not each.is_dead:
                self._arrive(each)
        self.machine.answers.clear()
        self._restart(client)

    def _late(self, client: Client) -> None:
        """Time passes, until what waits is over."""
        self.now += WAIT_S
        for each in self.clients:
            if each.is_up and not each.is_dead:
                self.machine.seen(each.task_id, self.now)
        self.machine.tick(self.now)

    # --- How it is done

    def _open(self, client: Client) -> None:
        incarnation = 100 + client.task_id
        status = self.machine.registration.open_session(
            client.task_id, incarnation, f"h{client.task_id}", 1, self.now
        )
        need(status is None, "COMES BACK", f"process {client.task_id}: {status}")

    def _call(self, client: Client, wait_s: float) -> Call:
        incarnation = 100 + client.task_id
        life = self.machine.task_table.life_of(client.task_id, incarnation)
        return Call(
            self.machine.answers,
            client.task_id,
            self.now,
            incarnation=incarnation,
            session=True,
            deadline=self.now + wait_s,
            life=life,
        )

    def _drop(self, client: Client) -> None:
        client.is_up = False
        for call in (client.call, client.living):
            if call is not None:
                call.drop()
        client.call = None
        client.living = None
        self.machine.detach(client.task_id)

    def _settle(self) -> None:
        """Writes the journal, and then answers, as the service does."""
        self.disk.write(self.machine)
        self.machine.take_fenced()
        for call in self.machine.take_answers():
            for client in self.clients:
                if client.call is call:
                    self._told(client, call)
                elif client.living is call:
                    self._told_living(client, call)

    def _told(self, client: Client, call: Call) -> None:
        client.call = None
        client.asks = False
        ask = client.last_ask
        assert ask is not None
        status = call.status
        if status is not None and (status.barrier is None or _is_own(status)):
            # Refused, as one that has fallen behind: the next number fits.
            client.told.append(f"refused {status.code.name}")
            ask.instance = -1
            if status.barrier is not None:
                client.counter = status.barrier[1] + 1
            return
        outcome = OK if status is None else status.code.name
        instance = call.value if status is None else status.barrier[1]
        need(ask.place in (None, instance), "ONE MEETING", f"{ask.place}, and told {instance}")
        ask.instance = instance
        is_first = instance not in self.results
        known = self.results.setdefault(instance, outcome)
        need(known == outcome, "ALIKE", f"instance {instance} is {known} and {outcome}")
        if outcome == OK and is_first:
            meant = [each for each in self.asks if each.place in (None, instance)]
            came = {each.task_id for each in meant}
            need(came == EVERYBODY, "COMPLETE", f"instance {instance} passed with {sorted(came)}")
            for each in meant:
                each.counted = instance
        need(instance >= client.counter, "ONCE", f"instance {instance} was told before")
        client.told.append(f"{instance} {outcome}")
        client.counter = instance + 1

    def _told_living(self, client: Client, call: Call) -> None:
        client.living = None
        if call.status is not None:
            self.living[client.task_id] = ()
            return
        living = tuple(each.task_id for each in call.value)
        self.living[client.task_id] = living
        others = {answer for answer in self.living.values() if answer}
        need(len(others) == 1, "LIVING ALIKE", f"{others}")
        dead = {each.task_id for each in self.clients if each.is_dead}
        need(client.task_id in living, "LIVING", "who asks is not alive")
        if "restart" not in self.used and "forget" not in self.used:
            need(dead != set(living) & dead or not dead, "LIVING", "one that is dead is alive")

    def _check(self) -> None:
        waiting = [client for client in self.clients if client.call is not None]
        if any(client.is_dead for client in self.clients):
            need(not waiting, "DEATH", "somebody waits for one that is dead")
        for client in waiting:
            assert client.call is not None
            need(client.call.deadline > self.now, "BOUNDED", "somebody waits beyond its time")

        ask = [each.living is not None for each in self.clients if not each.is_dead]
        need(not all(ask), "LIVING SOON", "all that live have asked, and have no answer")

    def key(self) -> tuple[Any, ...]:
        """Returns what tells this state from others."""
        rows = frozenset((key, row) for key, row in self.disk.rows.items() if key[0] != EVENT)
        clients = tuple(
            (
                client.counter,
                client.last_ask and client.last_ask.place,
                client.asks,
                client.call is not None,
                client.living is not None,
                client.is_up,
                client.is_dead,
                tuple(client.told),
            )
            for client in self.clients
        )
        known = (frozenset(self.results.items()), frozenset(self.living.items()))
        return (rows, clients, known, frozenset(self.used), self.now)
