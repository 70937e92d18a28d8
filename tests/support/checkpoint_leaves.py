"""What `holdfast show --since --json` says of a made-up transformer, for the page's tests and
pictures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

LAYERS = 24
WIDTH = 1024
WORDS = 32_000
TRAINED_FROM = 0.75  # of the layers; these have changed
MATRICES = {
    "attention.query.kernel": (WIDTH, WIDTH),
    "attention.key.kernel": (WIDTH, WIDTH),
    "attention.value.kernel": (WIDTH, WIDTH),
    "attention.out.kernel": (WIDTH, WIDTH),
    "mlp.up.kernel": (WIDTH, 4 * WIDTH),
    "mlp.up.bias": (4 * WIDTH,),
    "mlp.down.kernel": (4 * WIDTH, WIDTH),
    "norm.scale": (WIDTH,),
}
COPIES = {"params": "bfloat16", "opt_state.0.mu": "float32", "opt_state.0.nu": "float32"}


def transformer(layers: int = LAYERS) -> dict[str, Any]:
    """Returns a step of a model with adamw, of which an earlier step is known."""
    loader = {"item": "loader", "path": "", "dtype": "json", "value": {"epoch": 3}, "changed": 1.0}
    return {
        "path": "/ckpt/run7/3000",
        "layout": "holdfast",
        "step": 3000,
        "since": 2000,
        "metrics": {"loss": 1.9},
        "metadata": None,
        "leaves": [*_arrays(layers), loader],
    }


def _arrays(layers: int) -> Iterator[dict[str, Any]]:
    for copy, dtype in COPIES.items():
        yield _array(f"{copy}.embed.embedding", dtype, (WORDS, WIDTH), changed=0.004)
        for layer in range(layers):
            for name, shape in MATRICES.items():
                changed = 0.97 if layer >= TRAINED_FROM * layers else 0.0
                yield _array(f"{copy}.layers.{layer}.{name}", dtype, shape, changed=changed)
        yield _array(f"{copy}.head.kernel", dtype, (WIDTH, WORDS), changed=1.0)


def _array(path: str, dtype: str, shape: tuple[int, ...], *, changed: float) -> dict[str, Any]:
    itemsize = 2 if dtype == "bfloat16" else 4
    return {
        "item": "state",
        "path": path,
        "dtype": dtype,
        "shape": list(shape),
        "bytes": math.prod(shape) * itemsize,
        "sharding": "(data) on data=4 model=2",
        "shards": [4],
        "changed": changed,
    }
