"""A storage that has the files of one local step, wherever copies lie."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Sequence

from holdfast.multihost.peers.peer_connection import Peers

from ..errors import is_shortage
from ..storage.base import Entry
from ..storage.local import LocalStorage
from ..storage.path import join
from ..storage.tombstone import RECORD_NAME

_log = logging.getLogger(__name__)


class _LastRanks(threading.local):
    """From which rank each thread has read a file last: several read ranges of one file at once."""

    def __init__(self) -> None:
        self.of_file: dict[str, int] = {}


class UnlistedFiles:
    """A store to read files from that are known already."""

    posix = None

    def list(
        self, folder: str, *, recursive: bool = False, names_only: bool = False
    ) -> list[Entry]:
        """Lists nothing: the record, or a part, says what there is."""
        return []


class PeerStorage(UnlistedFiles):
    """The files of one local step as a store to read from: this host's own, else a peer's.
    Thread-safe.

    `folder` is that of the step, below the run's, `record` its record. `holders[process]` are the
    ranks that hold a process's part, best first; `own` are those whose folder is this process's. A
    copy that fails is passed over for the next, and a peer that did not answer is asked last.
    """

    max_concurrency: int = 4

    def __init__(
        self,
        own_folder: LocalStorage,
        folder: str,
        record: bytes,
        holders: Sequence[Sequence[int]],
        *,
        own: frozenset[int],
        peers: Peers,
    ) -> None:
        self._own_folder = own_folder
        self._folder = folder
        self._record = record
        self._peers = peers
        self._own = own
        self._holders = [sorted(ranks, key=lambda rank: rank not in own) for ranks in holders]
        self._damaged: dict[str, set[int]] = {}  # by file: the ranks whose copy is
        self._last = _LastRanks()
        self._silent: set[int] = set()
        self._lock = threading.Lock()

    @property
    def root(self) -> str:
        return self._own_folder.root

    def read(self, name: str, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fills the buffers from the best copy that answers. Raises the last one's OSError;
        FileNotFoundError where none has it.
        """
        error: OSError | None = None
        for rank in self._sources(name):
            self._last.of_file[name] = rank
            try:
                return self._read_from(rank, name, offset, buffers)
            except OSError as failed:
                _log.warning("%s is read from another copy than rank %d's: %s", name, rank, failed)
                if not is_shortage(error):  # which says nothing of the copies
                    error = failed
        raise error or FileNotFoundError(
            errno.ENOENT, "no host that is there has a copy", join(self.root, name)
        )

    def _read_from(self, rank: int, name: str, offset: int, buffers: Sequence[memoryview]) -> int:
        if rank in self._own:
            return self._own_folder.read(name, offset, buffers)
        try:
            return self._peers.read(rank, name, offset, buffers)
        except FileNotFoundError:
            raise
        except OSError:
            with self._lock:
                self._silent.add(rank)
            raise

    def _sources(self, name: str) -> list[int]:
        head = name.removeprefix(f"{self._folder}/").rpartition("/")[2].partition("-")[0]
        if (
            not name.startswith(f"{self._folder}/")
            or not head.isdecimal()
            or int(head) >= len(self._holders)
        ):
            return []
        with self._lock:
            damaged = self._damaged.get(name, set())
            ranks = [rank for rank in self._holders[int(head)] if rank not in damaged]
            return sorted(ranks, key=lambda rank: rank in self._silent)

    def distrust(self, name: str) -> bool:
        """Passes over the copy of a file that this thread has read last: see HasCopies."""
        rank = self._last.of_file.get(name)
        if rank is None:
            return False
        with self._lock:
            self._damaged.setdefault(name, set()).add(rank)
        return bool(self._sources(name))

    def fetch(self, name: str, limit_bytes: int) -> bytes:
        """Returns the record; no other file is small."""
        if name != join(self._folder, RECORD_NAME):
            raise FileNotFoundError(errno.ENOENT, "no such file", join(self.root, name))
        return self._record

    def close(self) -> None:
        """Closes the connections to peers that are not in use."""
        self._peers.close()
