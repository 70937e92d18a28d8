"""Branches: which stretch of saves of a root goes on from which step, so that no step of an
abandoned branch comes back from a host.

`.holdfast/openings/<n>.json` is written, by create-if-absent and durably, before the first commit
of a branch, n rising. A manager begins one with its first save, and a new one with the first
after a restore or after the newest step was deleted. Roots that no local tier was ever used with
have none. Only the newest are kept: what belongs to a branch that the root does not know counts
as abandoned.

A copy of a root has the files of the original. Both go on from them, with one folder on the hosts.
So each file says where it was written (see `where_of`), and one that was written elsewhere is not
known to the root. A root without a known branch begins a run of its own.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ..agreement.save_protocol import BranchStart
from ..errors import CheckpointError
from ..format.record import whole
from ..storage.base import NameTaken, Storage
from ..storage.threads import run_side_by_side
from ..storage.tombstone import body_of, sealed
from .claims import FOLDER, WRITER_ID

_log = logging.getLogger(__name__)
BRANCHES = f"{FOLDER}/openings"  # the name on disk
KEPT_BRANCHES = 64
NOTHING = -1  # the base of a branch that goes on from no step
RACES = 16  # for one number
_NAME = re.compile(r"([1-9]\d{0,17})\.json")
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

    def to_bytes(self) -> bytes:
        """Returns the text of its file, which ends in its own checksum as a record does."""
        return sealed(json.dumps(asdict(self), separators=(",", ":")).encode()[:-1])


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
        found = json.loads(data) if data == sealed(body_of(data)) else {}
        if (
            RUN_ID.fullmatch(found["run"])
            and found["number"] == number
            and WRITER_ID.fullmatch(found["writer"])
            and found["where"] == where
        ):
            base = whole(found["base"] + 1) - 1
            return Branch(found["run"], number, found["writer"], base, where=where)
    except (ValueError, KeyError, TypeError):
        pass
    return Branch("", number, "", NOTHING)


def read_branches(storage: Storage) -> list[Branch]:
    """Returns the branches of a root, oldest first. Raises the store's OSError."""

    where = where_of(storage)

    def read(number: int) -> Branch | None:
        try:
            return _parse(storage.fetch(f"{BRANCHES}/{number}.json", 1 << 16), number, where)
        except FileNotFoundError:  # pruned meanwhile
            return None
        except (OverflowError, CheckpointError):
            return _parse(b"", number, where)

    names = (entry.name.rpartition("/")[2] for entry in storage.list(BRANCHES, names_only=True))
    numbers = sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))
    found = [
        branch
        for branch in run_side_by_side(read, numbers, storage.max_concurrency)
        if branch is not None
    ]
    run = run_of(found)
    return [
        branch if branch.run == run else Branch(run, branch.number, "", NOTHING) for branch in found
    ]


def run_of(branches: Sequence[Branch]) -> str:
    """Returns the id of the root by its newest branch that can be read, "" where there is none."""
    return next((branch.run for branch in reversed(branches) if branch.run), "")


class Lineage:
    """The branches of a root as its writing primary begins them. Thread-safe; blocks as the store
    does, and raises its OSError.

    With `begins` there are branches from this manager's first save on; without, only where the root
    has some already. Where its opening found none, the first save does not look for them again.
    """

    def __init__(
        self, storage: Storage, writer_id: str, *, begins: bool, found_none: bool = False
    ) -> None:
        self._storage = storage
        self._writer_id = writer_id
        self._begins = begins
        self._found_none = found_none
        self._lock = threading.Lock()
        self._base = NOTHING
        self._restored = False  # since the last branch began
        self._is_open = False
        self._current: Branch | None = None

    def restored(self, step: int) -> None:
        """Notes that whatever is saved next goes on from a step: of several, from the lowest."""
        with self._lock:
            self._base = min(step, self._base) if self._restored else step
            self._restored = True
            self._is_open = False

    def deleting_newest(self, step: int) -> None:
        """Begins a branch below the newest step, which is about to be deleted: local steps from
        there on do not come back.
        """
        with self._lock:
            self._current = self._begin(step - 1)

    def current(self) -> Branch | None:
        """Returns the branch that what is saved now belongs to, which its file says durably by
        then; None where the root has none.

        Raises Fenced, NotCommitted, OSError.
        """
        with self._lock:
            if not self._is_open:
                self._current = self._first_or_next()
                self._is_open = True
                self._restored = False
            return self._current

    def _first_or_next(self) -> Branch | None:
        found_none = self._found_none
        # For one save alone: other managers of the root may begin branches meanwhile.
        self._found_none = False
        return None if found_none and not self._begins else self._begin(self._base)

    def _begin(self, base: int) -> Branch | None:
        for _ in range(RACES):
            known = read_branches(self._storage)
            if not known and not self._begins:
                return None
            number = known[-1].number + 1 if known else 1
            run = run_of(known) or secrets.token_hex(16)
            where = where_of(self._storage)
            branch = Branch(run, number, self._writer_id, base, where=where)
            try:
                self._storage.commit(
                    f"{BRANCHES}/{number}.json", branch.to_bytes(), f"{FOLDER}/{self._writer_id}"
                )
            except NameTaken:
                continue
            self._prune(known)
            return branch
        raise NameTaken(
            17,
            f"other writers took {RACES} numbers of branches",
            f"{self._storage.root}/{BRANCHES}",
        )

    def _prune(self, known: Sequence[Branch]) -> None:
        try:
            self._storage.delete(
                [f"{BRANCHES}/{branch.number}.json" for branch in known[: -KEPT_BRANCHES + 1]]
            )
        except OSError as error:
            _log.warning(
                "old branches of %s could not be deleted, the next one does it: %s",
                self._storage.root,
                error,
            )


class NoLineage:
    """Stands for the lineage where no branches begin: only the writing primary begins them."""

    def restored(self, step: int) -> None:
        """Takes no note."""

    def deleting_newest(self, step: int) -> None:
        """Begins nothing: the primary does."""

    def current(self) -> Branch | None:
        """Raises AssertionError: what this process saves has no branch that it could know."""
        raise AssertionError("only the writing primary knows the branch of a save")
