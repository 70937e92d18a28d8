"""Profiles A and B: each rpc's caller, event and messages, and the payloads of errors. No
sockets.
"""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.coordination.core.status import Code, Missing, Status
from holdfast.coordination.core.task_table import Task, TaskState
from holdfast.coordination.names import (
    BARRIER_ERROR_TYPE,
    MISMATCH_TYPE,
    NOBODY,
    PROFILE_A,
    PROFILE_B,
    SERVICE_ERROR_TYPE,
)
from holdfast.coordination.server.profiles import (
    MESSAGE_BYTES,
    RPCS,
    Requested,
    message_of,
    payloads,
    status_details,
    task_info,
)
from holdfast.proto import coordination_b_pb2 as b
from holdfast.proto import coordination_pb2 as a
from tests.support.driver import Driver


def answer(
    driver: Driver, path: str, request: Any, response: Any, task_id: int = 0, **facts: Any
) -> Any:
    """Runs one rpc and returns its response; None while it waits."""
    call = asking(driver, path, task_id, **facts)
    call.run(driver.machine, request.SerializeToString())
    driver.settle()
    return response.FromString(call.encoded(driver.machine)) if call.done else None


def asking(driver: Driver, path: str, task_id: int = 0, **facts: Any) -> Requested:
    facts = {"incarnation": 100, "session": True} | facts
    life = driver.machine.task_table.life_of(task_id, facts["incarnation"])
    return Requested(
        driver.machine.answers, task_id, driver.now, life=life, rpc=RPCS[path], **facts
    )


def test_every_rpc_parses_its_own_request() -> None:
    """Each row of the table reads the message that its path names, from whose fields the caller
    comes.
    """
    for path, rpc in RPCS.items():
        messages = a if path.startswith(PROFILE_A) else b
        method = path.rsplit("/", 1)[1]
        request = rpc.parse(b"")
        assert type(request) is getattr(messages, f"{method}Request"), path
        task_id, incarnation, service_incarnation = rpc.claim(request)
        assert task_id in (None, 0, NOBODY), path
        assert incarnation == 0 and service_incarnation in (None, 0), path


@pytest.mark.parametrize(("profile", "messages"), [(PROFILE_A, a), (PROFILE_B, b)])
def test_keys_are_the_same_in_both_profiles(profile: str, messages: Any) -> None:
    """Set, get, increment, list and delete, whoever's messages carry them."""
    driver = Driver(2)
    for key, value in (("d/a", b"1"), ("d/b", b"2")):
        answer(
            driver,
            profile + "InsertKeyValue",
            messages.InsertKeyValueRequest(kv={"key": key, "value": value}),
            a.InsertKeyValueResponse,
        )
    got = answer(
        driver,
        profile + "GetKeyValue",
        messages.GetKeyValueRequest(key="d/a"),
        messages.GetKeyValueResponse,
    )
    assert (got.kv.key, got.kv.value) == ("d/a", b"1")
    more = messages.IncrementKeyValueRequest(key="d/a", increment=4)
    assert (
        answer(
            driver, profile + "IncrementKeyValue", more, messages.IncrementKeyValueResponse
        ).kv.value
        == b"5"
    )
    listed = answer(
        driver,
        profile + "GetKeyValueDir",
        messages.GetKeyValueDirRequest(directory_key="d"),
        messages.GetKeyValueDirResponse,
    )
    assert [(entry.key, entry.value) for entry in listed.kv] == [("d/a", b"5"), ("d/b", b"2")]
    answer(
        driver,
        profile + "DeleteKeyValue",
        messages.DeleteKeyValueRequest(key="d"),
        messages.DeleteKeyValueResponse,
    )
    assert driver.machine.keys.values == {}
    assert (
        answer(
            driver,
            profile + "GetKeyValue",
            messages.GetKeyValueRequest(key="d/a"),
            messages.GetKeyValueResponse,
        )
        is None
    )


def test_a_barrier_of_both_profiles_is_one_barrier() -> None:
    """A task of profile A and one of profile B meet, each by its own message, and get the
    counter.
    """
    driver = Driver(2)
    for task_id in range(2):
        driver.register(task_id, 100 + task_id)
    request_a = a.BarrierRequest(barrier_id="b", barrier_timeout_in_ms=5000, task_ids=[0, 1])
    assert answer(driver, PROFILE_A + "Barrier", request_a, a.BarrierResponse) is None
    request_b = b.BarrierRequest(
        barrier_id="b", barrier_timeout_in_ms=5000, tasks=[{"task_id": 0}, {"task_id": 1}]
    )
    assert (
        answer(
            driver,
            PROFILE_B + "Barrier",
            request_b,
            b.BarrierResponse,
            task_id=1,
            incarnation=101,
            session=False,
        ).counter
        == 0
    )


def test_a_participant_that_is_named_twice_is_refused() -> None:
    """Both as ids and as tasks."""
    driver = Driver(2)
    request = a.BarrierRequest(barrier_id="b", barrier_timeout_in_ms=5000, task_ids=[0, 1, 1])
    call = asking(driver, PROFILE_A + "Barrier")
    call.run(driver.machine, request.SerializeToString())
    driver.settle()
    what = "Conflicting tasks specified by different processes for the same barrier: b::0."
    assert driver.message(call) == f"{what} Process 0 named a participant twice"


@pytest.mark.parametrize(
    "method", ["Barrier", "CancelBarrier", "GetAliveTasks", "ReportErrorToService"]
)
def test_profile_b_must_have_registered(method: str) -> None:
    """Its calls prove nothing else: without an agent they are INVALID_ARGUMENT."""
    driver = Driver(2)
    call = asking(driver, PROFILE_B + method, session=False)
    call.run(driver.machine, b"")
    driver.settle()
    assert driver.message(call) == "process 0 is not registered; expected a registration first"


def test_each_channel_knows_tasks_by_its_own_incarnations() -> None:
    """Agents know the agent's, or the Session's where there is no agent; Sessions the life's
    number.
    """
    both = Task(0, agent=5, session=6, life=2)
    agent = Task(1, agent=5, life=1)
    session = Task(2, session=6, life=3)
    assert [task.incarnation(session=True) for task in (both, agent, session)] == [2, 1, 3]
    assert [task.incarnation(session=False) for task in (both, agent, session)] == [5, 5, 6]


def test_a_tasks_error_goes_with_it() -> None:
    """Code, message, and whether it was reported by the task itself."""
    error = Status(Code.ABORTED, "boom", source_task=3, reported=True)
    info = task_info(Task(3, TaskState.ERROR, session=6, error=error), session=True)
    assert (info.state, info.error_code, info.error_message) == (a.TaskState.ERROR, 10, "boom")
    assert (info.error_payload.is_reported_error, info.error_payload.source_task_id) == (True, 3)
    assert not task_info(Task(1, TaskState.CONNECTED, agent=5), session=True).HasField(
        "error_payload"
    )


def test_an_error_has_payloads_for_agents() -> None:
    """Barrier with the service's counter, mismatch with what the caller had named, and the mark of
    the service.
    """
    status = Status(
        Code.INTERNAL,
        "m",
        source_task=2,
        reported=True,
        barrier=("b", 4),
        mismatch=9,
        missing=(Missing(1, "", None, True),),
    )
    found = payloads(status)
    assert found.keys() == {SERVICE_ERROR_TYPE, BARRIER_ERROR_TYPE, MISMATCH_TYPE}
    about = a.CoordinationServiceError.FromString(found[SERVICE_ERROR_TYPE])
    assert (about.is_reported_error, about.source_task_id) == (True, 2)
    barrier = a.BarrierError.FromString(found[BARRIER_ERROR_TYPE])
    assert (barrier.barrier_id, barrier.counter) == ("b", 4)
    assert a.ServiceMismatchError.FromString(found[MISMATCH_TYPE]).service_incarnation == 9
    assert a.StatusDetails.FromString(status_details(status)).payloads == found
    assert payloads(Status(Code.NOT_FOUND, "m", from_service=False)) == {}


def test_a_long_message_is_cut_by_us() -> None:
    """jaxlib would cut it in the middle of a word."""
    assert message_of(Status(Code.INTERNAL, "x" * MESSAGE_BYTES)) == "x" * MESSAGE_BYTES
    assert (
        message_of(Status(Code.INTERNAL, "x" * (MESSAGE_BYTES + 1))) == "x" * MESSAGE_BYTES + " ..."
    )


def test_the_living_never_have_incarnation_0() -> None:
    """Who was alive at the answer is shown with the incarnation that it had then, though all leave
    before the answer is sent.
    """
    driver = Driver(3, sessions=False)
    for task_id in range(3):
        driver.register(task_id, 10 + task_id)
    both = frozenset((0, 1))
    calls = [
        asking(driver, PROFILE_A + "GetAliveTasks", task_id, session=False) for task_id in (0, 1)
    ]
    for call in calls:
        driver.machine.liveness.arrive(call, both)
    for task_id in range(3):
        driver.make(driver.machine.shut_down, task_id, session=False)
    assert driver.machine.all_shut_down()
    for call in calls:
        response = a.GetAliveTasksResponse.FromString(call.encoded(driver.machine))
        assert dict(zip(response.alive_task_ids, response.incarnations, strict=True)) == {
            0: 10,
            1: 11,
        }


def test_equal_watches_share_one_answer() -> None:
    """A hundred answers about one version of the tasks are the same bytes, encoded once; the next
    version is encoded anew.
    """
    driver = Driver(2)
    call = asking(driver, PROFILE_A + "WatchTasks")
    driver.machine.watches.watch(call, -1)
    answers = [call.encoded(driver.machine) for _ in range(100)]
    assert all(answer is answers[0] for answer in answers)
    driver.make(lambda call: driver.machine.report_error(call, 13, "boom"), 1)
    driver.machine.watches.watch(call, -1)
    newer = a.WatchTasksResponse.FromString(call.encoded(driver.machine))
    assert (
        newer.task_state[1].state == a.TaskState.ERROR
        and newer.version_number == driver.machine.task_table.version
    )
