"""SyncPoint over real clients of one service, each in a thread of its own, and alone."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from holdfast.coordination import (
    BarrierTimeout,
    CoordinationClient,
    CoordinationService,
    JobIdentity,
    StatusClient,
    Timeouts,
)
from holdfast.multihost import Solo, SyncPoint, agree_on_step
from holdfast.multihost.group.group_client import GroupClient, forget_group_client

TASKS = (0, 1, 2)


@pytest.fixture
def clients() -> Iterator[list[CoordinationClient]]:
    """Three clients of one service."""
    with (
        CoordinationService.spawn(3, recoverable=True, survivable=True) as service,
        ExitStack() as stack,
    ):
        found = [
            CoordinationClient(
                service.address,
                task,
                job=JobIdentity(num_processes=3),
                timeouts=Timeouts(shutdown_s=2),
            )
            for task in TASKS
        ]
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda client: client.connect(), found))
        for client in found:
            stack.callback(client.close)
        yield found


def test_alone_a_sync_point_decides_at_once() -> None:
    """Without a client a change holds from the next step on, and so does the next change."""
    with SyncPoint(None, "save") as sync:
        assert [sync.reached(step) for step in (0, 1)] == [False, False]
        assert sync.propose()
        assert [sync.reached(step) for step in (1, 2, 2, 3)] == [False, True, True, False]
        sync.propose()
        assert [sync.reached(step) for step in (3, 10, 11)] == [False, True, False]
        assert sync.statistics()["rounds"] == 2


def test_a_group_of_one_needs_no_client() -> None:
    """`agree_on_step` over Solo answers from what was proposed here."""
    with agree_on_step(Solo(), "save") as sync:
        sync.propose("soon")
        assert sync.ask(0).value == sync.latest == "soon"


def test_a_proposal_holds_beyond_the_highest_answer(
    clients: list[CoordinationClient],
) -> None:
    """Whoever proposes, all get the value from one step on, ahead of every step answered; the next
    proposal is a round of its own.
    """
    decided: list[queue.Queue[str]] = [queue.Queue() for _ in TASKS]
    with ExitStack() as stack:
        points = [
            stack.enter_context(
                SyncPoint(client, "stop", process_id=task, tasks=TASKS, on_change=decided[task].put)
            )
            for task, client in enumerate(clients)
        ]
        for task, point in enumerate(points):
            assert not point.reached(10 * task)
        assert points[1].propose("raised")
        assert [changes.get(timeout=30) for changes in decided] == ["raised"] * 3
        assert [point.ask(20).value for point in points] == [""] * 3
        assert [point.ask(21).value for point in points] == ["raised"] * 3
        assert points[0].propose("lowered")
        assert [changes.get(timeout=30) for changes in decided] == ["lowered"] * 3
        assert [
            (point.latest, point.ask(30).value, point.statistics()["rounds"]) for point in points
        ] == [("lowered", "lowered", 2)] * 3


def test_the_keys_of_the_last_round_stay(clients: list[CoordinationClient]) -> None:
    """However many rounds there were; and a process that comes only now knows what holds, and takes
    part in the next one.
    """
    decided: list[queue.Queue[str]] = [queue.Queue() for _ in TASKS]
    with ExitStack() as stack:
        points = [
            stack.enter_context(
                SyncPoint(client, "stop", process_id=task, tasks=TASKS, on_change=decided[task].put)
            )
            for task, client in enumerate(clients)
        ]
        for number in range(4):
            announcer = number % 3
            assert points[announcer].propose(f"value {number}")
            assert [changes.get(timeout=30) for changes in decided] == [f"value {number}"] * 3
        keys = {
            key.removeprefix(f"{points[0].folder}/")
            for key, _ in clients[0].key_value_dir_get(points[0].folder)
        }
        of_round = {
            "3/change",
            "3/step",
            *(f"3/{what}/{task}" for what in ("mail", "floor") for task in TASKS),
        }
        assert keys == {"last/decided"} | of_round
        points[2].close()
        forget_group_client(clients[2])  # as a process that was started again
        late: queue.Queue[str] = queue.Queue()
        point = stack.enter_context(
            SyncPoint(clients[2], "stop", process_id=2, tasks=TASKS, on_change=late.put)
        )
        assert late.get(timeout=30) == "value 3" and point.latest == "value 3"
        assert points[0].propose("value 4")
        assert [changes.get(timeout=30) for changes in (*decided[:2], late)] == ["value 4"] * 3


def test_who_comes_late_answers_as_the_others(clients: list[CoordinationClient]) -> None:
    """It is asked at once, about steps at which an earlier change holds; and once more with nothing
    decided.
    """
    decided: queue.Queue[str] = queue.Queue()
    with ExitStack() as stack:
        first = stack.enter_context(
            SyncPoint(
                clients[0],
                "stop",
                tasks=TASKS,
                lost=lambda: TASKS[1:],
                on_change=decided.put,
            )
        )
        assert not first.reached(9)
        assert first.propose("raised")
        assert decided.get(timeout=30) == "raised"
        late = stack.enter_context(SyncPoint(clients[1], "stop", process_id=1, tasks=TASKS))
        assert late.ask(100).value == first.ask(100).value == "raised"
        fresh = stack.enter_context(SyncPoint(clients[2], "other", process_id=2, tasks=TASKS))
        assert fresh.ask(100).value == ""


def test_two_proposals_are_one_round_or_two(clients: list[CoordinationClient]) -> None:
    """Of all who propose for one round one wins, the others get False, and everybody agrees on the
    winner's value.
    """
    decided: list[queue.Queue[str]] = [queue.Queue() for _ in TASKS]
    with ExitStack() as stack, ThreadPoolExecutor(3) as pool:
        points = [
            stack.enter_context(
                SyncPoint(client, "stop", process_id=task, tasks=TASKS, on_change=decided[task].put)
            )
            for task, client in enumerate(clients)
        ]
        won = list(pool.map(lambda task: points[task].propose(f"from {task}"), TASKS))
        values = [[changes.get(timeout=30) for _ in range(sum(won))] for changes in decided]
        assert sum(won) >= 1 and values == [values[0]] * 3
        assert all(
            int(value.removeprefix("from ")) in [task for task in TASKS if won[task]]
            for value in values[0]
        )


def test_closing_ends_a_wait_for_nobody(clients: list[CoordinationClient]) -> None:
    """A process that comes to a round that was announced before, and closes while it waits for the
    others, asks nobody any more.
    """
    with SyncPoint(clients[0], "stop", process_id=0, tasks=TASKS, timeout_s=2.0) as first:
        assert first.propose("raised")
        late = SyncPoint(clients[1], "stop", process_id=1, tasks=TASKS, timeout_s=2.0)
        assert clients[1].blocking_key_value_get(f"{late.folder}/0/floor/1", 30_000)
        late.close()
        assert late._follower is not None and not late._follower.is_alive()


@pytest.mark.parametrize("announcer", [0, 2])
def test_a_death_ends_a_wait_for_the_dead(
    announcer: int, clients: list[CoordinationClient]
) -> None:
    """Closing waits for nobody who has died in the round, as one who answers or who announced."""
    point = SyncPoint(clients[0], "save", process_id=0, tasks=TASKS)
    clients[1].key_value_set(f"{point.folder}/0/floor/1", "0")
    clients[2].key_value_set(f"{point.folder}/0/mail/0", f"{announcer} soon")
    assert clients[1].blocking_key_value_get(f"{point.folder}/0/floor/0", 30_000)
    began_s = time.monotonic()
    with StatusClient(clients[1].address) as status:
        status.report_exit(2, -9)
    point.leave()
    assert time.monotonic() - began_s < 0.6


def test_the_last_to_leave_deletes_the_keys(clients: list[CoordinationClient]) -> None:
    """Rounds and goodbyes stay for as long as somebody asks, and no longer."""
    points = [
        SyncPoint(client, "soon", process_id=task, tasks=TASKS)
        for task, client in enumerate(clients)
    ]
    folder = points[0].folder
    assert points[0].propose("save")
    assert {point.ask(1).value for point in points} <= {"", "save"}
    for point in points[:2]:
        point.leave()
    assert [key for key, _ in clients[0].key_value_dir_get(f"{folder}/left")]
    points[2].leave()
    assert clients[0].key_value_dir_get(folder) == []


def test_a_process_without_a_sync_point_is_named(clients: list[CoordinationClient]) -> None:
    """An agreement that does not come about ends with the missing process, the step asked about,
    and the timeout.
    """
    with ExitStack() as stack:
        points = [
            stack.enter_context(
                SyncPoint(clients[task], "stop", process_id=task, tasks=TASKS, timeout_s=2.0)
            )
            for task in (0, 1)
        ]
        assert not points[0].reached(0)
        points[0].propose("raised")
        while not points[0].statistics()["frozen"]:
            time.sleep(0.01)
        message = (
            r"sync point 'stop' could not be agreed on in 2 s, asked at step 1: no answer from"
            r" process 2 of 3; every process"
        )
        with pytest.raises(BarrierTimeout, match=message) as caught:
            points[0].ask(1)
        assert caught.value.missing == (2,)


def test_a_dead_process_is_left_out(clients: list[CoordinationClient]) -> None:
    """With `lost()` naming the third process, the other two agree without it."""
    decided: list[queue.Queue[str]] = [queue.Queue() for _ in range(2)]
    with ExitStack() as stack:
        points = [
            stack.enter_context(
                SyncPoint(
                    clients[task],
                    "stop",
                    process_id=task,
                    tasks=TASKS,
                    lost=lambda: [2],
                    on_change=decided[task].put,
                )
            )
            for task in (0, 1)
        ]
        points[0].propose("raised")
        assert [changes.get(timeout=30) for changes in decided] == ["raised"] * 2
        assert [point.ask(0).value for point in points] == ["raised"] * 2


def test_who_has_left_is_not_waited_for(clients: list[CoordinationClient]) -> None:
    """A process asks about its last step and leaves: the others agree without it, beyond what it
    has asked about, again and again.
    """
    decided: list[queue.Queue[str]] = [queue.Queue() for _ in range(2)]
    with ExitStack() as stack:
        gone = SyncPoint(clients[2], "save", process_id=2, tasks=TASKS)
        assert not gone.reached(30)
        gone.leave()
        points = [
            stack.enter_context(
                SyncPoint(
                    clients[task], "save", process_id=task, tasks=TASKS, on_change=decided[task].put
                )
            )
            for task in (0, 1)
        ]
        assert not any(point.reached(28) for point in points)
        for value in ("soon", "again"):
            assert points[0].propose(value)
            assert [changes.get(timeout=30) for changes in decided] == [value] * 2
        assert [point.ask(30).value for point in points] == [""] * 2 and [
            point.ask(31).value for point in points
        ] == ["again"] * 2


class _Waited(threading.Event):
    """An event after which a thread has ended before anybody looks at it."""

    def __init__(self, ends: threading.Thread) -> None:
        super().__init__()
        self._ends = ends

    def set(self) -> None:
        super().set()
        self._ends.join(30)


def test_who_leaves_in_a_round_says_so(clients: list[CoordinationClient]) -> None:
    """Its thread, which asks for the others' floors, may end before `leave` has looked at it."""
    point = SyncPoint(clients[2], "save", process_id=2, tasks=TASKS)
    assert point._follower is not None
    assert point.propose("soon")
    assert clients[0].blocking_key_value_get(f"{point.folder}/0/floor/2", 30_000)
    point._closed = _Waited(point._follower)
    point.leave()
    left = clients[0].key_value_dir_get(f"{point.folder}/left")
    assert [key.rpartition("/")[2] for key, _ in left] == ["2"]


def test_of_a_thousand_one_gathers() -> None:
    """The announcer; the lowest that lives where it is lost; and one more for each time that
    nothing came of it.
    """

    def gathering(lost: list[int], take_overs: int) -> list[int]:
        points = [
            SyncPoint(None, "stop", process_id=task, tasks=range(1000), lost=lambda: lost)
            for task in range(1000)
        ]
        return [point.process_id for point in points if point._gathers(500, take_overs)]

    assert gathering([], 0) == [500] and gathering([0, 500], 0) == [1]
    assert gathering([], 2) == [0, 1, 500] and gathering([0, 500], 2) == [1, 2]


class CountingClient(CoordinationClient):
    """A client that counts its calls about keys."""

    def __init__(self, address: str, process_id: int) -> None:
        self.calls: Counter[str] = Counter()
        super().__init__(address, process_id)

    def _call(self, method: str, request: Any, timeout_s: float | None = None) -> Any:
        self.calls[method] += 1
        return super()._call(method, request, timeout_s)


def test_a_thousand_are_told_in_one_call() -> None:
    """Each process has a key that wakes it. Who announces sets all thousand in one call."""
    with (
        CoordinationService.spawn(1, recoverable=True) as service,
        CountingClient(service.address, 0) as client,
    ):
        with SyncPoint(client, "stop", process_id=0, tasks=range(1000)) as point:
            assert point.propose("raised")
            calls = client.calls.copy()
            mail = len(client.key_value_dir_get_bytes("holdfast/sync"))
    assert calls["SetKeys"] == 1 and calls.total() < 20, calls
    assert mail >= 1_000


def test_a_closed_sync_point_still_answers(clients: list[CoordinationClient]) -> None:
    """After `close()` questions are answered from what is known, also twice closed."""
    point = SyncPoint(clients[0], "stop", process_id=0, tasks=TASKS)
    assert not point.reached(3)
    point.close()
    point.close()
    assert not point.reached(4)


def test_a_closed_sync_point_has_no_thread(
    clients: list[CoordinationClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the coordinator is slow to answer: a thread in a call of jaxlib's at the end of
    the interpreter would abort the process.
    """
    delete = GroupClient.delete

    def delete_late(client: GroupClient, key: str) -> None:
        threading.Event().wait(2)
        delete(client, key)

    monkeypatch.setattr(GroupClient, "delete", delete_late)
    SyncPoint(clients[0], "slow", process_id=0, tasks=TASKS).close()
    assert not [thread.name for thread in threading.enumerate() if "slow" in thread.name]


def test_a_closed_sync_point_leaves_no_mail(clients: list[CoordinationClient]) -> None:
    """What wakes its thread is gone when `close()` returns."""
    point = SyncPoint(clients[0], "stop", process_id=0, tasks=TASKS)
    point.close()
    assert clients[0].key_value_dir_get(point.folder) == []


def test_a_timeout_names_a_few_of_many(clients: list[CoordinationClient]) -> None:
    """Of thousands that did not answer the error names some, and how many more."""
    with SyncPoint(clients[0], "many", tasks=range(4096), timeout_s=1.0) as point:
        assert not point.reached(0)
        point.propose()
        while not point.statistics()["missing"]:
            time.sleep(0.01)
        with pytest.raises(BarrierTimeout, match=r"processes 1, 2, .* and 4055 more of") as caught:
            point.ask(1)
    assert len(caught.value.missing) == 4095 and len(str(caught.value)) < 500
