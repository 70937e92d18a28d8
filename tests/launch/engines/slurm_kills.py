"""Kills drawn by seed against jobs under a real slurmctld with seven slurmd: see
`support/kills.py`.

    python -m tests.launch.engines.slurm_kills --seed 1 --kills 50

A job has two nodes of an allocation of seven. The batch step is on another of them, which never
dies: its loss ends the job.
"""

from __future__ import annotations

import json
import random
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support import kills
from tests.support.kills import COUNT, HABIT, KILLS_OF_A_JOB, MANY_STEPS, POLICY, Ended, parent
from tests.support.paths import program
from tests.support.restartable_jobs import Death
from tests.support.slurm import SlurmCluster, node_of

USED = 2
SPARES = KILLS_OF_A_JOB  # each kill loses a node at most
BATCH = "n1"


class Job(kills.Job):
    """A job of a batch script."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        super().__init__(folder)
        self._left = folder / "result.json"
        words = [
            *(sys.executable, program("slurm_job"), self._left, SPARES),
            json.dumps(vars(POLICY)),
            *(sys.executable, program("restartable"), folder, MANY_STEPS, HABIT),
        ]
        # What sits on the batch node has the first step begin on the nodes behind it.
        script = (
            "#!/bin/bash\nexport JAX_PLATFORMS=cpu"
            " XLA_FLAGS=--xla_force_host_platform_device_count=1\n"
            f"srun --exact --nodes=1 --ntasks=1 --cpus-per-task=2 --nodelist={BATCH}"
            f" bash -c 'touch {folder}/sits; exec sleep infinity' &\n"
            f"until test -e {folder}/sits; do sleep 0.1; done\n"
            f"exec {shlex.join(map(str, words))}\n"
        )
        options = (f"-N{USED + SPARES}", f"--ntasks-per-node={COUNT // USED}", "-plow", "--no-kill")
        self.id = cluster.submit(script, *options, cwd=folder)

    def ended(self) -> Ended | None:
        if not self._left.exists():
            return None
        left = json.loads(self._left.read_text())
        return Ended(left["outcome"], left["elapsed_s"], left["goodput"], left["reasons"])

    def said(self) -> str:
        path = self.folder / "out"
        return path.read_text() if path.exists() else ""


class Kill(kills.Kill):
    """The kinds that there are on Slurm."""

    def __init__(self, cluster: SlurmCluster, job: kills.Job, drawn: random.Random) -> None:
        self._cluster = cluster
        super().__init__(job, drawn)
        self.away = drawn.choice([each for each, node in enumerate(self.nodes) if node != BATCH])

    def node_of(self, pid: int) -> str:
        return node_of(pid)

    def _lose(self, node: str) -> set[int]:
        self._cluster.kill_node(node)
        return self.on(node)

    def deaf(self) -> set[int]:
        return {each for each, node in enumerate(self.nodes) if not self._cluster.has_daemon(node)}

    def a_task(self) -> set[int]:
        kills.end([parent(self.pids[self.process])])
        return {self.process}

    def a_node(self) -> set[int]:
        return self._lose(self.nodes[self.away])

    def the_node_of_process_0(self) -> set[int]:
        """Or another, where process 0 is on the batch node by now."""
        return self._lose(self.nodes[self.away if self.nodes[0] == BATCH else 0])

    def a_process_and_another_node(self) -> set[int]:
        others = [each for each in self.nodes if each not in (BATCH, self.nodes[self.process])]
        lost = self.a_process()
        return lost | (self._lose(others[0]) if others else set())

    def a_daemon(self) -> set[int]:
        """All on its node: they live on, but Slurm has set it DOWN, and srun lets go of them."""
        node = self.nodes[self.away]
        self._cluster.kill_daemon(node)
        self._cluster.wait_for_state(node, "down")
        return self.on(node)

    def a_process_without_a_daemon(self) -> set[int]:
        self.process = self.away
        return self.a_daemon() | self.a_process()

    def a_notice(self) -> set[int]:
        self.job.order([Death(self.process, "notice")])
        return {self.process}


class Campaign(kills.Campaign):
    """Jobs on a cluster."""

    kinds = (
        Kill.a_process,
        Kill.all_of_a_node,
        Kill.a_node,
        Kill.a_notice,
        Kill.two_processes,
        Kill.the_replacement_as_it_joins,
        Kill.the_node_of_process_0,
        Kill.a_daemon,
        Kill.a_process_and_another_node,
        Kill.a_task,
        Kill.a_process_without_a_daemon,
    )

    def __init__(self, seed: int, kinds: Sequence[str] = ()) -> None:
        super().__init__(seed, kinds)
        self._cluster = SlurmCluster(USED + SPARES)
        self._cluster.__enter__()

    def start_job(self, folder: Path) -> Job:
        self._cluster.become_whole()
        return Job(self._cluster, folder)

    def kill(self, job: kills.Job, drawn: random.Random) -> Kill:
        return Kill(self._cluster, job, drawn)

    def close(self) -> None:
        self._cluster.__exit__(None, None, None)


if __name__ == "__main__":
    sys.exit(kills.main(Campaign))
