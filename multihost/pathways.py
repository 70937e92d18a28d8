"""Whether this is a Pathways job, where one controller drives devices of many hosts."""

from __future__ import annotations

import jax

from .job import current_job


class _ColocatedRuntime:
    """The part of a job that marks this process as a colocated Python runtime."""


def is_native_pathways_backend() -> bool:
    """Returns whether this process is a Pathways client itself."""
    client = jax.devices()[0].client
    return hasattr(client, "pathways") or client.runtime_type == "pathways"


def is_proxy_pathways_backend() -> bool:
    """Returns whether the devices are reached through a proxy of Pathways."""
    return bool(jax.devices()[0].client.runtime_type == "proxy/pathways")


def is_pathways_backend() -> bool:
    """Returns whether the devices are reached through Pathways, natively or by proxy."""
    return is_native_pathways_backend() or is_proxy_pathways_backend()


def is_pathways_controller() -> bool:
    """Returns whether this process is the Pathways controller."""
    return str(jax.local_devices()[0].client.runtime_type) == "pathways"


def mark_pathways_colocated_runtime_active() -> None:
    """Marks this process as the colocated Python runtime of a Pathways job."""
    current_job().ensure(_ColocatedRuntime)


def is_pathways_colocated_runtime_active() -> bool:
    """Returns whether this process was marked as the colocated Python runtime of a Pathways job."""
    return current_job().get(_ColocatedRuntime) is not None
