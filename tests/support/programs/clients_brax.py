"""Runs in the processes of tests/system/test_clients.py."""

from __future__ import annotations

import functools
import json
import os
import sys

import jax
import jax.numpy as jnp
from brax.training.acme import running_statistics, specs
from brax.training.agents.ppo import checkpoint, networks

sizes = {
    "policy_hidden_layer_sizes": (8,),
    "value_hidden_layer_sizes": (8,),
    "mean_kernel_init_fn": jax.nn.initializers.lecun_uniform,
}
make = functools.partial(networks.make_ppo_networks, **sizes)
network = make(5, 2, preprocess_observations_fn=running_statistics.normalize)
normalizer = running_statistics.init_state(specs.Array((5,), jnp.dtype("float32")))
normalizer = running_statistics.update(normalizer, jnp.arange(20.0).reshape(4, 5))
params = (
    normalizer,
    network.policy_network.init(jax.random.key(1)),
    network.value_network.init(jax.random.key(2)),
)

root = sys.argv[1]
others = sys.argv[2:]
for step in (10, 20):
    checkpoint.save(root, step, params, checkpoint.network_config(5, 2, True, make))
found = {"steps": sorted(os.listdir(root)), "actions": [], "params": []}
for name in [os.path.join(root, found["steps"][-1]), *others]:
    actions, _ = checkpoint.load_policy(name, make)(jnp.linspace(-1, 1, 5), jax.random.key(0))
    found["actions"].append(actions.tolist())
    leaves = jax.tree_util.tree_leaves_with_path(checkpoint.load(name))
    arrays = [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves if hasattr(leaf, "dtype")]
    found["params"].append([(path, str(leaf.dtype), leaf.tolist()) for path, leaf in arrays])
print(json.dumps(found))
