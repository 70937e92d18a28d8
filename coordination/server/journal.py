"""The journal, in which a coordinator's state survives its death: an SQLite database in WAL mode,
written before each answer, that only its user can read.

It survives the process, not the machine: nothing is fsynced. A lock on `<path>.lock` is held for
life, so that a second coordinator on the same journal is refused, with the name of the holder.

A journal that cannot be written (no space) is removed before the next answer: a stale one would let
processes pass barriers twice. The coordinator goes on without it, and writes a whole new one as
soon as it can.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

from ..core import journal_codec
from ..core.journal_codec import Row
from ..core.machine import Machine
from ..core.status import META
from ..limits import Config

log = logging.getLogger("holdfast.coordination")

FORMAT = "holdfast/journal/4"

_RETRY_S = 5.0  # between two attempts to write a new journal

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
        self._config = Config(1, incarnation=0)  # until `open`
        self._lost = ""  # why there is no journal now
        self._retry_at = 0.0
        try:
            self._database = self._connect()
        except (OSError, sqlite3.DatabaseError) as error:
            os.close(self._lock)
            what = f"not a journal of a coordinator ({error}); expected one, or no file"
            if isinstance(error, OSError | sqlite3.OperationalError):
                what = f"cannot be opened: {error}; expected a file that can be written"
            raise JournalError(f"journal {self.path}: {what}") from None

    def _connect(self) -> sqlite3.Connection:
        # Keys of the job are in it. SQLite gives its other files the mode of this one.
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(file, 0o600)
        finally:
            os.close(file)
        database = sqlite3.connect(self.path, isolation_level=None)
        try:
            database.executescript(_SCHEMA)
        except BaseException:
            database.close()
            raise
        return database

    @property
    def state(self) -> str:
        """Where it is, and why it is not written."""
        return f"{self.path} is not written: {self._lost}" if self._lost else str(self.path)

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
        self._config = config
        if incarnation is None:
            self._begin(machine)
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

    def _begin(self, machine: Machine) -> None:
        """Writes the identity and what there is to write; without the first, a journal is fresh."""
        identity = _identity(self._config) | {"incarnation": self._config.incarnation}
        rows = journal_codec.drain(machine, self._wall_offset_s())
        self._put([Row(META, "identity", json.dumps(identity).encode()), *rows])

    def write(self, machine: Machine) -> None:
        """Writes what has changed, in one transaction.

        Raises JournalError where it can neither be written nor removed.
        """
        if self._lost:
            self._renew(machine)
            return
        if machine.changes:
            try:
                self._put(journal_codec.drain(machine, self._wall_offset_s()))
            except sqlite3.Error as error:
                self._lose(str(error))
                text = f"the journal cannot be written ({error}); it is removed until it can be"
                machine.events.note("coordinator", text, self._clock())
                log.warning("journal %s", self.state)

    def _lose(self, why: str) -> None:
        """Removes the journal: a coordinator that began with it would repeat what is over."""
        self._lost = why
        self._retry_at = self._clock() + _RETRY_S
        try:
            for suffix in ("", "-wal", "-shm", "-journal"):
                Path(f"{self.path}{suffix}").unlink(missing_ok=True)
        except OSError as error:
            raise JournalError(
                f"journal {self.path}: cannot be written ({why}), nor removed ({error.strerror});"
                " the coordinator ends, since its next life would begin with an old state: remove"
                " the journal"
            ) from None
        with contextlib.suppress(sqlite3.Error):
            self._database.close()

    def _renew(self, machine: Machine) -> None:
        """Writes a whole new journal, where that is due and there is room."""
        if self._clock() < self._retry_at:
            machine.changes.clear()
            return
        machine.touch_all()
        try:
            self._database = self._connect()
            self._begin(machine)
        except (OSError, sqlite3.Error) as error:
            self._lose(str(error))
            return
        self._lost = ""
        log.warning("journal %s is written again", self.path)
        machine.events.note("coordinator", "the journal is written again", self._clock())

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
        if not self._lost:
            try:
                if finished:
                    self._database.execute("DELETE FROM rows")
                self._database.close()
            except sqlite3.Error as error:
                self._lose(str(error))
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
