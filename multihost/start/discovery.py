"""Who this process is: what was given, what a launcher of ours says, what jax detects."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from jax._src import clusters

from ..ray_train import RayTrainWorker, current_worker
from ..spec import ProcessSpec

GIVEN = ("coordinator", "num_processes", "process_id")
_SCONTROL_S = 30.0


@dataclasses.dataclass(frozen=True)
class DiscoveredProcess:
    """Who this process is, and whether a launcher of ours says so.

    It has all devices of this machine where `devices` is None. A worker of Ray Train has no spec
    yet: its job has no coordinator before its workers have met (`gather_workers`).
    """

    spec: ProcessSpec | None
    launched: bool = False
    devices: Sequence[int] | None = None
    worker: RayTrainWorker | None = None


def discover_process(
    spec: ProcessSpec | None,
    given: Mapping[str, Any],
    devices: Sequence[int] | None,
    timeout_s: float,
) -> DiscoveredProcess:
    """Returns who this process is.

    From a spec, what was given, our launcher's environment, Ray Train, or what jax detects.
    """
    if spec is not None:
        if given:
            raise ValueError(f"initialize() takes a spec or {', '.join(given)}, not both")
        return DiscoveredProcess(spec, True, devices)
    if len(given) < len(GIVEN):
        launched = ProcessSpec.from_env(os.environ)
        is_alone = given.get("num_processes") == 1
        if launched is not None and (launched.num_processes == 1 or not is_alone):
            return DiscoveredProcess(dataclasses.replace(launched, **given), True, devices)
        if is_alone:
            return DiscoveredProcess(None)
        worker = None if given else current_worker()
        if worker is not None:
            return DiscoveredProcess(None, True, devices, worker)
        given, devices = _detected(given, devices, timeout_s)
    if not given:
        return DiscoveredProcess(None)
    missing = [field for field in GIVEN if field not in given]
    if missing:
        raise ValueError(
            f"initialize() knows {given} but not {', '.join(missing)}: give them, or start with"
            " `holdfast run`"
        )
    return DiscoveredProcess(ProcessSpec(**given), False, devices)


def _detected(
    given: Mapping[str, Any], devices: Sequence[int] | None, timeout_s: float
) -> tuple[dict[str, Any], Sequence[int] | None]:
    """Returns what was given with what jax detects besides, and the devices."""
    detect: Any = clusters.ClusterEnv.auto_detect_unset_distributed_params
    *values, devices = detect(
        *(given.get(field) for field in GIVEN), devices, None, math.ceil(timeout_s)
    )
    known = {field: value for field, value in zip(GIVEN, values, strict=True) if value is not None}
    if "coordinator" not in given and "coordinator" in known:
        nodes = os.environ.get("SLURM_STEP_NODELIST", "")
        known["coordinator"] = _with_first_node(known["coordinator"], nodes)
    return known, devices


def _with_first_node(address: str, nodes: str) -> str:
    """Returns the address with the name of Slurm's first node.

    jax reads no more than one [...] of the list of nodes, and takes a part of a name for the name.
    """
    host, _, port = address.rpartition(":")
    read = re.match(r"([^\[,]*)\[(\w*)[^\]]*\][^,]", nodes)
    if read is None or host != read[1] + read[2]:
        return address
    command = ["scontrol", "show", "hostnames", nodes]
    try:
        first = subprocess.run(
            command, capture_output=True, text=True, timeout=_SCONTROL_S, check=True
        ).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        raise ValueError(
            f"scontrol show hostnames {nodes!r} failed: {error}; give coordinator=, the address of"
            " process 0"
        ) from error
    return f"{first}:{port}"
