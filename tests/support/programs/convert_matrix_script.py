"""Runs in the processes of tests/checkpoint/tools/test_convert_matrix.py."""

from __future__ import annotations

import collections
import logging
import random
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp1

from holdfast.checkpoint import load, save
from holdfast.checkpoint.layouts.detect import open_checkpoint
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.checkpoint.storage.path import StorePath
from holdfast.checkpoint.tools.convert import convert

logging.disable(logging.WARNING)
jax.config.update("jax_enable_x64", True)
Pair = collections.namedtuple("Pair", "mu nu")
DTYPES = [
    "float32",
    "bfloat16",
    "float16",
    "float64",
    "int8",
    "uint8",
    "int16",
    "uint32",
    "int64",
    "bool",
    "int4",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3b11fnuz",
    "complex64",
    "complex128",
]


def mesh(rng):
    sizes = rng.choice([(1,), (2,), (4,), (8,), (2, 2), (2, 4), (4, 2), (2, 2, 2)])
    return jax.make_mesh(
        sizes, tuple("xyz"[: len(sizes)]), devices=jax.devices()[: int(np.prod(sizes))]
    )


def array(rng):
    grid, rank = mesh(rng), rng.randrange(4)
    shape = tuple(8 * rng.randrange(1, 3) for _ in range(rank))
    axes, spec = list(grid.axis_names), []
    for _ in range(rank):
        spec.append(axes.pop() if axes and rng.random() < 0.6 else None)
    dtype = jnp.dtype(rng.choice(DTYPES))
    bits = np.frombuffer(rng.randbytes(max(1, int(np.prod(shape))) * 16), np.float64)[
        : max(1, int(np.prod(shape)))
    ]
    with np.errstate(all="ignore"):
        values = (
            np.nan_to_num(bits, nan=1.5, posinf=2, neginf=-2)
            .clip(-100, 100)
            .reshape(shape)
            .astype(dtype)
        )
    if rng.random() < 0.15:
        return values
    return jax.device_put(jnp.asarray(values), jax.NamedSharding(grid, jax.P(*spec)))


def leaf(rng):
    keys = [
        lambda: jax.random.key(rng.randrange(99)),
        lambda: jax.random.split(jax.random.key(1), 4),
    ]
    values = [
        lambda: rng.randrange(-9, 9),
        lambda: rng.random(),
        lambda: True,
        lambda: "text",
        lambda: None,
        dict,
        list,
        tuple,
    ]
    return rng.choice([lambda: array(rng)] * 6 + values + keys)()


def by_v0(path, value):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(value))


def tree(rng, depth=0):
    if depth == 3 or (depth and rng.random() < 0.4):
        return leaf(rng)
    children = [tree(rng, depth + 1) for _ in range(rng.randrange(1, 4))]
    kind = rng.choice(["dict", "list", "tuple", "pair"]) if depth else "dict"
    if kind == "dict":
        return dict(
            zip(
                rng.sample(["a", "b.c", "layer_0", "w", "x/y", "k[0]"], len(children)),
                children,
                strict=True,
            )
        )
    return {"list": list, "tuple": tuple, "pair": lambda c: Pair(c[0], c[-1])}[kind](children)


def same(one, two):
    assert jax.tree.structure(one) == jax.tree.structure(two), (one, two)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        if hasattr(b, "dtype") and jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            assert jax.random.key_impl(a) == jax.random.key_impl(b)
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        if isinstance(b, jax.Array):
            assert a.sharding.is_equivalent_to(b.sharding, b.ndim), (a.sharding, b.sharding)
        if hasattr(b, "dtype"):
            assert (
                a.dtype == b.dtype
                and a.shape == b.shape
                and np.asarray(a).tobytes() == np.asarray(b).tobytes()
            ), (a, b)
        else:
            assert type(a) is type(b) and a == b, (a, b)


def abstract(x):
    return (
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        if isinstance(x, jax.Array)
        else x
    )


done = 0
for seed in range(int(sys.argv[3]), int(sys.argv[4])):
    rng = random.Random(seed)
    state = {"root": tree(rng), "one": array(rng)}
    like = jax.tree.map(abstract, state)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (ocp1.save if seed % 2 else by_v0)(folder / "orbax", state)
        same(load(folder / "orbax", like), state)  # Orbax writes, we read
        convert(
            open_checkpoint(folder / "orbax"), StorePath(LocalStorage(folder / "ours")), "holdfast"
        )
        item = "state" if seed % 2 else "default"
        same(load(folder / "ours", like, item=item), state)  # through our own layout
        convert(
            open_checkpoint(folder / "ours"), StorePath(LocalStorage(folder / "again")), "orbax"
        )
        (step,) = (folder / "again").iterdir()
        same(ocp1.load(step, like, checkpointable_name=item), state)  # and Orbax reads it again
        save(folder / "direct", state, layout="orbax")
        same(
            ocp1.load(folder / "direct", like), state
        )  # what we write from live arrays, Orbax reads
    done += 1
print("done", done)
