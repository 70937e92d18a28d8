"""Turns a checkpoint of one layout into one of another, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ..errors import StepNotFound, TreeMismatch, UnsupportedLeaf
from ..format.record import ItemRecord
from ..format.rename import Names
from ..layouts.base import BATCH_BYTES, CheckpointReader, RenamedReader, arrays_of, read_leaves, renamed
from ..layouts.safetensors import SHARD_BYTES
from ..restoring.per_process import OwnReader, PerProcessSelection, own_leaves
from ..restoring.reader import ArrayReader
from ..steps.claims import Claims
from ..storage.path import StorePath
from .to_holdfast import to_holdfast
from .to_safetensors import to_safetensors

Progress = Callable[[int], None]
Selected = tuple[ItemRecord, ArrayReader]


def convert(
    source: CheckpointReader,
    target: StorePath,
    to: str,
    *,
    items: Sequence[str] = (),
    under: str = "",
    rename: Names = None,
    process: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    claims: Claims | None = None,
    progress: Progress = lambda done_bytes: None,
) -> str:
    """Writes what `source` holds as a new checkpoint in the layout `to` ("holdfast", "orbax" or "safetensors"); returns where it is.

    For holdfast and Orbax `target` is a root and the checkpoint becomes a step of it, for safetensors it is the folder itself. `items`
    chooses among several (none: all), `under` keeps the leaves below one path, `rename` gives leaves other paths (their tree becomes a
    flat dict), and `process` says whose copies of leaves that were kept per process. Arrays pass through memory a few at a time; what
    the source can read only whole (a chunk of Orbax's) is held whole. `claims` are the target's (made if None).
    Raises StepExists, UnsupportedLeaf for what the layout cannot hold, Corrupt, the store's OSErrors; what was begun is removed.
    """
    chosen = _chosen(source, items)
    if process is not None:
        chosen = {name: _of_process(found, process) for name, found in chosen.items()}
    if under or rename is not None:
        chosen = {name: _selected(found, under, rename) for name, found in chosen.items()}
    if to == "holdfast":
        return to_holdfast(source, chosen, target, claims, progress)
    _refuse_own_values(chosen, to)
    if to == "safetensors":
        return to_safetensors(source, chosen, target, shard_bytes, progress)
    if to == "orbax":
        return _to_orbax(source, chosen, target, progress)
    raise ValueError(f'there is no layout {to!r}: choose "holdfast", "orbax" or "safetensors"')


def _chosen(source: CheckpointReader, items: Sequence[str]) -> dict[str, Selected]:
    wanted = items or [name for name, kind in source.info.items.items() if kind == "tree"]
    unknown = [name for name in wanted if name not in source.info.items]
    if unknown:
        known = ", ".join(source.info.items) or "none"
        raise StepNotFound(f"{source.info.path} has no item '{unknown[0]}'; it has: {known}", path=source.info.path)
    return {name: (source.item(name), source.reader(name)) for name in wanted if source.info.items[name] == "tree"}


def _of_process(selected: Selected, process: int) -> Selected:
    item, reader = selected
    found = own_leaves(item, PerProcessSelection(process))
    for leaf in found.leaves:
        if leaf.refusal:
            raise TreeMismatch(leaf.refusal, leaf=leaf.path)
    plain = replace(item, leaves=tuple(replace(leaf, per_process=False) for leaf in found.leaves))
    return plain, RenamedReader(OwnReader(reader, item, PerProcessSelection(process)), plain, found)


def _selected(selected: Selected, under: str, rename: Names) -> Selected:
    item, reader = selected
    kept = [leaf for leaf in item.leaves if not under or leaf.path == under or leaf.path.startswith(f"{under}.")]
    if not kept:
        raise StepNotFound(f"the item '{item.name}' has no leaf below '{under}'")
    part = replace(item, leaves=tuple(kept))
    new = renamed(part, rename)
    return new, RenamedReader(reader, new, part)


def _refuse_own_values(chosen: Mapping[str, Selected], to: str) -> None:
    for item, _ in chosen.values():
        for leaf in item.leaves:
            if leaf.per_process and leaf.grid is None:
                message = f"'{leaf.path}' was kept per process, which {to} does not know; say whose copy to take (--process N)"
                raise UnsupportedLeaf(message, leaf=leaf.path)


def _to_orbax(source: CheckpointReader, chosen: Mapping[str, Selected], root: StorePath, progress: Progress) -> str:
    from ..layouts.orbax.write import OrbaxWriter

    target = root / str(source.info.step or 0)
    writer = OrbaxWriter(target)
    try:
        for name, (item, reader) in chosen.items():
            names = dict(zip((leaf.path for leaf in item.leaves), writer.add_record(item), strict=True))
            held = 0
            for leaf, array in read_leaves(reader, arrays_of(item)):
                writer.write(name, names[leaf.path], (), array)
                held += array.nbytes
                progress(array.nbytes)
                if held >= BATCH_BYTES:
                    writer.flush()
                    held = 0
            writer.flush()
        for name, kind in source.info.items.items():
            if kind == "json":
                writer.add_json(name, source.json(name))
        writer.finish(metrics=source.info.metrics, metadata=source.info.metadata)
    except BaseException:
        writer.abandon()
        raise
    return str(target)
