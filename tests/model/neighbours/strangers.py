"""What other tools leave in a folder: each stranger writes itself under a name."""

from __future__ import annotations

import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import flax.serialization
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp1
from safetensors.numpy import save_file

from holdfast.checkpoint import CheckpointManager, save

# The value of a step is its number, so that one that is taken for another is seen.
STRANGE = 7777.0


def tree_of(value: float) -> dict[str, jnp.ndarray]:
    """Returns the tree that every step of a root has."""
    return {"w": jnp.full(4, value, jnp.float32)}


@dataclass(frozen=True)
class Stranger:
    """What a tool writes: `put` takes the path.

    It is a file, or a folder in the `layout` of a checkpoint. A `whole` one lies in a folder
    itself, under names of its own.
    """

    put: Callable[[Path], object]
    layout: str = ""
    whole: bool = False


@functools.cache
def made_by_tools() -> Path:
    """Returns a folder with one checkpoint of each tool, written by it, once a process."""
    folder = Path(tempfile.mkdtemp(prefix="strangers-"))
    tree = tree_of(STRANGE)
    with ocp.CheckpointManager(folder / "orbax manager") as manager:
        manager.save(1, args=ocp.args.StandardSave(tree))
    ocp1.save(folder / "orbax v1", tree)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "orbax direct", tree)
    shutil.copytree(folder / "orbax manager/1/default", folder / "orbax item")
    save(folder / "orbax by holdfast", tree, layout="orbax")
    save(folder / "single", tree)
    with CheckpointManager(folder / "other root") as ours:
        ours.save(1, tree)
        ours.save(2, tree)
    shutil.copytree(folder / "other root/2", folder / "packs alone")
    (folder / "packs alone/checkpoint.json").unlink()
    for name, shards in (("hugging face", 1), ("hugging face shards", 2)):
        (folder / name).mkdir()
        files = [f"model-{each}.safetensors" for each in range(shards)]
        for each, file in enumerate(files):
            save_file({f"w{each}": np.full(4, STRANGE, np.float32)}, folder / name / file)
        (folder / name / "config.json").write_text('{"model_type": "x"}')
        if shards > 1:
            index = {"weight_map": {f"w{each}": file for each, file in enumerate(files)}}
            text = json.dumps(index)
            (folder / name / "model.safetensors.index.json").write_text(text)
    return folder


def _tool(name: str) -> Callable[[Path], object]:
    """Returns what puts a tool's checkpoint under a path, into what is there already too."""

    def put(path: Path) -> None:
        made = made_by_tools() / ("orbax manager/1" if name == "orbax v0" else name)
        shutil.copytree(made, path, dirs_exist_ok=True, symlinks=True)

    return put


def _file(data: bytes | str) -> Callable[[Path], object]:
    text = data.encode() if isinstance(data, str) else data
    return lambda path: path.write_bytes(text)


def _folder(files: Mapping[str, bytes | str]) -> Callable[[Path], object]:
    def put(path: Path) -> None:
        for name, data in files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            _file(data)(path / name)

    return put


def _link(to: str) -> Callable[[Path], object]:
    return lambda path: path.symlink_to(to)


def _half_an_orbax(path: Path) -> None:
    """Puts a copy that has the arrays, and not yet what says which they are."""
    _tool("orbax v0")(path)
    for name in ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt"):
        for file in list(path.rglob(name)):
            file.unlink()


def _whole(name: str) -> Callable[[Path], object]:
    """Returns what puts a tool's files into the folder where a path would be."""
    return lambda path: _tool(name)(path.parent)


def _whole_file(name: str, data: bytes | str) -> Callable[[Path], object]:
    return lambda path: _file(data)(path.parent / name)


_MSGPACK = flax.serialization.msgpack_serialize({"w": np.full(4, STRANGE, np.float32)})
_HALF = b"\x10\x00\x00\x00\x00\x00\x00\x00{"

STRANGERS: Mapping[str, Stranger] = {
    "orbax v0": Stranger(_tool("orbax v0"), "orbax"),
    "orbax v1": Stranger(_tool("orbax v1"), "orbax"),
    "orbax direct": Stranger(_tool("orbax direct"), "orbax"),
    "orbax by holdfast": Stranger(_tool("orbax by holdfast"), "orbax"),
    "half an orbax": Stranger(_half_an_orbax),
    "orbax item": Stranger(_tool("orbax item"), "orbax"),
    "orbax manager": Stranger(_tool("orbax manager")),
    "single": Stranger(_tool("single"), "holdfast"),
    "other root": Stranger(_tool("other root")),
    "packs alone": Stranger(_tool("packs alone"), "packs"),
    "hugging face": Stranger(_tool("hugging face"), "safetensors"),
    "hugging face shards": Stranger(_tool("hugging face shards"), "safetensors"),
    "flax msgpack": Stranger(_file(_MSGPACK)),
    "keras folder": Stranger(_folder({"model.weights.h5": b"\x89HDF\r\n", "config.json": "{}"})),
    "dcp": Stranger(_folder({".metadata": b"\x80\x04.", "__0_0.distcp": b"PK"})),
    "tensorboard": Stranger(_folder({"events.out.tfevents.1.host.1.0": b"\x18"})),
    "wandb": Stranger(_folder({"run-20240101_1-x/files/config.yaml": "a: 1", "debug.log": "x"})),
    "a folder of files": Stranger(_folder({"notes.txt": "mine", "state/notes.txt": "mine"})),
    "a file": Stranger(_file("mine")),
    "a link to a step": Stranger(_link("2"), "link"),
    "a link to nothing": Stranger(_link("gone"), "link"),
    # In the folder itself, under these names.
    "a model": Stranger(_whole("hugging face"), "safetensors", whole=True),
    "an orbax": Stranger(_whole("orbax direct"), "orbax", whole=True),
    "half a model": Stranger(_whole_file("half.safetensors", _HALF), whole=True),
    "a keras model": Stranger(_whole_file("model.keras", b"PK\x03"), whole=True),
    "a pickle": Stranger(_whole_file("pytorch_model.bin", b"PK"), whole=True),
    "a finder": Stranger(_whole_file(".DS_Store", b"\0\0\0\1"), whole=True),
    "an editor": Stranger(_whole_file(".2.swp", "x"), whole=True),
    "tensorflow": Stranger(_whole_file("checkpoint", "m: 'x'"), whole=True),
    "half a record": Stranger(_whole_file("checkpoint.json", '{"format":"hol'), whole=True),
    "a trainer's record": Stranger(_whole_file("checkpoint.json", '{"step": 3}'), whole=True),
}
NAMES = (
    "2024", "0", "4", "9", "2", "03", "0002", "checkpoint_9", "checkpoint_2", "ckpt_0009",
    "ckpt_9", "export_2024", "export_7", "checkpoint-500", "step-9", "9.partial", "4 (copy)",
    "4.orbax-checkpoint-tmp-17", "checkpoint_9.orbax-checkpoint-tmp", ".9", "9~", "#9#", "-9",
    "+9", " 9", "9 ", "1e3", "9.0", "٣", "²", "9" * 25, "x" * 200, "a\nb_9", os.fsdecode(b"\xff9"),
    "latest", "best", "export", "state", "model", "old",
)  # fmt: skip
