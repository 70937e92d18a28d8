"""Jobs whose processes run on hosts of their own: a network namespace with a tmpfs each. They do
what a test tells them, call by call.

Processes are forked from a server that has imported jax and holdfast, and nothing else, so that a
life of a job costs little.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import importlib
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
import pytest

import holdfast.multihost as multihost
from holdfast.checkpoint import AtSteps, CheckpointManager, EveryNSteps, Local, Options
from holdfast.checkpoint.local_tier.local_steps import LocalSteps
from holdfast.checkpoint.saving.stager import SaveOrder
from holdfast.coordination import CoordinationService, Endpoint, ServiceTimeouts
from tests.support.network import Network, namespaces

ANSWER_S = 60.0
NEW_NETWORK = 0x40000000  # CLONE_NEWNET
ROWS = 60  # of the sharded array: what 1 to 6 devices share evenly

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["__main__", __name__])


def enter(namespace: str) -> None:
    """Moves this thread, and the processes that it starts, into a network namespace; os.setns is
    there since Python 3.12.
    """
    file = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    failed = ctypes.CDLL(None, use_errno=True).setns(file, NEW_NETWORK)
    os.close(file)
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), namespace)


class Hosts:
    """Hosts on one bridge, each with memory of its own: `folders[i]` is a tmpfs of `size_bytes` and
    4096 files.
    """

    def __init__(self, network: Network, folder: Path, size_bytes: int) -> None:
        self.network = network
        self._size_bytes = size_bytes
        self.folders = [folder / f"h{index}" for index in range(len(network.names))]

    def mount(self, index: int) -> None:
        """Gives a host empty memory."""
        self.folders[index].mkdir(parents=True, exist_ok=True)
        options = f"size={self._size_bytes},nr_inodes=4096,mode=700"
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.folders[index])],
            check=True,
            capture_output=True,
        )

    def lose(self, *indices: int) -> None:
        """Takes all away that hosts had. Nobody may have a file open there."""
        for index in indices:
            subprocess.run(["umount", str(self.folders[index])], check=True, capture_output=True)
            self.mount(index)

    def unmount(self) -> None:
        """Takes the memory of all hosts away, whoever uses it."""
        for folder in self.folders:
            subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=False)

    def copy(self, folder: Path) -> Path:
        """Copies what all hosts have, as a backup does."""
        for own in self.folders:
            shutil.copytree(own, folder / own.name)
        return folder

    def put_back(self, copy: Path, *indices: int) -> None:
        """Gives hosts (none named: all) what a copy has instead of what they have."""
        for index in indices or range(len(self.folders)):
            self.lose(index)
            shutil.copytree(
                copy / self.folders[index].name, self.folders[index], dirs_exist_ok=True
            )


@contextlib.contextmanager
def hosts(count: int, folder: Path, size_bytes: int = 64 << 20) -> Iterator[Hosts]:
    """Yields so many hosts; skips the test where there can be none."""
    with namespaces(count) as network:
        found = Hosts(network, folder, size_bytes)
        try:
            for index in range(count):
                try:
                    found.mount(index)
                except subprocess.CalledProcessError as error:
                    pytest.skip(f"no tmpfs can be mounted here: {error.stderr!r}")
            yield found
        finally:
            found.unmount()


# --- in the processes


@dataclass(frozen=True)
class Place:
    """Where a process runs, and how it opens the root."""

    rank: int
    count: int
    coordinator: str
    namespace: str
    root: Path
    folder: Path
    num_slices: int = 1
    every: int = 1000
    columns: int = 8  # of the sharded array
    local: dict[str, Any] | None = field(default_factory=dict)  # None: without a local tier


class Program:
    """A process of a job: it opens the root and makes the calls that it is told, each a function of
    the program and arguments.
    """

    def __init__(self, place: Place, pipe: Connection, may_go_on: Connection) -> None:
        self.place = place
        self._pipe = pipe
        self._may_go_on = may_go_on
        self._sending = threading.Lock()
        self.logged: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: self.logged.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("holdfast").addHandler(handler)
        enter(place.namespace)
        jax.config.update("jax_platforms", "cpu")
        spec = multihost.ProcessSpec(
            process_id=place.rank,
            num_processes=place.count,
            coordinator=place.coordinator,
            num_slices=place.num_slices,
            slice_id=place.rank * place.num_slices // place.count,
        )
        multihost.initialize(spec=spec, timeout_s=60, shutdown_timeout_s=20)
        self.mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
        self.manager = self._opened()

    def _opened(self) -> CheckpointManager:
        place = self.place
        tier = None
        if place.local is not None:
            settings = {
                "save_policy": AtSteps(()),
                "timeout_s": 20,
                "failure_domain": place.folder.name,
            } | place.local
            tier = Local(place.folder, **settings)
        options = Options(save_timeout_s=60, restore_timeout_s=60)
        return CheckpointManager(
            place.root, save_policy=EveryNSteps(place.every), options=options, local=tier
        )

    def reopen(self) -> None:
        """Closes the root and opens it again, as a new life does."""
        self.manager.close()
        self.manager = self._opened()

    def _array(self, step: int) -> np.ndarray[Any, Any]:
        return (
            np.arange(ROWS * self.place.columns, dtype=np.float32).reshape(ROWS, self.place.columns)
            + step
        )

    def state(self, step: int) -> dict[str, Any]:
        """Returns the state at a step: an array sharded over all devices, one that all have, and a
        number.
        """
        whole = self._array(step)

        def put(value: np.ndarray[Any, Any], *axes: str) -> jax.Array:
            sharding = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec(*axes))
            return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

        return {"sharded": put(whole, "x"), "all": put(whole[0]), "step": step}

    def is_state(self, found: Any) -> bool:
        """Says whether what came back is the state at the step that it names, to the bit."""
        wanted = {"sharded": self._array(found["step"]), "all": self._array(found["step"])[0]}
        shards = [(name, shard) for name in wanted for shard in found[name].addressable_shards]
        return all(
            np.array_equal(np.asarray(shard.data), wanted[name][shard.index])
            for name, shard in shards
        )

    def hold(self, module: str, name: str, turn: int) -> None:
        """Lets the `turn`th call from now on of a function ("Class.method" too) stand still before
        it begins, once, and announces it.
        """
        owner: Any = importlib.import_module(f"holdfast.{module}")
        *path, last = name.split(".")
        for each in path:
            owner = getattr(owner, each)
        held = getattr(owner, last)
        calls = []

        @functools.wraps(held)
        def standing(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            if len(calls) == turn:
                self.announce(f"at {name}")
                assert self._may_go_on.poll(
                    ANSWER_S
                )  # what is never read stays, for all that are held
            return held(*arguments, **options)

        setattr(owner, last, standing)

    def announce(self, text: str) -> None:
        """Tells the test something. Thread-safe."""
        self._send("event", text)

    def _send(self, kind: str, value: Any) -> None:
        with self._sending:
            self._pipe.send((kind, value))

    def serve(self) -> None:
        """Makes calls until there are none any more."""
        self._send("answer", None)
        while (message := self._pipe.recv()) is not None:
            call, arguments = message
            try:
                self._send("answer", call(self, *arguments))
            except Exception as error:
                self._send("error", f"{type(error).__name__}: {error}")
        self.manager.close()
        multihost.shutdown()


def _run(place: Place, pipe: Connection, may_go_on: Connection, stacks: Path) -> None:
    with open(stacks, "w") as file:
        faulthandler.enable(file)
        Program(place, pipe, may_go_on).serve()


# --- what they can be told


def begin(program: Program, step: int) -> None:
    """Begins a save: of every `place.every`th step a durable one, of others a local one, at this
    very step.
    """
    tier = program.manager._catalog.tier
    if not isinstance(tier, LocalSteps) or step % program.place.every == 0:
        program.manager.save(step, program.state(step))
    else:
        program.manager._parts.lanes[1].save(SaveOrder(step, program.state(step)))


def wait(program: Program) -> None:
    """Waits for the saves that were begun."""
    program.manager.wait_until_finished()


def wait_locally(program: Program) -> None:
    """Waits for the local save that was begun, whatever the durable one does."""
    tier = program.manager._catalog.tier
    assert isinstance(tier, LocalSteps)
    tier.saver.join()


def delete(program: Program, step: int) -> None:
    """Deletes a step."""
    program.manager.delete(step)


def save(program: Program, *steps: int) -> None:
    """Saves steps, one after the other."""
    for step in steps:
        begin(program, step)
        wait(program)


def restore(program: Program, step: int | None = None) -> int:
    """Restores a step, the newest if none is given, asserts that it is what was saved, and returns
    which it was.
    """
    found = program.manager.restore(step, like=program.state(0))
    assert program.is_state(found), f"step {found['step']} came back wrong"
    return int(found["step"])


def statistics(program: Program) -> dict[str, Any]:
    """Returns what the manager has counted."""
    return program.manager.statistics()


def steps(program: Program) -> tuple[list[int], list[int]]:
    """Returns all steps, and the local ones."""
    return program.manager.all_steps(), program.manager.local_steps()


def logged(program: Program) -> list[str]:
    """Returns what holdfast has logged."""
    return program.logged


# --- in the test


class HostJob:
    """One life of a job: a process for each rank, on the host that `places` names. A context
    manager; what runs at the end is killed.
    """

    def __init__(
        self, hosts: Hosts, root: Path, places: Sequence[int] | None = None, **settings: Any
    ) -> None:
        places = range(len(hosts.folders)) if places is None else places
        network = hosts.network
        count = len(places)
        self._stacks = root.parent
        self.root = root
        self._events: list[list[str]] = [[] for _ in places]
        self._answers: list[list[tuple[str, Any]]] = [[] for _ in places]
        self._service = CoordinationService.spawn(
            count, endpoint=Endpoint(host=network.host), timeouts=ServiceTimeouts(heartbeat_s=100)
        )
        self.pipes = []
        self.processes = []
        self._go_on: list[Connection] = []  # no events: those wait for a process that is stopped
        for rank, host in enumerate(places):
            place = Place(
                rank,
                count,
                self._service.address,
                network.names[host],
                root,
                hosts.folders[host],
                **settings,
            )
            (own, other), (may_go_on, go_on) = _processes.Pipe(), _processes.Pipe(duplex=False)
            process = _processes.Process(
                target=_run, args=(place, other, may_go_on, self._stack_file(rank)), daemon=True
            )
            process.start()
            other.close()
            may_go_on.close()
            self.pipes.append(own)
            self._go_on.append(go_on)
            self.processes.append(process)
        self.ranks = list(range(count))

    def _stack_file(self, rank: int) -> Path:
        return self._stacks / f"stacks-{rank}.txt"

    def __enter__(self) -> Self:
        try:
            for rank in self.ranks:
                self.answer(rank)  # that it is open
        except BaseException:
            self.kill(*self.ranks)
            self._service.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            self.kill(*self.ranks)
            self._service.close()
            for pipe in [*self.pipes, *self._go_on]:
                pipe.close()

    def close(self) -> None:
        """Ends all processes that still run, in order."""
        running = [rank for rank in self.ranks if self.processes[rank].is_alive()]
        for rank in running:
            self.pipes[rank].send(None)
        for rank in running:
            self.processes[rank].join(ANSWER_S)
            assert self.processes[rank].exitcode == 0, (
                f"process {rank} ended with {self.processes[rank].exitcode}"
            )

    def kill(self, *ranks: int) -> None:
        """Kills processes, and waits until they are gone."""
        for rank in ranks:
            self.processes[rank].kill()
        for rank in ranks:
            self.processes[rank].join()

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Sends a signal to a process."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def begin(self, rank: int, call: Callable[..., Any], *arguments: Any) -> None:
        """Tells a process to make a call."""
        self.pipes[rank].send((call, arguments))

    def answer(self, rank: int, timeout_s: float = ANSWER_S) -> Any:
        """Returns what a process's call returned. Raises AssertionError with its error, or with its
        stacks where none came in time.
        """
        self._read(rank, lambda: bool(self._answers[rank]), timeout_s)
        kind, value = self._answers[rank].pop(0)
        assert kind == "answer", f"process {rank}: {value}"
        return value

    def wait_for(self, rank: int, event: str, timeout_s: float = ANSWER_S) -> None:
        """Waits until a process has announced something."""
        self._read(rank, lambda: event in self._events[rank], timeout_s)
        self._events[rank].remove(event)

    def _read(self, rank: int, enough: Callable[[], bool], timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while not enough():
            if not self.pipes[rank].poll(max(0.0, end - time.monotonic())):
                self.signal(rank, signal.SIGABRT)
                self.processes[rank].join(10)
                raise AssertionError(
                    f"process {rank} is silent:\n{self._stack_file(rank).read_text()}"
                )
            try:
                kind, value = self.pipes[rank].recv()
            except EOFError:
                raise AssertionError(
                    f"process {rank} has ended:\n{self._stack_file(rank).read_text()}"
                ) from None
            if kind == "event":
                self._events[rank].append(value)
            else:
                self._answers[rank].append((kind, value))

    def call(self, rank: int, call: Callable[..., Any], *arguments: Any) -> Any:
        """Makes one process make a call, and returns what it returned."""
        self.begin(rank, call, *arguments)
        return self.answer(rank)

    def each(self, call: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Makes all processes make a call, at once, and returns what they returned."""
        for rank in self.ranks:
            self.begin(rank, call, *arguments)
        return [self.answer(rank) for rank in self.ranks]

    def hold(self, rank: int, module: str, name: str, turn: int = 1) -> None:
        """Lets a process stand still where it makes a call, until `go_on`; it announces "at
        NAME".
        """
        self.call(rank, Program.hold, module, name, turn)

    def go_on(self, rank: int) -> None:
        """Lets a process go on that stands still, or will."""
        self._go_on[rank].send(True)

    def restore(self, step: int | None = None) -> int:
        """Restores on all processes, which assert that it is what was saved, and returns which step
        all of them got.
        """
        found = self.each(restore, step)
        assert len(set(found)) == 1, f"they restored {found}"
        return int(found[0])

    def statistics(self, name: str) -> list[Any]:
        """Returns one figure of the local tier of every process."""
        return [found[f"local_{name}"] for found in self.each(statistics)]
