"""What is converted, and what is refused before a byte of it is written."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from ..errors import CheckpointError, UnsupportedLeaf
from ..format.record import ItemRecord
from ..format.step_folders import named_step, step_of
from ..layouts.base import CheckpointReader
from ..restoring.reader import ArrayReader
from ..storage.path import StorePath, free_bytes, open_storage, split

_log = logging.getLogger("holdfast.checkpoint")
ORBAX_SHRINKS = 16  # Orbax's arrays are compressed: by more than this hardly any are
Progress: TypeAlias = Callable[[int], None]
Selected: TypeAlias = tuple[ItemRecord, ArrayReader]


class Conversion(NamedTuple):
    """What is converted: some items of a checkpoint, and whose copies of what each process keeps.

    `chosen` are the trees, `others` the kinds of the JSON items and items of files. `process` None
    means the copies of all processes. `progress` is told the bytes that were done. The files of the
    model in `beside` go along.
    """

    checkpoint: CheckpointReader
    chosen: Mapping[str, Selected]
    others: Mapping[str, str]
    process: int | None
    progress: Progress
    beside: StorePath | None

    @property
    def step(self) -> int:
        """The step that the target is: the checkpoint's, or that in its folder's name.

        A checkpoint that was saved alone is step 0 wherever it is.
        """
        info = self.checkpoint.info
        if info.step:
            return info.step
        path = info.path
        if path.endswith(".safetensors"):  # one file, in a folder that may be called by its step
            path, _ = split(path)
        if "://" in path:
            # The settings of the URL are not in it, so the store cannot be opened anew.
            return step_of(path.rpartition("/")[2]) or 0
        return named_step(open_storage(path), "") or 0


def trees_of(checkpoint: CheckpointReader, kinds: Mapping[str, str]) -> dict[str, Selected]:
    """Returns those of some items that are trees, with their readers."""
    return {
        name: (checkpoint.item(name), checkpoint.reader(name))
        for name, kind in kinds.items()
        if kind == "tree"
    }


def check_conversion(conversion: Conversion, target: StorePath, to: str, *, is_named: bool) -> None:
    """Raises UnsupportedLeaf for what a layout does not hold, of what was named or of all,
    CheckpointError where a disk has no room for the arrays, and ValueError for no layout.
    """
    if to not in ("holdfast", "orbax", "safetensors"):
        raise ValueError(f'there is no layout {to!r}: choose "holdfast", "orbax" or "safetensors"')
    if conversion.beside is not None and to != "safetensors":
        raise ValueError(f'beside= is for "safetensors", and not for "{to}": leave it out')
    _refuse_leaves(conversion.chosen, to)
    _refuse_full(conversion, target, to)
    if to != "holdfast":
        _refuse_others(conversion, to, is_named=is_named)


def _refuse_leaves(chosen: Mapping[str, Selected], to: str) -> None:
    for item, _ in chosen.values():
        for leaf in item.leaves:
            if leaf.kind == "unreadable":
                raise UnsupportedLeaf(leaf.refusal, leaf=leaf.path, found=leaf.impl)
            if to != "holdfast" and leaf.per_process and leaf.grid is None:
                message = (
                    f"'{leaf.path}' was kept per process, which {to} does not know; say whose copy"
                    " to take (--process N)"
                )
                raise UnsupportedLeaf(message, leaf=leaf.path)


def _refuse_full(conversion: Conversion, target: StorePath, to: str) -> None:
    free = free_bytes(target.storage)
    arrays = (leaf for item, _ in conversion.chosen.values() for leaf in item.leaves)
    need = sum(leaf.nbytes for leaf in arrays if leaf.grid is not None)
    if free is not None and need // (ORBAX_SHRINKS if to == "orbax" else 1) > free:
        raise CheckpointError(
            f"step {conversion.step} of {conversion.checkpoint.info.path} needs {need:,} bytes as"
            f" {to}, and the disk of {target} has {free:,} left; make room, or convert less of it",
            path=str(target),
        )


def _refuse_others(conversion: Conversion, to: str, *, is_named: bool) -> None:
    """Raises UnsupportedLeaf for what has no place: files in Orbax's layout, unless they only lay
    beside tensors and are not named, JSON in safetensors that is named, and copies of several
    processes where the layout holds one.
    """
    info = conversion.checkpoint.info
    for name, kind in conversion.others.items():
        is_file = kind == "files"
        has_place = is_file == (to == "safetensors")  # orbax holds JSON
        if has_place:
            if name in info.owners and conversion.process is None:
                what = "files" if is_file else "a value"
                raise UnsupportedLeaf(
                    f"the item '{name}' of {info.path} has {what} of each of {info.owners[name]}"
                    f" processes, and {to} holds one {'folder' if is_file else 'value'}; say whose"
                    " to take (--process N)",
                    leaf=name,
                )
        elif is_file and not is_named and info.layout == "safetensors":
            _log.warning(
                "what lies beside the tensors of %s stays there: orbax holds no files. Copy its"
                ' config and tokenizer, or convert to "holdfast", which takes them along',
                info.path,
            )
        elif is_file or is_named:
            what = "a folder of files" if is_file else "JSON"
            raise UnsupportedLeaf(
                f"the item '{name}' of {info.path} is {what}, which {to} does not hold; name the"
                " items to take (--item NAME)",
                leaf=name,
            )
