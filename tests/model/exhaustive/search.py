"""Searches all executions that differ: dynamic partial-order reduction with source sets and sleep
sets, by replay from the start.

Two executions that differ only in the order of independent steps are one. The search takes one of
each kind: where two dependent steps were taken in one order, and nothing between them forced it, it
tries the other order too. A process that was tried sleeps until something happens that matters to
its next step. (P. Abdulla, S. Aronis, B. Jonsson, K. Sagonas: Optimal dynamic partial order
reduction, POPL 2014, algorithm 1.)

How a step goes (done, an error before or after it, a death) is a choice like the others, all of
whose values are tried.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

from .scheduler import AWAIT, CONFLICTS, CRASH, Access, Run, Stop, Task


class TooLarge(Exception):
    """Says how far a search came that was not finished within its bounds."""


@dataclass(frozen=True)
class Choice:
    """Whose step is taken, and how it goes."""

    task: int
    variant: str


@dataclass(slots=True)
class _Node:
    """A state that was reached: who could go on, who is to be tried, and who needs not be."""

    stops: dict[int, Stop]
    sleep: dict[int, Sequence[Access]]
    backtrack: list[int]
    task: int
    variant: int = 0
    done: dict[int, Sequence[Access]] = field(default_factory=dict)

    @property
    def choice(self) -> Choice:
        return Choice(self.task, self.stops[self.task].variants[self.variant])

    def advance(self) -> bool:
        """Turns to what is to be tried next; says whether there is anything."""
        if self.variant + 1 < len(self.stops[self.task].variants):
            self.variant += 1
            return True
        self.done[self.task] = self.stops[self.task].accesses
        for task in self.backtrack:
            if task not in self.done and task not in self.sleep:
                self.task = task
                self.variant = 0
                return True
        return False


def depend(one: Sequence[Access], other: Sequence[Access]) -> bool:
    """Says whether two steps may not be swapped."""
    for key, mode in one:
        for key_too, mode_too in other:
            if key == key_too and mode_too in CONFLICTS[mode]:
                return True
    return False


class Search:
    """Goes through all executions. `build` makes a fresh one, `end` judges it once it is over.

    It is the chooser of each of them.
    """

    def __init__(
        self,
        build: Callable[[Search], Run],
        end: Callable[[Run], None],
        *,
        most_executions: int,
        most_s: float,
    ) -> None:
        self._build = build
        self._end = end
        self._most_executions = most_executions
        self._most_s = most_s
        self._nodes: list[_Node] = []
        self._replayed = 0  # nodes whose steps are not new in this execution
        self.executions = 0
        self.repeated = 0  # that ended early: all that was left to try sleeps
        self.steps = 0
        self.longest = 0
        self.seconds = 0.0
        self.cpu_s = 0.0
        self.counts: dict[str, int] = {}  # of what has happened, over all executions
        self.last_run: Run | None = None
        self.found: list[Choice] = []  # the choices of the shortest violation

    def run(self, *, shortest_within_s: float = 0.0) -> Exception | None:
        """Returns the first violation, or of those that are found in so many seconds more the one
        with the shortest story, which is `found` then; None where there is none. Raises TooLarge.
        """
        began = time.perf_counter()
        cpu_began = time.process_time()
        end = math.inf
        violation: Exception | None = None
        try:
            while True:
                run = self._execute()
                now = time.perf_counter()
                if run.violation is not None:
                    if violation is None:
                        end = now + shortest_within_s
                    elif not isinstance(run.violation, type(violation)):
                        return violation
                    if not self.found or self._cost(self.choices) < self._cost(self.found):
                        violation = run.violation
                        self.found = self.choices
                if now > end or not self._backtrack():
                    return violation
                self.seconds = time.perf_counter() - began
                tried = self.executions + self.repeated
                if tried >= self._most_executions or self.seconds > self._most_s:
                    raise TooLarge(self._progress())
        finally:
            self.seconds = time.perf_counter() - began
            self.cpu_s = time.process_time() - cpu_began

    @staticmethod
    def _cost(choices: Sequence[Choice]) -> tuple[int, int]:
        """Returns what makes a story long: its changes from one task to another, and its steps."""
        changes = sum(one.task != other.task for one, other in itertools.pairwise(choices))
        return changes, len(choices)

    @property
    def told(self) -> str:
        """How large the search was, in words."""
        tried = max(1, self.executions + self.repeated)
        counts = ", ".join(f"{count} x {what}" for what, count in sorted(self.counts.items()))
        return (
            f"{self.executions:,} executions, {self.repeated:,} cut off, {self.longest} steps at"
            f" most, {self.seconds:.1f} s, of the CPU {self.cpu_s:.1f} s,"
            f" {1000 * self.cpu_s / tried:.1f} ms each" + (f"; {counts}" if counts else "")
        )

    @property
    def processes(self) -> int:
        """How many processes there are: the kernel's and the store's own doings are none."""
        assert self.last_run is not None
        return len({task.process for task in self.last_run.tasks if task.process.isalpha()})

    @property
    def choices(self) -> list[Choice]:
        """The choices of the last execution."""
        return [node.choice for node in self._nodes]

    def _progress(self) -> str:
        open_nodes = sum(
            len(set(node.backtrack) - set(node.done) - set(node.sleep)) for node in self._nodes
        )
        return (
            f"not finished after {self.executions} executions in {self.seconds:.0f} s, bounds are"
            f" {self._most_executions} and {self._most_s:g} s; {len(self._nodes)} steps deep,"
            f" {open_nodes} choices known to be open; make the configuration smaller"
        )

    def _execute(self) -> Run:
        self._events: list[tuple[int, Sequence[Access] | None]] = []
        self._clocks: list[dict[int, int]] = []
        self._last: dict[int, int] = {}
        self._index: dict[Hashable, tuple[dict[int, int], ...]] = {}
        self._time = -1  # the last step that touched all there is
        self._slept = False
        run = self._build(self)
        self.last_run = run
        if not run.is_over:
            run.execute()
        self.steps += run.steps
        self.longest = max(self.longest, run.steps)
        if self._slept:
            self.repeated += 1
            return run
        self.executions += 1
        if run.violation is None:
            self._end(run)
        return run

    def _backtrack(self) -> bool:
        while self._nodes and not self._nodes[-1].advance():
            self._nodes.pop()
        self._replayed = len(self._nodes) - 1
        return bool(self._nodes)

    # --- as the chooser of an execution

    def choose(self, run: Run, ready: list[Task], *, time_passes: bool) -> Task | None:
        """Returns the task whose step is next: as known, or for a new state the same as before,
        which costs no change of threads.
        """
        depth = len(self._events)
        if depth < len(self._nodes):
            node = self._nodes[depth]
            return _chosen(run, ready, node.choice)
        if not depth:
            ready = [task for task in ready if run.goes_first(task)] or ready
        sleep = self._sleep_of_child()
        awake = [task for task in ready if task.number not in sleep]
        if not awake:
            self._slept = True
            return None
        going = [task for task in awake if not task.only_dies] or awake
        task = going[0]
        if run.last is not None and run.last in going:
            task = run.last
        # Nothing is ready, so that no step has shown an order between these.
        backtrack = [each.number for each in awake] if time_passes else [task.number]
        # Who waits sleeps by all that it waits for, and not by its death alone.
        stops = {
            each.number: replace(each.stop, variants=(CRASH,)) if each.only_dies else each.stop
            for each in ready
        }
        node = _Node(stops, sleep, backtrack, task.number)
        self._nodes.append(node)
        task.variant = node.choice.variant
        return task

    def _sleep_of_child(self) -> dict[int, Sequence[Access]]:
        if not self._nodes:
            return {}
        parent = self._nodes[-1]
        task, touched = self._events[-1]
        if touched is None:
            return {}
        return {
            each: accesses
            for each, accesses in {**parent.sleep, **parent.done}.items()
            if each != task and not depend(accesses, touched)
        }

    def finished(self, task: Task, accesses: Sequence[Access] | None) -> None:
        """Orders the step after those that it depends on, and notes which orders to try besides."""
        event = len(self._events)
        number = task.number
        self._events.append((number, accesses))
        # When time passed nobody could go on: all that comes after it could not come before.
        previous = max(self._last.get(number, task.parent), self._time)
        clock = dict(self._clocks[previous]) if previous >= 0 else {}
        if previous >= 0:
            clock[self._events[previous][0]] = previous
        self._last[number] = event
        self._clocks.append(clock)
        if accesses is None:
            for other, last in self._last.items():
                clock[other] = last
            self._time = event
            return
        earlier: set[int] = set()
        needed: set[int] = set()  # those without which this step could not be
        for key, mode in accesses:
            table = self._index.get(key)
            if table is None:
                table = self._index[key] = ({}, {}, {}, {})
            else:
                for conflicting in CONFLICTS[mode]:
                    for other, last in table[conflicting].items():
                        if other != number:
                            (needed if mode == AWAIT else earlier).add(last)
        for key, mode in accesses:
            self._index[key][mode][number] = event
        races = []
        for last in sorted(earlier | needed, reverse=True):
            other = self._events[last][0]
            if clock.get(other, -1) >= last:
                continue  # another step lies between them
            if last not in needed:
                races.append(last)
            for each, at in self._clocks[last].items():
                if clock.get(each, -1) < at:
                    clock[each] = at
            clock[other] = last
        clock[number] = event
        if event >= self._replayed:
            for last in races:
                self._reverse(last, event)

    def _reverse(self, first: int, second: int) -> None:
        """Has the other order of two steps tried, unless it is already."""
        taker = self._events[first][0]
        between = [at for at in range(first + 1, second) if self._clocks[at].get(taker, -1) < first]
        initials: set[int] = set()
        seen: set[int] = set()
        before: list[int] = []
        for at in [*between, second]:
            number = self._events[at][0]
            if number not in seen:
                seen.add(number)
                clock = self._clocks[at]
                is_first = not any(clock.get(self._events[each][0], -1) >= each for each in before)
                if is_first:
                    initials.add(number)
            before.append(at)
        node = self._nodes[first]
        wanted = self._events[second][0]
        # What the first step has made possible cannot come before it.
        if wanted in initials and wanted not in node.stops:
            return
        if initials.isdisjoint(node.backtrack):
            node.backtrack.append(wanted if wanted in initials else min(initials))


class NotRepeated(Exception):
    """Says that an execution went otherwise than before by the same choices: something in it is
    drawn by chance, and the search proves nothing.
    """


def _chosen(run: Run, ready: list[Task], choice: Choice) -> Task:
    if choice.task < len(run.tasks):
        task = run.tasks[choice.task]
        if task in ready and choice.variant in task.stop.variants:
            task.variant = choice.variant
            return task
    raise NotRepeated(f"task {choice.task} was to go on at step {run.steps}: {choice.variant}")


class Replay:
    """A chooser that repeats the choices of one execution."""

    def __init__(self, choices: Sequence[Choice]) -> None:
        self._choices = list(choices)

    def choose(self, run: Run, ready: list[Task], *, time_passes: bool) -> Task | None:
        """Returns the next task of the list; None after its end."""
        if run.steps < len(self._choices):
            return _chosen(run, ready, self._choices[run.steps])
        return None

    def finished(self, task: Task, accesses: Sequence[Access] | None) -> None:
        """Takes no note."""
