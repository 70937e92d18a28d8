"""The environment of a worker process."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.multihost import ProcessSpec


def worker_env(base: Mapping[str, str], spec: ProcessSpec) -> tuple[dict[str, str], list[str]]:
    """Returns the environment of a process, made from `base`, and one line for each stale MEGASCALE_* value that was replaced."""
    env = dict(base)
    lines = spec.set_slices(env)
    env.setdefault("PYTHONUNBUFFERED", "1")  # a line comes when it is printed, though stdout is a pipe
    return env | spec.to_env(), lines
