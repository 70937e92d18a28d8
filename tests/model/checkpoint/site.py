"""The real thing that a life works on: a root, the managers of its processes, and their clock."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.checkpoint import (
    CheckpointError,
    CheckpointManager,
    EveryNSteps,
    Local,
    Options,
    SavePolicy,
)
from holdfast.checkpoint.format.record import read_record
from holdfast.checkpoint.format.step_folders import list_steps
from holdfast.checkpoint.storage.path import open_storage
from holdfast.checkpoint.storage.tombstone import RECORD_NAME
from holdfast.multihost import Group, Solo
from tests.support.checkpointing import groups

from .clock import CLOCK, Clock
from .contents import is_own
from .policies import KEEP, SAVE
from .settings import Settings

MEMORY = Path("/dev/shm")
TIMEOUT_S = 20.0
MOST_PROCESSES = 3
# What lives put beside the root.
NEIGHBOURS = re.compile(r"run|copy|converted|one|other|orbax.*|host\d|moved-\d+")
_numbers = itertools.count()


@dataclass(frozen=True)
class Raised:
    """What a call raised, in place of what it returns."""

    error: Exception

    @property
    def kind(self) -> str:
        return type(self.error).__name__

    def __repr__(self) -> str:
        return f"{self.kind}: {self.error}"


class Jobs:
    """The groups of jobs with so many processes, which are threads: begun once for all lives."""

    def __init__(self) -> None:
        self._open = contextlib.ExitStack()
        self._groups: dict[int, list[Group]] = {1: [Solo()]}
        self.pool = ThreadPoolExecutor(MOST_PROCESSES)

    def groups(self, count: int) -> list[Group]:
        """Returns the group of each process."""
        if count not in self._groups:
            self._groups[count] = list(self._open.enter_context(groups(count)))
        return self._groups[count]

    def close(self) -> None:
        """Ends the jobs."""
        self._open.close()
        self.pool.shutdown()


JOBS = Jobs()


class Site:
    """A root with the managers of one life, opened."""

    def __init__(self, settings: Settings, folder: Path, clock: Clock) -> None:
        self.settings = settings
        self.folder = folder
        self.clock = clock
        self.root = folder / "run"
        self.managers: list[CheckpointManager] = []
        self.times_set = 0  # by which their clock was set when they opened
        self.foreign: dict[Path, bytes] = {}  # what is not holdfast's, and stays
        self.is_whole = True  # nobody has touched holdfast's files
        self.has_failed = False  # the store has, so that files may be left that nobody names
        self.harmed_parts: set[str] = set()  # folders of local steps
        scheme = {"disk": "", "faulty": "faulty://", "memory": "memory://"}[settings.store]
        where = f"model-{next(_numbers)}" if settings.store == "memory" else str(self.root)
        self.url = f"{scheme}{where}"
        self.storage = open_storage(self.url)
        self.open()

    # --- Calls

    def each(self, call: Callable[[int, CheckpointManager], Any]) -> list[Any]:
        """Makes a call on every process, at once; returns what each returned or raised."""

        def answer(rank: int, manager: CheckpointManager) -> Any:
            try:
                return call(rank, manager)
            except Exception as error:
                return Raised(error)

        return self._at_once([partial(answer, *each) for each in enumerate(self.managers)])

    def _at_once(self, calls: list[Callable[[], Any]]) -> list[Any]:
        if len(calls) == 1:
            return [calls[0]()]
        return [future.result() for future in [JOBS.pool.submit(call) for call in calls]]

    # --- Managers

    def open(self) -> None:
        """Opens the root on every process, as new ones do."""
        self.times_set = self.clock.times_set
        members = JOBS.groups(self.settings.processes)
        self.managers = self._at_once([partial(self._opened, group) for group in members])

    def close(self) -> None:
        """Closes the managers; every thread and claim of theirs is gone then."""
        closing = self.managers
        self.managers = []
        if closing:
            self._at_once([manager.close for manager in closing])

    def _opened(self, group: Group) -> CheckpointManager:
        settings = self.settings
        options = Options(
            on_busy=settings.on_busy,  # type: ignore[arg-type]
            save_timeout_s=TIMEOUT_S,
            restore_timeout_s=TIMEOUT_S,
            exit_timeout_s=TIMEOUT_S,
            host_memory_bytes=settings.host_memory_bytes,
            per_process=is_own if settings.per_process else None,
            incremental=settings.incremental != "no",
            full_every=2 if settings.incremental == "full every 2" else None,
            step_format=settings.step_format,
            file_mode=0o640 if settings.modes else None,
            folder_mode=0o750 if settings.modes else None,
            out_of_order=settings.out_of_order,
        )
        return CheckpointManager(
            self.url,
            save_policy=self.save_policy,
            keep_policy=KEEP[settings.keep_policy][0],
            group=group,
            options=options,
            local=self.local(group.index),
        )

    @property
    def save_policy(self) -> SavePolicy | None:
        """The save policy of the managers."""
        return SAVE[self.settings.save_policy][0]

    def local(self, rank: int) -> Local | None:
        """Returns the local tier of a process, on a host of its own."""
        settings = self.settings
        if settings.local is None:
            return None
        return Local(
            self.folder / f"host{rank}",
            save_policy=EveryNSteps(1),
            keep=settings.local,
            strict=settings.local_strict,
            sync=settings.local_sync,
            timeout_s=TIMEOUT_S,
            address="127.0.0.1",
            failure_domain=f"host{rank}",
        )

    def settle(self) -> None:
        """Waits for what the managers do in the background."""
        for manager in self.managers:
            manager.wait_until_finished()
        for manager in self.managers:
            manager._catalog.state.worker.wait(TIMEOUT_S)

    # --- What is there

    @property
    def has_shares(self) -> bool:
        """Whether some of what a step holds is each process's own, so that one alone reads none."""
        of_each = self.settings.items == "iterator" and self.settings.processes > 1
        return self.settings.per_process or of_each

    @property
    def has_files(self) -> bool:
        """Whether the store is a folder."""
        return self.settings.store != "memory"

    def step_name(self, step: int) -> str:
        """Returns how the root calls the folder of a step."""
        return (self.settings.step_format or "{:d}").format(step)

    def listed(self) -> list[int]:
        """Returns the steps that have a record."""
        return list_steps(self.storage)

    def names(self) -> set[str]:
        """Returns what lies in the root beside holdfast's own folder."""
        # All of them: of an object store a tombstone alone makes no name.
        entries = [entry.name for entry in self.storage.list("", recursive=not self.has_files)]
        return {name.partition("/")[0] for name in entries} - {".holdfast"}

    def foreign_names(self) -> set[str]:
        """Returns the names in the root below which there is something of others."""
        inside = [path for path in self.foreign if path.is_relative_to(self.root)]
        return {path.relative_to(self.root).parts[0] for path in inside}

    def own_names(self) -> set[str]:
        """Returns what lies in holdfast's own folder."""
        names = [entry.name for entry in self.storage.list(".holdfast", recursive=True)]
        return {name.split("/")[1] for name in names}

    def files_of(self, step: int) -> list[Path]:
        """Returns the files of a step of ours, its record too; none where there is no folder."""
        folder = self.root / self.step_name(step)
        if not (folder / RECORD_NAME).exists():
            return []
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        return [path for path in files if path not in self.foreign]

    def unnamed_files(self) -> list[str]:
        """Returns the files in steps that their records do not name, and named ones that are not
        there.
        """
        found = []
        for step in self.listed():
            folder = self.step_name(step)
            listed = {entry.name for entry in self.storage.list(folder, recursive=True)}
            listed -= {str(path.relative_to(self.root)) for path in self.foreign}
            record = read_record(self.storage, folder)
            named = {f"{folder}/{name}" for name in [*record.file_names(), RECORD_NAME]}
            found += sorted(listed ^ named)
        return found

    def strange_neighbours(self) -> list[str]:
        """Returns what lies beside the root, and nobody has asked for."""
        return [name for name in os.listdir(self.folder) if not NEIGHBOURS.fullmatch(name)]

    def lost_foreign_files(self) -> list[str]:
        """Returns what is not holdfast's, and is not as it was."""
        return [
            str(path)
            for path, data in self.foreign.items()
            if not path.exists() or path.read_bytes() != data
        ]


@contextlib.contextmanager
def opened_site(settings: Settings) -> Iterator[Site]:
    """Yields a new root with its managers; all of it is gone afterwards."""
    folder = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
    CLOCK.reset()
    try:
        site = Site(settings, folder, CLOCK)
        try:
            yield site
        finally:
            # What a save has failed of was raised before, or is no matter any more.
            with contextlib.suppress(CheckpointError):
                site.close()
    finally:
        shutil.rmtree(folder)


# --- What a life may not leave behind


def descriptors() -> int:
    """Returns how many files this process has open."""
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    """Returns how many threads of Python this process has, however they were started."""
    return len(sys._current_frames())
