"""The header of a pack: it is written around checksums, and parsed with every bound checked.

Of a large chunk the header also has checksums of its prefixes, which end at each multiple of
PREFIX_BYTES. A CRC can be continued, so the CRCs of two prefixes check the bytes between them:
to read some rows of a chunk, a reader reads their blocks and no others.
"""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from crc32c import crc32c

from ..errors import Corrupt, HostileCheckpoint
from .grid import Shape
from .limits import MALFORMED

ALIGN_BYTES = 64
# left for the header where a store bounds its files: more than a file of that size needs
HEADER_BYTES = 16 << 20
PREFIX_BYTES = 256 << 10
LARGE_BYTES = 1 << 20  # chunks from here on have checksums of prefixes: smaller ones are read whole
_START = b'{"__metadata__":{"crc32c":"'


class ChunkChecksum(NamedTuple):
    """The CRC32C of a chunk, and those of its prefixes of 1, 2, ... times PREFIX_BYTES.

    A chunk below LARGE_BYTES has no checksums of prefixes.
    """

    crc: int
    prefixes: tuple[int, ...] = ()


def count_prefixes(nbytes: int) -> int:
    """Returns how many prefixes of a chunk have a checksum of their own."""
    return (nbytes - 1) // PREFIX_BYTES if nbytes >= LARGE_BYTES else 0


class RunningChecksum:
    """Sums a chunk of at least LARGE_BYTES, and its prefixes. For one thread."""

    def __init__(self) -> None:
        self._crcs = [0]
        self._nbytes = 0

    def add(self, piece: memoryview) -> None:
        """Adds the bytes that come next: a multiple of PREFIX_BYTES, unless they are the last."""
        self._nbytes += piece.nbytes
        for begin in range(0, piece.nbytes, PREFIX_BYTES):
            self._crcs.append(crc32c(piece[begin : begin + PREFIX_BYTES], self._crcs[-1]))

    def result(self) -> ChunkChecksum:
        """Returns the checksum of all that was added."""
        prefixes = tuple(self._crcs[1 : 1 + count_prefixes(self._nbytes)])
        return ChunkChecksum(self._crcs[-1], prefixes)


class HeaderFrame(NamedTuple):
    """A pack's first bytes without the checksums; `nbytes` counts the checksums too."""

    start: bytes
    end: bytes
    nbytes: int

    @classmethod
    def around(cls, entries: Sequence[tuple[str, str, Sequence[int], int]]) -> HeaderFrame:
        """Returns the frame, with the header's length, for chunks in data order.

        `entries` are (name, dtype, shape, bytes).
        """
        texts = []
        begin = 0
        num_prefixes = 0
        for name, dtype, shape, nbytes in entries:
            end = begin + nbytes
            texts.append(
                f',{json.dumps(name)}:{{"dtype":"{dtype}","shape":{json.dumps(shape)},'
                f'"data_offsets":[{begin},{end}]}}'
            )
            begin = end
            num_prefixes += count_prefixes(nbytes)
        rest = ('"}' + "".join(texts) + "}").encode()
        checksums = _checksum_text([0] * len(entries), bytes(4 * num_prefixes))
        length = len(_START) + len(checksums) + len(rest)
        padding = -(8 + length) % ALIGN_BYTES
        length += padding
        return cls(length.to_bytes(8, "little") + _START, rest + b" " * padding, 8 + length)

    def join(self, checksums: Sequence[ChunkChecksum]) -> bytes:
        """Returns a pack's first bytes: its length and its header."""
        crcs = [checksum.crc for checksum in checksums]
        prefixes = [crc for checksum in checksums for crc in checksum.prefixes]
        text = _checksum_text(crcs, np.array(prefixes, "<u4").tobytes())
        return self.start + text + self.end


def _checksum_text(crcs: Sequence[int], prefixes: bytes) -> bytes:
    text = b"".join(b"%08x" % crc for crc in crcs)
    if prefixes:
        text += b'","crc32c_prefixes":"' + base64.b64encode(prefixes)
    return text


class ChunkEntry(NamedTuple):
    """One chunk as a pack's header describes it; `start` counts from the beginning of the file."""

    dtype: str
    shape: Shape
    start: int
    nbytes: int
    checksum: ChunkChecksum

    def crc_until(self, stop: int) -> int | None:
        """Returns the CRC32C of the chunk's first `stop` bytes; None if the header lacks it."""
        if not stop:
            return 0
        if stop == self.nbytes:
            return self.checksum.crc
        prefix, rest = divmod(stop, PREFIX_BYTES)
        if rest or not self.checksum.prefixes:
            return None
        return self.checksum.prefixes[prefix - 1]


def parse_header(data: bytes, size: int, path: str) -> dict[str, ChunkEntry]:
    """Returns the chunks of a pack by name, from its first bytes (length and header) and its size.

    Packs without checksums of prefixes are read too. Raises Corrupt where it is not a pack of ours
    and HostileCheckpoint where its offsets point outside, overlap or leave holes.
    """
    try:
        header = json.loads(data[8:])
        metadata = header.pop("__metadata__")
        return _parse_chunks(metadata, header, len(data), size, path)
    except MALFORMED as error:
        raise Corrupt.at(path, f"the header of this pack cannot be read: {error!r}") from error


def _parse_chunks(
    metadata: Any, entries: Any, head_bytes: int, size: int, path: str
) -> dict[str, ChunkEntry]:
    places = sorted((*entry["data_offsets"], name) for name, entry in entries.items())
    end = head_bytes + _check_places(places, path)
    checksums = _parse_checksums(metadata, [stop - start for start, stop, _ in places], path)
    chunks = {}
    for (start, stop, name), checksum in zip(places, checksums, strict=True):
        entry = entries[name]
        chunks[name] = ChunkEntry(
            str(entry["dtype"]),
            tuple(entry["shape"]),
            head_bytes + start,
            stop - start,
            checksum,
        )
    if end != size or len(metadata["crc32c"]) != 8 * len(chunks):
        raise HostileCheckpoint.at(path, f"the header describes {end} bytes, the file has {size}")
    return chunks


def _check_places(places: Sequence[tuple[Any, Any, str]], path: str) -> int:
    """Returns where the last chunk ends. Raises HostileCheckpoint where chunks are not in a row."""
    end = 0
    for start, stop, name in places:
        if type(start) is not int or type(stop) is not int or start != end or stop < start:
            raise HostileCheckpoint.at(
                path, f"chunk {name!r} lies at {start}:{stop}, where {end} was expected"
            )
        end = stop
    return end


def _parse_checksums(metadata: Any, sizes: Sequence[int], path: str) -> list[ChunkChecksum]:
    """Returns the checksums of chunks of these sizes, in order."""
    text = metadata["crc32c"]
    crcs = [int(text[8 * index : 8 * index + 8], 16) for index in range(len(sizes))]
    encoded = metadata.get("crc32c_prefixes")
    if encoded is None:
        return [ChunkChecksum(crc) for crc in crcs]
    prefixes = np.frombuffer(base64.b64decode(encoded, validate=True), "<u4").tolist()
    counts = [count_prefixes(nbytes) for nbytes in sizes]
    if sum(counts) != len(prefixes):
        raise HostileCheckpoint.at(
            path,
            f"the header has checksums of {len(prefixes)} prefixes, its chunks have {sum(counts)}",
        )
    rest = iter(prefixes)
    return [
        ChunkChecksum(crc, tuple(itertools.islice(rest, count)))
        for crc, count in zip(crcs, counts, strict=True)
    ]
