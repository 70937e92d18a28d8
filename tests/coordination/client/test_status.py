"""Whoever is no process of a job may ask its coordinator: status, stacks, keys, with one error for
all that goes wrong.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from holdfast.coordination import (
    CoordinationClient,
    CoordinationError,
    CoordinationService,
    Credentials,
    Fenced,
    JobIdentity,
    StatusClient,
)
from holdfast.coordination.names import GROW_KEY, NEXT_KEY, OVER_FOLDER
from holdfast.proto import session_pb2
from tests.support.in_process import serving
from tests.support.secured import at_once


def test_a_status_client_asks_and_joins_nothing() -> None:
    """Status and keys of a running job; the number of its processes stays as it is."""
    with CoordinationService.spawn(1, job=JobIdentity(name="j"), recoverable=True) as service:
        with (
            StatusClient(service.address) as status,
            CoordinationClient(service.address, 0) as client,
        ):
            assert status.key_value_dir_get_bytes("d") == []
            for key in ("d/b", "d/a", "e"):
                client.key_value_set(key, key)
            assert status.key_value_dir_get_bytes("d") == [("d/a", b"d/a"), ("d/b", b"d/b")]
            found = status.status()
            assert (found.job, found.phase, found.keys, len(found.tasks)) == ("j", "running", 3, 1)


def test_where_the_checkpoints_are_is_in_the_status() -> None:
    """As the primary reported it last, within bounds."""
    steps = [
        {"step": number, "bytes": 10 * number, "incremental": number > 5, "local": False}
        for number in range(100)
    ]
    with (
        CoordinationService.spawn(1, recoverable=True) as service,
        CoordinationClient(service.address, 0) as client,
    ):
        client.report(root={"path": "/data/" + 2000 * "x", "num_steps": 100, "steps": steps})
        client.report(step=7)
        with StatusClient(service.address) as status:
            progress = status.status().tasks[0].progress
    root, newest = progress.root, progress.root.steps[-1]
    assert (root.path[:7], len(root.path), root.num_steps, progress.step) == (
        "/data/x",
        1024,
        100,
        7,
    )
    assert [step.step for step in root.steps] == list(range(36, 100))
    assert (newest.bytes, newest.incremental, newest.local, newest.damaged) == (
        990,
        True,
        False,
        False,
    )


def test_the_status_says_where_local_parts_are() -> None:
    """For each process of the job (of which there is one here), on so many hosts as are shown."""
    step = {
        "step": 7,
        "local": True,
        "survives": 1,
        "copies": [{"processes": [number, *range(100)]} for number in range(9)],
    }
    with (
        CoordinationService.spawn(1, recoverable=True) as service,
        CoordinationClient(service.address, 0) as client,
    ):
        client.report(root={"path": "/data", "num_steps": 0, "steps": [step]})
        with StatusClient(service.address) as status:
            (found,) = status.status().tasks[0].progress.root.steps
    assert (found.survives, [list(each.processes) for each in found.copies]) == (
        1,
        [[0, *range(7)]],
    )


def test_stacks_are_asked_of_all_at_once() -> None:
    """One answer for each process, in order: its threads, or why there are none."""
    with serving(2) as served, StatusClient(served.address) as status:
        for found in status.stacks([0, 1]):
            assert isinstance(found, CoordinationError) and found.code == "UNAVAILABLE"
    with (
        CoordinationService.spawn(1, recoverable=True) as service,
        CoordinationClient(service.address, 0),
    ):
        with StatusClient(service.address) as status:
            (stacks,) = status.stacks([0])
    assert isinstance(stacks, str) and "test_stacks_are_asked_of_all_at_once" in stacks


def test_a_launcher_reports_an_exit() -> None:
    """The process is lost at once, by how it ended; its own client is Fenced. A number that the job
    does not have is refused.
    """
    with (
        CoordinationService.spawn(2, recoverable=True) as service,
        StatusClient(service.address) as status,
    ):
        clients = [
            CoordinationClient(service.address, index, host=f"b{index}") for index in range(2)
        ]
        at_once([client.connect for client in clients])
        status.report_exit(1, -9)
        assert status.status().tasks[1].error == "process 1 (host b1, ended by signal 9) is lost"
        with pytest.raises(Fenced, match="this life of process 1 is over: process 1 "):
            clients[1].wait_at_barrier("b", 30_000)
        with pytest.raises(CoordinationError, match="there is no process 2: the job has 2, 0 to 1"):
            status.report_exit(2, 0)
        clients[0].shutdown()
        clients[1].close()


def test_a_launcher_ends_an_attempt() -> None:
    """Keys hold why, and where those go that stay: who waits for that hears it."""
    with (
        CoordinationService.spawn(1, recoverable=True) as service,
        CoordinationClient(service.address, 0) as client,
        StatusClient(service.address) as status,
        ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(status.wait_for_key, NEXT_KEY, timeout_s=60.0)
        following = session_pb2.NextAttempt(attempt=4, staying=[0])
        status.end_attempt("attempt 3 is over: process 2 was ended by signal 9", following)
        assert session_pb2.NextAttempt.FromString(waiting.result(30)) == following
        assert (
            client.key_value_try_get(f"{OVER_FOLDER}/over")
            == "attempt 3 is over: process 2 was ended by signal 9"
        )


def test_a_launcher_has_room_for_more() -> None:
    """Who waits for that hears it, and no end or notice is told."""
    with (
        CoordinationService.spawn(1, recoverable=True) as service,
        StatusClient(service.address) as status,
        ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(status.wait_for_key, GROW_KEY, timeout_s=60.0)
        status.ask_to_grow()
        assert waiting.result(30)
        assert [key for key, _ in status.key_value_dir_get_bytes(OVER_FOLDER)] == [GROW_KEY]


def test_a_launcher_reports_where_the_time_went() -> None:
    """The status has it as it was last reported, and no more parts than there should be."""
    with serving(1) as served, StatusClient(served.address) as status:
        assert not status.status().goodput_s
        launcher = session_pb2.Launcher(state="running", why="4 processes", attempt=2)
        status.report_launcher(launcher, {"starting_s": 1.5, "stepping_s": 2.0})
        assert dict(status.status().goodput_s) == {"starting_s": 1.5, "stepping_s": 2.0}
        assert status.status().launcher == launcher
        long = session_pb2.Launcher(state="running", why="w" * 1_000_000)
        status.report_launcher(long, {f"{number}": 1.0 for number in range(1000)})
        assert len(status.status().goodput_s) == 16
        many = {"why": "w" * 100_000, "replaced": range(5000)}
        hostile = session_pb2.Launcher(state="running", attempts=[many] * 100)
        status.report_launcher(hostile, {})
        assert status.status().launcher.ByteSize() < 1_000_000
        status.report_launcher(long, {f"{number}": 1.0 for number in range(1000)})
        assert 1000 < len(status.status().launcher.why) < 100_000


def test_nobody_is_unavailable_at_once_or_waited_for() -> None:
    """UNAVAILABLE where nobody listens, DEADLINE_EXCEEDED where the client waits for somebody to
    listen.
    """
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        for wait_for_ready, code in ((False, "UNAVAILABLE"), (True, "DEADLINE_EXCEEDED")):
            with StatusClient(address, timeout_s=0.5, wait_for_ready=wait_for_ready) as status:
                with pytest.raises(CoordinationError) as caught:
                    status.status()
                assert caught.value.code == code


def test_a_call_that_meets_the_end_of_the_coordinator_finds_nobody() -> None:
    """UNAVAILABLE, as where nobody listens any more, whatever gRPC says at that moment."""

    def ask_until_the_end(client: StatusClient) -> CoordinationError:
        while True:
            try:
                client.status()
            except CoordinationError as error:
                return error

    with serving(1) as service, ExitStack() as stack, ThreadPoolExecutor(8) as threads:
        clients = [stack.enter_context(StatusClient(service.address)) for _ in range(8)]
        asking = [threads.submit(ask_until_the_end, client) for client in clients]
        clients[0].status()
        service.stop()
        errors = [each.result(timeout=60) for each in asking]
    assert {error.code for error in errors} == {"UNAVAILABLE"}, errors
    assert any("ended before it answered" in str(error) for error in errors), errors


def test_a_secured_coordinator_wants_the_token(tmp_path: object) -> None:
    """Without it UNAUTHENTICATED; a file that cannot be read is named."""
    with serving(1, token="a long enough token") as served, StatusClient(served.address) as status:
        with pytest.raises(CoordinationError) as caught:
            status.status()
        assert caught.value.code == "UNAUTHENTICATED"
    with pytest.raises(CoordinationError, match="cannot read the token file /nonexistent"):
        StatusClient("127.0.0.1:1", Credentials("/nonexistent"))


@pytest.mark.parametrize(
    "call", [StatusClient.status, lambda status: status.stacks([0])], ids=["status", "stacks"]
)
def test_a_closed_client_is_an_error(call: Callable[[StatusClient], object]) -> None:
    """CANCELLED, not an exception of gRPC's."""
    status = StatusClient("127.0.0.1:1")
    status.close()
    with pytest.raises(CoordinationError) as caught:
        call(status)
    assert caught.value.code == "CANCELLED"
