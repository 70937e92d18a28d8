"""SyncPoint: carries the log of `_sync_point.py` between processes, over a coordination client's keys.

Keys of round r, below `holdfast/sync/<name>/<n>/<r>/`: `change` (the news and who announced it, written once), `step` (written once), and,
until the next round is decided, `work/mail/<task>` (the change again, one for each process) and `work/floor/<task>`. A process waits for
its own mail, so that an idle sync point costs nothing and its end can wake it. The announcer sends the mail, gathers the floors and writes
the step; where it has died on the way, whoever has heard takes over after TAKE_OVER_S.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

from holdfast.coordination import BarrierTimeout, CoordinationError, CoordinatorLost

from ..group.group import ClusterGroup, Group
from ..group.group_client import Client, Deadline, GroupClient, channel_of
from ..liveness.health import lost_tasks
from .step_agreement_core import Answer, StepLog, agreed_step

_log = logging.getLogger(__name__)

# How long the follower's blocking get lasts before it asks again.
_PIECE_S = 600.0
# After this time without a decision a process does the announcer's work itself: it may be dead.
TAKE_OVER_S = 3.0
_BACK_OFF_S = (0.1, 0.2, 0.5, 1.0, 2.0)


class SyncPoint:
    """Spreads news so that it holds from the same step on in every process. Thread-safe; a context manager.

    Every process of `tasks` (task ids; its own is `process_id`) makes one under the same name, the nth in one process meeting the nth in
    every other. `propose()` announces news, from any thread of any process; `ask(step)` says what holds at a
    step, and `reached(step)` whether something new holds since the step asked about before. An answer is local and takes a few
    microseconds, except between an announcement and its decision, two round trips later, when it waits for the other processes' background
    threads.

    Without a client it is the sync point of one process. `lost()` gives the task ids of processes known to be dead: they are left out.
    """

    def __init__(
        self,
        client: Client | None,
        name: str,
        *,
        process_id: int = 0,
        tasks: Sequence[int] = (0,),
        timeout_s: float = 60.0,
        lost: Callable[[], Collection[int]] = tuple,
        on_change: Callable[[str], None] = lambda value: None,
    ) -> None:
        self.name = name
        self._channel: GroupClient | None = None if client is None else channel_of(client)
        self.folder = "" if self._channel is None else _folder(self._channel, name)
        self._process_id = process_id
        self._tasks = tuple(tasks)
        self._timeout_s = timeout_s
        self._take_over_s = min(TAKE_OVER_S, timeout_s / 4)
        self._lost = lost
        self._on_change = on_change
        self._log = StepLog()
        self._news = threading.Condition()  # guards _log, _missing, _trouble and _gone
        self._missing: tuple[int, ...] = ()
        self._trouble: Exception | None = None
        self._gone = False  # the coordinator, for longer than the back-off takes
        self._closed = threading.Event()
        self._follower: threading.Thread | None = None
        if self._channel is not None:
            # A thread, because rounds have to go on while the main thread sits in a device collective.
            self._follower = threading.Thread(target=self._follow, args=(self._channel,), name=f"holdfast-sync-{name}", daemon=True)
            self._follower.start()
            _open.add(self)

    @property
    def latest(self) -> str:
        """Is the value of the last decided round, whether or not its step has come."""
        with self._news:
            return self._log.latest

    def statistics(self) -> dict[str, Any]:
        """Returns the counts of this sync point: rounds decided, the highest step answered, whether one is being decided."""
        with self._news:
            return {"rounds": self._log.round, "floor": self._log.floor, "frozen": self._log.frozen, "missing": self._missing}

    def propose(self, value: str = "") -> bool:
        """Announces news, to hold from one step on that is ahead of all. Blocks for one round trip. Raises CoordinationError.

        Returns False when another announcement is still being decided: then that one counts, and a caller with other news looks at
        `latest` when it is told of the decision and may announce again.
        """
        with self._news:
            number = self._log.round
            if self._channel is None:
                self._log.freeze()
                self._log.decide(agreed_step([self._log.floor]), value)
        if self._channel is None:
            self._on_change(value)
            return True
        announcement = f"{self._process_id} {value}"
        won = self._insert(self._channel, f"{number}/change", announcement)
        if won:
            self._send(self._channel, number, announcement, self._tasks)
        elif earlier := self._get(self._channel, f"{number}/change", 1.0):
            self._send(self._channel, number, earlier, [self._process_id])  # its announcer may have died before it told anybody
        return won

    def reached(self, step: int) -> bool:
        """Says whether news took effect since the step asked about before `step`: once for each, at the same step everywhere.

        Asked again about the same step, it says the same. Raises as `ask` does.
        """
        return self.ask(step).changed

    def ask(self, step: int) -> Answer:
        """Returns what holds at `step`, alike in every process.

        Raises BarrierTimeout when an agreement under way does not come about in `timeout_s`, CoordinatorLost when it cannot.
        """
        with self._news:
            if self._log.may_answer(step):
                return self._log.answer(step)
            settled = self._news.wait_for(lambda: self._log.may_answer(step) or self._closed.is_set() or self._gone, self._timeout_s)
            if self._closed.is_set():
                self._log.frozen = False
            if self._log.may_answer(step):
                return self._log.answer(step)
            raise self._trouble if settled and self._trouble else self._late(step)

    def close(self) -> None:
        """Ends the background thread, within seconds. Questions are still answered from what is known."""
        self._closed.set()
        with self._news:
            self._news.notify_all()
        if self._channel is not None and self._follower is not None and self._follower.is_alive():
            # On a thread: with the coordinator gone it would wait for longer than we may.
            waker = threading.Thread(target=self._wake, args=(self._channel,), name=f"holdfast-wake-{self.name}", daemon=True)
            waker.start()
            if self._follower is not threading.current_thread():
                self._follower.join(2 * TAKE_OVER_S)
            waker.join(1.0)
        _open.discard(self)

    def _wake(self, channel: GroupClient) -> None:
        with suppress(CoordinationError):  # where the client was shut down, its waiting calls have ended
            self._send(channel, self._log.round, "", [self._process_id])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _late(self, step: int) -> CoordinationError:
        missing = tuple(self._channel.process(task) for task in self._missing) if self._channel else ()
        why = f"; the last call failed with: {self._trouble}" if self._trouble else ""
        return BarrierTimeout(
            f"sync point {self.name!r} could not be agreed on in {self._timeout_s:g} s, asked at step {step}: no answer from "
            f"processes {list(missing)} of {len(self._tasks)}; every process has to ask too, or have died{why}",
            name=self.name,
            missing=missing,
        )

    def _follow(self, channel: GroupClient) -> None:
        """Lives as long as the sync point: hears of each round, publishes the floor, learns the step."""
        failures = 0
        while not self._closed.is_set():
            try:
                if failures or not self._log.round:
                    self._catch_up(channel)
                announcement = self._get(channel, f"{self._log.round}/work/mail/{self._process_id}", _PIECE_S)
                if announcement:
                    self._round(channel, announcement)
                failures, self._trouble, self._gone = 0, None, False
            except Exception as error:
                if getattr(error, "code", "") in ("CANCELLED", "FAILED_PRECONDITION"):  # the client was shut down
                    return
                _log.log(logging.DEBUG if failures else logging.WARNING, "sync point %r: %s; trying again", self.name, error)
                with self._news:
                    self._trouble, self._gone = error, failures >= len(_BACK_OFF_S) and isinstance(error, CoordinatorLost)
                    self._news.notify_all()
                self._closed.wait(_BACK_OFF_S[min(failures, len(_BACK_OFF_S) - 1)])
                failures += 1

    def _catch_up(self, channel: GroupClient) -> None:
        """Takes part in a round whose mail did not come: it was announced before this process came, or its announcer died."""
        while announcement := channel.list(f"{self.folder}/{self._log.round}").get("change"):
            self._round(channel, announcement.decode())

    def _round(self, channel: GroupClient, announcement: str) -> None:
        announcer, value = announcement.split(" ", 1)
        with self._news:
            number, floor = self._log.round, self._log.freeze()
        channel.set(f"{self.folder}/{number}/work/floor/{self._process_id}", str(floor).encode())
        step = None if int(announcer) == self._process_id else self._get(channel, f"{number}/step", self._take_over_s)
        while step is None and not self._closed.is_set():
            step = self._gather(channel, number, announcement)
        if step is None:
            return
        with self._news:
            self._log.decide(int(step), value)
            self._missing = ()
            self._news.notify_all()
        _log.info("sync point %r: %r holds from step %s on", self.name, value, step)
        if int(announcer) == self._process_id and number:
            channel.delete(f"{self.folder}/{number - 1}/work")
        self._on_change(value)

    def _gather(self, channel: GroupClient, number: int, announcement: str) -> str | None:
        """Writes and returns the round's step when all floors are there; else waits a while for the first that is not."""
        keys = channel.list(f"{self.folder}/{number}")
        if "step" in keys:
            return keys["step"].decode()
        floors = {int(key.removeprefix("work/floor/")): int(value) for key, value in keys.items() if key.startswith("work/floor/")}
        missing = sorted(set(self._tasks) - set(floors) - set(self._lost()))
        with self._news:
            self._missing = tuple(missing)
        if not missing:
            step = str(agreed_step(floors.values()))
            return step if self._insert(channel, f"{number}/step", step) else None
        if self._get(channel, f"{number}/work/floor/{missing[0]}", 1.0) is None:
            self._send(channel, number, announcement, missing)
        return None

    def _send(self, channel: GroupClient, number: int, announcement: str, tasks: Sequence[int]) -> None:
        for task in tasks:
            channel.set(f"{self.folder}/{number}/work/mail/{task}", announcement.encode())

    def _insert(self, channel: GroupClient, key: str, value: str) -> bool:
        """Writes a key that nobody has written; returns False when somebody has."""
        try:
            with channel.errors(f"sync point {self.name!r}"):
                channel.client.key_value_set_bytes(f"{self.folder}/{key}", value.encode())
        except CoordinationError as error:
            if error.code != "ALREADY_EXISTS":
                raise
            return False
        return True

    def _get(self, channel: GroupClient, key: str, timeout_s: float) -> str | None:
        """Waits for a key; returns None when it has not come in time."""
        try:
            with channel.errors(f"sync point {self.name!r}", self.name, timeout_s):
                return channel.client.blocking_key_value_get_bytes(f"{self.folder}/{key}", Deadline(timeout_s).left_ms()).decode()
        except CoordinationError as error:
            if error.code != "DEADLINE_EXCEEDED":
                raise
            return None


_open: WeakSet[SyncPoint] = WeakSet()


@atexit.register
def _close_all() -> None:
    """Ends threads that wait in jaxlib: one that comes back from there into an ending interpreter aborts the process."""
    for sync in list(_open):
        sync.close()


def _folder(channel: GroupClient, name: str) -> str:
    with channel.turn("sync", name, Deadline(60.0)) as turn:
        return turn.folder


def agree_on_step(group: Group, name: str) -> SyncPoint:
    """Returns a sync point of a group: rank 0 (or any other) proposes on its own clock, and all get True from `reached` at one step.

    Every process of the group calls it, with the same name. For decisions that rest on a clock or on load: "save soon".
    """
    if not isinstance(group, ClusterGroup):
        return SyncPoint(None, name)
    channel = group._channel
    tasks = [channel.task(process) for process in group._processes or range(group.count)]
    return SyncPoint(channel.client, name, process_id=tasks[group.index], tasks=tasks, lost=lambda: lost_tasks(channel))
