"""What programs of tests/system/test_host_values.py begin with."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import joined  # noqa: F401
import numpy as np

from holdfast.checkpoint import Options


def mine(index):
    # What each process keeps for itself: of every kind, beside what all share.
    return {
        "reader": {
            "at": 1000 + index,
            "seen": np.arange(5, dtype=np.int64) * (index + 1),
            "scale": np.float32(index + 0.5),
            "key": jax.random.key(index),
            "on": jnp.arange(3.0) + index,
            "name": f"host {index}",
            "empty": np.zeros((0, 2)),
            "raw": bytes([index]),
            "wide": np.full((3, 2), index, jnp.bfloat16),
            "whole": jnp.int32(index),
        }
    }


def check_mine(got, index):
    want = mine(index)["reader"]
    got = got["reader"]
    for name, value in want.items():
        found = got[name]
        if name == "key":
            value = jax.random.key_data(value)
            found = jax.random.key_data(found) if isinstance(found, jax.Array) else found
        if isinstance(value, (str, bytes, int)):
            assert type(found) is type(value) and found == value, (name, found)
        else:
            assert np.asarray(found).tobytes() == np.asarray(value).tobytes(), (name, found)
            assert (found.shape, found.dtype) == (value.shape, value.dtype), name
    return True


OPTIONS = Options(per_process=lambda path: path.startswith("reader."))
