"""Compiled programs of the other hosts of a job: each host comes to hold what any of them has.

jax writes on the host of process 0 alone, on CPU each process its own. A host that comes new would
compile everything while the others wait. So the hosts tell each other at the start of an attempt
what they have, and fetch what they lack; what is compiled later they fetch in the background.

Whether jax finds an entry has to be the same on all hosts: on GPUs the processes that compile wait
for the results of those that do not. So in a job of several hosts jax sees a folder of its process,
a view, with links to what all of them have.

What comes out of an entry is run. Entries are taken from processes of this job alone, and thrown
away unless they have the digest that their holder has told through the coordinator.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.monitoring

from holdfast.coordination import CoordinationClient, CoordinationError
from holdfast.coordination.mounts import boot_id

from ..group.group import Group, decide_at_first, pack, unpack
from ..group.group_client import Deadline
from ..group.runtime import host_address, peer_tls
from ..instruments import event as count
from ..peers.part_server import PartServer
from ..peers.peer_connection import PeerConnection, PeerFailed
from ..peers.peer_tls import PeerTls
from ..threads import start_daemon
from .folder import (
    LEAST_FREE_BYTES,
    PIECE_BYTES,
    Entry,
    last_used,
    merge,
    note_sealed,
    sealed,
    show_to_jax,
    why_off,
)
from .view import own_view, show

_log = logging.getLogger(__name__)

OFFER_BYTES = 2_000_000_000  # of a host's entries, those used last
WAIT_S = 10.0  # before the first compilation, besides what the bytes take
RATE_BYTES_S = 100e6
SILENT_S = 10.0  # for a peer
SETTLE_S = 2.0  # after jax begins to write an entry
MOST_HOLDERS = 8  # hosts with the same entries that are asked
LONGEST_NAME = 250
_LOG = "holdfast/compiled"  # keys: what was compiled since, numbered
_LONG_MS = 60_000
_written = threading.Event()  # set when jax writes an entry


class RefusedEntry(OSError):
    """Says which entry of a peer is not what was told, and is thrown away."""


def _note_written(event: str, **_: str | int) -> None:
    if event == "/jax/compilation_cache/cache_misses":
        _written.set()


jax.monitoring.register_event_listener(_note_written)


class TravellingPrograms:
    """What one process of a job of several hosts has of compiled programs; a part of the job.

    `folder` is this host's, None where nothing is kept here. Every process calls `meet`, once.
    """

    def __init__(self, group: Group, client: CoordinationClient, folder: Path | None) -> None:
        self._group = group
        self._client = client
        self._folder = folder
        self._view: Path | None = None
        self._tls = peer_tls()
        self._secret = secrets.token_bytes(32)  # of this attempt
        self._server: PartServer | None = None
        self._closed = threading.Event()

    def meet(self, timeout_s: float) -> None:
        """Has jax see what all hosts have. Blocks: for WAIT_S at most, and what the bytes that this
        host lacks take at RATE_BYTES_S. Raises as the group does.
        """
        folder = self._folder
        have = {} if folder is None else _offered(folder)
        own = {"host": _place_of(folder), "kind": self._kind, "set": _digest_of(have)}
        plan = decide_at_first(self._group, "compiled/hosts", own, _plan, Deadline(timeout_s))
        if plan is None:
            return
        visible = have
        leads = self._group.index in plan["leaders"]
        if not plan["alike"]:
            visible = self._exchange(plan, have, timeout_s, leads=leads)
        if folder is None:
            return
        try:
            self._view = own_view(folder)
            show(self._view, folder, visible)
        except OSError as error:
            _log.warning("%s", why_off(error))
            show_to_jax(None)
            return
        show_to_jax(self._view, is_view=True)
        start_daemon("compiled", self._tell, self._view, folder)
        if leads:
            start_daemon("compiled", self._follow, folder)

    def close(self) -> None:
        """Serves and fetches nothing any more, and keeps what was compiled. Idempotent."""
        self._closed.set()
        _written.set()
        if self._view is not None and self._folder is not None:
            with contextlib.suppress(OSError):
                merge(self._view, self._folder)
        if self._server is not None:
            self._server.close()

    @property
    def _kind(self) -> str:
        """What entries may be exchanged with: hosts of one processor and jaxlib."""
        return "" if self._folder is None else self._folder.name

    def _exchange(
        self, plan: dict[str, Any], have: Mapping[str, Entry], timeout_s: float, *, leads: bool
    ) -> dict[str, Entry]:
        """Fetches what this host lacks; returns what all hosts have then."""
        own: dict[str, Any] = {"kind": self._kind}
        for ranks in plan["holders"]:
            if self._group.index in ranks:
                own["at"] = self._served(have.values())
            if self._group.index == ranks[0]:
                own["entries"] = _listing(have.values())
        union = decide_at_first(self._group, "compiled/entries", own, _union, Deadline(timeout_s))
        wanted = _entries(union["entries"].get(self._kind, []))
        here = None  # its leader speaks for a host
        if leads:
            whole: Mapping[str, Entry] = {}
            if self._folder is not None:
                self._fetch_in_time(self._folder, wanted, union["at"].get(self._kind, []))
                whole = sealed(self._folder)
            here = [name for name, entry in wanted.items() if whole.get(name) == entry]
        common = decide_at_first(self._group, "compiled/whole", here, _common, Deadline(timeout_s))
        return {name: wanted[name] for name in common if name in wanted}

    def _fetch_in_time(
        self, folder: Path, wanted: Mapping[str, Entry], servers: Sequence[Sequence[str]]
    ) -> None:
        whole = sealed(folder)
        lacking = [entry for name, entry in wanted.items() if whole.get(name) != entry]
        time_s = WAIT_S + sum(entry.size for entry in lacking) / RATE_BYTES_S
        turn = self._group.index % len(servers) if servers else 0
        in_turn = [*servers[turn:], *servers[:turn]]
        fetch_all(folder, lacking, in_turn, time.monotonic() + time_s, self._tls)

    # --- what is compiled later

    def _tell(self, view: Path, folder: Path) -> None:
        """Moves what jax has written to the host's folder, and tells the others of it."""
        with contextlib.suppress(CoordinationError, OSError):
            while True:
                _written.wait()
                _written.clear()
                if self._closed.wait(SETTLE_S):
                    return
                new = merge(view, folder)
                if new:
                    told = {"kind": self._kind, "at": self._served(new), "entries": _listing(new)}
                    number = self._client.key_value_increment(f"{_LOG}/count", 1)
                    self._client.key_value_set_bytes(f"{_LOG}/{number}", pack(told))

    def _follow(self, folder: Path) -> None:
        """Fetches what others tell of. It ends with the client: a call is then cancelled."""
        number = 1
        while not self._closed.is_set():
            try:
                told = unpack(
                    self._client.blocking_key_value_get_bytes(f"{_LOG}/{number}", _LONG_MS)
                )
            except CoordinationError as error:
                # Who drew this number may have died before it told anything.
                if error.code == "DEADLINE_EXCEEDED" and not self._is_there(number + 1):
                    continue
                if error.code != "DEADLINE_EXCEEDED":
                    return
                told = {}
            number += 1
            if told.get("kind") == self._kind and told["at"]:
                whole = sealed(folder)
                new = _entries(told["entries"])
                lacking = [entry for name, entry in new.items() if name not in whole]
                end = time.monotonic() + _LONG_MS / 1000
                fetch_all(folder, lacking, [told["at"]], end, self._tls)

    def _is_there(self, number: int) -> bool:
        with contextlib.suppress(CoordinationError):
            self._client.key_value_try_get_bytes(f"{_LOG}/{number}")
            return True
        return False

    def _served(self, entries: Iterable[Entry]) -> list[str]:
        """Serves entries of this host from now on; returns address and secret, [] for none."""
        assert self._folder is not None
        try:
            if self._server is None:
                host = host_address()
                if host is None:
                    return []
                if self._tls is not None:
                    self._tls.check()
                self._server = PartServer(host, self._secret, self._tls)
        except OSError as error:
            _log.warning("this host passes no compiled programs on: %s", error)
            return []
        for entry in entries:
            self._server.publish(self._folder, entry.name, ())
        return [self._server.address, self._secret.hex()]


def fetch_all(
    folder: Path,
    entries: Sequence[Entry],
    servers: Sequence[Sequence[str]],
    end: float,
    tls: PeerTls | None = None,
) -> None:
    """Fetches entries until all are there, no server is left, the folder takes no more, or it is
    `end` by the monotonic clock. What is refused is passed over.
    """
    left = list(entries)
    for address, secret in servers:
        if not left:
            return
        left_s = max(0.001, min(SILENT_S, end - time.monotonic()))
        try:
            with PeerConnection(address, bytes.fromhex(secret), tls, timeout_s=left_s) as peer:
                for entry in list(left):
                    try:
                        fetch(peer, entry, folder, end)
                        left.remove(entry)
                    except FileNotFoundError:
                        pass
                    except RefusedEntry as error:
                        _log.warning("%s", error)
                        count("compiled/refused")
        except PeerFailed:
            continue
        except OSError as error:
            _log.warning("%s takes no more compiled programs: %s", folder, error)
            return


def fetch(peer: PeerConnection, entry: Entry, folder: Path, end: float) -> None:
    """Puts an entry of a peer into the folder, whole or not at all.

    Raises RefusedEntry for other bytes than were told, PeerFailed, FileNotFoundError, and OSError
    where the folder does not take it.
    """
    if shutil.disk_usage(folder).free < entry.size + LEAST_FREE_BYTES:
        raise OSError(errno.ENOSPC, f"it has no room for {entry.name}")
    descriptor, name = tempfile.mkstemp(prefix=".fetched-", dir=folder)
    aside = Path(name)
    try:
        digest = hashlib.sha256()
        with os.fdopen(descriptor, "wb") as file:
            for offset in range(0, entry.size, PIECE_BYTES):
                piece = memoryview(bytearray(min(PIECE_BYTES, entry.size - offset)))
                left_s = end - time.monotonic()
                if left_s <= 0:
                    raise PeerFailed(errno.ETIMEDOUT, f"{entry.name} did not come in time")
                got = peer.read(entry.name, offset, [piece], min(SILENT_S, left_s))
                digest.update(piece[:got])
                file.write(piece[:got])
        if digest.hexdigest() != entry.digest:
            raise RefusedEntry(
                errno.EBADMSG,
                f"{entry.name} of {peer.address} is refused: its {entry.size:,} bytes do not have"
                " the digest that was told through the coordinator",
            )
        aside.replace(folder / entry.name)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    note_sealed(folder, [entry])


# --- what hosts tell each other


def _listing(entries: Iterable[Entry]) -> list[list[Any]]:
    return [[each.name, each.size, each.digest] for each in entries]


def _entries(listing: Iterable[Sequence[Any]]) -> dict[str, Entry]:
    """Returns what a host has told, without what can be no entry of jax's."""
    found = {}
    for name, size, digest in listing:
        is_name = name.isprintable() and name.endswith("-cache") and len(name) <= LONGEST_NAME
        if is_name and "/" not in name and name[0] != "." and 0 < size <= OFFER_BYTES:
            found[name] = Entry(name, size, digest)
    return found


def _offered(folder: Path) -> dict[str, Entry]:
    """Returns what a host has, used last first, up to OFFER_BYTES."""
    used = []
    for entry in sealed(folder).values():
        with contextlib.suppress(FileNotFoundError):
            used.append((last_used((folder / entry.name).lstat()), entry))
    offered = {}
    total = 0
    for _, entry in sorted(used, key=lambda each: -each[0]):
        total += entry.size
        if total <= OFFER_BYTES:
            offered[entry.name] = entry
    return offered


def _digest_of(entries: Mapping[str, Entry]) -> str:
    lines = sorted(entry.line() for entry in entries.values())
    return hashlib.sha256("".join(lines).encode()).hexdigest() if lines else ""


def _place_of(folder: Path | None) -> str:
    """Returns what tells this host's folder from others."""
    if folder is None:
        return ""
    status = folder.stat()
    return f"{boot_id()} {status.st_dev} {status.st_ino}"


def _plan(hosts: list[dict[str, str]]) -> dict[str, Any] | None:
    """Decides who leads each host, and by set of entries who holds it, of whom the first tells what
    it has; None: there is one host, or nothing to keep.
    """
    leaders: dict[str, int] = {}
    sets: dict[tuple[str, str], list[int]] = {}
    for rank, each in enumerate(hosts):
        if leaders.setdefault(each["host"], rank) == rank:
            sets.setdefault((each["kind"], each["set"]), []).append(rank)
    if len(leaders) == 1:
        return None
    return {
        "alike": len(sets) == 1,
        "leaders": list(leaders.values()),
        "holders": [ranks[:MOST_HOLDERS] for (_, digest), ranks in sets.items() if digest],
    }


def _union(told: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns by kind all entries, of two that differ the first, and who serves them."""
    entries: dict[str, dict[str, list[Any]]] = {}
    servers: dict[str, list[list[str]]] = {}
    for each in told:
        if each.get("at"):
            servers.setdefault(each["kind"], []).append(each["at"])
        for entry in each.get("entries", ()):
            entries.setdefault(each["kind"], {}).setdefault(entry[0], entry)
    listings = {kind: list(found.values()) for kind, found in entries.items()}
    return {"entries": listings, "at": servers}


def _common(told: list[list[str] | None]) -> list[str]:
    """Returns the names that every host has whole."""
    leaders = [set(each) for each in told if each is not None]
    return sorted(set.intersection(*leaders))
