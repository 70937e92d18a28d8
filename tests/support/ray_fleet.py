"""A Ray cluster of several nodes on this machine, whose nodes a test may kill, drain and
replace.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from holdfast.launch.engines.ray.cluster import cluster_nodes


class Fleet:
    """A Ray cluster whose nodes a test may kill, drain and replace; each has room for `room`
    processes.
    """

    def __init__(self, module: str, room: int = 1) -> None:
        """`module` is the test's, which the workers cannot import: what is of it travels by
        value.
        """
        import ray
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address = self._cluster.address
        self.nodes: list[Any] = []
        ray.init(address=self._cluster.address, log_to_driver=False)
        ray.cloudpickle.register_pickle_by_value(sys.modules[module])
        self.labels: list[dict[str, str]] = []
        self._room = room

    def become(self, labels: list[dict[str, str]]) -> None:
        """Makes the cluster one of healthy nodes with these labels, one each."""
        for node, label in list(zip(self.nodes, self.labels, strict=True)):
            if (
                label not in labels
                or labels.count(label) < self.labels.count(label)
                or not self.healthy(node)
            ):
                self.remove(node)
        for label in labels:
            if self.labels.count(label) < labels.count(label):
                self.add(label)
        self.wait_until(lambda: len(cluster_nodes()) == len(labels) + 1)

    def add(self, labels: dict[str, str]) -> None:
        resources = {"TPU": 4.0} if labels else {}
        settings: dict[str, Any] = {}
        if pod := labels.get(
            "ray.io/tpu-pod-type"
        ):  # what Ray finds on a real host of a slice, and places Ray Train's workers by
            resources["accelerator_type:TPU-V4"] = 1
            resources |= {f"TPU-{pod}-head": 1} if labels["ray.io/tpu-worker-id"] == "0" else {}
            settings["env_vars"] = {"TPU_NAME": labels["ray.io/tpu-slice-name"]}
        self.nodes.append(
            self._cluster.add_node(
                num_cpus=self._room, labels=labels, resources=resources, **settings
            )
        )
        self.labels.append(labels)

    def remove(self, node: Any) -> None:
        """Kills a node as a lost machine dies."""
        index = self.nodes.index(node)
        del self.nodes[index], self.labels[index]
        self._cluster.remove_node(node, allow_graceful=False)

    @staticmethod
    def raylet(node: Any) -> int:
        """Returns the process of a node's daemon."""
        (daemon,) = node.all_processes["raylet"]
        return int(daemon.process.pid)

    def node_of(self, pid: int) -> Any:
        """Returns the node below whose raylet a process runs."""
        raylets = {self.raylet(node): node for node in self.nodes}
        while pid not in raylets:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return raylets[pid]

    def drain(self, node: Any, seconds: int) -> None:
        """Gives a node a notice of preemption, by Ray's own command."""
        command = [
            str(Path(sys.executable).parent / "ray"),
            "drain-node",
            "--address",
            self._cluster.address,
            "--node-id",
            node.node_id,
        ]
        command += [
            "--reason",
            "DRAIN_NODE_REASON_PREEMPTION",
            "--reason-message",
            "test",
            "--deadline-remaining-seconds",
            str(seconds),
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=60)

    @contextlib.contextmanager
    def occupied(self, node: Any) -> Iterator[None]:
        """Keeps something that needs no resources on a node."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        class Sitter:
            def here(self) -> bool:
                return True

        strategy = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        sitter = ray.remote(num_cpus=0, scheduling_strategy=strategy)(Sitter).remote()
        ray.get(sitter.here.remote())
        yield
        ray.kill(sitter)

    def draining(self, node: Any) -> bool:
        return any(seen.draining for seen in cluster_nodes() if seen.node_id == node.node_id)

    def healthy(self, node: Any) -> bool:
        return any(not seen.draining for seen in cluster_nodes() if seen.node_id == node.node_id)

    @staticmethod
    def wait_until(holds: Callable[[], bool], timeout_s: float = 120) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def close(self) -> None:
        import ray

        ray.shutdown()
        self._cluster.shutdown()
