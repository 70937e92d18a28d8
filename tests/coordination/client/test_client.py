"""The client ends every call in time, with the right error, whatever happens to the coordinator or
to its peers.
"""

from __future__ import annotations

import functools
import gc
import math
import os
import pickle
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from holdfast.coordination import (
    BarrierTimeout,
    CoordinationClient,
    CoordinationError,
    CoordinationService,
    CoordinatorLost,
    Credentials,
    Fenced,
    JobIdentity,
    ProcessInfo,
    ProcessLost,
    ServiceTimeouts,
    Timeouts,
)
from holdfast.coordination.client import client as client_module
from holdfast.coordination.deadline import Deadline
from holdfast.coordination.limits import Limits
from tests.support.in_process import Served, serving

TIMEOUTS = Timeouts(heartbeat_s=3, init_s=20, shutdown_s=5, rpc_s=20)


@pytest.fixture
def service() -> Iterator[Served]:
    settings = {"heartbeat_timeout_s": 3, "shutdown_timeout_s": 5, "recoverable": True}
    with serving(2, **settings) as served:
        yield served


@pytest.fixture
def spawned() -> Iterator[CoordinationService]:
    """One in a process of its own, which may be killed or stopped."""
    with CoordinationService.spawn(
        2, timeouts=ServiceTimeouts(heartbeat_s=3, shutdown_s=5), recoverable=True
    ) as coordinator:
        yield coordinator


def join(
    service: Served | CoordinationService,
    count: int = 2,
    *,
    timeouts: Timeouts = TIMEOUTS,
    **options: Any,
) -> list[CoordinationClient]:
    """Returns connected clients 0 to count-1."""
    clients = [
        CoordinationClient(service.address, index, timeouts=timeouts, **options)
        for index in range(count)
    ]
    at_once([client.connect for client in clients])
    return clients


def at_once(calls: Sequence[Callable[[], object]]) -> list[object]:
    """Makes calls in threads and returns their values, or the exceptions they raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.exception() or future.result() for future in futures]


def close(clients: Sequence[CoordinationClient]) -> None:
    for client in clients:
        client.close()


def test_a_barrier_names_all_who_did_not_come(service: Served) -> None:
    """BarrierTimeout is a TimeoutError, carries the barrier's name and the missing, and its string
    begins with the code.
    """
    clients = join(service)
    with pytest.raises(BarrierTimeout) as caught:
        clients[0].wait_at_barrier("save/100", 200)
    error = caught.value
    assert isinstance(error, TimeoutError) and error.name == "save/100"
    assert str(error).startswith(
        "DEADLINE_EXCEEDED: Barrier timed out. Id: save/100::0. 1 of 2 at 'save/100', missing"
        " process 1"
    )
    assert error.missing == (1,)
    assert pickle.loads(pickle.dumps(error)).missing == error.missing
    at_once([client.shutdown for client in clients])


def test_a_missing_process_at_the_start_is_named(service: Served) -> None:
    """connect() says who has not come, when its time is over."""
    client = CoordinationClient(service.address, 0, timeouts=Timeouts(init_s=0.5))
    with pytest.raises(BarrierTimeout, match="missing process 1") as caught:
        client.connect()
    assert caught.value.missing == (1,) and caught.value.name == "connect"


@pytest.mark.parametrize("late_timeouts", [1.2, pytest.param(3.0, marks=pytest.mark.slow)])
def test_a_job_whose_last_process_is_late_starts(service: Served, late_timeouts: float) -> None:
    """Whoever waits for the others is alive, however long: the last one comes heartbeat timeouts
    later, and all have joined.
    """
    clients = [CoordinationClient(service.address, index) for index in range(2)]
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(clients[0].connect)
        with pytest.raises(TimeoutError):  # nothing ends it but the other
            first.result(3 * late_timeouts)
        clients[1].connect()
        first.result(20)
    at_once([lambda client=client: client.wait_at_barrier("all", 20_000) for client in clients])  # type: ignore[misc]
    assert [info.state for info in clients[0].process_info()] == ["CONNECTED"] * 2
    at_once([client.shutdown for client in clients])


def test_a_client_may_wait_for_ever(service: Served) -> None:
    """A timeout of infinity, or of a billion seconds and more, is a wait like any other."""
    endless = Timeouts(init_s=math.inf, shutdown_s=math.inf, rpc_s=math.inf)
    clients = join(service, timeouts=endless)
    clients[0].key_value_set("k", "v")
    assert clients[1].blocking_key_value_get("k", 10**15) == "v"
    waits = [functools.partial(each.wait_at_barrier, "b", 10**15) for each in clients]
    assert at_once(waits) == [None, None]
    assert at_once([each.shutdown for each in clients]) == [None, None]


def test_the_heartbeat_timeout_is_the_coordinators(service: Served) -> None:
    """A client takes it from the service at the join, and another value of its own is refused
    there, with both values.
    """
    client = CoordinationClient(service.address, 0, timeouts=Timeouts(heartbeat_s=100))
    with pytest.raises(
        CoordinationError,
        match=r"the heartbeat timeout of the coordinator at .* is 3 s, not 100 s: set it where",
    ) as caught:
        client.connect()
    assert caught.value.code == "FAILED_PRECONDITION"
    clients = join(service, timeouts=replace(TIMEOUTS, heartbeat_s=None))
    assert clients[0].heartbeat_timeout_s == 3
    with pytest.raises(CoordinationError) as refused:
        clients[0].wait_at_barrier("b", 100)
    assert refused.value.code == "DEADLINE_EXCEEDED"
    at_once([client.shutdown for client in clients])


def test_a_coordinators_death_ends_calls_in_flight(spawned: CoordinationService) -> None:
    """SIGKILL of the coordinator: barriers, gets and later calls raise CoordinatorLost in time;
    on_error is called once.
    """
    errors: list[CoordinationError] = []
    clients = join(spawned, on_error=errors.append)
    calls: list[Callable[[], object]] = [
        lambda: clients[0].wait_at_barrier("never", 60_000),
        lambda: clients[1].blocking_key_value_get("never", 60_000),
        lambda: os.kill(spawned.pid, signal.SIGKILL),
    ]
    first, second, _ = at_once(calls)
    assert isinstance(first, CoordinatorLost) and isinstance(second, CoordinatorLost)
    assert first.address == spawned.address and first.tried_s >= 2
    with pytest.raises(CoordinatorLost, match="has been silent for"):
        clients[0].key_value_set("a", "b")
    begun = time.monotonic()
    with pytest.raises(CoordinatorLost):
        clients[0].shutdown()
    assert time.monotonic() - begun < 2
    clients[1].close()
    assert [type(error) for error in errors] == [CoordinatorLost, CoordinatorLost]


def test_shutdown_ends_though_the_service_is_stopped(spawned: CoordinationService) -> None:
    """A coordinator that takes calls and never answers (SIGSTOP) does not hold a client that
    leaves.
    """
    clients = join(spawned, timeouts=replace(TIMEOUTS, shutdown_s=1))
    os.kill(spawned.pid, signal.SIGSTOP)
    try:
        begun = time.monotonic()
        with pytest.raises(CoordinationError):
            clients[0].shutdown()
        assert time.monotonic() - begun < 4
        close(clients)
    finally:
        os.kill(spawned.pid, signal.SIGCONT)


def test_a_lost_process_fails_who_needs_it(
    service: Served,
) -> None:
    """A peer that falls silent is ProcessLost with its number, host and silence, at the barrier,
    the get that needs it, and on_error.
    """
    errors: list[CoordinationError] = []
    reported = threading.Event()
    clients = join(
        service, host="b7", on_error=lambda error: (errors.append(error), reported.set())
    )
    clients[1].close()
    barrier, get = at_once(
        [
            lambda: clients[0].wait_at_barrier("b", 60_000),
            lambda: clients[0].blocking_key_value_get("k", 60_000, depends_on=[1]),
        ]
    )
    for error in (barrier, get):
        assert isinstance(error, ProcessLost), error
        assert (
            (error.process, error.host) == (1, "b7")
            and error.silent_s is not None
            and error.silent_s >= 3
        )
    assert reported.wait(10) and isinstance(errors[0], ProcessLost) and errors[0].process == 1
    clients[0].shutdown()


def test_an_error_reported_by_a_peer_reaches_all(service: Served) -> None:
    """Leaving the context by an exception reports to the others at once, with its text."""
    errors: list[CoordinationError] = []
    reported = threading.Event()
    clients = join(service, on_error=lambda error: (errors.append(error), reported.set()))
    clients[0].report_error("the disk is full")
    assert reported.wait(10)
    assert (
        isinstance(errors[0], ProcessLost)
        and errors[0].process == 0
        and "the disk is full" in str(errors[0])
    )
    close(clients)


def test_every_change_of_processes_is_a_complete_list(service: Served) -> None:
    """Listeners see full lists, end with the truth, and stop when they are removed."""
    lists: list[Sequence[ProcessInfo]] = []
    gone = threading.Event()

    def listen(processes: Sequence[ProcessInfo]) -> None:
        lists.append(processes)
        if processes[1].state == "DISCONNECTED":
            gone.set()

    clients = join(service)
    clients[0].watch_processes(listen)
    clients[1].shutdown()
    assert gone.wait(10)
    assert all([each.process_id for each in each_list] == [0, 1] for each_list in lists)
    assert [each.alive for each in clients[0].process_info()] == [True, False]
    clients[0].shutdown()


def test_a_client_counts_a_bounded_number_of_barriers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It forgets a barrier after the service has; both then begin it anew, as often as they
    like.
    """
    monkeypatch.setattr(client_module, "MOST_COUNTERS", 8)
    with serving(2, limits=Limits(barriers_kept=4)) as served, ThreadPoolExecutor(2) as pool:
        clients = [CoordinationClient(served.address, process_id) for process_id in range(2)]
        list(pool.map(CoordinationClient.connect, clients))
        for name in [*map(str, range(12)), "11", "11", "0", "0", *map(str, range(12))]:
            list(pool.map(lambda client, name=name: client.wait_at_barrier(name, 20_000), clients))
        assert [len(client._counters) for client in clients] == [8, 8]
        close(clients)


def test_a_cancelled_barrier_fails_for_those_who_wait(service: Served) -> None:
    """cancel_barrier ends the wait of the others with CANCELLED, and the next use of the name is
    unharmed.
    """
    clients = join(service)
    waited, _ = at_once(
        [lambda: clients[0].wait_at_barrier("c", 20_000), lambda: clients[1].cancel_barrier("c")]
    )
    assert isinstance(waited, CoordinationError) and waited.code == "CANCELLED"
    at_once([client.shutdown for client in clients])


def test_who_has_yet_to_arrive_cancels_the_next_instance(service: Served) -> None:
    """After earlier ones too, and those that ended without it. The cancel is its call."""
    clients = join(service)
    first, second = clients
    at_once([functools.partial(client.wait_at_barrier, "c", 20_000) for client in clients])
    for missed in (0, 2):
        for _ in range(missed):
            with pytest.raises(BarrierTimeout):
                first.wait_at_barrier("c", 50)
        waited, cancelled = at_once(
            [lambda: first.wait_at_barrier("c", 20_000), lambda: second.cancel_barrier("c")]
        )
        assert cancelled is None
        assert isinstance(waited, CoordinationError) and waited.code == "CANCELLED"
    together = [functools.partial(client.wait_at_barrier, "c", 20_000) for client in clients]
    assert at_once(together) == [None] * 2
    at_once([client.shutdown for client in clients])


def test_one_client_serves_many_threads(service: Served) -> None:
    """Sixteen threads that set, get, increment and meet at barriers of their own through two
    clients see only their own answers.
    """
    clients = join(service)

    def work(number: int) -> None:
        mine = clients[number % 2]
        for turn in range(20):
            mine.key_value_set(f"t/{number}/{turn}", f"{number}:{turn}")
            assert mine.blocking_key_value_get(f"t/{number}/{turn}", 5000) == f"{number}:{turn}"
            mine.key_value_increment("count", 1)
            mine.wait_at_barrier(f"b/{number // 2}", 20_000)

    assert at_once([lambda n=n: work(n) for n in range(16)]) == [None] * 16
    assert clients[0].key_value_try_get("count") == "320"
    assert clients[0].statistics()["barriers_passed"] == 160
    at_once([client.shutdown for client in clients])


def test_a_session_of_another_job_is_fenced() -> None:
    """Another job, or another attempt of it, is refused in words that name both."""
    with CoordinationService.spawn(1, job=JobIdentity(name="j", attempt=2)) as service:
        for job, attempt in (("j", 1), ("k", 2)):
            with pytest.raises(Fenced, match="job 'j', attempt 2"):
                CoordinationClient(
                    service.address,
                    0,
                    job=JobIdentity(name=job, attempt=attempt),
                    timeouts=Timeouts(init_s=5),
                ).connect()
        with CoordinationClient(service.address, 0, job=JobIdentity(name="j", attempt=2)) as client:
            client.report(step=3, saved_step=2, loss=0.5)


def test_calls_before_connect_and_after_shutdown_are_refused(service: Served) -> None:
    """FAILED_PRECONDITION, at once; a second shutdown is nothing."""
    client = CoordinationClient(service.address, 0)
    with pytest.raises(CoordinationError, match="FAILED_PRECONDITION: the client is not connected"):
        client.key_value_set("a", "b")
    client.shutdown()
    client.shutdown()
    with pytest.raises(CoordinationError, match="make a new one"):
        client.connect()


def test_a_forgotten_client_warns(service: Served) -> None:
    """A client dropped while connected is a ResourceWarning, and its threads end."""
    clients = join(service)
    with pytest.warns(ResourceWarning, match="was never shut down"):
        clients.pop(0).__class__, gc.collect()
    close(clients)


def test_wrong_arguments_are_the_callers_mistake() -> None:
    """ValueError and TypeError, before anything is sent."""
    for address in ("nowhere", "host:", "host:80a", "host:99999"):
        with pytest.raises(ValueError, match=f"'{address}': expected HOST:PORT"):
            CoordinationClient(address, 0)
    with pytest.raises(ValueError, match="an IPv6 host in brackets"):
        CoordinationClient("::1:8476", 0)
    with pytest.raises(ValueError, match="process_id must be in"):
        CoordinationClient("127.0.0.1:1", 4, job=JobIdentity(num_processes=4))
    with pytest.raises(ValueError, match="belong together"):
        Credentials(tls_cert="cert.pem")
    with pytest.raises(CoordinationError, match="cannot read the token file"):
        CoordinationClient(
            "127.0.0.1:1", 0, credentials=Credentials(token_file="/nonexistent")
        ).connect()
    with pytest.raises(TypeError, match="key must be str"):
        CoordinationClient("127.0.0.1:1", 0).key_value_set(1, "x")  # type: ignore[arg-type]


def test_nothing_is_left_running() -> None:
    """After close() no thread of the client remains."""
    before = set(threading.enumerate())
    with CoordinationService.spawn(1) as service, CoordinationClient(service.address, 0) as client:
        client.key_value_set("a", "b")
    with warnings.catch_warnings():
        deadline = Deadline(10)
        while left := [
            thread
            for thread in set(threading.enumerate()) - before
            if thread.name.startswith("holdfast")
        ]:
            assert not deadline.passed(), left
            left[0].join(0.1)


def test_who_lives_is_asked_for_its_own_time(service: Served) -> None:
    """A question of who lives takes as long as its caller says, also longer than other calls; the
    error at its end names who has not asked.
    """
    clients = join(service, timeouts=replace(TIMEOUTS, rpc_s=0.1))
    with pytest.raises(BarrierTimeout, match=r"missing process 1 .*; waited 0\.5 s") as late:
        clients[0].get_live_nodes([0, 1], timeout_s=0.5)
    assert late.value.missing == (1,)
    for client in clients:
        client.close()


def test_processes_may_be_an_array(service: Served) -> None:
    """An array that holds process 0 alone is false, and names one process all the same."""
    clients = join(service)
    clients[0].wait_at_barrier("alone", 1000, np.array([0]))
    waits = [functools.partial(each.wait_at_barrier, "b", 9000, np.arange(2)) for each in clients]
    assert at_once(waits) == [None, None]
    assert clients[0].get_live_nodes(np.array([0])) == {0: 1}
    close(clients)


def test_a_large_set_of_processes_travels_as_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 of 4 processes meet, and ask who lives. A set with a number that the job lacks is refused
    by its number, however high.
    """
    monkeypatch.setattr(client_module, "_MOST_LISTED", 2)
    with serving(4, heartbeat_timeout_s=3) as served:
        clients = [
            CoordinationClient(served.address, index, timeouts=TIMEOUTS) for index in range(4)
        ]
        assert at_once([client.connect for client in clients]) == [None] * 4
        meet = [
            functools.partial(client.wait_at_barrier, "most", 20_000, [0, 1, 2])
            for client in clients[:3]
        ]
        assert at_once(meet) == [None] * 3
        asked = at_once(
            [functools.partial(client.get_live_nodes, [0, 1, 2]) for client in clients[:3]]
        )
        assert [list(each) for each in asked] == [[0, 1, 2]] * 3  # type: ignore[call-overload]
        for stranger in (6, 6_000):
            with pytest.raises(CoordinationError, match=rf"Unexpected task \({stranger}\) that"):
                clients[0].wait_at_barrier(f"beyond {stranger}", 1_000, [0, 1, stranger])
        close(clients)


def test_many_keys_are_set_at_once(service: Served) -> None:
    """In one call. What is there is overwritten."""
    clients = join(service)
    before = clients[0].statistics()["calls"]
    clients[0].key_value_set_many_bytes({"m/1": b"a", "m/2": b"b"})
    assert clients[0].statistics()["calls"] == int(before) + 1
    clients[0].key_value_set_many_bytes({"m/2": b"c"})
    assert clients[1].key_value_dir_get_bytes("m") == [("m/1", b"a"), ("m/2", b"c")]
    close(clients)
