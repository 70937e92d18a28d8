"""The service of a simulation: the real machine and the real rows of its journal, with streams and
a loop of virtual time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from holdfast.coordination.core import calls, journal_codec
from holdfast.coordination.core.barriers import Arrival
from holdfast.coordination.core.machine import Machine
from holdfast.coordination.core.status import Status
from holdfast.coordination.limits import Config
from tests.support.simulated_clients import Client, Completion, Request
from tests.support.simulated_truth import Truth
from tests.support.simulated_world import World


class Call(calls.Call):
    """One delivery of a request."""

    def __init__(self, client: Client, stream: int, request: Request, *who: Any, **facts: Any):
        super().__init__(*who, session=True, **facts)
        self.client = client
        self.stream = stream
        self.request = request


class SimulatedService:
    """Serves clients as `Service` and a transport do. `batch_s`: how long events are gathered for
    one write of the journal.
    """

    def __init__(
        self,
        world: World,
        config: Config,
        truth: Truth,
        reach: Callable[[Call, Completion], None],
        *,
        journal: bool,
        batch_s: float,
    ):
        self._world = world
        self._config = config
        self._truth = truth
        self._reach = reach
        self._batch_s = batch_s
        self.disk = Disk(config) if journal else None
        self.machine: Machine | None = Machine(config, 0.0)
        self._crash_unwritten = False
        self._streams: dict[int, int] = {}  # task to stream
        self._clients: dict[int, Client] = {}
        self._calls: dict[Call, None] = {}
        self._tick_at = math.inf
        self._flushing = False

    # --- Its loop

    def wind(self) -> None:
        """Schedules a tick at the very moment that the machine asks for, as the service's loop
        does.
        """
        assert self.machine is not None
        due = max(self._world.now, self.machine.next_due())
        if due < self._tick_at:
            self._tick_at = due
            self._world.at_time(due, self._tick)

    def _tick(self) -> None:
        machine = self.machine
        now = self._world.now
        if machine is None or now < self._tick_at:
            return
        self._tick_at = math.inf
        self._truth.nobody_is_late(self._waiting(), now)
        machine.tick(now)
        self._truth.nobody_connected_is_lost(machine)
        self._truth.nobody_who_came_back_is_given_up(machine)
        self._fence(machine)
        self._truth.nobody_is_late(self._waiting(), math.nextafter(now, math.inf))
        self._flush_soon()

    def _fence(self, machine: Machine) -> None:
        """Ends the streams of those that were given up."""
        for task_id in machine.take_fenced():
            stream = self._streams.pop(task_id, 0)
            client = self._clients[task_id]
            machine.detach(task_id)
            self._drop(task_id, stream)
            self._world.at(
                self._world.delay_s(),
                lambda client=client, stream=stream: self.on_fence(client, stream),
            )  # type: ignore[misc]

    def on_fence(self, client: Client, stream: int) -> None:
        """Does nothing; the simulation puts a function in its place."""

    def _waiting(self) -> list[Call]:
        return [call for call in self._calls if not call.done]

    def _flush_soon(self) -> None:
        """Flushes at once, or when the batch is full of time."""
        if not self._batch_s:
            self._flush(self.machine)
        elif not self._flushing:
            self._flushing = True
            life = self.machine
            self._world.at(self._batch_s, lambda: self._flush(life))
        if self.machine is not None:
            self.wind()

    def _flush(self, life: Machine | None) -> None:
        """Writes the journal, then sends the answers; the service may crash between the two."""
        if life is None or life is not self.machine:
            return
        self._flushing = False
        if self._crash_unwritten and life.answers:
            self._end()
            return
        answers = life.take_answers()
        if self.disk is not None:
            self.disk.write(life)
        self._truth.written()
        for call in answers:
            assert isinstance(call, Call)
            completion = Completion(call, call.value, call.status)
            self._calls.pop(call, None)
            self._truth.replied(call.client.task_id, call.request, completion)
            self._world.send(
                lambda call=call, completion=completion: self._reach(call, completion), twice=True
            )  # type: ignore[misc]

    # --- Its end and its return

    def crash(self) -> None:
        """Crashes now, or between the machine's next decision and the journal: then that answer is
        never given.
        """
        if self.machine is None:
            return
        if self._world.random.random() < 0.5:
            self._crash_unwritten = True
        else:
            self._end()

    def _end(self) -> None:
        """Loses all that is not in the journal."""
        self._world.note("service crashes")
        self.machine = None
        self._crash_unwritten = False
        self._flushing = False
        self._tick_at = math.inf
        self._calls.clear()
        self._streams.clear()
        self._truth.lost()
        self.on_end()
        self._world.at(self._world.random.uniform(0.1, 10), self.restart)

    def on_end(self) -> None:
        """Does nothing; the simulation puts a function in its place."""

    def restart(self) -> None:
        """Comes back with what the journal holds."""
        if self.machine is not None:
            return
        assert self.disk is not None
        self.machine = self.disk.load(self._world.now)
        self._world.note("service is back")
        self._truth.keys_are_there(self.machine)
        self.wind()

    # --- What it is asked

    def has_stream(self, client: Client, stream: int) -> bool:
        """Says whether this is the stream that the client's task has."""
        return self._streams.get(client.task_id) == stream

    def open(
        self, client: Client, stream: int, incarnation: int, opened: Callable[[Status | None], None]
    ) -> None:
        """Takes the first frame of a stream; `opened` gets the answer."""
        if self.machine is None or stream < self._streams.get(client.task_id, 0):
            return
        registration = self.machine.registration
        had_gathered = registration.gathered
        status = registration.open_session(
            client.task_id, incarnation, f"h{client.task_id}", 1, self._world.now
        )
        if had_gathered and not registration.gathered:
            self._truth.begins_anew(self._world.now, self._there() - {client.task_id})
        if status is None:
            older = self._streams.get(client.task_id, 0)
            self._streams[client.task_id], self._clients[client.task_id] = stream, client
            self._truth.came.add(client.task_id)
            self._drop(client.task_id, older)
        self._flush_soon()
        if self.machine is not None:
            self._world.send(lambda: opened(status), twice=False)

    def _there(self) -> set[int]:
        """Returns the processes that live, and have a stream here."""
        return {
            task_id
            for task_id, client in self._clients.items()
            if not client.dead and client.stream and self.has_stream(client, client.stream)
        }

    def beat(self, client: Client, stream: int) -> None:
        """Takes a sign of life."""
        if self.machine is not None and self.has_stream(client, stream):
            self.machine.seen(client.task_id, self._world.now)

    def drop_calls(self, task_id: int, stream: int) -> None:
        """Makes the machine forget what a dead stream waits for."""
        if self.machine is not None:
            if self._streams.get(task_id) == stream:
                self.machine.suspect(task_id, self._world.now)
                self.machine.detach(task_id)
            self._drop(task_id, stream)
            self._flush_soon()

    def _drop(self, task_id: int, stream: int) -> None:
        assert self.machine is not None
        for call in [
            call for call in self._calls if call.client.task_id == task_id and call.stream == stream
        ]:
            del self._calls[call]
            call.drop()

    def serve(self, client: Client, stream: int, request: Request) -> None:
        """Takes a request."""
        machine = self.machine
        now = self._world.now
        if machine is None or not self.has_stream(client, stream):
            return
        self._truth.is_served(machine, client.task_id)
        machine.seen(client.task_id, now)
        task_id = client.task_id
        session = machine.task_table.tasks[task_id].session
        life = machine.task_table.life_of(task_id, session)
        call = Call(
            client,
            stream,
            request,
            machine.answers,
            task_id,
            came=now,
            incarnation=session,
            life=life,
        )
        self._calls[call] = None
        argument = request.argument
        if request.method == "barrier":
            self._barrier(machine, call)
        elif request.method == "register":
            machine.registration.wait_for_all(call)
        elif request.method == "set":
            machine.keys.insert(call, *argument, False)
        elif request.method == "get":
            call.wait_until(now + argument[1])
            machine.get(call, argument[0])
        elif request.method == "increment":
            self._truth.increments += 1
            machine.keys.increment(call, argument, 1)
        elif request.method == "cancel":
            machine.barriers.cancel(call, *argument)
        else:
            call.wait_until(now + 60.0)
            machine.shut_down(call)
        self._flush_soon()

    def _barrier(self, machine: Machine, call: Call) -> None:
        client = call.client
        request = call.request
        now = self._world.now
        name, participants, limit_s = request.argument
        self._truth.arrives(client.task_id, name, request)
        who = frozenset() if len(participants) == self._config.num_tasks else participants
        call.wait_until(now + limit_s)
        machine.barrier(Arrival(call, name, request.sent_counter, who))
        if not call.done:
            call.deadline = self._truth.waits(
                name, machine.barriers.open[name].first, now + limit_s
            )


class Disk:
    """The journal's rows, kept as the service keeps them in SQLite: what `drain` gave before the
    crash, `load` gets after it.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.rows: dict[tuple[str, str], bytes] = {}

    def write(self, machine: Machine) -> None:
        """Writes what has changed."""
        for row in journal_codec.drain(machine, 0.0):
            if row.value is None:
                self.rows.pop(row[:2], None)
            else:
                self.rows[row[:2]] = row.value

    def load(self, now: float) -> Machine:
        """Returns the machine that the rows tell of."""
        machine = Machine(self.config, now)
        journal_codec.load(
            machine, [journal_codec.Row(*key, value) for key, value in self.rows.items()], now, 0.0
        )
        return machine
