"""The floor: bare I/O of the same bytes, without checksum, record, tree or agreement.

Four files written side by side in pieces of 1 MiB, write-back started early, fsync of files and
folder; read back by positional reads of 16 MiB on four threads into 64-aligned memory, and put on
the devices. `versus_orbax.py` runs it between the others; alone it prints two figures:

    python benchmarks/floor.py FOLDER [MEBIBYTES]
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

FILES = 4
PIECE_BYTES = 1 << 20
RANGE_BYTES = 16 << 20
_libc = ctypes.CDLL(None)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def write(folder: Path, arrays: Sequence[Any]) -> None:
    """Writes flat views of bytes, dealt to the files in turn; durable on return."""
    folder.mkdir(parents=True)
    with ThreadPoolExecutor(FILES) as pool:
        list(
            pool.map(
                lambda number: _write_file(folder / str(number), arrays[number::FILES]),
                range(FILES),
            )
        )
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def _write_file(path: Path, arrays: Sequence[Any]) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    at = 0
    for array in arrays:
        data = memoryview(array)
        for start in range(0, len(data), PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES]
            os.pwrite(file, piece, at)
            _libc.sync_file_range(file, at, len(piece), 2)
            at += len(piece)
    os.fsync(file)
    os.close(file)


def read(folder: Path, sizes: Sequence[int], memory: Sequence[Any]) -> None:
    """Fills memory, one block an array, from the files that `write` wrote."""
    jobs = []
    for number in range(FILES):
        at = 0
        for size, block in zip(sizes[number::FILES], memory[number::FILES], strict=True):
            jobs += [
                (number, at + start, block[start : start + RANGE_BYTES])
                for start in range(0, size, RANGE_BYTES)
            ]
            at += size
    files = [os.open(folder / str(number), os.O_RDONLY) for number in range(FILES)]
    with ThreadPoolExecutor(FILES) as pool:
        list(pool.map(lambda job: os.preadv(files[job[0]], [job[2]], job[1]), jobs))
    for file in files:
        os.close(file)


def aligned(size: int) -> Any:
    """Returns 64-aligned bytes."""
    memory = np.empty(size + 64, np.uint8)
    lead = -memory.ctypes.data % 64
    return memory[lead : lead + size]


def main() -> None:
    folder = Path(sys.argv[1]) / "floor"
    size = int(sys.argv[2] if len(sys.argv) > 2 else 1024) << 20
    arrays = [
        np.random.default_rng(i).integers(0, 256, 4 << 20, np.uint8) for i in range(size >> 22)
    ]
    began = time.perf_counter()
    write(folder, arrays)
    written = time.perf_counter()
    memory = [aligned(4 << 20) for _ in arrays]
    read(folder, [4 << 20] * len(arrays), memory)
    ended = time.perf_counter()
    assert all((left == right).all() for left, right in zip(arrays, memory, strict=True))
    print(
        f"write {size / (written - began) / 1e9:.2f} GB/s, read"
        f" {size / (ended - written) / 1e9:.2f} GB/s"
    )
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


if __name__ == "__main__":
    main()
