"""Programs of libraries that save with Orbax, Keras, Brax and grain: on Orbax and on holdfast,
unedited, with the same results.

Each program saves, loads what it has saved, and loads the checkpoints that it is given besides:
those that the other one has saved.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.layouts.detect import open_checkpoint
from holdfast.checkpoint.storage.path import StorePath
from holdfast.checkpoint.tools.convert import convert
from tests.support.libraries import need

ON_HOLDFAST = ("-m", "holdfast.compat.orbax")

KERAS = """
import json
import os
import sys

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np

x = np.linspace(-1, 1, 128, dtype=np.float32).reshape(32, 4)
y = x.sum(axis=1, keepdims=True)


def make():
    keras.utils.set_random_seed(7)
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(8, activation="relu", name="hidden")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1, name="out")(hidden))
    model.compile(optimizer="adam", loss="mse")
    return model


def look(model):  # what it says, and how it goes on: by its weights, and by the state of its optimizer
    keras.utils.set_random_seed(1)
    return [model.predict(x, verbose=0).tolist(), model.fit(x, y, epochs=2, verbose=0).history["loss"]]


root, others = sys.argv[1], sys.argv[2:]
model = make()
callback = keras.callbacks.OrbaxCheckpoint(root, max_to_keep=2)
found = {"losses": model.fit(x, y, epochs=4, verbose=0, callbacks=[callback]).history["loss"]}
found["steps"] = sorted(name for name in os.listdir(root) if name.isdigit())
model.save(f"{root}.keras")
found["saved"] = look(keras.saving.load_model(f"{root}.keras"))
found["checkpoints"], found["weights"] = [], []
for name in [root, *others]:
    found["checkpoints"].append(look(keras.saving.load_model(name)))
    fresh = make()
    fresh.load_weights(name)
    found["weights"].append(fresh.predict(x, verbose=0).tolist())
print(json.dumps(found))
"""

BRAX = """
import functools
import json
import os
import sys

import jax
import jax.numpy as jnp
from brax.training.acme import running_statistics, specs
from brax.training.agents.ppo import checkpoint, networks

sizes = {"policy_hidden_layer_sizes": (8,), "value_hidden_layer_sizes": (8,), "mean_kernel_init_fn": jax.nn.initializers.lecun_uniform}
make = functools.partial(networks.make_ppo_networks, **sizes)
network = make(5, 2, preprocess_observations_fn=running_statistics.normalize)
normalizer = running_statistics.init_state(specs.Array((5,), jnp.dtype("float32")))
normalizer = running_statistics.update(normalizer, jnp.arange(20.0).reshape(4, 5))
params = normalizer, network.policy_network.init(jax.random.key(1)), network.value_network.init(jax.random.key(2))

root, others = sys.argv[1], sys.argv[2:]
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
"""


GRAIN = """
import json
import sys

import grain
import orbax.checkpoint as ocp
from grain.checkpoint import CheckpointRestore, CheckpointSave


def batches():
    return iter(grain.MapDataset.range(100).shuffle(seed=7).batch(4).to_iter_dataset())


def read(root):
    with ocp.CheckpointManager(root) as manager:
        restored = manager.restore(1, args=ocp.args.Composite(data=CheckpointRestore(batches())))["data"]
        return [batch.tolist() for batch in restored]


root, others = sys.argv[1], sys.argv[2:]
data = batches()
for _ in range(3):
    next(data)
with ocp.CheckpointManager(root) as manager:
    manager.save(1, args=ocp.args.Composite(data=CheckpointSave(data), state=ocp.args.StandardSave({"w": 1.0})))
    manager.wait_until_finished()
print(json.dumps([[batch.tolist() for batch in data], *map(read, [root, *others])]))
"""


def run(program: Path, *arguments: object, on: tuple[str, ...] = ()) -> Any:
    """Runs a program as its user does; returns what its last line says."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, *on, program, *arguments]
    ran = subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=program.parent,
        env=environment,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_keras(tmp_path: Path) -> None:
    """The callback, `model.save`, `load_model` and `load_weights`; losses after a restart too, and
    each reads the other's checkpoints.
    """
    need("keras", "make slow-libraries")
    program = tmp_path / "program.py"
    program.write_text(KERAS)
    run(program, tmp_path / "ours", on=ON_HOLDFAST)
    assert (tmp_path / "ours/3/checkpoint.json").exists()
    convert(open_checkpoint(tmp_path / "ours"), StorePath.of(tmp_path / "ours as Orbax's"), "orbax")
    theirs = run(program, tmp_path / "theirs", tmp_path / "ours as Orbax's")
    ours = run(program, tmp_path / "ours again", tmp_path / "theirs", on=ON_HOLDFAST)
    assert ours == theirs and ours["steps"] == ["2", "3"]
    assert ours["checkpoints"] == [ours["saved"]] * 2 and ours["weights"] == [ours["saved"][0]] * 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_brax(tmp_path: Path) -> None:
    """PPO's checkpoint: the policy acts as the one that was saved, its parameters are the same, and
    each reads the other's.
    """
    need("brax", "make slow-libraries")
    program = tmp_path / "program.py"
    program.write_text(BRAX)
    run(program, tmp_path / "ours", on=ON_HOLDFAST)
    saved = tmp_path / "ours/000000000020"
    convert(open_checkpoint(saved), StorePath.of(tmp_path / "ours as Orbax's"), "orbax")
    converted = tmp_path / "ours as Orbax's/0/default"
    shutil.copy(saved / "ppo_network_config.json", converted)
    theirs = run(program, tmp_path / "theirs", converted)
    ours = run(program, tmp_path / "ours again", tmp_path / "theirs/000000000020", on=ON_HOLDFAST)
    assert ours == theirs and ours["steps"] == ["000000000010", "000000000020"]
    assert (
        ours["actions"][0] == ours["actions"][1]
        and ours["params"][0] == ours["params"][1]
        and len(ours["params"][0]) >= 8
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_grain(tmp_path: Path) -> None:
    """Its own handler of Orbax's saves the state of a data iterator, and gives it back; that of
    Orbax's checkpoint too.
    """
    need("grain", "make slow-libraries")
    program = tmp_path / "program.py"
    program.write_text(GRAIN)
    theirs = run(program, tmp_path / "theirs")
    ours = run(program, tmp_path / "ours", tmp_path / "theirs", on=ON_HOLDFAST)
    assert ours == [theirs[0]] * 3 and theirs == [theirs[0]] * 2 and len(theirs[0]) == 22
