"""The header of a pack: written around checksums that are known last, and parsed with every bound
checked.

Of a large chunk the header has checksums of its beginnings too, the prefixes that end at each
multiple of PREFIX_BYTES. A CRC goes on from where it was, so two of these check what lies between
them: whoever needs some rows of a chunk reads these blocks and no others.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..errors import Corrupt, HostileCheckpoint

ALIGN_BYTES = 64
HEADER_BYTES = (
    16 << 20
)  # left for the header where a store bounds its files: more than a file of that size needs
PREFIX_BYTES = 256 << 10
LARGE_BYTES = 1 << 20  # chunks from here on have checksums of prefixes: smaller ones are read whole


class ChunkChecksum(NamedTuple):
    """The CRC32C of a chunk, and those of its prefixes of 1, 2, ... times PREFIX_BYTES (none for a
    chunk below LARGE_BYTES).
    """

    crc: int
    prefixes: tuple[int, ...] = ()


def count_prefixes(nbytes: int) -> int:
    """Returns how many prefixes of a chunk have a checksum of their own."""
    return (nbytes - 1) // PREFIX_BYTES if nbytes >= LARGE_BYTES else 0


class HeaderFrame(NamedTuple):
    """A pack's first bytes but for the checksums: `nbytes` is their number with the checksums."""

    start: bytes
    end: bytes
    nbytes: int

    @classmethod
    def around(cls, entries: Sequence[tuple[str, str, Sequence[int], int]]) -> HeaderFrame:
        """Returns the frame for chunks (name, dtype, shape, bytes) in data order; the header's
        length is in it.
        """
        texts = []
        offset = 0
        for name, dtype, shape, nbytes in entries:
            begin = offset
            offset = offset + nbytes
            texts.append(
                f',{json.dumps(name)}:{{"dtype":"{dtype}","shape":{json.dumps(shape)},"data_offsets":[{begin},{offset}]}}'
            )
        start, end = b'{"__metadata__":{"crc32c":"', ('"}' + "".join(texts) + "}").encode()
        num_prefixes = sum(count_prefixes(nbytes) for *_, nbytes in entries)
        length = (
            len(start) + len(_checksum_text([0] * len(entries), bytes(4 * num_prefixes))) + len(end)
        )
        padding = -(8 + length) % ALIGN_BYTES
        return cls(
            (length + padding).to_bytes(8, "little") + start,
            end + b" " * padding,
            8 + length + padding,
        )

    def join(self, checksums: Sequence[ChunkChecksum]) -> bytes:
        """Returns a pack's first bytes: its length and its header."""
        prefixes = np.array(
            [crc for checksum in checksums for crc in checksum.prefixes], "<u4"
        ).tobytes()
        return b"".join(
            (
                self.start,
                _checksum_text([checksum.crc for checksum in checksums], prefixes),
                self.end,
            )
        )


def _checksum_text(crcs: Sequence[int], prefixes: bytes) -> bytes:
    whole = b"".join(b"%08x" % crc for crc in crcs)
    return whole + b'","crc32c_prefixes":"' + base64.b64encode(prefixes) if prefixes else whole


class ChunkEntry(NamedTuple):
    """One chunk as a pack's header describes it; `start` counts from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int
    checksum: ChunkChecksum

    def crc_until(self, stop: int) -> int | None:
        """Returns the CRC32C of the chunk's first `stop` bytes, or None where the header does not
        have it.
        """
        if stop in (0, self.nbytes):
            return self.checksum.crc if stop else 0
        prefix, rest = divmod(stop, PREFIX_BYTES)
        return self.checksum.prefixes[prefix - 1] if not rest and self.checksum.prefixes else None


def parse_header(data: bytes, size: int, path: str) -> dict[str, ChunkEntry]:
    """Returns the chunks of a pack by name, from its first bytes (length and header) and its size.

    Packs without checksums of prefixes are read too. Raises Corrupt where it is not a pack of ours
    and HostileCheckpoint where its offsets point outside, overlap or leave holes.
    """
    try:
        header = json.loads(data[8:])
        metadata = header.pop("__metadata__")
        crcs, prefixes = metadata["crc32c"], _parse_prefixes(metadata.get("crc32c_prefixes"))
        entries = sorted(
            (*entry["data_offsets"], name, entry["dtype"], tuple(entry["shape"]))
            for name, entry in header.items()
        )
        found = {}
        at = taken = 0
        for index, (start, stop, name, dtype, shape) in enumerate(entries):
            if type(start) is not int or type(stop) is not int or start != at or stop < start:
                raise HostileCheckpoint(
                    f"{path}: chunk {name!r} lies at {start}:{stop}, where {at} was expected",
                    path=path,
                    file=path,
                )
            count = 0 if prefixes is None else count_prefixes(stop - start)
            checksum = ChunkChecksum(
                int(crcs[8 * index : 8 * index + 8], 16),
                tuple(prefixes[taken : taken + count]) if prefixes else (),
            )
            found[name] = ChunkEntry(str(dtype), shape, len(data) + start, stop - start, checksum)
            at = stop
            taken = taken + count
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise Corrupt(
            f"{path}: the header of this pack cannot be read: {error!r}", path=path, file=path
        ) from error
    if len(data) + at != size or len(crcs) != 8 * len(found):
        raise HostileCheckpoint(
            f"{path}: the header describes {len(data) + at} bytes, the file has {size}",
            path=path,
            file=path,
        )
    if prefixes is not None and taken != len(prefixes):
        message = (
            f"{path}: the header has checksums of {len(prefixes)} prefixes, its chunks have {taken}"
        )
        raise HostileCheckpoint(message, path=path, file=path)
    return found


def _parse_prefixes(text: str | None) -> list[int] | None:
    return (
        None
        if text is None
        else np.frombuffer(base64.b64decode(text, validate=True), "<u4").tolist()
    )
