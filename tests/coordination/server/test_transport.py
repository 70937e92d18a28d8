"""The service on its port: both kinds of clients at once, time, and the connections' patience."""

from __future__ import annotations

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from socket import IPPROTO_TCP, TCP_USER_TIMEOUT

import grpc
import pytest

from holdfast.coordination import (
    CoordinationClient,
    CoordinationService,
    Endpoint,
    StatusClient,
)
from tests.support.in_process import serving


@pytest.mark.parametrize("heartbeat_timeout_s", [300.0, 1e6])
def test_no_connection_ends_before_the_heartbeat(heartbeat_timeout_s: float) -> None:
    """The kernel keeps the connections of both sides, gRPC's too, for longer than the heartbeat
    timeout, though nothing is acknowledged: a cut of the network is silence, and no process's end.
    The kernel keeps none for longer than 24 days.
    """
    with serving(1, heartbeat_timeout_s=heartbeat_timeout_s) as served:
        port = int(served.address.rpartition(":")[2])
        with (
            CoordinationClient(served.address, 0),
            grpc.insecure_channel(served.address) as channel,
        ):
            grpc.channel_ready_future(channel).result(20)
            sides = Counter(
                found.getsockopt(IPPROTO_TCP, TCP_USER_TIMEOUT)
                for found in _connections(port)
                if found.getsockname()[1] == port
            )
    assert len(sides) == 1 and sides.total() == 2
    assert min(sides) > min(3 * heartbeat_timeout_s, 24 * 86_400) * 1000


def _connections(port: int) -> Iterator[socket.socket]:
    """Yields this process's sockets whose connection has `port` at one end."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue  # a copy of it would stay open
            with socket.socket(fileno=os.dup(int(name))) as found:
                is_tcp = found.family in (socket.AF_INET, socket.AF_INET6)
                if is_tcp and port in (found.getsockname()[1], found.getpeername()[1]):
                    yield found


def test_both_come_through_one_unix_socket(tmp_path: Path) -> None:
    """A Session and gRPC's calls; the coordinator leaves no other file, and no second one takes
    its place.
    """
    endpoint = Endpoint(host=f"unix:{tmp_path}/socket")
    with CoordinationService.spawn(1, endpoint=endpoint) as service:
        with CoordinationClient(service.address, 0), StatusClient(service.address) as asking:
            assert asking.status().tasks[0].has_session
        assert [path.name for path in tmp_path.iterdir()] == ["socket"]
