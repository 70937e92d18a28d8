"""Plans and records without devices: 4,000 leaves on 4, and 1,000 leaves over 4,096 processes.

python benchmarks/plan_scale.py
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from holdfast.checkpoint.format.item_report import FileReport, ItemReport, pack_name
from holdfast.checkpoint.format.record import parse_record
from holdfast.checkpoint.format.tree import FlatTree
from holdfast.checkpoint.saving.plan import Leaf, Plan, ShardPlacement, make_plan
from holdfast.checkpoint.saving.planner import Planner
from holdfast.checkpoint.saving.record_builder import RecordHead, build_record, check_plan

PROCESSES = 4096


def timed(label: str, work: Callable[[], Any]) -> Any:
    began = time.perf_counter()
    result = work()
    print(f"{label}: {time.perf_counter() - began:.4f} s")
    return result


def small_leaves() -> None:
    everywhere = NamedSharding(jax.make_mesh((4,), ("x",)), PartitionSpec())
    tree = {
        f"leaf{i:04d}": jax.device_put(np.full(256, i, np.float32), everywhere) for i in range(4000)
    }
    planner = Planner()
    timed("plan of 4,000 leaves, first", lambda: planner.plan(FlatTree.of(tree)))
    plan = planner.plan(FlatTree.of(tree))
    timed("plan of 4,000 leaves, its check alone", lambda: check_plan(plan))
    for _ in range(3):
        timed("plan of 4,000 leaves, again", lambda: planner.plan(FlatTree.of(tree)))


def make_job(me: int) -> Plan:
    """Returns the plan of process `me`."""
    ranks = np.arange(PROCESSES)
    spread = (
        [(PROCESSES, 1), ranks[:, None]],
        [(1,), ranks[None, :]],
        [(64, 1), ranks.reshape(64, 64)],
        [(256, 16), ranks[:, None]],
    )
    layouts = [ShardPlacement(parts, held, np.where(held == me, 0, -1)) for parts, held in spread]
    shapes = [(8192, 4096), (4096,), (8192, 1024), (8192, 8192)]
    leaves = [
        Leaf(
            f"layer{i}.w",
            "array",
            "bfloat16",
            shapes[i % 4],
            itemsize=2,
            placement=layouts[i % 4],
        )
        for i in range(1000)
    ]
    tree = {"kind": "dict", "keys": [leaf.path for leaf in leaves], "nodes": list(range(1000))}
    plan: Plan = timed(
        "plan of 1,000 leaves x 4,096 processes", lambda: make_plan(tree, leaves, me, PROCESSES)
    )
    return plan


def many_processes() -> None:
    plan = make_job(7)
    files: dict[int, list[FileReport]] = {}
    for rank, pack in plan.files:
        files.setdefault(rank, []).append(
            FileReport(pack_name(rank, pack, "9f3a61c2"), 1 << 24, 1 << 16, 1)
        )
    reports = [ItemReport(rank, plan.hash, tuple(files.get(rank, ()))) for rank in range(PROCESSES)]
    facts: dict[str, Any] = {
        "writer": "9f3a61c2",
        "processes": PROCESSES,
        "started_s": 0.0,
        "finished_s": 1.0,
    }
    data = timed(
        "record built", lambda: build_record(RecordHead(1, **facts), {"state": (plan, reports)})
    )
    timed("record parsed", lambda: parse_record(data, "checkpoint.json"))
    timed(
        "plan checked at the primary, once for each plan",
        lambda: check_plan(replace(plan, process=0)),
    )
    print(
        f"record: {len(data):,} bytes; this process writes {plan.own_bytes:,} of"
        f" {plan.total_bytes:,} bytes"
    )


if __name__ == "__main__":
    small_leaves()
    many_processes()
