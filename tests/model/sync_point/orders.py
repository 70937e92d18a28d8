"""What is searched: three processes that ask step after step while notices come, and what holds for
all of them, whatever the order.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from holdfast.coordination import CoordinationError
from holdfast.multihost.group.group_client import forget_group_client
from holdfast.multihost.job import current_job
from holdfast.multihost.preemption.step_agreement import SyncPoint, _OpenSyncPoints
from tests.model.exhaustive.scheduler import AWAIT, OK, READ, WRITE, Access, Run, Task
from tests.model.exhaustive.search import Search
from tests.model.promise import Broken, need
from tests.support.garbage import freeze

from .machinery import CLOCK, ModelClient, Site, building, searched

TIMEOUT_S = 4.0  # others take over after a quarter of it
FAR = 100  # a step that nobody asks about within an order


@dataclass(frozen=True)
class Orders:
    """One search: each process asks about so many `steps`, and has `notices`, in this order; `dies`
    dies at some time, for `slow` the time of one wait may be over at once, `late` comes at any
    time, and each of `leaves` leaves after its last step.

    `in_step`: each step is a collective, from which nobody goes on before all have come to it.
    """

    name: str
    processes: str = "abc"
    steps: tuple[int, ...] = (1, 1, 1)
    notices: tuple[tuple[str, ...], ...] = (("raised",), (), ())
    dies: str = ""
    slow: str = ""
    late: str = ""
    leaves: str = ""
    in_step: bool = False
    is_large: bool = False
    most_s: float = 600.0


@dataclass
class Life:
    """One process: its sync point, and what it was told."""

    sync: SyncPoint | None = None
    client: ModelClient | None = None
    answers: dict[int, tuple[str, bool]] = field(default_factory=dict)
    decided: list[str] = field(default_factory=list)
    won: list[str] = field(default_factory=list)  # notices that were announced
    lost: list[str] = field(default_factory=list)  # notices for which another one counts
    entered: int = -1  # the last step
    has_told: bool = True  # all its notices


class World(Site):
    """One execution: the lives of three processes."""

    def __init__(self, search: Search, orders: Orders) -> None:
        super().__init__(_AfterOpening(search), dies=orders.dies, closes=orders.leaves)
        self.orders = orders
        self.processes = orders.processes
        self.lives = {process: Life() for process in self.processes}
        if orders.late:
            self.absent.add(orders.late)
        with building(self):
            for process in self.processes:
                if process != orders.late:
                    self._open(process)
        for process, notices in zip(self.processes, orders.notices, strict=False):
            if process == orders.late:
                self.add(process, functools.partial(self._come, process), process)
                continue
            self.add(process, functools.partial(self._train, process), process)
            if notices:
                self.lives[process].has_told = False
                work = functools.partial(self._notify, process, notices)
                self.add(process, work, f"{process} publisher")
        self.add(CLOCK, self.keep_time)
        if orders.dies:
            self.add("the end", self.end)
        for task in self.tasks:
            task.budget = int(task.process == orders.slow)

    def _open(self, process: str) -> None:
        life = self.lives[process]
        life.client = ModelClient(self, self.processes)
        self.builder = process
        life.sync = SyncPoint(
            life.client,
            "stop",
            process_id=self.processes.index(process),
            tasks=range(len(self.processes)),
            timeout_s=TIMEOUT_S,
            lost=self._lost_tasks,
            on_change=life.decided.append,
        )

    def _lost_tasks(self) -> list[int]:
        return [self.processes.index(each) for each in self.lost(self.processes)]

    # --- what the processes do

    def _come(self, process: str) -> None:
        self.step("comes", [(("alive", process), WRITE)])
        self.absent.discard(process)
        self._open(process)
        self._train(process)

    def _train(self, process: str) -> None:
        life = self.lives[process]
        sync = life.sync
        assert sync is not None
        for step in range(self.orders.steps[self.processes.index(process)]):
            try:
                answer = sync.ask(step)
            except CoordinationError as error:
                raise Broken("ENDS", f"{process} asks about step {step}: {error}") from error
            self.story.append(f"{process}: step {step} is {answer.value or 'nothing'!r}")
            life.answers[step] = (answer.value, answer.changed)
            if self.orders.in_step:
                self._enter(process, step)
        if process in self.orders.leaves:
            # Who leaves announces nothing any more.
            told = [(("told", process), AWAIT)]
            self.step("is about to leave", told, lambda: life.has_told)
            sync.leave()

    def _enter(self, process: str, step: int) -> None:
        """Comes to a collective, and goes on when all have come that live."""
        self.step("enters the step", [(("entered", process), WRITE)])
        self.lives[process].entered = step
        others = [each for each in self.processes if each != process]
        accesses: list[Access] = [(("entered", each), READ) for each in others]
        accesses += [(("alive", each), READ) for each in others]

        def all_came() -> bool:
            return all(self.lives[each].entered >= step or each in self.dead for each in others)

        self.step("waits in the step", accesses, all_came)

    def _notify(self, process: str, notices: tuple[str, ...]) -> None:
        life = self.lives[process]
        assert life.sync is not None
        for value in notices:
            rounds = life.sync._log.round
            announced = life.sync.propose(value)
            (life.won if announced else life.lost).append(value)
            if value != notices[-1]:
                self._await_round(process, rounds + 1)
        self.step("has told all", [(("told", process), WRITE)])
        life.has_told = True

    def _await_round(self, process: str, rounds: int) -> None:
        sync = self.lives[process].sync
        assert sync is not None
        own: list[Access] = [(("log", process), WRITE)]
        self.step("waits for its change", own, lambda: sync._log.round >= rounds)

    # --- what holds

    def judge(self) -> None:
        """Judges an order that is over. Raises Broken."""
        waiting = [
            task.name
            for task in self.unfinished()
            if task.process != CLOCK and "/mail/" not in task.stop.label
        ]
        need(not waiting, "ENDS", f"{', '.join(waiting)} waits, and nothing will come")
        leaves = self.orders.leaves
        living = {p: life for p, life in self.lives.items() if p not in self.dead and life.sync}
        stays = {p: life for p, life in living.items() if p not in leaves}
        with building(self):
            for process, life in stays.items():  # who has left asks about no further step
                assert life.sync is not None
                need(life.sync._log.may_answer(FAR), "ENDS", f"{process} does not answer any more")
                life.answers[FAR] = (life.sync.ask(FAR).value, False)
        late = self.orders.late
        if late in living:
            self._forget_the_past(living[late])
        for step in sorted({step for life in living.values() for step in life.answers}):
            found = {p: life.answers[step] for p, life in living.items() if step in life.answers}
            values = {value for value, _ in found.values()}
            need(len(values) == 1, "ALIKE", f"step {step} is {found}")
            changed = {told for p, (_, told) in found.items() if p != late}
            need(len(changed) <= 1, "ONCE", f"step {step} has changed: {found}")
        if stays:
            self._judge_rounds(stays)
        else:
            need(not self.keys, "TIDY", f"{sorted(self.keys)} stays when all have left")

    def _forget_the_past(self, life: Life) -> None:
        """Leaves out what one that came late said of steps before the first change that it knows:
        rounds before that one hold no more for it.
        """
        assert life.sync is not None
        log = life.sync._log
        if log.round > len(log._changes):
            for step in [step for step in life.answers if step < log._changes[0].step]:
                del life.answers[step]

    def _judge_rounds(self, living: dict[str, Life]) -> None:
        offered = [value for notices in self.orders.notices for value in notices]
        whole = max((life.decided for life in living.values()), key=len)
        for process, life in living.items():
            end = whole[len(whole) - len(life.decided) :]
            is_whole = len(end) == len(whole) or process == self.orders.late
            need(is_whole and end == life.decided, "ONE LOG", f"{process} has {life.decided}")
            need(set(life.won) <= set(whole), "HEARD", f"{life.won} of {process}; {whole} is")
            if life.lost:
                need(bool(whole), "HEARD", f"{process} relies on another's notice; there is none")
        need(set(whole) <= set(offered), "TRUE", f"{whole} is decided, of {offered}")
        need(len(set(whole)) == len(whole), "ONCE", f"{whole} is decided")
        self._judge_keys(len(whole))

    def _judge_keys(self, rounds: int) -> None:
        keys = {key.partition("/0/")[2] for key in self.keys}
        if self.dead or self.orders.late or self.orders.leaves or not rounds:
            return
        number = rounds - 1
        wanted = {"last/decided", f"{number}/change", f"{number}/step"}
        wanted |= {
            f"{number}/{what}/{task}"
            for what in ("mail", "floor")
            for task in range(len(self.processes))
        }
        need(keys == wanted, "TIDY", f"{sorted(keys ^ wanted)} differs from the last round's keys")

    def clear(self) -> None:
        """Forgets its clients and sync points."""
        for life in self.lives.values():
            if life.client is not None:
                forget_group_client(life.client)
            if life.sync is not None:
                current_job().ensure(_OpenSyncPoints).discard(life.sync)


class _AfterOpening:
    """A chooser that lets all who are there look at the keys first, in turn; then a search
    chooses.
    """

    def __init__(self, search: Search) -> None:
        self._search = search
        self._is_open = False

    def choose(self, run: Run, ready: list[Task], *, time_passes: bool) -> Task | None:
        """Returns the next follower that has not come to its mail, or what the search chooses."""
        if not self._is_open:
            for task in ready:
                if task.name.endswith("follower"):
                    task.variant = OK
                    return task
            self._is_open = True
            run.opened_at = run.steps
        return self._search.choose(run, ready, time_passes=time_passes)

    def finished(self, task: Task, accesses: Any) -> None:
        """Has the search note its own steps."""
        if self._is_open:
            self._search.finished(task, accesses)


def search(orders: Orders) -> tuple[Search, Exception | None, str]:
    """Returns the search once it has come to its end, and the first promise that breaks with its
    story. Raises TooLarge.
    """

    worlds: list[World] = []

    def build(chooser: Search) -> Run:
        # One that was cut off is not judged.
        clear()
        worlds.append(World(chooser, orders))
        return worlds[0]

    def clear() -> None:
        while worlds:
            worlds.pop().clear()

    def end(run: Run) -> None:
        assert isinstance(run, World)
        try:
            run.judge()
        except Broken as error:
            run.violate(error)

    found = Search(build, end, most_executions=2_000_000, most_s=orders.most_s)
    try:
        violation = found.run(shortest_within_s=-1)  # the first
        (last,) = worlds
        story = "" if violation is None else "\n".join(last.story[last.opened_at :])
    finally:
        clear()
    return found, violation, story


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """Has sync points be searched; what their followers meet that is no error of a call breaks
    AHEAD.
    """
    real = SyncPoint._note_error

    def note_error(sync: SyncPoint, error: Exception, failures: int) -> None:
        if not isinstance(error, CoordinationError):
            raise Broken("AHEAD", f"process {sync.process_id}: {error}") from error
        real(sync, error, failures)

    logging.disable(logging.WARNING)
    freeze()  # what jax has made is many times more than what an execution makes
    SyncPoint._note_error = note_error  # type: ignore[method-assign]
    try:
        with searched():
            yield
    finally:
        SyncPoint._note_error = real  # type: ignore[method-assign]
        logging.disable(logging.NOTSET)


TWO = (("raised",), ("soon",), ())
ORDERS = (
    Orders("a notice"),
    Orders("a notice, and two steps", steps=(2, 1, 1)),
    Orders("two notices", steps=(0, 0, 1), notices=TWO),
    Orders("a notice and a step that all enter", in_step=True),
    Orders("the announcer dies", steps=(0, 0, 1), dies="a", is_large=True),
    Orders("one that answers dies", steps=(0, 0, 1), dies="c"),
    Orders("one is slow, one dies", steps=(0, 0, 1), slow="b", dies="c", is_large=True),
    Orders("one comes late", steps=(0, 0, 1), late="c"),
    Orders(
        "one comes late, and two notices",
        steps=(0, 0, 1),
        notices=(("x", "y"), (), ()),
        late="c",
        is_large=True,
    ),
    Orders("all leave", notices=((), (), ()), leaves="abc"),
    Orders("one leaves, and a notice", steps=(0, 0, 1), leaves="c"),
    Orders("one leaves in a round", "ab", steps=(0, 0), notices=(("x", "y"), ()), leaves="b"),
    Orders("two leave, and a notice", "ab", steps=(0, 0), leaves="ab"),
    Orders("all leave, and a notice", steps=(0, 0, 0), leaves="abc", is_large=True),
    Orders("two notices, a third dies", steps=(0, 0, 0), notices=TWO, dies="c", is_large=True),
    Orders("two notices, one dies", steps=(1, 0, 0), notices=TWO, dies="b", is_large=True),
)
