"""Thousands of light clients, Sessions without holdfast's client, at a real coordinator: what they
cost it in CPU and memory.

    python benchmarks/light_clients.py [--clients 4096] [--workers 4]

All join, exchange their ids, pass 20 barriers, and wait at one that half of them miss. Then the
coordinator is stopped for two heartbeat timeouts, and all meet at 20 barriers again. In the end all
but one wait at a barrier while the coordinator is killed, and is started again with its journal.
Each client is one stream over a connection of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.scale import ids_of
from holdfast.coordination import (
    CoordinationError,
    CoordinationService,
    Endpoint,
    ServiceTimeouts,
    StatusClient,
)
from holdfast.coordination.client.stream import hello_of
from holdfast.coordination.names import MISSING_TYPE
from holdfast.coordination.wire.frames import HEAD_BYTES, PREAMBLE, framed
from holdfast.proto import coordination_pb2, session_pb2

BARRIERS = 20
HEARTBEAT_TIMEOUT_S = 12.0
HELLO = hello_of(())
BROKEN = (OSError, EOFError)
RECONNECT_S = 2.0  # all Sessions break at one moment, and come again within so long
AT_ONCE = 64  # clients of a worker that connect at a time


@dataclass(frozen=True, slots=True)
class LightCall:
    """A request without an answer so far."""

    frame: bytes
    answer: asyncio.Future[session_pb2.Reply]


class LightClient:
    """One Session; `received_bytes` counts what came."""

    def __init__(self, address: str, process_id: int) -> None:
        self.process_id = process_id
        self.received_bytes = 0
        self._address = address
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._number = 0
        self._calls: dict[int, LightCall] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def join(self) -> None:
        await self._open()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._beat())]

    async def _open(self) -> None:
        host, _, port = self._address.rpartition(":")
        self._reader, self._writer = await asyncio.open_connection(host, int(port))
        opening = session_pb2.Open(
            process_id=self.process_id, incarnation=self.process_id + 1, host="light"
        )
        frame = session_pb2.ClientFrame(open=opening).SerializeToString()
        self._writer.write(PREAMBLE + framed(HELLO) + framed(frame))
        assert await self._reader.readexactly(len(PREAMBLE)) == PREAMBLE
        first = session_pb2.ServerFrame.FromString(await self._next())
        assert first.HasField("opened"), first

    async def _next(self) -> bytes:
        assert self._reader is not None
        head = await self._reader.readexactly(HEAD_BYTES)
        return await self._reader.readexactly(int.from_bytes(head, "big"))

    async def _reopen(self) -> None:
        """Opens the Session again where it has broken, and sends again what has no answer."""
        assert self._writer is not None
        self._writer.close()
        self._writer = None
        await asyncio.sleep(random.uniform(0.0, RECONNECT_S))
        while True:
            with contextlib.suppress(*BROKEN):
                await self._open()
                for call in self._calls.values():
                    self._send(call.frame)
                return
            await asyncio.sleep(1.0)

    def _send(self, frame: bytes) -> None:
        if self._writer is not None:  # `_reopen` sends it again
            self._writer.write(framed(frame))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_TIMEOUT_S / 4)
            self._number += 1
            request = session_pb2.Request(id=self._number, method="Heartbeat")
            self._send(session_pb2.ClientFrame(request=request).SerializeToString())

    async def _read(self) -> None:
        while True:
            try:
                data = await self._next()
            except BROKEN:
                await self._reopen()
                continue
            self.received_bytes += len(data)
            frame = session_pb2.ServerFrame.FromString(data)
            if frame.reply.id in self._calls:
                self._calls.pop(frame.reply.id).answer.set_result(frame.reply)

    async def call(self, method: str, message: Any) -> session_pb2.Reply:
        self._number += 1
        request = session_pb2.Request(
            id=self._number, method=method, body=message.SerializeToString()
        )
        frame = session_pb2.ClientFrame(request=request).SerializeToString()
        call = LightCall(frame, asyncio.get_running_loop().create_future())
        self._calls[self._number] = call
        self._send(frame)
        return await call.answer


def wait_for_file(path: Path) -> None:
    while not path.exists():
        time.sleep(0.1)


async def work(address: str, first: int, count: int, total: int) -> None:
    """Serves commands on stdin, each answered by the bytes that its clients received meanwhile."""
    clients = [LightClient(address, first + index) for index in range(count)]
    for start in range(0, count, AT_ONCE):
        await asyncio.gather(*(client.join() for client in clients[start : start + AT_ONCE]))

    async def run(what: str, client: LightClient) -> None:
        if what == "register":
            await client.call("RegisterTask", coordination_pb2.RegisterTaskRequest())
        elif what == "ids" and client.process_id == 0:
            entry = coordination_pb2.KeyValueEntry(key="ids", value=ids_of(total))
            await client.call("InsertKeyValue", coordination_pb2.InsertKeyValueRequest(kv=entry))
        elif what == "ids":
            get = coordination_pb2.GetKeyValueRequest(key="ids")
            reply = await client.call("GetKeyValue", get)
            held = coordination_pb2.GetKeyValueResponse.FromString(reply.body)
            assert held.kv.value[:2] == zlib.compress(b"")[:2]
        elif what == "barrier":
            for _ in range(BARRIERS):
                reply = await barrier(client, "step", 300_000)
                assert reply.code == 0, reply.message
        elif what.startswith("held "):
            if client.process_id == 0:
                await asyncio.to_thread(wait_for_file, Path(what[5:]))
            reply = await barrier(client, "held", 300_000)
            assert reply.code == 0, reply.message
        elif what == "half" and client.process_id % 2 == 0:
            reply = await barrier(client, "half", 20_000)
            missing = session_pb2.Missing.FromString(reply.payloads[MISSING_TYPE])
            bits = int.from_bytes(zlib.decompress(missing.everyone), "little")
            assert bits.bit_count() == total // 2

    counters: dict[tuple[int, str], int] = {}

    async def barrier(client: LightClient, name: str, timeout_ms: int) -> session_pb2.Reply:
        key = (client.process_id, name)
        counter = counters.get(key, 0)
        counters[key] = counter + 1
        request = coordination_pb2.BarrierRequest(
            barrier_id=name, barrier_timeout_in_ms=timeout_ms, counter=counter
        )
        return await client.call("Barrier", request)

    print("ready", flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        before = sum(client.received_bytes for client in clients)
        await asyncio.gather(*(run(line.strip(), client) for client in clients))
        print(sum(client.received_bytes for client in clients) - before, flush=True)
    os._exit(0)


class Crowd:
    """The workers, and the coordinator that is measured."""

    def __init__(self, service: CoordinationService, total: int) -> None:
        self.service = service
        self.total = total
        self._workers: list[asyncio.subprocess.Process] = []
        self._cpu_s = 0.0

    async def start(self, workers: int) -> None:
        begun_s = time.perf_counter()
        share = self.total // workers
        for index in range(workers):
            numbers = map(str, (index * share, share, self.total))
            command = (sys.executable, __file__, "--work", self.service.address, *numbers)
            pipe = asyncio.subprocess.PIPE
            self._workers.append(
                await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
            )
        for worker in self._workers:
            assert worker.stdout is not None
            assert await worker.stdout.readline() == b"ready\n"
        self._show("open", begun_s, 0)

    async def run(self, command: str, name: str = "") -> None:
        """Has all clients do something, and prints what it cost the coordinator."""
        begun_s = time.perf_counter()
        self._begin(command)
        await self._end(name or command, begun_s)

    async def kill(self, go_on: Path, arguments: Mapping[str, Any]) -> None:
        """Kills the coordinator while all but one wait at a barrier, and starts it again."""
        self._begin(f"held {go_on}")
        await asyncio.to_thread(self._wait_for_arrivals, self.total - 1)
        port = int(self.service.address.rpartition(":")[2])
        begun_s = time.perf_counter()
        os.kill(self.service.pid, signal.SIGKILL)
        self.service.wait(10)
        self._cpu_s = 0.0
        self.service = CoordinationService.spawn(
            self.total, endpoint=Endpoint(port=port), **arguments
        )
        await asyncio.to_thread(self._wait_for_arrivals, self.total - 1)
        self._show("killed in a barrier, and its journal read", begun_s, 0)
        go_on.touch()
        await self._end("all come again, and pass that barrier", time.perf_counter())

    def _wait_for_arrivals(self, count: int) -> None:
        with StatusClient(self.service.address, timeout_s=30) as client:
            while True:
                with contextlib.suppress(CoordinationError):
                    barriers = client.status().barriers
                    if any(len(barrier.waiting) == count for barrier in barriers):
                        return
                time.sleep(0.5)

    def _begin(self, command: str) -> None:
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.write(f"{command}\n".encode())

    async def _end(self, name: str, begun_s: float) -> None:
        received = 0
        for worker in self._workers:
            assert worker.stdout is not None
            received += int(await worker.stdout.readline())
        self._show(name, begun_s, received)

    def _show(self, name: str, begun_s: float, received: int) -> None:
        before_s = self._cpu_s
        fields = Path(f"/proc/{self.service.pid}/stat").read_text().rpartition(")")[2].split()
        self._cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        lines = Path(f"/proc/{self.service.pid}/status").read_text().splitlines()
        peak_mib = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
        wall_s = time.perf_counter() - begun_s
        print(
            f"| {name} | {self._cpu_s - before_s:.1f} | {wall_s:.0f} | {received / 2**20:.1f} |"
            f" {peak_mib:.0f} |",
            flush=True,
        )

    def connected(self) -> int:
        """Returns how many processes the coordinator takes for alive."""
        with StatusClient(self.service.address, timeout_s=30) as client:
            return sum(task.state == coordination_pb2.CONNECTED for task in client.status().tasks)

    async def end(self) -> None:
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.close()
            await worker.wait()
        self.service.close()


async def measure(total: int, workers: int) -> None:
    """Does all of it, and prints a Markdown table."""
    folder = Path(tempfile.mkdtemp(prefix="light-clients-"))
    arguments: dict[str, Any] = {
        "timeouts": ServiceTimeouts(heartbeat_s=HEARTBEAT_TIMEOUT_S),
        "recoverable": True,
        "journal": str(folder / "journal"),
    }
    crowd = Crowd(CoordinationService.spawn(total, **arguments), total)
    print("| load | coordinator, CPU s | wall s | MiB received | resident MiB, at most so far |")
    print("|---|---|---|---|---|")
    await crowd.start(workers)
    for command in ("register", "ids", "barrier", "half"):
        await crowd.run(command)
    os.kill(crowd.service.pid, signal.SIGSTOP)
    await asyncio.sleep(2 * HEARTBEAT_TIMEOUT_S)
    os.kill(crowd.service.pid, signal.SIGCONT)
    await crowd.run("barrier", "stopped for two timeouts, then 20 barriers")
    await crowd.kill(folder / "go-on", arguments)
    await crowd.run("barrier", "then 20 barriers")
    print(f"\n{crowd.connected()} of {total} are connected")
    shutil.rmtree(folder)
    await crowd.end()


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        address, first, count, total = sys.argv[2:6]
        asyncio.run(work(address, int(first), int(count), int(total)))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=4_096)
    parser.add_argument("--workers", type=int, default=4)
    given = parser.parse_args()
    asyncio.run(measure(given.clients, given.workers))


if __name__ == "__main__":
    main()
