"""A coordinator in this program, over its real transport, that dies and begins again with its
journal.
"""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.coordination.core.machine import Machine
from holdfast.coordination.core.task_table import TaskState
from holdfast.coordination.limits import Config
from holdfast.coordination.server.journal import SqliteJournal
from holdfast.coordination.server.listening import Listening
from holdfast.coordination.server.service import Service
from holdfast.coordination.server.transport import Transport
from tests.support.proxy import Proxy

HEARTBEAT_S = 4.0
RECONNECT_GRACE_S = 3.0
# When it dies: with nothing to write; before the journal has the next change, or after that.
MOMENTS = ("between calls", "before it writes", "after it has written")
FULL = "its disk is full"  # it lives on, and has no journal for some seconds
_START_S = 10.0


class _KilledError(Exception):
    """Ends the service in the middle of what it does."""


class FullDisk:
    """Stands for a database that cannot grow any more."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)

    def executemany(self, *arguments: Any) -> None:
        """Raises what SQLite raises."""
        raise sqlite3.OperationalError("database or disk is full")


class MortalJournal:
    """A journal in whose writing a coordinator may die (see MOMENTS), or find no room (FULL)."""

    def __init__(self, journal: SqliteJournal) -> None:
        self._journal = journal
        self.state = journal.state
        self.moment = ""

    def write(self, machine: Machine) -> None:
        """Writes, unless the coordinator dies before that; or it dies after that."""
        moment = self.moment if machine.changes else ""
        if moment == MOMENTS[1] or self.moment == MOMENTS[0]:
            raise _KilledError
        if moment == FULL:
            # The journal that it begins anew has room again.
            vars(self._journal)["_database"] = FullDisk(self._journal._database)
            self.moment = ""
        self._journal.write(machine)
        if moment == MOMENTS[2]:
            raise _KilledError

    def close(self, finished: bool) -> None:
        """Leaves the file as it is, for the next life."""
        self._journal.close(finished=False)


class MortalService(Service):
    """A Service that dies with its journal, and says nothing more."""

    def __init__(self, config: Config, path: Path, clock: Callable[[], float]) -> None:
        journal = SqliteJournal(path, clock)
        incarnation = journal.incarnation(config)
        known = replace(config, incarnation=incarnation or config.incarnation)
        self.journal = MortalJournal(journal)
        super().__init__(journal.open(known, incarnation), clock, self.journal)
        self.dead = threading.Event()

    def flush(self) -> None:
        """Writes and answers, unless it dies on the way."""
        if self.dead.is_set():
            return
        try:
            super().flush()
        except _KilledError:
            self.close()

    def close(self) -> None:
        """Ends without a word, as a process that is killed."""
        if not self.dead.is_set():
            self.journal.close(finished=False)
            self.dead.set()

    def close_journal(self) -> None:
        """Does nothing: it is closed at the death, for the next life."""


class _Life:
    """One life of the coordinator, on a thread."""

    def __init__(self, config: Config, path: Path) -> None:
        self._config = config
        self._path = path
        self._ends = False
        self._bound = threading.Event()
        self.address = ""
        self.thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
        self.thread.start()
        assert self._bound.wait(_START_S), "the coordinator did not begin"

    def _run(self) -> None:
        # On this thread, since SQLite's connections are of the thread that opens them.
        self.service = MortalService(self._config, self._path, time.monotonic)
        transport = Transport(self.service, Listening("127.0.0.1:0"))
        self.address = f"127.0.0.1:{transport.bind()}"
        asyncio.run(transport.serve(self._reason, self._bound.set))

    def _reason(self) -> str | None:
        return "it was killed" if self._ends or self.service.dead.is_set() else None

    def end(self) -> None:
        """Ends it, and waits."""
        self._ends = True
        self.thread.join(_START_S)


class Coordinator:
    """The coordinator of one job behind proxies, through all its lives. A context manager."""

    def __init__(self, count: int, folder: Path) -> None:
        self._path = folder / "journal"
        self._config = Config(
            count,
            secrets.randbits(62),
            heartbeat_timeout_s=HEARTBEAT_S,
            reconnect_grace_s=RECONNECT_GRACE_S,
            recoverable=True,
        )
        self._proxies: Sequence[Proxy] = ()
        self._over = False
        self._lives: list[_Life] = []
        self._begin()
        self._keeper = threading.Thread(target=self._keep, name="launcher", daemon=True)
        self._keeper.start()

    def _begin(self) -> None:
        self._lives.append(_Life(self._config, self._path))
        for proxy in self._proxies:
            proxy.retarget(self.address)

    @property
    def address(self) -> str:
        """Where it listens in its present life."""
        return self._lives[-1].address

    def serve(self, proxies: Sequence[Proxy]) -> None:
        """Takes the proxies by which the processes reach it."""
        self._proxies = proxies

    def harm(self, moment: str) -> None:
        """Has it die at a moment, and begin again at once, elsewhere; or find its disk FULL."""
        self._lives[-1].service.journal.moment = moment

    def spare(self) -> None:
        """Lets it live, where its moment has not come."""
        self._lives[-1].service.journal.moment = ""

    def _keep(self) -> None:
        while not self._over:
            if self._lives[-1].service.dead.wait(0.2) and not self._over:
                self._revive()

    def _revive(self) -> None:
        # Its kernel closes its connections: first, so that nobody speaks to a dead one.
        for proxy in self._proxies:
            proxy.retarget("")
            proxy.cut()
        self._begin()

    def steps(self) -> dict[int, int | None]:
        """Returns the step that each task has last reported."""
        tasks = self._lives[-1].service.machine.task_table.tasks
        return {task.task_id: task.progress.step for task in tasks}

    def connected(self) -> set[int]:
        """Returns the tasks that it takes for alive."""
        tasks = self._lives[-1].service.machine.task_table.tasks
        return {task.task_id for task in tasks if task.state is TaskState.CONNECTED}

    def journal_mode(self) -> int:
        """Returns who may read its journal, in which keys of the job are."""
        return self._path.stat().st_mode & 0o777 if self._path.exists() else 0o600

    def held_keys(self) -> list[str]:
        """Returns the keys that it holds."""
        return sorted(self._lives[-1].service.machine.keys.values)

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *error: object) -> None:
        self._over = True
        self._keeper.join(_START_S)
        for life in self._lives:
            life.end()
