"""Finds checkpoints of any layout, holdfast's own, Orbax's or plain safetensors, and opens them;
or says what stands there instead.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ..errors import (
    CheckpointError,
    Corrupt,
    HostileCheckpoint,
    StepExists,
    StepGone,
    StepNotFound,
)
from ..format.item_report import FILE_NAME
from ..format.record import read_record
from ..format.step_folders import (
    LOOKS,
    RootListing,
    StepNames,
    note_foreign_prefix,
    prefix_of,
    read_foreign_prefix,
    read_step_names,
    root_folders,
)
from ..steps.left_behind import Mark, identify_own, left_among, read_marks
from ..steps.lineage import read_branches, run_of
from ..steps.opening import OtherLayouts
from ..steps.refusals import roots_alike
from ..storage.base import Storage
from ..storage.path import StorePath, open_storage, split
from ..storage.tombstone import RECORD_NAME
from .base import CheckpointLayout, CheckpointReader
from .holdfast import HoldfastLayout

Found: TypeAlias = tuple[str, CheckpointLayout]  # a folder of a root, and what it is in

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


def layouts() -> Iterator[CheckpointLayout]:
    """Yields the known layouts, ours first: a folder is in the first that recognises it."""
    yield HoldfastLayout()
    from .orbax.read import OrbaxLayout  # imports tensorstore
    from .safetensors import SafetensorsLayout

    yield OrbaxLayout()
    yield SafetensorsLayout()


def layout_of(folder: StorePath) -> CheckpointLayout | None:
    """Returns the layout of the finished checkpoint in a folder, None where there is none."""
    names = folder.names()
    if not names:  # as where each save looks: nothing is imported for it
        return None
    return next((layout for layout in layouts() if layout.recognises(folder, names)), None)


def open_if_finished(folder: StorePath) -> CheckpointReader | None:
    """Opens the checkpoint in a folder, or returns None where there is none that is finished."""
    layout = layout_of(folder)
    return layout.open(folder) if layout is not None else None


def find_steps(storage: Storage) -> dict[int, Found]:
    """Returns the finished steps of a root, ascending: the folder's name and its layout.

    Our own step comes before another layout's of the same number. A folder that this process may
    not look into is one of ours if it is called so: who opens it gets the error.
    """
    unread = HoldfastLayout()
    for kind in _kinds(storage, root_folders(storage), read_step_names(storage), unread):
        steps = dict(kind.finished())
        if steps:
            return dict(sorted(steps.items()))
    return {}


def find_step(storage: Storage, step: int) -> Found | None:
    """Returns what `find_steps` has of one step, by a look into few folders; None for no step."""
    for kind in _kinds(storage, root_folders(storage), read_step_names(storage)):
        found = kind.newest(step)
        if found is not None or kind.newest() is not None:
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
        steps = kind.finished()
        foreign = {step: name for step, (name, layout) in steps if layout.name != "holdfast"}
        if foreign or known:
            return dict(sorted(foreign.items()))
    _warn_of_strangers(storage)
    return {}


def _warn_of_strangers(storage: Storage) -> None:
    if others := strangers(storage):
        log.warning(
            "%s has no steps, and is opened as a new root: %s in it are no steps of one root. Open"
            " them by their own paths, or say how the steps are called: Options(step_format=...)",
            storage.root,
            _some([name for name, _ in others]),
        )


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
    unread: CheckpointLayout | None = None  # of a folder without rights; an error where None

    def finished(
        self, step: int | None = None, marks: Collection[Mark] = ()
    ) -> Iterator[tuple[int, Found]]:
        """Yields the steps that are there, the newest first, or `step`: none that was left behind
        by `marks`, and of two with one number our own.
        """
        by_number: dict[int, list[str]] = {}
        for name, number in self.numbers.items():
            if step is None or number == step:
                by_number.setdefault(number, []).append(name)
        for number in sorted(by_number, reverse=True):
            there = [
                (name, layout)
                for name in by_number[number]
                if (layout := self._layout_of(name)) is not None
                and not left_among(self.storage, {number: name}, marks, identify)
            ]
            if there:
                yield number, min(there, key=lambda found: found[1].name != "holdfast")

    def newest(self, step: int | None = None, marks: Collection[Mark] = ()) -> Found | None:
        """Returns folder and layout of the first of those that `finished` yields."""
        return next((found for _, found in self.finished(step, marks)), None)

    def _layout_of(self, name: str) -> CheckpointLayout | None:
        """Returns the layout of the step in a folder; None where there is no step."""
        is_own = self.names.step_of(name) is not None
        try:
            layout = layout_of(StorePath(self.storage, name))
        except PermissionError:
            if self.unread is None or not is_own:
                raise
            return self.unread
        if layout is None:
            return None
        if layout.name == "holdfast":
            return layout if is_own and self.keeps_roots else None
        is_called_so = is_own or layout.step_of(name) is not None
        return layout if is_called_so and layout.keeps_roots == self.keeps_roots else None


def _kinds(
    storage: Storage,
    folders: Collection[str],
    names: StepNames,
    unread: CheckpointLayout | None = None,
) -> Iterator[_Kind]:
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
    yield _Kind(storage, names, own | plain | noted, unread=unread)
    kinds = [_Kind(storage, names, each) for each in by_prefix.values()]
    called = [kind for kind in kinds if kind.newest() is not None]
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


# What the opening of a root asks of the layouts.
OTHER_LAYOUTS = OtherLayouts(find_foreign_steps, identify)


def left_steps(storage: Storage, steps: Mapping[int, Found]) -> set[int]:
    """Returns which steps of `find_steps` were left behind. Raises as `read_marks` does."""
    folders = {step: name for step, (name, _) in steps.items()}
    return left_among(storage, folders, read_marks(storage), identify)


def newest_step(storage: Storage, steps: Mapping[int, Found]) -> int | None:
    """Returns the newest step of `find_steps`: none that was left behind. None where all were."""
    return max(steps.keys() - left_steps(storage, steps), default=None)


def _numbered(folders: Collection[str]) -> dict[str, int]:
    """Returns the folders of a root that may be steps in some layout, with their numbers."""
    return {name: int(match[0]) for name in folders if (match := _NUMBERED.search(name))}


def _meant_by(storage: Storage, folders: Collection[str], *, has_record: bool) -> Found | None:
    """Returns what a root means: the folder of its latest step, or "" for itself, and the layout.
    It looks into few of its `folders` for it. None where there is nothing, or all was left.
    """
    kinds = _kinds(storage, folders, read_step_names(storage))
    beside_own = next(kinds)
    if has_record and _counts(storage, beside_own):
        return "", HoldfastLayout()
    marks = read_marks(storage)
    found = beside_own.newest(marks=marks)
    if found is not None and found[1].name == "holdfast":
        return found
    whole = layout_of(StorePath(storage))
    if whole is not None:
        has_own = any(layout.name == "holdfast" for _, (_, layout) in beside_own.finished())
        # Of ours it is a record that was passed over.
        if has_own or whole.name == "holdfast":
            return found
        if whole.keeps_roots:
            return "", whole
    for kind in (beside_own, *kinds):
        if whole is not None and not kind.keeps_roots:
            return "", whole
        if kind.newest() is not None:
            return kind.newest(marks=marks)
    return None


def _counts(storage: Storage, beside_own: _Kind) -> bool:
    """Says whether the record of ours in a root itself counts: one that cannot be read does only
    where the root has no steps.
    """
    try:
        read_record(storage, "")
    except CheckpointError as error:
        if beside_own.newest() is None:
            return True
        log.warning("%s; it is passed over for the steps of %s", error, storage.root)
        return False
    return True


class ForeignSteps:
    """The steps of a root that are in other people's layouts, as the root was listed, which calls
    its own steps by `names`.
    """

    def __init__(self, storage: Storage, folders: Mapping[int, str], names: StepNames) -> None:
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
        where = StorePath(storage, folder)
        layout = layout_of(where)
        if layout is not None and layout.name != "holdfast":
            raise StepExists(
                f"{where} holds a checkpoint of another library ({layout.name}): nothing was"
                " written. Save another step, or move that one elsewhere",
                path=str(where),
                step=self._names.step_of(folder),
            )
        prefixes = {
            prefix_of(name) for name in self._folders.values() if self._names.step_of(name) is None
        } - {""}
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
    if is_single_file(path):
        return _open_single_file(os.fspath(path), step, wrap)
    storage = wrap(open_storage(path))
    if step is None:
        return _open_latest(storage)
    found = find_step(storage, step)
    if found is None:
        raise StepNotFound(nothing_at(storage, step), path=storage.root, step=step)
    name, layout = found
    return layout.open(StorePath(storage, name))


def _open_single_file(
    path: str, step: int | None, wrap: Callable[[Storage], Storage]
) -> CheckpointReader:
    from .safetensors import SafetensorsCheckpoint

    if step is not None:
        raise StepNotFound(f"{path} is one file, and has no step {step}", path=path, step=step)
    folder, file = split(path)
    return SafetensorsCheckpoint(StorePath(wrap(open_storage(folder))), file)


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
        names = StorePath(storage).names()
        folders = [name[:-1] for name in names if name.endswith("/")]
        found = _meant_by(storage, folders, has_record=RECORD_NAME in names)
        if found is not None and not found[0]:
            return StorePath(storage), found[1]
        numbers = _numbered(folders)
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


def nothing_at(storage: Storage, step: int | None = None) -> str:
    """Returns a sentence: why there is no checkpoint, or no step `step`, in a root, and what is
    there instead.
    """
    if "://" not in storage.root and os.path.isfile(storage.root):
        if storage.root.endswith(".safetensors"):
            return f"{storage.root} is one file of safetensors, and no root of steps"
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
    steps = find_steps(storage)
    if steps and step is not None:
        shown = ", ".join(map(str, list(steps)[-10:]))
        return f"{storage.root} has no step {step}; it has {shown}{stands_there(storage, step)}"
    if left := sorted(left_steps(storage, steps)):
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
    if found := strangers(storage, steps):
        return (
            f"{storage.root} has no steps, but checkpoints whose names are no steps' of one root:"
            f" {_some([f'{name} ({layout})' for name, layout in found])}. Open one by its own path"
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
    with contextlib.suppress(CheckpointError, OSError, MemoryError, ImportError):
        for name, layout in strangers(storage):
            if step == _numbered([name])[name]:
                return (
                    f". {name} there is a checkpoint ({layout}), but no step of this root: open it"
                    " by its own path"
                )
    return ""


def strangers(storage: Storage, steps: Mapping[int, Found] | None = None) -> list[tuple[str, str]]:
    """Returns the folders of a root that hold a checkpoint, with its layout, and are called by a
    number, but are none of its steps: those of `find_steps`, which are looked for where they are
    not known.
    """
    if steps is None:
        steps = find_steps(storage)
    found = []
    for name, number in sorted(_numbered(root_folders(storage)).items()):
        # Of another library's step our own of that number is the one that counts.
        layout = layout_of(StorePath(storage, name)) if number not in steps else None
        if layout is not None:
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
