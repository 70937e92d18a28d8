"""Steps that were left behind: a job went back to an older step, and goes on from there.

`.holdfast/left/<save id>.json` is written, durably, before the first commit of a branch. In one
file it names the step that the branch goes on from, its base, and the steps above that, each with
the id of the save that made it. So a mark holds for the record of that very save, wherever the root
is copied or moved, and for no other that is saved under its number.

Where the first commit never comes, the mark holds all the same: the job had gone back, and the next
run goes on from the base, as it would have. A mark that held only once its branch has a step would
have each reader look for that step, and would bring what was left back for as long as saves fail.
Nothing is lost by it: what was left stays until the branch has a step at or above its number.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import TypeAlias

from ..errors import CheckpointError, Corrupt
from ..format.item_report import SAVE_ID
from ..format.limits import MALFORMED
from ..format.record import FORMAT, whole
from ..storage.base import NameTaken, Storage
from ..storage.path import join
from ..storage.sure_read import read_head
from ..storage.threads import run_side_by_side
from ..storage.tombstone import RECORD_NAME, is_sealed, sealed_json
from .claims import FOLDER, writer_of

_log = logging.getLogger(__name__)
LEFT = f"{FOLDER}/left"
NOTHING = -1  # the base of what goes on from no step
KEPT_MARKS = 64  # files that hold for nothing any more: those who wait for steps may need them
MARK_LIMIT_BYTES = 256 << 20
_NAME = re.compile(rf"{re.escape(LEFT)}/({SAVE_ID.pattern})\.json")
_HEAD_BYTES = 128
_HEAD = re.compile(
    rb'\{"format":"%s","step":\d{1,18},"writer":"(%s)"'
    % (FORMAT.encode(), SAVE_ID.pattern.encode())
)

# Returns the id of the save in a folder of a store, "" where nothing says so.
Identify: TypeAlias = Callable[[Storage, str], str]


@dataclass(frozen=True)
class Mark:
    """What one branch has left: `steps` are those above its `base`, with the ids of their saves.
    `save` is the id of its first save, `base_save` that of the base, "" where it is not known.
    """

    save: str
    base: int
    base_save: str
    steps: Mapping[int, str]

    @property
    def file_name(self) -> str:
        """The name of its file in the root."""
        return f"{LEFT}/{self.save}.json"

    def to_bytes(self) -> bytes:
        """Returns the text of its file, which ends in its own checksum as a record does."""
        return sealed_json(asdict(self))


def _parse(data: bytes, path: str, save: str) -> Mark:
    try:
        if is_sealed(data):
            found = json.loads(data)
            steps = {whole(int(step)): str(each) for step, each in found["steps"].items()}
            return Mark(save, whole(found["base"] + 1) - 1, str(found["base_save"]), steps)
    except MALFORMED:
        pass
    raise Corrupt.at(
        path,
        "it says which steps were left behind, and was damaged after it was written; delete it if"
        " those steps may count as the newest again",
    )


def read_marks(storage: Storage, listed: Collection[str] | None = None) -> list[Mark]:
    """Returns the marks of a root; `listed` are the names of all its files, where they are known.

    Raises the store's OSError, Corrupt naming a mark that is damaged.
    """
    if listed is None:
        listed = [entry.name for entry in storage.list(LEFT)]
    matches = [match for name in sorted(listed) if (match := _NAME.fullmatch(name))]
    marks = run_side_by_side(partial(_read, storage), matches, storage.max_concurrency)
    return [mark for mark in marks if mark is not None]


def _read(storage: Storage, match: re.Match[str]) -> Mark | None:
    try:
        data = storage.fetch(match[0], MARK_LIMIT_BYTES)
    except FileNotFoundError:  # pruned meanwhile
        return None
    return _parse(data, join(storage.root, match[0]), match[1])


def identify_own(storage: Storage, folder: str) -> str:
    """Returns the id of the save of holdfast's in a step's folder, by the beginning of its record.

    One small read. It is "" where there is no record, or its beginning is damaged. Raises the
    store's OSError, which says nothing of the record.
    """
    try:
        head = read_head(storage, join(folder, RECORD_NAME), _HEAD_BYTES)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, CheckpointError):
        return ""
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link in circles, a socket
            return ""
        raise
    match = _HEAD.match(head)
    return "" if match is None else match[1].decode()


def left_among(
    storage: Storage,
    folders: Mapping[int, str],
    marks: Iterable[Mark],
    identify: Identify = identify_own,
) -> set[int]:
    """Returns which of these steps, with the names of their folders, were left behind. It reads of
    those that a mark names. Raises as `identify`.
    """
    marked = {
        (step, mark.steps[step]) for mark in marks for step in mark.steps.keys() & folders.keys()
    }
    # What a record does not say is no reason to pass its step over: a restore says what is wrong.
    saves = _saves_of(storage, {step: folders[step] for step, _ in marked}, identify)
    return {step for step, _ in saves.items() & marked}


def _saves_of(storage: Storage, folders: Mapping[int, str], identify: Identify) -> dict[int, str]:
    """Returns the ids of the saves of steps, where something says so."""
    steps = sorted(folders)
    saves = run_side_by_side(
        lambda step: identify(storage, folders[step]), steps, storage.max_concurrency
    )
    return {step: save for step, save in zip(steps, saves, strict=True) if save}


def leave_behind(
    storage: Storage,
    folders: Mapping[int, str],
    *,
    base: int,
    save: str,
    stay: Collection[int],
    identify: Identify,
) -> set[int]:
    """Marks the steps above a base as left by the branch of a save, durably, but for those that
    `stay`; returns those that are marked.

    One whose record does not say whose it is stays too. Raises Fenced, NotCommitted, OSError.
    """
    going = {step: name for step, name in folders.items() if step > base and step not in stay}
    saves = _saves_of(storage, going, identify)
    if not saves:
        return set()
    base_save = identify(storage, folders[base]) if base in folders else ""
    mark = Mark(save, base, base_save, saves)
    # Where the name is taken an answer was lost: the id is this save's alone.
    with contextlib.suppress(NameTaken):
        storage.commit(mark.file_name, mark.to_bytes(), f"{FOLDER}/{writer_of(save)}")
    _log.warning(
        "%s: saves go on from step %d, and leave behind what is above it, up to step %d (%d in"
        " all): each is restored by its number alone, until a save of that number or a keep"
        " policy takes it",
        storage.root,
        base,
        max(saves),
        len(saves),
    )
    return set(saves)


def prune_marks(storage: Storage, marks: Collection[Mark], left_behind: Collection[int]) -> None:
    """Deletes marks that hold for no step any more, where there are many."""
    void = [mark for mark in marks if mark.steps.keys().isdisjoint(left_behind)]
    if len(void) > KEPT_MARKS:
        try:
            storage.delete([mark.file_name for mark in void])
        except OSError as error:
            _log.warning("old marks of %s could not be deleted yet: %s", storage.root, error)


def goes_on_from(marks: Collection[Mark], step: int, save: str) -> int:
    """Returns the step above which those are new that come after this one: itself, or where it was
    left behind the base of the branch that left it, of several the lowest.

    `save` is the id of the step's save; "" for one that is known by its number alone.
    """
    seen: set[tuple[int, str]] = set()
    found = [(step, save)]
    while found:
        at = found.pop()
        if at not in seen:
            seen.add(at)
            found += [
                (mark.base, mark.base_save)
                for mark in marks
                if at[0] in mark.steps and (not at[1] or mark.steps[at[0]] == at[1])
            ]
    return min(seen)[0]
