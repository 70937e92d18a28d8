"""What this process knows of its job: its number, the size, and the client for the others."""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

import jax

# The only place where jax keeps its client and its distributed process id.
from jax._src import distributed

from holdfast.coordination.address import address_towards

from ..job import current_job
from ..parent import spec_of_launcher
from ..peers.peer_tls import PeerTls
from ..spec import ProcessSpec
from .group_client import Client, GroupClient, group_client_of


def current_spec() -> ProcessSpec | None:
    """Returns the ProcessSpec with which `initialize()` has joined a job, else None."""
    return current_job().spec


def launched_spec() -> ProcessSpec | None:
    """Returns who this process is: as it has joined, else as its launcher's environment says.

    A process that outlives attempts has joined a later one than it was started for.
    """
    return current_spec() or spec_of_launcher()


def coordinator_address() -> str | None:
    """Returns the address of the coordinator that this process has joined, None where not known.

    It is HOST:PORT or unix:PATH.
    """
    spec = current_spec()
    if spec is not None:
        return spec.coordinator
    address: str | None = distributed.global_state.coordinator_address
    return address


def unjoined_spec() -> ProcessSpec | None:
    """Returns who this process is to its launcher, where the job has several processes and this one
    has joined it neither by holdfast nor by jax.distributed; else None.

    Children that multiprocessing has started, such as those of data loaders, have the environment
    of a process, and need not join.
    """
    if current_job().client is not None or distributed.global_state.client is not None:
        return None
    if multiprocessing.parent_process() is not None:
        return None
    spec = spec_of_launcher()
    return None if spec is None or spec.num_processes == 1 else spec


def host_address() -> str | None:
    """Returns the address by which other hosts of the job reach this one, None where not known.

    Raises OSError.
    """
    spec = current_spec()
    if spec is not None and spec.host_address is not None:
        return spec.host_address
    coordinator = coordinator_address()
    return None if coordinator is None else address_towards(coordinator)


def peer_tls() -> PeerTls | None:
    """Returns the files of TLS by which this process reaches its coordinator, and peers each other.

    None where it has none, or a relay has them.
    """
    spec = current_spec()
    files: list[str | None] = [
        getattr(jax.config, f"jax_mtls_{name}_file", None)  # since jax 0.12
        if spec is None
        else getattr(spec, f"tls_{name}")
        for name in ("cert", "key", "ca")
    ]
    cert, key, ca = files
    return PeerTls(cert, key, ca) if cert and key and ca else None


def current_client() -> Client:
    """Returns `initialize()`'s client, else jax.distributed's own.

    Raises ValueError where there is neither.
    """
    client: Client | None = current_job().client
    if client is None:
        client = distributed.global_state.client
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
    """Returns jax.distributed's own client.

    Raises ValueError when jax.distributed was not initialized.
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
    """Returns whether Orbax's flag `experimental_orbax_use_distributed_process_id` is set.

    That is: registered, parsed and true. holdfast never defines it.
    """
    name = "experimental_orbax_use_distributed_process_id"
    # Whoever has registered a flag has imported them; who is importing them now has not.
    flags: Any = getattr(sys.modules.get("absl.flags"), "FLAGS", ())
    return name in flags and flags.is_parsed() and bool(flags[name].value)


def process_index() -> int:
    """Returns this process's number: its runtime index.

    Where Orbax's flag asks for that, it is the distributed id.
    """
    if use_experimental_distributed_process_id():
        return distributed_process_id()
    return int(jax.process_index())


def process_count() -> int:
    """Returns the number of processes of the job."""
    return int(jax.process_count())


def is_primary_host(primary_host: int | None) -> bool:
    """Returns whether this process is number `primary_host`; every process is, when it is None."""
    return primary_host is None or primary_host == process_index()
