"""The processes of a local tier meet: each makes its folder and its part server, and all learn of
all.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.coordination.mounts import boot_id
from holdfast.multihost import Group, current_spec
from holdfast.multihost.group.runtime import host_address
from holdfast.multihost.peers.part_server import PartServer
from holdfast.multihost.peers.peer_tls import PeerTls

from ..agreement.exchange import ask_primary, exchange
from ..agreement.messages import Message
from ..errors import CheckpointError, error_text
from ..options import Local
from ..storage.local import make_folders, sync_folder
from .host_folder import create_own_file
from .placement import Member, place_copies

MARK_AGE_S = 86_400


@dataclass(frozen=True)
class Peer(Message):
    """What all processes know of one. `mark` is in its folder.

    `host` is what fails together, `machine` a boot id, `address` that of its part server.
    """

    host: str
    machine: str
    slice_id: int
    mark: str = ""
    address: str = ""
    has_tls: bool = False
    error: str = ""

    @property
    def where(self) -> str:
        """Where its folder is: one failure domain may be several machines."""
        return self.host if self.host == self.machine else f"{self.host} ({self.machine})"


@dataclass(frozen=True)
class Attendance(Message):
    """All processes, in rank order."""

    peers: Sequence[Peer]


@dataclass(frozen=True)
class Look(Message):
    """What a process has seen in its folder: which rank lists it, and why it cannot be used ("": it
    can).
    """

    lister: int
    error: str = ""


@dataclass(frozen=True)
class FolderVerdict(Message):
    """Who lists the folder of each rank, and why the tier cannot be used ("": it can)."""

    listers: Sequence[int]
    why_off: str


@dataclass(frozen=True)
class Meeting:
    """What a process knows of all, and its part server.

    `copies[rank]` are the ranks that keep a copy of a rank's part. `listers[rank]` is the rank that
    lists and cleans that rank's folder. `why_off` is why the tier cannot be used, alike on all.
    """

    index: int
    peers: Sequence[Peer]
    secret: bytes
    tls: PeerTls | None
    copies: Sequence[Sequence[int]]
    listers: Sequence[int]
    why_off: str
    server: PartServer | None

    @property
    def copies_from(self) -> list[int]:
        """The ranks whose parts this process copies."""
        return [owner for owner, others in enumerate(self.copies) if self.index in others]

    @property
    def hosts(self) -> list[str]:
        """The host of each rank."""
        return [peer.host for peer in self.peers]

    @property
    def lister(self) -> int:
        """The rank that lists this process's folder."""
        return self.listers[self.index]

    @property
    def is_lister(self) -> bool:
        """Whether this process lists its folder, and cleans it."""
        return self.lister == self.index

    def holders(self) -> list[list[int]]:
        """Returns by rank the ranks, one of each folder, that have its part once it is copied."""
        return [
            sorted({self.listers[rank] for rank in [owner, *copies]})
            for owner, copies in enumerate(self.copies)
        ]

    def close(self) -> None:
        """Ends the part server."""
        if self.server is not None:
            self.server.close()


def meet(local: Local, group: Group, name: str, tls: PeerTls | None) -> Meeting:
    """Returns what all processes are; every process calls it. Blocks.

    What a process cannot make is its peer's `error`. Raises BarrierTimeout, ProcessLost.
    """
    stand = _Stand(local, group, tls)
    try:
        return stand.meet(name)
    except BaseException:
        # A server that nobody closes would serve parts of a job that gave its tier up.
        if stand.server is not None:
            stand.server.close()
        raise
    finally:
        # All have looked by now.
        with contextlib.suppress(OSError):
            stand.mark.unlink()


class _Stand:
    """What one process makes before the others know of it. The mark in its folder is gone once all
    have looked.
    """

    def __init__(self, local: Local, group: Group, tls: PeerTls | None) -> None:
        self._local = local
        self._path = Path(local.path)
        self._group = group
        self._tls = tls
        self.mark = self._path / f"mark-{secrets.token_hex(8)}"
        self.server: PartServer | None = None

    def meet(self, name: str) -> Meeting:
        """Learns what all processes are, and what they have seen in their folders."""
        group = self._group
        timeout_s = self._local.timeout_s
        drawn = ask_primary(group, f"{name}/secret", lambda: secrets.token_hex(32), timeout_s)
        secret = bytes.fromhex(drawn)
        own = self.introduce(secret)
        peers = exchange(
            group, f"{name}/peers", own, Attendance, Attendance, timeout_s=timeout_s
        ).peers
        judge = functools.partial(_judge, peers)
        look = self.look(peers)
        verdict = exchange(group, f"{name}/look", look, judge, FolderVerdict, timeout_s=timeout_s)
        members = [Member(peer.host, peer.slice_id) for peer in peers]
        return Meeting(
            index=group.index,
            peers=peers,
            secret=secret,
            tls=self._tls,
            copies=place_copies(members, self._local.replicas),
            listers=verdict.listers,
            why_off=verdict.why_off,
            server=self.server,
        )

    def introduce(self, secret: bytes) -> Peer:
        """Makes the folder and the part server; what cannot be made is the peer's error."""
        spec = current_spec()
        machine = boot_id()
        host = self._local.failure_domain or machine
        slice_id = 0 if spec is None else spec.slice_id
        peer = Peer(host, machine, slice_id, self.mark.name)
        try:
            self._make_folder()
            if self._group.count > 1:
                self.server = self._make_server(secret)
                peer = replace(peer, address=self.server.address, has_tls=self._tls is not None)
        except (OSError, CheckpointError) as error:
            # Raised here, it would leave the others waiting for this process's report.
            return replace(peer, error=f"process {self._group.index}: {error_text(error)}")
        return peer

    def _make_folder(self) -> None:
        """Makes this host's folder, and a mark in it."""
        if self._path.is_symlink():
            raise CheckpointError(
                f"{self._path} is a link; expected a folder of this host, or none"
            )
        try:
            make_folders(self._path.parent, None)
            self._path.mkdir(mode=0o700, exist_ok=True)
            if self._local.sync:
                sync_folder(self._path.parent)
            # Whoever sees the same folder sees the mark, whatever its device number is there.
            os.close(create_own_file(self.mark))
        except OSError as error:
            why = (
                f"{error.strerror or error}; expected a folder that this process may write to, or"
                " none"
            )
            raise CheckpointError(f"{self._path} cannot be written: {why}") from error

    def look(self, peers: Sequence[Peer]) -> Look:
        """Looks whose marks are in the folder. Of one machine's processes the first lists it for
        all; copies in a folder that two hosts share are none.
        """
        index = self._group.index
        try:
            there = self._find_marks()
        except OSError as error:
            return Look(index, f"process {index}: {error_text(error)}")
        own = peers[index]
        sharers = [rank for rank, peer in enumerate(peers) if peer.mark in there or rank == index]
        lister = next(rank for rank in sharers if peers[rank].machine == own.machine)
        others = [peers[rank].where for rank in sharers if peers[rank].where != own.where]
        if not others:
            return Look(lister)
        return Look(
            lister,
            f"{self._path} is shared by the hosts {own.where} and {others[0]}; expected a folder of"
            " one host",
        )

    def _find_marks(self) -> set[str]:
        """Returns the names of the marks in the folder; deletes old ones."""
        marks = [path for path in self._path.iterdir() if path.match(f"mark-{16 * '[0-9a-f]'}")]
        for mark in marks:
            # A process that is killed as it meets leaves its mark. No meeting takes a day.
            with contextlib.suppress(OSError):
                if time.time() - mark.stat().st_mtime > MARK_AGE_S:
                    mark.unlink()
        return {mark.name for mark in marks}

    def _make_server(self, secret: bytes) -> PartServer:
        if self._tls is not None:
            self._tls.check()
        address = self._local.address or host_address()
        if address is None:
            raise CheckpointError(
                "which address of this host its peers reach is not known, since no coordinator is:"
                " pass Local(address=...)"
            )
        try:
            return PartServer(address, secret, self._tls)
        except OSError as error:
            why = (
                f"{error.strerror or error}; expected an address of this host in Local(address=...)"
            )
            raise CheckpointError(f"peers cannot be served at {address}: {why}") from error


def _judge(peers: Sequence[Peer], looks: Sequence[Look]) -> FolderVerdict:
    errors = [peer.error for peer in peers]
    errors += [_why_unreachable(peers), *(look.error for look in looks)]
    return FolderVerdict([look.lister for look in looks], next(filter(None, errors), ""))


def _why_unreachable(peers: Sequence[Peer]) -> str:
    """Returns why some processes could not reach others, or ""."""
    others = [rank for rank, peer in enumerate(peers) if peer.has_tls != peers[0].has_tls]
    if others:
        first = others[0]
        with_tls, without = (0, first) if peers[0].has_tls else (first, 0)
        return (
            f"process {with_tls} has the files of TLS, and process {without} has none: set them for"
            " all, or for none"
        )
    inside = [rank for rank, peer in enumerate(peers) if peer.address.startswith(("127.", "[::1]"))]
    if not inside or len({peer.machine for peer in peers}) == 1:
        return ""
    return (
        f"process {inside[0]} has the address {peers[inside[0]].address}, which other hosts cannot"
        " reach: pass Local(address=...), or give its host's name another address than loopback"
    )
