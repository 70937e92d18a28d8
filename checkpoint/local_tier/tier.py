"""The local tier of a manager: saves onto the hosts, copies at peers, and restores from both.

A local save is a lane of its own beside the durable one: the primary begins it, each process writes
its part and then pulls those of peers, all report, and the primary says how it ended. Nothing is
made durable, and no word of it is needed later: what comes back is decided from the parts that are
found.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.multihost.group.runtime import tls_files

from ..agreement.exchange import ask_primary
from ..agreement.save_protocol import BranchStart, SaveKey, SaveResult
from ..errors import (
    CheckpointError,
    SaveCancelled,
    StepNotFound,
    failure_of,
)
from ..layouts.holdfast import HoldfastCheckpoint
from ..layouts.inspection import Structure, structure_of
from ..options import Local
from ..peers.peer_tls import PeerTls
from ..saving.async_saver import AsyncSaver
from ..saving.stager import OneSave
from ..steps.lineage import Lineage, NoLineage
from ..steps.opening import OpenRoot
from ..steps.root_report import HostCopies
from ..storage.path import StorePath
from .host_folder import HostStorage, RunFolder
from .local_save import HostPlace
from .local_steps import LocalSteps
from .meeting import meet
from .part_copier import PartCopier
from .parts import LocalKey, StepHead

_log = logging.getLogger(__name__)
_COUNTS = (
    "saves",
    "saves_failed",
    "save_s",
    "save_bytes",
    "restores",
    "restores_failed",
)


class LocalTier:
    """The local tier of one manager on one process. In a group every process calls the same, in the
    same order.

    Methods are for the manager's thread; saves run on a thread of their own. `close()` waits for
    the save in flight.
    """

    def __init__(self, local: Local, root: OpenRoot, lineage: Lineage | NoLineage) -> None:
        path = Path(local.path)
        group = root.group
        storage = HostStorage(path)
        # The store's disk is not this host's, and a bar for each local save would flicker.
        options = replace(
            root.options, progress=None, check_free_space=False, save_timeout_s=local.timeout_s
        )
        self.root = replace(root, storage=storage, options=options)
        self._local = local
        self._store = root
        self._group = group
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(_COUNTS, 0.0)
        messages = f"{root.messages}/local"
        files = tls_files()
        tls = None if files is None else PeerTls(*files)
        self._meeting = meet(local, path, group, f"{messages}/meet", tls)
        self._place = HostPlace(
            local=local,
            path=path,
            storage=storage,
            group=group,
            options=options,
            meeting=self._meeting,
            copier=PartCopier(local, self._meeting),
            lineage=lineage,
            writer_id=root.writer.id,
            folders=RunFolder(path, syncs=local.sync),
        )
        self._steps = LocalSteps(root.storage, self._place)
        self.saver = AsyncSaver(self)
        try:
            self.survey()
            self._check_usable()
        except BaseException:
            self.close()
            raise

    def _check_usable(self) -> None:
        off = self._steps.off
        if not off:
            return
        root = self._store.where
        if self._local.strict:
            message = f"the local tier of {root} cannot be used: {off}"
            raise CheckpointError(message, path=str(self._place.path))
        if self._group.index == 0:
            _log.warning("the local tier of %s is off: %s", root, off)

    # --- what is there

    def survey(self) -> None:
        """Finds out which local steps may come back; every process calls it. Blocks."""
        timeout_s = self.root.options.restore_timeout_s
        self.saver.join(timeout_s)
        self._steps.survey(f"{self._place.messages}/survey", timeout_s)

    def found(self) -> list[LocalKey]:
        """Returns the local steps that may come back, best first."""
        return [step.key for step in self._steps.restorable()]

    def steps(self) -> list[int]:
        """Returns the local steps that may come back, ascending."""
        return sorted({key.step for key in self.found()})

    def copies(self) -> dict[int, HostCopies]:
        """Returns where the parts of each of these steps are, as of the last survey or save."""
        return self._steps.copies()

    def pass_over(self, key: LocalKey) -> None:
        """Notes that a local step could not be restored."""
        self._steps.pass_over(key)
        self._count(restores_failed=1)

    def roll_back(self, step: int, begin: Callable[[], None]) -> None:
        """Lets no local step from `step` on come back: `begin` has the root say so, at the primary.

        Every process calls it. Blocks. Raises, on every process, what `begin` raises.
        """
        name = f"{self._place.messages}/delete/{step}"
        ask_primary(self._group, name, begin, self._store.options.save_timeout_s)
        # Only now: until the root says so, a crash would bring these steps back.
        self._steps.forget_from(step)

    def leave(self, branch: BranchStart, step: int) -> None:
        """Lists no local step any more that the branch of a durable save has left, and none that
        it has replaced; on the thread of that save.
        """
        self._steps.leave(branch)
        self._steps.replace(step)

    # --- saving

    @property
    def off(self) -> str:
        """Why no local saves are made, or ""."""
        return self._steps.off

    @property
    def is_strict(self) -> bool:
        """Whether a local save that fails is an error of the program's."""
        return self._local.strict

    @property
    def history(self) -> None:
        """None: local saves link nothing."""

    def new_save(self, counter: int, step: int) -> OneSave:
        """Returns a local save of a step, with nothing in it."""
        # The durable lane counts from 1: no two saves of a writer have one id.
        save_id = f"{self._place.writer_id}{1 << 31 | counter:08x}"
        return OneSave(root=self.root, key=SaveKey(save_id, counter, step), is_local=True)

    def run(self, save: OneSave) -> SaveResult:
        """Does a whole local save, on the saving thread; a failure is in the result, and logged."""
        try:
            result = self._steps.save(save)
        except Exception as error:
            result = SaveResult(save.key, failure_of(error, save.step, self._group.index))
        finally:
            save.release()
        if result.error is None:
            save_s = time.monotonic() - save.began
            self._count(saves=1, save_s=save_s, save_bytes=save.own_bytes)
        elif not isinstance(result.error, SaveCancelled):
            self._count(saves_failed=1)
            _log.warning(
                "the local save of step %d failed; durable saves go on: %s",
                save.step,
                result.error,
            )
        return result

    # --- restoring

    @contextlib.contextmanager
    def opened(self, key: LocalKey, question: str) -> Iterator[HoldfastCheckpoint]:
        """Opens a local step to read from; every process calls it, with the same `question`.
        Blocks. What is read within counts as a restore.
        """
        storage, record = self._steps.open(key, question)
        with contextlib.closing(storage):
            yield HoldfastCheckpoint(StorePath(storage, key.folder), record)
        self._count(restores=1)

    def head(self, step: int) -> StepHead:
        """Returns metrics and metadata of a local step. Raises StepNotFound, Corrupt."""
        return self._steps.head(step)

    def structure(self, step: int) -> Structure:
        """Returns what a local step holds; every process calls it. Blocks.

        Raises StepNotFound, CheckpointError, on every process.
        """
        self.survey()
        key = next((key for key in self.found() if key.step == step), None)
        if key is None:
            raise StepNotFound(f"the hosts have no step {step} any more", step=step)
        storage, record = self._steps.open(key, key.folder)
        with contextlib.closing(storage):
            return structure_of(HoldfastCheckpoint(StorePath(storage, key.folder), record))

    # --- the end

    def _count(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount

    def statistics(self) -> dict[str, Any]:
        """Returns what the tier has done, in JSON types, and why it is `local_off`.

        `local_survives` is how many hosts may be lost before the newest local step is.
        """
        with self._lock:
            counted = self._counts | {"copied_bytes": float(self._steps.copied_bytes)}
        counts = {
            f"local_{name}": amount if name.endswith("_s") else int(amount)
            for name, amount in counted.items()
        }
        survives = self._steps.newest_survives()
        return counts | {"local_survives": survives, "local_off": self._steps.off}

    def close(self) -> None:
        """Ends the part server, and lets the saving thread end. Idempotent."""
        self.saver.close()
        self._meeting.close()
        self._place.folders.close()
