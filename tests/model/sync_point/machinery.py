"""What the sync point stands on in a search: keys, threads, locks and a clock, each use of which is
a step of the scheduler's.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from holdfast.coordination import CoordinationError, ProcessLost
from holdfast.coordination.deadline import Deadline
from holdfast.multihost.preemption import step_agreement
from tests.model.exhaustive.scheduler import (
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
_TIME = "the time"


class Site(Run):
    """One execution: the coordinator's keys, and the time, which passes where nobody can go on."""

    def __init__(self, chooser: Chooser, *, dies: str, closes: str) -> None:
        super().__init__(chooser)
        self.keys: dict[str, bytes] = {}
        self.now_s = 0.0
        self.late_s: dict[str, float] = {}  # by process, how much more time has passed for it
        self.dies = dies  # the process that does, if any
        self.closes = closes  # the processes that close their sync points
        self.builder = ""  # whose sync point is made, before all steps
        self.absent: set[str] = set()  # processes that have not come, and count as lost
        self.story: list[str] = []
        self.opened_at = 0  # the steps that come before all that is searched
        self._deadlines: dict[int, float] = {}

    def step(
        self,
        label: str,
        accesses: Sequence[Access],
        ready: Callable[[], bool] | None = None,
        *,
        timeout_s: float = math.inf,
        variants: Sequence[str] = (),
    ) -> str:
        """Stops before a step, until it is ready or its time is over; returns how it goes."""
        task = current_task()
        if task is None:
            return OK
        if task.process in self.closes:
            # Whether it is closed is looked at between steps, without one.
            accesses = [*accesses, (("closed", task.process), READ)]
        chosen = [OK]
        if task.budget:
            chosen += variants
        if task.process == self.dies and any(key not in own_log() for key in accesses):
            # What others could notice does not happen after its death.
            accesses = [*accesses, (("alive", task.process), READ)]
        # Time passes where nobody can go on: it comes after all before it, and before all after it.
        accesses = [*accesses, (_TIME, READ)]
        end_s = self.now_s + timeout_s

        def is_ready() -> bool:
            return ready is None or ready() or self.now_s >= end_s

        if end_s < math.inf:
            self._deadlines[task.number] = end_s
        variant = self.stop(task, Stop(label, accesses, tuple(chosen), is_ready))
        self._deadlines.pop(task.number, None)
        self.story.append(f"{task.name}: {label}" + (f": {variant}" if variant != OK else ""))
        if variant != OK:
            task.budget -= 1
        if self.steps > MOST_STEPS:
            self.violate(Broken("ENDS", f"{task.name} goes on and on: {label}"))
        return variant

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
        self.stop(task, Stop("time passes", ((_TIME, WRITE),), ready=self._can_pass))
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
            raise CoordinationError(f"{key!r} exists", code="ALREADY_EXISTS")
        self._site.keys[key] = value

    def key_value_set_many_bytes(self, values: dict[str, bytes]) -> None:
        names = ", ".join(map(_short, values))
        self._site.step(f"sets {names}", _changes(list(values)))
        self._site.keys.update(values)

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
        accesses: list[Access] = [(key, READ), *((("below", each), READ) for each in _folders(key))]
        accesses += [(("alive", each), READ) for each in sources]
        site.step(
            f"waits for {_short(key)}",
            accesses,
            lambda: key in site.keys or not site.dead.isdisjoint(sources),
            # An idle sync point waits for mail for good.
            timeout_s=math.inf if is_mail else timeout_in_ms / 1e3,
        )
        if key in site.keys:
            return site.keys[key]
        if not site.dead.isdisjoint(sources):
            raise ProcessLost(f"{key!r} will not come")
        raise CoordinationError(f"{key!r} was not set", code="DEADLINE_EXCEEDED")

    def key_value_dir_get_bytes(self, key: str) -> list[tuple[str, bytes]]:
        accesses = [(key, READ), *((("below", each), READ) for each in _folders(key))]
        self._site.step(f"lists {_short(key)}", accesses)
        return [(each, v) for each, v in self._site.keys.items() if each.startswith(f"{key}/")]

    def key_value_delete(self, key: str) -> None:
        accesses = [(key, WRITE), (("below", key), WRITE), *_changes([key])[1:]]
        self._site.step(f"deletes {_short(key)}", accesses)
        for each in [each for each in self._site.keys if f"{each}/".startswith(f"{key}/")]:
            del self._site.keys[each]

    def key_value_increment(self, key: str, increment: int) -> int:
        self._site.step(f"increments {_short(key)}", _changes([key]))
        number = int(self._site.keys.get(key, b"0")) + increment
        self._site.keys[key] = b"%d" % number
        return number


def _changes(keys: Sequence[str]) -> list[Access]:
    accesses: list[Access] = [(key, WRITE) for key in keys]
    # Nobody looks for mail in a listing.
    folders = {each for key in keys if "/mail/" not in key for each in _folders(key)}
    return accesses + [(each, CHANGE) for each in sorted(folders)]


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


def own_log() -> list[Access]:
    """Returns what all threads of this thread's process share."""
    task = current_task()
    return [] if task is None else [(("log", task.process), WRITE)]


class ModelCondition:
    """A lock that nobody holds across a step; to take it is a step."""

    def __enter__(self) -> None:
        if current_task() is not None:
            _site().step("looks at its log", own_log())

    def __exit__(self, *error: object) -> None:
        pass

    def wait_for(self, happened: Callable[[], object], timeout_s: float) -> bool:
        site = _site()
        label = "waits for the agreement"
        site.step(label, own_log(), lambda: bool(happened()), timeout_s=timeout_s)
        return bool(happened())

    def notify_all(self) -> None:
        """Has those who wait look again, which they do at each step."""


class ModelEvent:
    """Whether a sync point is closed."""

    def __init__(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        task = current_task()
        _site().step("closes", [] if task is None else [(("closed", task.process), WRITE)])
        self._is_set = True

    def wait(self, timeout_s: float) -> bool:
        site = _site()
        site.step("pauses", (), lambda: self._is_set, timeout_s=timeout_s)
        return self._is_set


class ModelThread:
    """A task of the process that makes it."""

    def __init__(
        self, *, target: Callable[..., object], args: tuple[Any, ...], name: str, daemon: bool
    ) -> None:
        self._target = target
        self._args = args
        self._name = "follower" if "sync" in name else "waker"
        self._has_ended = False

    def start(self) -> None:
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
        _site().step(
            f"waits for its {self._name}",
            [(self._key, READ)],
            lambda: self._has_ended,
            timeout_s=timeout_s,
        )


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
    real = step_agreement.threading, step_agreement.time, step_agreement.Deadline
    step_agreement.threading = SimpleNamespace(  # type: ignore[assignment]
        Condition=ModelCondition,
        Event=ModelEvent,
        Thread=ModelThread,
        current_thread=lambda: None,
    )
    step_agreement.time = SimpleNamespace(monotonic=_monotonic)  # type: ignore[assignment]
    step_agreement.Deadline = _Whole  # type: ignore[misc]
    try:
        yield
    finally:
        step_agreement.threading, step_agreement.time, step_agreement.Deadline = real
