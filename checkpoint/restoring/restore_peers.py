"""The processes of one restore pass on what they read: each has a part server for its time."""

from __future__ import annotations

import logging
import secrets
import threading
from collections import Counter, OrderedDict
from contextlib import ExitStack
from typing import Protocol, Self

from holdfast.coordination.mounts import boot_id
from holdfast.multihost import Group
from holdfast.multihost.group.runtime import host_address, peer_tls
from holdfast.multihost.peers.part_server import PartServer
from holdfast.multihost.peers.peer_connection import PeerLate, Peers
from holdfast.multihost.peers.peer_tls import PeerTls

from ..agreement.messages import parsed
from ..agreement.restore_verdict import RestoreAgreement
from ..errors import CheckpointError, error_text
from ..memory.budget import WHOLE_BUDGET, MemoryBudget
from ..storage.base import Buffers, Storage
from .sharing import SILENT_S, WORTH_BYTES, Demand, PeerTrust, Reading, Runs

_log = logging.getLogger(__name__)
HOLD_BYTES = 512 << 20  # for others, at most
HOLD_SHARE = 4  # of what this process may take: one part for others
MOST_CONNECTED = 32  # ranks to which connections are kept for the next block


class StillReading(TimeoutError):
    """Says that a block is not there yet, and is being read."""


class BlockSource(Protocol):
    """What serves blocks of an item."""

    def block(self, block: int, offset: int, size: int) -> memoryview | None:
        """Returns bytes of a block, None where this process does not have it (any more).

        Raises StillReading after a short while.
        """

    def close(self) -> None:
        """Drops every block."""


class RestorePeers:
    """The processes of a group: a context manager around a restore and its final agreement.

    What sharing has to spare the store is `worth_bytes` at least, and this process may hold
    `hold_bytes` for the others. `trust` is what it has seen of them, `counts` what it has counted.
    `address` is this host's for its peers (None: the one that the coordinator is reached from). A
    process that has none passes nothing on. The server starts when the processes join. Thread-safe,
    but `meet` and `finish`.
    """

    def __init__(
        self,
        group: Group,
        agreement: RestoreAgreement,
        read: Reading,
        memory: MemoryBudget = WHOLE_BUDGET,
        address: str | None = None,
    ) -> None:
        self.count = group.count
        self.index = group.index
        self.worth_bytes = WORTH_BYTES if read == "auto" else 1
        # A bound of nothing would be none: one block is held at a time.
        self.hold_bytes = max(1, min(HOLD_BYTES, memory.free().nbytes // HOLD_SHARE))
        self.trust = PeerTrust()
        self.counts = Counter[str]()
        self._agreement = agreement
        self._host = address
        self._address: str | None = None  # of this process's server, once it was tried to start it
        self._stack = ExitStack()
        self._lock = threading.Lock()
        self._sources: dict[str, BlockSource] = {}
        self._peers: dict[int, Peers] = {}
        self._connected: OrderedDict[int, None] = OrderedDict()  # the last asked comes last
        self._tls: PeerTls | None = None
        self._secret = secrets.token_hex(32)

    def meet(self, runs: Runs) -> list[Demand]:
        """Tells all which blocks of an item this process needs; returns the demands of all, by
        rank, and how each is reached. Blocks until all have called it, once an item. Raises, on
        every process, the error of one that has failed.
        """
        if self._address is None:
            self._address = self._serve_peers()
        own = Demand(runs, self._address, self._secret, boot_id())
        told = self._agreement.share(own.told(self.count))
        demands: list[Demand] = [parsed(Demand, each) for each in told]
        for rank, each in enumerate(demands):
            if each.address and rank != self.index and rank not in self._peers:
                self._peers[rank] = self._stack.enter_context(self._peers_of(rank, each))
        return demands

    def _peers_of(self, rank: int, need: Demand) -> Peers:
        secret = bytes.fromhex(need.secret)
        return Peers({rank: need.address}, secret, timeout_s=SILENT_S, tls=self._tls)

    def finish(self) -> None:
        """Blocks until all processes have what they need of an item; raises as `meet`."""
        self._agreement.share(None)

    def _serve_peers(self) -> str:
        """Starts this process's server; returns its address, "" where there can be none."""
        try:
            self._tls = peer_tls()
            if self._tls is not None:
                self._tls.check()
            address = self._host or host_address()
            if address is None:
                raise CheckpointError("which address of this host its peers reach is not known")
            server = PartServer(address, bytes.fromhex(self._secret), self._tls)
        except (OSError, CheckpointError) as error:
            _log.warning("this process passes on nothing that it reads: %s", error_text(error))
            return ""
        server.offer_memory(self._find)
        self._stack.enter_context(server)
        return server.address

    def read(self, rank: int, name: str, offset: int, buffers: Buffers) -> int | None:
        """Reads what another process serves; None: that process is still reading it.

        Raises OSError, FileNotFoundError where the other has dropped it.
        """
        self._make_room(rank)
        try:
            return self._peers[rank].read(rank, name, offset, buffers)
        except PeerLate:
            return None

    def _make_room(self, rank: int) -> None:
        """Closes the connections to the rank that was asked longest ago, if there are many."""
        with self._lock:
            self._connected[rank] = None
            self._connected.move_to_end(rank)
            if len(self._connected) <= MOST_CONNECTED:
                return
            longest, _ = self._connected.popitem(last=False)
        self._peers[longest].close()

    def serve(self, item: str, source: BlockSource | None) -> None:
        """Serves the others what a source of an item has, from now on; None: no more."""
        with self._lock:
            if source is None:
                self._sources.pop(item, None)
            else:
                self._sources[item] = source

    def note(self, **amounts: int) -> None:
        """Counts bytes from the store and from peers, and what went wrong with these."""
        with self._lock:
            self.counts.update(amounts)

    def _find(self, name: str, offset: int, size: int) -> memoryview | None:
        item, _, block = name.partition("/")
        with self._lock:
            source = self._sources.get(item)
        if source is None or not block.isdecimal():
            return None
        try:
            return source.block(int(block), offset, size)
        except StillReading:
            raise
        except Exception as error:
            # Who asked goes to the store, and finds out for itself.
            _log.warning("%s cannot be passed on: %s", name, error_text(error))
            return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()
        # A restore that failed has left its reader here, and the error's traceback keeps it.
        with self._lock:
            sources = list(self._sources.values())
            self._sources.clear()
        for source in sources:
            source.close()


def is_worth_sharing(read: Reading, storage: Storage, group: Group) -> bool:
    """Says whether the processes of a group share what they read from a store.

    "auto" does so for stores that are no folder, whose every byte is a request.
    """
    if group.count == 1 or read == "each":
        return False
    return read == "once" or storage.posix is None
