"""What a Session does over each pair of transports: the client's and the service's, over gRPC's
completion queue or its public API.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from holdfast.coordination import (
    BarrierTimeout,
    CoordinationClient,
    CoordinationError,
    ProcessInfo,
    ProcessLost,
    Timeouts,
)
from holdfast.coordination.client import frame_transport, session
from holdfast.coordination.client.frame_transport import PublicFrameTransport, QueueFrameTransport
from holdfast.coordination.deadline import Deadline
from holdfast.proto.session_pb2 import StacksRequest
from tests.support.in_process import Served, serving
from tests.support.proxy import Proxy

COUNT = 3
PAIRS = [
    (client, aio) for client in (QueueFrameTransport, PublicFrameTransport) for aio in (False, True)
]


def _name(pair: object) -> str:
    client, aio = pair  # type: ignore[misc]
    return f"{'public' if client is PublicFrameTransport else 'queue'}-{'aio' if aio else 'queue'}"


@pytest.fixture(params=PAIRS, ids=_name)
def served(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A service over one transport; clients made in the test use the other."""
    client, aio = request.param
    monkeypatch.setattr(frame_transport, "is_tested_grpc", lambda: client is QueueFrameTransport)
    with serving(COUNT, aio=aio, recoverable=True, heartbeat_timeout_s=60) as served:
        yield served


@pytest.fixture
def clients(served: Served) -> Iterator[list[CoordinationClient]]:
    found = joined(served.address)
    yield found
    for client in found:
        client.close()


def joined(address: str, **options: Any) -> list[CoordinationClient]:
    clients = [
        CoordinationClient(address, index, timeouts=Timeouts(rpc_s=20), **options)
        for index in range(COUNT)
    ]
    at_once([client.connect for client in clients])
    return clients


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Makes calls in threads and returns their values, or the exceptions they raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.exception(60) or future.result() for future in futures]


def test_the_pair_is_as_asked_for(
    request: pytest.FixtureRequest, clients: list[CoordinationClient]
) -> None:
    """The suite tests what it says."""
    transport = clients[0]._connection._transport
    assert isinstance(transport, session.SessionTransport) and transport._stream is not None
    wanted = PublicFrameTransport if "[public" in request.node.name else QueueFrameTransport
    assert type(transport._stream._frames) is wanted


def test_many_threads_get_their_own_answers(clients: list[CoordinationClient]) -> None:
    """Eight threads on each client: increments, values up to a mebibyte, listings and errors never
    mix.
    """

    def work(number: int) -> bytes:
        client, value = clients[number % COUNT], bytes([number]) * (1 << 20)
        assert [client.key_value_increment(f"count/{number}", 1) for _ in range(20)] == list(
            range(1, 21)
        )
        client.key_value_set_bytes(f"value/{number}", value)
        with pytest.raises(CoordinationError, match="NOT_FOUND"):
            client.key_value_try_get(f"none/{number}")
        return client.blocking_key_value_get_bytes(f"value/{number}", 20_000)

    with ThreadPoolExecutor(8 * COUNT) as pool:
        values = list(pool.map(work, range(8 * COUNT)))
    assert values == [bytes([number]) * (1 << 20) for number in range(8 * COUNT)]
    assert len(clients[0].key_value_dir_get_bytes("value")) == 8 * COUNT


def test_barriers_pass_and_name_the_missing(clients: list[CoordinationClient]) -> None:
    """All pass together, again and again; one that comes too late is named, to itself too, and the
    name works afterwards.
    """
    for _ in range(20):
        assert (
            at_once(
                [lambda client=client: client.wait_at_barrier("step", 20_000) for client in clients]
            )
            == [None] * COUNT
        )  # type: ignore[misc]
    failed = at_once(
        [lambda client=client: client.wait_at_barrier("late", 300) for client in clients[1:]]
    )  # type: ignore[misc]
    failed += at_once([lambda: clients[0].wait_at_barrier("late", 20_000)])
    assert all(isinstance(error, BarrierTimeout) and error.missing == (0,) for error in failed), (
        failed
    )
    assert (
        at_once(
            [lambda client=client: client.wait_at_barrier("late", 20_000) for client in clients]
        )
        == [None] * COUNT
    )  # type: ignore[misc]


def test_a_wait_ends_in_three_ways(
    clients: list[CoordinationClient],
) -> None:
    """Whichever comes first, and each with its own error."""
    late, over, lost = (
        lambda: clients[0].blocking_key_value_get("late", 60_000),
        lambda: clients[0].blocking_key_value_get("never", 300),
        lambda: clients[0].blocking_key_value_get("needed", 60_000, depends_on=[2]),
    )
    with ThreadPoolExecutor(3) as pool:
        waits = [pool.submit(call) for call in (late, over, lost)]
        clients[1].key_value_set("late", "here")
        assert waits[0].result(20) == "here"
        error = waits[1].exception(20)
        assert isinstance(error, CoordinationError) and error.code == "DEADLINE_EXCEEDED"
        clients[2].report_error("bad batch")
        assert isinstance(waits[2].exception(20), ProcessLost)
    again = at_once([lost])[0]
    assert isinstance(again, ProcessLost) and again.process == 2, "lost already, when the call came"


def test_changes_of_processes_are_pushed(clients: list[CoordinationClient]) -> None:
    """To a client that makes no call, with the reason; the first list is complete."""
    seen, failed = [], threading.Event()

    def listener(processes: Sequence[ProcessInfo]) -> None:
        seen.append(processes)
        if processes[2].state == "ERROR":
            failed.set()

    clients[0].watch_processes(listener)
    clients[2].report_error("bad batch")
    assert failed.wait(20) and len(seen[0]) == COUNT and "bad batch" in seen[-1][2].message


def test_a_connection_that_breaks_is_opened_again(served: Served) -> None:
    """Under a barrier, a wait and quick calls: nobody notices but the counts."""
    with Proxy(served.address) as proxy, ThreadPoolExecutor(2) as pool:
        clients = joined(proxy.address)
        barrier = pool.submit(clients[0].wait_at_barrier, "all", 60_000)
        get = pool.submit(clients[0].blocking_key_value_get, "late", 60_000)
        for _ in range(3):
            proxy.cut()
            clients[1].key_value_set("probe", "x", allow_overwrite=True)
        clients[1].key_value_set("late", "here")
        at_once(
            [lambda client=client: client.wait_at_barrier("all", 60_000) for client in clients[1:]]
        )  # type: ignore[misc]
        assert get.result(20) == "here" and barrier.result(20) is None
        assert int(clients[1].statistics()["reconnects"]) >= 1
        for client in clients:
            client.close()


def test_the_end_of_a_client_ends_its_waits(clients: list[CoordinationClient]) -> None:
    """`close` in one thread frees the others, and the process's stacks can no longer be asked
    for.
    """
    with ThreadPoolExecutor(2) as pool:
        waits = [
            pool.submit(clients[0].blocking_key_value_get, f"never/{number}", 60_000)
            for number in range(2)
        ]
        while (
            clients[1]
            ._connection.call("Stacks", StacksRequest(task_id=0), Deadline(20))
            .stacks.count(b"blocking_key_value_get_bytes")
            < 2
        ):
            pass
        clients[0].close()
        assert all(isinstance(wait.exception(20), CoordinationError) for wait in waits)
