"""Turns a checkpoint of one layout into one of another, in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import StepNotFound, TreeMismatch
from ..format.rename import Names
from ..layouts.base import (
    CheckpointReader,
    arrays_of,
    find_named,
    leaves_below,
    read_leaves,
)
from ..layouts.restore import check_one_tree
from ..restoring.per_process import PerProcessSelection, leaves_of_process, read_process
from ..restoring.renamed import renamed
from ..restoring.surgery import operate
from ..restoring.surgery_rules import Rules
from ..restoring.view_reader import BATCH_BYTES
from ..steps.claims import Claims
from ..steps.object_claims import open_claims
from ..storage.path import StorePath, open_storage
from .conversion import Conversion, Progress, Selected, check_conversion, trees_of
from .to_holdfast import to_holdfast
from .to_safetensors import to_safetensors

if TYPE_CHECKING:  # imports tensorstore
    from ..layouts.orbax.write import OrbaxWriter


# This is a face, of the command's options too, so that it has more than eight parameters.
def convert(  # noqa: PLR0913
    checkpoint: CheckpointReader,
    target: StorePath,
    to: str,
    *,
    items: Sequence[str] = (),
    under: str = "",
    rename: Names = None,
    rules: Rules | None = None,
    process: int | None = None,
    shards: int | None = None,
    shard_bytes: int | None = None,
    beside: str | os.PathLike[str] | None = None,
    claims: Claims | None = None,
    progress: Progress = lambda done_bytes: None,
) -> str:
    """Writes a checkpoint anew in the layout "holdfast", "orbax" or "safetensors"; returns where.

    For holdfast and Orbax `target` is a root and the checkpoint becomes a step of it, for
    safetensors it is the folder itself. `items` chooses among several, of whatever kind (none: all;
    JSON items are left out where the layout does not hold them). `under` keeps
    the leaves below one path. `rename` gives leaves other paths (their tree becomes a flat dict).
    `rules` are applied after it, to the one tree that is converted.
    `process` says whose copies to take of what was kept per process: leaves, JSON items, items of
    files. For safetensors `shards` is how many files there will be, or `shard_bytes` how large each
    is at most; with neither there are as many as the checkpoint had when it came from safetensors,
    else files of 5 GiB. Items of files lie beside them, and what else the folder `beside` of a
    model has besides its tensors.

    Arrays pass through memory a few at a time; what can be read only whole (a chunk of Orbax's) is
    held whole. `claims` are the target's, made if None. Raises StepExists, UnsupportedLeaf for what
    the layout cannot hold, Corrupt, the store's OSErrors. What was begun is removed.
    """
    for name, bound in (("shards", shards), ("shard_bytes", shard_bytes)):
        if bound is not None and (not isinstance(bound, int) or bound < 1):
            raise ValueError(f"convert: {name}={bound!r}: expected a whole number above 0")
    wanted = _wanted(checkpoint, items)
    chosen = {
        name: _selected(found, process, under, rename)
        for name, found in trees_of(checkpoint, wanted).items()
    }
    if rules is not None:
        check_one_tree(wanted, checkpoint.info)
        chosen = {name: operate(*found, rules) for name, found in chosen.items()}
    conversion = Conversion(
        checkpoint,
        chosen,
        {name: kind for name, kind in wanted.items() if kind != "tree"},
        process,
        progress=progress,
        beside=None if beside is None else StorePath(open_storage(beside)),
    )
    check_conversion(conversion, target, to, is_named=bool(items))
    if to == "holdfast":
        return to_holdfast(conversion, target, claims or open_claims(target.storage))
    if to == "safetensors":
        return to_safetensors(conversion, target, shards, shard_bytes)
    return _to_orbax(conversion, target)


def _wanted(checkpoint: CheckpointReader, items: Sequence[str]) -> dict[str, str]:
    """Returns the kinds of the items that are named, or of all."""
    info = checkpoint.info
    return {name: find_named(info, info.items, name) for name in items or info.items}


def _of_process(selected: Selected, process: int) -> Selected:
    item, reader = selected
    of_process = leaves_of_process(item, PerProcessSelection(process))
    for leaf in of_process.leaves:
        if leaf.refusal:
            raise TreeMismatch(leaf.refusal, leaf=leaf.path)
    leaves = tuple(replace(leaf, per_process=False) for leaf in of_process.leaves)
    return replace(item, leaves=leaves), read_process(reader, item, process)


def _selected(selected: Selected, process: int | None, under: str, rename: Names) -> Selected:
    if process is not None:
        selected = _of_process(selected, process)
    if not under and rename is None:
        return selected
    item, reader = selected
    kept = replace(item, leaves=tuple(leaves_below(item, under)))
    if not kept.leaves:
        raise StepNotFound(f"the item '{item.name}' has no leaf below '{under}'")
    return renamed(kept, reader, rename)


def _to_orbax(conversion: Conversion, root: StorePath) -> str:
    from ..layouts.orbax.encode import custom_metadata
    from ..layouts.orbax.write import OrbaxWriter

    custom_metadata(conversion.checkpoint.info.metadata)
    target = root / str(conversion.step)
    write_orbax(conversion, OrbaxWriter(target))
    return str(target)


def write_orbax(conversion: Conversion, writer: OrbaxWriter) -> None:
    """Writes what is converted, all of which Orbax's layout can hold, and finishes the writer; or
    abandons it.
    """
    info = conversion.checkpoint.info
    try:
        for name, (item, reader) in conversion.chosen.items():
            paths = [leaf.path for leaf in item.leaves]
            names = dict(zip(paths, writer.add_record(item), strict=True))
            held = 0
            for leaf, array in read_leaves(reader, arrays_of(item)):
                writer.write(name, names[leaf.path], array)
                held += array.nbytes
                conversion.progress(array.nbytes)
                if held >= BATCH_BYTES:
                    writer.flush()
                    held = 0
            writer.flush()
        for name, kind in conversion.others.items():
            if kind == "json":
                writer.add_json(name, conversion.checkpoint.json(name, conversion.process or 0))
        writer.finish(metrics=info.metrics, metadata=info.metadata)
    except BaseException:
        writer.abandon()
        raise
