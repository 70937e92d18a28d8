"""The checksum of a large chunk, whose bytes come piece by piece."""

from __future__ import annotations

from crc32c import crc32c

from ..format.pack_header import PREFIX_BYTES, ChunkChecksum, count_prefixes


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
