"""Local saves in one execution: hosts with folders of their own, and peers that read each other's
parts. What a host had is gone when it is lost.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from holdfast.checkpoint import EveryNSteps, Local
from holdfast.checkpoint.agreement.save_protocol import SaveKey
from holdfast.checkpoint.local_tier import part_copier
from holdfast.checkpoint.local_tier.host_folder import HostFolder, HostStorage, RunFolder
from holdfast.checkpoint.local_tier.host_place import HostPlace
from holdfast.checkpoint.local_tier.inventory import Inventory, living_steps
from holdfast.checkpoint.local_tier.local_steps import LocalSteps
from holdfast.checkpoint.local_tier.meeting import Meeting, Peer
from holdfast.checkpoint.local_tier.part_copier import PartCopier
from holdfast.checkpoint.saving.stager import JsonValue, OneSave
from holdfast.checkpoint.steps.lineage import read_branches, run_of
from holdfast.checkpoint.storage.base import Storage
from holdfast.multihost.peers.peer_connection import PeerFailed
from tests.model.promise import Broken

from .programs import OPTIONS, Manager, told_of
from .rules import SAVED, STAYS
from .scheduler import OK, READ, WRITE, Access, current_task
from .world import World

_RANK = re.compile(r"(?:part-)?(\d{5})[^/]*$")


def _served(process: str, name: str, mode: int) -> Access:
    """Returns the access to what a host serves of one process's part of one save: the names of the
    part and of its files have both.
    """
    rank = _RANK.search(name)
    assert rank is not None, name
    return ("served", process, "/".join(name.split("/")[:2]), rank[1]), mode


class ModelServer:
    """What one host serves."""

    def __init__(self, world: World, process: str) -> None:
        self.world = world
        self.process = process
        self.folders: dict[str, Path] = {}
        self.given_up: set[str] = set()

    def _step(self, label: str, names: Iterable[str]) -> None:
        task = current_task()
        assert task is not None
        accesses = dict.fromkeys(_served(self.process, name, WRITE) for name in names)
        self.world.step(task, label, tuple(accesses), ())

    def publish(self, folder: Path, name: str, files: Iterable[str]) -> None:
        """Serves a part and its files."""
        self._step(f"serves {name}", [name])
        self.folders.update(dict.fromkeys([name, *files], folder))

    def give_up(self, name: str) -> None:
        """Says that a part will not come."""
        self._step(f"gives up {name}", [name])
        self.given_up.add(name)

    def withdraw(self, folder: str) -> None:
        """Serves nothing of a folder any more."""
        names = [name for name in self.folders if name.startswith(f"{folder}/")]
        self._step(f"withdraws {folder}", names)
        for name in names:
            del self.folders[name]


class ModelPeer:
    """A connection to one host's server."""

    def __init__(self, address: str, secret: bytes, tls: Any, *, timeout_s: float) -> None:
        task = current_task()
        assert task is not None
        self.address = address
        self._task = task
        self._world: World = task.run.world  # type: ignore[attr-defined]
        self._server = self._world.servers[address]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def _step(self, label: str, name: str, *, waits: bool = False) -> bool:
        """Takes a step that asks for a name; says whether the host answers."""
        server = self._server
        run = self._world.run

        def is_ready() -> bool:
            is_dead = server.process in run.dead
            return is_dead or name in server.folders or name in server.given_up

        accesses = [_served(server.process, name, READ), (("alive", server.process), READ)]
        ready = is_ready if waits else None
        variant = self._world.step(self._task, label, accesses, (), ready=ready, can_time_out=waits)
        assert variant == OK
        if waits and not is_ready():
            run.actual = None
            return False
        return server.process not in run.dead

    def wait(self, name: str, timeout_s: float) -> bytes:
        """Returns a part once it is served."""
        if not self._step(f"asks {self._server.process} for {name}", name, waits=True):
            raise PeerFailed(errno.EIO, f"{self.address} does not answer")
        if name in self._server.given_up:
            raise FileNotFoundError(errno.ENOENT, "it will not come", name)
        with self._world.unobserved():
            path: Path = self._server.folders[name] / name
            return path.read_bytes()

    def read(self, name: str, offset: int, buffers: Sequence[memoryview], timeout_s: float) -> int:
        """Fills buffers with bytes of a file that is served."""
        if not self._step(f"copies {name} from {self._server.process}", name):
            raise PeerFailed(errno.EIO, f"{self.address} does not answer")
        folder = self._server.folders.get(name)
        if folder is None:
            raise PeerFailed(errno.EIO, f"{self.address} has no {name}")
        with self._world.unobserved(), open(folder / name, "rb") as file:
            return os.preadv(file.fileno(), buffers, offset)


@contextlib.contextmanager
def modelled_peers() -> Iterator[None]:
    """Has copies of parts go through `ModelPeer`."""
    names = vars(part_copier)
    real = names["PeerConnection"]
    names["PeerConnection"] = ModelPeer
    try:
        yield
    finally:
        names["PeerConnection"] = real


class HostSaver:
    """One process's part of local saves: it writes on its host, and copies its peer's part."""

    def __init__(self, world: World, folder: Path, manager: Manager, names: str) -> None:
        group = manager.root.group
        local = Local(str(folder), save_policy=EveryNSteps(1), replicas=1, keep=1)
        server: Any = ModelServer(world, names[group.index])
        world.servers[names[group.index]] = server
        meeting = Meeting(
            index=group.index,
            peers=tuple(Peer(name, name, 0, address=name) for name in names),
            secret=b"",
            tls=None,
            copies=[
                [rank for rank in range(group.count) if rank != own] for own in range(len(names))
            ],
            listers=list(range(group.count)),
            why_off="",
            server=server,
        )
        options = replace(OPTIONS, save_timeout_s=local.timeout_s)
        place = HostPlace(
            local=local,
            root=replace(manager.root, storage=HostStorage(folder), options=options),
            meeting=meeting,
            copier=PartCopier(local, meeting),
            lineage=manager.state.lineage,
            folders=RunFolder(folder, syncs=False),
        )
        self._world = world
        self._manager = manager
        self._counter = 0
        self.steps = LocalSteps(manager.storage, place)
        self.told: list[tuple[int, str]] = []  # steps, and how their saves ended

    def save(self, step: int) -> str:
        """Saves a step on the hosts; returns what this process was told."""
        manager = self._manager
        self._counter += 1
        save_id = f"{manager.id}{self._counter:08x}"
        place = manager.catalog.local_place_of(step)
        manager.state.order.begun(place)
        save = OneSave(
            root=self.steps.root,
            key=SaveKey(save_id, self._counter, step),
            is_local=True,
            place=place,
            values={"state": JsonValue(json.dumps(save_id).encode(), per_process=True)},
            started_s=self._world.now_s,
        )
        how = told_of(self.steps.save(save))
        self.told.append((step, how))
        # It may die here too, and its host be lost: what it was told counts.
        task = current_task()
        assert task is not None
        self._world.step(task, "is told how it ended", ((("told", task.process), WRITE),), ())
        return how


def check_hosts(
    world: World, savers: Sequence[HostSaver], folders: Sequence[Path], storage: Storage
) -> None:
    """Raises Broken unless the newest local step that was acknowledged is whole on those hosts that
    are left, or a newer one.
    """
    branches = read_branches(storage)
    run = run_of(branches)
    inventories = []
    for folder in folders:
        parts = HostFolder(folder, run).scan() if run and folder.is_dir() else []
        inventories.append(Inventory([part.summary() for part in parts]))
    whole = living_steps(inventories, branches)
    newest = whole[0].key.step if whole else -1
    acknowledged = [step for saver in savers for step, how in saver.told if how == SAVED]
    if acknowledged and newest < max(acknowledged):
        raise Broken(
            STAYS,
            f"local step {max(acknowledged)} was acknowledged, and the hosts that are left have"
            f" {newest if whole else 'none'}",
        )
