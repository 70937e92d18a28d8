"""A pack: a safetensors file of chunks, with the CRC32C of each in its `__metadata__`.

    8 bytes   length of the header, little-endian; 8 + length is a multiple of 64
    header    JSON: {"__metadata__": {"crc32c": 8 hex digits a chunk, in data order}, name: {"dtype", "shape", "data_offsets"}, ...}
    data      the chunks, without holes

All of the header but the checksums is known from the plan.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from crc32c import crc32c

from ._dtypes import dtype_named, stored_as
from ._errors import Corrupt, HostileCheckpoint
from ._plan import Chunk, Plan
from ._storage import Part

ALIGN_BYTES = 64
HEADER_LIMIT_BYTES = 100_000_000  # as in safetensors
PIECE_BYTES = 1 << 20  # checksummed and written while it is in the cache
BATCH_BUFFERS = 1000


@dataclass(frozen=True)
class PackPlan:
    """A pack before it is written: `head` and `tail` are the header around the checksums, `size` the whole file's bytes."""

    chunks: tuple[Chunk, ...]
    head: bytes
    tail: bytes
    size: int

    @property
    def head_bytes(self) -> int:
        return len(self.head) + 8 * len(self.chunks) + len(self.tail)

    def header(self, crcs: Sequence[int]) -> bytes:
        return join_header(self.head, crcs, self.tail)


def plan_pack(plan: Plan, pack: int) -> PackPlan:
    """Returns one of this process's packs, made once a plan."""
    key = f"pack {pack}"
    if key not in plan.cache:
        plan.cache[key] = _plan_pack(plan, plan.own[pack])
    found: PackPlan = plan.cache[key]
    return found


def _plan_pack(plan: Plan, chunks: tuple[Chunk, ...]) -> PackPlan:
    entries = []
    for chunk in chunks:
        dtype = dtype_named(plan.leaves[chunk.leaf].dtype)
        assert dtype is not None
        entries.append((chunk.name, *stored_as(dtype, chunk.shape), chunk.nbytes))
    head, tail = header_around(entries)
    return PackPlan(chunks, head, tail, len(head) + 8 * len(chunks) + len(tail) + sum(chunk.nbytes for chunk in chunks))


def header_around(entries: Sequence[tuple[str, str, Sequence[int], int]]) -> tuple[bytes, bytes]:
    """Returns what stands before and after the checksums, for chunks (name, dtype, shape, bytes) in data order; the length is in it."""
    texts, offset = [], 0
    for name, tag, shape, nbytes in entries:
        texts.append(f',{json.dumps(name)}:{{"dtype":"{tag}","shape":{json.dumps(shape)},"data_offsets":[{offset},{offset + nbytes}]}}')
        offset += nbytes
    head = b'{"__metadata__":{"crc32c":"'
    tail = ('"}' + "".join(texts) + "}").encode()
    length = len(head) + 8 * len(entries) + len(tail)
    padding = -(8 + length) % ALIGN_BYTES
    return (length + padding).to_bytes(8, "little") + head, tail + b" " * padding


def join_header(head: bytes, crcs: Iterable[int], tail: bytes) -> bytes:
    """Returns a pack's first bytes: its length and its header."""
    return b"".join((head, *(b"%08x" % crc for crc in crcs), tail))


def pack_parts(pack: PackPlan, shards: list[Any], crcs: list[int]) -> Iterator[Part]:
    """Yields the file's parts, each checksummed just before; appends the chunks' CRCs to `crcs`; the header comes last.

    A chunk's shard is dropped from `shards` once it is written.
    """
    offset, batch, held = pack.head_bytes, [], 0
    for index, chunk in enumerate(pack.chunks):
        data = chunk_bytes(shards[index], chunk)
        shards[index] = None
        if data.nbytes < PIECE_BYTES:
            crcs.append(crc32c(data))
            batch.append(data)
            held += data.nbytes
            if held < PIECE_BYTES and len(batch) < BATCH_BUFFERS:
                continue
        if batch:
            yield offset, batch
            offset, batch, held = offset + held, [], 0
        if data.nbytes >= PIECE_BYTES:
            crc = 0
            for start in range(0, data.nbytes, PIECE_BYTES):
                piece = data[start : start + PIECE_BYTES]
                crc = crc32c(piece, crc)
                yield offset + start, [piece]
            crcs.append(crc)
            offset += data.nbytes
    if batch:
        yield offset, batch
    yield 0, [memoryview(pack.header(crcs))]


def chunk_bytes(shard: Any, chunk: Chunk) -> memoryview:
    """Returns the bytes of a chunk of a numpy array or Shard, in C order; a view unless the array is laid out otherwise."""
    array: Any = shard if isinstance(shard, np.ndarray) else shard.get()
    part: Any = array if chunk.inside is None else array[chunk.inside]
    data: Any = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
    return memoryview(data)


class Stored(NamedTuple):
    """One chunk as a pack's header tells it; `start` counts from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int
    crc: int


def parse_header(data: bytes, size: int, path: str) -> dict[str, Stored]:
    """Returns the chunks of a pack by name, from its first bytes (length and header) and its size.

    Raises Corrupt where it is not a pack of ours and HostileCheckpoint where its offsets point outside, overlap or leave holes.
    """
    try:
        header = json.loads(data[8:])
        crcs = header.pop("__metadata__")["crc32c"]
        entries = sorted((*entry["data_offsets"], name, entry["dtype"], tuple(entry["shape"])) for name, entry in header.items())
        found = {}
        at = 0
        for index, (start, stop, name, dtype, shape) in enumerate(entries):
            if type(start) is not int or type(stop) is not int or start != at or stop < start:
                raise HostileCheckpoint(f"{path}: chunk {name!r} lies at {start}:{stop}, where {at} was expected", path=path, file=path)
            at = stop
            found[name] = Stored(str(dtype), shape, len(data) + start, stop - start, int(crcs[8 * index : 8 * index + 8], 16))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise Corrupt(f"{path}: the header of this pack cannot be read: {error!r}", path=path, file=path) from error
    if len(data) + at != size or len(crcs) != 8 * len(found):
        raise HostileCheckpoint(f"{path}: the header tells of {len(data) + at} bytes, the file has {size}", path=path, file=path)
    return found


__all__ = [
    "ALIGN_BYTES",
    "HEADER_LIMIT_BYTES",
    "PackPlan",
    "Stored",
    "chunk_bytes",
    "header_around",
    "join_header",
    "pack_parts",
    "parse_header",
    "plan_pack",
]
