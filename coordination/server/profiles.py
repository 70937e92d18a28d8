"""Profiles A and B: how each rpc of jaxlib becomes an event of the machine, and its completion a
message. One row for each rpc.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from holdfast.proto import coordination_b_pb2 as b
from holdfast.proto import coordination_pb2 as a

from ..core.barriers import Arrival
from ..core.liveness import Living
from ..core.machine import Machine
from ..core.status import Code, Completion, Status
from ..core.task_table import Task
from ..names import BARRIER_ERROR_TYPE, MISMATCH_TYPE, PROFILE_A, PROFILE_B, SERVICE_ERROR_TYPE


class Caller(NamedTuple):
    """Who makes a call: an agent (`session` False), or the Session that the call came on."""

    task_id: int
    incarnation: int
    session: bool
    deadline: float = math.inf
    depends_on: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Rpc:
    """One rpc: `parse` its request, `run` it, `encode` its value. `caller` reads who calls, for
    rpcs that are not on a Session.
    """

    parse: Callable[[bytes], Any]
    caller: Callable[
        [Any], tuple[int | None, int, int | None]
    ]  # task id, its and the service's incarnations; None: not given
    run: Callable[[Machine, Any, Any, Caller, float], None]
    encode: Callable[[Machine, Any, Caller], bytes]
    # for other tasks, and not at a barrier: the transport reports a client that goes away
    waits: bool = False
    registers: bool = False  # the task is given to the caller
    lost: bool = False  # also served to a process that was given up: by it, it learns so, or ends
    # jaxlib's agents never take it back: where one goes away unanswered, its process has most
    # likely died
    kept: bool = False


_EMPTY = b""


def _nothing(machine: Machine, value: Any, caller: Caller) -> bytes:
    return _EMPTY


# --- Profile A


def _named(request: Any) -> tuple[int | None, int, int | None]:
    return (
        request.source_task_id,
        request.incarnations.task_incarnation,
        request.incarnations.service_incarnation,
    )


def _unnamed(request: Any) -> tuple[int | None, int, int | None]:
    return None, request.incarnations.task_incarnation, request.incarnations.service_incarnation


def _asking(request: Any) -> tuple[int | None, int, int | None]:
    return (
        request.requesting_task_id,
        request.incarnations.task_incarnation,
        request.incarnations.service_incarnation,
    )


def _registers(request: Any) -> tuple[int | None, int, int | None]:
    return request.source_task_id, request.incarnation, None


def _register(machine: Machine, call: Any, request: Any, caller: Caller, now: float) -> None:
    if caller.session:
        machine.registration.wait_for_all(call, caller.task_id, now, caller.deadline)
    else:
        machine.registration.register(call, caller.task_id, caller.incarnation, now)


def _beat(machine: Machine, call: Any, request: Any, caller: Caller, now: float) -> None:
    if caller.session:
        machine.heartbeat_session(call, caller.task_id)
    else:
        machine.heartbeat(call, caller.task_id, request.incarnation, now)


def _poll(machine: Machine, call: Any, request: Any, caller: Caller, now: float) -> None:
    machine.poll_for_error(call, caller.task_id, now)


def _shut_down(machine: Machine, call: Any, request: Any, caller: Caller, now: float) -> None:
    timeout_s = None if caller.deadline == math.inf else caller.deadline - now
    machine.shut_down(call, caller.task_id, caller.session, now, timeout_s)


def _watch(machine: Machine, call: Any, request: Any, caller: Caller, now: float) -> None:
    machine.watches.watch(call, request.version_number)


def _insert(machine: Machine, call: Any, request: Any, caller: Caller, now: float) -> None:
    machine.keys.insert(call, request.kv.key, request.kv.value, request.allow_overwrite)


def _get(machine: Machine, call: Any, request: Any, caller: Caller, now: float) -> None:
    machine.keys.get(call, caller.task_id, request.key, now, caller.deadline, caller.depends_on)
    for lost in machine.task_table.missing(caller.depends_on & machine.task_table.lost, now):
        machine.keys.fail_dependents(lost)


def _try_get(machine: Machine, call: Any, request: Any, caller: Caller, now: float) -> None:
    machine.keys.try_get(call, request.key)


def _increment(machine: Machine, call: Any, request: Any, caller: Caller, now: float) -> None:
    machine.keys.increment(call, request.key, request.increment)


def _list_dir(machine: Machine, call: Any, request: Any, caller: Caller, now: float) -> None:
    machine.keys.list_dir(call, request.directory_key)


def _delete(machine: Machine, call: Any, request: Any, caller: Caller, now: float) -> None:
    machine.keys.delete(call, request.key)


def _barrier(machine: Machine, call: Any, request: Any, caller: Caller, now: float) -> None:
    _arrive(machine, call, request, caller, now, request.task_ids)


def _arrive(
    machine: Machine, call: Any, request: Any, caller: Caller, now: float, task_ids: Sequence[int]
) -> None:
    deadline = now + request.barrier_timeout_in_ms / 1000
    life = machine.task_table.life_of(caller.task_id, caller.incarnation)
    arrival = Arrival(
        call,
        caller.task_id,
        life,
        request.barrier_id,
        request.counter,
        deadline,
        frozenset(task_ids),
    )
    machine.barrier(arrival, now, twice=len(task_ids) != len(arrival.participants))


def _cancel_barrier(machine: Machine, call: Any, request: Any, caller: Caller, now: float) -> None:
    machine.barriers.cancel(call, caller.task_id, request.barrier_id, request.counter, now)


def _alive(machine: Machine, call: Any, request: Any, caller: Caller, now: float) -> None:
    machine.liveness.arrive(call, caller.task_id, request.task_ids, now, caller.deadline)


def _report_error(machine: Machine, call: Any, request: Any, caller: Caller, now: float) -> None:
    if registered(machine, call, caller):
        machine.report_error(
            call, caller.task_id, request.error_code, request.error_message, now, session=False
        )


def task_info(task: Task, session: bool) -> a.TaskInfo:
    """Returns a task as a message of profile A."""
    info = a.TaskInfo(
        task_id=task.task_id,
        state=int(task.state),  # type: ignore[arg-type]
        incarnation=task.incarnation(session),
    )
    if task.error is not None:
        info.error_code, info.error_message = int(task.error.code), task.error.message
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


def _encode_alive(machine: Machine, value: list[Living], caller: Caller) -> bytes:
    incarnations = [each.session if caller.session else each.agent for each in value]
    return a.GetAliveTasksResponse(
        alive_task_ids=[each.task_id for each in value], incarnations=incarnations
    ).SerializeToString()


RPCS_A: dict[str, Rpc] = {
    "RegisterTask": Rpc(
        a.RegisterTaskRequest.FromString, _registers, _register, _encode_registered, True, True
    ),
    "Heartbeat": Rpc(a.HeartbeatRequest.FromString, _named, _beat, _encode_registered, lost=True),
    "PollForError": Rpc(
        a.PollForErrorRequest.FromString, _named, _poll, _nothing, True, lost=True, kept=True
    ),
    "ShutdownTask": Rpc(a.ShutdownTaskRequest.FromString, _named, _shut_down, _nothing, lost=True),
    "WatchTasks": Rpc(
        a.WatchTasksRequest.FromString, _unnamed, _watch, _encode_watch, True, kept=True
    ),
    "InsertKeyValue": Rpc(a.InsertKeyValueRequest.FromString, _unnamed, _insert, _nothing),
    "GetKeyValue": Rpc(
        a.GetKeyValueRequest.FromString, _unnamed, _get, _encode_kv, True, kept=True
    ),
    "TryGetKeyValue": Rpc(a.TryGetKeyValueRequest.FromString, _unnamed, _try_get, _encode_kv),
    "IncrementKeyValue": Rpc(
        a.IncrementKeyValueRequest.FromString, _unnamed, _increment, _encode_kv
    ),
    "GetKeyValueDir": Rpc(a.GetKeyValueDirRequest.FromString, _unnamed, _list_dir, _encode_dir),
    "DeleteKeyValue": Rpc(a.DeleteKeyValueRequest.FromString, _unnamed, _delete, _nothing),
    "Barrier": Rpc(a.BarrierRequest.FromString, _named, _barrier, _encode_barrier, kept=True),
    "CancelBarrier": Rpc(a.CancelBarrierRequest.FromString, _named, _cancel_barrier, _nothing),
    "GetAliveTasks": Rpc(a.GetAliveTasksRequest.FromString, _asking, _alive, _encode_alive, True),
    "ReportErrorToService": Rpc(
        a.ReportErrorToServiceRequest.FromString, _named, _report_error, _nothing
    ),
}

# --- Profile B, where it differs


def _source_task(request: Any) -> tuple[int | None, int, int | None]:
    return request.source_task.task_id, 0, None


def _source_and_incarnation(request: Any) -> tuple[int | None, int, int | None]:
    return request.source_task.task_id, request.incarnation, None


def _nobody(request: Any) -> tuple[int | None, int, int | None]:
    return -1, 0, None


def _asking_task(request: Any) -> tuple[int | None, int, int | None]:
    return request.requesting_task.task_id, 0, None


def _origin(request: Any) -> tuple[int | None, int, int | None]:
    return request.error_origin.task_id, 0, None


def registered(machine: Machine, call: Any, caller: Caller) -> bool:
    """Returns whether an agent has registered for the caller's task; answers the call if not.
    Profiles B and D prove nothing more.
    """
    task = machine.task_table.get(caller.task_id)
    if task is not None and task.agent:
        return True
    sentence = f"process {caller.task_id} is not registered; expected a registration first"
    machine.completions.append(Completion(call, None, Status(Code.INVALID_ARGUMENT, sentence)))
    return False


def _barrier_b(machine: Machine, call: Any, request: Any, caller: Caller, now: float) -> None:
    if registered(machine, call, caller):
        _arrive(machine, call, request, caller, now, [task.task_id for task in request.tasks])


def _cancel_barrier_b(
    machine: Machine, call: Any, request: Any, caller: Caller, now: float
) -> None:
    if registered(machine, call, caller):
        _cancel_barrier(machine, call, request, caller, now)


def _alive_b(machine: Machine, call: Any, request: Any, caller: Caller, now: float) -> None:
    if registered(machine, call, caller):
        machine.liveness.arrive(
            call, caller.task_id, [task.task_id for task in request.tasks], now, caller.deadline
        )


def _states_b(machine: Machine, call: Any, request: Any, caller: Caller, now: float) -> None:
    machine.states(call, [task.task_id for task in request.source_task])


def _task_b(task_id: int) -> b.CoordinatedTask:
    return b.CoordinatedTask(job_name="jax_worker", task_id=task_id)


def _info_b(task: Task) -> b.CoordinatedTaskStateInfo:
    info = b.CoordinatedTaskStateInfo(
        task=_task_b(task.task_id),
        state=int(task.state),  # type: ignore[arg-type]
        incarnation=task.incarnation(session=False),
    )
    if task.error is not None:
        info.error_code, info.error_message = int(task.error.code), task.error.message
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


def _encode_alive_b(machine: Machine, value: list[Living], caller: Caller) -> bytes:
    alive = [_task_b(each.task_id) for each in value]
    return b.GetAliveTasksResponse(
        alive_tasks=alive, incarnations=[each.agent for each in value]
    ).SerializeToString()


RPCS_B: dict[str, Rpc] = {
    "RegisterTask": Rpc(
        b.RegisterTaskRequest.FromString,
        _source_and_incarnation,
        _register,
        _encode_registered_b,
        True,
        True,
    ),
    "Heartbeat": Rpc(
        b.HeartbeatRequest.FromString, _source_and_incarnation, _beat, _encode_registered_b
    ),
    "PollForError": Rpc(b.PollForErrorRequest.FromString, _source_task, _poll, _nothing, True),
    "ShutdownTask": Rpc(b.ShutdownTaskRequest.FromString, _source_task, _shut_down, _nothing),
    "ReportErrorToService": Rpc(
        b.ReportErrorToServiceRequest.FromString, _origin, _report_error, _nothing
    ),
    "GetTaskState": Rpc(b.GetTaskStateRequest.FromString, _nobody, _states_b, _encode_states_b),
    "WatchJobState": Rpc(b.WatchJobStateRequest.FromString, _nobody, _watch, _encode_watch_b, True),
    "InsertKeyValue": Rpc(b.InsertKeyValueRequest.FromString, _nobody, _insert, _nothing),
    "GetKeyValue": Rpc(b.GetKeyValueRequest.FromString, _nobody, _get, _encode_kv, True),
    "TryGetKeyValue": Rpc(b.TryGetKeyValueRequest.FromString, _nobody, _try_get, _encode_kv),
    "IncrementKeyValue": Rpc(
        b.IncrementKeyValueRequest.FromString, _nobody, _increment, _encode_kv
    ),
    "GetKeyValueDir": Rpc(b.GetKeyValueDirRequest.FromString, _nobody, _list_dir, _encode_dir),
    "DeleteKeyValue": Rpc(b.DeleteKeyValueRequest.FromString, _nobody, _delete, _nothing),
    "Barrier": Rpc(b.BarrierRequest.FromString, _source_task, _barrier_b, _encode_barrier),
    "CancelBarrier": Rpc(
        b.CancelBarrierRequest.FromString, _source_task, _cancel_barrier_b, _nothing
    ),
    "GetAliveTasks": Rpc(
        b.GetAliveTasksRequest.FromString, _asking_task, _alive_b, _encode_alive_b, True
    ),
}

RPCS: dict[str, Rpc] = {PROFILE_A + name: rpc for name, rpc in RPCS_A.items()} | {
    PROFILE_B + name: rpc for name, rpc in RPCS_B.items()
}

# --- Errors

MESSAGE_BYTES = 3_000
"""jaxlib cuts longer messages at 3,072 bytes, in the middle of a word."""


def payloads(status: Status) -> dict[str, bytes]:
    """Returns the payloads of an error that C++ agents act on."""
    found: dict[str, bytes] = {}
    if status.from_service:
        about = a.CoordinationServiceError(
            is_reported_error=status.reported, source_task_id=status.source_task or 0
        )
        found[SERVICE_ERROR_TYPE] = about.SerializeToString()
    if status.barrier is not None:
        name, counter = status.barrier
        found[BARRIER_ERROR_TYPE] = a.BarrierError(
            barrier_id=name, counter=counter
        ).SerializeToString()
    if status.mismatch is not None:
        found[MISMATCH_TYPE] = a.ServiceMismatchError(
            service_incarnation=status.mismatch
        ).SerializeToString()
    return found


def status_details(status: Status) -> bytes:
    """Returns the value of the trailing metadata `grpc-status-details-bin`."""
    return a.StatusDetails(payloads=payloads(status)).SerializeToString()


def message_of(status: Status) -> str:
    """Returns the sentence, cut where jaxlib would cut it."""
    text = status.message
    return text if len(text) <= MESSAGE_BYTES else text[:MESSAGE_BYTES] + " ..."
