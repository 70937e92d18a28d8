"""Saves three arrays, which are made of a seed, on each mesh of four devices."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from holdfast.checkpoint import save
from holdfast.multihost import Solo

random = np.random.default_rng(3)
whole = {f"w{i}": random.standard_normal((256 << i, 512)).astype(np.float32) for i in range(3)}
for rows in (1, 2, 4):
    mesh = Mesh(np.array(jax.devices()).reshape(rows, 4 // rows), ("a", "b"))
    sharding = NamedSharding(mesh, P("a", "b"))
    state = {name: jax.device_put(leaf, sharding) for name, leaf in whole.items()}
    save(Path(sys.argv[1]) / str(rows), state, group=Solo())
