"""Profile D: xla.DistributedRuntimeService of jaxlib up to 0.4.14, as events of the machine.

Connect stands for RegisterTask and returns a session, which every other call names: one for each
version of the protocol, so that a call shows how its messages are numbered. Keys, heartbeats and
shutdown are those of the other profiles. A barrier has no counter here: the nth call of a node
matches the nth of the others. A get whose time is over is NOT_FOUND.
"""

from __future__ import annotations

import math
from typing import Any

from holdfast.proto import distributed_runtime_pb2 as d

from ..core.barriers import Arrival
from ..core.devices import Node
from ..core.machine import Machine
from ..core.status import Code, Completion, Status
from ..names import PROFILE_D
from .profiles import Caller, Rpc, registered

_VERSIONS = (1, 2, 3)
_RENUMBERED = 3  # the version from which on LocalTopologyProto has a boot id
_VERSION_BITS = 3


def _session_of(machine: Machine, version: int) -> int:
    return (machine.config.incarnation & ~_VERSION_BITS) | version


def _known(machine: Machine, call: Any, request: Any) -> bool:
    """Returns whether the call names a session of ours; answers the call if not."""
    if request.session_id in [_session_of(machine, version) for version in _VERSIONS]:
        return True
    status = Status(
        Code.INVALID_ARGUMENT,
        "the session is not one of this service; expected one that Connect has returned",
    )
    machine.completions.append(Completion(call, None, status))
    return False


def _key(machine: Machine, call: Any, key: bytes) -> str | None:
    try:
        return key.decode()
    except UnicodeDecodeError:
        status = Status(Code.INVALID_ARGUMENT, f"a name of UTF-8 was expected; found {key[:40]!r}")
        machine.completions.append(Completion(call, None, status))
        return None


def _connect(machine: Machine, call: Any, request: Any, caller: Caller, now: float) -> None:
    if request.protocol_version not in _VERSIONS:
        sentence = (
            f"protocol version {request.protocol_version} is not spoken here; expected 1, 2 or 3"
        )
        machine.completions.append(Completion(call, None, Status(Code.INVALID_ARGUMENT, sentence)))
        return
    deadline = (
        now + request.timeout_milliseconds / 1000 if request.timeout_milliseconds > 0 else math.inf
    )
    machine.devices.versions[request.node_id] = request.protocol_version
    machine.registration.register(call, request.node_id, caller.incarnation, now, deadline)


def _enumerate(machine: Machine, call: Any, request: Any, caller: Caller, now: float) -> None:
    if not _known(machine, call, request):
        return
    topology = request.local_topology
    if not machine.task_table.connected(topology.node_id):
        status = Status(
            Code.INVALID_ARGUMENT,
            f"node {topology.node_id} has not connected; expected Connect before EnumerateDevices",
        )
        machine.completions.append(Completion(call, None, status))
        return
    devices = sorted(topology.devices, key=lambda device: int(device.local_device_ordinal))
    machine.devices.report(call, topology.node_id, Node(devices, getattr(topology, "boot_id", "")))


def _get(machine: Machine, call: Any, request: Any, caller: Caller, now: float) -> None:
    if _known(machine, call, request) and (key := _key(machine, call, request.key)) is not None:
        timeout_status = Status(
            Code.NOT_FOUND,
            f"key {key!r} was not set within {request.timeout_milliseconds} ms",
            from_service=False,
        )
        machine.keys.get(
            call,
            -1,
            key,
            now,
            now + request.timeout_milliseconds / 1000,
            timeout_status=timeout_status,
        )


def _set(machine: Machine, call: Any, request: Any, caller: Caller, now: float) -> None:
    if _known(machine, call, request) and (key := _key(machine, call, request.key)) is not None:
        machine.keys.insert(call, key, request.value, allow_overwrite=True)


def _barrier(machine: Machine, call: Any, request: Any, caller: Caller, now: float) -> None:
    known = _known(machine, call, request) and registered(machine, call, caller)
    if known and (name := _key(machine, call, request.barrier_id)) is not None:
        counter = machine.barriers.counter_for(name, caller.task_id)
        deadline = now + request.timeout_milliseconds / 1000
        life = machine.task_table.life_of(caller.task_id, caller.incarnation)
        machine.barrier(
            Arrival(call, caller.task_id, life, name, counter, deadline, frozenset()), now
        )


def _heartbeat(machine: Machine, call: Any, request: Any, caller: Caller, now: float) -> None:
    if _known(machine, call, request):
        machine.heartbeat(call, caller.task_id, caller.incarnation, now)


def _shut_down(machine: Machine, call: Any, request: Any, caller: Caller, now: float) -> None:
    if _known(machine, call, request):
        machine.shut_down(call, caller.task_id, False, now)


def _parse_enumerate(body: bytes) -> Any:
    version = d.HeartbeatRequest.FromString(body).session_id & _VERSION_BITS
    return (
        d.EnumerateDevicesRequest3 if version >= _RENUMBERED else d.EnumerateDevicesRequest
    ).FromString(body)


def _encode_connect(machine: Machine, value: int, caller: Caller) -> bytes:
    version = machine.devices.versions.get(caller.task_id, 1)
    return d.ConnectResponse(session_id=_session_of(machine, version)).SerializeToString()


def _encode_devices(machine: Machine, value: list[tuple[int, Node, int]], caller: Caller) -> bytes:
    newer = machine.devices.versions.get(caller.task_id, 1) >= _RENUMBERED
    response: Any = d.EnumerateDevicesResponse3() if newer else d.EnumerateDevicesResponse()
    for node_id, node, first in value:
        entry = response.global_topology.nodes.add(node_id=node_id)
        if newer:
            entry.boot_id = node.boot_id
        for place, device in enumerate(node.devices):
            entry.devices.add().CopyFrom(device)
            entry.devices[place].global_device_id = first + place
    return bytes(response.SerializeToString())


def _encode_value(machine: Machine, value: tuple[str, bytes], caller: Caller) -> bytes:
    return d.KeyValueGetResponse(found=True, value=value[1]).SerializeToString()


def _nothing(machine: Machine, value: Any, caller: Caller) -> bytes:
    return b""


def _node(request: Any) -> tuple[int | None, int, int | None]:
    return request.node_id, 0, None


def _client(request: Any) -> tuple[int | None, int, int | None]:
    return (
        request.node_id,
        (request.client_id << 16 | (request.node_id + 1) & 0xFFFF) % 2**64 or 1,
        None,
    )


def _topology_node(request: Any) -> tuple[int | None, int, int | None]:
    return request.local_topology.node_id, 0, None


def _nobody(request: Any) -> tuple[int | None, int, int | None]:
    return -1, 0, None


_RPCS = {
    "Connect": Rpc(d.ConnectRequest.FromString, _client, _connect, _encode_connect, True, True),
    "EnumerateDevices": Rpc(_parse_enumerate, _topology_node, _enumerate, _encode_devices, True),
    "KeyValueGet": Rpc(d.KeyValueGetRequest.FromString, _nobody, _get, _encode_value, True),
    "KeyValueSet": Rpc(d.KeyValueSetRequest.FromString, _nobody, _set, _nothing),
    "WaitAtBarrier": Rpc(d.WaitAtBarrierRequest.FromString, _node, _barrier, _nothing),
    "Heartbeat": Rpc(d.HeartbeatRequest.FromString, _node, _heartbeat, _nothing),
    "Shutdown": Rpc(d.ShutdownRequest.FromString, _node, _shut_down, _nothing),
}
RPCS_D = {PROFILE_D + name: rpc for name, rpc in _RPCS.items()}
