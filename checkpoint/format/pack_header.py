"""The header of a pack: written around checksums that are known last, and parsed with every bound checked."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..errors import Corrupt, HostileCheckpoint

ALIGN_BYTES = 64
HEADER_BYTES = 16 << 20  # left for the header where a store bounds its files: more than a file of that size needs
HEADER_LIMIT_BYTES = 100_000_000  # as in the safetensors library


def header_around(entries: Sequence[tuple[str, str, Sequence[int], int]]) -> tuple[bytes, bytes]:
    """Returns what stands before and after the checksums, for chunks (name, dtype, shape, bytes) in data order; the length is in it."""
    texts, offset = [], 0
    for name, dtype, shape, nbytes in entries:
        texts.append(f',{json.dumps(name)}:{{"dtype":"{dtype}","shape":{json.dumps(shape)},"data_offsets":[{offset},{offset + nbytes}]}}')
        offset += nbytes
    head = b'{"__metadata__":{"crc32c":"'
    tail = ('"}' + "".join(texts) + "}").encode()
    length = len(head) + 8 * len(entries) + len(tail)
    padding = -(8 + length) % ALIGN_BYTES
    return (length + padding).to_bytes(8, "little") + head, tail + b" " * padding


def join_header(head: bytes, crcs: Iterable[int], tail: bytes) -> bytes:
    """Returns a pack's first bytes: its length and its header."""
    return b"".join((head, *(b"%08x" % crc for crc in crcs), tail))


class ChunkEntry(NamedTuple):
    """One chunk as a pack's header describes it; `start` counts from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int
    crc: int


def parse_header(data: bytes, size: int, path: str) -> dict[str, ChunkEntry]:
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
            found[name] = ChunkEntry(str(dtype), shape, len(data) + start, stop - start, int(crcs[8 * index : 8 * index + 8], 16))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise Corrupt(f"{path}: the header of this pack cannot be read: {error!r}", path=path, file=path) from error
    if len(data) + at != size or len(crcs) != 8 * len(found):
        raise HostileCheckpoint(f"{path}: the header describes {len(data) + at} bytes, the file has {size}", path=path, file=path)
    return found
