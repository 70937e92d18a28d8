"""The journal, in which a coordinator's state survives its death: an SQLite database in WAL mode,
written before each answer.

It survives the process, not the machine: nothing is fsynced. A lock on `<path>.lock` is held for
life, so that a second coordinator on the same journal is refused, with the name of the holder.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

from ..core import journal_codec
from ..core.journal_codec import META, Row
from ..core.machine import Machine
from ..limits import Config

FORMAT = "holdfast/journal/2"

# synchronous=OFF: what is written is the kernel's, which outlives this process, and an fsync for
# each answer would cost milliseconds. locking_mode=EXCLUSIVE: no other process reads it.
_SCHEMA = """
PRAGMA journal_mode=WAL;
PRAGMA synchronous=OFF;
PRAGMA locking_mode=EXCLUSIVE;
CREATE TABLE IF NOT EXISTS rows
    (tab TEXT, key TEXT, value BLOB, PRIMARY KEY (tab, key)) WITHOUT ROWID;
"""


class JournalError(Exception):
    """Says that a journal cannot be used, and why."""


class SqliteJournal:
    """An open journal. `incarnation` is the one that it holds, None in a fresh one."""

    def __init__(self, path: str | Path, clock: Callable[[], float]) -> None:
        self.path = Path(path)
        self._clock = clock
        self._lock = self._take_lock()
        try:
            self._database = sqlite3.connect(self.path, isolation_level=None)
            self._database.executescript(_SCHEMA)
        except sqlite3.DatabaseError as error:
            os.close(self._lock)
            raise JournalError(
                f"journal {self.path}: not a journal of a coordinator ({error}); expected one, or"
                " no file"
            ) from None

    def _take_lock(self) -> int:
        path = f"{self.path}.lock"
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise JournalError(
                f"journal {self.path}: cannot be opened: {error.strerror}; expected a folder that"
                " can be written"
            ) from None
        # A lock of the kernel, which the end of the holder frees: a file that said "held" would
        # outlive a coordinator that was killed.
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 1_000, 0).decode(errors="replace") or "another coordinator"
            os.close(lock)
            raise JournalError(
                f"journal {self.path}: held by {holder}; end it first, or use another journal"
            ) from None
        return lock

    def announce(self, address: str) -> None:
        """Writes the holder's address into the lock, for the error of a second coordinator."""
        where = f"host {socket.gethostname()}, pid {os.getpid()}"
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"the coordinator at {address} ({where})".encode(), 0)

    def incarnation(self, config: Config) -> int | None:
        """Returns the incarnation of the service that wrote this journal, None for a fresh one;
        JournalError for another job's.
        """
        row = self._database.execute(
            "SELECT value FROM rows WHERE tab = ? AND key = 'identity'", (META,)
        ).fetchone()
        if row is None:
            return None
        kept = json.loads(row[0])
        expected = _identity(config)
        its = {name: kept.get(name) for name in expected}
        if expected != its:
            raise JournalError(
                f"journal {self.path}: of another job: expected {_describe(expected)}, found"
                f" {_describe(its)}; use another journal"
            )
        return int(kept["incarnation"])

    def open(self, config: Config, incarnation: int | None) -> Machine:
        """Returns the machine that the journal holds, or a fresh one; `config` holds the
        incarnation to go by.
        """
        now = self._clock()
        machine = Machine(config, now)
        if incarnation is None:
            identity = _identity(config) | {"incarnation": config.incarnation}
            self._put([Row(META, "identity", json.dumps(identity).encode())])
        else:
            kept = self._database.execute(
                "SELECT tab, key, value FROM rows WHERE key != 'identity' OR tab != ?", (META,)
            )
            rows = (Row(table, key, value) for table, key, value in kept)
            journal_codec.load(machine, rows, now, self._wall_offset_s())
            text = "the coordinator was started again, with its journal"
            machine.events.note("coordinator", text, now)
        return machine

    def _wall_offset_s(self) -> float:
        # Taken anew each time: the machine's clock stands still while a host sleeps, wall time
        # does not.
        return time.time() - self._clock()

    def write(self, machine: Machine) -> None:
        """Writes what has changed, in one transaction."""
        parts = (machine.task_table.dirty, machine.keys.dirty, machine.barriers.dirty)
        if any(parts) or machine.events.added:
            self._put(journal_codec.drain(machine, self._wall_offset_s()))

    def _put(self, rows: list[Row]) -> None:
        # One transaction: a coordinator that dies in between leaves all of a batch, or nothing.
        self._database.execute("BEGIN")
        self._database.executemany(
            "DELETE FROM rows WHERE tab = ? AND key = ?",
            [row[:2] for row in rows if row.value is None],
        )
        self._database.executemany(
            "INSERT OR REPLACE INTO rows VALUES (?, ?, ?)",
            [row for row in rows if row.value is not None],
        )
        self._database.execute("COMMIT")

    def close(self, finished: bool) -> None:
        """Releases the journal. A job that has `finished` leaves it empty: the next run of the same
        name begins anew.
        """
        if finished:
            self._database.execute("DELETE FROM rows")
        self._database.close()
        os.close(self._lock)


def _identity(config: Config) -> dict[str, object]:
    return {
        "format": FORMAT,
        "job": config.job,
        "attempt": config.attempt,
        "num_processes": config.num_tasks,
    }


def _describe(identity: dict[str, object]) -> str:
    return (
        f"job {identity['job']!r}, attempt {identity['attempt']}, {identity['num_processes']}"
        f" processes, format {identity['format']!r}"
    )
