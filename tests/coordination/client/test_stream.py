"""The client's connection: a thread reads, callers send, and neither holds up the other."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.coordination import (
    CoordinationClient,
    CoordinationError,
    CoordinationService,
    Endpoint,
    ProcessInfo,
    ServiceTimeouts,
    Timeouts,
)
from holdfast.coordination.address import split_address
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


def test_who_waits_long_holds_up_nobody(client: CoordinationClient) -> None:
    """While a call waits for a key, eight threads' quick calls are answered; then its own is."""
    with ThreadPoolExecutor(9) as pool:
        late = pool.submit(client.blocking_key_value_get, "late", LONG_MS)
        wait_until_blocked(client, 1)

        def quick(thread: int) -> list[int]:
            return [client.key_value_increment(f"count/{thread}", 1) for _ in range(50)]

        assert list(pool.map(quick, range(8))) == [list(range(1, 51))] * 8
        assert not late.done()
        client.key_value_set("late", "here")
        assert late.result(30) == "here"


def test_answers_come_in_any_order(client: CoordinationClient) -> None:
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


def test_callers_of_a_stopped_service_are_freed(
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
    """A change is pushed to a client that makes no call."""
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


@pytest.mark.parametrize("breaks", [False, True], ids=["", "as the connection breaks"])
def test_who_listens_does_not_read(breaks: bool) -> None:
    """While a listener runs on the stream's own thread the reader goes on, and a stream is opened
    again. So the listener may wait for what another thread calls for.
    """
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


def test_an_interrupt_ends_its_call_alone(client: CoordinationClient) -> None:
    """Ctrl-C ends a wait of the main thread; the Session goes on, and later calls are answered."""
    main = threading.get_ident()
    with ThreadPoolExecutor(1) as pool:
        timer = threading.Thread(
            target=lambda: (wait_until_blocked(client, 1), signal.pthread_kill(main, signal.SIGINT))
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
    assert client.statistics()["reconnects"] == 0


def test_a_request_that_is_sent_in_part_opens_the_session_again(
    service: CoordinationService,
) -> None:
    """One larger than what lies between the two, into a stopped coordinator, ends at its time, and
    one of which nothing was sent ends at its own; continued, calls are answered.
    """
    with CoordinationClient(
        service.address, 0, timeouts=Timeouts(heartbeat_s=600, rpc_s=1.0)
    ) as client:
        os.kill(service.pid, signal.SIGSTOP)
        try:
            with ThreadPoolExecutor(2) as pool:
                large = pool.submit(client.key_value_set_bytes, "large", bytes(32 << 20))
                wait_until_blocked(client, 1)
                small = pool.submit(client.key_value_set, "small", "value")
                for call in (large, small):
                    failure = call.exception(30)
                    assert isinstance(failure, CoordinationError)
        finally:
            os.kill(service.pid, signal.SIGCONT)
        answer = None
        while answer is None:
            with contextlib.suppress(CoordinationError):
                client.key_value_set("key", "value", allow_overwrite=True)
                answer = client.key_value_try_get("key")
        assert answer == "value"


def test_another_program_is_told_at_once() -> None:
    """One that answers otherwise, as gRPC's servers do, is no coordinator of this version."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(bytes([0, 0, 24, 4, 0, 0, 0, 0, 0]))
                connection.recv(1 << 16)

        pool.submit(answer)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(CoordinationError, match=r"UNIMPLEMENTED: what listens at .*older"):
            CoordinationClient(address, 0, timeouts=Timeouts(init_s=30)).connect()


@contextlib.contextmanager
def silent(port: int = 0) -> Iterator[str]:
    """Yields the address of a listener that takes nobody."""
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", port))
        listener.listen(0)
        for _ in range(3):  # until its queue is full
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_a_silent_address_leaves_time_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a name with two: an attempt that has two seconds reaches the coordinator."""
    with CoordinationService.spawn(1, endpoint=Endpoint(host="127.0.0.2")) as service:
        port = split_address(service.address)[1]
        found = [
            (socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, port))
            for host in ("127.0.0.1", "127.0.0.2")
        ]
        with silent(port), monkeypatch.context() as names:
            names.setattr(socket, "getaddrinfo", lambda *_, **__: found)
            client = CoordinationClient(f"a.name:{port}", 0, timeouts=Timeouts(init_s=2))
            client.connect()
        client.shutdown()


def test_a_close_interrupts_a_connection_that_is_being_made() -> None:
    """To a listener that takes nobody: `connect` ends at once."""
    with silent() as address:
        client = CoordinationClient(address, 0, timeouts=Timeouts(init_s=60))
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(client.connect)
            wait_for_thread("holdfast-reader")
            client.close()
            assert isinstance(joining.exception(10), CoordinationError)


def wait_for_thread(name: str) -> None:
    """Waits until a thread of that name runs."""
    while all(thread.name != name for thread in threading.enumerate()):
        time.sleep(0.001)
