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
from ..storage.path import StorePath, free_bytes, open_storage

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
        if "://" in info.path:
            # The settings of the URL are not in it, so the store cannot be opened anew.
            return step_of(info.path.rpartition("/")[2]) or 0
        return named_step(open_storage(info.path), "") or 0


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
    _refuse_unreadable(conversion.chosen)
    _refuse_full(conversion, target, to)
    if to != "holdfast":
        _refuse_per_process_values(conversion.chosen, to)
        _refuse_others(conversion, to, is_named=is_named)
    if to == "orbax":
        _refuse_kept_json(conversion)


def _refuse_unreadable(chosen: Mapping[str, Selected]) -> None:
    for item, _ in chosen.values():
        for leaf in item.leaves:
            if leaf.kind == "unreadable":
                raise UnsupportedLeaf(leaf.refusal, leaf=leaf.path, found=leaf.impl)


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


def _refuse_per_process_values(chosen: Mapping[str, Selected], to: str) -> None:
    for item, _ in chosen.values():
        for leaf in item.leaves:
            if leaf.per_process and leaf.grid is None:
                message = (
                    f"'{leaf.path}' was kept per process, which {to} does not know; say whose copy"
                    " to take (--process N)"
                )
                raise UnsupportedLeaf(message, leaf=leaf.path)


def _refuse_others(conversion: Conversion, to: str, *, is_named: bool) -> None:
    """Raises UnsupportedLeaf for what has no place: files, unless they only lay beside tensors and
    are not named, and JSON that is named.
    """
    info = conversion.checkpoint.info
    what = {}
    if to == "orbax" and (is_named or info.layout != "safetensors"):
        what["files"] = "a folder of files"
    elif to == "orbax" and "files" in conversion.others.values():
        _log.warning(
            "what lies beside the tensors of %s stays there: orbax holds no files. Copy its config"
            ' and tokenizer, or convert to "holdfast", which takes them along',
            info.path,
        )
    if to == "safetensors":
        what |= {"json": "JSON"} if is_named else {}
        for name, kind in conversion.others.items():
            if kind == "files" and name in info.owners and conversion.process is None:
                raise UnsupportedLeaf(
                    f"the item '{name}' of {info.path} has files of each of"
                    f" {info.owners[name]} processes, and safetensors holds one folder; say whose"
                    " to take (--process N)",
                    leaf=name,
                )
    for name, kind in conversion.others.items():
        if kind in what:
            message = (
                f"the item '{name}' of {conversion.checkpoint.info.path} is {what[kind]}, which"
                f" {to} does not hold; name the items to take (--item NAME)"
            )
            raise UnsupportedLeaf(message, leaf=name)


def _refuse_kept_json(conversion: Conversion) -> None:
    owners = conversion.checkpoint.info.owners
    for name, kind in conversion.others.items():
        if kind == "json" and name in owners and conversion.process is None:
            raise UnsupportedLeaf(
                f"the item '{name}' has a value of each of {owners[name]} processes, and orbax"
                " holds one; say whose to take (--process N)",
                leaf=name,
            )
