"""What thousands of processes cost the service, counted in bytes and messages."""

from __future__ import annotations

import zlib

import pytest

from holdfast.coordination.client.answers import make_error
from holdfast.coordination.core.barriers import Arrival
from holdfast.coordination.core.calls import Call
from holdfast.coordination.core.status import MAX_NAMED
from holdfast.coordination.errors import BarrierTimeout
from holdfast.coordination.limits import Limits
from holdfast.coordination.server.sessions import DELTA_INTERVAL_S
from holdfast.coordination.task_bits import bits_of, bytes_of
from holdfast.proto import coordination_pb2, session_pb2
from tests.support.crowd import Crowd, CrowdStream

COUNT = 1_024
MIB = 1 << 20


@pytest.fixture(scope="module")
def crowd() -> Crowd:
    """A job of 1,024 processes that has gathered, whose clients have read all."""
    crowd = Crowd(COUNT, heartbeat_timeout_s=10_000.0)
    crowd.gather()
    return crowd


def test_all_readers_of_a_value_share_one_copy() -> None:
    """A value of 256 KiB that 1,024 wait for is held once, however few of them read."""
    crowd = Crowd(COUNT, heartbeat_timeout_s=10_000.0)
    crowd.gather()
    crowd.wire.take_counts()
    get = coordination_pb2.GetKeyValueRequest(key="ids")
    crowd.call_all("GetKeyValue", lambda _: get, range(1, COUNT - 100))
    entry = coordination_pb2.KeyValueEntry(key="ids", value=b"i" * (MIB // 4))
    crowd.call(0, "InsertKeyValue", coordination_pb2.InsertKeyValueRequest(kv=entry))
    crowd.call_all("GetKeyValue", lambda _: get, range(COUNT - 100, COUNT))
    assert len(crowd.wire.on_way) == COUNT and crowd.wire.peak_bytes < MIB
    crowd.wire.deliver()
    for stream in crowd.streams[1:]:
        reply = stream.frame().reply
        assert coordination_pb2.GetKeyValueResponse.FromString(reply.body).kv.value == entry.value
        stream.last = b""


def test_the_table_of_processes_is_sent_once_and_deflated() -> None:
    """At a start each Session hears once of each process, in at most 20 bytes; a change costs each
    one small message.
    """
    crowd = Crowd(COUNT, heartbeat_timeout_s=10_000.0)
    crowd.open_all()
    crowd.settle()
    sent_bytes, messages = crowd.wire.take_counts()
    assert sent_bytes < 20 * COUNT * COUNT
    assert messages < COUNT * (2 + 1.2 / DELTA_INTERVAL_S)  # Opened, and ten deltas a second
    crowd.machine.report_exit(7, -9, crowd.now)
    crowd.service.flush()
    crowd.settle()
    sent_bytes, messages = crowd.wire.take_counts()
    assert messages <= COUNT and sent_bytes < 200 * COUNT


def test_more_sessions_get_deltas_less_often() -> None:
    """What changes all the time is sent ten times a second to 1,000 Sessions, and less often to
    more.
    """
    crowd = Crowd(4 * COUNT, heartbeat_timeout_s=10_000.0)
    crowd.open_all()
    _, messages = crowd.wire.take_counts()
    assert messages < 4 * COUNT * (2 + 1.0 / 0.3)


def timed_out(crowd: Crowd, name: str, half: range) -> tuple[int, list[BarrierTimeout]]:
    """Returns the bytes and the errors of a barrier whose time is over, with half missing."""
    crowd.wire.take_counts()
    crowd.barrier(name, half, timeout_s=5.0)
    crowd.tick(6.0)
    crowd.wire.deliver()
    errors = []
    for process_id in half:
        reply = crowd.streams[process_id].frame().reply
        request = coordination_pb2.BarrierRequest(barrier_id=name)
        error = make_error("DEADLINE_EXCEEDED", reply.message, dict(reply.payloads), request)
        assert isinstance(error, BarrierTimeout)
        errors.append(error)
    return crowd.wire.take_counts()[0], errors


@pytest.mark.parametrize("half", [range(COUNT // 2), range(0, COUNT, 2)], ids=["low", "even"])
def test_a_timed_out_barrier_says_who_is_missing_in_few_bytes(crowd: Crowd, half: range) -> None:
    """Half of 1,024 wait, half are missing: each reply describes 40, holds all as bits, and has at
    most 3.6 KB, the same bytes for all.
    """
    sent_bytes, errors = timed_out(crowd, f"half/{half.step}", half)
    missing = tuple(sorted(set(range(COUNT)) - set(half)))
    assert all(error.missing == missing for error in errors)
    assert sent_bytes < 3_600 * len(half)
    assert f"and {COUNT // 2 - MAX_NAMED} more" in errors[0].message


def test_whoever_comes_late_to_a_timed_out_barrier_hears_the_same(crowd: Crowd) -> None:
    """The others come after its time: they get that failure, with all of those that were missing,
    and it is described once.
    """
    _, errors = timed_out(crowd, "late", range(COUNT // 2))
    crowd.wire.take_counts()
    crowd.barrier("late", range(COUNT // 2, COUNT), timeout_s=5.0)
    crowd.wire.deliver()
    for process_id in (COUNT // 2, COUNT - 1):
        reply = crowd.streams[process_id].frame().reply
        about = session_pb2.Missing.FromString(
            reply.payloads["type.googleapis.com/holdfast.Missing"]
        )
        assert len(about.tasks) == MAX_NAMED
        assert int.from_bytes(zlib.decompress(about.everyone), "little") == bits_of(
            errors[0].missing
        )
    assert crowd.wire.take_counts()[0] < 3_600 * COUNT // 2


def packed(task_ids: range) -> bytes:
    """Returns a set as a request has it."""
    return zlib.compress(bytes_of(bits_of(task_ids)))


@pytest.mark.parametrize(
    "bits",
    [b"?", zlib.compress(bytes(Limits().tasks))],
    ids=["no bits", "more than a job has"],
)
def test_participants_that_are_none_are_refused(crowd: Crowd, bits: bytes) -> None:
    """INVALID_ARGUMENT, for a set that cannot be read or has no end; the Session stays."""
    crowd.call(0, "GetAliveTasks", coordination_pb2.GetAliveTasksRequest(), participants=bits)
    crowd.wire.deliver()
    reply = crowd.streams[0].frame().reply
    assert reply.code == 3 and "participants: " in reply.message


def test_a_large_set_of_participants_is_one_object(crowd: Crowd) -> None:
    """All calls with its bits get their answer, and compare no sets."""
    alive = coordination_pb2.GetAliveTasksRequest()
    crowd.call_all("GetAliveTasks", lambda _: alive, participants=packed(range(COUNT)))
    crowd.wire.deliver()
    assert list(living(crowd.streams[3])) == [
        task.task_id for task in crowd.machine.task_table.tasks if task.state == 3
    ]
    everyone = crowd.machine.task_table.everyone
    assert crowd.machine.participants.of(packed(range(COUNT))) is everyone
    some = packed(range(1, COUNT))
    assert crowd.machine.participants.of(some) is crowd.machine.participants.of(some)


def living(stream: CrowdStream) -> dict[int, int]:
    """Returns the answer to a stream's question who lives: {process: number of its life}."""
    answer = session_pb2.LivingTasks.FromString(stream.frame().reply.body)
    lives = session_pb2.Lives.FromString(zlib.decompress(answer.packed)).lives
    return {task_id: life for task_id, life in enumerate(lives) if life}


def ask_who_lives(crowd: Crowd, who: range) -> tuple[int, int]:
    """Has all of a set ask who of it lives; returns the bytes and messages of the replies."""
    crowd.wire.take_counts()
    alive = coordination_pb2.GetAliveTasksRequest()
    crowd.call_all("GetAliveTasks", lambda _: alive, who, participants=packed(who))
    crowd.wire.deliver()
    return crowd.wire.take_counts()


@pytest.mark.parametrize("count", [1_024, 4_096])
def test_live_processes_sends_each_a_few_bytes(count: int) -> None:
    """One reply to each, of at most 64 bytes, whatever the number of processes; with one that was
    started again a few more.
    """
    crowd = Crowd(count, heartbeat_timeout_s=10_000.0)
    crowd.gather()
    crowd.settle()
    sent_bytes, messages = ask_who_lives(crowd, range(count))
    assert messages == count and sent_bytes <= 64 * count
    crowd.streams[7] = CrowdStream(crowd.wire)
    crowd.open(7, crowd.streams[7], life=2)
    crowd.wire.deliver()
    crowd.wire.take_counts()
    sent_bytes, messages = ask_who_lives(crowd, range(7, count))
    assert messages == count - 7 and sent_bytes <= 80 * count
    assert living(crowd.streams[-1]) == dict.fromkeys(range(7, count), 1) | {7: 2}


def test_an_answer_that_is_given_again_names_the_lives_of_then() -> None:
    """A call is sent again after a process was started again, and after the Delta about that: the
    reply is the answer that the others got.
    """
    crowd = Crowd(3, heartbeat_timeout_s=10_000.0)
    crowd.gather()
    crowd.settle()
    alive = coordination_pb2.GetAliveTasksRequest(task_ids=range(3))
    crowd.call_all("GetAliveTasks", lambda _: alive, number=5)
    crowd.wire.deliver()
    then = living(crowd.streams[0])
    crowd.streams[2] = CrowdStream(crowd.wire)
    crowd.open(2, crowd.streams[2], life=2)
    crowd.settle()
    crowd.call(0, "GetAliveTasks", alive, number=5)
    crowd.wire.deliver()
    assert living(crowd.streams[0]) == then == {0: 1, 1: 1, 2: 1}


class ComparedTask(int):
    """The number of a task, which counts how often it is compared."""

    looks = 0

    def __eq__(self, other: object) -> bool:
        ComparedTask.looks += 1
        return super().__eq__(other)

    __hash__ = int.__hash__


def test_live_processes_looks_at_the_set_once() -> None:
    """1,024 calls about one set, three times, go through it a few times in all, not once each."""
    crowd = Crowd(COUNT, heartbeat_timeout_s=10_000.0)
    crowd.gather()
    everyone = frozenset(map(ComparedTask, range(COUNT)))
    ComparedTask.looks = 0
    for _ in range(3):
        for task_id in range(COUNT):
            call = Call(crowd.machine.answers, task_id, crowd.now)
            crowd.machine.liveness.arrive(call, everyone)
        taken = crowd.machine.take_answers()
        assert len(taken) == COUNT and len({id(each.value) for each in taken}) == 1
    assert ComparedTask.looks <= 12 * COUNT


class ComparedSet(frozenset[int]):
    """A set that counts how often it is compared with another."""

    looks = 0

    def __eq__(self, other: object) -> bool:
        ComparedSet.looks += 1
        return super().__eq__(other)

    __hash__ = frozenset.__hash__


def test_a_barrier_compares_no_sets() -> None:
    """1,024 arrive at three barriers of one set: it is the same object in each call, and no two
    sets are compared.
    """
    crowd = Crowd(COUNT, heartbeat_timeout_s=10_000.0)
    crowd.gather()
    everyone = ComparedSet(range(COUNT))
    ComparedSet.looks = 0
    for counter in range(1, 4):
        for task_id in range(COUNT):
            call = Call(crowd.machine.answers, task_id, crowd.now, deadline=crowd.now + 60)
            crowd.machine.barrier(Arrival(call, "b", counter, everyone))
        assert [each.status for each in crowd.machine.take_answers()] == [None] * COUNT
    assert ComparedSet.looks == 0


def test_a_change_is_encoded_once_for_all() -> None:
    """Of 1,024 that hear of a death each gets the same bytes, one object."""
    crowd = Crowd(COUNT, heartbeat_timeout_s=10_000.0)
    crowd.gather()
    heard: list[bytes] = []
    for stream in crowd.streams:
        stream.listener = heard.append
    crowd.machine.report_exit(7, -9, crowd.now)
    crowd.service.flush()
    crowd.settle()
    assert len(heard) >= COUNT - 1
    assert len({id(message) for message in heard}) == len(heard) // (COUNT - 1)


def test_processes_that_only_connect_again_are_no_news() -> None:
    """As after a restart of the coordinator: each hears that it is open, and the table; the others,
    who are sent a change ten times a second, hear nothing. One on another host is a change.
    """
    crowd = Crowd(COUNT, heartbeat_timeout_s=10_000.0)
    crowd.gather()
    crowd.wire.take_counts()
    version = crowd.machine.task_table.version
    crowd.streams = [CrowdStream(crowd.wire) for _ in range(COUNT)]
    crowd.open_all()
    crowd.settle()
    assert crowd.machine.task_table.version == version
    assert crowd.wire.take_counts()[1] == 2 * COUNT
    crowd.streams[0] = CrowdStream(crowd.wire)
    crowd.open(0, crowd.streams[0], host="elsewhere")
    crowd.settle()
    assert crowd.machine.task_table.version > version
    assert crowd.wire.take_counts()[1] == COUNT + 1


def test_many_keys_are_set_in_one_call(crowd: Crowd) -> None:
    """The mail of an announced preemption to all: one request, one reply."""
    crowd.wire.take_counts()
    entries = [
        coordination_pb2.KeyValueEntry(key=f"mail/{task}", value=b"notice") for task in range(COUNT)
    ]
    crowd.call(0, "SetKeys", session_pb2.SetKeysRequest(entries=entries))
    crowd.wire.deliver()
    assert crowd.wire.take_counts()[1] == 1
    assert all(crowd.machine.keys.values[f"mail/{task}"] == b"notice" for task in range(COUNT))
