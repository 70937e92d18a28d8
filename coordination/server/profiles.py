"""Profiles A and B: how each rpc of jaxlib becomes an event of the machine, and its completion a
message. One row for each rpc.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message

from holdfast.proto import coordination_b_pb2 as b
from holdfast.proto import coordination_pb2 as a
from holdfast.proto import session_pb2

from ..core.barriers import Arrival
from ..core.calls import Call
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

_NOBODY: frozenset[int] = frozenset()


@dataclass(slots=True, eq=False, kw_only=True)
class Requested(Call):
    """One call of an rpc."""

    rpc: Rpc
    request: Any = None

    def run(self, machine: Machine, body: bytes) -> None:
        """Reads the request, and has the machine take the call."""
        self.request = self.rpc.parse(body)
        self.rpc.run(machine, self)

    def encoded(self, machine: Machine) -> bytes:
        """Returns the message of what it is answered, as bytes."""
        encode = self.rpc.encode
        if not self.rpc.shared:
            return encode(machine, self).SerializeToString()
        return machine.encodings.of(
            encode, self.value, lambda: encode(machine, self).SerializeToString()
        )


Run: TypeAlias = Callable[[Machine, Requested], None]


_NOTHING = Empty()


def encode_nothing(machine: Machine, call: Call) -> Message:
    """Returns the response of an rpc that returns nothing."""
    return _NOTHING


def encode_message(machine: Machine, call: Call) -> Message:
    """Returns an answer that is a message already."""
    message: Message = call.value
    return message


@dataclass(frozen=True, slots=True)
class Rpc:
    """One rpc: `run` a call of it, and `encode` what it is answered. `parse` reads its request, and
    `claim` who calls, where that is not on a Session.

    `waits`: for other tasks, and not at a barrier; the transport reports a client that goes away.
    `registers`: the task is given to the caller. `lost`: a process that was given up is served,
    too; by such a call it learns that it is lost, or ends. `kept`: jaxlib's agents never take the
    call back, so where one goes away unanswered its process has most likely died. `shared`: many
    calls get one value, which is encoded once. `late`: the code of a call whose time is over.
    """

    run: Run
    encode: Callable[[Machine, Requested], Message] = encode_nothing
    parse: Callable[[bytes], Any] = bytes
    claim: Callable[[Any], Claim] = claim_of
    waits: bool = False
    registers: bool = False
    lost: bool = False
    kept: bool = False
    shared: bool = False
    late: Code = Code.DEADLINE_EXCEEDED


def profile(messages: Any, rpcs: Mapping[str, Rpc]) -> dict[str, Rpc]:
    """Returns the rpcs of a profile, each with the message of its request."""
    return {
        name: replace(rpc, parse=getattr(messages, f"{name}Request").FromString)
        for name, rpc in rpcs.items()
    }


def registered(run: Run) -> Run:
    """Returns `run` for calls of profiles B and D, which prove nothing more: those of a task for
    which an agent has registered. The others are refused.
    """

    def checked(machine: Machine, call: Requested) -> None:
        task = machine.task_table.get(call.task_id)
        if task is not None and task.agent:
            run(machine, call)
            return
        sentence = f"process {call.task_id} is not registered; expected a registration first"
        call.refuse(Code.INVALID_ARGUMENT, sentence)

    return checked


# --- Profile A


def _register(machine: Machine, call: Requested) -> None:
    if call.session:
        machine.registration.wait_for_all(call)
    else:
        machine.registration.register(call)


def _watch(machine: Machine, call: Requested) -> None:
    machine.watches.watch(call, call.request.version_number)


def _insert(machine: Machine, call: Requested) -> None:
    entry = call.request.kv
    machine.keys.insert(call, entry.key, entry.value, call.request.allow_overwrite)


def _get(machine: Machine, call: Requested) -> None:
    machine.get(call, call.request.key)


def _try_get(machine: Machine, call: Requested) -> None:
    machine.keys.try_get(call, call.request.key)


def _increment(machine: Machine, call: Requested) -> None:
    machine.keys.increment(call, call.request.key, call.request.increment)


def _list_dir(machine: Machine, call: Requested) -> None:
    machine.keys.list_dir(call, call.request.directory_key)


def _delete(machine: Machine, call: Requested) -> None:
    machine.keys.delete(call, call.request.key)


def _barrier(machine: Machine, call: Requested) -> None:
    _arrive(machine, call, call.request.task_ids)


def _arrive(machine: Machine, call: Requested, task_ids: Sequence[int]) -> None:
    request = call.request
    call.wait_until(call.came + request.barrier_timeout_in_ms / 1000)
    named = _participants(machine, call, task_ids)
    arrival = Arrival(call, request.barrier_id, request.counter, named)
    machine.barrier(arrival, twice=bool(task_ids) and len(named) != len(task_ids))


def _participants(machine: Machine, call: Call, task_ids: Sequence[int]) -> frozenset[int]:
    """Returns the set of processes that a call is about."""
    if call.participants:
        return machine.participants.of(call.participants)
    return frozenset(task_ids) if task_ids else _NOBODY


def _cancel_barrier(machine: Machine, call: Requested) -> None:
    machine.barriers.cancel(call, call.request.barrier_id, call.request.counter)


def _alive(machine: Machine, call: Requested) -> None:
    machine.liveness.arrive(call, _participants(machine, call, call.request.task_ids))


def report_error(machine: Machine, call: Requested) -> None:
    """Puts the caller into ERROR."""
    machine.report_error(call, call.request.error_code, call.request.error_message)


def task_info(task: Task, session: bool) -> a.TaskInfo:
    """Returns a task as a message of profile A."""
    return a.TaskInfo(
        task_id=task.task_id,
        state=int(task.state),  # type: ignore[arg-type]
        incarnation=task.incarnation(session),
        **_error_of(task, source_task_id=task.task_id),
    )


def _error_of(task: Task, **source: Any) -> dict[str, Any]:
    """Returns the fields of a task's error in profiles A and B; `source` names the task there."""
    if task.error is None:
        return {}
    payload = {"is_reported_error": task.error.reported, **source}
    return {
        "error_code": int(task.error.code),
        "error_message": task.error.message,
        "error_payload": payload,
    }


def _encode_registered(machine: Machine, call: Call) -> Message:
    return a.RegisterTaskResponse(service_incarnation=call.value)


def _encode_watch(machine: Machine, call: Call) -> Message:
    tasks = [task_info(task, call.session) for task in machine.task_table.tasks]
    return a.WatchTasksResponse(task_state=tasks, version_number=machine.task_table.version)


def _encode_kv(machine: Machine, call: Call) -> Message:
    key, value = call.value
    return a.GetKeyValueResponse(kv=a.KeyValueEntry(key=key, value=value))


def _encode_dir(machine: Machine, call: Call) -> Message:
    return a.GetKeyValueDirResponse(
        kv=[a.KeyValueEntry(key=key, value=held) for key, held in call.value]
    )


def _encode_barrier(machine: Machine, call: Call) -> Message:
    return a.BarrierResponse(counter=call.value)


def _encode_alive(machine: Machine, call: Call) -> Message:
    if call.session:
        lives = [0] * len(machine.task_table)
        for each in call.value:
            lives[each.task_id] = each.life
        packed = session_pb2.Lives(lives=lives).SerializeToString()
        return session_pb2.LivingTasks(packed=zlib.compress(packed))
    return a.GetAliveTasksResponse(
        alive_task_ids=[each.task_id for each in call.value],
        incarnations=[each.agent for each in call.value],
    )


_KEY_RPCS = {
    "InsertKeyValue": Rpc(_insert),
    "TryGetKeyValue": Rpc(_try_get, _encode_kv),
    "IncrementKeyValue": Rpc(_increment, _encode_kv),
    "GetKeyValueDir": Rpc(_list_dir, _encode_dir),
    "DeleteKeyValue": Rpc(_delete),
}

RPCS_A = profile(
    a,
    _KEY_RPCS
    | {
        "RegisterTask": Rpc(_register, _encode_registered, waits=True, registers=True),
        "Heartbeat": Rpc(Machine.heartbeat, _encode_registered, lost=True),
        "PollForError": Rpc(
            lambda machine, call: machine.polls.poll(call), waits=True, lost=True, kept=True
        ),
        "ShutdownTask": Rpc(Machine.shut_down, lost=True),
        "WatchTasks": Rpc(_watch, _encode_watch, waits=True, kept=True, shared=True),
        "GetKeyValue": Rpc(_get, _encode_kv, waits=True, kept=True, shared=True),
        "Barrier": Rpc(_barrier, _encode_barrier, kept=True),
        "CancelBarrier": Rpc(_cancel_barrier),
        "GetAliveTasks": Rpc(_alive, _encode_alive, waits=True, shared=True),
        "ReportErrorToService": Rpc(registered(report_error)),
    },
)

# --- Profile B, where it differs


@registered
def _barrier_b(machine: Machine, call: Requested) -> None:
    _arrive(machine, call, [task.task_id for task in call.request.tasks])


@registered
def _alive_b(machine: Machine, call: Requested) -> None:
    named = frozenset(task.task_id for task in call.request.tasks)
    machine.liveness.arrive(call, named)


def _states_b(machine: Machine, call: Requested) -> None:
    asked = [task.task_id for task in call.request.source_task]
    call.succeed([each for each in asked if machine.task_table.get(each) is not None])


def _task_b(task_id: int) -> b.CoordinatedTask:
    return b.CoordinatedTask(job_name="jax_worker", task_id=task_id)


def _info_b(task: Task) -> b.CoordinatedTaskStateInfo:
    return b.CoordinatedTaskStateInfo(
        task=_task_b(task.task_id),
        state=int(task.state),  # type: ignore[arg-type]
        incarnation=task.incarnation(session=False),
        **_error_of(task, source_task=_task_b(task.task_id)),
    )


def _encode_registered_b(machine: Machine, call: Call) -> Message:
    return b.RegisterTaskResponse(leader_incarnation=call.value)


def _encode_watch_b(machine: Machine, call: Call) -> Message:
    tasks = [_info_b(task) for task in machine.task_table.tasks]
    return b.WatchJobStateResponse(task_state=tasks, version_number=machine.task_table.version)


def _encode_states_b(machine: Machine, call: Call) -> Message:
    return b.GetTaskStateResponse(
        task_state=[_info_b(machine.task_table.tasks[task_id]) for task_id in call.value]
    )


def _encode_alive_b(machine: Machine, call: Call) -> Message:
    return b.GetAliveTasksResponse(
        alive_tasks=[_task_b(each.task_id) for each in call.value],
        incarnations=[each.agent for each in call.value],
    )


RPCS_B = profile(
    b,
    _KEY_RPCS
    | {
        "RegisterTask": Rpc(_register, _encode_registered_b, waits=True, registers=True),
        "Heartbeat": Rpc(Machine.heartbeat, _encode_registered_b),
        "PollForError": Rpc(lambda machine, call: machine.polls.poll(call), waits=True),
        "ShutdownTask": Rpc(Machine.shut_down),
        "ReportErrorToService": Rpc(registered(report_error)),
        "GetTaskState": Rpc(_states_b, _encode_states_b),
        "WatchJobState": Rpc(_watch, _encode_watch_b, waits=True, shared=True),
        "GetKeyValue": Rpc(_get, _encode_kv, waits=True, shared=True),
        "Barrier": Rpc(_barrier_b, _encode_barrier),
        "CancelBarrier": Rpc(registered(_cancel_barrier)),
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
