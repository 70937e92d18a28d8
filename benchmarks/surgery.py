"""Turns a model of Hugging Face's into a scanned one and back, and measures memory and time.

    python benchmarks/surgery.py [--folder DIR] [--layers 37]

The model is one that would have been downloaded: bfloat16, attention and MLP of a Llama, in shards
of 1 GB with an index, about 4 GB with 37 layers. On the way there heads are split off, kernels
transposed, gate and up fused, and all layers stacked; on the way back all of that is undone. Each
way runs in a process of its own, whose peak above that of an idle one is printed (VmHWM, which
counts mapped files too). The result is compared with the model byte by byte, without holdfast.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import ml_dtypes
import numpy as np

WIDTH = 2048
HEADS = 16
HIDDEN = 5632
WORDS = 32000
SHARD_BYTES = 1_000_000_000

KERNELS = {
    "self_attn.q_proj": (WIDTH, WIDTH),
    "self_attn.k_proj": (WIDTH, WIDTH),
    "self_attn.v_proj": (WIDTH, WIDTH),
    "self_attn.o_proj": (WIDTH, WIDTH),
    "mlp.gate_proj": (HIDDEN, WIDTH),
    "mlp.up_proj": (HIDDEN, WIDTH),
    "mlp.down_proj": (WIDTH, HIDDEN),
}


def shapes(layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the tensors of the model."""
    yield "model.embed_tokens.weight", (WORDS, WIDTH)
    for layer in range(layers):
        for name, shape in KERNELS.items():
            yield f"model.layers.{layer}.{name}.weight", shape
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{layer}.{name}.weight", (WIDTH,)
    yield "model.norm.weight", (WIDTH,)
    yield "lm_head.weight", (WORDS, WIDTH)


def make(folder: Path, layers: int) -> None:
    """Writes the model as Hugging Face lays it out, and config and tokenizer beside it."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    filled = 0
    for name, shape in shapes(layers):
        size = 2 * int(np.prod(shape))
        if filled + size > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append((name, shape))
        filled += size
    weight_map = {}
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, shape in tensors:
            start, end = end, end + 2 * int(np.prod(shape))
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
            weight_map[name] = file
        data = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(struct.pack("<Q", len(data)) + data)
            for _, shape in tensors:
                array = rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)
                out.write(array.view(np.uint8).data)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": layers}))
    (folder / "tokenizer.json").write_text(json.dumps({"words": WORDS}))


def rules_there() -> Any:
    from holdfast.checkpoint import Fuse, Reshape, Stack, Transpose

    layer = r"model\.layers\.(\d+)\."
    heads = (WIDTH, HEADS, WIDTH // HEADS)
    return [
        {
            layer + r"self_attn\.([qkv])_proj\.weight": [
                Transpose(),
                Reshape(heads),
                Stack(r"params.layers.attention.\2.kernel"),
            ],
            layer + r"self_attn\.o_proj\.weight": [
                Transpose(),
                Stack("params.layers.attention.out.kernel"),
            ],
            layer + r"mlp\.(gate|up)_proj\.weight": [
                Transpose(),
                Fuse(r"layers.\1.wi", ("gate", "up"), by=2, axis=1),
            ],
            layer + r"mlp\.down_proj\.weight": [Transpose(), Stack("params.layers.mlp.wo.kernel")],
            layer + r"(\w+norm)\.weight": Stack(r"params.layers.\2.scale"),
            r"model\.embed_tokens\.weight": "params.embed",
            r"model\.norm\.weight": "params.norm.scale",
            r"lm_head\.weight": [Transpose(), "params.head.kernel"],
        },
        {r"layers\.(\d+)\.wi": Stack("params.layers.mlp.wi.kernel")},
    ]


def rules_back() -> Any:
    from holdfast.checkpoint import Reshape, Split, Transpose, Unstack

    to = "model.layers.{index}."
    return [
        {
            r"params\.layers\.attention\.([qkv])\.kernel": [
                Unstack(to + r"self_attn.\1_proj.weight"),
                Reshape((WIDTH, WIDTH)),
                Transpose(),
            ],
            r"params\.layers\.attention\.out\.kernel": [
                Unstack(to + "self_attn.o_proj.weight"),
                Transpose(),
            ],
            r"params\.layers\.mlp\.wi\.kernel": Unstack("layers.{index}.wi"),
            r"params\.layers\.mlp\.wo\.kernel": [Unstack(to + "mlp.down_proj.weight"), Transpose()],
            r"params\.layers\.(\w+norm)\.scale": Unstack(to + r"\1.weight"),
            r"params\.embed": "model.embed_tokens.weight",
            r"params\.norm\.scale": "model.norm.weight",
            r"params\.head\.kernel": [Transpose(), "lm_head.weight"],
        },
        {
            r"layers\.(\d+)\.wi": [
                Split(r"model.layers.\1.mlp.{name}_proj.weight", ("gate", "up"), axis=1),
                Transpose(),
            ]
        },
    ]


def peak_mib() -> int:
    """Returns the most memory that was resident, mapped files included."""
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) >> 10


def one_way(source: str, target: str, way: str) -> None:
    """Converts, in this process, and prints seconds and MiB."""
    import jax

    from holdfast.checkpoint import convert

    jax.numpy.zeros(1).block_until_ready()
    rules = rules_there() if way == "holdfast" else rules_back()
    # The peak begins here: without, that of the process that forked this one counts.
    Path("/proc/self/clear_refs").write_text("5")
    idle = peak_mib()
    began = time.perf_counter()
    convert(source, target, way, rules=rules)
    seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "mib": peak_mib() - idle, "idle": idle}))


def run_one_way(source: Path, target: Path, way: str) -> None:
    command = [sys.executable, __file__, "--way", way, str(source), str(target)]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(ran.stdout)
    print(
        f"to {way}: {found['seconds']:.1f} s, {found['mib']} MiB above the"
        f" {found['idle']} of an idle process",
        flush=True,
    )


def tensors_of(folder: Path) -> Iterator[tuple[str, Path, int, dict[str, Any]]]:
    """Yields each tensor of a folder: its name, its file, where it begins, and its header."""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, facts in header.items():
            yield name, path, 8 + length, facts


def compare(one: Path, other: Path) -> tuple[int, int]:
    """Compares the bytes of all tensors; returns how many there are, and their bytes."""
    there = {name: (path, start, facts) for name, path, start, facts in tensors_of(other)}
    total = 0
    for name, path, start, facts in tensors_of(one):
        path_b, start_b, facts_b = there.pop(name)
        assert (facts["dtype"], facts["shape"]) == (facts_b["dtype"], facts_b["shape"]), name
        first, end = facts["data_offsets"]
        a = np.memmap(path, np.uint8, "r", start + first, (end - first,))
        first_b = facts_b["data_offsets"][0]
        b = np.memmap(path_b, np.uint8, "r", start_b + first_b, (end - first,))
        assert (a == b).all(), name
        total += end - first
    assert not there, sorted(there)
    return len(list(tensors_of(one))), total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default=None, help="where to write (default: a temporary one)")
    parser.add_argument("--layers", type=int, default=37)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("paths", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        one_way(*arguments.paths, arguments.way)
        return
    folder = Path(tempfile.mkdtemp(prefix="surgery-", dir=arguments.folder))
    try:
        make(folder / "hf", arguments.layers)
        run_one_way(folder / "hf", folder / "scanned", "holdfast")
        run_one_way(folder / "scanned", folder / "back", "safetensors")
        count, total = compare(folder / "hf", folder / "back")
        files = [len(list((folder / each).glob("*.safetensors"))) for each in ("hf", "back")]
        for name in ("config.json", "tokenizer.json"):
            assert (folder / "hf" / name).read_bytes() == (folder / "back" / name).read_bytes()
        print(f"{count} tensors, {total / 1e9:.2f} GB, bit-equal; files: {files[0]}, {files[1]}")
        print(f"load average {os.getloadavg()[0]:.1f}")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
