"""What an onlooker of a simulation knows, and holds the machine's completions against."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from copy import copy
from typing import Any

from holdfast.coordination.core.machine import Machine
from holdfast.coordination.core.status import Code
from tests.support.simulated_clients import Completion, Request
from tests.support.simulated_world import World

# What an onlooker knows of a job, until it begins anew.
_KNOWN = ("came", "acknowledged", "counts", "arrivals", "deadlines", "results", "answered")


class Truth:
    """Checks the invariants of `simulator`, at every completion, at every tick, after every replay
    and at the end.
    """

    def __init__(self, world: World, num_tasks: int, *, recoverable: bool) -> None:
        self._world = world
        self._num_tasks = num_tasks
        self._recoverable = recoverable
        self.came: set[int] = set()  # tasks that have ever opened a stream
        self.leaving: set[int] = set()  # tasks that have asked to leave, or are over
        self.began_s = 0.0  # when the job last began anew
        self.acknowledged: dict[str, bytes] = {}
        self.increments = 0
        self.counts: list[int] = []
        self.arrivals: dict[str, dict[int, tuple[int, int]]] = defaultdict(
            dict
        )  # name: request: (task, counter)
        self.deadlines: dict[
            tuple[str, int], float
        ] = {}  # an instance, and the deadline of the first to arrive
        self.unwritten: list[tuple[str, int]] = []  # instances that the journal does not know yet
        self.results: dict[tuple[str, int], str] = {}
        self.answered: dict[int, int] = {}  # request: the instance whose result it has had
        # what was known before the job began anew, until the journal knows that it has
        self._former: dict[str, Any] = {}

    # --- Barriers

    def arrives(self, task_id: int, name: str, request: Request) -> None:
        """Notes that a task comes to a barrier. One request is one coming, to the one instance that
        answers it.
        """
        self.arrivals[name][request.number] = (task_id, request.sent_counter)

    def waits(self, name: str, counter: int, deadline: float) -> float:
        """Notes that a task waits at an instance, and returns when it must know: the deadline of
        the first to arrive is everyone's.
        """
        if (name, counter) not in self.deadlines:
            self.deadlines[name, counter] = deadline
            self.unwritten.append((name, counter))
        return self.deadlines[name, counter]

    def written(self) -> None:
        """Notes that the journal holds all that has happened."""
        self.unwritten.clear()
        self._former.clear()

    def lost(self) -> None:
        """Notes that what was not written never happened."""
        self._forget_unwritten()
        for name, known in self._former.items():
            setattr(self, name, known)
        self._former.clear()

    def _forget_unwritten(self) -> None:
        for instance in self.unwritten:
            del self.deadlines[instance]
        self.unwritten.clear()

    def replied(self, task_id: int, request: Request, completion: Completion) -> None:
        """Checks one completion of the machine."""
        if (
            completion.status is None
            and request.method == "register"
            and len(self.came) < self._num_tasks
        ):
            self._world.fail(
                f"process {task_id} was answered that all had come; there were {sorted(self.came)}"
            )
        if (
            completion.status is None
            and request.method == "leave"
            and not self._recoverable
            and len(self.leaving) < self._num_tasks
        ):
            self._world.fail(
                f"process {task_id} was let go, when only {sorted(self.leaving)} had asked to leave"
            )
        if request.method != "barrier":
            return
        name, participants, _ = request.argument
        outcome = self._outcome(name, completion)
        if outcome is None:
            if (
                completion.status is not None and completion.status.barrier is not None
            ):  # refused: it has come nowhere
                self.arrivals[name].pop(request.number, None)
            return
        counter, result = outcome
        self.answered.setdefault(request.number, counter)
        before = self.results.get((name, counter))
        if before is not None and before != result:
            self._world.fail(
                f"barrier {name} {counter} ended {before} for some and {result} for process"
                f" {task_id}"
            )
        if before is None:
            self.results[name, counter] = result
            if result == "OK":
                self._all_had_come(name, counter, participants)
            stale = [
                number
                for number in self.arrivals[name]
                if self.answered.get(number, counter) < counter
            ]
            for number in stale:
                del self.arrivals[name][number]

    def _outcome(self, name: str, completion: Completion) -> tuple[int, str] | None:
        status = completion.status
        if status is None:
            return completion.value, "OK"
        if (
            status.barrier is None
            or status.code == Code.INVALID_ARGUMENT
            or (status.code == Code.INTERNAL and not status.missing)
        ):
            return None  # a status of this call alone
        return status.barrier[1], status.code.name

    def _all_had_come(self, name: str, counter: int, participants: frozenset[int]) -> None:
        first = 1 + max(
            (known for about, known in self.results if about == name and known < counter),
            default=-1,
        )
        comings = self.arrivals[name].items()
        meant = {
            number: task
            for number, (task, sent) in comings
            if first <= sent <= counter or sent == 0
        }
        came = {
            task for number, task in meant.items() if self.answered.get(number, counter) == counter
        }
        if not participants <= came:
            self._world.fail(
                f"barrier {name} {counter} released, but {sorted(participants - came)} had not come"
            )

    def counted(self, completion: Completion) -> None:
        """Checks that no two acknowledged increments got the same number."""
        if completion.status is None and completion.call.came >= self.began_s:
            number = int(completion.value[1])
            if number in self.counts:
                self._world.fail(f"two increments were answered {number}")
            self.counts.append(number)

    # --- Lives

    def nobody_connected_is_lost(self, machine: Machine) -> None:
        """Checks that while the job gathers whoever has a stream is there."""
        for task in machine.task_table.tasks:
            if (
                task.attached
                and not machine.registration.gathered
                and not machine.task_table.connected(task.task_id)
            ):
                self._world.fail(
                    f"process {task.task_id} has a stream, and was lost before the job had gathered"
                )

    def nobody_who_came_back_is_given_up(self, machine: Machine) -> None:
        """Checks that nobody with a stream is given up because an earlier stream of it was
        closed.
        """
        for task in (machine.task_table.tasks[task_id] for task_id in machine.fenced):
            if (
                task.attached
                and task.error is not None
                and "closed the connection" in task.error.message
            ):
                self._world.fail(
                    f"process {task.task_id} had come back, and was given up: {task.error.message}"
                )

    def is_served(self, machine: Machine, task_id: int) -> None:
        """Checks that a request is not of a life that was given up."""
        task = machine.task_table.tasks[task_id]
        if task.session in task.former:
            self._world.fail(f"process {task_id} was given up, and is served")

    def begins_anew(self, now: float, there: Collection[int]) -> None:
        """Checks that nobody was there to whom the job's state meant anything, and forgets it."""
        if there:
            self._world.fail(f"the job began anew, when processes {sorted(there)} were there")
        self._world.note("begins anew")
        self._forget_unwritten()
        former = {name: getattr(self, name) for name in _KNOWN}
        for name, known in former.items():
            setattr(self, name, copy(known))
            getattr(self, name).clear()
        former |= {"began_s": self.began_s, "increments": self.increments}
        self._former = former | self._former
        self.began_s = now
        self.increments = 0

    # --- Deadlines, keys and counts

    def acknowledges(self, key: str, value: bytes, call: Any) -> None:
        """Notes that a key was set. One that a former life had set may have gone with it."""
        if call.came >= self.began_s:
            self.acknowledged[key] = value

    def nobody_is_late(self, waiting: Iterable[Any], now: float) -> None:
        """Checks that nobody waits whose deadline was before `now`: before each tick, which comes
        at the moment the machine asked for, and after it, when all that was due has been answered.
        """
        for call in waiting:
            if call.deadline < now:
                self._world.fail(
                    f"process {call.client.task_id} waits in {call.request.method} past its"
                    f" deadline {call.deadline:.3f}"
                )

    def keys_are_there(self, machine: Machine) -> None:
        """Checks that what was acknowledged is there."""
        for key, value in self.acknowledged.items():
            if machine.keys.values.get(key) != value:
                self._world.fail(
                    f"key {key} was acknowledged with {value!r}, and is"
                    f" {machine.keys.values.get(key)!r}"
                )

    def at_end(self, machine: Machine) -> None:
        """Checks keys and counts once all is quiet."""
        self.keys_are_there(machine)
        total = int(machine.keys.values.get("count", b"0"))
        if not len(self.counts) <= total <= self.increments:
            self._world.fail(
                f"{len(self.counts)} increments acknowledged, {self.increments} arrived, the sum is"
                f" {total}"
            )
