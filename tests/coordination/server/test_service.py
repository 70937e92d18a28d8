"""The service as a process: unmodified jax programs, profile D, its beginning and its end, and what it tells of itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import grpc
import pytest

from holdfast.coordination import CoordinationClient, CoordinationError, CoordinationService
from holdfast.proto import distributed_runtime_pb2 as d
from tests.support.cluster import Processes, run_processes
from tests.support.jax_program import BIND, JAX_PROGRAM, preempted_at


def coordinator(*options: str) -> list[str]:
    return [sys.executable, "-c", "from holdfast.cli import main; main()", *options]


@pytest.mark.parametrize("options", [(), pytest.param(("--public-api",), marks=pytest.mark.slow)], ids=["completion-queue", "grpc.aio"])
def test_an_unmodified_jax_program_runs_on_four_processes(options: tuple[str, ...]) -> None:
    """Devices, syncs, broadcast, all-gather, live_devices, the SIGTERM sync point and shutdown; then the coordinator ends by itself."""
    with CoordinationService.spawn(4, arguments=options) as service:
        outputs = run_processes(JAX_PROGRAM, 4, arguments=[service.address], env=BIND)
        assert len(preempted_at(outputs)) == 1, outputs
        assert service.wait(20) == 0


SURVIVOR = """
import os, sys, time
import jax
index, count, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
jax.config.update("jax_enable_recoverability", True)
jax.distributed.initialize(address, count, index, heartbeat_timeout_seconds=4)
from jax._src import distributed
client = distributed.global_state.client
client.wait_at_barrier("all", 60_000)
print("together", flush=True)
if index == 0:
    time.sleep(100)
while True:
    try:
        client.wait_at_barrier("again", 60_000)
        raise SystemExit("passed without process 0")
    except jax.errors.JaxRuntimeError as error:
        print(error, flush=True)
        break
rest = list(range(1, count))
for step in range(20):
    client.wait_at_barrier(f"rest {step}", 60_000, rest)
client.key_value_set(f"done/{index}", "1")
print("went on", flush=True)
os._exit(0)
"""


def test_the_others_go_on_when_process_0_is_killed() -> None:
    """With --recoverable, SIGKILL of process 0 of an unmodified jax job: the others hear who is lost and go on."""
    with CoordinationService.spawn(4, recoverable=True, heartbeat_timeout_s=6) as service:
        with Processes(SURVIVOR, 4, arguments=[service.address], env=BIND) as processes:
            for index in range(4):
                processes.wait_for(index, "together")
            processes.kill(0)
            finished = processes.wait(60)
    assert [each.code for each in finished] == [-signal.SIGKILL, 0, 0, 0], [each.output for each in finished]
    for each in finished[1:]:
        assert "it can never be passed: process 0 (silent for" in each.output and "went on" in each.output


# ---- Profile D ---------------------------------------------------------------------------------------------------------------------


class OldClient:
    """A client of profile D, written from the .proto alone."""

    def __init__(self, address: str, node_id: int, version: int) -> None:
        self.channel = grpc.insecure_channel(address)
        self.node_id, self.version = node_id, version
        self.session_id = 0

    def call(self, method: str, request: object, response: type) -> object:
        path = f"/xla.DistributedRuntimeService/{method}"
        return self.channel.unary_unary(path, lambda message: message.SerializeToString(), response.FromString)(request, timeout=30)  # type: ignore[attr-defined]

    def connect(self) -> None:
        request = d.ConnectRequest(
            protocol_version=self.version, timeout_milliseconds=20_000, node_id=self.node_id, client_id=self.node_id + 77
        )
        self.session_id = self.call("Connect", request, d.ConnectResponse).session_id  # type: ignore[attr-defined]


@pytest.mark.parametrize("version", [1, 3])
def test_profile_d_serves_four_nodes(version: int) -> None:
    """Connect blocks for all, devices are numbered densely in node order, keys wait, barriers repeat, shutdown blocks for all."""
    request_type, response_type, topology_type = (
        (d.EnumerateDevicesRequest3, d.EnumerateDevicesResponse3, d.LocalTopologyProto3)
        if version == 3
        else (d.EnumerateDevicesRequest, d.EnumerateDevicesResponse, d.LocalTopologyProto)
    )
    topologies: dict[int, object] = {}

    def run(client: OldClient) -> None:
        node_id = client.node_id
        client.connect()
        devices = [d.DeviceProto(local_device_ordinal=ordinal, name=f"n{node_id}d{ordinal}") for ordinal in reversed(range(node_id + 1))]
        local = topology_type(node_id=node_id, devices=devices)
        if version == 3:
            local.boot_id = f"boot {node_id}"
        topologies[node_id] = client.call(
            "EnumerateDevices", request_type(session_id=client.session_id, local_topology=local), response_type
        )
        value = f"from {node_id}".encode()
        client.call(
            "KeyValueSet", d.KeyValueSetRequest(session_id=client.session_id, key=b"k/%d" % node_id, value=value), d.KeyValueSetResponse
        )
        get = d.KeyValueGetRequest(session_id=client.session_id, key=b"k/%d" % (3 - node_id), timeout_milliseconds=10_000)
        found = client.call("KeyValueGet", get, d.KeyValueGetResponse)
        assert (found.found, found.value) == (True, f"from {3 - node_id}".encode())  # type: ignore[attr-defined]
        for _ in range(2):
            barrier = d.WaitAtBarrierRequest(session_id=client.session_id, barrier_id=b"b", node_id=node_id, timeout_milliseconds=10_000)
            client.call("WaitAtBarrier", barrier, d.WaitAtBarrierResponse)
        client.call("Heartbeat", d.HeartbeatRequest(session_id=client.session_id, node_id=node_id), d.HeartbeatResponse)
        client.call("Shutdown", d.ShutdownRequest(session_id=client.session_id, node_id=node_id), d.ShutdownResponse)
        client.channel.close()
        ended.append(node_id)

    ended: list[int] = []
    with CoordinationService.spawn(4) as service:
        threads = [threading.Thread(target=run, args=(OldClient(service.address, node_id, version),)) for node_id in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert sorted(ended) == [0, 1, 2, 3]
    told = [(device.name, device.global_device_id) for node in topologies[2].global_topology.nodes for device in node.devices]  # type: ignore[attr-defined]
    assert told == [
        (f"n{node_id}d{ordinal}", node_id * (node_id + 1) // 2 + ordinal) for node_id in range(4) for ordinal in range(node_id + 1)
    ]
    assert all(topology == topologies[0] for topology in topologies.values())


def test_profile_d_tells_what_is_wrong() -> None:
    """An unknown session or version is INVALID_ARGUMENT, a key that does not come NOT_FOUND, a node that does not come named."""
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
        get = d.KeyValueGetRequest(session_id=client.session_id, key=b"never", timeout_milliseconds=100)
        with pytest.raises(grpc.RpcError, match="NOT_FOUND"):
            client.call("KeyValueGet", get, d.KeyValueGetResponse)
        for each in (client, other):
            each.channel.close()


# ---- Beginning and end -------------------------------------------------------------------------------------------------------------


def test_the_command_prints_one_line_and_ends_at_sigterm() -> None:
    """`coordinator at HOST:PORT` is all of its output."""
    with subprocess.Popen(coordinator("coordinator", "--num-processes", "2"), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.terminate()
        assert process.wait(20) == 0 and line.startswith("coordinator at 127.0.0.1:") and process.stdout.read() == ""


def test_nobody_came() -> None:
    """A coordinator that no process comes to ends by itself."""
    with CoordinationService.spawn(2, startup_timeout_s=0.5) as service:
        assert service.wait(20) == 0


def test_all_are_dead() -> None:
    """A coordinator ends once every process has stayed dead for the time that was stated."""
    with CoordinationService.spawn(1, heartbeat_timeout_s=1, linger_s=1, recoverable=True) as service:
        script = f"""
        import os
        from holdfast.coordination import CoordinationClient
        CoordinationClient({service.address!r}, 0).connect()
        os._exit(0)
        """
        run_processes(script, 1)
        assert service.wait(30) == 0


def test_a_spawned_coordinator_outlives_who_spawned_it() -> None:
    """It is a session of its own: its spawner's end, and a signal to its group, do not reach it."""
    script = """
    import os, signal
    from holdfast.coordination import CoordinationService
    service = CoordinationService.spawn(1, startup_timeout_s=60)
    print(service.pid, service.address, flush=True)
    assert os.getsid(service.pid) == service.pid
    os._exit(0)
    """
    (output,) = run_processes(script, 1)
    pid, address = output.split()
    try:
        with CoordinationClient(address, 0) as client:
            client.key_value_set("a", "b")
            assert client.key_value_try_get("a") == "b"
    finally:
        os.kill(int(pid), signal.SIGTERM)


def test_a_taken_port_is_refused() -> None:
    """The second server of a port does not start, and says why."""
    with CoordinationService.spawn(1) as service:
        port = int(service.address.rsplit(":", 1)[1])
        with pytest.raises(CoordinationError, match=f"cannot listen at 127.0.0.1:{port}"):
            CoordinationService.spawn(1, port=port)


# ---- What it tells -----------------------------------------------------------------------------------------------------------------


def test_status_shows_who_waits_and_who_is_missing() -> None:
    """`holdfast status --json` names a barrier's waiters and the missing, progress, hosts and keys; the table holds the same."""
    with CoordinationService.spawn(2, job="digits", attempt=3) as service:
        clients = [CoordinationClient(service.address, process_id) for process_id in range(2)]
        threads = [threading.Thread(target=client.connect) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        clients[0].key_value_set("dir/key", "value")
        waiting = threading.Thread(target=clients[0].wait_at_barrier, args=("save/100", 60_000))
        waiting.start()
        shown: dict[str, object] = {}
        while not shown.get("barriers"):
            output = subprocess.run(coordinator("status", service.address, "--json"), capture_output=True, check=True, text=True).stdout
            shown = json.loads(output)
        (barrier,) = shown["barriers"]  # type: ignore[misc]
        assert barrier["barrier_id"] == "save/100" and barrier["missing"] == [1] and [each["task_id"] for each in barrier["waiting"]] == [0]
        assert [task["state"] for task in shown["tasks"]] == ["CONNECTED"] * 2 and shown["job"] == "digits"  # type: ignore[union-attr]
        assert shown["prefixes"][0]["prefix"] == "dir"  # type: ignore[index]
        table = subprocess.run(coordinator("status", service.address), capture_output=True, check=True, text=True).stdout
        assert "job digits attempt 3, 2 processes, running" in table and "save/100" in table
        clients[1].wait_at_barrier("save/100", 60_000)
        waiting.join(30)
        for thread in [threading.Thread(target=client.shutdown) for client in clients]:
            thread.start()
        assert service.wait(30) == 0


def test_status_of_nobody_is_an_error() -> None:
    """An address where nothing answers is one sentence and exit code 1."""
    ended = subprocess.run(coordinator("status", "127.0.0.1:1", "--timeout-s", "0.5"), capture_output=True, check=False, text=True)
    assert ended.returncode == 1 and ended.stderr.startswith("Error: 127.0.0.1:1: DEADLINE_EXCEEDED")


def test_prometheus_scrapes_the_service(tmp_path: Path) -> None:
    """`--metrics-port` serves processes by state, heartbeat ages, keys, barriers and calls on loopback."""
    command = coordinator("coordinator", "-n", "2", "--metrics-port", "0")
    with (tmp_path / "stderr").open("w+") as stderr:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            stderr.seek(0)
            url = stderr.read().split("metrics at ")[1].split()[0]
            with urllib.request.urlopen(url, timeout=20) as page:
                text = page.read().decode()
            process.terminate()
            process.wait(20)
    assert 'holdfast_processes{state="uninitialized"} 2.0' in text and "holdfast_barriers_passed_total 0.0" in text
