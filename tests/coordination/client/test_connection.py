"""A connection rides out short outages, sends again what may be sent again, and ends every call
once the service is lost.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.coordination import (
    BarrierTimeout,
    CoordinationClient,
    CoordinationError,
    CoordinationService,
    CoordinatorLost,
    Endpoint,
    ProcessInfo,
    ProcessLost,
    ServiceTimeouts,
    StatusClient,
    Timeouts,
)
from holdfast.coordination.client import session
from holdfast.coordination.client.stream import Stream
from tests.support.in_process import serving
from tests.support.processes import no_file_can_be_opened, no_thread_can_be_started, wait_until
from tests.support.proxy import Proxy


@pytest.fixture(scope="module")
def service() -> Iterator[CoordinationService]:
    with CoordinationService.spawn(
        1, timeouts=ServiceTimeouts(heartbeat_s=60, linger_s=0), recoverable=True
    ) as spawned:
        yield spawned


@pytest.fixture
def impatient() -> Iterator[Proxy]:
    """A proxy before a service whose heartbeat timeout is a second."""
    with (
        CoordinationService.spawn(
            1, timeouts=ServiceTimeouts(heartbeat_s=1, linger_s=0), recoverable=True
        ) as spawned,
        Proxy(spawned.address) as proxy,
    ):
        yield proxy


@pytest.fixture
def proxy(service: CoordinationService) -> Iterator[Proxy]:
    with Proxy(service.address) as proxy:
        yield proxy


def test_a_short_outage_is_ridden_out(proxy: Proxy) -> None:
    """A connection that is cut, also while new ones are refused, is no event for the caller; the
    client counts it.
    """
    with CoordinationClient(proxy.address, 0, timeouts=Timeouts(rpc_s=20)) as client:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.blocking_key_value_get, "late", 20_000)
            proxy.cut(refuse=True)
            call = pool.submit(client.key_value_try_get_bytes, "nothing")
            proxy.cut()
            client.key_value_set("late", "here")
            assert waiting.result(20) == "here"
            with pytest.raises(CoordinationError, match="NOT_FOUND"):
                call.result(20)
        assert int(client.statistics()["breaks"]) >= 1


def test_an_increment_is_never_sent_twice(service: CoordinationService, proxy: Proxy) -> None:
    """An increment whose connection breaks before its answer is CoordinatorLost, in words that say
    it may have been applied.
    """
    with CoordinationClient(proxy.address, 0, timeouts=Timeouts(rpc_s=20)) as client:
        client.key_value_increment("count", 1)
        os.kill(service.pid, signal.SIGSTOP)
        requested = proxy.requested
        try:
            with ThreadPoolExecutor(1) as pool:
                call = pool.submit(client.key_value_increment, "count", 1)
                while proxy.requested == requested:
                    time.sleep(0.001)
                while not call.done():  # cut again where that was a heartbeat
                    proxy.cut()
                    wait([call], 0.05)
        finally:
            os.kill(service.pid, signal.SIGCONT)
        with pytest.raises(
            CoordinatorLost,
            match="broke during IncrementKeyValue: it may or may not have been applied",
        ):
            call.result(0)


def test_a_set_sent_again_counts_as_set(service: CoordinationService, proxy: Proxy) -> None:
    """Its first sending may have arrived: the key then holds this very value, which is no
    ALREADY_EXISTS.
    """
    with CoordinationClient(proxy.address, 0, timeouts=Timeouts(rpc_s=20)) as client:
        for number in range(20):
            with ThreadPoolExecutor(1) as pool:
                call = pool.submit(client.key_value_set, f"set/{number}", str(number))
                proxy.cut()
                call.result(20)
        assert len(client.key_value_dir_get("set")) == 20
        with pytest.raises(CoordinationError, match="ALREADY_EXISTS"):
            client.key_value_set("set/0", "another")


def test_an_outage_beyond_the_timeout_ends_calls(impatient: Proxy) -> None:
    """Calls in flight and later ones are CoordinatorLost, each with a traceback of its own, and
    on_error is called once.
    """
    reported: list[CoordinationError] = []
    client = CoordinationClient(
        impatient.address,
        0,
        timeouts=Timeouts(heartbeat_s=1.0),
        on_error=reported.append,
    )
    client.connect()
    with ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(client.blocking_key_value_get, f"never/{number}", 60_000)
            for number in range(2)
        ]
        impatient.cut(refuse=True)
        errors = [call.exception(30) for call in calls]
    assert all(
        isinstance(error, CoordinatorLost) and error.address == impatient.address
        for error in errors
    ), errors
    with pytest.raises(CoordinatorLost, match="has been silent for") as caught:
        client.key_value_set("a", "b")
    assert caught.value not in errors and [type(error) for error in reported] == [CoordinatorLost]
    client.close()


def test_a_listener_that_raises_harms_nobody(impatient: Proxy) -> None:
    """An on_error that fails is logged; the calls end as they should."""

    def fail(error: CoordinationError) -> None:
        raise RuntimeError("on purpose")

    client = CoordinationClient(impatient.address, 0, on_error=fail)
    client.connect()
    impatient.cut(refuse=True)
    with pytest.raises(CoordinatorLost):
        client.blocking_key_value_get("never", 60_000)
    client.close()


def test_no_coordinator_is_an_error_that_says_where() -> None:
    """CoordinatorLost with the address and the seconds tried, when nobody listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(
            CoordinatorLost, match=f"no coordinator answered at {address} for"
        ) as caught:
            CoordinationClient(address, 0, timeouts=Timeouts(init_s=0.5)).connect()
    assert caught.value.address == address and 0.1 < caught.value.tried_s < 10


@contextmanager
def pair() -> Iterator[tuple[Proxy, list[CoordinationClient], ThreadPoolExecutor]]:
    """Yields two connected clients, the first behind the proxy. They leave after the block."""
    with CoordinationService.spawn(2, recoverable=True) as service, Proxy(service.address) as proxy:
        clients = [
            CoordinationClient(address, index)
            for index, address in enumerate((proxy.address, service.address))
        ]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda client: client.connect(), clients))
            yield proxy, clients, pool
            list(pool.map(lambda client: client.shutdown(), clients))


def test_a_session_that_breaks_is_opened_again() -> None:
    """A connection that ends in the middle of a barrier is no event for those who wait at it."""
    with pair() as (proxy, clients, pool):
        waiting = pool.submit(clients[0].wait_at_barrier, "b", 20_000)
        proxy.cut()
        clients[1].wait_at_barrier("b", 20_000)
        waiting.result(20)
        clients[0].key_value_set("a", "b")
        assert clients[0].statistics()["reconnects"] == 1


def test_a_call_whose_time_ends_in_an_outage_names_the_missing() -> None:
    """Sent again with no time left, it is answered at once, as if it had been there."""
    with pair() as (proxy, clients, pool):
        proxy.cut(refuse=True)
        waiting = pool.submit(clients[0].get_live_nodes, [0, 1], timeout_s=0.2)
        with pytest.raises(CoordinationError, match="was not set"):
            clients[1].blocking_key_value_get("the end of that time", 300)
        proxy.cut()
        with pytest.raises(BarrierTimeout) as caught:
            waiting.result(20)
    assert caught.value.missing == (1,)


def test_reports_come_again_after_a_restart(tmp_path: Path) -> None:
    """A coordinator that was killed and is back knows, from the first call of a process on, what
    the process had reported, though the journal does not hold it. Its history says it once.
    """
    journal = str(tmp_path / "journal")
    with CoordinationService.spawn(1, recoverable=True, journal=journal) as first:
        client = CoordinationClient(first.address, 0)
        client.connect()
        client.report(step=7, root={"path": "/old", "num_steps": 1, "steps": [{"step": 1}]}, pace=2)
        client.report(saved_step=5, trouble="slow", root={"path": "/new"}, share=0.5)
        os.kill(first.pid, signal.SIGKILL)
    port = int(first.address.rsplit(":", 1)[1])
    with (
        CoordinationService.spawn(
            1, endpoint=Endpoint(port=port), recoverable=True, journal=journal
        ) as second,
        StatusClient(second.address) as status,
    ):
        client.key_value_set("a", "b")
        shown = status.status(with_events=True)
        client.close()
    progress = shown.tasks[0].progress
    assert (progress.step, progress.saved_step, progress.trouble) == (7, 5, "slow")
    assert dict(progress.values) == {"pace": 2, "share": 0.5}
    assert progress.root.path == "/new" and not progress.root.steps
    kinds = Counter(event.kind for event in shown.events)
    assert (kinds["saved"], kinds["trouble"]) == (1, 1), "what is repeated is no news"


def test_a_coordinator_without_memory_is_another() -> None:
    """A coordinator restarted on the same port without a journal is told from the first: Fenced or
    lost, never joined by mistake.
    """
    with CoordinationService.spawn(
        1, timeouts=ServiceTimeouts(heartbeat_s=4), recoverable=True
    ) as first:
        client = CoordinationClient(first.address, 0, timeouts=Timeouts(heartbeat_s=4))
        client.connect()
        os.kill(first.pid, signal.SIGKILL)
    port = int(first.address.rsplit(":", 1)[1])
    with CoordinationService.spawn(
        1, endpoint=Endpoint(port=port), timeouts=ServiceTimeouts(heartbeat_s=4), recoverable=True
    ):
        with pytest.raises(CoordinationError, match=r"restarted without its journal|silent"):
            client.wait_at_barrier("b", 20_000, [0])
        client.close()


def test_a_value_too_large_is_refused_at_once() -> None:
    """RESOURCE_EXHAUSTED, with the size and what is allowed; the connection stays, and a wait on it
    goes on.
    """
    with (
        CoordinationService.spawn(1) as service,
        CoordinationClient(service.address, 0) as client,
    ):
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.blocking_key_value_get, "late", 60_000)
            with pytest.raises(CoordinationError) as caught:
                client.key_value_set_bytes("too large", bytes(80 << 20))
            assert caught.value.code == "RESOURCE_EXHAUSTED" and "83886" in str(caught.value)
            client.key_value_set("late", "here")
            assert waiting.result(20) == "here" and client.statistics()["breaks"] == 0


def test_a_lost_answer_of_who_lives_comes_again() -> None:
    """A client whose answer was lost sends the question again, and gets the answer that the others
    got, though they ask nothing more.
    """
    with (
        CoordinationService.spawn(2, recoverable=True) as service,
        Proxy(service.address) as proxy,
        ThreadPoolExecutor(2) as pool,
    ):
        clients = [
            CoordinationClient(service.address, 0),
            CoordinationClient(proxy.address, 1),
        ]
        list(pool.map(CoordinationClient.connect, clients))
        other = pool.submit(clients[0].get_live_nodes, [0, 1])
        proxy.drop("answers")
        unheard = pool.submit(clients[1].get_live_nodes, [0, 1])
        answer = other.result(20)
        proxy.deliver()
        proxy.cut()
        try:
            assert unheard.result(20) == answer
        finally:
            for client in clients:
                client.close()


def test_news_of_a_former_stream_are_none() -> None:
    """It has broken while its thread was held up, with a change to tell: what the next stream has
    told meanwhile stays.
    """
    held_up = queue.SimpleQueue[threading.Thread]()
    goes_on = threading.Event()
    seen = list[Sequence[ProcessInfo]]()

    def on_error(error: CoordinationError) -> None:
        if isinstance(error, ProcessLost) and error.process == 2:
            held_up.put(threading.current_thread())
            goes_on.wait(60)

    with (
        serving(3, recoverable=True) as served,
        Proxy(served.address) as proxy,
        ThreadPoolExecutor(3) as pool,
    ):
        clients = [CoordinationClient(served.address, number) for number in (1, 2)]
        clients.append(CoordinationClient(proxy.address, 0, on_error=on_error))
        list(pool.map(CoordinationClient.connect, clients))
        _, second, told = clients
        told.watch_processes(seen.append)
        second.report_error("lost")
        thread = held_up.get(timeout=20)
        again = CoordinationClient(served.address, 1)
        again.connect()
        session = served.service.sessions._sessions[0]
        wait_until(lambda: session.version == served.service.machine.task_table.version)
        told.key_value_set("read", "all that came before this answer")
        proxy.cut()
        again.report_error("lost")
        wait_until(lambda: seen[-1][1].state == "ERROR")
        goes_on.set()
        thread.join(20)
        assert seen[-1][1].state == "ERROR"
        for client in (*clients, again):
            client.close()


@pytest.mark.parametrize("shortage", [no_file_can_be_opened, no_thread_can_be_started])
def test_who_can_open_no_stream_comes_back_once_it_can(
    monkeypatch: pytest.MonkeyPatch,
    shortage: Callable[[], AbstractContextManager[None]],
) -> None:
    """It tries again and again meanwhile."""
    tries = threading.Semaphore(0)

    class Tried(Stream):
        def __init__(self, *arguments: Any) -> None:
            tries.release()
            super().__init__(*arguments)

    with (
        CoordinationService.spawn(1) as service,
        CoordinationClient(service.address, 0) as client,
    ):
        with shortage():
            monkeypatch.setattr(session, "Stream", Tried)
            client._connection._transport._stream.connection.end()  # type: ignore[union-attr]
            for _ in range(3):
                assert tries.acquire(timeout=20)
        client.key_value_set("back", "1", allow_overwrite=True)
