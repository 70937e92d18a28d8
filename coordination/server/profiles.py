"""Profiles A and B: how each rpc of jaxlib becomes an event of the machine, and its completion a
message. One row for each rpc.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from holdfast.proto import coordination_b_pb2 as b
from holdfast.proto import coordination_pb2 as a
from holdfast.proto import session_pb2

from ..core.barriers import Arrival
from ..core.liveness import Living, Sending
from ..core.machine import Machine
from ..core.status import Code, Status
from ..core.task_table import Task
from ..names import (
    BARRIER_ERROR_TYPE,
    MISMATCH_TYPE,
    PROFILE_A,
    PROFILE_B,
    SERVICE_ERROR_TYPE,
    Claim,
    claim_of,
)


class Caller(NamedTuple):
    """Who makes a call: an agent (`session` False), or the Session that the call came on."""

    task_id: int
    incarnation: int
    session: bool
    deadline: float = math.inf
    depends_on: frozenset[int] = frozenset()
    number: int = 0  # of the call, in each sending of it; 0: it is sent once
    participants: bytes = b""  # many, as bits


_NOBODY: frozenset[int] = frozenset()


class Call(NamedTuple):
    """One call of an rpc, while the machine takes it. `handle` is what the machine ends."""

    machine: Machine
    handle: Any
    request: Any
    caller: Caller
    now: float

    def fail(self, code: Code, sentence: str) -> None:
        """Ends the call with an error."""
        self.machine.completions.fail(self.handle, Status(code, sentence))


def encode_nothing(machine: Machine, value: Any, caller: Caller) -> bytes:
    """Encodes the response of an rpc that returns nothing."""
    return b""


@dataclass(frozen=True, slots=True)
class Rpc:
    """One rpc: `run` a call of it, and `encode` its value. `parse` reads its request, and `claim`
    who calls, where that is not on a Session.

    `waits`: for other tasks, and not at a barrier; the transport reports a client that goes away.
    `registers`: the task is given to the caller. `lost`: a process that was given up is served,
    too; by such a call it learns that it is lost, or ends. `kept`: jaxlib's agents never take the
    call back, so where one goes away unanswered its process has most likely died. `shared`: many
    calls get one value, which is encoded once.
    """

    run: Callable[[Call], None]
    encode: Callable[[Machine, Any, Caller], bytes] = encode_nothing
    parse: Callable[[bytes], Any] = bytes
    claim: Callable[[Any], Claim] = claim_of
    waits: bool = False
    registers: bool = False
    lost: bool = False
    kept: bool = False
    shared: bool = False


def profile(messages: Any, rpcs: Mapping[str, Rpc]) -> dict[str, Rpc]:
    """Returns the rpcs of a profile, each with the message of its request."""
    return {
        name: replace(rpc, parse=getattr(messages, f"{name}Request").FromString)
        for name, rpc in rpcs.items()
    }


# --- Profile A


def _register(call: Call) -> None:
    caller = call.caller
    registration = call.machine.registration
    if caller.session:
        registration.wait_for_all(call.handle, caller.task_id, call.now, caller.deadline)
    else:
        registration.register(call.handle, caller.task_id, caller.incarnation, call.now)


def _beat(call: Call) -> None:
    task_id = call.caller.task_id
    if call.caller.session:
        call.machine.heartbeat_session(call.handle, task_id)
    else:
        call.machine.heartbeat(call.handle, task_id, call.request.incarnation, call.now)


def _poll(call: Call) -> None:
    call.machine.poll_for_error(call.handle, call.caller.task_id)


def _shut_down(call: Call) -> None:
    caller = call.caller
    timeout_s = None if caller.deadline == math.inf else caller.deadline - call.now
    call.machine.shut_down(
        call.handle, caller.task_id, caller.session, call.now, timeout_s=timeout_s
    )


def _watch(call: Call) -> None:
    call.machine.watches.watch(call.handle, call.request.version_number)


def _insert(call: Call) -> None:
    entry = call.request.kv
    call.machine.keys.insert(call.handle, entry.key, entry.value, call.request.allow_overwrite)


def _get(call: Call) -> None:
    machine, handle, request, caller, now = call
    machine.keys.get(
        handle,
        caller.task_id,
        request.key,
        now,
        deadline=caller.deadline,
        depends_on=caller.depends_on,
    )
    lost = caller.depends_on & machine.task_table.lost
    for missing in machine.task_table.missing(lost, now):
        machine.keys.fail_dependents(missing)


def _try_get(call: Call) -> None:
    call.machine.keys.try_get(call.handle, call.request.key)


def _increment(call: Call) -> None:
    call.machine.keys.increment(call.handle, call.request.key, call.request.increment)


def _list_dir(call: Call) -> None:
    call.machine.keys.list_dir(call.handle, call.request.directory_key)


def _delete(call: Call) -> None:
    call.machine.keys.delete(call.handle, call.request.key)


def _barrier(call: Call) -> None:
    _arrive(call, call.request.task_ids)


def _arrive(call: Call, task_ids: Sequence[int]) -> None:
    machine, handle, request, caller, now = call
    named = _participants(call, task_ids)
    arrival = Arrival(
        handle,
        caller.task_id,
        machine.task_table.life_of(caller.task_id, caller.incarnation),
        request.barrier_id,
        counter=request.counter,
        deadline=now + request.barrier_timeout_in_ms / 1000,
        participants=named,
    )
    machine.barrier(arrival, now, twice=bool(task_ids) and len(named) != len(task_ids))


def _participants(call: Call, task_ids: Sequence[int]) -> frozenset[int]:
    """Returns the set of processes that a call is about."""
    packed = call.caller.participants
    if packed:
        return call.machine.participants.of(packed)
    return frozenset(task_ids) if task_ids else _NOBODY


def _cancel_barrier(call: Call) -> None:
    machine, handle, request, caller, now = call
    machine.barriers.cancel(handle, caller.task_id, request.barrier_id, request.counter, now=now)


def _alive(call: Call) -> None:
    _ask_who_lives(call, call.request.task_ids)


def _ask_who_lives(call: Call, task_ids: Sequence[int]) -> None:
    caller = call.caller
    sending = None
    if caller.number:
        life = call.machine.task_table.life_of(caller.task_id, caller.incarnation)
        sending = Sending(life, caller.number)
    call.machine.liveness.arrive(
        call.handle,
        caller.task_id,
        _participants(call, task_ids),
        call.now,
        deadline=caller.deadline,
        sending=sending,
    )


def _report_error(call: Call) -> None:
    machine, handle, request, caller, now = call
    if registered(call):
        machine.report_error(
            handle,
            caller.task_id,
            request.error_code,
            request.error_message,
            now=now,
            session=False,
        )


def task_info(task: Task, session: bool) -> a.TaskInfo:
    """Returns a task as a message of profile A."""
    info = a.TaskInfo(
        task_id=task.task_id,
        state=int(task.state),  # type: ignore[arg-type]
        incarnation=task.incarnation(session),
    )
    if task.error is not None:
        info.error_code = int(task.error.code)
        info.error_message = task.error.message
        info.error_payload.CopyFrom(
            a.CoordinationServiceError(
                is_reported_error=task.error.reported, source_task_id=task.task_id
            )
        )
    return info


def _encode_registered(machine: Machine, value: int, caller: Caller) -> bytes:
    return a.RegisterTaskResponse(service_incarnation=value).SerializeToString()


def _encode_watch(machine: Machine, value: int, caller: Caller) -> bytes:
    def encode() -> bytes:
        tasks = [task_info(task, caller.session) for task in machine.task_table.tasks]
        return a.WatchTasksResponse(
            task_state=tasks, version_number=machine.task_table.version
        ).SerializeToString()

    return machine.watches.shared((PROFILE_A, caller.session), encode)


def _encode_kv(machine: Machine, value: tuple[str, bytes], caller: Caller) -> bytes:
    return a.GetKeyValueResponse(
        kv=a.KeyValueEntry(key=value[0], value=value[1])
    ).SerializeToString()


def _encode_dir(machine: Machine, value: list[tuple[str, bytes]], caller: Caller) -> bytes:
    return a.GetKeyValueDirResponse(
        kv=[a.KeyValueEntry(key=key, value=held) for key, held in value]
    ).SerializeToString()


def _encode_barrier(machine: Machine, value: int, caller: Caller) -> bytes:
    return a.BarrierResponse(counter=value).SerializeToString()


def _encode_alive(machine: Machine, value: Sequence[Living], caller: Caller) -> bytes:
    if caller.session:
        lives = [0] * len(machine.task_table)
        for each in value:
            lives[each.task_id] = each.life
        packed = session_pb2.Lives(lives=lives).SerializeToString()
        return session_pb2.LivingTasks(packed=zlib.compress(packed)).SerializeToString()
    return a.GetAliveTasksResponse(
        alive_task_ids=[each.task_id for each in value], incarnations=[each.agent for each in value]
    ).SerializeToString()


RPCS_A = profile(
    a,
    {
        "RegisterTask": Rpc(_register, _encode_registered, waits=True, registers=True),
        "Heartbeat": Rpc(_beat, _encode_registered, lost=True),
        "PollForError": Rpc(_poll, waits=True, lost=True, kept=True),
        "ShutdownTask": Rpc(_shut_down, lost=True),
        "WatchTasks": Rpc(_watch, _encode_watch, waits=True, kept=True),
        "InsertKeyValue": Rpc(_insert),
        "GetKeyValue": Rpc(_get, _encode_kv, waits=True, kept=True, shared=True),
        "TryGetKeyValue": Rpc(_try_get, _encode_kv),
        "IncrementKeyValue": Rpc(_increment, _encode_kv),
        "GetKeyValueDir": Rpc(_list_dir, _encode_dir),
        "DeleteKeyValue": Rpc(_delete),
        "Barrier": Rpc(_barrier, _encode_barrier, kept=True),
        "CancelBarrier": Rpc(_cancel_barrier),
        "GetAliveTasks": Rpc(_alive, _encode_alive, waits=True, shared=True),
        "ReportErrorToService": Rpc(_report_error),
    },
)

# --- Profile B, where it differs


def registered(call: Call) -> bool:
    """Returns whether an agent has registered for the caller's task; answers the call if not.
    Profiles B and D prove nothing more.
    """
    task_id = call.caller.task_id
    task = call.machine.task_table.get(task_id)
    if task is not None and task.agent:
        return True
    sentence = f"process {task_id} is not registered; expected a registration first"
    call.fail(Code.INVALID_ARGUMENT, sentence)
    return False


def _barrier_b(call: Call) -> None:
    if registered(call):
        _arrive(call, [task.task_id for task in call.request.tasks])


def _cancel_barrier_b(call: Call) -> None:
    if registered(call):
        _cancel_barrier(call)


def _alive_b(call: Call) -> None:
    if registered(call):
        _ask_who_lives(call, [task.task_id for task in call.request.tasks])


def _states_b(call: Call) -> None:
    call.machine.states(call.handle, [task.task_id for task in call.request.source_task])


def _task_b(task_id: int) -> b.CoordinatedTask:
    return b.CoordinatedTask(job_name="jax_worker", task_id=task_id)


def _info_b(task: Task) -> b.CoordinatedTaskStateInfo:
    info = b.CoordinatedTaskStateInfo(
        task=_task_b(task.task_id),
        state=int(task.state),  # type: ignore[arg-type]
        incarnation=task.incarnation(session=False),
    )
    if task.error is not None:
        info.error_code = int(task.error.code)
        info.error_message = task.error.message
        info.error_payload.CopyFrom(
            b.CoordinationServiceError(
                is_reported_error=task.error.reported, source_task=_task_b(task.task_id)
            )
        )
    return info


def _encode_registered_b(machine: Machine, value: int, caller: Caller) -> bytes:
    return b.RegisterTaskResponse(leader_incarnation=value).SerializeToString()


def _encode_watch_b(machine: Machine, value: int, caller: Caller) -> bytes:
    def encode() -> bytes:
        tasks = [_info_b(task) for task in machine.task_table.tasks]
        return b.WatchJobStateResponse(
            task_state=tasks, version_number=machine.task_table.version
        ).SerializeToString()

    return machine.watches.shared(PROFILE_B, encode)


def _encode_states_b(machine: Machine, value: list[int], caller: Caller) -> bytes:
    return b.GetTaskStateResponse(
        task_state=[_info_b(machine.task_table.tasks[task_id]) for task_id in value]
    ).SerializeToString()


def _encode_alive_b(machine: Machine, value: Sequence[Living], caller: Caller) -> bytes:
    alive = [_task_b(each.task_id) for each in value]
    return b.GetAliveTasksResponse(
        alive_tasks=alive, incarnations=[each.agent for each in value]
    ).SerializeToString()


RPCS_B = profile(
    b,
    {
        "RegisterTask": Rpc(_register, _encode_registered_b, waits=True, registers=True),
        "Heartbeat": Rpc(_beat, _encode_registered_b),
        "PollForError": Rpc(_poll, waits=True),
        "ShutdownTask": Rpc(_shut_down),
        "ReportErrorToService": Rpc(_report_error),
        "GetTaskState": Rpc(_states_b, _encode_states_b),
        "WatchJobState": Rpc(_watch, _encode_watch_b, waits=True),
        "InsertKeyValue": Rpc(_insert),
        "GetKeyValue": Rpc(_get, _encode_kv, waits=True, shared=True),
        "TryGetKeyValue": Rpc(_try_get, _encode_kv),
        "IncrementKeyValue": Rpc(_increment, _encode_kv),
        "GetKeyValueDir": Rpc(_list_dir, _encode_dir),
        "DeleteKeyValue": Rpc(_delete),
        "Barrier": Rpc(_barrier_b, _encode_barrier),
        "CancelBarrier": Rpc(_cancel_barrier_b),
        "GetAliveTasks": Rpc(_alive_b, _encode_alive_b, waits=True, shared=True),
    },
)

RPCS: dict[str, Rpc] = {PROFILE_A + name: rpc for name, rpc in RPCS_A.items()} | {
    PROFILE_B + name: rpc for name, rpc in RPCS_B.items()
}

# --- Errors

MESSAGE_BYTES = 3_000
"""jaxlib cuts longer messages at 3,072 bytes, in the middle of a word."""


def payloads(status: Status) -> dict[str, bytes]:
    """Returns the payloads of an error that C++ agents act on."""
    encoded: dict[str, bytes] = {}
    if status.from_service:
        about = a.CoordinationServiceError(
            is_reported_error=status.reported, source_task_id=status.source_task or 0
        )
        encoded[SERVICE_ERROR_TYPE] = about.SerializeToString()
    if status.barrier is not None:
        name, counter = status.barrier
        encoded[BARRIER_ERROR_TYPE] = a.BarrierError(
            barrier_id=name, counter=counter
        ).SerializeToString()
    if status.mismatch is not None:
        encoded[MISMATCH_TYPE] = a.ServiceMismatchError(
            service_incarnation=status.mismatch
        ).SerializeToString()
    return encoded


def status_details(status: Status) -> bytes:
    """Returns the value of the trailing metadata `grpc-status-details-bin`."""
    return a.StatusDetails(payloads=payloads(status)).SerializeToString()


def message_of(status: Status) -> str:
    """Returns the sentence, cut where jaxlib would cut it."""
    text = status.message
    if len(text) > MESSAGE_BYTES:
        text = f"{text[:MESSAGE_BYTES]} ..."
    return text
