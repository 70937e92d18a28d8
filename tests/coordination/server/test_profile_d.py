"""Profile D, spoken by a client that is written from the .proto alone."""

from __future__ import annotations

import threading

import grpc
import pytest

from holdfast.coordination import CoordinationService
from holdfast.coordination.names import PROFILE_D
from holdfast.proto import distributed_runtime_pb2 as d


class OldClient:
    """A client of profile D, written from the .proto alone."""

    def __init__(self, address: str, node_id: int, version: int) -> None:
        self.channel = grpc.insecure_channel(address)
        self.node_id = node_id
        self.version = version
        self.session_id = 0

    def call(self, method: str, request: object, response: type) -> object:
        path = PROFILE_D + method
        return self.channel.unary_unary(
            path, lambda message: message.SerializeToString(), response.FromString
        )(request, timeout=30)  # type: ignore[attr-defined]

    def connect(self) -> None:
        request = d.ConnectRequest(
            protocol_version=self.version,
            timeout_milliseconds=20_000,
            node_id=self.node_id,
            client_id=self.node_id + 77,
        )
        self.session_id = self.call("Connect", request, d.ConnectResponse).session_id  # type: ignore[attr-defined]


@pytest.mark.parametrize("version", [1, 3])
def test_profile_d_serves_four_nodes(version: int) -> None:
    """Connect blocks for all, devices are numbered densely in node order, keys wait, barriers
    repeat, shutdown blocks for all.
    """
    request_type, response_type, topology_type = (
        (d.EnumerateDevicesRequest3, d.EnumerateDevicesResponse3, d.LocalTopologyProto3)
        if version == 3
        else (d.EnumerateDevicesRequest, d.EnumerateDevicesResponse, d.LocalTopologyProto)
    )
    topologies: dict[int, object] = {}

    def run(client: OldClient) -> None:
        node_id = client.node_id
        client.connect()
        devices = [
            d.DeviceProto(local_device_ordinal=ordinal, name=f"n{node_id}d{ordinal}")
            for ordinal in reversed(range(node_id + 1))
        ]
        local = topology_type(node_id=node_id, devices=devices)
        if version == 3:
            local.boot_id = f"boot {node_id}"
        topologies[node_id] = client.call(
            "EnumerateDevices",
            request_type(session_id=client.session_id, local_topology=local),
            response_type,
        )
        value = f"from {node_id}".encode()
        client.call(
            "KeyValueSet",
            d.KeyValueSetRequest(session_id=client.session_id, key=b"k/%d" % node_id, value=value),
            d.KeyValueSetResponse,
        )
        get = d.KeyValueGetRequest(
            session_id=client.session_id, key=b"k/%d" % (3 - node_id), timeout_milliseconds=10_000
        )
        found = client.call("KeyValueGet", get, d.KeyValueGetResponse)
        assert (found.found, found.value) == (True, f"from {3 - node_id}".encode())  # type: ignore[attr-defined]
        for _ in range(2):
            barrier = d.WaitAtBarrierRequest(
                session_id=client.session_id,
                barrier_id=b"b",
                node_id=node_id,
                timeout_milliseconds=10_000,
            )
            client.call("WaitAtBarrier", barrier, d.WaitAtBarrierResponse)
        client.call(
            "Heartbeat",
            d.HeartbeatRequest(session_id=client.session_id, node_id=node_id),
            d.HeartbeatResponse,
        )
        client.call(
            "Shutdown",
            d.ShutdownRequest(session_id=client.session_id, node_id=node_id),
            d.ShutdownResponse,
        )
        client.channel.close()
        ended.append(node_id)

    ended: list[int] = []
    with CoordinationService.spawn(4) as service:
        threads = [
            threading.Thread(target=run, args=(OldClient(service.address, node_id, version),))
            for node_id in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert sorted(ended) == [0, 1, 2, 3]
    numbered = [
        (device.name, device.global_device_id)
        for node in topologies[2].global_topology.nodes
        for device in node.devices
    ]  # type: ignore[attr-defined]
    assert numbered == [
        (f"n{node_id}d{ordinal}", node_id * (node_id + 1) // 2 + ordinal)
        for node_id in range(4)
        for ordinal in range(node_id + 1)
    ]
    assert all(topology == topologies[0] for topology in topologies.values())


def test_profile_d_says_what_is_wrong() -> None:
    """An unknown session or version is INVALID_ARGUMENT, a key that does not come NOT_FOUND, a node
    that does not come named.
    """
    with CoordinationService.spawn(2) as service:
        client = OldClient(service.address, 0, 9)
        with pytest.raises(grpc.RpcError, match="expected 1, 2 or 3"):
            client.connect()
        client.version = 1
        with pytest.raises(grpc.RpcError, match="the session is not one of this service"):
            client.call("Heartbeat", d.HeartbeatRequest(session_id=5), d.HeartbeatResponse)
        request = d.ConnectRequest(protocol_version=1, timeout_milliseconds=300, node_id=0)
        with pytest.raises(grpc.RpcError, match="1 of 2 registered, missing process 1"):
            client.call("Connect", request, d.ConnectResponse)
        other = OldClient(service.address, 1, 1)
        threads = [threading.Thread(target=each.connect) for each in (client, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        get = d.KeyValueGetRequest(
            session_id=client.session_id, key=b"never", timeout_milliseconds=100
        )
        with pytest.raises(grpc.RpcError, match="NOT_FOUND"):
            client.call("KeyValueGet", get, d.KeyValueGetResponse)
        for each in (client, other):
            each.channel.close()
