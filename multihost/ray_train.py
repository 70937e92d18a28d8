"""Ray Train as a worker sees it: who this worker is, and whether Ray takes its node away.

Ray's public functions answer only together (`ray.train.get_preemption_info` is a barrier of all
workers), so what a single worker knows is read from Ray Train's own context, which is there in a
worker: elsewhere nothing here imports Ray.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from .threads import on_thread

_CONTEXT = "ray.train.v2._internal.execution.context"
_NAMESPACE = "holdfast"


@dataclass(frozen=True)
class RayTrainWorker:
    """A worker of a trainer's run; `host` is the address of its node.

    Ranks are contiguous in a TPU slice.
    """

    run_id: str
    rank: int
    num_workers: int
    local_rank: int
    local_count: int
    num_slices: int
    host: str


def is_worker() -> bool:
    """Returns whether this process is a worker of Ray Train."""
    return _context() is not None


def current_worker() -> RayTrainWorker | None:
    """Returns which worker of Ray Train this process is; None where it is none."""
    context = _context()
    if context is None:
        return None
    ray = sys.modules["ray"]
    scaling = context.train_run_context.scaling_config
    num_slices = 1
    if scaling.use_tpu:
        from ray.util.tpu import get_tpu_num_slices_for_workers

        num_slices = get_tpu_num_slices_for_workers(
            scaling.topology,
            scaling.accelerator_type,
            context.get_world_size(),
            scaling.resources_per_worker,
        )
    return RayTrainWorker(
        run_id=context.train_run_context.run_id,
        rank=context.get_world_rank(),
        num_workers=context.get_world_size(),
        local_rank=context.get_local_rank(),
        local_count=context.get_local_world_size(),
        num_slices=num_slices,
        host=ray.util.get_node_ip_address(),
    )


def count_attempt(run_id: str) -> int:
    """Returns which attempt of the run this is, from 1.

    Rank 0 counts them in the cluster's own store, since Ray numbers none.
    """
    from ray.experimental import internal_kv

    key = f"attempts/{run_id}"
    attempt = int(internal_kv._internal_kv_get(key, namespace=_NAMESPACE) or b"0") + 1
    internal_kv._internal_kv_put(key, str(attempt).encode(), overwrite=True, namespace=_NAMESPACE)
    return attempt


def broadcast(value: Any, timeout_s: float) -> Any:
    """Returns rank 0's value on every worker. Raises TimeoutError where some have not come in time.

    On a thread, because Ray itself waits for ever.
    """
    from ray.train import collective

    told = on_thread("ray-train", lambda: collective.broadcast_from_rank_zero(value))
    return told.result(timeout_s)


def own_preemption() -> tuple[str, float | None] | None:
    """Returns why Ray takes this worker's node, and by when (Unix time, where known).

    None where Ray does not. Ray never takes that back.
    """
    context = _context()
    info = None if context is None else context.preemption_context.preemption_info
    if info is None or context.get_world_rank() not in info.preempted_ranks:
        return None
    deadline_unix_s = None if info.deadline_ms is None else info.deadline_ms / 1000
    return f"Ray takes the node of rank {context.get_world_rank()}", deadline_unix_s


def _context() -> Any:
    """Returns Ray Train's context of this worker, or None."""
    module = sys.modules.get(_CONTEXT)
    if module is None:
        return None
    try:
        return module.get_train_context()
    except RuntimeError:  # a driver, which has imported it too
        return None
