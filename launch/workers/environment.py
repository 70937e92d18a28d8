"""The environment of a worker process."""

from __future__ import annotations

import glob
from collections.abc import Mapping

from holdfast.coordination.names import DECIDES, LOCAL_DEVICES
from holdfast.multihost import ProcessSpec


def worker_env(
    base: Mapping[str, str], spec: ProcessSpec, *, share_of: int = 1, decides: bool = False
) -> tuple[dict[str, str], list[str]]:
    """Returns the environment of a process, made from `base`.

    Beside it, one line for each stale MEGASCALE_* value that was replaced. With `share_of` above 1,
    that many processes share the GPUs that this one sees, and each is told its own. With `decides`
    the launcher decides who outlives an attempt; else another's word for that holds no more.
    """
    env = dict(base)
    env.pop(DECIDES, None)
    if decides:
        env[DECIDES] = "1"
    lines = spec.set_slices(env)
    spec.bypass_proxies(env)
    # Stdout is a pipe, and Python would keep lines back: they come when they are printed.
    env.setdefault("PYTHONUNBUFFERED", "1")
    if devices := own_devices(env, spec.local_rank or 0, share_of):
        env[LOCAL_DEVICES] = devices
    spec.set_in(env)
    return env, lines


def own_devices(environment: Mapping[str, str], local_rank: int, share_of: int) -> str:
    """Returns a process's equal share of this machine's GPUs as jax takes it, like "2,3".

    Returns "" where the environment says it already, or there is nothing to divide: no or too few
    GPUs, one process, or GPUs that Slurm has bound to each task already.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        count = len(glob.glob("/dev/nvidia[0-9]*"))
    else:
        count = len([name for name in visible.split(",") if name])
    on_node = int(environment.get("SLURM_GPUS_ON_NODE") or 0)
    bound = "SLURM_GPUS_PER_TASK" in environment or count < on_node
    if LOCAL_DEVICES in environment or share_of <= 1 or count < share_of or bound:
        return ""
    share = count // share_of
    return ",".join(map(str, range(local_rank * share, (local_rank + 1) * share)))
