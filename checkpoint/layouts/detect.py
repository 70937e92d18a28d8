"""Finds the layout of a checkpoint, opens it, and restores from it.

The layout is holdfast's own, Orbax's or plain safetensors.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import (
    CheckpointError,
    Corrupt,
    HostileCheckpoint,
    StepExists,
    StepGone,
    StepNotFound,
    TreeMismatch,
)
from ..format.item_report import FILE_NAME
from ..format.json_state import State, decode, is_iterator
from ..format.own_files import Files, give_files
from ..format.record import ItemRecord, read_record
from ..format.step_folders import (
    LOOKS,
    PLAIN_NAMES,
    RootListing,
    StepNames,
    has_record,
    note_foreign_prefix,
    prefix_of,
    read_foreign_prefix,
    read_step_names,
    root_folders,
)
from ..format.tree import describe, escape
from ..restoring.match import SAVED
from ..restoring.per_process import PerProcessSelection
from ..restoring.reader import ArrayReader
from ..restoring.renamed import check_rename, renamed
from ..restoring.restore import (
    RestoreOptions,
    check_files_like,
    check_json_like,
    owner_of,
    restore_tree,
)
from ..restoring.surgery import operate
from ..restoring.view_reader import read_by_other_paths
from ..steps.left_behind import Mark, identify_own, left_among, read_marks
from ..steps.lineage import read_branches, run_of
from ..steps.refusals import roots_alike
from ..storage.base import Entry, Storage
from ..storage.path import StorePath, join, open_storage, split
from ..storage.tombstone import RECORD_NAME
from .base import CheckpointInfo, CheckpointLayout, CheckpointReader
from .holdfast import HoldfastCheckpoint, HoldfastLayout

log = logging.getLogger("holdfast.checkpoint")
_NUMBERED = re.compile(r"(?<![0-9])[0-9]{1,18}\Z")
_PICKLE = "it is a pickle, and to read one is to run it"
_TO_SAFETENSORS = f"{_PICKLE} (docs/from-hugging-face.md says how to make safetensors of it)"
# Weights that no layout here reads, by the ends of their names: why, and what to do.
NOT_READ = {
    ".distcp": f"the index of PyTorch's DCP is a pickle{_TO_SAFETENSORS.removeprefix(_PICKLE)}",
    ".bin": _TO_SAFETENSORS,
    ".pt": _TO_SAFETENSORS,
    ".pth": _TO_SAFETENSORS,
    ".ckpt": _TO_SAFETENSORS,
    ".pkl": f"{_PICKLE}; where you trust it, unpickle it and save(path, tree)",
    ".pickle": f"{_PICKLE}; where you trust it, unpickle it and save(path, tree)",
    ".msgpack": (
        "it is one message of flax's without ranges to read; write save(path,"
        " flax.serialization.msgpack_restore(data)) once, with its bytes"
    ),
    ".gguf": (
        "its blocks are of no dtype that jax has; take the safetensors files that it was made of"
    ),
    ".keras": (
        "it is Keras's own; load it with keras.saving.load_model, and save what it holds"
        " (docs/libraries.md)"
    ),
    ".h5": "it is HDF5; load it with the library that wrote it, and save(path, tree)",
    ".npz": "it is numpy's; write save(path, dict(numpy.load(file))) once",
    ".npy": "it is numpy's; write save(path, numpy.load(file)) once",
    ".eqx": (
        "it is Equinox's; write save(path, equinox.tree_deserialise_leaves(file, like)) once"
        " (docs/libraries.md)"
    ),
}
# A file of flax.training.checkpoints is called so, without an ending.
_FLAX_STEP = re.compile(r"checkpoint_[0-9.]+")
_FROM_FLAX = (
    "it is one message of flax's; write save(path,"
    " flax.training.checkpoints.restore_checkpoint(folder, None)) once"
)
_USUAL_ITEMS = ("state", "default", "pytree")


def layouts() -> Iterator[CheckpointLayout]:
    """Yields the known layouts, ours first: a folder is in the first that recognises it."""
    yield HoldfastLayout()
    from .orbax.read import OrbaxLayout  # imports tensorstore
    from .safetensors import SafetensorsLayout

    yield OrbaxLayout()
    yield SafetensorsLayout()


def layout_of(folder: StorePath) -> CheckpointLayout | None:
    """Returns the layout of the finished checkpoint in a folder, None where there is none."""
    names: Mapping[str, Entry] = folder.names()
    return next((layout for layout in layouts() if layout.recognises(folder, names)), None)


def open_if_finished(folder: StorePath) -> CheckpointReader | None:
    """Opens the checkpoint in a folder, or returns None where there is none that is finished."""
    layout = layout_of(folder)
    return layout.open(folder) if layout is not None else None


def find_steps(storage: Storage) -> dict[int, tuple[str, CheckpointLayout]]:
    """Returns the finished steps of a root, ascending: the folder's name and its layout.

    Our own step comes before another layout's of the same number.
    """
    for kind in _kinds(storage, root_folders(storage), read_step_names(storage)):
        steps: dict[int, tuple[str, CheckpointLayout]] = {}
        for step, name, layout in kind.finished():
            if step not in steps or layout.name == "holdfast":
                steps[step] = (name, layout)
        if steps:
            return dict(sorted(steps.items()))
    return {}


def find_step(storage: Storage, step: int) -> tuple[str, CheckpointLayout] | None:
    """Returns what `find_steps` has of one step, by a look into few folders; None for no step."""
    for kind in _kinds(storage, root_folders(storage), read_step_names(storage)):
        found = kind.at(step)
        if found is not None or next(kind.finished(), None) is not None:
            return found
    return None


def find_foreign_steps(storage: Storage, listing: RootListing, names: StepNames) -> dict[int, str]:
    """Returns the folders' names of a root's finished steps of other libraries, ascending, with
    which a manager goes on: of those that keep roots of steps.

    The steps of `listing` are holdfast's: they are not looked into.
    """
    known = {names.name_of(step) for step in listing.steps}
    folders = [name for name in listing.folders if name not in known]
    for kind in _kinds(storage, folders, names):
        if not kind.keeps_roots:
            break
        foreign: dict[int, str] = {}
        for step, name, layout in kind.finished():
            if layout.name != "holdfast":
                foreign.setdefault(step, name)
        if foreign or known:
            return dict(sorted(foreign.items()))
    if others := strangers(storage):
        log.warning(
            "%s has no steps, and is opened as a new root: %s in it are no steps of one root. Open"
            " them by their own paths, or say how the steps are called: Options(step_format=...)",
            storage.root,
            _some([name for name, _ in others]),
        )
    return {}


@dataclass(frozen=True)
class _Kind:
    """Folders of a root with the numbers that their names end in. They are steps where they hold a
    checkpoint of holdfast's under a name of holdfast's, or of a library that keeps roots of steps,
    or does not.
    """

    storage: Storage
    names: StepNames
    numbers: Mapping[str, int]
    keeps_roots: bool = True

    def finished(self) -> Iterator[tuple[int, str, CheckpointLayout]]:
        """Yields the steps that are there, the newest first, and of equal numbers in the order of
        `numbers`.
        """
        for name in self._newest_first():
            layout = self._layout_of(name)
            if layout is not None:
                yield self.numbers[name], name, layout

    def at(self, step: int) -> tuple[str, CheckpointLayout] | None:
        """Returns folder and layout of one step: of two with one number our own."""
        numbers = {name: number for name, number in self.numbers.items() if number == step}
        return replace(self, numbers=numbers).latest(())

    def latest(self, marks: Collection[Mark]) -> tuple[str, CheckpointLayout] | None:
        """Returns folder and layout of the newest step that was not left behind; of two with one
        number our own.
        """
        best: tuple[str, CheckpointLayout] | None = None
        for name in self._newest_first():
            step = self.numbers[name]
            if best is not None and step != self.numbers[best[0]]:
                break
            layout = self._layout_of(name)
            if layout is None or left_among(self.storage, {step: name}, marks, identify):
                continue
            if best is None or layout.name == "holdfast":
                best = (name, layout)
        return best

    def _newest_first(self) -> list[str]:
        return sorted(self.numbers, key=lambda name: -self.numbers[name])

    def _layout_of(self, name: str) -> CheckpointLayout | None:
        """Returns the layout of the step in a folder; None where there is no step."""
        layout = layout_of(StorePath(self.storage, name))
        if layout is None:
            return None
        is_own = self.names.step_of(name) is not None
        if layout.name == "holdfast":
            return layout if is_own and self.keeps_roots else None
        is_called_so = is_own or layout.step_of(name) is not None
        return layout if is_called_so and layout.keeps_roots == self.keeps_roots else None


def _kinds(storage: Storage, folders: Collection[str], names: StepNames) -> Iterator[_Kind]:
    """Yields what a root's steps may be. They are of the first kind that has a step.

    First our own, and beside them what another library has called as we do, by plain numbers, or as
    it did when our first step was saved. Then what it calls otherwise, if it does so in one way.
    Then folders of plain numbers of libraries that keep no roots of steps.
    """
    numbers = _numbered(folders)
    own = {name: number for name, number in numbers.items() if names.step_of(name) is not None}
    plain = {name: number for name, number in numbers.items() if prefix_of(name) == ""}
    by_prefix: dict[str, dict[str, int]] = {}
    for name, number in numbers.items():
        if name not in own and name not in plain:
            by_prefix.setdefault(prefix_of(name), {})[name] = number
    noted = by_prefix.get(read_foreign_prefix(storage) or "", {}) if by_prefix else {}
    yield _Kind(storage, names, own | plain | noted)
    kinds = [_Kind(storage, names, each) for each in by_prefix.values()]
    called = [kind for kind in kinds if next(kind.finished(), None) is not None]
    if len(called) == 1:
        yield called[0]
    yield _Kind(storage, names, plain, keeps_roots=False)


def identify(storage: Storage, folder: str) -> str:
    """Returns what tells a step from another one of its number, in whatever layout: the id of its
    save, or when it was finished; "" where nothing says so. Raises the store's OSError.
    """
    own = identify_own(storage, folder)
    if own:
        return own
    try:
        checkpoint = open_if_finished(StorePath(storage, folder))
    except CheckpointError:
        return ""
    if checkpoint is None or checkpoint.info.layout == "holdfast":
        return ""
    return f"{checkpoint.info.layout} {checkpoint.info.finished_s}"


def left_steps(storage: Storage, steps: Mapping[int, tuple[str, CheckpointLayout]]) -> set[int]:
    """Returns which steps of `find_steps` were left behind. Raises as `read_marks` does."""
    folders = {step: name for step, (name, _) in steps.items()}
    return left_among(storage, folders, read_marks(storage), identify)


def newest_step(storage: Storage, steps: Mapping[int, tuple[str, CheckpointLayout]]) -> int | None:
    """Returns the newest step of `find_steps`: none that was left behind. None where all were."""
    return max(steps.keys() - left_steps(storage, steps), default=None)


def _numbered(folders: Collection[str]) -> dict[str, int]:
    """Returns the folders of a root that may be steps in some layout, with their numbers."""
    matches = {name: _NUMBERED.search(name) for name in folders}
    return {name: int(match[0]) for name, match in matches.items() if match}


@dataclass(frozen=True)
class _RootLook:
    """What one look at a root has shown: its files and folders."""

    storage: Storage
    entries: Mapping[str, Entry]

    @property
    def folders(self) -> list[str]:
        return [name[:-1] for name in self.entries if name.endswith("/")]

    def checkpoint(self) -> tuple[str, CheckpointLayout] | None:
        """Returns what the root means: the folder of its latest step, or "" for itself, and the
        layout. It looks into few folders for it. None where there is nothing, or all was left.
        """
        names = read_step_names(self.storage)
        if self._has_own_record(names):
            return "", HoldfastLayout()
        marks = read_marks(self.storage)
        kinds = _kinds(self.storage, self.folders, names)
        beside_own = next(kinds)
        found = beside_own.latest(marks)
        if found is not None and found[1].name == "holdfast":
            return found
        whole = layout_of(StorePath(self.storage))
        # Of ours it is a record that was passed over.
        if whole is not None and (whole.name == "holdfast" or self._has_own_steps(names)):
            return found
        if whole is not None and whole.keeps_roots:
            return "", whole
        for kind in (beside_own, *kinds):
            if whole is not None and not kind.keeps_roots:
                return "", whole
            if next(kind.finished(), None) is not None:
                return kind.latest(marks)
        return None

    def _has_own_record(self, names: StepNames) -> bool:
        """Says whether a record of ours lies in the root itself. One that cannot be read counts
        only where the root has no steps.
        """
        if RECORD_NAME not in self.entries:
            return False
        try:
            read_record(self.storage, "")
        except CheckpointError as error:
            beside_own = next(_kinds(self.storage, self.folders, names))
            if next(beside_own.finished(), None) is None:
                return True
            log.warning("%s; it is passed over for the steps of %s", error, self.storage.root)
            return False
        return True

    def _has_own_steps(self, names: StepNames) -> bool:
        own = [name for name in self.folders if names.step_of(name) is not None]
        return any(has_record(self.storage, name) for name in own)


class ForeignSteps:
    """The steps of a root that are in other people's layouts, as the root was listed, which calls
    its own steps by `names`.
    """

    def __init__(
        self, storage: Storage, folders: Mapping[int, str], names: StepNames = PLAIN_NAMES
    ) -> None:
        self._storage = storage
        self._folders = dict(folders)
        self._names = names
        self._is_noted = False

    def make_way(self, storage: Storage, folder: str, claim: str) -> None:
        """Readies the root for a save of ours into `folder`; for the primary, before it writes.
        `storage` is the root's, as the save may use it.

        What calls these steps otherwise than by plain numbers is noted once: after our first step
        only that shows which folders are steps. Raises StepExists where the folder holds another
        library's checkpoint, and what a commit raises.
        """
        layout = layout_of(StorePath(storage, folder))
        if layout is not None and layout.name != "holdfast":
            where = join(storage.root, folder)
            raise StepExists(
                f"{where} holds a checkpoint of another library ({layout.name}): nothing was"
                " written. Save another step, or move that one elsewhere",
                path=where,
                step=self._names.step_of(folder),
            )
        called = [name for name in self._folders.values() if self._names.step_of(name) is None]
        prefixes = {prefix_of(name) for name in called} - {""}
        if prefixes and not self._is_noted and read_foreign_prefix(storage) is None:
            note_foreign_prefix(storage, prefixes.pop(), claim)
        self._is_noted = True

    def adopt(self, folders: Mapping[int, str]) -> None:
        """Knows these from now on, and no others."""
        self._folders = dict(folders)

    def folders(self) -> dict[int, str]:
        """Returns the names of their folders."""
        return dict(self._folders)

    def __iter__(self) -> Iterator[int]:
        return iter(self._folders)

    def __contains__(self, step: object) -> bool:
        return step in self._folders

    def open(self, step: int) -> CheckpointReader:
        """Opens one; raises StepNotFound, or StepGone where it was there before."""
        if step not in self._folders:
            raise StepNotFound(
                f"there is no step {step} in {self._storage.root}",
                path=self._storage.root,
                step=step,
            )
        return open_found(StorePath(self._storage, self._folders[step]))


def open_checkpoint(
    path: str | os.PathLike[str],
    step: int | None = None,
    *,
    wrap: Callable[[Storage], Storage] = lambda storage: storage,
) -> CheckpointReader:
    """Opens the checkpoint in the folder `path`, or, where that is a root, one of its steps.

    That is the step `step`, or the latest if None. `wrap` may put a store of its own in front of
    the one that `path` means: to count, or to fail. Raises StepNotFound saying what is there
    instead, Corrupt, HostileCheckpoint.
    """
    folder, file = split(path)
    if is_single_file(path):
        from .safetensors import SafetensorsCheckpoint

        return SafetensorsCheckpoint(StorePath(wrap(open_storage(folder))), file)
    storage = wrap(open_storage(path))
    if step is None:
        return _open_latest(storage)
    found = find_step(storage, step)
    if found is None:
        steps = list(find_steps(storage))
        raise StepNotFound(nothing_at(storage, step, steps), path=storage.root, step=step)
    name, layout = found
    return layout.open(StorePath(storage, name))


def is_single_file(path: str | os.PathLike[str]) -> bool:
    """Says whether a path means one file, of safetensors, and no folder that is called so."""
    is_called_so = split(path)[1].endswith(".safetensors")
    return is_called_so and not StorePath(open_storage(path)).names()


def find_checkpoint(storage: Storage) -> tuple[StorePath, CheckpointLayout]:
    """Returns where a store has its checkpoint, and in which layout. Raises StepNotFound.

    That is at its root, or in the folder of the latest step; our own steps come before whatever
    else lies in the root. A writer may delete steps and add newer ones meanwhile: then it looks
    again.
    """
    before: set[str] = set()
    for _ in range(LOOKS):
        look = _RootLook(storage, StorePath(storage).names())
        found = look.checkpoint()
        if found is not None and not found[0]:
            return StorePath(storage), found[1]
        numbers = _numbered(look.folders)
        # Where a newer folder has no checkpoint it may have been deleted for a newer one.
        above = -1 if found is None else numbers[found[0]]
        if {name for name, number in numbers.items() if number > above} <= before:
            break
        before = set(numbers)
    if found is None:
        raise StepNotFound(nothing_at(storage), path=storage.root)
    name, layout = found
    folder = StorePath(storage, name)
    count = len(numbers)
    log.info("%s is a root of %d steps: taking the latest, %s", storage.root, count, folder)
    return folder, layout


def _open_latest(storage: Storage) -> CheckpointReader:
    for _ in range(LOOKS):
        folder, layout = find_checkpoint(storage)
        try:
            return layout.open(folder)
        except StepNotFound:  # deleted in between
            continue
    raise StepGone(
        f"{folder} was deleted while it was being opened, and so were {LOOKS - 1} steps before it",
        path=str(folder),
    )


def open_found(folder: StorePath) -> CheckpointReader:
    """Opens the checkpoint in a folder where one was found before, by another process too.

    Raises StepGone where it is gone.
    """
    checkpoint = open_if_finished(folder)
    if checkpoint is None:
        raise StepGone(
            f"{folder} was there when the root was listed and is gone; list it again",
            path=str(folder),
        )
    return checkpoint


@contextlib.contextmanager
def while_it_is_there(folder: StorePath) -> Iterator[None]:
    """Raises StepGone for what the deletion of a checkpoint looks like to whoever reads it: files
    that are missing, or end early, where there is no finished checkpoint any more.
    """
    try:
        yield
    except (StepNotFound, Corrupt, HostileCheckpoint, FileNotFoundError) as error:
        if layout_of(folder) is not None:
            raise
        message = f"{folder} was deleted while it was being read"
        raise StepGone(message, path=str(folder)) from error


def nothing_at(storage: Storage, step: int | None = None, steps: Sequence[int] = ()) -> str:
    """Returns a sentence: why there is no checkpoint in a root, and what is there instead."""
    if steps:
        shown = ", ".join(map(str, steps[-10:]))
        return f"{storage.root} has no step {step}; it has {shown}{stands_there(storage, step)}"
    if "://" not in storage.root and os.path.isfile(storage.root):
        return (
            f"{storage.root} is a file and no checkpoint: expected a folder, or a file that ends in"
            f" .safetensors{why_not_read([os.path.basename(storage.root)])}"
        )
    names = [entry.name for entry in storage.list("")]
    if not names:
        if "://" not in storage.root and os.path.isdir(storage.root):
            return f"{storage.root} is empty: no checkpoint was saved there"
        alike = roots_alike(storage)
        return f"there is nothing at {storage.root}{f'; {alike}' if alike else _above(storage)}"
    if left := sorted(left_steps(storage, find_steps(storage))):
        return (
            f"every step of {storage.root} was left behind by a branch that has no step any more:"
            f" {_some([str(each) for each in left])}. Name the one to take"
        )
    tmp = [name for name in names if ".orbax-checkpoint-tmp" in name]
    if tmp:
        return f"{storage.root} has no finished checkpoint: {tmp[0]} was never completed by Orbax"
    if run := run_of(read_branches(storage)):
        return (
            f"{storage.root} has no step of its own, but local steps on the hosts of its job: below"
            f" {run} in the folder that was given to Local(...). `holdfast ls {storage.root}"
            " --local FOLDER` lists those of a host, `holdfast status` of a job that runs those of"
            " all"
        )
    if found := strangers(storage):
        called = _some([f"{name} ({layout})" for name, layout in found])
        return (
            f"{storage.root} has no steps, but checkpoints whose names are no steps' of one root:"
            f" {called}. Open one by its own path"
        )
    if layout_of(StorePath(storage)) is not None:
        return f"{storage.root} is a checkpoint, not a root of steps: leave --all and --step out"
    return (
        f"{storage.root} is no checkpoint that holdfast knows (its own, Orbax's, safetensors); it"
        f" holds {_some(names)}{why_not_read(names)}"
    )


def stands_there(storage: Storage, step: int | None) -> str:
    """Returns which checkpoint lies in a root under a step's number, and is none of its steps; ""
    where none does, or the store does not say.
    """
    with contextlib.suppress(CheckpointError, OSError, MemoryError):
        for name, layout in strangers(storage):
            if step == _numbered([name])[name]:
                return (
                    f". {name} there is a checkpoint ({layout}), but no step of this root: open it"
                    " by its own path"
                )
    return ""


def strangers(
    storage: Storage, steps: Mapping[int, tuple[str, CheckpointLayout]] | None = None
) -> list[tuple[str, str]]:
    """Returns the folders of a root that hold a checkpoint, with its layout, and are called by a
    number, but are none of its steps: those of `find_steps`, which are looked for where they are
    not known.
    """
    if steps is None:
        steps = find_steps(storage)
    taken = {name for name, _ in steps.values()}
    found = []
    for name, number in sorted(_numbered(root_folders(storage)).items()):
        if name in taken:
            continue
        layout = layout_of(StorePath(storage, name))
        # Of another library's step our own of that number is the one that counts.
        if layout is not None and number not in steps:
            found.append((name, layout.name))
    return found


def are_packs(names: Iterable[str]) -> bool:
    """Says whether files are called as holdfast calls those of a step, beside its record."""
    return all(FILE_NAME.fullmatch(name.rpartition("/")[2]) for name in names)


def why_not_read(names: Sequence[str]) -> str:
    """Returns why the first of these names that is a model's is not read; "" where none is."""
    for name in names:
        if _FLAX_STEP.fullmatch(name):
            return f"; {name} is not read: {_FROM_FLAX}"
    for ending, why in NOT_READ.items():
        for name in names:
            if name.endswith(ending):
                return f"; {name} is not read: {why}"
    return ""


def warn_of_unread(storage: Storage, files: Collection[str] | None) -> None:
    """Warns that a root without steps has what another library saved, and nothing here reads.

    `files` are the names of all files below it, where they are known.
    """
    why = why_not_read(list(StorePath(storage).names() if files is None else files))
    if why:
        log.warning("%s has no step that is read%s", storage.root, why)


def _above(storage: Storage) -> str:
    """Returns what the folder above a missing one holds: most often the path was mistyped."""
    folder = os.path.dirname(storage.root)
    if "://" in storage.root or not os.path.isdir(folder):
        return ""
    return f"; {folder} holds {_some(sorted(os.listdir(folder)) or ['nothing'])}"


def _some(names: Sequence[str]) -> str:
    return ", ".join([*names[:4], *["..."] * (len(names) > 4)])


def pick_item(info: CheckpointInfo, item: str) -> str:
    """Returns the item that `item` means.

    For our usual name in another layout that is the one tree there is, or a usual name there.
    """
    if item in info.items or item != "state" or info.layout == "holdfast":
        return item
    trees = [name for name, kind in info.items.items() if kind == "tree"]
    for name in _USUAL_ITEMS:
        if name in trees:
            return name
    return trees[0] if len(trees) == 1 else item


def restore_items(
    checkpoint: CheckpointReader, wanted: Mapping[str, Any], options: RestoreOptions
) -> dict[str, Any]:
    """Restores several items of any layout, each by its `like`: a tree, JSON, files, or the state
    of an iterator, which is the `like` and is returned. Blocks. "once" is for a step of ours with
    `peers`. An iterator gets its state when all else is there.

    Raises StepNotFound (no such item), TreeMismatch, Corrupt, HostileCheckpoint, StepGone.
    """
    info = checkpoint.info
    picked = [pick_item(info, item) for item in wanted]
    if options.rename is not None:
        trees = [checkpoint.item(item) for item in picked if info.items.get(item) == "tree"]
        check_rename(options.rename, trees)
    if options.rules is not None:
        check_one_tree(picked, info)
    restored = {item: _restore(checkpoint, item, like, options) for item, like in wanted.items()}
    options.check_choice()
    if info.owners:
        options.before_giving()
    return {
        item: value.give(wanted[item]) if isinstance(value, State) else value
        for item, value in restored.items()
    }


def check_one_tree(items: Sequence[str], info: CheckpointInfo) -> None:
    """Raises ValueError unless one of these items is a tree: rules of surgery are for one."""
    trees = [item for item in items if info.items.get(item) == "tree"]
    if len(trees) != 1:
        raise ValueError(
            f"rules=: expected one tree to operate on, found {trees} in {info.path}; name one item"
        )


def restore_checkpoint(
    checkpoint: CheckpointReader,
    item: str = "state",
    like: Any = None,
    options: RestoreOptions | None = None,
) -> Any:
    """Restores one item of any layout: see `restore_items`."""
    return restore_items(checkpoint, {item: like}, options or RestoreOptions())[item]


def _restore(checkpoint: CheckpointReader, item: str, like: Any, options: RestoreOptions) -> Any:
    """Returns one item; for an iterator the state that it is to have."""
    info = checkpoint.info
    own = options.per_process
    item = pick_item(info, item)
    kind = info.items.get(item)
    if kind == "files" and is_iterator(like):
        return _read_grain_state(like, checkpoint, item, own)
    if kind == "files" or (kind is not None and isinstance(like, Files)):
        check_files_like(info.path, item, kind, like)
        return give_files(like, checkpoint.files(item, own), info.path)
    if kind == "json":
        check_json_like(info.path, item, like)
        process = own.process if own and own.processes is None else 0
        if item in info.owners or is_iterator(like):
            process = owner_of(info.path, item, info.processes, own)
        value = checkpoint.json(item, process)
        return State(decode(value)) if is_iterator(like) else value
    return _restore_tree(checkpoint, item, like, options)


def _restore_tree(
    checkpoint: CheckpointReader, item: str, like: Any, options: RestoreOptions
) -> Any:
    info = checkpoint.info
    wanted = checkpoint.item(item)
    shared = None
    if isinstance(checkpoint, HoldfastCheckpoint):
        shared = checkpoint.shared_reader(item, options.peers)
    reader = shared or checkpoint.reader(item)
    if options.rename is not None:
        wanted, reader = renamed(wanted, reader, options.rename)
    if options.rules is not None:
        wanted, reader = operate(wanted, reader, options.rules)
    is_spelled_so = info.layout == "holdfast" and options.rules is None
    if not is_spelled_so and like is not None and like is not SAVED:
        wanted, reader = _spelled_like(wanted, reader, like)
    try:
        values = restore_tree(reader, wanted, like, options)
    except TreeMismatch as error:
        error.path = error.path or info.path
        raise
    if shared is not None:
        shared.finish()
    return values


def _read_grain_state(
    like: Any, checkpoint: CheckpointReader, item: str, selection: PerProcessSelection | None
) -> State:
    """Returns the state that grain's handler wrote for a process.

    Grain writes a file for each process.
    """
    own = selection or PerProcessSelection(0)
    pattern = rf"process_{own.process}-of-{own.processes or '[0-9]+'}\.json"
    others = []
    for name, pieces in checkpoint.files(item):
        if re.fullmatch(pattern, name):
            text = b"".join(map(bytes, pieces))  # each piece holds until the next
            return State(text if isinstance(like.get_state(), bytes) else json.loads(text))
        others.append(name)
    expected = f"process_{own.process}-of-{own.processes or 'N'}.json"
    message = (
        f"{checkpoint.info.path}: the item {item!r} has {_some(sorted(others)) or 'no files'}, and"
        f" none is process {own.process}'s; expected {expected}; process=... takes another one's"
    )
    raise TreeMismatch(message, leaf=item, expected=expected)


def _spelled_like(
    item: ItemRecord, reader: ArrayReader, like: Any
) -> tuple[ItemRecord, ArrayReader]:
    """Lets flat names with dots match a flat `like` too, whose paths have the dots escaped."""
    wanted = set(describe(like)[1])
    spelled = tuple(replace(leaf, path=escape(leaf.path)) for leaf in item.leaves)
    as_they_are = sum(leaf.path in wanted for leaf in item.leaves)
    if as_they_are >= sum(leaf.path in wanted for leaf in spelled):
        return item, reader
    return replace(item, leaves=spelled), read_by_other_paths(reader, spelled, item.leaves)
