"""The simulated processes of a job: each has a stream, resends on the next one when it breaks, and
walks through a script of steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.coordination.core.status import Code, Status
from tests.support.simulated_world import World

if TYPE_CHECKING:
    from tests.support.simulated_service import Call, SimulatedService
    from tests.support.simulated_truth import Truth

RESEND_S = 3.0
LATE_S = 60.0  # three heartbeat timeouts
BEAT_S = 5.0


class Completion(NamedTuple):
    """How a call ended, as it travels."""

    call: Any
    value: Any
    status: Status | None


@dataclass(eq=False)
class Request:
    """One request of a client, sent once or again."""

    number: int
    method: str
    argument: Any
    sent_counter: int = 0
    on_reply: Callable[[Completion], None] | None = None
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
    dead: bool = True  # until its first life begins
    finished: bool = False
    step: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    pending: dict[int, Request] = field(default_factory=dict)


class Clients:
    """All processes of a job, each with `steps` steps. `unison`: every step is a barrier of all."""

    def __init__(
        self, world: World, truth: Truth, count: int, steps: int, *, unison: bool, recoverable: bool
    ) -> None:
        self._world = world
        self._random = world.random
        self._truth = truth
        self._steps = steps
        self._unison = unison
        self._recoverable = recoverable
        self.service: SimulatedService
        self.all = [Client(task_id) for task_id in range(count)]
        self._everyone = frozenset(range(count))
        self._unfinished = count

    def begin(self) -> None:
        """Starts all within a second, but in some jobs one that comes late: up to three heartbeat
        timeouts after the others.
        """
        late = (
            self._random.choice(self.all)
            if self._random.random() < 0.3 and not self._unison
            else None
        )
        for client in self.all:
            delay_s = self._random.uniform(0, LATE_S if client is late else 1)
            if delay_s > 1:
                self._world.note("late", f"{client.task_id} by {delay_s:.0f} s")
            self._world.at(delay_s, lambda client=client: self.begin_life(client))  # type: ignore[misc]

    @property
    def finished(self) -> bool:
        """Says whether all have walked through their scripts."""
        return not self._unfinished

    # --- Faults

    def break_one(self) -> None:
        """Breaks a stream."""
        client = self._random.choice(self.all)
        self._world.note("break", client.task_id)
        self._lose_stream(client, reported=self._random.random() < 0.5)

    def crash_one(self) -> None:
        """Kills a process, which comes back as another life of it."""
        client = self._random.choice(self.all)
        if client.dead or client.finished:
            return
        self._world.note("crash", client.task_id)
        client.dead = True
        for request in client.pending.values():
            request.done = True
        client.pending.clear()
        self._lose_stream(client, reported=self._random.random() < 0.5)
        self._world.at(self._random.uniform(0.1, 30), lambda: self.begin_life(client))

    def pause_one(self) -> None:
        """Stops a process for a while, perhaps beyond its heartbeat timeout."""
        client = self._random.choice(self.all)
        client.paused_until = self._world.now + self._random.uniform(1, 40)
        self._world.note("pause", f"{client.task_id} until {client.paused_until:.3f}")

    def lose_service(self) -> None:
        """Breaks all streams: the service has crashed."""
        for client in self.all:
            self._world.at(
                self._random.uniform(0, 0.2),
                lambda client=client: self._lose_stream(client, reported=False),
            )  # type: ignore[misc]

    def _lose_stream(self, client: Client, *, reported: bool) -> None:
        """Ends a client's stream; the service notices only where it is `reported`."""
        stream, client.stream, client.opening = client.stream, 0, 0
        if reported and stream and self.service.has_stream(client, stream):
            self._world.at(
                self._world.delay_s(), lambda: self.service.drop_calls(client.task_id, stream)
            )
        if not client.dead and not client.finished:
            self._world.at(
                self._random.uniform(0.02, 1.0),
                lambda life=client.life: self._open_stream(client, life),
            )  # type: ignore[misc]

    # --- Lives and streams

    def begin_life(self, client: Client) -> None:
        client.dead = False
        client.life = client.life + 1
        client.incarnation = self._random.getrandbits(62) | 1
        client.counters = {}
        self._world.note("start", f"{client.task_id} life {client.life}")
        self._open_stream(client, client.life)
        self._ask(client, "register", None, lambda completion: self._gathered(client, client.life))

    def _gathered(self, client: Client, life: int) -> None:
        self._world.note("gathered", client.task_id)
        self._beat(client, life)  # as late as jaxlib's clients begin
        self._next_step(client)

    def take_end(self, client: Client, stream: int) -> None:
        """Takes the end of a stream: as what it says, or as a break, after which the client tries
        to come back.
        """
        if client.stream == stream and self._random.random() < 0.5:
            self._lose_stream(client, reported=False)
        else:
            self.fence(client, stream)

    def fence(self, client: Client, stream: int) -> None:
        """Takes the service's word that this life is over: a launcher starts the next one, where
        the job is recoverable.
        """
        if client.dead or client.finished or stream not in (client.stream, client.opening):
            return
        self._world.note("fenced", f"{client.task_id} life {client.life}")
        client.dead = True
        client.stream = 0
        client.opening = 0
        for request in client.pending.values():
            request.done = True
        client.pending.clear()
        if self._recoverable:
            self._world.at(self._random.uniform(0.1, 30), lambda: self.begin_life(client))
        else:
            self._finish(client)

    def _open_stream(self, client: Client, life: int) -> None:
        if client.dead or client.finished or client.stream or client.life != life:
            return
        stream = client.opening = next(self._world.numbers)
        self._world.send(
            lambda: self.service.open(
                client,
                stream,
                client.incarnation,
                lambda status: self._opened(client, life, stream, status),
            ),
            twice=False,
        )
        self._world.at(
            RESEND_S,
            lambda: (
                None
                if client.opening != stream or client.stream
                else self._open_stream(client, life)
            ),
        )

    def _opened(self, client: Client, life: int, stream: int, status: Status | None) -> None:
        if client.life != life or client.opening != stream:
            return
        if status is not None:
            self._world.note("refused", f"{client.task_id}: {status.message}")
            if status.code is not Code.UNAVAILABLE:  # then it asks again
                self.fence(client, stream)
            return
        client.stream = stream
        for request in list(client.pending.values()):
            if not request.sent_before or request.again:
                self._post(client, request)
            else:
                self._answer(
                    client, request, Completion(None, None, Status(Code.UNAVAILABLE, "broken"))
                )

    def _beat(self, client: Client, life: int) -> None:
        if client.dead or client.finished or client.life != life:
            return
        if self._world.now >= client.paused_until and client.stream:
            stream = client.stream
            self._world.send(lambda: self.service.beat(client, stream), twice=True)
        self._world.at(BEAT_S, lambda: self._beat(client, life))

    def _ask(
        self,
        client: Client,
        method: str,
        argument: Any,
        on_reply: Callable[[Completion], None],
        *,
        again: bool = True,
        counter: int = 0,
    ) -> None:
        request = Request(next(self._world.numbers), method, argument, counter, on_reply, again)
        client.pending[request.number] = request
        self._post(client, request)

    def _post(self, client: Client, request: Request) -> None:
        """Sends a request on the present stream, and again while there is no answer."""
        if request.done or client.dead:
            return
        if self._world.now < client.paused_until:
            self._world.at(
                client.paused_until - self._world.now, lambda: self._post(client, request)
            )
            return
        if not client.stream:
            return  # sent when the next stream opens
        if request.sent_before and not request.again:
            self._answer(
                client, request, Completion(None, None, Status(Code.UNAVAILABLE, "no answer"))
            )
            return
        stream = client.stream
        request.sent_before = True
        self._world.send(lambda: self.service.serve(client, stream, request), twice=request.again)
        self._world.at(RESEND_S * self._random.uniform(1, 2), lambda: self._post(client, request))

    def _answer(self, client: Client, request: Request, completion: Completion) -> None:
        """Takes the first answer to a request."""
        if request.done or client.dead:
            return
        stolen = (
            completion.status is not None
            and completion.status.code == Code.CANCELLED
            and completion.status.barrier is None
        )
        if stolen and request.method == "barrier":
            return  # a duplicate took this one's place: one of them will be answered
        request.done = True
        client.pending.pop(request.number, None)
        assert request.on_reply is not None
        request.on_reply(completion)

    # --- The script

    def _next_step(self, client: Client) -> None:
        if client.step >= self._steps:
            self._truth.leaving.add(client.task_id)
            return self._ask(client, "leave", None, lambda completion: self._finish(client))
        client.step += 1
        if self._unison:
            self._wait_at(client, ("all", self._everyone), 600.0)
            return None
        doing = self._random.random()
        if doing < 0.55:
            return self._wait_at(client, self._barrier_of(client))
        if doing < 0.75:
            return self._set_key(client)
        if doing < 0.85:
            return self._set_first(client)
        if doing < 0.9:
            return self._ask(
                client,
                "increment",
                "count",
                lambda completion: self._counted(client, completion),
                again=False,
            )
        if doing < 0.96:
            writer = self._random.randrange(len(self.all))
            key = f"key/{writer}/1/{self._random.randrange(1, self._steps + 1)}"
            return self._ask(
                client,
                "get",
                (key, self._random.uniform(0, 10)),
                lambda completion: self._next_step(client),
            )
        name = self._barrier_of(client)[0]
        counter = client.counters.get(name, 0)
        return self._ask(
            client, "cancel", (name, counter), lambda completion: self._next_step(client)
        )

    def _barrier_of(self, client: Client) -> tuple[str, frozenset[int]]:
        """Returns a barrier that this client takes part in: its name fixes who the others are."""
        everyone = self._everyone
        if self._random.random() < 0.7 or len(everyone) < 3:
            return "all", everyone
        other = self._random.choice(sorted(everyone - {client.task_id}))
        pair = frozenset({client.task_id, other})
        return f"pair/{min(pair)}-{max(pair)}", pair

    def _wait_at(
        self, client: Client, barrier: tuple[str, frozenset[int]], timeout_s: float | None = None
    ) -> None:
        name, participants = barrier
        counter = client.counters[name] = client.counters.get(name, -1) + 1
        limit_s = self._random.uniform(2, 20) if timeout_s is None else timeout_s
        argument = (name, participants, limit_s)
        self._ask(
            client,
            "barrier",
            argument,
            lambda completion: self._barrier_over(client, name, completion),
            counter=counter,
        )

    def _barrier_over(self, client: Client, name: str, completion: Completion) -> None:
        counter = (
            completion.value
            if completion.status is None
            else (completion.status.barrier or (name, client.counters[name]))[1]
        )
        client.counters[name] = counter
        self._world.note(
            "leaves",
            f"{client.task_id} {name} {counter}"
            f" {'OK' if completion.status is None else completion.status.code.name}",
        )
        self._next_step(client)

    def _set_key(self, client: Client) -> None:
        key = f"key/{client.task_id}/{client.life}/{client.step}"
        value = f"{client.incarnation}".encode()
        self._ask(
            client,
            "set",
            (key, value),
            lambda completion: self._key_set(client, key, value, completion),
        )

    def _set_first(self, client: Client) -> None:
        key = f"first/{self._random.randrange(3)}"
        value = f"{client.task_id}:{client.incarnation}".encode()
        self._ask(
            client,
            "set",
            (key, value),
            lambda completion: self._key_set(client, key, value, completion),
        )

    def _key_set(self, client: Client, key: str, value: bytes, completion: Completion) -> None:
        if completion.status is None:
            self._truth.acknowledges(key, value, completion.call)
        self._world.note(
            "set",
            f"{client.task_id} {key}"
            f" {'OK' if completion.status is None else completion.status.code.name}",
        )
        self._next_step(client)

    def _counted(self, client: Client, completion: Completion) -> None:
        self._truth.counted(completion)
        self._next_step(client)

    def _finish(self, client: Client) -> None:
        self._world.note("finish", client.task_id)
        self._unfinished -= not client.finished
        client.finished = True
        self._truth.leaving.add(client.task_id)

    def reach(self, call: Call, completion: Completion) -> None:
        """Brings a completion to its client, if that still listens on this stream."""
        client = call.client
        machine = self.service.machine
        if client.stream != call.stream or client.dead:
            return
        if self._world.now < client.paused_until:
            self._world.at(
                client.paused_until - self._world.now, lambda: self.reach(call, completion)
            )
            return
        exists = completion.status is not None and completion.status.code == Code.ALREADY_EXISTS
        if call.request.method == "set" and exists and machine is not None:
            key, value = call.request.argument  # what the client's reading back finds
            if machine.keys.values.get(key) == value:
                completion = Completion(call, None, None)
        self._answer(client, call.request, completion)
