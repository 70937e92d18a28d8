"""The processes of one attempt: they step, save, leave, fail and hang, in virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from holdfast.launch.supervisor.job import NO_SAVE, SavePosition
from holdfast.multihost.group.group import SaveStage

from .program import Program
from .timeline import Timeline

BY_SIGTERM = -15
BY_SIGKILL = -9
FAILED = 1
LEFT = (0, 75)
SYNC_S = 0.1  # at least, from a notice to the step at which all stop


class Watcher(Protocol):
    """Whoever learns what the processes of an attempt do."""

    def changed(self) -> None:
        """Takes note that a process has reported something."""

    def ended(self, gang: Gang, worker: Worker) -> None:
        """Takes note of the end of a process."""

    def committed(self, step: int) -> None:
        """Takes note of a step that exists from now on."""


@dataclass
class Worker:
    """One process."""

    process: int
    is_stranger: bool  # without a client
    life: int  # the attempt that it was started for
    joined: bool = False
    position: SavePosition = NO_SAVE
    leaving: bool = False
    held: bool = False  # it has left its loop after a notice, and waits
    hung: bool = False
    silent: bool = False  # hangs so that it can report nothing
    reacts: bool = False  # has a way of its own to take SIGTERM
    ends_with: int | None = None  # the exit code that it leaves with, once it is to leave
    reaction: tuple[int, float] | None = None  # exit code and seconds after SIGTERM; None: neither
    lingers_s: float = 0.0  # between SIGKILL and the end
    late_s: float = 0.0  # between the end and its report
    killed_at: float | None = None
    code: int | None = None
    # The same process in the attempt that it outlives, where it may still be in a save.
    former: tuple[Gang, Worker] | None = None
    outlives: bool = False  # it has another part in the next attempt

    @property
    def is_busy(self) -> bool:
        """Whether it is still in a save of an attempt that is over."""
        if self.former is None:
            return False
        gang, worker = self.former
        return worker.is_busy or gang.is_saving(worker)

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self.code is None

    @property
    def acts(self) -> bool:
        """Whether it still does something by itself."""
        return self.alive and not self.hung


class Gang:
    """The processes of an attempt, and the save that they are at."""

    def __init__(
        self,
        attempt: int,
        num_processes: int,
        program: Program,
        step: int,
        *,
        timeline: Timeline,
        watcher: Watcher,
    ) -> None:
        self.attempt = attempt
        self.step = -1
        self.saved_step = -1
        self.last_step_at = timeline.now
        self.done = False
        self.coordinator = True
        self.has_met = False  # all have been there at one time
        self.workers = [
            Worker(process, process in program.strangers, attempt)
            for process in range(num_processes)
        ]
        self.begins_at = step
        self._program = program
        self._timeline = timeline
        self._watcher = watcher
        self._noticed = False
        self._going = False  # all save and leave
        self._code = 0  # with which all leave
        self._save = -1
        self._step_of_save = -1
        self._save_runs = False
        self._save_lost = False
        self._goes_after = False  # as soon as this save is over
        self._holds = False  # those that have left their loop wait for what becomes of them

    # --- Steps

    @property
    def members(self) -> list[Worker]:
        """The processes with a client."""
        return [worker for worker in self.workers if not worker.is_stranger]

    @property
    def ours(self) -> dict[int, Worker]:
        """The processes with a client that have joined."""
        return {worker.process: worker for worker in self.members if worker.joined}

    @property
    def restartable(self) -> frozenset[int]:
        """The processes that can outlive this attempt."""
        return frozenset(self.ours) if self._program.outlives else frozenset()

    def start(self, count: int) -> None:
        """Starts the first `count` processes."""
        for worker in self.workers[:count]:
            self._start(worker)

    def _start(self, worker: Worker) -> None:
        begin = self._work_alone if worker.is_stranger else self._join
        self._after(0.2, 1.5, partial(begin, worker))

    # --- Attempts that processes outlive

    def replace(self, process: int) -> None:
        """Starts a process anew, in the place of what runs there."""
        former = self.workers[process]
        former.outlives = True
        self.end(former, BY_SIGKILL)
        worker = Worker(process, former.is_stranger, self.attempt)
        self.workers[process] = worker
        self._start(worker)

    def take_over(self, before: Gang, old: Worker, process: int, *, goes: bool) -> None:
        """Has a process of the attempt before join this one, once its save there is over; or end,
        where it goes.
        """
        old.outlives = True
        worker = self.workers[process]
        worker.former = (before, old)
        worker.life = old.life
        worker.hung = old.hung
        worker.lingers_s = old.lingers_s
        worker.late_s = old.late_s
        if not old.alive:  # its end is on its way, and nobody knows yet
            worker.code = old.code
            self._after(0.0, 0.2, partial(self._miss, worker))
        elif old.leaving or goes:
            code = FAILED if old.ends_with is None else old.ends_with
            self._after(0.0, self._program.shutdown_s, partial(self._end_alone, worker, code))
        else:
            self._after(0.1, 1.0, partial(self._come_back, worker))

    def number_of(self, worker: Worker) -> int:
        """Returns which number a process has by now, which may have had another one before."""
        for each in self.workers:
            life: Worker | None = each
            while life is not None:
                if life is worker:
                    return each.process
                life = life.former[1] if life.former is not None else None
        return worker.process

    def go_alone(self, worker: Worker) -> None:
        """Has a process end that has left its loop, and whose number there is no more."""
        code = FAILED if worker.ends_with is None else worker.ends_with
        self._after(0.0, 4 * self._program.shutdown_s, partial(self._end_alone, worker, code))

    def _come_back(self, worker: Worker) -> None:
        if worker.is_busy:
            self._after(0.1, 0.3, partial(self._come_back, worker))
            return
        if worker.former is not None:
            worker.former[1].hung = True
        self._join(worker)

    def is_saving(self, worker: Worker) -> bool:
        """Whether a process waits for the end of a save."""
        settled = (self._save, SaveStage.SETTLED)
        return worker.acts and self._save_runs and worker.position < settled

    def pass_on(self, following: Gang) -> None:
        """Has the next attempt know of a notice that this one has heard of."""
        if self._noticed and not any(worker.held for worker in self.workers):
            self._noticed = False
            following.notify()

    def dismiss(self) -> None:
        """Tells those that wait that there is no next attempt for them."""
        self._holds = False
        for worker in self.members:
            if worker.held:
                self._begin_leaving(worker)

    def _after(self, least_s: float, most_s: float, call: Callable[[], None]) -> None:
        self._timeline.later(self._timeline.draw(least_s, most_s), call)

    def _work_alone(self, worker: Worker) -> None:
        work_s = self._program.steps * self._program.step_s
        self._after(work_s, work_s * 1.2, partial(self.end, worker, 0))

    def _join(self, worker: Worker) -> None:
        if not worker.acts:
            return
        worker.joined = True
        self._watcher.changed()
        if all(each.joined and each.alive for each in self.members):
            self.has_met = True
            self.step = self.begins_at
            self._timeline.later(self._program.step_s, self._train)
            if self._noticed:
                self._after(0.1, 2.0, self._agree)

    def _train(self) -> None:
        if self._going or not all(worker.acts and not worker.leaving for worker in self.members):
            return
        if self.step < self._program.steps:
            self.step += 1
            self.last_step_at = self._timeline.now
            self._watcher.changed()
        if self.step >= self._program.steps:
            self.done = self._program.says_done
            self._go(0)
            return
        every = self._program.save_every
        if every and self.step % every == 0 and not self._save_runs:
            self._begin_save()
        self._timeline.later(self._program.step_s, self._train)

    # --- A save

    def _begin_save(self) -> None:
        self._save += 1
        self._save_runs = True
        self._save_lost = False
        self._step_of_save = self.step
        for worker in self.members:
            self._after(0.0, 0.3, partial(self._write, worker, self._save))
        if not all(worker.alive for worker in self.members):
            self._lose_save()

    def _rise(self, worker: Worker, save: int, stage: SaveStage) -> bool:
        """Brings a process to a stage of a save; returns whether it got there by that."""
        position = SavePosition(save, stage)
        if not worker.acts or position <= worker.position:
            return False
        worker.position = position
        self._watcher.changed()
        return True

    def _write(self, worker: Worker, save: int) -> None:
        if self._rise(worker, save, SaveStage.WRITING):
            write_s = self._program.write_s
            self._after(write_s / 2, write_s * 1.5, partial(self._report, worker, save))

    def _report(self, worker: Worker, save: int) -> None:
        if not self._rise(worker, save, SaveStage.REPORTED):
            return
        reported = (save, SaveStage.REPORTED)
        if all(each.position >= reported for each in self.members) and not self._save_lost:
            self._after(0.0, 0.2, partial(self._begin_commit, save))

    def _begin_commit(self, save: int) -> None:
        if self.coordinator and self._rise(self.members[0], save, SaveStage.COMMITTING):
            commit_s = self._program.commit_s
            self._after(commit_s / 2, commit_s * 1.5, partial(self._commit, save))

    def _commit(self, save: int) -> None:
        primary = self.members[0]
        if not primary.acts or self._save_lost:
            return
        self._watcher.committed(self._step_of_save)
        self.saved_step = self._step_of_save
        self._settle(primary, save)
        for worker in self.members[1:]:
            self._after(0.0, 0.5, partial(self._settle, worker, save))

    def _lose_save(self) -> None:
        if not self._save_runs or self._save_lost:
            return
        self._save_lost = True
        for worker in self.members:
            self._after(0.1, 1.0, partial(self._settle, worker, self._save))

    def _settle(self, worker: Worker, save: int) -> None:
        if not self._rise(worker, save, SaveStage.SETTLED):
            return
        if worker.ends_with is not None and not self._goes_after:
            self._begin_leaving(worker)
        self._end_save()

    def _end_save(self) -> None:
        settled = (self._save, SaveStage.SETTLED)
        living = [worker for worker in self.members if worker.acts]
        if not self._save_runs or any(worker.position < settled for worker in living):
            return
        self._save_runs = False
        if self._goes_after:
            self._goes_after = False
            self._go(self._code)

    # --- Leaving

    def notify(self) -> None:
        """Tells the processes of a notice."""
        if self._noticed:
            return
        self._noticed = True
        if len(self.ours) == len(self.members):
            self._after(0.1, 2.0, self._agree)

    def withdraw(self) -> None:
        """Tells the processes that the notice holds no more: those that have not begun, stay."""
        self._noticed = False

    def _agree(self) -> None:
        if self._noticed and not self._going:
            self._holds = self._program.outlives
            self._go(self._program.leaves_with)

    def _go(self, code: int) -> None:
        """Has all save, and leave with `code`."""
        self._going = True
        self._code = code
        if self._save_runs:
            self._goes_after = True
            return
        if self._program.save_every:
            self._begin_save()
        for worker in self.members:
            if worker.ends_with is None:
                worker.ends_with = code
            if not self._save_runs:
                self._begin_leaving(worker)

    def _begin_leaving(self, worker: Worker) -> None:
        if not worker.acts or worker.leaving or worker.outlives:
            return
        self._watcher.changed()
        if self._holds:
            worker.held = True
            return
        worker.leaving = True
        self._pass_shutdown()

    def _pass_shutdown(self) -> None:
        """Ends those in the shutdown, once all are there or one has failed."""
        living = [worker for worker in self.members if worker.alive]
        failed = any(worker.code not in (None, *LEFT) for worker in self.members)
        if not failed and not all(worker.leaving for worker in living):
            return
        for worker in living:
            if worker.leaving and worker.ends_with is not None:
                self._after(0.0, self._program.shutdown_s, partial(self._end_well, worker))

    def _end_well(self, worker: Worker) -> None:
        if worker.acts and worker.ends_with is not None:
            self.end(worker, worker.ends_with)

    def leave(self, worker: Worker, code: int, shutdown_s: float) -> None:
        """Has one process leave by itself."""
        if worker.acts and worker.joined and not worker.leaving:
            worker.leaving = True
            worker.ends_with = None
            self._watcher.changed()
            self._timeline.later(shutdown_s, partial(self._end_alone, worker, code))

    def _end_alone(self, worker: Worker, code: int) -> None:
        if worker.acts:
            self.end(worker, code)

    def _give_up(self, worker: Worker) -> None:
        """Has a process fail that waits for another one in vain."""
        if not worker.acts or worker.leaving or worker.outlives:
            return
        if worker.ends_with is None:
            worker.ends_with = FAILED
        if not self._save_runs or worker.position >= (self._save, SaveStage.SETTLED):
            self._begin_leaving(worker)

    # --- Ends

    def end(self, worker: Worker, code: int) -> None:
        """Ends a process."""
        if not worker.alive:
            return
        worker.code = code
        if worker.former is not None:
            gang, old = worker.former
            gang.end(old, code)
        if not worker.outlives:
            self._watcher.ended(self, worker)
        self._miss(worker)

    def _miss(self, worker: Worker) -> None:
        """Has the others go on without a process."""
        if worker.is_stranger:
            return
        uncommitted = (self._save, SaveStage.SETTLED)
        needed = (self._save, SaveStage.REPORTED)
        primary = worker is self.members[0]
        if worker.position < needed or (primary and worker.position < uncommitted):
            self._lose_save()
        self._pass_shutdown()
        if not self._going:
            self._lose_patience()
        self._end_save()

    def _lose_patience(self) -> None:
        patience_s = self._program.patience_s
        if patience_s == math.inf:
            return
        for worker in self.members:
            self._after(patience_s / 2, patience_s * 1.5, partial(self._give_up, worker))

    def end_coordinator(self) -> None:
        """Ends the coordinator: no save can be committed, and nobody hears anything."""
        self.coordinator = False
        for worker in self.members:
            self._after(1.0, 10.0, partial(self._give_up_alone, worker))

    def _give_up_alone(self, worker: Worker) -> None:
        if worker.acts:
            self.end(worker, FAILED)

    # --- Signals

    def terminate(self, worker: Worker, *, is_notice: bool = False) -> None:
        """Sends SIGTERM to a process."""
        if not worker.acts:
            return
        if worker.reacts:
            if worker.reaction is not None:
                code, after_s = worker.reaction
                self._timeline.later(after_s, partial(self._end_alone, worker, code))
        elif worker.is_stranger:
            leaves = partial(self._end_alone, worker, self._program.leaves_with)
            self._after(0.1, 3.0, leaves)
        elif not worker.joined:
            self.end(worker, BY_SIGTERM)
        elif is_notice:
            self.notify()
        else:
            self._after(0.0, 2.0, partial(self._give_up, worker))

    def kill(self, worker: Worker) -> None:
        """Sends SIGKILL to a process."""
        if not worker.alive or worker.killed_at is not None:
            return
        worker.killed_at = self._timeline.now
        worker.hung = True
        if worker.former is not None:
            gang, old = worker.former
            gang.kill(old)
        self._after(0.0, 0.1 + worker.lingers_s, partial(self.end, worker, BY_SIGKILL))

    def hang(self, worker: Worker, *, silent: bool) -> None:
        """Has a process do nothing any more."""
        worker.hung = True
        worker.silent = silent

    # --- What is true

    def needed(self, told_silent: frozenset[int]) -> frozenset[int]:
        """Returns the processes that a save needs which can still be committed."""
        latest = max(worker.position.save for worker in self.workers)
        settled = (latest, SaveStage.SETTLED)
        if latest < 0 or any(worker.position == settled for worker in self.workers):
            return frozenset()
        unheard = [each for each in self.workers if self._is_unheard(each, told_silent)]
        reported = (latest, SaveStage.REPORTED)
        if not self.coordinator or any(worker.position < reported for worker in unheard):
            return frozenset()
        return frozenset(self.ours) - {worker.process for worker in unheard}

    def needed_before(self) -> frozenset[int]:
        """Returns those that an earlier attempt's save needs, of the processes that outlive it."""
        needed = []
        for worker in self.workers:
            if worker.former is not None and worker.alive and not worker.joined:
                gang, _ = worker.former
                others = gang.needed(frozenset()) | gang.needed_before()
                needed += [worker.process] if worker.process in others else []
        return frozenset(needed)

    def _is_unheard(self, worker: Worker, told_silent: frozenset[int]) -> bool:
        """Whether a process reports nothing any more, as the supervisor knows or has brought on."""
        is_gone = not worker.alive or worker.killed_at is not None
        return is_gone or worker.process in told_silent
