"""Turns a checkpoint of one layout into one of another, in bounded memory."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from crc32c import crc32c

from holdfast.coordination import HoldfastError
from holdfast.multihost import Solo

from ..agreement.save_protocol import Prepared, SaveKey, SaveReport
from ..arrays.dtypes import Dtype, HostArray, dtype_named
from ..errors import StepExists, StepNotFound, TreeMismatch, UnsupportedLeaf
from ..format.grid import Chunk, Grid, Shape
from ..format.item_report import FileReport, ItemReport, pack_name
from ..format.limits import encode_json
from ..format.own_files import (
    StagedFiles,
    is_folder_name,
    own_names,
    put_files,
    scratch_folder,
)
from ..format.pack_header import HEADER_BYTES
from ..format.record import ItemRecord, LeafRecord, check_record
from ..format.rename import Names
from ..format.tree import describe, flatten, plain_name, rebuild
from ..format.values import encode_value
from ..layouts.base import (
    CheckpointInfo,
    CheckpointReader,
    arrays_of,
    find_named,
    leaves_below,
    read_leaves,
)
from ..layouts.detect import ForeignSteps, find_foreign_steps, identify
from ..layouts.restore import check_one_tree
from ..layouts.safetensors import (
    INDEX,
    INDEX_SUFFIX,
    NAMES,
    SHARD_BYTES,
    SINGLE,
    bits_of,
    files_beside,
    header_of,
    nbytes_of,
    pack,
    shards_of_index,
    split_evenly,
    split_shards,
)
from ..options import Options
from ..restoring.devices import Region
from ..restoring.per_process import PerProcessSelection, leaves_of_process, read_process
from ..restoring.reader import ArrayReader, ReadRequest
from ..restoring.renamed import renamed
from ..restoring.surgery import operate
from ..restoring.surgery_rules import Rules
from ..restoring.view_reader import BATCH_BYTES, ViewReader, Wanted, fresh, read_in_order
from ..saving.commit import SaveWork, run_protocol
from ..saving.item_files import ItemTarget, write_files, write_json
from ..saving.pack_writer import ChunkSums, pack_parts, plan_pack
from ..saving.plan import CHUNK_BYTES, Leaf, Plan, ShardPlacement, make_plan
from ..saving.record_builder import RecordHead, build_record, check_plan
from ..saving.stager import OneSave
from ..steps.claims import Claims
from ..steps.object_claims import open_claims
from ..steps.opening import give_up_claim, open_root
from ..storage.base import Part
from ..storage.counting import count_parts
from ..storage.path import StorePath, open_storage
from ..storage.threads import run_side_by_side
from ..storage.tombstone import RECORD_NAME
from .conversion import Conversion, Progress, Selected, check_conversion, trees_of

if TYPE_CHECKING:  # imports tensorstore
    from ..layouts.orbax.write import OrbaxWriter

_log = logging.getLogger("holdfast.checkpoint")
Named: TypeAlias = tuple[LeafRecord, ArrayReader]
NewFile: TypeAlias = tuple[str, int, Iterable[Part]]  # its name, its size, its bytes
MAX_SHARDS = 4096  # of a leaf: one that is cut finer is read as if it were whole
# Packs written side by side: each holds two chunks in memory, or for an object store itself twice.
PACKS_AT_ONCE = 2


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
    chosen = trees_of(checkpoint, wanted)
    if process is not None:
        chosen = {name: _of_process(found, process) for name, found in chosen.items()}
    if under or rename is not None:
        chosen = {name: _selected(found, under, rename) for name, found in chosen.items()}
    if rules is not None:
        check_one_tree(list(wanted), checkpoint.info)
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
        return _to_holdfast(conversion, target, claims or open_claims(target.storage))
    if to == "safetensors":
        return _to_safetensors(conversion, target, ShardLimits(shards, shard_bytes))
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
    plain = replace(item, leaves=leaves)
    return plain, read_process(reader, item, process)


def _selected(selected: Selected, under: str, rename: Names) -> Selected:
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
                writer.write(name, names[leaf.path], (), array)
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


class ShardLimits(NamedTuple):
    """How many files of tensors there will be, or how large each is at most; None: as it comes."""

    files: int | None
    shard_bytes: int | None

    def split(
        self, sizes: Mapping[str, int], kept: int | None, max_file_bytes: int | None
    ) -> list[list[str]]:
        """Returns the names of the tensors of each file. `kept` is how many files there were."""
        limit = max_file_bytes - HEADER_BYTES if max_file_bytes is not None else math.inf
        count = self.files
        if count is None and self.shard_bytes is None:
            count = kept
        if count is not None:
            shards = split_evenly(sizes, count)
            if all(sum(sizes[name] for name in names) <= limit for names in shards):
                return shards
        size = SHARD_BYTES if self.shard_bytes is None else self.shard_bytes
        return split_shards(sizes, int(min(size, limit)))


class _Tensors(NamedTuple):
    """What becomes tensors, by their names, and the texts of the header."""

    leaves: Mapping[str, Named]
    texts: Mapping[str, str]
    shapes: Mapping[str, tuple[Shape, Dtype]]

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of each."""
        return {name: nbytes_of(shape, dtype) for name, (shape, dtype) in self.shapes.items()}

    def files(
        self, shards: Mapping[str, Sequence[str]], beside: Mapping[str, Path], progress: Progress
    ) -> Iterator[NewFile]:
        """Yields the files to write: those of tensors, and those that go beside them."""
        sizes = self.sizes
        for file, names in shards.items():
            head, order = header_of({name: self.shapes[name] for name in names}, self.texts)
            size = len(head) + sum(sizes[name] for name in names)
            yield (file, size, _parts(head, order, self.leaves, progress))
        for name, path in beside.items():
            yield (name, path.stat().st_size, _pieces(path))
        # The index comes last: with it the folder is whole.
        if len(shards) > 1:
            weight_map = {name: file for file, names in shards.items() for name in names}
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
            data = json.dumps(index, indent=2).encode()
            yield (INDEX, len(data), [(0, [memoryview(data)])])


def _to_safetensors(conversion: Conversion, folder: StorePath, limits: ShardLimits) -> str:
    """Writes the chosen items as one file, or as shards with an index, and files beside them.

    Returns where. One leaf is in memory at a time, or a piece of it. Raises StepExists,
    UnsupportedLeaf.
    """
    there = folder.names()
    if RECORD_NAME in there or any(name.endswith((".safetensors", INDEX_SUFFIX)) for name in there):
        raise StepExists(
            f"{folder} holds a checkpoint already; choose another folder", path=str(folder)
        )
    info = conversion.checkpoint.info
    tensors = _named(conversion.chosen, _header_texts(info))
    with scratch_folder() as scratch:
        beside = _stage_beside(conversion, scratch)
        if not any(kind == "files" for kind in info.items.values()):
            _warn_of_no_files(folder, [*beside.paths, *there])
        taken = [name for name in beside.paths if name in there]
        if taken:
            raise StepExists(
                f"{folder} holds '{taken[0]}' already; choose another folder", path=str(folder)
            )
        shards = limits.split(tensors.sizes, beside.shards, folder.storage.max_file_bytes)
        progress = conversion.progress
        _write(folder, tensors.files(_named_shards(shards), beside.paths, progress))
    return str(folder)


def _write(folder: StorePath, files: Iterable[NewFile]) -> None:
    """Writes all files, or none."""
    begun: list[str] = []
    try:
        for name, size, parts in files:
            begun.append((folder / name).name)
            folder.storage.write(begun[-1], size, parts)
    except BaseException:
        folder.storage.delete([*begun, *folder.folders_of(begun)])
        raise


def _warn_of_no_files(folder: StorePath, names: Sequence[str]) -> None:
    if not names:
        _log.warning(
            "%s gets tensors alone: the checkpoint has no config and no tokenizer, which a model of"
            " Hugging Face's needs. To have them there too, name the folder of the model that was"
            " trained: convert(..., beside=FOLDER), or --beside FOLDER",
            folder,
        )


def _pieces(path: Path) -> Iterator[Part]:
    """Yields a whole file."""
    offset = 0
    with path.open("rb") as file:
        while data := file.read(BATCH_BYTES):
            yield offset, [memoryview(data)]
            offset += len(data)


class _Beside(NamedTuple):
    """The files that lie beside tensors, and of how many shards an index among them was."""

    paths: dict[str, Path]
    shards: int | None


def _stage_beside(conversion: Conversion, scratch: Path) -> _Beside:
    """Puts the files of all items of files, and of the folder beside, into a scratch folder; an old
    index is left out.
    """
    shards = None
    for name, kind in conversion.others.items():
        if kind != "files":
            continue
        selection = PerProcessSelection(conversion.process or 0)
        files = conversion.checkpoint.files(name, selection)
        put_files(scratch, files, conversion.checkpoint.info.path)
    if conversion.beside is not None:
        there = {*own_names(scratch)}
        files = (
            (name, data) for name, data in files_beside(conversion.beside) if name not in there
        )
        put_files(scratch, files, str(conversion.beside))
    paths = {}
    for own in own_names(scratch):
        if own.endswith(INDEX_SUFFIX):
            shards = shards_of_index((scratch / own).read_bytes())
        elif own.endswith(".safetensors"):
            raise UnsupportedLeaf(
                f"'{own}' among the files of {conversion.checkpoint.info.path} would be taken for"
                " tensors; name the items to take (--item NAME)",
                leaf=own,
            )
        elif not is_folder_name(own):
            paths[own] = scratch / own
    return _Beside(paths, shards)


def _named_shards(shards: Sequence[Sequence[str]]) -> dict[str, Sequence[str]]:
    """Returns the files to write, each with the names of its tensors."""
    if len(shards) <= 1:
        return {SINGLE: shards[0] if shards else []}
    count = len(shards)
    return {
        f"model-{number:05d}-of-{count:05d}.safetensors": names
        for number, names in enumerate(shards, 1)
    }


def _header_texts(info: CheckpointInfo) -> dict[str, str]:
    """Returns what a file's header says of a checkpoint: its metadata, what is no text as JSON."""
    known = info.metadata
    metadata = known if isinstance(known, Mapping) else {"metadata": known}
    texts = {"format": "pt"}
    for name, value in metadata.items() if known is not None else ():
        texts[name] = value if isinstance(value, str) else json.dumps(value)
    if info.step is not None:
        texts["step"] = str(info.step)
    return texts


def _named(chosen: Mapping[str, Selected], about: Mapping[str, str]) -> _Tensors:
    """Returns the leaves by the names that they get; the header says `about` besides.

    Raises UnsupportedLeaf for what has no place.
    """
    leaves: dict[str, Named] = {}
    texts: dict[str, str] = {}
    for item_name, (item, reader) in chosen.items():
        prefix = f"{item_name}." if len(chosen) > 1 else ""
        for leaf in _in_reading_order(item, reader):
            name = prefix + plain_name(leaf.path)
            if name in leaves or name in texts:
                raise UnsupportedLeaf(
                    f"two leaves would be called '{name}' in a safetensors file; rename one of"
                    " them",
                    leaf=leaf.path,
                )
            if isinstance(leaf.value, str | bytes):
                texts[name] = _text(leaf, about, name)
            elif name == "__metadata__":
                raise UnsupportedLeaf(
                    f"a safetensors file has no array called '{name}': its header is; rename it",
                    leaf=leaf.path,
                )
            else:
                leaves[name] = (leaf, reader)
    shapes = {name: _shape_and_dtype(name, leaf) for name, (leaf, _) in leaves.items()}
    return _Tensors(leaves, {**about, **texts}, shapes)


def _text(leaf: LeafRecord, about: Mapping[str, str], name: str) -> str:
    """Returns a text, or bytes in hexadecimal digits, as the header of a file has them."""
    if name in about:
        raise UnsupportedLeaf(
            f"'{name}' is a text, and the header of a safetensors file says '{name}' of the"
            f" checkpoint: {about[name]!r:.100}; rename the leaf",
            leaf=leaf.path,
        )
    text: str = leaf.value if isinstance(leaf.value, str) else leaf.value.hex()
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UnsupportedLeaf(
            f"a safetensors file cannot hold '{name}', the text {text!r:.100}, which is not valid"
            " UTF-8; leave it out (--path)",
            leaf=leaf.path,
        ) from None
    return text


def _in_reading_order(item: ItemRecord, reader: ArrayReader) -> Sequence[LeafRecord]:
    if not isinstance(reader, ViewReader):
        return item.leaves
    places = {path: place for place, path in enumerate(reader.order)}
    return sorted(item.leaves, key=lambda leaf: places.get(leaf.path, -1))


def _shape_and_dtype(name: str, leaf: LeafRecord) -> tuple[Shape, Dtype]:
    dtype = np.asarray(leaf.value).dtype if leaf.grid is None else dtype_named(leaf.dtype)
    if dtype not in NAMES:
        message = (
            f"a safetensors file cannot hold '{name}' of dtype {dtype}; leave it out (--path) or"
            " cast it before saving"
        )
        raise UnsupportedLeaf(message, leaf=leaf.path, found=str(dtype))
    assert dtype is not None
    if math.prod(leaf.shape) * bits_of(dtype) % 8:
        raise UnsupportedLeaf(
            f"a safetensors file cannot hold '{name}', {dtype}{list(leaf.shape)}: its last byte"
            " would be half full; leave it out (--path) or cast it before saving",
            leaf=leaf.path,
            found=str(dtype),
        )
    return leaf.shape, dtype


def _parts(
    head: bytes,
    order: Sequence[str],
    leaves: Mapping[str, Named],
    progress: Progress,
) -> Iterator[Part]:
    """Yields a file in its own order, while the leaves are read."""
    yield 0, [memoryview(head)]
    offset = len(head)
    for name in order:
        for array in _rows(*leaves[name]):
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            bits = bits_of(array.dtype)
            if bits < 8:
                data = pack(data, bits)
            if data.nbytes:
                yield offset, [data.data]
            offset += data.nbytes
            progress(data.nbytes)


def _rows(leaf: LeafRecord, reader: ArrayReader) -> Iterator[HostArray]:
    """Yields an array whole, or a large one in rows, as far as it can be read so."""
    if leaf.grid is None:
        yield np.asarray(leaf.value)
        return
    whole = tuple((0, size) for size in leaf.shape)
    least = math.prod(leaf.grid.chunk_shape) * leaf.numpy_dtype.itemsize
    is_packed = bits_of(leaf.numpy_dtype) < 8  # rows of such may share a byte
    if leaf.nbytes <= CHUNK_BYTES or least > CHUNK_BYTES or is_packed:
        rows = leaf.shape[0] if leaf.shape else 1
    else:
        chunk = leaf.grid.chunk_shape[0]
        rows = max(CHUNK_BYTES * leaf.shape[0] // leaf.nbytes // chunk, 1) * chunk
    for first in range(0, max(leaf.shape[0], 1) if leaf.shape else 1, max(rows, 1)):
        region = whole
        if leaf.shape:
            region = ((first, min(first + rows, leaf.shape[0])), *whole[1:])
        read = ReadRequest(leaf, region)
        reader.fill([read], fresh)
        assert read.array is not None
        yield read.array


def _to_holdfast(conversion: Conversion, root: StorePath, claims: Claims) -> str:
    """Writes the chosen items as a step of `root`.

    Returns where it is. The plan is made of the records instead of live arrays, with their own
    grids as far as they have them. Each pack is written while its chunks are read, in their order.
    Raises StepExists.
    """
    storage = root.storage
    step = conversion.step
    held = open_root(
        storage, claims, Solo(), Options(), find_foreign=find_foreign_steps, identify=identify
    )
    listing = held.listing
    folder = listing.step_names.name_of(step)
    is_unclear = False
    try:
        if step in listing.steps or step in listing.foreign:
            raise StepExists(
                f"step {step} is already in {root}; choose another place or delete it first",
                path=str(root),
                step=step,
            )
        foreign = ForeignSteps(storage, listing.foreign, listing.step_names)
        save = OneSave(
            root=replace(held, options=replace(held.options, save_timeout_s=math.inf)),
            key=SaveKey(held.writer.id, 0, step),
            folder=folder,
        )
        is_unclear = True
        result = run_protocol(save, _ConversionWork(conversion, save, foreign))
        is_unclear = result.is_unclear
        if result.error is not None:
            cause = result.error.__cause__
            raise cause if isinstance(cause, HoldfastError) and result.deletable else result.error
    finally:
        give_up_claim(held, folder, is_unclear=is_unclear)
    return str(root / folder)


class _ConversionWork(SaveWork):
    """Writes what is converted, as this one process for all that saved it."""

    def __init__(self, conversion: Conversion, save: OneSave, foreign: ForeignSteps) -> None:
        self._foreign = foreign
        self._conversion = conversion
        self._checkpoint = conversion.checkpoint
        self._save = save
        self._items: dict[str, tuple[Plan | None, list[ItemReport]]] = {}

    def write(self) -> Prepared:
        """Writes the packs while their chunks are read, durably."""
        save = self._save
        self._foreign.make_way(save.storage, save.folder, save.claim)
        for name, (item, reader) in self._conversion.chosen.items():
            self._items[name] = write_item(item, reader, save.item(name), self._conversion.progress)
        for name, kind in self._conversion.others.items():
            write_copy = self._write_json if kind == "json" else self._write_files
            reports = [write_copy(name, owner) for owner in self._copies(name)]
            self._items[name] = (None, reports)
        return Prepared({name: reports[0] for name, (_, reports) in self._items.items()})

    def _copies(self, item: str) -> list[int | None]:
        """Returns the processes whose copies are written; [None] for one copy."""
        if self._conversion.process is not None:
            return [None]
        return self._checkpoint.info.copies(item)

    def _source(self, owner: int | None) -> int:
        """Returns the process whose copy is read."""
        return (self._conversion.process or 0) if owner is None else owner

    def _write_json(self, item: str, owner: int | None) -> ItemReport:
        data = _json_data(item, self._checkpoint.json(item, self._source(owner)))
        return write_json(self._save.item(item), owner or 0, data)

    def _write_files(self, item: str, owner: int | None) -> ItemReport:
        files = self._checkpoint.files(item, PerProcessSelection(self._source(owner)))
        with scratch_folder() as folder:
            put_files(folder, files, self._checkpoint.info.path)
            names = tuple(own_names(folder))
            staged = StagedFiles(folder, names, per_process=owner is not None, nbytes=0)
            target = self._save.item(item)
            return write_files(target, owner or 0, staged, self._conversion.progress)

    def build(self, reports: Sequence[SaveReport]) -> bytes:
        """Returns the record: the one report of the save is this work's own."""
        info = self._checkpoint.info
        metrics = {
            name: value for name, value in info.metrics.items() if isinstance(value, (int, float))
        }
        record = build_record(
            RecordHead(
                self._save.step,
                writer=self._save.key.save_id,
                processes=max([len(shares) for _, shares in self._items.values()], default=1),
                started_s=self._save.started_s,
                finished_s=time.time(),
                metrics=metrics,
                metadata=info.metadata,
            ),
            self._items,
        )
        check_record(record, self._save.where)
        return record


def _json_data(item: str, value: Any) -> bytes:
    try:
        return encode_json(value, f"the item {item!r}")
    except (TypeError, ValueError) as error:
        raise UnsupportedLeaf(str(error), leaf=item) from error


def write_item(
    item: ItemRecord, reader: ArrayReader, target: ItemTarget, progress: Progress
) -> tuple[Plan, list[ItemReport]]:
    """Writes the packs of one item; returns the plan and the reports that the record is made of.

    At most a few chunks are in memory.
    """
    tree, ordered = _in_order(item)
    leaves = [leaf for leaf, _ in ordered]
    placements: dict[Any, ShardPlacement | None] = {}
    described = [_leaf(leaf, path, placements) for leaf, path in ordered]
    plan = make_plan(
        tree, described, statics=item.statics, max_file_bytes=target.storage.max_file_bytes
    )
    check_plan(plan)
    whole = _of_whole_chunks(plan)

    def write(pack: int) -> FileReport:
        planned = plan_pack(whole, pack)
        sums = ChunkSums()
        wanted = [_chunk_region(plan, chunk, leaves[chunk.leaf]) for chunk in plan.own[pack]]
        chunks = [_LazyChunk(read_in_order(reader, wanted))] * len(wanted)
        parts = count_parts(pack_parts(planned, chunks, sums), progress)
        name = pack_name(0, pack, target.save_id)
        target.write(name, planned.size, parts)
        head = planned.frame.join(sums.checksums)
        return FileReport(name, planned.size, len(head), crc32c(head))

    files = run_side_by_side(write, list(plan.own), PACKS_AT_ONCE)
    return plan, _reports(plan, files, leaves)


def _of_whole_chunks(plan: Plan) -> Plan:
    """Returns the plan for chunks that come cut out already."""
    own = {
        pack: tuple(replace(chunk, inside=None) for chunk in chunks)
        for pack, chunks in plan.own.items()
    }
    return replace(plan, own=own, cache={})


def _reports(
    plan: Plan, files: Sequence[FileReport], leaves: Sequence[LeafRecord]
) -> list[ItemReport]:
    """Returns a report as of one process that wrote all.

    One more follows for each further process that values were kept for.
    """
    values = [leaf for leaf in leaves if leaf.grid is None]
    first = [encode_value(leaf.value[0] if leaf.per_process else leaf.value) for leaf in values]
    reports = [ItemReport(0, plan.hash, tuple(files), (), tuple(first))]
    kept = [leaf.value for leaf in values if leaf.per_process]
    for process in range(1, max(map(len, kept), default=1)):
        own = tuple(encode_value(value[process]) for value in kept)
        reports.append(ItemReport(process, plan.hash, (), (), own))
    return reports


def _in_order(item: ItemRecord) -> tuple[Any, list[tuple[LeafRecord, str]]]:
    """Returns the tree's description, and its leaves with their paths here, in flatten order."""
    skeleton = rebuild(item.tree, list(range(len(item.leaves))))
    description, paths = describe(skeleton)
    order = flatten(skeleton)[0]
    # The item's own description names the types.
    tree = item.tree if order == sorted(order) else description
    return tree, [(item.leaves[index], path) for index, path in zip(order, paths, strict=True)]


def _leaf(leaf: LeafRecord, path: str, placements: dict[Any, ShardPlacement | None]) -> Leaf:
    if leaf.grid is None:
        return Leaf(path, leaf.kind, per_process=leaf.per_process)
    shards = tuple(
        size // shard if shard else 1
        for size, shard in zip(leaf.shape, leaf.grid.shard_shape, strict=True)
    )
    if shards not in placements:
        placements[shards] = _placement(shards)
    return Leaf(
        path,
        leaf.kind,
        leaf.dtype,
        leaf.shape,
        itemsize=leaf.numpy_dtype.itemsize,
        placement=placements[shards],
        sharding=leaf.sharding,
        impl=leaf.impl,
        per_process=leaf.per_process,
        weak=leaf.weak,
    )


def _placement(shards: Shape) -> ShardPlacement | None:
    """Returns a placement by which one process holds all shards, so that chunks keep within them.

    Returns None for one shard.
    """
    count = math.prod(shards)
    if not 1 < count <= MAX_SHARDS:
        return None
    holders = np.zeros((count, 1), np.int64)
    return ShardPlacement(shards, holders, np.arange(count, dtype=np.int64)[:, None])


def _chunk_region(plan: Plan, chunk: Chunk, leaf: LeafRecord) -> Wanted:
    """Returns a chunk as a region of a stored leaf, and the region that has to be read for it."""
    grid = leaf.grid
    assert grid is not None
    whole = _shard_region(plan.leaves[chunk.leaf].placement, chunk.slot, leaf.shape)
    if chunk.inside is None:
        return Wanted(leaf, whole, whole)
    region = tuple(
        (start + cut.start, start + cut.stop)
        for (start, _), cut in zip(whole, chunk.inside, strict=True)
    )
    reads_little_more = math.prod(grid.chunk_shape) * leaf.numpy_dtype.itemsize <= CHUNK_BYTES
    return Wanted(leaf, region, region if reads_little_more else _around(region, whole, grid))


def _around(region: Region, whole: Region, grid: Grid) -> Region:
    """Returns the chunks of the grid around a region of one shard."""
    return tuple(
        (
            first + (start - first) // chunk * chunk,
            min(last, first + -(-(stop - first) // chunk) * chunk),
        )
        for (start, stop), (first, last), chunk in zip(region, whole, grid.chunk_shape, strict=True)
    )


def _shard_region(placement: ShardPlacement | None, slot: int, shape: Sequence[int]) -> Region:
    """Returns the region of one shard of a leaf; of the whole leaf where it has no shards."""
    if placement is None:
        return tuple((0, size) for size in shape)
    counts = placement.shards_per_axis
    sizes = [size // count for size, count in zip(shape, counts, strict=True)]
    position = [int(place) for place in np.unravel_index(slot, counts)]
    return tuple(
        (place * size, (place + 1) * size) for place, size in zip(position, sizes, strict=True)
    )


class _LazyChunk(NamedTuple):
    """A chunk that is read when its turn comes, in the pack's order."""

    arrays: Iterator[HostArray]

    def get(self) -> HostArray:
        """Returns the chunk's array, once."""
        return next(self.arrays)
