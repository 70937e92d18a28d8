"""What this process knows of its job: its number, the size of the job, and the coordination client
that reaches the others.
"""

from __future__ import annotations

from typing import Any

import jax
from absl import flags
from jax._src import (
    distributed,
)  # the only place where jax keeps its client and its distributed process id

from holdfast.coordination.address import address_towards

from ..spec import ProcessSpec
from .group_client import Client, GroupClient, group_client_of

_own_client: Client | None = None
_spec: ProcessSpec | None = None


def set_client(client: Client | None, spec: ProcessSpec | None = None) -> None:
    """Makes `client` the one that this room's functions use, and `spec` this process's; None goes
    back to jax.distributed's own.
    """
    global _own_client, _spec
    _own_client = client
    _spec = spec


def current_spec() -> ProcessSpec | None:
    """Returns the ProcessSpec with which `initialize()` has joined a job, else None."""
    return _spec


def coordinator_address() -> str | None:
    """Returns the address of the coordinator that this process has joined, HOST:PORT or unix:PATH;
    None where it is not known.
    """
    address: str | None = (
        _spec.coordinator if _spec is not None else distributed.global_state.coordinator_address
    )
    return address


def host_address() -> str | None:
    """Returns the address at which the other hosts of the job reach this one; None where it is not
    known. Raises OSError.
    """
    if _spec is not None and _spec.host_address is not None:
        return _spec.host_address
    coordinator = coordinator_address()
    return None if coordinator is None else address_towards(coordinator)


def tls_files() -> tuple[str, str, str] | None:
    """Returns certificate, key and authority by which this process reaches its coordinator; None
    where it has none, or a relay has them.
    """
    if _spec is not None:
        found: tuple[Any, ...] = (_spec.tls_cert, _spec.tls_key, _spec.tls_ca)
    else:  # since jax 0.12
        found = tuple(
            getattr(jax.config, f"jax_mtls_{name}_file", None) for name in ("cert", "key", "ca")
        )
    cert, key, ca = found
    return (cert, key, ca) if cert and key and ca else None


def current_client() -> Client:
    """Returns `initialize()`'s client, else jax.distributed's own. Raises ValueError where there is
    neither.
    """
    client: Client | None = (
        _own_client if _own_client is not None else distributed.global_state.client
    )
    if client is None:
        raise ValueError(
            "this process has no coordination client: call holdfast.multihost.initialize() first"
        )
    return client


def current_group_client() -> GroupClient:
    """Returns the GroupClient over `current_client()`, shared by all of this process."""
    return group_client_of(current_client())


def is_jax_distributed_client_initialized() -> bool:
    """Returns whether jax.distributed has a client."""
    return distributed.global_state.client is not None


def get_jax_distributed_client() -> Any:
    """Returns jax.distributed's own client. Raises ValueError when jax.distributed was not
    initialized.
    """
    client = distributed.global_state.client
    if client is None:
        raise ValueError(
            "jax.distributed has no client: call holdfast.multihost.initialize() or"
            " jax.distributed.initialize() first"
        )
    return client


def distributed_process_id() -> int:
    """Returns this process's task id, by which the coordination service knows it."""
    return int(distributed.global_state.process_id)


def use_experimental_distributed_process_id() -> bool:
    """Returns whether the flag `experimental_orbax_use_distributed_process_id` is registered,
    parsed and set. holdfast never defines it.
    """
    name = "experimental_orbax_use_distributed_process_id"
    return name in flags.FLAGS and flags.FLAGS.is_parsed() and bool(flags.FLAGS[name].value)


def process_index() -> int:
    """Returns this process's number: its runtime index, or its distributed id where Orbax's flag
    asks for that.
    """
    return (
        distributed_process_id()
        if use_experimental_distributed_process_id()
        else int(jax.process_index())
    )


def process_count() -> int:
    """Returns the number of processes of the job."""
    return int(jax.process_count())


def is_primary_host(primary_host: int | None) -> bool:
    """Returns whether this process is the primary: number `primary_host`, or every process when
    that is None.
    """
    return primary_host is None or primary_host == process_index()
