"""Branches: which stretch of saves of a root goes on from which step, so that no step of an
abandoned branch comes back from a host.

`.holdfast/openings/<n>.json` is written, by create-if-absent and durably, before the first commit
of a branch, n rising. A manager begins one with its first save, and a new one with the first
after a restore or after the newest step was deleted. It goes on from the newest step, or where
the program has gone back from the one that it went back to. What the store has above that is marked
as left first (see `left_behind`). Roots that no local tier was
ever used with have no such files. Only the newest are kept: what belongs to a branch that the root
does not know counts as abandoned.

Steps are a line: a save comes above the newest step. One at or below it begins a branch where the
program has gone back, which it has if it restored a lower step since its last save. All else at or
below the newest step is a mistake, such as a run from scratch in an old folder.

A copy of a root has the files of the original. Both go on from them, with one folder on the hosts.
So each file says where it was written (see `where_of`), and one that was written elsewhere is not
known to the root. A root without a known branch begins a run of its own.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import re
import secrets
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass

from ..agreement.save_protocol import BranchStart, SaveKey
from ..errors import CheckpointError, StepOutOfOrder
from ..format.limits import MALFORMED
from ..format.record import whole
from ..storage.base import NameTaken, Storage
from ..storage.retries import until
from ..storage.threads import run_side_by_side
from ..storage.tombstone import is_sealed, sealed_json
from .claims import FOLDER, WRITER_ID
from .left_behind import NOTHING

_log = logging.getLogger(__name__)
BRANCHES = f"{FOLDER}/openings"  # the name on disk
KEPT_BRANCHES = 64
RACES = 16  # for one number
_NAME = re.compile(rf"{re.escape(BRANCHES)}/([1-9]\d{{0,17}})\.json")
RUN_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Branch:
    """One stretch of saves: `run` is the root's id, `writer` what its save ids begin with, `base`
    the step that it goes on from, `where` what tells the root from a copy of it.
    """

    run: str
    number: int
    writer: str
    base: int
    where: str = ""

    @property
    def start(self) -> BranchStart:
        """What the processes of a job tell each other of it."""
        return BranchStart(self.number, self.base)

    @property
    def file_name(self) -> str:
        """The name of its file in the root."""
        return f"{BRANCHES}/{self.number}.json"

    def to_bytes(self) -> bytes:
        """Returns the text of its file, which ends in its own checksum as a record does."""
        return sealed_json(asdict(self))


def where_of(storage: Storage) -> str:
    """Returns what tells a root from a copy of it, and stays when it is moved or mounted elsewhere.

    In a folder these are inode numbers. Without hard links they may change with each mount, so
    there, and on an object store, it is the address.
    """
    if storage.posix is None or not storage.posix.can_link:
        return storage.root
    root = storage.posix.path
    try:
        return f"inodes {root.stat().st_ino} {(root / FOLDER).stat().st_ino}"
    except FileNotFoundError:  # nobody has a claim
        return ""


def _parse(data: bytes, number: int, where: str) -> Branch:
    """Returns a branch; one that cannot be read, or was written elsewhere, went on from nothing, as
    far as anybody knows.
    """
    try:
        found = json.loads(data) if is_sealed(data) else {}
        if (
            RUN_ID.fullmatch(found["run"])
            and found["number"] == number
            and WRITER_ID.fullmatch(found["writer"])
            and found["where"] == where
        ):
            base = whole(found["base"] + 1) - 1
            return Branch(found["run"], number, found["writer"], base, where=where)
    except MALFORMED:
        pass
    return Branch("", number, "", NOTHING)


def read_branches(storage: Storage) -> list[Branch]:
    """Returns the branches of a root, oldest first. Raises the store's OSError."""
    where = where_of(storage)
    entries = storage.list(BRANCHES, names_only=True)
    numbers = sorted(int(match[1]) for each in entries if (match := _NAME.fullmatch(each.name)))
    read = run_side_by_side(
        lambda number: _read(storage, number, where), numbers, storage.max_concurrency
    )
    found = [branch for branch in read if branch is not None]
    run = run_of(found)
    return [
        branch if branch.run == run else Branch(run, branch.number, "", NOTHING) for branch in found
    ]


def _read(storage: Storage, number: int, where: str) -> Branch | None:
    try:
        return _parse(storage.fetch(f"{BRANCHES}/{number}.json", 1 << 16), number, where)
    except FileNotFoundError:  # pruned meanwhile
        return None
    except (OverflowError, CheckpointError):
        return _parse(b"", number, where)


def run_of(branches: Sequence[Branch]) -> str:
    """Returns the id of the root by its newest branch that can be read, "" where there is none."""
    return next((branch.run for branch in reversed(branches) if branch.run), "")


@dataclass(frozen=True)
class Position:
    """Where a save stands among the steps: `base` is the step that it goes on from. As a branch it
    leaves all above that behind, but for what was saved since the same restore: `restores` counts
    them. It `is_newest` where it is above all others, and `replaces` a step of its number that is
    there.
    """

    base: int = NOTHING
    is_branch: bool = False
    is_newest: bool = False
    restores: int = 0
    replaces: bool = False


class StepOrder:
    """What a program has restored since its last save, alike on every process. Thread-safe.

    Without `has_order` steps are no line: every number may be saved, and no branch begins.
    """

    def __init__(self, where: str, *, has_order: bool = True) -> None:
        self._where = where
        self._has_order = has_order
        self._lock = threading.Lock()
        self._restored: set[int] = set()
        self._restores = 0
        self._gone_back = set[int]()  # of those, what a branch goes on from whose save is under way

    @property
    def has_restored(self) -> bool:
        """Whether something was restored since the last save."""
        with self._lock:
            return bool(self._restored)

    def may_go_back(self, step: int) -> bool:
        """Says whether the save of a step may go on from one below it that was restored."""
        with self._lock:
            return self._has_order and any(each < step for each in self._restored)

    def restored(self, step: int) -> None:
        """Notes that what is saved next may go on from a step."""
        with self._lock:
            self._restored.add(step)
            self._restores += 1
            self._gone_back.discard(step)

    def place(
        self, step: int, newest: int, *, overwrite: bool, may_replace: bool = False
    ) -> Position:
        """Returns the place of a save. `newest` is the newest step, NOTHING where there is none.

        One that `may_replace` is no branch where nothing below it was restored. Raises
        StepOutOfOrder.
        """
        with self._lock:
            restores = self._restores
            # What was restored for a look, beside the step that the program goes on from, is lower.
            base = max((each for each in self._restored if each < step), default=None)
        if step > newest:
            return Position(newest, is_newest=True, restores=restores)
        if overwrite or not self._has_order:
            return Position(newest, restores=restores)
        if base is not None:
            return Position(base, is_branch=True, restores=restores)
        if may_replace:
            return Position(newest, restores=restores)
        raise self._out_of_order(step, newest)

    def _out_of_order(self, step: int, newest: int) -> StepOutOfOrder:
        return StepOutOfOrder(
            f"step {step} of {self._where} would come before step {newest}, which is the newest"
            " there, and this manager has restored no step below it: nothing was written. To go on"
            f" from a step below {step}, restore it by this manager first. To begin anew, save to"
            " another folder, or delete the steps. Where steps come in no order, pass"
            " Options(out_of_order=True)",
            step=step,
            path=self._where,
            newest=newest,
        )

    def begun(self, place: Position) -> None:
        """Notes that a save has begun. What was restored for a look is no matter above the newest
        step.
        """
        with self._lock:
            self._gone_back = set(self._restored)
            if place.is_newest:
                self._restored.clear()

    def saved(self, place: Position) -> None:
        """Notes that a save is there. A branch has begun then: until then its base counts."""
        if not place.is_branch:
            return
        with self._lock:
            self._restored -= self._gone_back


class Lineage:
    """The branches of a root as its writing primary begins them. Thread-safe; blocks as the store
    does, and raises its OSError.

    With `begins` there are branches from this manager's first save on; without, only where the root
    has some already. Where its opening found none, the first save does not look for them again.
    `mark` marks the steps of the store as left that are above a base, but for some: it is called
    with the store, the base, the id of the branch's first save, and those.
    """

    def __init__(
        self,
        storage: Storage,
        writer_id: str,
        *,
        begins: bool,
        found_none: bool = False,
        mark: Callable[[Storage, int, str, Collection[int]], None] = lambda *_: None,
    ) -> None:
        self._storage = storage
        self._writer_id = writer_id
        self._begins = begins
        self._found_none = found_none
        self._mark = mark
        self._lock = threading.Lock()
        self._is_open = False
        self._current: Branch | None = None
        # An outcome that was not heard makes no step that was left: steps since the last restore.
        self._restores = 0
        self._saved: set[int] = set()

    def restored(self) -> None:
        """Notes that whatever is saved next may go on from another step."""
        with self._lock:
            self._is_open = False

    def deleting_newest(self, step: int, end_s: float = math.inf) -> None:
        """Begins a branch below the newest step, which is about to be deleted: local steps from
        there on do not come back.
        """
        with self._lock:
            self._current = self._begin(until(self._storage, end_s), step - 1)

    def current(self, key: SaveKey, place: Position, end_s: float = math.inf) -> Branch | None:
        """Returns the branch that a save belongs to, which its file says durably by then; None
        where the root has none. What it leaves behind is marked by then too. The store is asked
        until `end_s` by the monotonic clock.

        Raises Fenced, NotCommitted, CheckpointError, OSError.
        """
        storage = until(self._storage, end_s)
        with self._lock:
            if place.restores != self._restores:
                self._restores = place.restores
                self._saved.clear()
            if place.is_branch:
                # First: a crash between the two leaves what the hosts have.
                self._mark(storage, place.base, key.save_id, self._saved)
                self._is_open = False
            if not self._is_open:
                has_none = self._found_none and not self._begins
                # For one save alone: other managers of the root may begin branches meanwhile.
                self._found_none = False
                self._current = None if has_none else self._begin(storage, place.base)
                self._is_open = True
            if place.is_branch:
                self._saved.add(key.step)
            return self._current

    def _begin(self, storage: Storage, base: int) -> Branch | None:
        for _ in range(RACES):
            known = read_branches(storage)
            if not known and not self._begins:
                return None
            branch = Branch(
                run_of(known) or secrets.token_hex(16),
                known[-1].number + 1 if known else 1,
                self._writer_id,
                base,
                where=where_of(storage),
            )
            with contextlib.suppress(NameTaken):
                storage.commit(branch.file_name, branch.to_bytes(), f"{FOLDER}/{self._writer_id}")
                _prune(storage, known)
                return branch
        raise NameTaken(
            errno.EEXIST,
            f"other writers took {RACES} numbers of branches",
            f"{storage.root}/{BRANCHES}",
        )


def _prune(storage: Storage, known: Sequence[Branch]) -> None:
    try:
        storage.delete([branch.file_name for branch in known[: -KEPT_BRANCHES + 1]])
    except OSError as error:
        _log.warning(
            "old branches of %s could not be deleted, the next one does it: %s",
            storage.root,
            error,
        )
