"""A coordinator that is out of reach: the first line says what was found and what to look at."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from holdfast.coordination import (
    CoordinationClient,
    CoordinationError,
    CoordinationService,
    CoordinatorLost,
    ServiceTimeouts,
    StatusClient,
    Timeouts,
)
from tests.support.grpc_words import GRPC_WORDS


@contextmanager
def _nobody() -> Iterator[str]:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{unused.getsockname()[1]}"


@contextmanager
def _unknown_name() -> Iterator[str]:
    yield "no-such-host.invalid:8080"


@contextmanager
def _no_socket() -> Iterator[str]:
    yield "unix:/no/such/socket"


@contextmanager
def _another_program() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@contextmanager
def _stopped() -> Iterator[str]:
    with CoordinationService.spawn(1) as service:
        os.kill(service.pid, signal.SIGSTOP)
        try:
            yield service.address
        finally:
            os.kill(service.pid, signal.SIGCONT)


WHERE: dict[str, tuple[Callable[[], AbstractContextManager[str]], str]] = {
    "nobody": (_nobody, "nobody listens there: is it running, and is the address right?"),
    "no socket": (_no_socket, "nobody listens there: is it running, and is the address right?"),
    "an unknown name": (_unknown_name, "this host does not know that name"),
    "another program": (_another_program, "somebody listens there who does not answer as"),
    "a stopped one": (_stopped, "somebody listens there who does not answer as a coordinator"),
}


@pytest.mark.parametrize("where", sorted(set(WHERE) - {"another program"}))
def test_who_joins_reads_what_is_there(where: str) -> None:
    """And not what the socket says of it, which is the cause."""
    make, expected = WHERE[where]
    with make() as address:
        client = CoordinationClient(address, 0, timeouts=Timeouts(init_s=1))
        with pytest.raises(CoordinatorLost) as caught:
            client.connect()
    assert f"no coordinator answered at {address} for " in str(caught.value)
    assert expected in str(caught.value)
    assert not GRPC_WORDS.search(str(caught.value)), caught.value
    assert caught.value.__cause__ is not None


def test_who_joins_another_program_reads_it_at_once() -> None:
    """That may be the coordinator of an older holdfast, too."""
    with _another_program() as address:
        client = CoordinationClient(address, 0, timeouts=Timeouts(init_s=60))
        with pytest.raises(CoordinationError, match="another program") as caught:
            client.connect()
    assert caught.value.code == "UNIMPLEMENTED" and address in str(caught.value)


@pytest.mark.parametrize("where", WHERE)
def test_who_asks_reads_who_does_not_answer(where: str) -> None:
    """With the address."""
    with (
        WHERE[where][0]() as address,
        StatusClient(address, timeout_s=1) as client,
        pytest.raises(CoordinationError) as caught,
    ):
        client.status()
    assert address in str(caught.value), caught.value
    assert not GRPC_WORDS.search(str(caught.value)), caught.value
    assert caught.value.__cause__ is not None


def test_who_loses_it_reads_for_how_long() -> None:
    """A coordinator that dies under a call that waits, and under those that come after."""
    timeouts = ServiceTimeouts(heartbeat_s=1)
    with CoordinationService.spawn(1, timeouts=timeouts) as service:
        client = CoordinationClient(service.address, 0, timeouts=Timeouts(heartbeat_s=1))
        client.connect()
        os.kill(service.pid, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(CoordinatorLost) as caught:
                client.blocking_key_value_get("never", 20_000)
            assert service.address in str(caught.value)
            assert not GRPC_WORDS.search(str(caught.value)), caught.value
        client.close()
