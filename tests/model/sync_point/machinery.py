"""What the sync point stands on in a search: keys, threads, locks and a clock, each use of which is
a step of the scheduler's.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from holdfast.coordination import CoordinationError, ProcessLost
from holdfast.coordination.deadline import Deadline
from holdfast.multihost.preemption import step_agreement
from holdfast.multihost.preemption.step_agreement_core import StepLog
from tests.model.exhaustive.scheduler import (
    AWAIT,
    CHANGE,
    OK,
    READ,
    WRITE,
    Access,
    Chooser,
    Run,
    Stop,
    Task,
    current_task,
)
from tests.model.promise import Broken

LATE = "its time is over"  # for this process alone
CLOCK = "the clock"
MOST_STEPS = 1_000


class Site(Run):
    """One execution: the coordinator's keys, and the time, which passes where nobody can go on."""

    def __init__(self, chooser: Chooser, *, dies: str, closes: str) -> None:
        super().__init__(chooser)
        self.keys: dict[str, bytes] = {}
        self.written: dict[str, int] = {}  # how often each has been, since it is there
        self.now_s = 0.0
        self.late_s: dict[str, float] = {}  # by process, how much more time has passed for it
        self.dies = dies  # the process that does, if any
        self.closes = closes  # the processes that close their sync points
        self.builder = ""  # whose sync point is made, before all steps
        self.absent: set[str] = set()  # processes that have not come, and count as lost
        self.story: list[str] = []
        self.opened_at = 0  # the steps that come before all that is searched
        self._deadlines: dict[int, float] = {}
        self._perhaps: dict[int, Sequence[Access]] = {}  # by task, of its present step

    def step(
        self,
        label: str,
        accesses: Sequence[Access],
        ready: Callable[[], bool] | None = None,
        *,
        timeout_s: float = math.inf,
        variants: Sequence[str] = (),
        perhaps: Sequence[Access] = (),
    ) -> str:
        """Stops before a step, until it is ready or its time is over; returns how it goes.

        What it touches `perhaps` counts once it does: see `touch`.
        """
        task = current_task()
        if task is None:
            return OK
        if task.process in self.closes:
            # Whether it is closed is looked at between steps, without one.
            perhaps = [*perhaps, (("closed", task.process), READ)]
            if task.name.endswith("waker"):  # so is the round here
                perhaps += own("round", READ)
        chosen = [OK]
        if task.budget:
            chosen += variants
        if task.process == self.dies and any(mode != READ for _, mode in accesses):
            # What others could notice does not happen after its death. Whether it still looked at
            # something nobody knows.
            accesses = [*accesses, (("alive", task.process), READ)]
        end_s = self.now_s + timeout_s

        def is_ready() -> bool:
            return ready is None or ready() or self.now_s >= end_s

        if end_s < math.inf:
            self._deadlines[task.number] = end_s
        stop = Stop(label, [*accesses, *perhaps], tuple(chosen), is_ready)
        variant = self.stop(task, stop)
        self.actual = accesses
        self._perhaps[task.number] = perhaps
        self._deadlines.pop(task.number, None)
        self.story.append(f"{task.name}: {label}" + (f": {variant}" if variant != OK else ""))
        if variant != OK:
            task.budget -= 1
        if self.steps > MOST_STEPS:
            self.violate(Broken("ENDS", f"{task.name} goes on and on: {label}"))
        return variant

    def touch(self, task: Task, key: Hashable, mode: int) -> None:
        """Notes what the present step touches, where it said that it might."""
        if any(key == known for known, _ in self._perhaps.get(task.number, ())):
            self.actual = [*(self.actual or ()), (key, mode)]

    def spawn(self, process: str, work: Callable[[], object], name: str) -> Task:
        """Adds a task that begins after the present step, of those that are searched."""
        return self.add(process, work, name, parent=self.steps - 1 - self.opened_at)

    def end(self) -> None:
        """Ends one process, some time."""
        self.step(f"{self.dies} dies", [(("alive", self.dies), WRITE)])
        self.dead.add(self.dies)

    def keep_time(self) -> None:
        """Has time pass, as long as somebody waits for it and nobody can go on without it."""
        while True:
            self.stop_clock()

    def stop_clock(self) -> None:
        """Waits until nothing else can happen, and turns the clock on."""
        task = current_task()
        assert task is not None
        self.stop(task, Stop("time passes", (), ready=self._can_pass))
        self.actual = None  # nobody could go on: it comes after all before it, before all after it
        self.now_s = min(self._due())
        self.story.append(f"it is {self.now_s:g} s")

    def _can_pass(self) -> bool:
        others = [task for task in self.unfinished() if task.process != CLOCK]
        if any(task.stop.ready is None or task.stop.ready() for task in others):
            return False
        return bool(self._due())

    def _due(self) -> list[float]:
        living = {task.number for task in self.unfinished()}
        return [end_s for number, end_s in self._deadlines.items() if number in living]

    def lost(self, who: Sequence[str]) -> list[str]:
        """Returns those who are dead, or have not come."""
        self.step("asks who lives", [(("alive", each), READ) for each in who])
        return [each for each in who if each in self.dead or each in self.absent]


def _folders(key: str) -> list[str]:
    parts = key.split("/")
    return ["/".join(parts[:length]) for length in range(1, len(parts))]


class ModelClient:
    """One process's client, with jaxlib's names; like ours it hears of a death."""

    def __init__(self, site: Site, processes: Sequence[str]) -> None:
        self._site = site
        self._processes = processes  # by task

    def watch_processes(self) -> None:
        """Says, by being there, that this client hears of other processes."""

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        verb = "sets" if allow_overwrite else "inserts"
        self._site.step(f"{verb} {_short(key)}", _changes([key]))
        if key in self._site.keys and not allow_overwrite:
            self._site.actual = _looks(key)
            raise CoordinationError(f"{key!r} exists", code="ALREADY_EXISTS")
        self._set(key, value)

    def key_value_set_many_bytes(self, values: dict[str, bytes]) -> None:
        names = ", ".join(map(_short, values))
        self._site.step(f"sets {names}", _changes(list(values)))
        for key, value in values.items():
            self._set(key, value)

    def _set(self, key: str, value: bytes) -> None:
        is_new = key not in self._site.keys
        self._site.written[key] = 1 if is_new else self._site.written[key] + 1
        self._site.keys[key] = value

    def blocking_key_value_get_bytes(
        self, key: str, timeout_in_ms: int, depends_on: Sequence[int] = ()
    ) -> bytes:
        site = self._site
        sources = [self._processes[task] for task in depends_on]
        task = current_task()
        is_mail = "/mail/" in key
        # Somebody who is stopped for a while finds no time left, whatever there is by then.
        if task is not None and task.budget and not is_mail:
            variant = site.step(f"begins to wait for {_short(key)}", (), variants=(LATE,))
            if variant == LATE:
                late_s = site.late_s.get(task.process, 0.0)
                site.late_s[task.process] = late_s + timeout_in_ms / 1e3
                raise CoordinationError(f"{key!r} was not set", code="DEADLINE_EXCEEDED")
        # An idle sync point waits for mail for good.
        timeout_s = math.inf if is_mail else timeout_in_ms / 1e3
        end_s = site.now_s + timeout_s
        site.step(
            f"waits for {_short(key)}",
            _looks(key) + [(("alive", each), READ) for each in sources],
            lambda: key in site.keys or not site.dead.isdisjoint(sources),
            timeout_s=timeout_s,
        )
        died: list[Access] = [(("alive", each), AWAIT) for each in sources if each in site.dead]
        if key in site.keys:
            # Unless something else would have ended the wait.
            is_awaited = not died and site.now_s < end_s and site.written[key] == 1
            site.actual = _looks(key, AWAIT if is_awaited else READ)
            return site.keys[key]
        if died:
            site.actual = _looks(key) + died
            raise ProcessLost(f"{key!r} will not come")
        raise CoordinationError(f"{key!r} was not set", code="DEADLINE_EXCEEDED")

    def key_value_dir_get_bytes(self, key: str) -> list[tuple[str, bytes]]:
        self._site.step(f"lists {_short(key)}", _looks(key))
        return [(each, v) for each, v in self._site.keys.items() if each.startswith(f"{key}/")]

    def key_value_delete(self, key: str) -> None:
        accesses = [(key, WRITE), (("below", key), WRITE), *_changes([key])[1:]]
        self._site.step(f"deletes {_short(key)}", accesses)
        for each in [each for each in self._site.keys if f"{each}/".startswith(f"{key}/")]:
            del self._site.keys[each]

    def key_value_increment(self, key: str, increment: int) -> int:
        site = self._site
        site.step(f"increments {_short(key)}", _changes([key]))
        number = int(site.keys.get(key, b"0")) + increment
        if number < len(self._processes):  # who is not the last does not ask which it was
            site.actual = [
                (each, CHANGE if each == key else mode) for each, mode in site.actual or ()
            ]
        self._set(key, b"%d" % number)
        return number


def _changes(keys: Sequence[str]) -> list[Access]:
    accesses: dict[Access, None] = dict.fromkeys((key, WRITE) for key in keys)
    for key in keys:
        for folder in _folders(key):
            # Nobody looks for mail in a listing.
            is_mail = "/mail/" in key
            accesses[(("below", folder), READ) if is_mail else (folder, CHANGE)] = None
    return list(accesses)


def _looks(key: str, mode: int = READ) -> list[Access]:
    return [(key, mode), *((("below", each), READ) for each in _folders(key))]


def _short(key: str) -> str:
    return key.partition("/0/")[2] or key


# --- what stands for `threading` and `time` in the sync point


_builds: list[Site] = []


def _site() -> Site:
    task = current_task()
    site = _builds[-1] if task is None else task.run
    assert isinstance(site, Site)
    return site


@contextlib.contextmanager
def building(site: Site) -> Iterator[None]:
    """Makes sync points before all steps."""
    _builds.append(site)
    try:
        yield
    finally:
        _builds.pop()


def own(what: str, mode: int) -> list[Access]:
    """Returns the access to what the threads of this thread's process share."""
    task = current_task()
    return [] if task is None else [((what, task.process), mode)]


def touch(what: str, mode: int) -> None:
    """Notes that this thread's step touches what the threads of its process share."""
    task = current_task()
    if task is not None:
        _site().touch(task, (what, task.process), mode)


class ModelLog(StepLog):
    """A log that notes who looks at it, and who changes it; its round apart from the rest."""

    def __getattribute__(self, name: str) -> Any:
        touch(_part(name), READ)
        return super().__getattribute__(name)

    def __setattr__(self, name: str, value: object) -> None:
        # `_fired` grows where another attribute changes too.
        if vars(self).get(name, self) != value:
            touch(_part(name), WRITE)
        super().__setattr__(name, value)

    def decide(self, step: int, value: str) -> None:
        touch("round", WRITE)
        super().decide(step, value)


def _part(name: str) -> str:
    return "round" if name in ("_changes", "_first") else "log"


class ModelCondition:
    """A lock that nobody holds across a step; to take it is a step."""

    def __enter__(self) -> None:
        if current_task() is not None:
            _site().step("looks at its log", (), perhaps=own("log", WRITE) + own("round", WRITE))

    def __exit__(self, *error: object) -> None:
        pass

    def wait_for(self, happened: Callable[[], object], timeout_s: float) -> bool:
        site = _site()
        looks = own("log", READ) + own("closed", READ)
        site.step(
            "waits for the agreement",
            looks,
            lambda: bool(happened()),
            timeout_s=timeout_s,
            perhaps=own("log", WRITE) + own("round", WRITE),
        )
        return bool(happened())

    def notify_all(self) -> None:
        """Has those who wait look again, which they do at each step."""


class ModelEvent:
    """Whether a sync point is closed."""

    def __init__(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        touch("closed", READ)
        return self._is_set

    def set(self) -> None:
        _site().step("closes", own("closed", WRITE))
        self._is_set = True

    def wait(self, timeout_s: float) -> bool:
        site = _site()
        site.step("pauses", own("closed", READ), lambda: self._is_set, timeout_s=timeout_s)
        return self._is_set


class ModelThread:
    """A task of the process that makes it."""

    def __init__(self, name: str, work: Callable[..., object], *given: object) -> None:
        self._target = work
        self._args = given
        self._name = "follower" if "sync" in name else "waker"
        self._has_ended = False
        self._start()

    def _start(self) -> None:
        task = current_task()
        site = _site()
        process = site.builder if task is None else task.process
        self._key = ("thread", process, self._name)

        def work() -> None:
            self._target(*self._args)
            site.step("ends", [(self._key, WRITE)])
            self._has_ended = True

        name = f"{process} {self._name}"
        if task is None:
            site.add(process, work, name)
        else:
            site.spawn(process, work, name)

    def is_alive(self) -> bool:
        _site().step(f"looks at its {self._name}", [(self._key, READ)])
        return not self._has_ended

    def join(self, timeout_s: float) -> None:
        site = _site()
        end_s = site.now_s + timeout_s
        label = f"waits for its {self._name}"
        site.step(label, [(self._key, READ)], lambda: self._has_ended, timeout_s=timeout_s)
        if site.now_s < end_s:
            site.actual = [(self._key, AWAIT)]


def _monotonic() -> float:
    task = current_task()
    site = _site()
    return site.now_s + (0.0 if task is None else site.late_s.get(task.process, 0.0))


class _Whole(Deadline):
    """A budget of which no time has passed by the clock of the machine."""

    def remaining_ms(self) -> int:
        return int(self.timeout_s * 1000)


@contextlib.contextmanager
def searched() -> Iterator[None]:
    """Has the sync point stand on what is here."""
    names = ("threading", "start_daemon", "time", "Deadline", "StepLog")
    real = {name: getattr(step_agreement, name) for name in names}
    step_agreement.threading = SimpleNamespace(  # type: ignore[assignment]
        Condition=ModelCondition,
        Event=ModelEvent,
        current_thread=lambda: None,
    )
    step_agreement.start_daemon = ModelThread  # type: ignore[assignment]
    step_agreement.time = SimpleNamespace(monotonic=_monotonic)  # type: ignore[assignment]
    step_agreement.Deadline = _Whole  # type: ignore[misc]
    step_agreement.StepLog = ModelLog  # type: ignore[misc]
    try:
        yield
    finally:
        for name, each in real.items():
            setattr(step_agreement, name, each)
