"""The machines of a Ray cluster, as Ray reports them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from holdfast.coordination.distribution import install_command
from holdfast.multihost import Fatal

from .placement import Node

SLICE_LABEL = "ray.io/tpu-slice-name"
WORKER_LABEL = "ray.io/tpu-worker-id"


def load_ray() -> Any:
    """Imports Ray, which only this engine needs; untyped: its own types cannot be relied on."""
    try:
        ray: Any = importlib.import_module("ray")
        importlib.import_module("ray.cloudpickle")
        importlib.import_module("ray.util.scheduling_strategies")
    except ImportError as error:
        raise ImportError(f"Ray is not installed: {install_command('ray')}") from error
    return ray


def cluster_nodes() -> list[Node]:
    """Returns the living nodes of the cluster, what is free on them, and which are draining."""
    ray = load_ray()
    free = ray._private.state.available_resources_per_node()
    draining = ray._private.state.state.get_draining_nodes()
    return [
        node_from_ray(info, free.get(info["NodeID"], {}), draining)
        for info in ray.nodes()
        if info["Alive"]
    ]


def node_from_ray(
    info: Mapping[str, Any], free: Mapping[str, float], draining: Mapping[str, int]
) -> Node:
    """Returns one machine of `ray.nodes()`. Raises Fatal for a label that is no number."""
    labels = info.get("Labels") or {}
    node_id = info["NodeID"]
    worker = str(labels.get(WORKER_LABEL, "0"))
    if not worker.isdecimal():
        raise Fatal(
            f"node {node_id} at {info['NodeManagerAddress']} has label {WORKER_LABEL}={worker!r};"
            " expected a whole number"
        )
    deadline_ms = draining.get(node_id, 0)
    return Node(
        node_id=node_id,
        address=info["NodeManagerAddress"],
        available=free,
        draining=node_id in draining,
        slice_name=str(labels.get(SLICE_LABEL, "")),
        worker_id=int(worker),
        deadline_unix_s=deadline_ms / 1000 if deadline_ms else None,
    )
