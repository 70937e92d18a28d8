"""SyncPoint: carries the log of `step_agreement_core` between processes, over a client's keys.

Keys of round r, below `holdfast/sync/<name>/<n>/<r>/`: `change` (the value and who announced it,
written once), `step` (written once), `mail/<task>` (the change again, one for each process) and
`floor/<task>`. Who has left for good has one floor for all rounds to come, `left/<task>`, beside
them. A process waits for its own mail, so that an idle sync point costs nothing and its end can
wake it. The announcer sends the mail, gathers the floors and writes the step; where it has died on
the way, the lowest task takes over, and one more after each TAKE_OVER_S without a step.

A round's floors come from processes that know the round before. So once it is decided, its
announcer writes `last/decided` (round, step and value), for processes that come later, and deletes
the round before.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakSet

from holdfast.coordination import BarrierTimeout, CoordinationError, CoordinatorLost, ProcessLost

from ..closing import Closing
from ..group.group import ClusterGroup, Group
from ..group.group_client import Client, Deadline, GroupClient, group_client_of, named
from ..job import current_job
from ..threads import start_daemon
from .step_agreement_core import Answer, StepLog, agreed_step

_log = logging.getLogger(__name__)

# How long the follower's blocking get lasts before it asks again.
_GET_S = 600.0
# After this time without a decision one more process does the announcer's work: those before it may
# be dead, or stopped.
TAKE_OVER_S = 3.0
_BACK_OFF_S = (0.1, 0.2, 0.5, 1.0, 2.0)
_RUN = 1 << 64  # how far apart the steps of two runs are, see `count_anew`
# Codes of a client that was shut down.
_SHUT_DOWN = ("CANCELLED", "FAILED_PRECONDITION")


class SyncPoint(Closing):
    """Spreads a value so that it holds from the same step on in every process.

    Thread-safe; a context manager. Every process of `tasks` (task ids; its own is `process_id`)
    makes one under the same name, the nth in one process meeting the nth in every other.
    `propose()` announces a value, from any thread of any process; `ask(step)` returns what holds at
    a step, and `reached(step)` whether something new holds since the step asked about before. An
    answer is local and takes a few microseconds, except between an announcement and its decision,
    two round trips later, when it waits for the other processes' background threads.

    Without a client it is the sync point of one process. `lost()` gives the task ids of processes
    known to be dead: they are left out.
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
        self._group_client: GroupClient | None = None if client is None else group_client_of(client)
        self.folder = "" if self._group_client is None else _folder(self._group_client, name)
        self.process_id = process_id
        self.tasks = tuple(tasks)
        self._timeout_s = timeout_s
        self._take_over_s = min(TAKE_OVER_S, timeout_s / 4)
        self._lost = lost
        self._on_change = on_change
        self._log = StepLog()
        self._run = 0  # the log's steps of a run begin at _run * _RUN
        # Guards _log, _run, _missing, _last_error and _coordinator_lost.
        self._changed = threading.Condition()
        self._missing: tuple[int, ...] = ()
        self._last_error: Exception | None = None
        self._coordinator_lost = False  # for longer than the back-off takes
        self._catches_up = False  # with rounds before it came
        self._closed = threading.Event()
        self._follower: threading.Thread | None = None
        if self._group_client is not None:
            # Until it is known what was decided before: a process that was started again would
            # answer about steps from which a change holds.
            self._log.freeze()
            # A thread, because rounds have to go on while the main thread sits in a device
            # collective.
            self._follower = start_daemon(f"sync-{name}", self._follow, self._group_client)
            current_job().ensure(_OpenSyncPoints).add(self)

    @property
    def latest(self) -> str:
        """The value of the last decided round, whether or not its step has come."""
        with self._changed:
            return self._log.latest

    def statistics(self) -> dict[str, Any]:
        """Returns counts: rounds decided, the highest step answered, whether one is decided now."""
        with self._changed:
            return {
                "rounds": self._log.round,
                "floor": self._log.floor,
                "frozen": self._log.frozen,
                "missing": self._missing,
            }

    def propose(self, value: str = "") -> bool:
        """Announces a value, to hold from one step on that is ahead of all.

        Blocks for one round trip. Raises CoordinationError. Returns False when another announcement
        is still being decided: then that one counts, and a caller with another value reads `latest`
        at the next `on_change` and may announce again.
        """
        with self._changed:
            number = self._log.round
            if self._group_client is None:
                self._log.freeze()
                self._log.decide(agreed_step([self._log.floor]), value)
        if self._group_client is None:
            self._on_change(value)
            return True
        announcement = f"{self.process_id} {value}"
        change = f"{self.folder}/{number}/change"
        if self._group_client.insert(change, announcement.encode()):
            self._send(self._group_client, number, announcement, self.tasks)
            return True
        # The announcer of the earlier one may have died before it sent any mail.
        earlier = self._get(self._group_client, f"{number}/change", 1.0)
        if earlier:
            self._send(self._group_client, number, earlier, [self.process_id])
        return False

    def count_anew(self) -> None:
        """Has the steps that are asked about from now on come after all before, whatever their
        numbers: the program goes back to an earlier step, or begins another run.

        Every process calls it between the same two questions.
        """
        with self._changed:
            self._run += 1

    def reached(self, step: int) -> bool:
        """Returns whether a change took effect since the step asked about before `step`.

        It is true once for each change, at the same step everywhere. Asked again about the same
        step, it answers the same. Raises as `ask` does.
        """
        return self.ask(step).changed

    def ask(self, step: int) -> Answer:
        """Returns what holds at `step`, alike in every process.

        Raises BarrierTimeout when an agreement under way does not come about in `timeout_s`,
        CoordinatorLost when it cannot.
        """
        with self._changed:
            at = step + self._run * _RUN
            if self._log.may_answer(at):
                return self._log.answer(at)
            in_time = self._changed.wait_for(
                lambda: self._log.may_answer(at) or self._closed.is_set() or self._coordinator_lost,
                self._timeout_s,
            )
            if self._closed.is_set():
                self._log.thaw()
            if self._log.may_answer(at):
                return self._log.answer(at)
            if in_time and self._last_error:
                raise self._last_error
            raise self._timeout_error(step)

    def close(self) -> None:
        """Ends the background thread, within seconds.

        Questions are still answered from what is known.
        """
        self._end(None)

    def leave(self) -> None:
        """Closes it, and reports up to which step this process has asked.

        The others no longer wait for its answers. Once all have left, nothing of it stays at the
        coordinator.

        For a name that no later life of this process uses again, and a process that asks about no
        further step.
        """
        with self._changed:
            floor = self._log.freeze()
        self._end(floor)

    def _end(self, floor: int | None) -> None:
        # Its thread may have ended before it is looked at: who leaves says so all the same.
        leaves = floor is not None and not self._closed.is_set()
        self._closed.set()
        with self._changed:
            self._changed.notify_all()
        if (
            self._group_client is not None
            and self._follower is not None
            and (leaves or self._follower.is_alive())
        ):
            # On a thread: with the coordinator gone it would wait for longer than we may.
            deadline = Deadline(2 * TAKE_OVER_S)
            try:
                waker = start_daemon(f"wake-{self.name}", self._wake, self._group_client, floor)
            except RuntimeError:  # an interpreter that ends starts none
                self._wake(self._group_client, floor)
            else:
                if self._follower is not threading.current_thread():
                    self._follower.join(deadline.remaining_s())
                # Python before 3.14 aborts where a thread returns from a call of jaxlib's to an
                # interpreter that ends.
                waker.join(1.0 + deadline.remaining_s())
        current_job().ensure(_OpenSyncPoints).discard(self)

    def _wake(self, group_client: GroupClient, floor: int | None) -> None:
        # Where the client was shut down, its waiting calls have ended.
        with suppress(CoordinationError):
            if floor is not None:
                group_client.set(f"{self.folder}/left/{self.process_id}", str(floor).encode())
            number = self._log.round
            self._send(group_client, number, "", [self.process_id])
            if self._follower is not None:
                self._follower.join(2 * TAKE_OVER_S)  # it writes no more
            if floor is None:
                # Mail that came in its place is no loss: a later life looks for the change itself.
                group_client.delete(f"{self.folder}/{number}/mail/{self.process_id}")
            else:
                group_client.delete_after(self.folder, len(self.tasks))

    def _timeout_error(self, step: int) -> CoordinationError:
        assert self._group_client is not None  # alone, no answer is held back
        missing = tuple(self._group_client.process(task) for task in self._missing)
        whom = f" no answer from {named(missing)} of {len(self.tasks)};" if missing else ""
        why = f"; the last call failed with: {self._last_error}" if self._last_error else ""
        return BarrierTimeout(
            f"sync point {self.name!r} could not be agreed on in {self._timeout_s:g} s, asked at"
            f" step {step}:{whom} every process has to ask too, or have died{why}",
            name=self.name,
            missing=missing,
        )

    def _follow(self, group_client: GroupClient) -> None:
        """Takes part in each round as long as the sync point lives."""
        failures = 0
        while not self._closed.is_set():
            try:
                if failures or not self._log.round:
                    self._catch_up(group_client)
                self._take_mail(group_client)
                failures = 0
                self._last_error = None
                self._coordinator_lost = False
            except Exception as error:
                if getattr(error, "code", "") in _SHUT_DOWN:
                    return
                self._note_error(error, failures)
                self._closed.wait(_BACK_OFF_S[min(failures, len(_BACK_OFF_S) - 1)])
                failures += 1

    def _take_mail(self, group_client: GroupClient) -> None:
        mail = f"{self._log.round}/mail/{self.process_id}"
        announcement = self._get(group_client, mail, _GET_S)
        if announcement:
            self._round(group_client, announcement)
        elif announcement is not None and not self._closed.is_set():
            # Empty mail wakes a sync point that closes: here that of an earlier life of this
            # process, which would wake this one over and over.
            group_client.delete(f"{self.folder}/{mail}")

    def _note_error(self, error: Exception, failures: int) -> None:
        level = logging.DEBUG if failures else logging.WARNING
        _log.log(level, "sync point %r: %s; trying again", self.name, error)
        with self._changed:
            self._last_error = error
            # Only once the back-off is used up: a coordinator that is started again takes a while,
            # and an answer that waits for it is better than an error.
            lasting = failures >= len(_BACK_OFF_S)
            self._coordinator_lost = lasting and isinstance(error, CoordinatorLost)
            self._changed.notify_all()

    def _catch_up(self, group_client: GroupClient) -> None:
        """Takes part in rounds whose mail did not come.

        They were announced before this process came, or their announcer died.
        """
        self._catches_up = True
        self._skip(group_client)
        while not self._closed.is_set():
            change = group_client.list(f"{self.folder}/{self._log.round}").get("change")
            if change is None:
                self._thaw()
                return
            self._round(group_client, change.decode())

    def _thaw(self) -> None:
        """Lets questions be answered: all that was decided is known, and nothing is under way."""
        with self._changed:
            self._catches_up = False
            self._log.thaw()
            self._changed.notify_all()

    def _skip(self, group_client: GroupClient) -> bool:
        """Decides the last round of all, where this process does not know it.

        The rounds before are left out. Returns whether it did.
        """
        decided = group_client.list(f"{self.folder}/last").get("decided")
        if decided is None:
            return False
        number, step, value = decided.decode().split(" ", 2)
        with self._changed:
            if int(number) < self._log.round:
                return False
            self._log.skip_to(int(number))
            self._log.freeze()
        self._decide(int(step), value)
        self._on_change(value)
        return True

    def _decide(self, step: int, value: str) -> None:
        with self._changed:
            self._log.decide(step, value)
            if self._catches_up:
                # The next round may have been decided without this process.
                self._log.freeze()
            self._missing = ()
            self._changed.notify_all()
        shown = (step + _RUN // 2) % _RUN - _RUN // 2
        _log.info("sync point %r: %r holds from step %s on", self.name, value, shown)

    def _round(self, group_client: GroupClient, announcement: str) -> None:
        announcer, value = announcement.split(" ", 1)
        with self._changed:
            number = self._log.round
            floor = self._log.freeze()
        group_client.set(f"{self.folder}/{number}/floor/{self.process_id}", str(floor).encode())
        step = None
        begun_s = time.monotonic()
        while step is None:
            if self._closed.is_set():
                return
            take_overs = int((time.monotonic() - begun_s) / self._take_over_s)
            if self._gathers(int(announcer), take_overs):
                step = self._gather(group_client, number, announcement)
            else:
                source = None if int(announcer) in self._lost() else int(announcer)
                step = self._get(group_client, f"{number}/step", self._take_over_s, source)
            # The others may have taken this process for dead, and gone on.
            if step is None and self._skip(group_client):
                return
        self._decide(int(step), value)
        if int(announcer) == self.process_id:
            group_client.set(f"{self.folder}/last/decided", f"{number} {step} {value}".encode())
            # Not this round's keys: the others may not have read the step yet. That they have a
            # floor here shows that they have read the round before.
            if number:
                group_client.delete(f"{self.folder}/{number - 1}")
        self._on_change(value)

    def _gathers(self, announcer: int, take_overs: int) -> bool:
        """Returns whether to do the announcer's work.

        One process does, and one more for each time that nothing came of it.
        """
        lost = set(self._lost())
        others = sorted(set(self.tasks) - lost - {announcer})
        first = [announcer] if announcer not in lost else others[:1]
        return self.process_id in first or self.process_id in others[:take_overs]

    def _gather(self, group_client: GroupClient, number: int, announcement: str) -> str | None:
        """Writes and returns the round's step when all floors are there.

        Else it waits a while for the first that is not.
        """
        keys = group_client.list(f"{self.folder}/{number}")
        if "step" in keys:
            return keys["step"].decode()
        floors = {
            int(key.removeprefix("floor/")): int(value)
            for key, value in keys.items()
            if key.startswith("floor/")
        }
        missing = sorted(set(self.tasks) - set(floors) - set(self._lost()))
        if missing:
            listing = group_client.list(f"{self.folder}/left")
            left = {int(task): int(floor) for task, floor in listing.items()}
            floors |= {task: left[task] for task in missing if task in left}
            missing = [task for task in missing if task not in left]
        with self._changed:
            self._missing = tuple(missing)
        if not missing:
            step = str(agreed_step(floors.values()))
            # Another that took over may have written a step, from other floors: that one counts.
            won = group_client.insert(f"{self.folder}/{number}/step", step.encode())
            return step if won else None
        if self._get(group_client, f"{number}/floor/{missing[0]}", 1.0, missing[0]) is None:
            self._send(group_client, number, announcement, missing)
        return None

    def _send(
        self, group_client: GroupClient, number: int, announcement: str, tasks: Sequence[int]
    ) -> None:
        mail = f"{self.folder}/{number}/mail"
        group_client.set_many({f"{mail}/{task}": announcement.encode() for task in tasks})

    def _get(
        self, group_client: GroupClient, key: str, timeout_s: float, source: int | None = None
    ) -> str | None:
        """Waits for a key; returns None when it has not come in time, or its `source` has died."""
        try:
            value = group_client.wait(f"{self.folder}/{key}", Deadline(timeout_s), source)
        except ProcessLost:
            # The same word may still be on its way to `lost()`.
            self._closed.wait(_BACK_OFF_S[0])
            return None
        return None if value is None else value.decode()


class _OpenSyncPoints(WeakSet[SyncPoint]):
    """The part of a job that has its sync points with a thread."""


def close_sync_points() -> None:
    """Ends the threads of all sync points of this process."""
    for sync in list(current_job().ensure(_OpenSyncPoints)):
        sync.close()


def _folder(group_client: GroupClient, name: str) -> str:
    with group_client.call("sync", name, Deadline(60.0)) as call:
        return call.folder


def agree_on_step(group: Group, name: str) -> SyncPoint:
    """Returns a sync point of a group: any rank proposes, and all get True from `reached` alike.

    Every process of the group calls it, with the same name. For decisions that rest on a clock or
    on load: "save soon".
    """
    if not isinstance(group, ClusterGroup):
        return SyncPoint(None, name)
    group_client = group._group_client
    tasks = [group_client.task(process) for process in group.processes or range(group.count)]
    return SyncPoint(
        group_client.client,
        name,
        process_id=tasks[group.index],
        tasks=tasks,
        lost=lambda: [group_client.task(process) for process in group_client.peers.failed()],
    )
