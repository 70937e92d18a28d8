"""Kills drawn by seed against jobs on a real Ray cluster of three nodes: see `support/kills.py`.

python -m tests.launch.engines.ray.kills --seed 1 --kills 50
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.launch import ray as engine
from holdfast.launch.supervisor.engine import JobResult
from tests.support import kills
from tests.support.cluster import CollectedOutput
from tests.support.kills import COUNT, HABIT, MANY_STEPS, POLICY, Ended, end, parent
from tests.support.paths import program
from tests.support.processes import descendants
from tests.support.ray_fleet import Fleet

ENV = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}


class Job(kills.Job):
    """A job on a thread beside."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._output = CollectedOutput()
        self._result: JobResult | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        script = str(program("restartable"))
        command = [sys.executable, script, str(self.folder), str(MANY_STEPS), HABIT]
        spec = engine.JobSpec(num_processes=COUNT, restart=POLICY, env=ENV)
        self._result = engine.run_command(command, spec, output=self._output).job

    def ended(self) -> Ended | None:
        result = self._result
        if result is None:
            return None
        return Ended(result.outcome, result.elapsed_s, vars(result.goodput), result.reasons)

    def said(self) -> str:
        return self._output.text


def hosts_below(raylet: int) -> list[int]:
    """Returns the actors that hold a relay on a node."""
    return [
        pid
        for pid in descendants(raylet)
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::HostActor")
    ]


class Kill(kills.Kill):
    """The kinds that there are on Ray."""

    def __init__(self, fleet: Fleet, job: kills.Job, drawn: random.Random) -> None:
        self._fleet = fleet
        super().__init__(job, drawn)

    def node_of(self, pid: int) -> Any:
        return self._fleet.node_of(pid)

    def _lose(self, node: Any) -> set[int]:
        os.kill(self._fleet.raylet(node), signal.SIGKILL)
        return self.on(node)

    def an_actor(self) -> set[int]:
        end([parent(parent(self.pids[self.process]))])
        return {self.process}

    def a_daemon(self) -> set[int]:
        return self._lose(self.nodes[self.process])

    def a_relay_and_its_daemon(self) -> set[int]:
        node = self.nodes[self.process]
        end(hosts_below(self._fleet.raylet(node)))
        return self._lose(node)

    def the_node_of_process_0(self) -> set[int]:
        return self._lose(self.nodes[0])

    def a_process_and_another_node(self) -> set[int]:
        nodes = [node for node in self.nodes if node is not self.nodes[self.process]]
        lost = self.a_process()
        return lost | (self._lose(nodes[0]) if nodes else set())

    def a_drain(self) -> set[int]:
        node = self.nodes[self.process]
        self._fleet.drain(node, 60)
        return self.on(node)


class Campaign(kills.Campaign):
    """Jobs on a fleet."""

    kinds = (
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

    def __init__(self, seed: int, kinds: Sequence[str] = ()) -> None:
        super().__init__(seed, kinds)
        self._fleet = Fleet(__name__, room=2)

    def start_job(self, folder: Path) -> Job:
        self.mend()
        return Job(folder)

    def mend(self) -> None:
        self._fleet.become([{}] * 3)

    def kill(self, job: kills.Job, drawn: random.Random) -> Kill:
        return Kill(self._fleet, job, drawn)

    def close(self) -> None:
        self._fleet.close()


if __name__ == "__main__":
    sys.exit(kills.main(Campaign))
