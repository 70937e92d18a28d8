"""Finds the layout of a checkpoint, opens it, and restores from it.

The layout is holdfast's own, Orbax's or plain safetensors.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import CheckpointError, StepGone, StepNotFound, TreeMismatch
from ..format.json_state import is_iterator
from ..format.own_files import Files, give_files
from ..format.record import ItemRecord
from ..format.step_folders import LOOKS, RootListing, StepNames, read_step_names, root_folders
from ..format.tree import describe, escape
from ..restoring.match import SAVED
from ..restoring.per_process import PerProcessSelection
from ..restoring.renamed import RenamedReader, check_rename, renamed
from ..restoring.restore import RestoreOptions, check_files_like, restore_tree
from ..restoring.surgery import operate
from ..steps.left_behind import identify_own, left_among, read_marks
from ..steps.lineage import read_branches, run_of
from ..storage.base import Entry, Storage
from ..storage.path import StorePath, open_storage, split
from .base import CheckpointInfo, CheckpointLayout, CheckpointReader
from .holdfast import HoldfastCheckpoint, HoldfastLayout

log = logging.getLogger("holdfast.checkpoint")
_NUMBERED = re.compile(r".*?(\d+)")
_PICKLE = "it is a pickle, and to read one is to run it"
# Weights that no layout here reads, by the ends of their names, and why.
NOT_READ = {
    ".distcp": "the index of PyTorch's DCP is a pickle, and to read one is to run it",
    ".bin": _PICKLE,
    ".pt": _PICKLE,
    ".pth": _PICKLE,
    ".msgpack": "it is one message without ranges to read",
    ".gguf": "its blocks are of no dtype that jax has",
}
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
    steps: dict[int, tuple[str, CheckpointLayout]] = {}
    for step, name, layout in _finished_steps(
        storage, read_step_names(storage), root_folders(storage)
    ):
        if step not in steps or layout.name == "holdfast":
            steps[step] = (name, layout)
    return dict(sorted(steps.items()))


def find_foreign_steps(storage: Storage, listing: RootListing, names: StepNames) -> dict[int, str]:
    """Returns the folders' names of a root's finished steps in other people's layouts, ascending.

    The steps of `listing` are holdfast's: they are not looked into.
    """
    known = {names.name_of(step) for step in listing.steps}
    finished = _finished_steps(
        storage, names, [name for name in listing.folders if name not in known]
    )
    foreign = {step: name for step, name, layout in finished if layout.name != "holdfast"}
    return dict(sorted(foreign.items()))


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


def _finished_steps(
    storage: Storage, names: StepNames, folders: Collection[str]
) -> Iterator[tuple[int, str, CheckpointLayout]]:
    for name in _numbered(folders):
        layout = layout_of(StorePath(storage, name))
        if layout is None:
            continue
        step = _step_in(name, layout, names)
        if step is not None:
            yield step, name, layout


def _step_in(name: str, layout: CheckpointLayout, names: StepNames) -> int | None:
    """Returns the step that a folder of a root is, by its name; None for no step's name.

    `names` are the root's own.
    """
    return names.step_of(name) if layout.name == "holdfast" else layout.step_of(name)


def _numbered(folders: Collection[str]) -> dict[str, int]:
    """Returns the folders of a root that may be steps in some layout, with their numbers."""
    matches = {name: _NUMBERED.fullmatch(name) for name in folders}
    return {name: int(match[1]) for name, match in matches.items() if match}


def _latest_of(storage: Storage, numbers: Mapping[str, int]) -> tuple[str, CheckpointLayout] | None:
    """Returns folder and layout of the last of `find_steps`, and looks into few folders for it."""
    best: tuple[str, CheckpointLayout] | None = None
    names = read_step_names(storage)
    marks = read_marks(storage)
    for name in sorted(numbers, key=lambda name: -numbers[name]):
        if best is not None and numbers[name] != numbers[best[0]]:
            break
        layout = layout_of(StorePath(storage, name))
        step = None if layout is None else _step_in(name, layout, names)
        if layout is None or step is None or left_among(storage, {step: name}, marks, identify):
            continue
        if best is None or layout.name == "holdfast":
            best = (name, layout)
    return best


class ForeignSteps:
    """The steps of a root that are in other people's layouts, as the root was listed."""

    def __init__(self, storage: Storage, folders: Mapping[int, str]) -> None:
        self._storage = storage
        self._folders = dict(folders)

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
    steps = find_steps(storage)
    if step not in steps:
        raise StepNotFound(nothing_at(storage, step, list(steps)), path=storage.root, step=step)
    name, layout = steps[step]
    return layout.open(StorePath(storage, name))


def is_single_file(path: str | os.PathLike[str]) -> bool:
    """Says whether a path means one file, of safetensors, and no folder."""
    return split(path)[1].endswith(".safetensors")


def find_checkpoint(storage: Storage) -> tuple[StorePath, CheckpointLayout]:
    """Returns where a store has its checkpoint, and in which layout. Raises StepNotFound.

    That is at its root, or in the folder of the latest step. A writer may delete steps and add
    newer ones meanwhile: then it looks again.
    """
    numbers: dict[str, int] = {}
    for _ in range(LOOKS):
        layout = layout_of(StorePath(storage))
        if layout is not None:
            return StorePath(storage), layout
        before = numbers
        numbers = _numbered(root_folders(storage))
        latest = _latest_of(storage, numbers)
        # Where the newest folder has no checkpoint it may have been deleted for a newer one.
        if latest is not None and (numbers == before or _is_newest(latest[0], numbers)):
            name, layout = latest
            folder = StorePath(storage, name)
            count = len(numbers)
            log.info("%s is a root of %d steps: taking the latest, %s", storage.root, count, folder)
            return folder, layout
        if numbers == before:
            break
    raise StepNotFound(nothing_at(storage), path=storage.root)


def _is_newest(name: str, numbers: Mapping[str, int]) -> bool:
    return numbers[name] == max(numbers.values())


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


def nothing_at(storage: Storage, step: int | None = None, steps: Sequence[int] = ()) -> str:
    """Returns a sentence: why there is no checkpoint in a root, and what is there instead."""
    if steps:
        return f"{storage.root} has no step {step}; it has {', '.join(map(str, steps[-10:]))}"
    if "://" not in storage.root and os.path.isfile(storage.root):
        return (
            f"{storage.root} is a file and no checkpoint: expected a folder, or a file that ends in"
            f" .safetensors{_why_not_read([os.path.basename(storage.root)])}"
        )
    entries = storage.list("")
    if not entries:
        if "://" not in storage.root and os.path.isdir(storage.root):
            return f"{storage.root} is empty: no checkpoint was saved there"
        return f"there is nothing at {storage.root}{_above(storage)}"
    if left := sorted(left_steps(storage, find_steps(storage))):
        return (
            f"every step of {storage.root} was left behind by a branch that has no step any more:"
            f" {_some([str(each) for each in left])}. Name the one to take"
        )
    tmp = [entry.name for entry in entries if ".orbax-checkpoint-tmp" in entry.name]
    if tmp:
        return f"{storage.root} has no finished checkpoint: {tmp[0]} was never completed by Orbax"
    if run := run_of(read_branches(storage)):
        return (
            f"{storage.root} has no step of its own, but local steps on the hosts of its job: below"
            f" {run} in the folder that was given to Local(...). `holdfast ls {storage.root}"
            " --local FOLDER` lists those of a host, `holdfast status` of a job that runs those of"
            " all"
        )
    names = [entry.name for entry in entries]
    return (
        f"{storage.root} is no checkpoint that holdfast knows (its own, Orbax's, safetensors); it"
        f" holds {_some(names)}{_why_not_read(names)}"
    )


def _why_not_read(names: Sequence[str]) -> str:
    """Returns why the first of these names that is a model's is not read; "" where none is."""
    for ending, why in NOT_READ.items():
        for name in names:
            if name.endswith(ending):
                return (
                    f"; {name} is not read: {why} (docs/from-hugging-face.md says how to make"
                    " safetensors of it)"
                )
    return ""


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
    if len(trees) == 1:
        return trees[0]
    known = ", ".join(info.items) or "none"
    raise StepNotFound(
        f"{info.path} has no item '{item}'; it has: {known}. Name one with item=...", path=info.path
    )


def restore_items(
    checkpoint: CheckpointReader, wanted: Mapping[str, Any], options: RestoreOptions
) -> dict[str, Any]:
    """Restores several items of any layout, each by its `like`: see `restore_checkpoint`."""
    if options.rename is not None:
        kinds = checkpoint.info.items
        picked = [pick_item(checkpoint.info, item) for item in wanted]
        trees = [checkpoint.item(item) for item in picked if kinds.get(item) == "tree"]
        check_rename(options.rename, trees)
    if options.rules is not None:
        check_one_tree([pick_item(checkpoint.info, item) for item in wanted], checkpoint.info)
    return {
        item: restore_checkpoint(checkpoint, item, like, options) for item, like in wanted.items()
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
    """Restores one item of any layout.

    There are no collectives: "once" is for a step of ours with `peers`, others are read by each.
    """
    options = options or RestoreOptions()
    item = pick_item(checkpoint.info, item)
    kind = checkpoint.info.items.get(item)
    if kind == "files" and is_iterator(like):
        return _give_grain_state(like, checkpoint, item, options.per_process)
    if kind == "files" or (kind is not None and isinstance(like, Files)):
        check_files_like(checkpoint.info.path, item, kind, like)
        return give_files(like, checkpoint.files(item, options.per_process), checkpoint.info.path)
    if kind == "json":
        if isinstance(checkpoint, HoldfastCheckpoint):
            return checkpoint.value(item, like, options)
        return checkpoint.json(item)
    saved = checkpoint.item(item)
    wanted = saved if options.rename is None else renamed(saved, options.rename)
    shared = None
    if isinstance(checkpoint, HoldfastCheckpoint):
        shared = checkpoint.shared_reader(item, options.peers)
    reader = shared or checkpoint.reader(item)
    if wanted is not saved:
        reader = RenamedReader(reader, wanted, saved)
    if options.rules is not None:
        wanted, reader = operate(wanted, reader, options.rules)
    is_spelled_so = checkpoint.info.layout == "holdfast" and options.rules is None
    if not is_spelled_so and like is not None and like is not SAVED:
        plain = wanted
        wanted = _spelled_like(plain, like)
        if wanted is not plain:
            reader = RenamedReader(reader, wanted, plain)
    options = replace(options, read="each", peers=None, rename=None, rules=None)
    try:
        values = restore_tree(reader, wanted, like, options)
    except TreeMismatch as error:
        error.path = error.path or checkpoint.info.path
        raise
    if shared is not None:
        shared.finish()
    return values


def _give_grain_state(
    like: Any, checkpoint: CheckpointReader, item: str, selection: PerProcessSelection | None
) -> Any:
    """Gives an iterator the state that grain's handler wrote for a process; returns the iterator.

    Grain writes a file for each process.
    """
    files = {name: b"".join(pieces) for name, pieces in checkpoint.files(item)}
    process, count = selection or PerProcessSelection(0)
    pattern = rf"process_{process}-of-{count or '[0-9]+'}\.json"
    name = next((name for name in files if re.fullmatch(pattern, name)), None)
    if name is None:
        expected = f"process_{process}-of-{count or 'N'}.json"
        message = (
            f"{checkpoint.info.path}: the item {item!r} has {_some(sorted(files)) or 'no files'},"
            f" and none is process {process}'s; expected {expected}; process=... takes another"
            " one's"
        )
        raise TreeMismatch(message, leaf=item, expected=expected)
    text = files[name].decode()
    like.set_state(text.encode() if isinstance(like.get_state(), bytes) else json.loads(text))
    return like


def _spelled_like(item: ItemRecord, like: Any) -> ItemRecord:
    """Lets flat names with dots match a flat `like` too, whose paths have the dots escaped."""
    wanted = set(describe(like)[1])
    spelled = tuple(replace(leaf, path=escape(leaf.path)) for leaf in item.leaves)
    as_they_are = sum(leaf.path in wanted for leaf in item.leaves)
    if as_they_are >= sum(leaf.path in wanted for leaf in spelled):
        return item
    return replace(item, leaves=spelled)
