"""What a Session does over each way to the coordinator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from holdfast.coordination import (
    BarrierTimeout,
    CoordinationClient,
    CoordinationError,
    Credentials,
    ProcessInfo,
    ProcessLost,
    Relay,
    Timeouts,
)
from holdfast.coordination.vitals import stacks
from tests.support.in_process import serving
from tests.support.processes import wait_until
from tests.support.proxy import Proxy
from tests.support.secured import TOKEN, secure

COUNT = 3


@dataclass
class Way:
    """How the processes of a job reach its coordinator."""

    address: str
    credentials: Credentials

    def joined(self, address: str = "") -> list[CoordinationClient]:
        """Returns a connected client for each process; at another address, where one is given."""
        clients = [
            CoordinationClient(
                address or self.address,
                index,
                timeouts=Timeouts(rpc_s=20),
                credentials=self.credentials,
            )
            for index in range(COUNT)
        ]
        at_once([client.connect for client in clients])
        return clients


@pytest.fixture(params=["tcp", "unix", "tls", "relay"])
def way(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Way]:
    security = secure(tmp_path)
    kind = request.param
    settings: dict[str, Any] = {"recoverable": True, "heartbeat_timeout_s": 60}
    if kind == "unix":
        settings["address"] = f"unix:{tmp_path}/socket"
    elif kind != "tcp":
        settings |= {"tls": security.server, "token": TOKEN}
    with serving(COUNT, **settings) as served, ExitStack() as stack:
        if kind == "relay":
            relay = Relay.spawn(served.address, security.own, range(COUNT))
            yield Way(stack.enter_context(relay).address, Credentials())
        else:
            yield Way(served.address, security.own if kind == "tls" else Credentials())


@pytest.fixture
def clients(way: Way) -> Iterator[list[CoordinationClient]]:
    found = way.joined()
    yield found
    for client in found:
        client.close()


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Makes calls in threads and returns their values, or the exceptions they raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.exception(60) or future.result() for future in futures]


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


@pytest.mark.parametrize("way", ["tcp", "tls"], indirect=True)
def test_a_connection_that_breaks_is_opened_again(way: Way) -> None:
    """Under a barrier, a wait and quick calls: nobody notices but the counts."""
    with Proxy(way.address) as proxy, ThreadPoolExecutor(2) as pool:
        clients = way.joined(proxy.address)
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
    """`close` in one thread frees the others."""
    with ThreadPoolExecutor(2) as pool:
        waits = [
            pool.submit(clients[0].blocking_key_value_get, f"never/{number}", 60_000)
            for number in range(2)
        ]
        wait_until(lambda: stacks().count("blocking_key_value_get_bytes") >= 2)
        clients[0].close()
        assert all(isinstance(wait.exception(20), CoordinationError) for wait in waits)
