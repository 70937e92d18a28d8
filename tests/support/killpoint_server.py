"""The fork server of killpoints.py: for each point a fresh root, a save in forked processes, and a look at what is left."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import shutil
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.checkpoint import CheckpointManager, KeepLast
from holdfast.coordination import HoldfastError, ProcessLost
from holdfast.multihost import Group, Solo

LIBRARY = ctypes.CDLL(None)
LIBRARY.killpoint_arm.argtypes = (ctypes.c_long, ctypes.c_int)
LIBRARY.killpoint_count.restype = ctypes.c_long


class PipeGroup:
    """A group of two over a socket pair: the other's death is the end of the stream."""

    count = 2

    def __init__(self, index: int, pipe: socket.socket) -> None:
        self.index = index
        self._pipe = pipe

    def _send(self, value: bytes) -> None:
        try:
            self._pipe.sendall(struct.pack("<I", len(value)) + value)
        except OSError:
            raise self._lost() from None

    def _receive(self) -> bytes:
        return self._exactly(struct.unpack("<I", self._exactly(4))[0])

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            try:
                part = self._pipe.recv(size - len(data))
            except OSError:
                part = b""
            if not part:
                raise self._lost()
            data += part
        return data

    def _lost(self) -> ProcessLost:
        return ProcessLost(f"process {1 - self.index} is gone", process=1 - self.index)

    def barrier(self, name: str, *, timeout_s: float) -> None:
        self._send(b"")
        self._receive()

    def gather(self, name: str, value: bytes, *, timeout_s: float) -> list[bytes] | None:
        self._send(value)
        other = self._receive()
        return None if self.index else [value, other]

    def broadcast(self, name: str, value: bytes | None, *, timeout_s: float) -> bytes:
        if value is None:
            return self._receive()
        self._send(value)
        return value

    def report(self, **progress: Any) -> None: ...


class Reader:
    """A data iterator: its state is what every process writes."""

    def __init__(self, at: int) -> None:
        self.at = at

    def get_state(self) -> int:
        return self.at

    def set_state(self, state: int) -> None:
        self.at = state


def items(step: int) -> dict[str, Any]:
    return {"state": {"a": np.arange(3000) + step, "b": {"c": np.full(7, step)}}, "data": Reader(step)}


def save(root: Path, step: int, group: Group, then: Callable[[], None] = lambda: None) -> str:
    """Saves one step; returns "saved", or the error's name. Any error that is not of the tree comes through."""
    try:
        with CheckpointManager(root, keep_policy=KeepLast(2), group=group) as manager:
            manager._cleaner.wait()
            manager.save(step, items=items(step))
            manager.wait_until_finished()
            then()
        return "saved"
    except HoldfastError as error:
        return type(error).__name__


def fork(work: Callable[[], Any]) -> tuple[int, int]:
    """Runs `work` in a child; returns its pid and a pipe on which it says, in JSON lines, how it went."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    try:
        os.close(read)
        os.write(write, json.dumps(work()).encode() + b"\n")
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(3)


def ended(child: tuple[int, int]) -> tuple[int, str]:
    pid, read = child
    with os.fdopen(read) as stream:
        said = stream.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said


def attempt(root: Path, processes: int, victim: int, point: int, error: int) -> dict[str, Any]:
    """Saves step 3 with `victim` armed; says how each process ended, whether any knew of the commit, and whether the point was reached."""
    pipes = socket.socketpair() if processes == 2 else ()

    def member(index: int) -> Any:
        for other, pipe in enumerate(pipes):
            if other != index:
                pipe.close()
        group = PipeGroup(index, pipes[index]) if pipes else Solo()
        known = root.parent / f"{root.name}.known{index}"
        if index == victim:
            LIBRARY.killpoint_arm(point, error)

        how = save(root, 3, group, lambda: os.mknod(known))  # a call that killpoint.c does not count
        reached = index != victim or LIBRARY.killpoint_count() > point
        LIBRARY.killpoint_arm(-1, 0)
        return [how, reached]

    children = [fork(lambda index=index: member(index)) for index in range(processes)]
    for pipe in pipes:
        pipe.close()
    results = [ended(child) for child in children]
    assert all(code in (0, -signal.SIGKILL) for code, _ in results), results
    said = [json.loads(text) if text else ["killed", True] for _, text in results]
    known = any((root.parent / f"{root.name}.known{index}").exists() for index in range(processes))
    return {"point": point, "how": [how for how, _ in said], "known": known, "reached": all(reached for _, reached in said)}


def check(root: Path, known: bool) -> list[int]:
    """Opens the root as the next attempt would: listed steps are exact, what was known is there, the next save leaves nothing behind."""
    with CheckpointManager(root, keep_policy=KeepLast(2), group=Solo()) as manager:
        manager._cleaner.wait()
        steps = manager.all_steps()
        assert 2 in steps and set(steps) <= {1, 2, 3} and (3 in steps or not known) and (1 in steps or 3 in steps), (steps, known)
        for step in steps:
            got = manager.restore(step)
            want = items(step)["state"]
            assert np.array_equal(got["a"], want["a"]) and np.array_equal(got["b"]["c"], want["b"]["c"]), step
            assert manager.restore(step, like=Reader(0), item="data").at == step
        manager.save(4, items=items(4))
        manager.wait_until_finished()
        kept = manager.all_steps()
    assert len(kept) == 2 and kept[-1] == 4, kept
    left = [path.relative_to(root) for path in root.rglob("*") if path.is_file()]
    assert {path.parts[0] for path in left} == {str(step) for step in kept}, left
    assert os.listdir(root / ".holdfast") == [] and len(os.listdir(root)) == 3, os.listdir(root)
    packs = [path for path in left if path.suffix == ".safetensors"]
    assert len(packs) == 2, left
    return steps


def make(root: Path) -> bool:
    with CheckpointManager(root, group=Solo()) as manager:
        for step in (1, 2):
            manager.save(step, items=items(step))
    return True


def main() -> None:
    logging.disable(logging.WARNING)
    scratch, processes, victim, error, points = Path(sys.argv[1]), *map(int, sys.argv[2:5]), json.loads(sys.argv[5])
    template = scratch / "template"
    assert ended(fork(lambda: make(template)))[0] == 0
    for point in points:
        root = scratch / str(point)
        shutil.copytree(template, root)
        found = attempt(root, processes, victim, point, error)
        code, said = ended(fork(lambda root=root, found=found: check(root, found["known"])))
        assert code == 0, (found, code)
        print(json.dumps(found | {"steps": json.loads(said)}), flush=True)
        shutil.rmtree(root)
        if not found["reached"]:
            return


main()
