"""GroupClient over real clients of one service, each in a thread of its own: calls, barriers,
values, and errors in runtime numbers.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from holdfast.coordination import (
    BarrierTimeout,
    CoordinationClient,
    CoordinationError,
    CoordinationService,
    CoordinatorLost,
    JobIdentity,
    ProcessInfo,
    ProcessLost,
    Timeouts,
)
from holdfast.multihost.group import group_client as group_client_module
from holdfast.multihost.group.group import ClusterGroup
from holdfast.multihost.group.group_client import (
    Deadline,
    GroupClient,
    forget_group_client,
    group_client_of,
    named,
)

Clients = list[CoordinationClient]


@pytest.fixture
def service() -> Iterator[CoordinationService]:
    """A service of three processes."""
    with CoordinationService.spawn(3, recoverable=True, survivable=True) as service:
        yield service


@pytest.fixture
def clients(service: CoordinationService) -> Iterator[Clients]:
    """Three clients of one service."""
    with ExitStack() as stack:
        found = [
            CoordinationClient(
                service.address,
                process,
                job=JobIdentity(num_processes=3),
                timeouts=Timeouts(shutdown_s=2),
            )
            for process in range(3)
        ]
        on_each(found, lambda client: client.connect())
        for client in found:
            stack.callback(client.close)
        yield found


def on_each(items: list[Any], work: Callable[[Any], Any]) -> list[Any]:
    """Runs `work` on every item at once, as processes would, and returns the results."""
    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(work, items))


def test_a_deadline_never_reaches_zero_milliseconds() -> None:
    """What remains and what has passed make up the whole; over the end, 0 s remain, and 1 ms on the
    wire.
    """
    deadline = Deadline(60.0)
    assert 59 < deadline.remaining_s() <= 60 and 59_000 < deadline.remaining_ms() <= 60_000
    assert deadline.elapsed_s() + deadline.remaining_s() == pytest.approx(60.0, abs=0.1)
    assert (Deadline(0.0).remaining_s(), Deadline(-1.0).remaining_ms()) == (0.0, 1)


def test_a_failure_changes_the_barrier_id() -> None:
    """The barrier id stays while calls end well; after a failure it ends in the number of the next
    call. Names are quoted.
    """
    group_client = GroupClient(threading)  # type: ignore[arg-type]  # no call reaches it
    seen = []
    for fails in (False, False, True, False, False):
        try:
            with group_client.call("barrier", "a/b", Deadline(1.0)) as call:
                seen.append((call.number, call.barrier_id, call.folder))
                if fails:
                    raise CoordinationError("failed", code="ABORTED")
        except CoordinationError:
            pass
    key = "holdfast/barrier/a%2Fb"
    ids = [key, key, key, f"{key}@3", f"{key}@3"]
    assert seen == [
        (number, barrier_id, f"{key}/{number}") for number, barrier_id in enumerate(ids)
    ]
    with group_client.call("barrier", "", Deadline(1.0)) as call:
        assert (call.key, call.number) == ("holdfast/barrier/%", 0)


def test_a_call_that_gets_no_name_counts() -> None:
    """Whoever waits in vain for another thread fails, and the next call has the next number and a
    new barrier id.
    """
    group_client = GroupClient(threading)  # type: ignore[arg-type]
    held = threading.Event()
    free = threading.Event()

    def hold() -> None:
        with group_client.call("barrier", "n", Deadline(30.0)):
            held.set()
            free.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(30)
    with pytest.raises(
        BarrierTimeout, match=r"another thread of this process still waits at 'n' after 0\.01 s"
    ):
        with group_client.call("barrier", "n", Deadline(0.01)):
            raise AssertionError("two threads in one call")
    free.set()
    holder.join()
    with group_client.call("barrier", "n", Deadline(1.0)) as call:
        assert (call.number, call.barrier_id) == (2, "holdfast/barrier/n@2")


def test_names_have_a_bounded_length() -> None:
    """A long name, and a list of a thousand members, are their beginning and their hash; two that
    differ only at the end stay apart.
    """
    group_client = GroupClient(threading)  # type: ignore[arg-type]
    keys = []
    for name in ("short", "/" * 2_000 + "a", "/" * 2_000 + "b"):
        with group_client.call("all", name, Deadline(1.0)) as call:
            keys.append(call.key)
    assert (
        keys[0] == "holdfast/all/short"
        and len(set(keys)) == 3
        and all(len(key) < 200 for key in keys)
    )


def test_a_group_of_thousands_has_short_keys() -> None:
    """Their list is longer than a key may be."""
    with CoordinationService.spawn(1) as service, CoordinationClient(service.address, 0) as client:
        group = ClusterGroup(client, 0, 1500, processes=range(1500))
        assert group.broadcast("name", b"value", timeout_s=20) == b"value"
        forget_group_client(client)


def test_barriers_of_many_names_are_forgotten(
    clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those used last are remembered, and those of failed calls, which all processes must go on
    counting alike.
    """
    monkeypatch.setattr(group_client_module, "_MOST_NAMES", 8)
    group_clients = [GroupClient(client) for client in clients]

    def meet(group_client: GroupClient, name: str, timeout_s: float = 30.0) -> None:
        deadline = Deadline(timeout_s)
        with group_client.call("all", name, deadline) as call:
            group_client.barrier(call, deadline)

    with pytest.raises(BarrierTimeout):
        meet(group_clients[0], "failed", 0.1)
    for name in [*map(str, range(20)), "0", "0", "19", "1"]:
        on_each(group_clients, lambda group_client, name=name: meet(group_client, name))
    assert all(len(group_client._barriers) <= 9 for group_client in group_clients)
    assert "holdfast/all/failed" in group_clients[0]._barriers


def test_a_client_has_one_group_client() -> None:
    """All users of a client share its calls; a client that was shut down begins anew."""
    client: Any = object()
    first = group_client_of(client, [1, 0])
    assert group_client_of(client) is first and first.tasks == [1, 0]
    forget_group_client(client)
    assert group_client_of(client) is not first
    forget_group_client(client)


def test_barriers_values_and_listings(clients: Clients) -> None:
    """A barrier of all ends for all; a value comes to whoever waits for it; a listing is by the
    part after the folder.
    """

    def work(client: CoordinationClient) -> tuple[bytes, dict[str, bytes]]:
        group_client = GroupClient(client)
        group_client.set(f"folder/{client.process_id}", b"%d" % client.process_id)
        with group_client.call("barrier", "all", Deadline(30.0)) as call:
            group_client.barrier(call, Deadline(30.0))
        value = group_client.get("folder/2", "value", Deadline(30.0), 2)
        listing = group_client.list("folder")
        with group_client.call("barrier", "all", Deadline(30.0)) as call:
            group_client.barrier(call, Deadline(30.0))
        group_client.delete_after("folder", 3)
        return value, listing

    assert on_each(clients, work) == [(b"2", {"0": b"0", "1": b"1", "2": b"2"})] * 3
    assert GroupClient(clients[0]).list("folder") == {}, (
        "the last of three calls deletes the folder"
    )


def test_who_is_missing_is_named_with_its_report(clients: Clients) -> None:
    """With task ids that differ from runtime indices, the error names the runtime index, and what
    that process last reported.
    """
    tasks = [2, 0, 1]
    clients[0].report(step=7, saved_step=5)

    def work(client: CoordinationClient) -> BarrierTimeout:
        group_client = GroupClient(client, tasks)
        with (
            pytest.raises(BarrierTimeout) as caught,
            group_client.call("barrier", "late", Deadline(0.5)) as call,
        ):
            group_client.barrier(call, Deadline(0.5))
        return caught.value

    for error in on_each(clients[1:], work):
        assert (error.name, error.missing, error.progress) == (
            "late",
            (1,),
            {1: "step 7, saved_step 5"},
        )
        assert str(error).endswith("; process 1 last reported step 7, saved_step 5")


def test_a_loss_ends_a_wait_for_a_value(clients: Clients) -> None:
    """Whoever waits for the value of a process that failed gets ProcessLost with its number and
    reason, long before the timeout.
    """
    clients[2].report_error("bad batch")
    with pytest.raises(ProcessLost, match="bad batch") as caught:
        GroupClient(clients[0]).get("never", "value", Deadline(60.0), 2)
    assert caught.value.process == 2


def test_waits_ask_nobody(clients: Clients) -> None:
    """While a value and the health of a computation are waited for, the client makes the one call
    and no other.
    """
    group_client = GroupClient(clients[0])
    group_client.peers.processes()
    before = int(clients[0].statistics()["calls"])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(group_client.get, "late", "value", Deadline(60.0), 2)
        for _ in range(20):
            group_client.raise_if_lost(range(3), "a computation")
            clients[1].wait_at_barrier("apart", 30_000, [1])
        with pytest.raises(TimeoutError):
            waiting.result(2.5)
        assert int(clients[0].statistics()["calls"]) == before + 1
        clients[2].key_value_set("late", "here")
        assert waiting.result(30) == b"here"


def test_who_is_back_is_not_lost() -> None:
    """Though the list that was pushed last is older: the coordinator is asked."""

    class Pushed:
        """A client whose last list shows two processes that have failed; one of them is back."""

        def watch_processes(self, listener: Callable[[list[ProcessInfo]], None]) -> None:
            listener([ProcessInfo(task, "ERROR", 1) for task in range(2)])

        def process_info(self) -> list[ProcessInfo]:
            return [ProcessInfo(0, "ERROR", 1), ProcessInfo(1, "CONNECTED", 2)]

    group_client = GroupClient(Pushed())  # type: ignore[arg-type]
    assert list(group_client.lost_tasks()) == [0, 1]
    assert list(group_client.lost_tasks_now()) == [0]


def test_a_death_is_pushed_to_who_waits(clients: Clients) -> None:
    """A listener is called when a process fails, and what is known then names it, by runtime
    number.
    """
    group_client = GroupClient(clients[0], [1, 2, 0])
    changed = threading.Event()
    with group_client.peers.on_change(changed.set):
        changed.clear()
        clients[2].report_error("bad batch")
        while not group_client.lost_tasks():
            assert changed.wait(30)
            changed.clear()
    assert list(group_client.lost_tasks()) == [2]
    with pytest.raises(ProcessLost, match="bad batch") as caught:
        group_client.raise_if_lost([0, 1], "a computation")
    assert caught.value.process == 1


class JaxlibError(Exception):
    """An error as jaxlib's client raises it: a status text and nothing else."""


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        (
            (
                "DEADLINE_EXCEEDED: Barrier timed out. # of tasks that reached the barrier: 1/2."
                " The first task at the barrier: /job:jax_worker/replica:0/task:0. Some timed out"
                " task names:\n/job:jax_worker/replica:0/task:1\n"
            ),
            BarrierTimeout,
            "barrier 'b' timed out after 2 s, waiting for process 0",
        ),
        (
            "UNAVAILABLE: failed to connect",
            CoordinatorLost,
            "barrier 'b': jax.distributed's coordinator does not answer; it lives in process 0",
        ),
        ("ABORTED: something else", CoordinationError, "barrier 'b': something else"),
    ],
)
def test_texts_of_jaxlib_become_errors_of_ours(
    text: str, kind: type[CoordinationError], message: str
) -> None:
    """The code decides the class, and the tasks that a text names come back as runtime numbers."""
    with (
        pytest.raises(kind) as caught,
        GroupClient(threading, [1, 0]).errors("barrier 'b'", "b", 2.0),
    ):  # type: ignore[arg-type]
        raise JaxlibError(text)
    assert type(caught.value) is kind and message in str(caught.value)
    if isinstance(caught.value, BarrierTimeout):
        assert caught.value.missing == (0,)


def test_an_error_names_no_thousands() -> None:
    """Of a job of thousands it has the first processes, and how many more there are."""
    assert named([2]) == "process 2" and named([1, 2]) == "processes 1, 2"
    assert named(range(4_096)).endswith(" 38, 39 and 4056 more")


def test_an_error_that_is_no_status_stays_itself() -> None:
    """A bug in a client is not taken for an answer of the service."""
    with (
        pytest.raises(JaxlibError, match="no status"),
        GroupClient(threading).errors("barrier 'b'"),
    ):  # type: ignore[arg-type]
        raise JaxlibError("no status")


def test_a_stopped_coordinator_holds_no_call_too_long(
    clients: Clients, service: CoordinationService
) -> None:
    """What a process sends takes the time of its call at most, and cleaning up after it a second:
    not the two minutes of a call without. The error says who did not answer.
    """
    groups = [ClusterGroup(client, rank, 3) for rank, client in enumerate(clients)]
    os.kill(service.pid, signal.SIGSTOP)
    try:
        calls = [
            lambda: groups[1].gather("g", b"x", timeout_s=1.0),
            lambda: groups[0].broadcast("b", b"x", timeout_s=1.0),
        ]
        for call in calls:
            began = time.monotonic()
            with pytest.raises(CoordinatorLost, match=r"setting .*: InsertKeyValue: no answer"):
                call()
            assert time.monotonic() - began < 60, "half of what it took before"
    finally:
        os.kill(service.pid, signal.SIGCONT)
