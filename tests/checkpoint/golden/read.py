"""Reads a checkpoint as the first version of holdfast/1 did, headers and checksums. What is written
today has to pass. It stays.
"""

from __future__ import annotations

import json
from pathlib import Path

from crc32c import crc32c


def parse_header(data: bytes, size: int) -> dict[str, tuple[str, tuple[int, ...], int, int, int]]:
    """Returns {name: (dtype, shape, start, bytes, crc)} of a pack from its first bytes and its
    size.
    """
    header = json.loads(data[8:])
    crcs = header.pop("__metadata__")["crc32c"]
    entries = sorted(
        (*entry["data_offsets"], name, entry["dtype"], tuple(entry["shape"]))
        for name, entry in header.items()
    )
    found = {}
    at = 0
    for index, (start, stop, name, dtype, shape) in enumerate(entries):
        assert type(start) is int and type(stop) is int and start == at and stop >= start
        at = stop
        found[name] = (
            str(dtype),
            shape,
            len(data) + start,
            stop - start,
            int(crcs[8 * index : 8 * index + 8], 16),
        )
    assert len(data) + at == size and len(crcs) == 8 * len(found)
    return found


def read_chunks(folder: Path, item: str) -> dict[str, bytes]:
    """Returns the bytes of every chunk of an item, each checked as far as the format goes."""
    data = (folder / "checkpoint.json").read_bytes()
    body = data[: data.rindex(b',"crc32c":"')]
    crc = json.loads(data)["crc32c"]
    assert data == body + b',"crc32c":"%08x"}\n' % crc32c(body) and int(crc, 16) == crc32c(body)
    chunks = {}
    for name, size, head, crc in json.loads(data)["items"][item]["files"]:
        pack = (folder / name).read_bytes()
        assert (
            len(pack) == size
            and crc32c(pack[:head]) == crc
            and int.from_bytes(pack[:8], "little") == head - 8
        )
        for chunk, (_, _, start, nbytes, expected) in parse_header(pack[:head], size).items():
            chunks[chunk] = pack[start : start + nbytes]
            assert crc32c(chunks[chunk]) == expected
    return chunks


def read_marks(root: Path) -> dict[int, str]:
    """Returns the steps of a root that were left behind, with the ids of their saves."""
    found = {}
    for path in sorted((root / ".holdfast/left").glob("*.json")):
        data = path.read_bytes()
        body = data[: data.rindex(b',"crc32c":"')]
        assert data == body + b',"crc32c":"%08x"}\n' % crc32c(body)
        found |= {int(step): save for step, save in json.loads(data)["steps"].items()}
    return found
