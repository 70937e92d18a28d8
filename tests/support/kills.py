"""Kills drawn by seed against jobs on a real cluster: who is lost is replaced, the others stay.

Four processes on two nodes, and nodes to spare; a few kills in each job. Each saved step is, bit
for bit, that of a job in which nobody dies; no acknowledged step is lost; the parts of goodput come
to the wall clock; nobody is started again who could stay. A cluster adds how it starts jobs, and
kinds of kills of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from holdfast.launch import RestartPolicy
from tests.support.processes import wait_until
from tests.support.restartable_jobs import Death, Restartable

POLICY = RestartPolicy(
    max_failures=3, max_preemptions=3, backoff_s=0.1, startup_timeout_s=120, rejoin_timeout_s=30
)
COUNT = 4
KILLS_OF_A_JOB = 5
SAVED_EVERY = 10  # steps of `restartable.py`, beside those at which it has to stop
MANY_STEPS = 1_000_000  # of a job, which ends before
HABIT = "is of any size"  # its numbers grow for ever
COMES_BACK_S = 150.0
UNDISTURBED_S = 900.0
STAYING_STEPS = 30  # they go on with so many where nobody is lost
_NOBODY: Mapping[int, int] = {}


class Ended(NamedTuple):
    """How a job has ended."""

    outcome: str
    elapsed_s: float
    goodput_s: Mapping[str, float]
    reasons: Sequence[str]


class Job(Restartable):
    """A job of `restartable.py` on a cluster, which runs until it is told to end."""

    def ended(self) -> Ended | None:
        """Returns how it has ended, None while it runs."""
        raise NotImplementedError

    def said(self) -> str:
        """Returns what it has printed so far."""
        raise NotImplementedError

    def latest_pids(self) -> list[int]:
        """Returns the process of each number that has begun last."""
        latest = {note["process"]: note["pid"] for note in self.notes("begins")}
        return [latest[process] for process in range(COUNT)]

    def attempt(self) -> int:
        """Returns the latest attempt of which all have begun, and have saved a step since."""
        if not (self.folder / "log").exists():
            return 0
        notes = [*self.notes("begins"), *self.notes("saved")]
        latest = max((note["attempt"] for note in notes), default=0)
        here = [note for note in notes if note["attempt"] == latest]
        has = {
            what: {n["process"] for n in here if n["what"] == what} for what in ("begins", "saved")
        }
        return latest if len(has["begins"]) == len(has["saved"]) == COUNT else 0

    def wait_for(self, attempt: int, lost: Mapping[int, int] = _NOBODY) -> float:
        """Waits for an attempt, or a later one, without processes that are lost; returns when its
        first step was saved.
        """

        come: list[int] = []

        def is_there() -> bool:
            assert self.ended() is None, self.ended()
            if self.attempt() < attempt:
                return False
            pids = self.latest_pids()
            come.append(self.attempt())  # 0 where another has begun since
            return come[-1] > 0 and all(pids[process] != pid for process, pid in lost.items())

        wait_until(is_there, COMES_BACK_S)
        return min(float(n["time_s"]) for n in self.notes("saved") if n["attempt"] == come[-1])

    def wait_for_more(self, steps: int) -> None:
        """Waits until so many steps more are saved."""
        before = self.saved()
        wait_until(lambda: self.saved() >= before + steps, COMES_BACK_S)

    def saved(self) -> int:
        """Returns the last step that was saved."""
        return max((note["step"] for note in self.notes("saved")), default=0)

    def end(self, after: int, within_s: float = COMES_BACK_S) -> Ended:
        """Has it end so many steps later, or where it has come to by then."""
        told = self.folder / "told"
        told.write_text(str((self.saved() + after) // SAVED_EVERY * SAVED_EVERY))
        told.rename(self.folder / "last")
        wait_until(lambda: self.ended() is not None, within_s)
        ended = self.ended()
        assert ended is not None
        return ended

    def forsake(self) -> None:
        """Has it end, as one that nobody waits for."""
        end(self.latest_pids())
        (self.folder / "last").write_text("0")

    def saved_results(self) -> dict[int, set[float]]:
        """Returns what training had come to at each saved step, by each process and attempt."""
        found: dict[int, set[float]] = {}
        for note in self.notes("saved"):
            found.setdefault(note["step"], set()).add(note["result"])
        return found


def parent(pid: int) -> int:
    """Returns the process that a process is a child of."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def end(pids: Sequence[int]) -> None:
    """Ends processes, where they have not ended yet."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Kill:
    """One kill of a job: each kind ends something, and returns who has to be started again."""

    def __init__(self, job: Job, drawn: random.Random) -> None:
        self.job = job
        self.pids = job.latest_pids()
        self.nodes = [self.node_of(pid) for pid in self.pids]
        self.process = drawn.randrange(COUNT)
        self.other = drawn.choice([each for each in range(COUNT) if each != self.process])

    def node_of(self, pid: int) -> Any:
        """Returns the node on which a process runs."""
        raise NotImplementedError

    def on(self, node: Any) -> set[int]:
        """Returns the processes of a node."""
        return {process for process, its in enumerate(self.nodes) if its == node}

    def deaf(self) -> set[int]:
        """Returns the processes that live, and cannot come to another attempt."""
        return set()

    def a_process(self) -> set[int]:
        end([self.pids[self.process]])
        return {self.process}

    def two_processes(self) -> set[int]:
        end([self.pids[self.process], self.pids[self.other]])
        return {self.process, self.other}

    def all_of_a_node(self) -> set[int]:
        lost = self.on(self.nodes[self.process])
        end([self.pids[each] for each in lost])
        return lost

    def the_replacement_as_it_joins(self) -> set[int]:
        self.job.order([Death(self.process, "join")])
        return self.a_process()


class Campaign:
    """Jobs on a cluster, the kills that met them, and what was not as it is to be."""

    kinds: ClassVar[Sequence[Callable[[Any], set[int]]]]

    def __init__(self, seed: int, kinds: Sequence[str] = ()) -> None:
        self.broken: list[str] = []
        self.counts = Counter[str]()  # of kills, by their kinds
        self.took: dict[str, list[float]] = {}  # from each kill to the first step saved after it
        self._kinds = [kind for kind in self.kinds if not kinds or kind.__name__ in kinds]
        self._drawn = random.Random(seed)
        self._folder = tempfile.TemporaryDirectory(prefix="holdfast-kills-")
        self._jobs: list[Job] = []

    def start_job(self, folder: Path) -> Job:
        """Starts a job on a whole cluster."""
        raise NotImplementedError

    def mend(self) -> None:
        """Has nodes in the place of those that a job has lost, where it can take them."""

    def kill(self, job: Job, drawn: random.Random) -> Kill:
        """Draws whom a kill meets."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the cluster."""
        raise NotImplementedError

    def run(self, kills: int) -> None:
        """Runs as many jobs as so many kills take."""
        try:
            plan = [self._kinds[number % len(self._kinds)] for number in range(kills)]
            self._drawn.shuffle(plan)
            while plan:
                ours, plan = plan[:KILLS_OF_A_JOB], plan[KILLS_OF_A_JOB:]
                self._run_job(ours)
            self._check_results()
        finally:
            self.close()
            self._folder.cleanup()

    def _job(self) -> Job:
        job = self.start_job(Path(self._folder.name) / str(len(self._jobs)))
        self._jobs.append(job)
        job.wait_for(1)
        return job

    def _check_results(self) -> None:
        """Sees that each step came to what it comes to where nobody dies."""
        jobs = self._jobs.copy()
        undisturbed = self._job()
        last = max(job.saved() for job in jobs)
        undisturbed.end(after=last, within_s=UNDISTURBED_S)
        expected = undisturbed.saved_results()
        for job in jobs:
            found = job.saved_results().items()
            if strays := [step for step, has in found if has != expected.get(step, has)]:
                self._note(job, f"another end of steps {strays}")

    def _run_job(self, kinds: Sequence[Callable[[Any], set[int]]]) -> None:
        job = self._job()
        try:
            for kind in kinds:
                self._kill(job, kind)
            self._check_end(job, job.end(after=50))
        except (AssertionError, OSError) as error:  # a process is not where it should be
            job.forsake()
            self._note(job, f"{type(error).__name__}: {error}")

    def _kill(self, job: Job, kind: Callable[[Any], set[int]]) -> None:
        self.mend()
        job.wait_for_more(SAVED_EVERY * self._drawn.randint(1, 6))
        attempt = job.attempt()
        before = job.latest_pids()
        kill = self.kill(job, self._drawn)
        killed_s = time.monotonic()
        lost = kind(kill)
        took = ""
        if lost:
            lost |= kill.deaf()
            # The processes of a node whose daemon is gone live on for a while.
            back_s = job.wait_for(attempt + 1, {process: before[process] for process in lost})
            self.took.setdefault(kind.__name__, []).append(back_s - killed_s)
            took = f", {back_s - killed_s:.1f} s"
        else:
            job.wait_for_more(STAYING_STEPS)
        self.counts[kind.__name__] += 1
        after = job.latest_pids()
        new = {process for process in range(COUNT) if before[process] != after[process]}
        print(
            f"{kind.__name__} of {sorted(lost)}: new {sorted(new)}, attempts {attempt} to"
            f" {job.attempt()}{took}",
            flush=True,
        )
        if new != lost:
            self._note(job, f"{kind.__name__} of {sorted(lost)}: new are {sorted(new)}")

    def _check_end(self, job: Job, ended: Ended) -> None:
        goodput_s = sum(ended.goodput_s.values())
        job.check_steps()
        for holds, what in (
            (ended.outcome == "done", f"ended as {ended.outcome}"),
            (not list(job.folder.glob("kill-*")), "an order was not kept"),
            (abs(goodput_s - ended.elapsed_s) < 0.01 * ended.elapsed_s, "goodput"),
            (job.results() == job.saved_results()[job.saved()], "another result"),
        ):
            if not holds:
                self._note(job, what)

    def _note(self, job: Job, what: str) -> None:
        ended = job.ended()
        reasons = () if ended is None else ended.reasons
        story = [f"job {self._jobs.index(job)}: {what}", *reasons, job.said()[-3000:]]
        self.broken.append("\n".join(story))
        print("BROKEN", self.broken[-1], flush=True)


def main(campaign_of: type[Campaign]) -> int:
    """Runs a campaign as the command line says; returns 1 where something is broken."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--kinds", nargs="*", default=())
    settings = parser.parse_args()
    campaign = campaign_of(settings.seed, settings.kinds)
    campaign.run(settings.kills)
    for kind, count in sorted(campaign.counts.items()):
        times = ", ".join(f"{each:.1f}" for each in sorted(campaign.took.get(kind, ())))
        print(f"{count} of {kind}: {times} s" if times else f"{count} of {kind}: nobody was lost")
    print(f"{campaign.counts.total()} kills, {len(campaign.broken)} broken")
    return 1 if campaign.broken else 0
