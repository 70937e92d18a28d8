"""What a process knows of its job before it has joined one, and how a client of ours takes
precedence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import holdfast.multihost as multihost
from holdfast.multihost.group.group_client import forget_group_client
from holdfast.multihost.group.runtime import current_group_client, peer_tls
from holdfast.multihost.job import current_job
from holdfast.multihost.peers.peer_tls import PeerTls


@pytest.fixture
def client() -> Iterator[Any]:
    """Any object serves as a client; nothing is called on it."""
    given: Any = object()
    yield given
    current_job().leave()
    forget_group_client(given)


def test_alone_a_process_is_number_0_of_1() -> None:
    """Without a cluster the process is the primary, and every process is where no primary is
    named.
    """
    assert (multihost.process_index(), multihost.process_count()) == (0, 1)
    assert (
        multihost.is_primary_host(0)
        and multihost.is_primary_host(None)
        and not multihost.is_primary_host(1)
    )
    assert not multihost.use_experimental_distributed_process_id()


def test_without_a_client_errors_say_what_to_call() -> None:
    """Both errors name `initialize()`."""
    assert (
        multihost.current_spec() is None and not multihost.is_jax_distributed_client_initialized()
    )
    with pytest.raises(
        ValueError, match=r"no coordination client: call holdfast\.multihost\.initialize\(\) first"
    ):
        multihost.current_client()
    with pytest.raises(
        ValueError,
        match=r"jax\.distributed has no client: call holdfast\.multihost\.initialize\(\)",
    ):
        multihost.get_jax_distributed_client()


def test_the_client_that_was_set_is_everybodys(client: Any) -> None:
    """The room's functions use it, share one GroupClient over it, and know the spec that came with
    it.
    """
    spec = multihost.ProcessSpec(process_id=0, num_processes=1, coordinator="c:1", attempt=7)
    current_job().join(client, spec)
    assert multihost.current_client() is client and multihost.current_spec() == spec
    assert (
        current_group_client() is current_group_client() and current_group_client().client is client
    )
    current_job().leave()
    assert multihost.current_spec() is None


def test_the_tls_files_reach_the_coordinator(client: Any) -> None:
    """Of the launcher's word, all three or none; without one those that jax was told."""
    assert peer_tls() is None
    spec = multihost.ProcessSpec(
        process_id=0, num_processes=1, coordinator="127.0.0.1:1", tls_ca="ca"
    )
    current_job().join(client, replace(spec, tls_cert="cert", tls_key="key"))
    assert peer_tls() == PeerTls("cert", "key", "ca")
    current_job().join(client, spec)
    assert peer_tls() is None
