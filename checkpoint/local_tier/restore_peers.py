"""The processes of one restore pass on what they read: each has a part server for its time."""

from __future__ import annotations

import logging
import secrets
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Self

from holdfast.coordination.mounts import boot_id
from holdfast.multihost import Group
from holdfast.multihost.group.runtime import peer_tls
from holdfast.multihost.peers.part_server import PartServer
from holdfast.multihost.peers.peer_connection import PeerLate, Peers
from holdfast.multihost.peers.peer_tls import PeerTls

from ..agreement.messages import parsed
from ..agreement.restore_verdict import RestoreAgreement
from ..errors import CheckpointError, error_text
from ..restoring.restore import RestoreOptions
from ..restoring.sharing import (
    SILENT_S,
    WORTH_BYTES,
    BlockSource,
    Demand,
    PeerTrust,
    Runs,
    StillReading,
)
from ..storage.base import Storage
from .meeting import own_address

_log = logging.getLogger(__name__)
HOLD_BYTES = 512 << 20  # for others, at most
HOLD_SHARE = 4  # of what this process may take: one part for others
MOST_CONNECTED = 32  # ranks to which connections are kept for the next block


class GroupPeers:
    """The RestorePeers of a group: a context manager around a restore and its final agreement.

    `address` is this host's for its peers (None: the one that the coordinator is reached from). A
    process that has none passes nothing on. The server starts when the processes join. Thread-safe,
    but `meet` and `finish`.
    """

    def __init__(
        self,
        group: Group,
        agreement: RestoreAgreement,
        options: RestoreOptions,
        address: str | None = None,
    ) -> None:
        self.count = group.count
        self.index = group.index
        self.worth_bytes = WORTH_BYTES if options.read == "auto" else 1
        # A bound of nothing would be none: one block is held at a time.
        self.hold_bytes = max(1, min(HOLD_BYTES, options.memory.free_bytes() // HOLD_SHARE))
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
        """Returns the demands of all: see RestorePeers."""
        if self._address is None:
            self._address = self._serve_peers()
        own = Demand(runs, self._address, self._secret, boot_id())
        told = self._agreement.share(own.told(self.count))
        demands: list[Demand] = [parsed(Demand, each) for each in told]
        for rank, each in enumerate(demands):
            if each.address and rank != self.index and rank not in self._peers:
                self._peers[rank] = self._peer(rank, each)
        return demands

    def finish(self) -> None:
        """Blocks until all have what they need of an item: see RestorePeers."""
        self._agreement.share(None)

    def _serve_peers(self) -> str:
        """Starts this process's server; returns its address, "" where there can be none."""
        try:
            self._tls = peer_tls()
            if self._tls is not None:
                self._tls.check()
            secret = bytes.fromhex(self._secret)
            server = PartServer(self._host or own_address(), secret, self._tls)
        except (OSError, CheckpointError) as error:
            _log.warning("this process passes on nothing that it reads: %s", error_text(error))
            return ""
        server.offer_memory(self._find)
        self._stack.enter_context(server)
        return server.address

    def _peer(self, rank: int, told: Demand) -> Peers:
        secret = bytes.fromhex(told.secret)
        peers = Peers({rank: told.address}, secret, timeout_s=SILENT_S, tls=self._tls)
        return self._stack.enter_context(peers)

    def read(self, rank: int, name: str, offset: int, buffers: Sequence[memoryview]) -> int | None:
        """Reads from another process: see RestorePeers."""
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
        """Serves an item's blocks from now on, or no more: see RestorePeers."""
        with self._lock:
            if source is None:
                self._sources.pop(item, None)
            else:
                self._sources[item] = source

    def note(self, counts: Mapping[str, int]) -> None:
        """Adds to the counts: see RestorePeers."""
        self.counts.update(counts)

    def _find(self, name: str, offset: int, size: int) -> memoryview | None:
        item, _, block = name.partition("/")
        with self._lock:
            source = self._sources.get(item)
        if source is None or not block.isdecimal():
            return None
        try:
            return source.block(int(block), offset, size)
        except StillReading as error:
            raise TimeoutError(str(error)) from error
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


def is_worth_sharing(read: str, storage: Storage, group: Group) -> bool:
    """Says whether the processes of a group share what they read from a store.

    "auto" does so for stores that are no folder, whose every byte is a request.
    """
    if group.count == 1 or read == "each":
        return False
    return read == "once" or storage.posix is None
