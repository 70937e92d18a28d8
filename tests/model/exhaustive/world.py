"""What surrounds the code of one execution: its judge, its faults, its clock and its random names.

All that would differ between two executions of the same choices is made alike: names that are drawn
count up by process, time stands still but for pauses.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import secrets
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.checkpoint.saving.commit import EffectPerformer
from holdfast.checkpoint.steps import background
from holdfast.checkpoint.storage import local, threads
from tests.model.promise import Broken

from . import scheduler
from .rules import Effect, Judge
from .scheduler import CRASH, OK, READ, Access, Chooser, Run, Stop, Task, current_task

_time = time.time
_monotonic = time.monotonic
_sleep = time.sleep
_token_hex = secrets.token_hex
_uuid4 = uuid.uuid4
NOW_S = float(int(_time()))


@dataclass(frozen=True)
class Faults:
    """What may happen to one process: so many errors of these kinds, and a death at any step. With
    `always` the first calls that can fail do.
    """

    kinds: frozenset[str] = frozenset()
    most: int = 0
    crashes: bool = False
    always: bool = False
    # only calls whose label holds one of these; none: all
    where: Sequence[str] = ()

    def __str__(self) -> str:
        told = ["dies at any step"] if self.crashes else []
        if self.most:
            at = f" of {', '.join(each.strip() for each in self.where)}" if self.where else ""
            told.append(f"{self.most} call{at} fails: {', '.join(sorted(self.kinds))}")
        return "; ".join(told)


@dataclass(frozen=True)
class Line:
    """One step of the story of an execution."""

    task: str
    label: str
    variant: str
    effects: list[Effect] = field(default_factory=list)


class World:
    """One execution and all that its processes share."""

    def __init__(
        self,
        chooser: Chooser,
        faults: Mapping[str, Faults] | None = None,
        *,
        judge: Judge | None = None,
    ) -> None:
        self.run = _SearchedRun(chooser, self)
        self.judge = judge or Judge()
        self.judges = True
        self.faults = faults or {}
        self.story: list[Line] = []
        self.numbers: dict[str, int] = {}
        self.kernels = 0
        self.behalf: dict[str, str] = {}  # for whom the kernel or the store does something
        self.is_serial = False
        self.now_s = NOW_S
        self.counts: dict[str, int] = {}
        self.servers: dict[str, Any] = {}  # of hosts, by process
        self.losses: dict[str, Callable[[], None]] = {}  # what goes with a process that dies
        # Who goes first, alone, until it comes to a step whose label has this text.
        self.first: tuple[str, str] = ("", "")
        # Whose failed saves delete nothing: a bound of what is searched, the sweep is left.
        self.leaves_files: set[str] = set()
        self.last_checks: list[Callable[[], None]] = []

    # --- tasks

    def add(self, process: str, work: Callable[[], object]) -> None:
        """Adds a process, which begins when it is chosen."""
        task = self.run.add(process, work)
        faults = self.faults.get(process)
        if faults is not None:
            task.budget = faults.most
            task.may_crash = faults.crashes

    def kernel(self, name: str, work: Callable[[], None]) -> None:
        """Adds what goes on without any process: it happens some time."""
        self.kernels += 1
        who = self.who()
        task = self.run.spawn(f"{name} {self.kernels}", work, f"{name} {self.kernels}")
        self.behalf[task.process] = who

    def serially(self, process: str, work: Callable[[], Any]) -> Any:
        """Does what comes before all that is searched, in the calling thread."""
        task = Task(self.run, -1, process, process, -1)
        ident = _thread.get_ident()
        scheduler._tasks[ident] = task
        self.is_serial = True
        try:
            return work()
        finally:
            self.is_serial = False
            del scheduler._tasks[ident]

    def goes_first(self, task: Task) -> bool:
        """Says whether a task takes the first step of all, alone."""
        return task.process == self.first[0]

    def together(self, works: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
        """Does what processes have done together before all that is searched: each goes on as far
        as it comes without the others. Returns what each has returned.
        """
        found: dict[str, Any] = {}

        def do(process: str, work: Callable[[], Any]) -> None:
            found[process] = work()

        searched = self.run
        self.run = _SearchedRun(InTurn(), self)
        self.run.disk = searched.disk
        for process, work in works.items():
            self.run.add(process, functools.partial(do, process, work))
        self.run.execute()
        violation = self.run.violation
        self.run = searched
        self.story.clear()
        if violation is not None:
            raise violation
        return found

    # --- steps and effects

    def step(
        self,
        task: Task,
        label: str,
        accesses: Sequence[Access],
        faults: Sequence[str],
        *,
        ready: Callable[[], bool] | None = None,
        can_time_out: bool = False,
    ) -> str:
        """Stops before a step; returns how it goes."""
        if self.is_serial:
            return OK
        if task.process == self.first[0]:
            if self.first[1] not in label:
                self.story.append(Line(task.name, label, OK))
                return OK
            # All this was one step, which comes before all others: see `first`.
            self.first = ("", "")
            self.run.actual = None
        variants: list[str] = [OK]
        if task.budget:
            policy = self.faults[task.process]
            if not policy.where or any(part in label for part in policy.where):
                errors = [each for each in faults if each in policy.kinds]
                variants = errors if policy.always and errors else [OK, *errors]
        if task.may_crash and not self._is_lost_with(task.process, accesses):
            variants.append(CRASH)
        stop = Stop(label, accesses, tuple(variants), ready, can_time_out)
        variant = self.run.stop(task, stop)
        self.story.append(Line(task.name, label, variant))
        if variant != OK:
            task.budget -= 1
            self.count(variant)
        return variant

    def _is_lost_with(self, process: str, accesses: Sequence[Access]) -> bool:
        """Says whether a step touches only what goes with its process. Where among such steps the
        process dies nobody can tell: it may as well die before its next step that others notice.
        """
        return process in self.losses and all(
            isinstance(key, str) and f"{key}/".startswith(f"{process}/") for key, _ in accesses
        )

    def effect(self, effect: Effect) -> None:
        """Has the judge hear of an effect; a broken invariant ends the execution."""
        if self.run.is_over or not self.judges:
            return
        if self.story:
            self.story[-1].effects.append(effect)
        try:
            self.judge.take(effect)
        except Broken as error:
            self.run.violate(error)

    def who(self) -> str:
        """Returns the process of this thread, or whose call it ends."""
        task = current_task()
        assert task is not None
        return self.behalf.get(task.process, task.process)

    def count(self, what: str) -> None:
        """Counts what has happened."""
        self.counts[what] = self.counts.get(what, 0) + 1

    @contextlib.contextmanager
    def unobserved(self) -> Iterator[None]:
        """Lets calls pass, within one step."""
        disk = self.run.disk
        self.run.disk = None
        try:
            yield
        finally:
            self.run.disk = disk


class InTurn:
    """A chooser that lets each task go on as far as it comes."""

    def choose(self, run: Run, ready: list[Task], *, time_passes: bool) -> Task | None:
        """Returns the task that went last, else the first."""
        task = run.last if run.last in ready else ready[0]
        assert task is not None
        task.variant = task.stop.variants[0]
        return task

    def finished(self, task: Task, accesses: Sequence[Access] | None) -> None:
        """Takes no note."""


class _SearchedRun(Run):
    """A run that knows its world."""

    def __init__(self, chooser: Chooser, world: World) -> None:
        super().__init__(chooser)
        self.world = world
        self.disk: Any = None

    def goes_first(self, task: Task) -> bool:
        return self.world.goes_first(task)

    def crashed(self, process: str) -> None:
        """Lets the kernel free the locks of a process that died, some time."""
        world = self.world
        task = current_task()
        assert task is not None
        world.story.append(Line(task.name, f"dies before: {task.stop.label}", CRASH))
        if process in world.losses:
            with world.unobserved():
                world.losses[process]()
        disk = self.disk
        if disk is None:
            return
        held = {file: name for file, (owner, name) in disk.locks.items() if owner == process}
        if not held:
            return

        def free() -> None:
            own = current_task()
            assert own is not None
            accesses = [(("lock", name), scheduler.WRITE) for name in held.values()]
            world.step(own, f"frees the locks of {process}", accesses, ())
            disk.free(held)

        world.kernel("the kernel", free)


# --- what would differ from one execution to the next


def letters(process: str, count: int, number: int) -> str:
    """Returns so many digits, the first two of which tell the process by its letter."""
    return f"{ord(process[0]) - 96:02x}{number:0{count - 2}x}"


def _own_hex(nbytes: int = 32) -> str:
    task = current_task()
    if task is None:
        return _token_hex(nbytes)
    numbers = task.run.world.numbers  # type: ignore[attr-defined]
    numbers[task.process] = numbers.get(task.process, 0) + 1
    return letters(task.process, 2 * nbytes, numbers[task.process])


class _Uuid:
    def __init__(self, text: str) -> None:
        self.hex = text


def _own_uuid() -> Any:
    return _uuid4() if current_task() is None else _Uuid(_own_hex(16))


def _own_time() -> float:
    task = current_task()
    return _time() if task is None else task.run.world.now_s  # type: ignore[attr-defined]


def _own_monotonic() -> float:
    task = current_task()
    return _monotonic() if task is None else task.run.world.now_s - NOW_S + 1000.0  # type: ignore[attr-defined]


def _own_sleep(seconds: float) -> None:
    task = current_task()
    if task is None:
        _sleep(seconds)
        return
    world: World = task.run.world  # type: ignore[attr-defined]
    name = task.blocked
    task.blocked = ""
    if not name:
        return  # a name went between two calls: it tries anew
    accesses = ((("lock", name), READ),)
    disk = task.run.disk  # type: ignore[attr-defined]
    label = f"pauses until {disk.shown(name)} is free"
    world.step(task, label, accesses, (), ready=lambda: not disk.is_locked(name))


def _beside(work: Callable[..., object], *arguments: object) -> None:
    if current_task() is None:
        _do_beside(work, *arguments)
        return
    work(*arguments)


def _begin(work: Callable[..., object], *arguments: object) -> None:
    is_side_by_side = work.__qualname__.startswith(threads.run_side_by_side.__name__)
    if current_task() is None or not is_side_by_side:
        _begin_thread(work, *arguments)
        return
    work(*arguments)


def _start(work: Callable[..., object], *arguments: object) -> None:
    task = current_task()
    if task is None:
        _start_thread(work, *arguments)
        return
    world: World = task.run.world  # type: ignore[attr-defined]
    if world.is_serial:
        thread = threading.current_thread()
        name = thread.name
        try:
            work(*arguments)
        finally:
            thread.name = name  # it may be that of all tests
        return
    name = f"{task.process} in the background"
    begun = task.run.spawn(task.process, lambda: work(*arguments), name)
    begun.is_main = False
    begun.may_crash = False


def _own_delete(performer: EffectPerformer) -> None:
    task = current_task()
    world: World | None = None if task is None else task.run.world  # type: ignore[attr-defined]
    if task is None or world is None or task.process not in world.leaves_files:
        _delete_own(performer)


_delete_own = EffectPerformer.delete_own
_do_beside = threads.do_beside
_begin_thread = threads._start
_start_thread = threads.start_thread


@contextlib.contextmanager
def repeatable() -> Iterator[None]:
    """Has tasks draw names and read clocks so that an execution can be repeated."""
    with contextlib.ExitStack() as undo:

        def replace(owner: Any, name: str, value: Any) -> None:
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        replace(time, "time", _own_time)
        replace(time, "monotonic", _own_monotonic)
        replace(time, "sleep", _own_sleep)
        replace(secrets, "token_hex", _own_hex)
        replace(uuid, "uuid4", _own_uuid)
        replace(socket, "gethostname", lambda: "host")
        replace(threads, "do_beside", _beside)
        replace(threads, "_start", _begin)
        replace(background, "start_thread", _start)
        # What is tried 16 times because a folder may go again is tried twice here.
        replace(local, "FOLDER_TRIES", 2)
        replace(EffectPerformer, "delete_own", _own_delete)
        yield
