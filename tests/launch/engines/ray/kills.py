"""Kills drawn by seed against jobs on a real Ray cluster: who is lost is replaced, the others stay.

    python -m tests.launch.engines.ray.kills --seed 1 --kills 50

Four processes on two nodes of three, a few kills in each job. Each saved step is, bit for bit, that
of a job in which nobody dies; no acknowledged step is lost; the parts of goodput come to the wall
clock; nobody is started again who could stay.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.launch import RestartPolicy
from holdfast.launch import ray as engine
from holdfast.launch.supervisor.engine import JobResult
from tests.support.cluster import CollectedOutput
from tests.support.paths import program
from tests.support.processes import descendants, wait_until
from tests.support.ray_fleet import Fleet
from tests.support.restartable_jobs import Death, Restartable

ENV = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
POLICY = RestartPolicy(
    max_failures=3, max_preemptions=3, backoff_s=0.1, startup_timeout_s=120, rejoin_timeout_s=30
)
COUNT = 4
KILLS_OF_A_JOB = 5
MOST_STEPS = 4000  # of a job: its numbers grow, and are finite until then
COMES_BACK_S = 150.0
_NOBODY: Mapping[int, int] = {}


class Job(Restartable):
    """A job of `restartable.py` on a thread beside, which runs until it is told to end."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.output = CollectedOutput()
        self.result: JobResult | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        command = [sys.executable, str(program("restartable")), str(self.folder), str(MOST_STEPS)]
        spec = engine.JobSpec(num_processes=COUNT, restart=POLICY, env=ENV)
        self.result = engine.run_command(command, spec, output=self.output).job

    def pids(self) -> list[int]:
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

        def is_there() -> bool:
            assert self.result is None, self.result
            if self.attempt() < attempt:
                return False
            pids = self.pids()
            return all(pids[process] != pid for process, pid in lost.items())

        wait_until(is_there, COMES_BACK_S)
        latest = self.attempt()
        return min(n["time_s"] for n in self.notes("saved") if n["attempt"] == latest)

    def wait_for_more(self, steps: int) -> None:
        """Waits until so many steps more are saved."""
        before = self.saved()
        wait_until(lambda: self.saved() >= before + steps, COMES_BACK_S)

    def saved(self) -> int:
        return max((note["step"] for note in self.notes("saved")), default=0)

    def end(self, after: int) -> JobResult:
        """Has it end so many steps later, or where it has come to by then."""
        told = self.folder / "told"
        told.write_text(str(self.saved() + after))
        told.rename(self.folder / "last")
        wait_until(lambda: self.result is not None, COMES_BACK_S)
        assert self.result is not None
        return self.result

    def forsake(self) -> None:
        """Has it end, as one that nobody waits for."""
        end(self.pids())
        (self.folder / "last").write_text("0")

    def saved_results(self) -> dict[int, set[float]]:
        """Returns what training had come to at each saved step, by each process and attempt."""
        found: dict[int, set[float]] = {}
        for note in self.notes("saved"):
            found.setdefault(note["step"], set()).add(note["result"])
        return found


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def hosts_below(raylet: int) -> list[int]:
    """Returns the actors that hold a relay on a node."""
    return [
        pid
        for pid in descendants(raylet)
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::HostActor")
    ]


def end(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Kill:
    """One kill of a job: what it hits, and who has to be started again."""

    def __init__(self, fleet: Fleet, job: Job, drawn: random.Random) -> None:
        self.fleet = fleet
        self.job = job
        self.pids = job.pids()
        self.nodes = [fleet.node_of(pid) for pid in self.pids]
        self.process = drawn.randrange(COUNT)
        self.other = drawn.choice([each for each in range(COUNT) if each != self.process])

    def on(self, node: Any) -> set[int]:
        return {process for process, its in enumerate(self.nodes) if its is node}

    def _lose(self, node: Any) -> set[int]:
        os.kill(self.fleet.raylet(node), signal.SIGKILL)
        return self.on(node)

    def a_process(self) -> set[int]:
        end([self.pids[self.process]])
        return {self.process}

    def two_processes(self) -> set[int]:
        end([self.pids[self.process], self.pids[self.other]])
        return {self.process, self.other}

    def an_actor(self) -> set[int]:
        end([parent(parent(self.pids[self.process]))])
        return {self.process}

    def all_of_a_node(self) -> set[int]:
        lost = self.on(self.nodes[self.process])
        end([self.pids[each] for each in lost])
        return lost

    def a_daemon(self) -> set[int]:
        return self._lose(self.nodes[self.process])

    def a_relay_and_its_daemon(self) -> set[int]:
        node = self.nodes[self.process]
        end(hosts_below(self.fleet.raylet(node)))
        return self._lose(node)

    def the_node_of_process_0(self) -> set[int]:
        return self._lose(self.nodes[0])

    def a_process_and_another_node(self) -> set[int]:
        nodes = [node for node in self.nodes if node is not self.nodes[self.process]]
        lost = self.a_process()
        return lost | (self._lose(nodes[0]) if nodes else set())

    def the_replacement_as_it_joins(self) -> set[int]:
        self.job.order([Death(self.process, "join")])
        return self.a_process()

    def a_drain(self) -> set[int]:
        self.fleet.drain(self.nodes[self.process], 60)
        return set(range(COUNT))


KINDS: tuple[Callable[[Kill], set[int]], ...] = (
    Kill.a_process,
    Kill.all_of_a_node,
    Kill.a_daemon,
    Kill.a_drain,
    Kill.two_processes,
    Kill.the_replacement_as_it_joins,
    Kill.the_node_of_process_0,
    Kill.a_relay_and_its_daemon,
    Kill.a_process_and_another_node,
    Kill.an_actor,
)


class Campaign:
    """Jobs on a fleet, the kills that met them, and what was not as it is to be."""

    def __init__(self, seed: int, kinds: Sequence[str] = ()) -> None:
        self.broken: list[str] = []
        self.took: dict[str, list[float]] = {}  # from each kill to the first step saved after it
        self._kinds = [kind for kind in KINDS if not kinds or kind.__name__ in kinds]
        self._drawn = random.Random(seed)
        self._fleet = Fleet(__name__, room=2)
        self._folder = tempfile.TemporaryDirectory(prefix="holdfast-kills-")
        self._jobs = 0
        self._expected: dict[int, set[float]] = {}

    def run(self, kills: int) -> None:
        """Runs as many jobs as so many kills take."""
        try:
            self._expected = self._undisturbed()
            plan = [self._kinds[number % len(self._kinds)] for number in range(kills)]
            self._drawn.shuffle(plan)
            while plan:
                ours, plan = plan[:KILLS_OF_A_JOB], plan[KILLS_OF_A_JOB:]
                self._run_job(ours)
        finally:
            self._fleet.close()
            self._folder.cleanup()

    def _job(self) -> Job:
        self._jobs += 1
        self._fleet.become([{}] * 3)
        job = Job(Path(self._folder.name) / str(self._jobs))
        job.wait_for(1)
        return job

    def _undisturbed(self) -> dict[int, set[float]]:
        """Returns what each saved step comes to where nobody dies."""
        job = self._job()
        job.end(after=MOST_STEPS)
        return job.saved_results()

    def _run_job(self, kinds: Sequence[Callable[[Kill], set[int]]]) -> None:
        job = self._job()
        try:
            for kind in kinds:
                self._kill(job, kind)
            self._check_end(job, job.end(after=50))
        except (AssertionError, OSError) as error:  # a process is not where it should be
            job.forsake()
            self._note(job, f"{type(error).__name__}: {error}")

    def _kill(self, job: Job, kind: Callable[[Kill], set[int]]) -> None:
        self._fleet.become([{}] * 3)
        job.wait_for_more(10 * self._drawn.randint(1, 6))
        attempt = job.attempt()
        before = job.pids()
        kill = Kill(self._fleet, job, self._drawn)
        killed_s = time.monotonic()
        lost = kind(kill)
        # The processes of a node whose daemon is gone live on for a while.
        back_s = job.wait_for(attempt + 1, {process: before[process] for process in lost})
        self.took.setdefault(kind.__name__, []).append(back_s - killed_s)
        after = job.pids()
        new = {process for process in range(COUNT) if before[process] != after[process]}
        print(
            f"{kind.__name__} of {sorted(lost)}: new {sorted(new)}, attempts {attempt} to"
            f" {job.attempt()}, {back_s - killed_s:.1f} s",
            flush=True,
        )
        if new != lost:
            self._note(job, f"{kind.__name__} of {sorted(lost)}: new are {sorted(new)}")

    def _check_end(self, job: Job, result: JobResult) -> None:
        goodput_s = sum(vars(result.goodput).values())
        job.check_steps()
        for holds, what in (
            (result.outcome == "done", f"ended as {result.outcome}"),
            (not list(job.folder.glob("kill-*")), "an order was not kept"),
            (abs(goodput_s - result.elapsed_s) < 0.01 * result.elapsed_s, "goodput"),
            (job.saved_results().items() <= self._expected.items(), "another end"),
            (job.results() == self._expected[job.saved()], "another result"),
        ):
            if not holds:
                self._note(job, what)

    def _note(self, job: Job, what: str) -> None:
        reasons = () if job.result is None else job.result.reasons
        story = [f"job {self._jobs}: {what}", *reasons, job.output.text[-3000:]]
        self.broken.append("\n".join(story))
        print("BROKEN", self.broken[-1], flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--kinds", nargs="*", default=())
    settings = parser.parse_args()
    campaign = Campaign(settings.seed, settings.kinds)
    campaign.run(settings.kills)
    for kind, took in sorted(campaign.took.items()):
        times = ", ".join(f"{each:.1f}" for each in sorted(took))
        print(f"{len(took)} of {kind}: {times} s")
    print(f"{sum(map(len, campaign.took.values()))} kills, {len(campaign.broken)} broken")
    return 1 if campaign.broken else 0


if __name__ == "__main__":
    sys.exit(main())
