"""What is fuzzed: each target takes bytes, and raises where the product answers them with anything
but a value or a typed error.
"""

from __future__ import annotations

import base64
import contextlib
import json
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from holdfast.checkpoint import CheckpointError, CheckpointManager, Json, load, save, structure
from holdfast.checkpoint.format.json_state import decode, encode
from holdfast.checkpoint.format.pack_header import parse_header
from holdfast.checkpoint.storage.tombstone import body_of, sealed

from . import coordinator, session


@dataclass(frozen=True)
class Target:
    """`run` takes bytes; `seeds` makes texts of JSON that are well."""

    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]


@contextlib.contextmanager
def _typed() -> Iterator[None]:
    """Takes typed errors, whose text has to be sayable. All else is a finding."""
    try:
        yield
    except CheckpointError as error:
        str(error).encode()


def _record(data: bytes) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        Path(folder, "checkpoint.json").write_bytes(sealed(data))
        with _typed():
            structure(folder)
        with _typed():
            load(folder)


@cache
def _saved() -> dict[str, bytes]:
    """Returns the files of a root with two small steps, by name."""
    with tempfile.TemporaryDirectory() as folder:
        with CheckpointManager(folder) as manager:
            tree = {"w": jnp.arange(6.0).reshape(2, 3), "n": [3, "text", None, np.int8(1)]}
            items = {"state": tree, "data": Json({"at": [1, 2.5]})}
            manager.save(1, items=items, metrics={"loss": 0.5})
            manager.save(2, {"empty": jnp.zeros((0, 3)), "b": jnp.ones(70_000, jnp.bfloat16)})
        return _files_in(Path(folder))


def _files_in(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


def _records() -> list[bytes]:
    return [body_of(data) for name, data in _saved().items() if name.endswith("checkpoint.json")]


def _header(data: bytes) -> None:
    with _typed():
        size = 8 + len(data) + 24
        for entry in parse_header(struct.pack("<Q", len(data)) + data, size, "pack").values():
            entry.crc_until(entry.nbytes // 2)


def _headers() -> list[bytes]:
    packs = [data for name, data in _saved().items() if name.endswith(".safetensors")]
    return [data[8 : 8 + int.from_bytes(data[:8], "little")] for data in packs]


def _safetensors(data: bytes) -> None:
    with _typed(), tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        Path(folder, "model.safetensors").write_bytes(
            struct.pack("<Q", len(data)) + data + bytes(24)
        )
        structure(folder)
        load(folder)


def _safetensors_headers() -> list[bytes]:
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b": {"dtype": "BF16", "shape": [], "data_offsets": [16, 18]},
        "c": {"dtype": "F4", "shape": [3, 2], "data_offsets": [18, 21]},
    }
    return [json.dumps(header).encode(), b'{"x":{"dtype":"U8","shape":[24],"data_offsets":[0,24]}}']


@cache
def _orbax_files() -> dict[str, bytes]:
    """Returns the files of a checkpoint in Orbax's layout, by name."""
    tree = {"w": jnp.ones((2, 3)), "key": jax.random.key(3), "n": [3, "text", None, {}]}
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder, "to"), tree, layout="orbax")
        return _files_in(Path(folder, "to"))


def _orbax(data: bytes) -> None:
    """Reads that checkpoint, with other texts in it."""
    try:
        texts = json.loads(data)
        changed = {name: json.dumps(texts[name]).encode() for name in texts}
    except (ValueError, TypeError, RecursionError):
        changed = {"default/_METADATA": data}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for name, content in (_orbax_files() | changed).items():
            if name in _orbax_files():
                file = Path(folder, name)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
        with _typed():
            structure(folder)
        with _typed():
            load(folder)


def _orbax_texts() -> list[bytes]:
    texts = {name: json.loads(data) for name, data in _orbax_files().items() if data[:1] in b"{["}
    return [json.dumps(texts).encode()]


def _iterator(data: bytes) -> None:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return
    with _typed():
        decode(value)


def _iterator_states() -> list[bytes]:
    states: list[Any] = [
        {"epoch": 3, "rng": np.random.default_rng(0).bit_generator.state},
        [np.arange(3), np.float32(2), b"bytes", (1, 2), {1: 2}, float("nan"), jnp.ones(2)],
        {"big": 1 << 200, "array": np.zeros(1, [("x", "<f4"), ("y", "<i8", (2,))])},
    ]
    return [json.dumps(encode(state, "state")).encode() for state in states]


TARGETS = {
    "coordinator": Target(coordinator.run, coordinator.seeds),
    "session": Target(session.run, session.seeds),
    "record": Target(_record, _records),
    "pack_header": Target(_header, _headers),
    "safetensors_header": Target(_safetensors, _safetensors_headers),
    "orbax_metadata": Target(_orbax, _orbax_texts),
    "iterator_state": Target(_iterator, _iterator_states),
}


def known(target: str) -> list[bytes]:
    """Returns the seeds of a target and what is in its corpus, in its order."""
    corpus = _corpus(target)
    lines = corpus.read_text().split() if corpus.exists() else []
    return [*TARGETS[target].seeds(), *map(base64.b64decode, lines)]


def add(target: str, inputs: list[bytes]) -> None:
    """Adds inputs to the corpus of a target: a line each, base64."""
    fresh = sorted({*inputs} - {*known(target)})
    with _corpus(target).open("a") as file:
        file.writelines(base64.b64encode(data).decode() + "\n" for data in fresh)


def _corpus(target: str) -> Path:
    return Path(__file__).parent / "corpus" / f"{target}.txt"
