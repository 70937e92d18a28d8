"""An engine in virtual time: carries actions out on gangs that do what a life says."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from holdfast.launch import RestartPolicy, StartupFailed
from holdfast.launch.supervisor.engine import Engine
from holdfast.launch.supervisor.job import (
    Action,
    Capacity,
    CoordinatorEnded,
    Dismiss,
    Event,
    Exited,
    Grow,
    Kill,
    Launch,
    Noticed,
    Notify,
    Progressed,
    Rejoin,
    Release,
    Replace,
    Reserve,
    Reserved,
    Stalled,
    StartFailed,
    Stop,
    Terminate,
    Unnotify,
    Unplaced,
    Waiting,
    Withdrawn,
)

from .gang import BY_SIGTERM, SYNC_S, Gang, Worker
from .program import Program
from .timeline import Timeline
from .trace import Endless, Seen

POLL_S = 0.5  # of what the processes report
ROOM_S = 7.0  # between two looks at the room that there is
MOST_LOOKS = 10
SHORT = 0.3  # share of the answers that there is no room which offer less
NOT_STARTED = 127


class Happening(Protocol):
    """Something that happens to a job."""

    @property
    def attempt(self) -> int: ...
    @property
    def at_s(self) -> float: ...
    @property
    def is_outside(self) -> bool:
        """Whether its time counts from the asking for the attempt, not from the launch."""

    def happen(self, engine: FakeEngine) -> None: ...
    def fails(self, where: str) -> bool | None:
        """Returns whether a start fails for good, None where it does not fail."""


class FakeEngine(Engine):
    """Runs gangs in virtual time."""

    def __init__(
        self,
        policy: RestartPolicy,
        program: Program,
        room: int,
        happenings: Sequence[Happening],
        *,
        seed: int,
    ) -> None:
        self.timeline = Timeline(seed)
        self.asked_to_stop = False
        self.closed = 0
        self._policy = policy
        self._program = program
        self._happenings = happenings
        self._room = room
        self._least = 1
        self._queue: deque[Event] = deque()
        self._told: list[Event] = []
        self._saved = 0
        self._attempt = 0
        self._wanted: Reserve | None = None
        self._gang: Gang | None = None
        self._surplus: list[tuple[Gang, Worker]] = []  # that leave, and whom nobody replaces
        self._released = True
        self._polls = False
        self._progress: Progressed | None = None
        self._sent_sigterm = False

    def clock(self) -> float:
        """Returns the virtual time."""
        return self.timeline.now

    # --- The seam

    def events(self, timeout_s: float | None) -> Sequence[Event]:
        until_s = math.inf if timeout_s is None else self.timeline.now + timeout_s
        while not self._queue:
            if timeout_s is None and self.timeline.is_empty:
                self._end_waiting()
            elif not self.timeline.goes_on_until(until_s):
                return []
        return [self._queue.popleft()]

    def _end_waiting(self) -> None:
        """Ends a job that would run for ever, as somebody would who waits for it."""
        if self.asked_to_stop or self._gang is None:
            raise Endless(f"nothing happens any more at {self.timeline.now:.2f} s")
        self.stop()

    def carry_out(self, action: Action) -> None:
        match action:
            case Reserve():
                self._reserve(action)
            case Launch():
                self._launch(action)
            case Notify():
                self._sent_sigterm = True
                self._each(action.processes, self._notify_one)
            case Grow():
                gang = self._gang
                self.timeline.later(
                    self.timeline.draw(0.0, POLL_S), partial(self._say_that_it_grows, gang)
                )
            case Dismiss():
                self._of_gang(Gang.dismiss)
            case Unnotify():
                self._of_gang(Gang.withdraw)
            case Terminate():
                self._sent_sigterm = True
                self._each(action.processes, Gang.terminate)
            case Kill():
                self._each(action.processes, Gang.kill)
                for gang, worker in self._surplus:
                    if action.processes is None or worker.process in action.processes:
                        gang.kill(worker)
            case Release():
                self._released = True
                self._wanted = None
            case Rejoin():
                self._rejoin(action)
            case Replace():
                self._replace(action)

    def close(self) -> None:
        self.closed += 1

    # --- Starting

    def _reserve(self, action: Reserve) -> None:
        self._attempt = action.attempt
        self._least = action.min_processes
        self._anchor(is_outside=True)
        self._fail("at once")
        self._wanted = action
        if self._fails("while waiting") is not None:
            final = bool(self._fails("while waiting"))
            self._soon(StartFailed(action.attempt, "the machines are gone", final))
            return
        self.timeline.later(self.timeline.draw(0.1, 1.0), self._try_room)

    def _anchor(self, *, is_outside: bool) -> None:
        for happening in self._happenings:
            if (happening.attempt, happening.is_outside) == (self._attempt, is_outside):
                self.timeline.later(happening.at_s, partial(happening.happen, self))

    def _fails(self, where: str) -> bool | None:
        for happening in self._happenings:
            final = happening.fails(where)
            if happening.attempt == self._attempt and final is not None:
                return final
        return None

    def _fail(self, where: str) -> None:
        final = self._fails(where)
        if final:
            raise StartupFailed("it never will")
        if final is not None:
            raise OSError("no port")

    def _try_room(self) -> None:
        wanted = self._wanted
        if wanted is None:
            return
        room = min(self._room, wanted.max_processes)
        if room < wanted.min_processes:
            short = (
                Waiting(wanted.attempt, f"room for {room}"),
                Reserved(wanted.attempt, room),
            )
            self._tell(short[self.timeline.draw(0.0, 1.0) < SHORT])
            return
        self._wanted = None
        self._tell(Reserved(wanted.attempt, room))

    def _launch(self, action: Launch) -> None:
        self._anchor(is_outside=False)
        self._progress = None
        self._sent_sigterm = False
        self._fail("at launch")
        self._released = False
        self._gang = Gang(
            action.attempt,
            action.num_processes,
            self._program,
            self._saved,
            timeline=self.timeline,
            watcher=self,
        )
        if self._fails("half") is not None:
            self._launch_half(self._gang)
        self._gang.start(action.num_processes)
        self._watch_stall(self._gang)

    def _launch_half(self, gang: Gang) -> None:
        """Starts some of the processes, as an engine does whose host is full."""
        started = len(gang.workers) // 2
        gang.start(started)
        for worker in gang.workers[started:]:
            worker.code = NOT_STARTED
            self._tell(Exited(worker.life, worker.process, NOT_STARTED))
        raise OSError("no memory")

    def _rejoin(self, action: Rejoin) -> None:
        before = self._gang
        assert before is not None
        self._attempt = action.attempt
        self._anchor(is_outside=True)
        self._anchor(is_outside=False)
        self._progress = None
        self._sent_sigterm = False
        self._gang = Gang(
            action.attempt,
            action.num_processes,
            self._program,
            self._saved,
            timeline=self.timeline,
            watcher=self,
        )
        for process in sorted(action.staying):
            if process < action.num_processes:
                old = before.workers[action.number_before(process)]
                self._gang.take_over(before, old, process, goes=process in action.going)
            else:
                before.go_alone(before.workers[process])
                self._surplus.append((before, before.workers[process]))
        before.pass_on(self._gang)
        self._watch_stall(self._gang)
        self._fail("at launch")

    def _replace(self, action: Replace) -> None:
        gang = self._gang
        assert gang is not None
        for process in sorted(action.processes):
            gang.replace(process)
        missing = len(gang.workers) - self._room
        if missing > 0 and self._room >= self._least:
            full = frozenset(sorted(action.processes)[:missing])
            self.timeline.later(
                self.timeline.draw(0.0, 0.2), partial(self._say_that_it_is_full, gang, full)
            )

    def _say_that_it_is_full(self, gang: Gang, processes: frozenset[int]) -> None:
        """Says that processes have not started, for want of room."""
        if gang is not self._gang or self._released:
            return
        workers = [gang.workers[process] for process in sorted(processes)]
        if any(worker.joined or not worker.alive or worker.former for worker in workers):
            return
        for worker in workers:
            worker.hung = True  # it does not start
        self._tell(Unplaced(gang.attempt, processes, "no room"))

    # --- Signals

    def _each(self, processes: frozenset[int] | None, call: Callable[[Gang, Worker], None]) -> None:
        """Does something to some processes of the last gang, or to all."""
        gang = self._gang
        if gang is None:
            return
        for worker in gang.workers:
            if processes is None or worker.process in processes:
                call(gang, worker)

    def _notify_one(self, gang: Gang, worker: Worker) -> None:
        gang.terminate(worker, is_notice=True)
        if self._program.echoes and worker.joined and worker.acts:
            self._echo(Noticed(f"process {worker.process} (SIGTERM)"), worker.process)

    def _say_that_it_grows(self, gang: Gang | None) -> None:
        """Has process 0 give the others notice."""
        if gang is None or gang is not self._gang or self._released or not gang.coordinator:
            return
        first = gang.workers[0]
        if first.joined and first.acts:
            gang.notify()
            self._echo(Noticed("process 0 (growing)"), 0)

    def _echo(self, notice: Noticed, *processes: int) -> None:
        """Has a notice told that processes have: before they can have left their loops for it."""
        notice = replace(
            notice, delivered=True, processes=frozenset(processes), attempt=self._attempt
        )
        self.timeline.later(self.timeline.draw(0.0, SYNC_S), partial(self._tell, notice))

    def _of_gang(self, call: Callable[[Gang], None]) -> None:
        if self._gang is not None and not self._released:
            call(self._gang)

    # --- Events

    def _tell(self, event: Event) -> None:
        self._queue.append(event)
        self._told.append(event)

    def _soon(self, event: Event) -> None:
        self.timeline.later(self.timeline.draw(0.0, 1.0), partial(self._tell, event))

    def changed(self) -> None:
        """Has the progress told, with the next poll."""
        if not self._polls:
            self._polls = True
            self.timeline.later(self.timeline.draw(0.0, POLL_S), self._poll)

    def _poll(self) -> None:
        self._polls = False
        self._refresh()

    def _refresh(self) -> None:
        """Tells what the processes have reported, where it is new."""
        gang = self._gang
        if gang is None or self._released or not gang.coordinator:
            return
        progress = Progressed(
            gang.attempt,
            gang.step,
            gang.saved_step,
            gang.done,
            saves={process: worker.position for process, worker in gang.ours.items()},
            leaving=frozenset(each.process for each in gang.workers if each.leaving),
            held=frozenset(each.process for each in gang.workers if each.held),
            restartable=gang.restartable,
        )
        if progress != self._progress:
            self._progress = progress
            self._tell(progress)

    def ended(self, gang: Gang, worker: Worker) -> None:
        """Has the end of a process told, after what it had reported."""
        report_s = self.timeline.draw(0.0, 0.2) + worker.late_s
        self.timeline.later(report_s, partial(self._tell_end, gang, worker))

    def _tell_end(self, gang: Gang, worker: Worker) -> None:
        assert worker.code is not None
        if gang is self._gang and gang.workers[worker.process] is worker:
            self._refresh()
            if worker.code == BY_SIGTERM and not self._sent_sigterm and not worker.joined:
                self._tell(Noticed(f"process {worker.process} (SIGTERM before it had joined)"))
        current = self._gang or gang
        met = current.attempt - (not current.has_met)
        self._tell(Exited(worker.life, current.number_of(worker), worker.code, met=met))

    def committed(self, step: int) -> None:
        """Takes note of a step that the next attempt begins at."""
        self._saved = max(self._saved, step)
        if self._gang is not None and self._gang.step < 0:
            self._gang.begins_at = self._saved

    def _watch_stall(self, gang: Gang) -> None:
        if gang is not self._gang or self._released or not gang.coordinator:
            return
        limit_s = self._policy.stall_timeout_s
        if limit_s == math.inf:
            return
        if gang.step < 0:
            limit_s = self._policy.startup_timeout_s
        left_s = gang.last_step_at + limit_s - self.timeline.now
        if left_s > 0:
            self.timeline.later(left_s + 0.01, partial(self._watch_stall, gang))
        elif any(worker.alive and not worker.leaving for worker in gang.workers):
            self._tell_stall(gang)

    def _tell_stall(self, gang: Gang) -> None:
        self._refresh()
        hung = tuple(each.process for each in gang.workers if each.alive and each.hung)
        silent = frozenset(process for process in hung if gang.workers[process].silent)
        self._tell(Stalled(gang.attempt, "no step", hung, silent))

    # --- What happens from outside

    def worker(self, process: int) -> tuple[Gang, Worker] | None:
        """Returns a living process of this attempt."""
        gang = self._gang
        if gang is None or gang.attempt != self._attempt or process >= len(gang.workers):
            return None
        worker = gang.workers[process]
        return (gang, worker) if worker.alive else None

    def stop(self) -> None:
        """Asks the supervisor to stop."""
        if not self.asked_to_stop:
            self.asked_to_stop = True
            self._tell(Stop("SIGTERM"))

    def notice(
        self,
        source: str,
        deadline_s: float | None,
        processes: frozenset[int],
        *,
        delivered: bool,
    ) -> None:
        """Gives a notice; one that is delivered has come from a process."""
        if delivered and self._released:
            return
        deadline = None if deadline_s is None else self.timeline.now + deadline_s
        if delivered:
            self._of_gang(Gang.notify)
            self._echo(Noticed(source, deadline), *processes)
        else:
            self._soon(Noticed(source, deadline, processes=processes))

    def withdraw(self, source: str, *, delivered: bool) -> None:
        """Withdraws a notice."""
        if delivered:
            self._of_gang(Gang.withdraw)
        self._soon(Withdrawn(source))

    def set_room(self, processes: int) -> None:
        """Changes how many processes there is room for."""
        self._room = processes
        self._try_room()
        self._tell_room(MOST_LOOKS)

    def take_room(self, processes: int) -> None:
        """Has others take what is given back, but for so many processes."""
        self._room = processes

    def _tell_room(self, looks: int) -> None:
        gang = self._gang
        if gang is None or self._released or looks == 0:
            return
        self._tell(Capacity(self._room))
        self.timeline.later(ROOM_S, partial(self._tell_room, looks - 1))

    def end_coordinator(self) -> None:
        """Ends the coordinator of this attempt."""
        gang = self._gang
        if gang is None or self._released or not gang.coordinator:
            return
        needed = any(worker.alive for worker in gang.ours.values())
        gang.end_coordinator()
        if needed:
            self._tell(CoordinatorEnded(gang.attempt, "the coordinator was ended by signal 9"))

    def tell_again(self, index: int) -> None:
        """Tells again what has been told of an earlier attempt, or that there is room."""
        former = [
            each
            for each in self._told
            if _attempt_of(each) < self._attempt or isinstance(each, Reserved)
        ]
        if former:
            self._queue.append(former[index % len(former)])

    # --- What is true

    def seen(self, silent: frozenset[int]) -> Seen:
        """Returns what is true of the last gang, of which these can report nothing any more."""
        gang = self._gang
        if gang is None:
            return Seen()
        killed = [worker for worker in gang.workers if worker.killed_at is not None]
        return Seen(
            alive=frozenset(worker.process for worker in gang.workers if worker.alive),
            needed=gang.needed(silent) | gang.needed_before(),
            killed_at={each.process: each.killed_at or 0.0 for each in killed},
            surplus=frozenset(
                each.process for _, each in self._surplus if each.alive and each.killed_at is None
            ),
        )


def _attempt_of(event: Event) -> float:
    """Returns the attempt that an event is of; those of all are of none."""
    attempt = getattr(event, "attempt", getattr(event, "life", None))
    return math.inf if attempt is None else float(attempt)
