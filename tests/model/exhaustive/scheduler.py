"""Runs real code on real threads, of which one goes at a time: each stops before what others could
notice, and a chooser says who goes on.

A *task* is a thread of a *process*. An *access* is a key and a mode. Two operations depend on each
other where they have a key in common whose modes conflict: a reader and a writer, two writers, or
a listing and a change of what is listed. Two changes of different names in one folder do not.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

READ = 0
WRITE = 1
CHANGE = 2  # of one name in a folder: see READ of the folder
AWAIT = 3  # a READ that could not go on before the WRITE that it comes after
CONFLICTS = {
    READ: (WRITE, CHANGE),
    WRITE: (READ, WRITE, CHANGE, AWAIT),
    CHANGE: (READ, WRITE, AWAIT),
    AWAIT: (WRITE, CHANGE),
}
Access: TypeAlias = tuple[Hashable, int]
OK = "ok"
CRASH = "crash"
TIME_PASSES = "time passes"


class Abandoned(BaseException):
    """Ends the code of a task whose execution is over."""


@dataclass(slots=True)
class Stop:
    """Where a task stands: what it is about to do, which keys that touches, and how it may go.

    It is `ready` when the function says so (None: always); until then it can die, where it may.
    Where nobody is ready time passes for one that `can_time_out`.
    """

    label: str
    accesses: Sequence[Access]
    variants: Sequence[str] = (OK,)
    ready: Callable[[], bool] | None = None
    can_time_out: bool = False


class Chooser(Protocol):
    """Says which of the tasks that could go on does, and how."""

    def choose(self, run: Run, ready: list[Task], *, time_passes: bool) -> Task | None:
        """Returns the task whose next step is taken, with its `variant` set; None ends the run."""

    def finished(self, task: Task, accesses: Sequence[Access] | None) -> None:
        """Notes what the last step has touched; None: all that there is."""


class Task:
    """A thread of a process."""

    def __init__(self, run: Run, number: int, process: str, name: str, parent: int) -> None:
        self.run = run
        self.number = number
        self.process = process
        self.name = name
        self.parent = parent  # the step in which it was begun, -1 for none
        self.stop = Stop("begins", ())
        self.variant = OK
        self.is_main = True
        self.budget = 0  # faults that may still hit it
        self.may_crash = False
        self.only_dies = False  # it waits: all that it can do now is die
        self.lock = _thread.allocate_lock()
        self.lock.acquire()
        self.blocked = ""  # the lock that it did not get
        self.failure: BaseException | None = None


_tasks: dict[int, Task] = {}


def current_task() -> Task | None:
    """Returns the task of this thread, None for a thread that is not scheduled."""
    return _tasks.get(_thread.get_ident())


class _Pool:
    """Threads that are used again: to start one takes longer than a step."""

    def __init__(self) -> None:
        self._idle: list[_Worker] = []

    def do(self, work: Callable[[], None]) -> None:
        worker = self._idle.pop() if self._idle else _Worker(self._idle)
        worker.work = work
        worker.lock.release()


class _Worker:
    def __init__(self, idle: list[_Worker]) -> None:
        self._idle = idle
        self.work: Callable[[], None] | None = None
        self.lock = _thread.allocate_lock()
        self.lock.acquire()
        threading.Thread(target=self._serve, daemon=True, name="searched").start()

    def _serve(self) -> None:
        while True:
            self.lock.acquire()
            assert self.work is not None
            work = self.work
            self.work = None
            work()
            del work
            self._idle.append(self)


_pool = _Pool()


class Run:
    """One execution: its tasks, who is dead, and what its chooser has made of it."""

    def __init__(self, chooser: Chooser) -> None:
        self._chooser = chooser
        self.tasks: list[Task] = []
        self.dead: set[str] = set()
        self.is_over = False
        self.violation: Exception | None = None
        self.last: Task | None = None
        self.actual: Sequence[Access] | None = ()
        self.steps = 0
        self._started = 0
        self._ended = _thread.allocate_lock()
        self._unwound = _thread.allocate_lock()
        self._lock = _thread.allocate_lock()

    def add(
        self, process: str, work: Callable[[], object], name: str = "", parent: int = -1
    ) -> Task:
        """Adds a task, which begins when it is chosen."""
        task = Task(self, len(self.tasks), process, name or process, parent)
        self.tasks.append(task)
        self._started += 1

        def live() -> None:
            ident = _thread.get_ident()
            _tasks[ident] = task
            try:
                task.lock.acquire()
                if not self.is_over:
                    work()
            except Abandoned:
                pass
            except BaseException as error:  # a defect of the code or of the program
                task.failure = error
                if self.violation is None:
                    self.violation = error if isinstance(error, Exception) else None
                self.is_over = True
            finally:
                del _tasks[ident]
                self._leave(task)

        _pool.do(live)
        return task

    def _leave(self, task: Task) -> None:
        task.stop = _ENDED
        if not self.is_over:
            self._hand_on(None)
        with self._lock:
            self._started -= 1
            last = self._started == 0
        if self.is_over and task is self.last:
            self._end()
        if last:
            self._unwound.release()

    def execute(self) -> None:
        """Runs until nobody can go on, or the chooser or a violation ends it."""
        self._ended.acquire()
        self._unwound.acquire()
        self._hand_on(None)
        self._ended.acquire()
        self.is_over = True
        for task in self.tasks:  # each ends at its stop, with no further effect
            if task.lock.locked():
                task.lock.release()
        self._unwound.acquire()

    def _end(self) -> None:
        if self._ended.locked():
            self._ended.release()

    def _hand_on(self, me: Task | None) -> None:
        if self.last is not None:
            self._chooser.finished(self.last, self.actual)
        chosen = self._choose()
        self.actual = ()
        if chosen is None:
            self.is_over = True
            self._end()
        else:
            self.steps += 1
            self.last = chosen
            if chosen is me:
                return
            chosen.lock.release()
        if me is not None:
            me.lock.acquire()

    def _choose(self) -> Task | None:
        if self.is_over:
            return None
        alive = self.unfinished()
        ready = [task for task in alive if task.stop.ready is None or task.stop.ready()]
        time_passes = not ready
        if time_passes:
            ready = [task for task in alive if task.stop.can_time_out]
        if not ready:
            return None
        for task in alive:
            task.only_dies = task not in ready
        ready += [task for task in alive if task.only_dies and CRASH in task.stop.variants]
        try:
            return self._chooser.choose(self, ready, time_passes=time_passes)
        except Exception as error:
            self.violate(error)
            return None

    def stop(self, task: Task, stop: Stop) -> str:
        """Lets others go first, if the chooser says so; returns how this step goes."""
        if self.is_over:
            raise Abandoned
        accesses = stop.accesses
        alive: Access = (("alive", task.process), WRITE)
        if CRASH in stop.variants:
            stop.accesses = (*accesses, alive)
        task.stop = stop
        self._hand_on(task)
        if self.is_over:
            raise Abandoned
        self.actual = accesses
        if task.variant == CRASH:
            self.dead.add(task.process)
            self.actual = (alive,)
            self.crashed(task.process)
            self._hand_on(task)
            raise Abandoned
        return task.variant

    def crashed(self, process: str) -> None:
        """Is called when a process dies: what the kernel does for it then."""

    def goes_first(self, task: Task) -> bool:
        """Says whether a task takes the first step of all, alone."""
        return False

    def spawn(self, process: str, work: Callable[[], object], name: str) -> Task:
        """Adds a task that begins after the present step of this one."""
        return self.add(process, work, name, parent=self.steps - 1)

    def unfinished(self) -> list[Task]:
        """Returns the tasks of processes that live, and have not come to their end."""
        return [
            task for task in self.tasks if task.stop is not _ENDED and task.process not in self.dead
        ]

    def violate(self, error: Exception) -> None:
        """Ends the run: an invariant is broken."""
        if self.violation is None:
            self.violation = error
        self.is_over = True


_ENDED = Stop("ended", ())


def note(accesses: Sequence[Access]) -> None:
    """Says what the present step has really touched, where that is less than was announced."""
    task = current_task()
    if task is not None:
        task.run.actual = accesses


def started_by(run: Run) -> Any:
    """Returns what stands for `_thread.start_new_thread` while a run goes on."""

    def start(work: Callable[..., object], *arguments: object) -> None:
        task = current_task()
        if task is None:
            raise RuntimeError("a thread was started outside of the search")
        name = f"{task.process}/{len(run.tasks)}"
        run.spawn(task.process, lambda: work(*arguments), name).is_main = False

    return start
