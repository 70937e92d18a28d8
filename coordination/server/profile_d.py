"""Profile D: xla.DistributedRuntimeService of jaxlib up to 0.4.14, as events of the machine.

Connect stands for RegisterTask and returns a session, which every other call names: one for each
version of the protocol, so that a call shows how its messages are numbered. Keys, heartbeats and
shutdown are those of the other profiles. A barrier has no counter here: the nth call of a node
matches the nth of the others. A get whose time is over is NOT_FOUND.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from google.protobuf.message import Message

from holdfast.proto import distributed_runtime_pb2 as d

from ..core.barriers import Arrival
from ..core.calls import Call
from ..core.devices import Node
from ..core.machine import Machine
from ..core.status import Code
from ..names import PROFILE_D, Claim
from .profiles import Requested, Rpc, Run, profile, registered

_VERSIONS = (1, 2, 3)
_RENUMBERED = 3  # the version from which on LocalTopologyProto has a boot id
_VERSION_BITS = 3


def _session_of(machine: Machine, version: int) -> int:
    return (machine.config.incarnation & ~_VERSION_BITS) | version


def _known(run: Run) -> Run:
    """Returns `run` for calls that name a session of ours. The others are refused."""

    def checked(machine: Machine, call: Requested) -> None:
        if call.request.session_id in [_session_of(machine, version) for version in _VERSIONS]:
            run(machine, call)
            return
        sentence = "the session is not one of this service; expected one that Connect has returned"
        call.refuse(Code.INVALID_ARGUMENT, sentence)

    return checked


def _name(call: Call, name: bytes) -> str | None:
    """Returns the name of a key or a barrier, None after an answer where it is no text."""
    try:
        return name.decode()
    except UnicodeDecodeError:
        sentence = f"a name of UTF-8 was expected; found {name[:40]!r}"
        call.refuse(Code.INVALID_ARGUMENT, sentence)
        return None


def _limit(call: Requested) -> None:
    """Has a call wait as long as its request says."""
    call.wait_until(call.came + int(call.request.timeout_milliseconds) / 1000)


def _connect(machine: Machine, call: Requested) -> None:
    version = call.request.protocol_version
    if version not in _VERSIONS:
        sentence = f"protocol version {version} is not spoken here; expected 1, 2 or 3"
        call.refuse(Code.INVALID_ARGUMENT, sentence)
        return
    machine.devices.versions[call.task_id] = version
    if call.request.timeout_milliseconds > 0:
        _limit(call)
    machine.registration.register(call)


@_known
def _enumerate(machine: Machine, call: Requested) -> None:
    topology = call.request.local_topology
    node_id = topology.node_id
    if not machine.task_table.connected(node_id):
        sentence = f"node {node_id} has not connected; expected Connect before EnumerateDevices"
        call.refuse(Code.INVALID_ARGUMENT, sentence)
        return
    devices = sorted(topology.devices, key=lambda device: int(device.local_device_ordinal))
    node = Node(devices, getattr(topology, "boot_id", ""))
    machine.devices.enumerate(call, node_id, node)


@_known
def _get(machine: Machine, call: Requested) -> None:
    if (key := _name(call, call.request.key)) is not None:
        _limit(call)
        machine.keys.get(call, key)


@_known
def _set(machine: Machine, call: Requested) -> None:
    if (key := _name(call, call.request.key)) is not None:
        machine.keys.insert(call, key, call.request.value, allow_overwrite=True)


@_known
@registered
def _barrier(machine: Machine, call: Requested) -> None:
    if (name := _name(call, call.request.barrier_id)) is not None:
        _limit(call)
        machine.barrier(Arrival(call, name, machine.barriers.counter_for(name, call.task_id)))


def _parse_enumerate(body: bytes) -> Any:
    version = d.HeartbeatRequest.FromString(body).session_id & _VERSION_BITS
    if version >= _RENUMBERED:
        return d.EnumerateDevicesRequest3.FromString(body)
    return d.EnumerateDevicesRequest.FromString(body)


def _encode_connect(machine: Machine, call: Call) -> Message:
    version = machine.devices.versions.get(call.task_id, 1)
    return d.ConnectResponse(session_id=_session_of(machine, version))


def _encode_devices(machine: Machine, call: Call) -> Message:
    newer = machine.devices.versions.get(call.task_id, 1) >= _RENUMBERED
    response: Any = d.EnumerateDevicesResponse3() if newer else d.EnumerateDevicesResponse()
    for node_id, node, first in call.value:
        entry = response.global_topology.nodes.add(node_id=node_id)
        if newer:
            entry.boot_id = node.boot_id
        for number, device in enumerate(node.devices, start=first):
            numbered = entry.devices.add()
            numbered.CopyFrom(device)
            numbered.global_device_id = number
    message: Message = response
    return message


def _encode_value(machine: Machine, call: Call) -> Message:
    return d.KeyValueGetResponse(found=True, value=call.value[1])


def _client(request: Any) -> Claim:
    # client ids of two nodes may be equal, incarnations may not
    incarnation = (request.client_id << 16 | (request.node_id + 1) & 0xFFFF) % 2**64
    return Claim(request.node_id, incarnation or 1)


def _topology_node(request: Any) -> Claim:
    return Claim(request.local_topology.node_id)


_RPCS = profile(
    d,
    {
        "Connect": Rpc(_connect, _encode_connect, claim=_client, waits=True, registers=True),
        "EnumerateDevices": Rpc(_enumerate, _encode_devices, claim=_topology_node, waits=True),
        "KeyValueGet": Rpc(_get, _encode_value, waits=True, late=Code.NOT_FOUND),
        "KeyValueSet": Rpc(_set),
        "WaitAtBarrier": Rpc(_barrier),
        "Heartbeat": Rpc(_known(Machine.heartbeat)),
        "Shutdown": Rpc(_known(Machine.shut_down)),
    },
)
_RPCS["EnumerateDevices"] = replace(_RPCS["EnumerateDevices"], parse=_parse_enumerate)
RPCS_D = {PROFILE_D + name: rpc for name, rpc in _RPCS.items()}
