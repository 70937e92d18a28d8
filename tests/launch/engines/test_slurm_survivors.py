"""Processes that outlive attempts under a real slurmctld with four slurmd on loopback: who is lost
is replaced on its node, or on a spare where that is lost too, and the others stay.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import program
from tests.support.restartable_jobs import Death, Restartable
from tests.support.slurm import SlurmCluster, require_slurm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(290)]
require_slurm()

HOLDFAST = Path(sys.executable).parent / "holdfast"
OPTIONS = "--heartbeat-timeout-s 10 --coordinator-host 127.0.0.1"
LONG = 400
"""Steps of a job in which somebody else kills."""


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    with SlurmCluster(4) as cluster:
        yield cluster


class Trial(Restartable):
    """A job of `restartable.py` in a folder: three tasks on three nodes, and nodes to spare."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        super().__init__(folder)
        self.cluster = cluster
        self.id = ""

    def submit(
        self, steps: int, options: str = OPTIONS, *more: str, habit: str = "", spares: int = 1
    ) -> None:
        command = f"{sys.executable} {program('restartable')} {self.folder} {steps} {habit}"
        script = (
            "#!/bin/bash\nexport JAX_PLATFORMS=cpu"
            " XLA_FLAGS=--xla_force_host_platform_device_count=1\n"
            f"exec {HOLDFAST} slurm --spares {spares} {options} -- {command}\n"
        )
        nodes = (f"-N{3 + spares}", "--ntasks-per-node=1", "-plow", "--no-kill", *more)
        self.id = self.cluster.submit(script, *nodes, cwd=self.folder)

    def wait(self) -> None:
        """Waits for the end, which is a good one."""
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.cluster.wait_until(lambda: self.state() in ends, f"end; {self.output()[-5000:]}")
        assert self.state() == "COMPLETED", self.output()

    def state(self) -> str:
        return self.cluster.job(self.id).get("JobState", "")

    def output(self) -> str:
        path = self.folder / "out"
        return path.read_text() if path.exists() else ""

    def wait_for_step(self, step: int) -> None:
        """Waits until a step is saved."""

        def is_saved() -> bool:
            log = self.folder / "log"
            return log.exists() and any(note["step"] >= step for note in self.notes("saved"))

        self.cluster.wait_until(is_saved, f"step {step}; {self.output()[-5000:]}")

    def latest(self, process: int) -> dict[str, Any]:
        return [note for note in self.notes("train") if note["process"] == process][-1]


@pytest.fixture(scope="module")
def undisturbed(
    slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], set[float]]:
    """Returns what so many steps come to where nobody dies."""

    @functools.cache
    def found(steps: int) -> set[float]:
        trial = Trial(slurm, tmp_path_factory.mktemp(f"undisturbed-{steps}"))
        trial.submit(steps)
        trial.wait()
        return trial.results()

    return found


DEATHS = {
    "one": ([Death(1, "step", 11)],),
    "another, then process 0": ([Death(1, "step", 11)], [Death(0, "save", 30)]),
    "two at once": ([Death(0, "step", 11), Death(1, "step", 11)],),
    "the replacement as it joins": ([Death(1, "step", 11)], [Death(1, "join")]),
}


@pytest.mark.parametrize("insecure", ["", " --insecure"], ids=["closed", "open"])
@pytest.mark.parametrize("who", DEATHS)
def test_who_dies_is_replaced_and_the_others_stay(
    who: str,
    insecure: str,
    slurm: SlurmCluster,
    tmp_path: Path,
    undisturbed: Callable[[int], set[float]],
) -> None:
    """On its node. The end is that of a job in which nobody died, and no saved step is lost."""
    trial = Trial(slurm, tmp_path / "job")
    trial.order(*DEATHS[who])
    trial.submit(60, OPTIONS + insecure)
    trial.wait()
    assert not list(trial.folder.glob("kill-*")), trial.output()
    assert trial.results() == undisturbed(60)
    assert trial.lives()[2] == 1, trial.output()
    trial.check_steps()
    stayed = re.search(r"processes stayed in (\d+) of (\d+) attempts", trial.output())
    assert stayed and int(stayed[1]) == int(stayed[2]) - 1, trial.output()


def test_who_is_replaced_has_the_cpus_of_its_node(tmp_path: Path) -> None:
    """Where Slurm binds tasks, a step of one would have the first alone, which may be another's."""
    with SlurmCluster(3, task_plugin="affinity") as cluster:
        trial = Trial(cluster, tmp_path / "job")
        trial.order([Death(1, "step", 11)])
        trial.submit(10_000, OPTIONS, "--cpus-per-task=2", spares=0)
        trial.wait_for_step(1)
        cluster.wait_until(lambda: trial.latest(1)["attempt"] == 2, "attempt 2", timeout_s=100)
        bound = [len(os.sched_getaffinity(trial.latest(each)["pid"])) for each in range(3)]
        assert bound == [2, 2, 2], trial.output()


def test_who_does_not_come_is_ended_by_its_task(
    slurm: SlurmCluster, tmp_path: Path, undisturbed: Callable[[int], set[float]]
) -> None:
    """Process 1 goes on as if the attempt were not over: its task ends it, alone of its step."""
    trial = Trial(slurm, tmp_path / "job")
    trial.order([Death(2, "step", 11)])
    trial.submit(60, habit="swallows")
    trial.wait()
    assert trial.results() == undisturbed(60)
    assert trial.lives() == [1, 2, 2], trial.output()
    assert "process 1 did not come to attempt 2" in trial.output()


@pytest.fixture
def whole(slurm: SlurmCluster) -> Iterator[SlurmCluster]:
    """The cluster, whose lost nodes come back after the test."""
    yield slurm
    slurm.become_whole()


def test_with_its_node_a_process_is_replaced_on_a_spare(
    whole: SlurmCluster, tmp_path: Path, undisturbed: Callable[[int], set[float]]
) -> None:
    """A node that vanishes with its process: the process begins on the spare node, and the others
    stay.
    """
    expected = undisturbed(LONG)
    trial = Trial(whole, tmp_path / "job")
    trial.submit(LONG)
    trial.wait_for_step(100)
    whole.kill_node("n3")
    trial.wait()
    assert trial.results() == expected
    assert trial.lives() == [1, 1, 2], trial.output()
    trial.check_steps()
    assert "node n4 stands for n3" in trial.output()


def test_whose_node_slurm_gives_up_is_replaced_with_the_next(
    whole: SlurmCluster, tmp_path: Path
) -> None:
    """SIGKILL of slurmd alone leaves its task alive: nobody is replaced. But once the node is DOWN,
    srun passes nothing on to it. So it is replaced when another process is, and not waited for.
    """
    trial = Trial(whole, tmp_path / "job")
    trial.submit(10**6)  # until it is told
    trial.wait_for_step(50)
    whole.kill_daemon("n3")
    whole.wait_for_state("n3", "down")
    assert trial.lives() == [1, 1, 1], trial.output()
    os.kill(trial.latest(1)["pid"], signal.SIGKILL)
    whole.wait_until(lambda: trial.latest(2)["attempt"] == 2, "attempt 2", timeout_s=100)
    told = trial.folder / "told"
    told.write_text("0")
    told.rename(trial.folder / "last")
    trial.wait()
    assert trial.lives() == [1, 2, 2], trial.output()
    assert "did not come" not in trial.output()
    trial.check_steps()


def test_without_a_spare_the_job_is_requeued(
    whole: SlurmCluster, tmp_path: Path, undisturbed: Callable[[int], set[float]]
) -> None:
    """It says what would have kept the others, and goes on when Slurm has three nodes again."""
    expected = undisturbed(LONG)
    trial = Trial(whole, tmp_path / "job")
    trial.submit(LONG, spares=0)
    trial.wait_for_step(100)
    whole.kill_node("n3")
    trial.wait()
    assert trial.results() == expected
    assert whole.job(trial.id)["Restarts"] == "1"
    assert "with --spares 1, in an allocation of one node more" in trial.output()
