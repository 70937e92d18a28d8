"""A caller that waits for an answer reads for all: turns at reading, and what must not run in a
caller's turn.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.coordination import (
    CoordinationClient,
    CoordinationError,
    CoordinationService,
    ProcessInfo,
    ServiceTimeouts,
    Timeouts,
)
from holdfast.coordination.client import frame_transport
from tests.support.proxy import Proxy

LONG_MS = 60_000


@pytest.fixture
def service() -> Iterator[CoordinationService]:
    with CoordinationService.spawn(
        1, timeouts=ServiceTimeouts(heartbeat_s=600), recoverable=True
    ) as service:
        yield service


@pytest.fixture
def client(service: CoordinationService) -> Iterator[CoordinationClient]:
    with CoordinationClient(service.address, 0, timeouts=Timeouts(heartbeat_s=600)) as client:
        yield client


def wait_until_blocked(client: CoordinationClient, threads: int) -> None:
    """Waits until so many calls are in flight."""

    def waiting() -> int:
        stream = client._connection._transport._stream  # type: ignore[union-attr]
        return 0 if stream is None else len(stream._waiting)

    while waiting() < threads:
        time.sleep(0.001)


def test_who_waits_long_reads_for_all(client: CoordinationClient) -> None:
    """A call that waits for a key keeps reading, and eight threads' quick calls are answered
    meanwhile; then its own is.
    """
    with ThreadPoolExecutor(9) as pool:
        late = pool.submit(client.blocking_key_value_get, "late", LONG_MS)
        wait_until_blocked(client, 1)

        def quick(thread: int) -> list[int]:
            return [client.key_value_increment(f"count/{thread}", 1) for _ in range(50)]

        assert list(pool.map(quick, range(8))) == [list(range(1, 51))] * 8
        assert not late.done()
        client.key_value_set("late", "here")
        assert late.result(30) == "here"


def test_the_turn_passes_when_its_reader_is_answered(client: CoordinationClient) -> None:
    """Ten wait, each for a key of its own, and are answered in the reverse of the order in which
    they came.
    """
    with ThreadPoolExecutor(10) as pool:
        waits = []
        for number in range(10):
            waits.append(pool.submit(client.blocking_key_value_get, f"key/{number}", LONG_MS))
            wait_until_blocked(client, number + 1)
        for number in reversed(range(10)):
            client.key_value_set(f"key/{number}", str(number))
            assert waits[number].result(30) == str(number)


def test_a_reader_of_a_stopped_service_is_freed(
    service: CoordinationService,
) -> None:
    """With the service stopped, each of four callers ends with DEADLINE_EXCEEDED; continued, the
    same Session goes on.
    """
    with CoordinationClient(
        service.address, 0, timeouts=Timeouts(heartbeat_s=600, rpc_s=1.0)
    ) as client:
        client.key_value_set("key", "value")
        os.kill(service.pid, signal.SIGSTOP)
        try:
            with ThreadPoolExecutor(4) as pool:
                calls = [pool.submit(client.key_value_try_get, "key") for _ in range(4)]
                for call in calls:
                    with pytest.raises(CoordinationError) as failure:
                        call.result(30)
                    assert failure.value.code == "DEADLINE_EXCEEDED"
        finally:
            os.kill(service.pid, signal.SIGCONT)
        answer = None
        while answer is None:
            with contextlib.suppress(CoordinationError):
                answer = client.key_value_try_get("key")
        assert answer == "value" and client.statistics()["reconnects"] == 0


def test_listeners_are_notified_on_the_clients_own_thread(service: CoordinationService) -> None:
    """While the only caller waits, listeners are notified on another thread, from which the client
    may be called.
    """
    seen: list[tuple[str, str]] = []
    notified = threading.Event()

    def listener(processes: Sequence[ProcessInfo]) -> None:
        seen.append((threading.current_thread().name, client.key_value_try_get("key")))
        notified.set()

    with CoordinationClient(service.address, 0, timeouts=Timeouts(heartbeat_s=600)) as client:
        client.key_value_set("key", "value")
        with ThreadPoolExecutor(1) as pool:
            late = pool.submit(client.blocking_key_value_get, "late", LONG_MS)
            wait_until_blocked(client, 1)
            client.watch_processes(listener)
            notified.clear()
            client.report_error("on purpose")  # a change of this very process
            assert notified.wait(30)
            client.close()
            with pytest.raises(CoordinationError):
                late.result(30)
    assert seen[-1] == ("holdfast-session", "value")


def test_listeners_are_notified_when_nobody_calls(service: CoordinationService) -> None:
    """After the last call the stream's own thread reads again."""
    notified = threading.Event()
    with CoordinationClient(
        service.address,
        0,
        timeouts=Timeouts(heartbeat_s=600),
    ) as client:
        client.watch_processes(lambda processes: notified.set())
        for _ in range(20):
            client.key_value_set("key", "value", allow_overwrite=True)
        assert notified.wait(30)


@pytest.mark.parametrize("tested", [True, False], ids=["queue", "public"])
@pytest.mark.parametrize("breaks", [False, True], ids=["", "as the connection breaks"])
def test_who_listens_does_not_read(
    breaks: bool, tested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a listener runs on the stream's own thread, callers read for themselves, and open the
    stream again. So the listener may wait for what another thread calls for.
    """
    monkeypatch.setattr(frame_transport, "is_tested_grpc", lambda: tested)
    listening = threading.Event()
    answered = threading.Event()
    waited: list[bool] = []

    def listener(processes: Sequence[ProcessInfo]) -> None:
        if threading.current_thread().name == "holdfast-session":
            listening.set()
            waited.append(answered.wait(10))

    timeouts = Timeouts(heartbeat_s=600, rpc_s=5)
    with (
        CoordinationService.spawn(
            2, timeouts=ServiceTimeouts(heartbeat_s=600), recoverable=True
        ) as service,
        Proxy(service.address) as proxy,
    ):
        clients = [CoordinationClient(proxy.address, n, timeouts=timeouts) for n in range(2)]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(CoordinationClient.connect, clients))
        clients[0].watch_processes(listener)
        clients[1].shutdown()
        assert listening.wait(30)
        if breaks:
            proxy.cut()
        clients[0].key_value_set("key", "value")
        answered.set()
        clients[0].shutdown()
    assert waited and all(waited)


def test_an_interrupt_frees_a_reader(client: CoordinationClient) -> None:
    """Ctrl-C ends a wait of the main thread; another thread's wait and later calls are answered."""
    with ThreadPoolExecutor(1) as pool:
        timer = threading.Thread(
            target=lambda: (wait_until_blocked(client, 1), _thread.interrupt_main())
        )

        def wait() -> None:
            timer.start()  # in here: a heartbeat that is in flight counts as a call too
            client.blocking_key_value_get("never", LONG_MS)

        with pytest.raises(KeyboardInterrupt):
            wait()
        timer.join()
        late = pool.submit(client.blocking_key_value_get, "late", LONG_MS)
        wait_until_blocked(client, 1)
        client.key_value_set("late", "here")
        assert late.result(30) == "here"
