"""The processes of a local tier meet: each makes its folder and its part server, and all learn of
all.
"""

from __future__ import annotations

import contextlib
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
from .placement import Member, copied_by, place_copies

MARK_AGE_S = 86_400


@dataclass(frozen=True)
class Peer(Message):
    """What all processes know of one. `folder` tells its folder from others, `mark` is in it.

    `host` is what fails together, `machine` a boot id, `address` that of its part server.
    """

    host: str
    machine: str
    slice_id: int
    folder: str
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

    peers: tuple[Peer, ...]


@dataclass(frozen=True)
class Look(Message):
    """Why a folder cannot be used, as the process sees that has looked into it; "" where it can."""

    error: str


@dataclass(frozen=True)
class Meeting:
    """What a process knows of all, and its part server.

    `copies[rank]` are the ranks that keep a copy of a rank's part; `copies_from` those whose parts
    this process copies. `listers[rank]` is the rank that lists and cleans that rank's folder.
    `why_off` is why the tier cannot be used, alike on all.
    """

    index: int
    peers: tuple[Peer, ...]
    secret: bytes
    tls: PeerTls | None
    copies: Sequence[Sequence[int]]
    copies_from: Sequence[int]
    listers: Sequence[int]
    why_off: str
    server: PartServer | None

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
    timeout_s = local.timeout_s
    drawn: str = ask_primary(group, f"{name}/secret", lambda: secrets.token_hex(32), timeout_s)
    secret = bytes.fromhex(drawn)
    stand = _Stand(local, group, tls)
    try:
        own = stand.introduce(secret)

        def attend(peers: list[Peer]) -> Attendance:
            return Attendance(tuple(peers))

        attendance = exchange(group, f"{name}/peers", own, attend, Attendance, timeout_s=timeout_s)
        peers = attendance.peers

        def first_error(looks: list[Look]) -> Look:
            errors = [*(peer.error for peer in peers), _why_unreachable(peers)]
            return Look(next(filter(None, [*errors, *(look.error for look in looks)]), ""))

        look = exchange(
            group, f"{name}/look", stand.look(peers), first_error, Look, timeout_s=timeout_s
        )
    except BaseException:
        # A server that nobody closes would serve parts of a job that gave its tier up.
        stand.close()
        raise
    finally:
        # All have looked by now.
        with contextlib.suppress(OSError):
            stand.mark.unlink()
    members = [Member(rank, peer.host, peer.slice_id) for rank, peer in enumerate(peers)]
    copies = place_copies(members, local.replicas)
    return Meeting(
        index=group.index,
        peers=peers,
        secret=secret,
        tls=tls,
        copies=copies,
        copies_from=copied_by(copies, group.index),
        listers=_listers_of(peers),
        why_off=look.error,
        server=stand.server,
    )


def _listers_of(peers: Sequence[Peer]) -> list[int]:
    # Processes that share a folder would otherwise each list and clean the parts of all.
    firsts: dict[str, int] = {}
    return [firsts.setdefault(peer.folder, rank) for rank, peer in enumerate(peers)]


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

    def introduce(self, secret: bytes) -> Peer:
        """Makes the folder and the part server; what cannot be made is the peer's error."""
        spec = current_spec()
        machine = boot_id()
        host = self._local.failure_domain or machine
        slice_id = 0 if spec is None else spec.slice_id
        peer = Peer(host, machine, slice_id, f"{machine} {self._group.index}", self.mark.name)
        try:
            # Device and inode numbers tell the folders of one machine apart, no others.
            peer = replace(peer, folder=f"{machine} {self._make_folder()}")
            if self._group.count > 1:
                self.server = self._make_server(secret)
                has_tls = self._tls is not None
                peer = replace(peer, address=self.server.address, has_tls=has_tls)
        except (OSError, CheckpointError) as error:
            # Raised here, it would leave the others waiting for this process's report.
            return replace(peer, error=f"process {self._group.index}: {error_text(error)}")
        return peer

    def _make_folder(self) -> str:
        """Makes this host's folder and a mark in it; returns which folder it is."""
        if self._path.is_symlink():
            raise CheckpointError(
                f"{self._path} is a link; expected a folder of this host, or none"
            )
        try:
            make_folders(self._path.parent, None)
            self._path.mkdir(mode=0o700, exist_ok=True)
            if self._local.sync:
                sync_folder(self._path.parent)
            # Hosts that mount one file system see one folder under several device numbers. Each
            # sees the others' marks there.
            os.close(create_own_file(self.mark))
            status = self._path.stat()
        except OSError as error:
            why = (
                f"{error.strerror or error}; expected a folder that this process may write to, or"
                " none"
            )
            raise CheckpointError(f"{self._path} cannot be written: {why}") from error
        return f"{status.st_dev} {status.st_ino}"

    def look(self, peers: Sequence[Peer]) -> Look:
        """Looks whose marks are in the folder: copies in one that two hosts share are none."""
        try:
            marks = [*self._path.glob(f"mark-{16 * '[0-9a-f]'}")]
            for mark in marks:
                # A process that is killed as it meets leaves its mark. No meeting takes a day.
                with contextlib.suppress(OSError):
                    if time.time() - mark.stat().st_mtime > MARK_AGE_S:
                        mark.unlink()
            there = {mark.name for mark in marks}
        except OSError as error:
            return Look(f"process {self._group.index}: {error_text(error)}")
        own = peers[self._group.index].where
        for peer in peers:
            if peer.mark in there and peer.where != own:
                return Look(
                    f"{self._path} is shared by the hosts {own} and {peer.where}; expected a folder"
                    " of one host"
                )
        return Look("")

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

    def close(self) -> None:
        """Ends the server."""
        if self.server is not None:
            self.server.close()


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
