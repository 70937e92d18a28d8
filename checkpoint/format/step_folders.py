"""The folders of steps: how a root names them, and which of them hold a step."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import CheckpointError, Corrupt, HostileCheckpoint, is_shortage
from ..storage.base import NameTaken, Readable, Storage
from ..storage.local import LocalStorage
from ..storage.path import join
from ..storage.sure_read import is_listed, read_head, read_surely
from ..storage.threads import run_side_by_side
from ..storage.tombstone import RECORD_NAME, TOMBSTONE
from .limits import MALFORMED

_log = logging.getLogger(__name__)
T = TypeVar("T")
LOOKS = 64  # at a root whose steps change meanwhile
_STEP_FOLDER = re.compile(r"0|[1-9][0-9]{0,17}")
# no prefix begins with "." or ends in a digit
_STEP_PREFIX = re.compile(r"(?!\.)[A-Za-z0-9_.-]{0,63}[A-Za-z_.-]|")
_STEP_FORMAT = re.compile(r"([^{}]*)\{(?::(?:0(\d+))?d)?\}")
_DIGITS_AT_END = re.compile(r"[0-9]{1,18}$")
STEP_NAMES = ".holdfast/steps.json"
# How another library's steps are called, beside which the first of ours was saved.
FOREIGN_NAMES = ".holdfast/foreign.json"
# An object that each save into a bucket replaces. Whoever waits for steps polls this one key, and
# lists the bucket when it has changed. It says "look now" and nothing else: only a record makes a
# step exist. It may come late, or never, so that the bucket is listed now and then all the same.
HINT = ".holdfast/saved.json"
_HINT_LIMIT_BYTES = 1 << 12


def step_of(name: str) -> int | None:
    """Returns the step that a folder of a plain number holds; None for any other name."""
    return int(name) if _STEP_FOLDER.fullmatch(name) else None


@dataclass(frozen=True)
class StepNames:
    """How a root names its steps' folders: a prefix and a number of `width` digits or more."""

    prefix: str = ""
    width: int = 1

    @property
    def format(self) -> str:
        """The `step_format` that these names come of."""
        return f"{self.prefix}{{:0{self.width}d}}"

    def name_of(self, step: int) -> str:
        return f"{self.prefix}{step:0{self.width}d}"

    def step_of(self, name: str) -> int | None:
        """Returns the step that a folder of this name holds; None for any other name."""
        step = step_of(name.removeprefix(self.prefix).lstrip("0") or "0")
        return step if step is not None and self.name_of(step) == name else None

    def to_bytes(self) -> bytes:
        """Returns the content of STEP_NAMES."""
        return json.dumps({"prefix": self.prefix, "width": self.width}).encode()

    def check(self) -> StepNames:
        """Returns itself. Raises ValueError for what no reader takes."""
        if not _STEP_PREFIX.fullmatch(self.prefix) or not 1 <= self.width <= 18:
            raise ValueError(f"prefix {self.prefix!r}, width {self.width!r}")
        return self


PLAIN_NAMES = StepNames()


def parse_step_format(text: str) -> StepNames:
    """Returns the names of a format like "checkpoint_{:08d}"; raises ValueError for others."""
    match = _STEP_FORMAT.fullmatch(text)
    if match is not None:
        with contextlib.suppress(ValueError):
            return StepNames(match[1], int(match[2] or 1)).check()
    raise ValueError(
        f'step_format={text!r}: expected a name of at most 64 letters, digits, "_", "-" and ".",'
        ' which does not begin with "." or end in a digit, and then {:d}, or {:08d} for at'
        ' least 8 digits (at most 18): "checkpoint_{:08d}"'
    )


def read_step_names(storage: Readable) -> StepNames:
    """Returns how a root names the folders of its steps, by STEP_NAMES; else as plain numbers.

    Raises HostileCheckpoint where that file is not one that holdfast writes.
    """

    def parse(names: Any) -> StepNames:
        width = names["width"]
        if type(width) is not int:
            raise ValueError(f"width {width!r}")
        return StepNames(names["prefix"], width).check()

    return _read_names(storage, STEP_NAMES, parse, "a prefix and a width of 1 to 18") or PLAIN_NAMES


def read_foreign_prefix(storage: Storage) -> str | None:
    """Returns what the names of another library's steps begin with, by FOREIGN_NAMES; None where
    none are called otherwise than by plain numbers. Raises as `read_step_names`.
    """

    def parse(names: Any) -> str:
        prefix = names["prefix"]
        if not isinstance(prefix, str):
            raise ValueError(f"prefix {prefix!r}")
        return prefix

    return _read_names(storage, FOREIGN_NAMES, parse, "a prefix")


def note_foreign_prefix(storage: Storage, prefix: str, claim: str) -> None:
    """Writes FOREIGN_NAMES, once; what it says already stays. Raises what a commit raises."""
    with contextlib.suppress(NameTaken, FileExistsError):
        storage.commit(FOREIGN_NAMES, json.dumps({"prefix": prefix}).encode(), claim)


def prefix_of(name: str) -> str:
    """Returns what stands before the number at the end of a folder's name."""
    return name.rstrip("0123456789")


def _read_names(storage: Readable, file: str, parse: Callable[[Any], T], expected: str) -> T | None:
    """Returns what a file says of folders' names; None where it is not there."""
    try:
        return parse(json.loads(read_surely(storage, file, lambda: storage.fetch(file, 1 << 16))))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Corrupt:
        # The store says so too where a folder above the file is no folder.
        if not _is_listed(storage, file):
            return None
        raise
    except MALFORMED as error:
        raise HostileCheckpoint.at(
            join(storage.root, file),
            f"this does not say how the folders of steps are called: {error!r}; expected"
            f" {expected}",
        ) from error


def write_hint(storage: Storage, step: int, save_id: str) -> None:
    """Says that a step was saved. Where that fails, those who wait see the step somewhat later."""
    data = json.dumps({"step": step, "save": save_id}).encode()
    try:
        storage.write(HINT, len(data), [(0, [memoryview(data)])])
    except OSError as error:
        _log.info("%s: who waits for steps sees step %d later: %s", storage.root, step, error)


def read_hint(storage: Storage) -> bytes | None:
    """Returns what the last save has said; None where nothing is said, or it cannot be read."""
    try:
        return storage.fetch(HINT, _HINT_LIMIT_BYTES)
    except (OSError, OverflowError):
        return None


def other_step(step: int, storage: Readable, folder: str) -> int | None:
    """Returns the step in the name of a folder of a store, if that is another than `step`: as a
    plain number, or as the folder's root calls its steps.

    Step 0 fits every folder: one-shot saves have it.
    """
    digits = _DIGITS_AT_END.search(_name_of(storage, folder))
    # What nearly every folder is called costs no look at the root.
    if not step or digits is None or int(digits[0]) == step:
        return None
    return named_step(storage, folder)


def named_step(storage: Readable, folder: str) -> int | None:
    """Returns the step in the name of a folder of a store, None where it is called otherwise."""
    name = _name_of(storage, folder)
    plain = step_of(name)
    return plain if plain is not None else _names_around(storage, folder).step_of(name)


def _name_of(storage: Readable, folder: str) -> str:
    return join(storage.root, folder).rstrip("/").rpartition("/")[2]


def _names_around(storage: Readable, folder: str) -> StepNames:
    """Returns how the root that a folder lies in calls its steps."""
    if folder:
        return read_step_names(storage)
    # The folder of one step, opened by itself. A URL alone does not lead to what is above it.
    if storage.posix is not None:
        with contextlib.suppress(OSError):
            return read_step_names(LocalStorage(storage.posix.path.parent))
    return PLAIN_NAMES


def _is_listed(storage: Readable, name: str) -> bool:
    try:
        return is_listed(storage, name)
    except OSError:
        return False


def root_folders(storage: Storage) -> list[str]:
    """Returns the names of a root's folders, steps or not."""
    names = (entry.name for entry in storage.list("", names_only=True))
    return [name[:-1] for name in names if name.endswith("/")]


def step_folders(storage: Storage, names: StepNames | None = None) -> dict[int, str]:
    """Returns the folders that are named as steps of the root, by their numbers, which ascend.

    `names` are read where they are not known.
    """
    return _steps_among(root_folders(storage), names or read_step_names(storage))


def _steps_among(folders: Collection[str], names: StepNames) -> dict[int, str]:
    steps = [(names.step_of(name), name) for name in folders]
    return dict(sorted((step, name) for step, name in steps if step is not None))


def has_record(storage: Storage, folder: str) -> bool:
    """Returns whether a folder holds a record, readable or not. One small read.

    Raises OSError for what says nothing of the record: an object store's, a lack of descriptors.
    """
    try:
        head = read_head(storage, join(folder, RECORD_NAME), len(TOMBSTONE))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False
    except (CheckpointError, OSError) as error:
        if storage.posix is None or is_shortage(error):
            raise
        return True  # opening the step says what is wrong with its record
    return head != TOMBSTONE


@dataclass(frozen=True)
class RootListing:
    """What one look at a root shows: the names of its folders, and its steps, ascending.

    `files` are the names of all files below it; None where the look has not shown them.
    """

    folders: Collection[str]
    steps: list[int]
    files: Collection[str] | None = None


def _look(storage: Storage, names: StepNames) -> RootListing:
    if storage.posix is None:
        # One listing of everything has the records too: that is a page for a thousand files, where
        # a look at each record would be a request for each step.
        files = {entry.name for entry in storage.list("", recursive=True, names_only=True)}
        found = {name.partition("/")[0] for name in files if "/" in name}
        numbered = _steps_among(found, names)
        steps = [step for step, name in numbered.items() if join(name, RECORD_NAME) in files]
        return RootListing(found, steps, files)
    folders = root_folders(storage)
    numbered = _steps_among(folders, names)
    are_there = run_side_by_side(
        lambda folder: has_record(storage, folder), list(numbered.values()), storage.max_concurrency
    )
    return RootListing(folders, list(itertools.compress(numbered, are_there)))


def list_steps(storage: Storage) -> list[int]:
    """Returns the steps of a root, ascending. A folder without a record is no step."""
    return look_at_root(storage, read_step_names(storage)).steps


def find_newest(
    storage: Storage, names: StepNames, counts: Callable[[int, str], bool]
) -> int | None:
    """Returns the newest step of a folder that `counts`, by its number and its folder's name; None
    where none does. It looks into the newest folders alone.
    """
    before: list[int] = []
    for _ in range(LOOKS):
        folders = step_folders(storage, names)
        numbered = sorted(folders, reverse=True)
        there = (step for step in numbered if has_record(storage, folders[step]))
        newest = next(there, None)
        # As in look_at_root: the newest that is listed may have been deleted for a newer one.
        if numbered[:1] in ([newest], []) or numbered == before:
            candidates = [newest] if newest is not None else []
            steps = itertools.chain(candidates, there)
            return next((step for step in steps if counts(step, folders[step])), None)
        before = numbered
    return newest


def look_at_root(storage: Storage, names: StepNames) -> RootListing:
    """Returns the steps of a root and all its folders.

    In an object store that is one listing of everything.
    """
    before: list[int] = []
    for _ in range(LOOKS):
        listing = _look(storage, names)
        numbered = list(_steps_among(listing.folders, names))
        # A writer may delete the newest listed step, for one that is newer still, before its record
        # is looked for: the rest would be an older state than any that was there. Two equal
        # listings say that the newest folder is no step.
        if listing.steps[-1:] == numbered[-1:] or numbered == before:
            break
        before = numbered
    return listing
