"""Runs in the processes of tests/system/test_clients.py: what users of flax.training.checkpoints
do, each part by itself, and what each of them gives or raises.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import linen as nn
from flax import nnx, struct
from flax.training import checkpoints, orbax_utils, train_state

PARTS: dict[str, Callable[[Path, bool], Any]] = {}


def part(function: Callable[[Path, bool], Any]) -> Callable[[Path, bool], Any]:
    PARTS[function.__name__] = function
    return function


def told(value: Any) -> Any:
    """Returns a value as JSON has it: types, dtypes and numbers."""
    if isinstance(value, dict | flax.core.FrozenDict):
        return {key: told(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(told, value)]
    if hasattr(value, "dtype"):
        kind = "jax" if isinstance(value, jax.Array) else "numpy"
        return [kind, str(value.dtype), np.asarray(value).astype(float).tolist()]
    return value if isinstance(value, str | int | float | None) else type(value).__name__


def arrays(scale: int) -> dict[str, Any]:
    return {"a": np.arange(3, dtype=np.int32) * scale, "b": np.ones(3, np.float32) * scale}


@part
def saves_and_restores(root: Path, orbax: bool) -> Any:
    restore = functools.partial(checkpoints.restore_checkpoint, prefix="test_")
    found = [restore(root, arrays(0))]
    if not orbax:
        (root / "test_tmp").touch()  # a save that was killed left it
    for step in range(3):
        checkpoints.save_checkpoint(root, arrays(step), step, prefix="test_", keep=1)
        found.append(restore(root, arrays(9)))
    for step in (3, 4):
        checkpoints.save_checkpoint(root, arrays(step), step, prefix="test_", keep=2)
    found += [restore(root, arrays(9), step=3), restore(root / "test_4", arrays(9))]
    found += [restore(root / "none", arrays(9)), checkpoints.available_steps(root, "test_")]
    return [*found, checkpoints.latest_checkpoint(root, "test_")[-6:]]


@part
def a_missing_step(root: Path, orbax: bool) -> Any:
    checkpoints.save_checkpoint(root, arrays(1), 1)
    return checkpoints.restore_checkpoint(root, arrays(0), step=5)


@part
def overwrites(root: Path, orbax: bool) -> Any:
    checkpoints.save_checkpoint(root, arrays(1), 2, keep=1)
    checkpoints.save_checkpoint(root, arrays(2), 2, keep=1, overwrite=True)
    found = [checkpoints.restore_checkpoint(root, arrays(0))]
    checkpoints.save_checkpoint(root, arrays(3), 1, keep=1, overwrite=True)
    return [*found, checkpoints.restore_checkpoint(root, arrays(0)), sorted(os.listdir(root))]


@part
def does_not_overwrite(root: Path, orbax: bool) -> Any:
    checkpoints.save_checkpoint(root, arrays(1), 2)
    checkpoints.save_checkpoint(root, arrays(1), 2)


@part
def an_older_step(root: Path, orbax: bool) -> Any:
    checkpoints.save_checkpoint(root, arrays(1), 2.0)
    checkpoints.save_checkpoint(root, arrays(1), 1.0)


@part
def keeps(root: Path, orbax: bool) -> Any:
    for step in range(17, 60, 5):
        checkpoints.save_checkpoint(root, arrays(step), step, keep=2, keep_every_n_steps=7)
    return checkpoints.available_steps(root)


@part
def float_steps(root: Path, orbax: bool) -> Any:
    for step in (0.0, 2.0, 3.5):
        checkpoints.save_checkpoint(root, arrays(int(step)), step, keep=2)
    steps = checkpoints.available_steps(root, step_type=float)
    return [checkpoints.restore_checkpoint(root, None), steps]


@part
def without_a_target(root: Path, orbax: bool) -> Any:
    checkpoints.save_checkpoint(root, arrays(1), 0)
    found = [checkpoints.restore_checkpoint(root, None)]
    checkpoints.save_checkpoint(root, (np.zeros(3, np.int32), np.ones(3, np.int32)), 1)
    return [*found, checkpoints.restore_checkpoint(root, None)]


@part
def one_array(root: Path, orbax: bool) -> Any:
    checkpoints.save_checkpoint(root, np.arange(3), 0)
    return checkpoints.restore_checkpoint(root, None)


@part
def one_array_by_its_handler(root: Path, orbax: bool) -> Any:
    with ocp.Checkpointer(ocp.ArrayCheckpointHandler()) as checkpointer:
        checkpoints.save_checkpoint(root, np.arange(3), 0, orbax_checkpointer=checkpointer)
        restore = functools.partial(
            checkpoints.restore_checkpoint, root, orbax_checkpointer=checkpointer
        )
        return [restore(None), restore(np.zeros(3, int))]


@part
def in_the_background(root: Path, orbax: bool) -> Any:
    if orbax:
        with ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            for step in range(3):
                checkpoints.save_checkpoint(
                    root, arrays(step), step, keep=2, orbax_checkpointer=checkpointer
                )
            checkpointer.wait_until_finished()
            found = checkpoints.restore_checkpoint(root, arrays(0), orbax_checkpointer=checkpointer)
    else:
        manager = checkpoints.AsyncManager()
        for step in range(3):
            checkpoints.save_checkpoint(root, arrays(step), step, keep=2, async_manager=manager)
        manager.wait_previous_save()
        manager.save_future.result()
        found = checkpoints.restore_checkpoint(root, arrays(0))
    return [found, checkpoints.latest_checkpoint(root)[-1]]


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(2)(nn.BatchNorm(use_running_average=True)(nn.Dense(3)(x)))


@part
def a_train_state(root: Path, orbax: bool) -> Any:
    net = Net()
    variables = net.init(jax.random.key(0), jnp.ones((1, 4)))
    state = train_state.TrainState.create(
        apply_fn=net.apply, params=variables["params"], tx=optax.adam(1e-3)
    )
    state = state.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params))
    checkpoints.save_checkpoint(root, {"model": state, "stats": variables["batch_stats"]}, 1)
    like = {"model": jax.tree.map(jnp.zeros_like, state), "stats": variables["batch_stats"]}
    back = checkpoints.restore_checkpoint(root, like)
    assert jax.tree.structure(back) == jax.tree.structure(like)
    return [jax.tree.leaves(back), checkpoints.restore_checkpoint(root, None)]


@part
def frozen(root: Path, orbax: bool) -> Any:
    tree = flax.core.freeze({"x": {"y": np.ones(2)}})
    checkpoints.save_checkpoint(root, tree, 1)
    return [checkpoints.restore_checkpoint(root, tree), checkpoints.restore_checkpoint(root, None)]


class Pair(NamedTuple):
    first: Any
    second: Any


@part
def a_named_tuple(root: Path, orbax: bool) -> Any:
    checkpoints.save_checkpoint(root, {"p": Pair(np.ones(2), 3)}, 1)
    like = {"p": Pair(np.zeros(2), 0)}
    return [checkpoints.restore_checkpoint(root, like), checkpoints.restore_checkpoint(root, None)]


@struct.dataclass
class Box:
    a: Any
    b: Any
    name: str = struct.field(pytree_node=False, default="box")


@part
def a_dataclass(root: Path, orbax: bool) -> Any:
    checkpoints.save_checkpoint(root, Box(np.ones(2), [1, 2.5]), 1)
    back = checkpoints.restore_checkpoint(root, Box(np.zeros(2), [0, 0.0], "mine"))
    return [back.a, back.b, back.name, checkpoints.restore_checkpoint(root, None)]


@part
def numbers_and_texts(root: Path, orbax: bool) -> Any:
    tree = {"i": 3, "f": 2.5, "w": jnp.ones(2, jnp.bfloat16)}
    if not orbax:
        tree["n"] = np.float32(1.5)  # PyTreeCheckpointHandler of Orbax refuses it
    checkpoints.save_checkpoint(root, tree, 1)
    return [checkpoints.restore_checkpoint(root, None), checkpoints.restore_checkpoint(root, tree)]


@part
def nones_and_empty_nodes(root: Path, orbax: bool) -> Any:
    tree = {"none": None, "dict": {}, "list": [], "deep": {"x": None, "y": np.ones(2)}}
    checkpoints.save_checkpoint(root, tree, 1)
    return [checkpoints.restore_checkpoint(root, tree), checkpoints.restore_checkpoint(root, None)]


@part
def a_target_with_none_for_an_array(root: Path, orbax: bool) -> Any:
    checkpoints.save_checkpoint(root, arrays(1), 1)
    return checkpoints.restore_checkpoint(root, {"a": None, "b": np.zeros(3, np.float32)})


@part
def a_smaller_target(root: Path, orbax: bool) -> Any:
    checkpoints.save_checkpoint(root, arrays(1), 1)
    return checkpoints.restore_checkpoint(root, {"a": np.zeros(3, np.int32)})


@part
def a_larger_target(root: Path, orbax: bool) -> Any:
    checkpoints.save_checkpoint(root, arrays(1), 1)
    return checkpoints.restore_checkpoint(root, arrays(0) | {"c": np.zeros(3)})


@part
def transforms(root: Path, orbax: bool) -> Any:
    checkpoints.save_checkpoint(root, {"old": arrays(2), "same": np.ones(2)}, 1)
    like = {"new": arrays(0), "same": np.zeros(2), "own": np.full(2, 7.0)}
    changes = {
        "new": {name: ocp.Transform(original_key=f"old/{name}") for name in ("a", "b")},
        "own": ocp.Transform(use_fallback=True),
    }
    return checkpoints.restore_checkpoint(root, like, orbax_transforms=changes)


@part
def sharded(root: Path, orbax: bool) -> Any:
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    tree = {"w": jax.device_put(jnp.arange(8.0), sharding)}
    checkpoints.save_checkpoint_multiprocess(root, tree, 1)
    back = checkpoints.restore_checkpoint(root, {"w": jax.device_put(jnp.zeros(8), sharding)})
    return [back, getattr(back["w"], "sharding", None) == sharding]


@part
def restore_args(root: Path, orbax: bool) -> Any:
    tree = {"w": jnp.arange(4.0), "n": np.arange(2)}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        saving = orbax_utils.save_args_from_target(tree)
        checkpointer.save(root / "x", tree, save_args=saving)
        restoring = orbax_utils.restore_args_from_target(tree)
        return checkpointer.restore(root / "x", item=tree, restore_args=restoring)


@part
def by_both_kinds(root: Path, orbax: bool) -> Any:
    flax.config.update("flax_use_orbax_checkpointing", not orbax)
    checkpoints.save_checkpoint(root, arrays(1), 1, keep=3)
    flax.config.update("flax_use_orbax_checkpointing", orbax)
    found = [checkpoints.restore_checkpoint(root, arrays(0))]
    checkpoints.save_checkpoint(root, arrays(2), 2, keep=3)
    return [*found, *(checkpoints.restore_checkpoint(root, None, step=step) for step in (1, 2))]


@part
def a_relative_folder(root: Path, orbax: bool) -> Any:
    os.chdir(root)
    path = str(root) + "//deep" if orbax else "./deep"
    checkpoints.save_checkpoint(path, arrays(3), 3)
    return checkpoints.restore_checkpoint(path, arrays(0))


@part
def nnx_state(root: Path, orbax: bool) -> Any:
    class Model(nnx.Module):
        def __init__(self, seed: int) -> None:
            self.one = nnx.Linear(4, 3, rngs=nnx.Rngs(seed))
            self.two = nnx.Linear(3, 2, rngs=nnx.Rngs(seed + 1))

    x = jnp.linspace(-1, 1, 4)
    model = Model(1)
    graph, state = nnx.split(model)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(root / "x", state)
        checkpointer.wait_until_finished()
        _, abstract = nnx.split(nnx.eval_shape(lambda: Model(2)))
        back = checkpointer.restore(root / "x", abstract)
        plain = nnx.to_pure_dict(state)
        checkpointer.save(root / "y", plain)
        checkpointer.wait_until_finished()
        pure = checkpointer.restore(root / "y")
    other = nnx.state(Model(3))
    nnx.replace_by_pure_dict(other, pure)
    merged = [nnx.merge(graph, each) for each in (state, back, other)]
    return [pure, [each.two(each.one(x)) for each in merged]]


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return told(call())
    except Exception as error:
        if os.environ.get("TRACE"):
            raise
        kinds = ("ValueError", "KeyError", "TypeError", "FileNotFoundError")
        named = [kind.__name__ for kind in type(error).__mro__ if kind.__name__ in kinds]
        return {"raises": named[0] if named else type(error).__name__}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    results = {}
    for with_orbax in (False, True):
        flax.config.update("flax_use_orbax_checkpointing", with_orbax)
        for name, run in PARTS.items():
            place = folder / f"{name} {with_orbax}"
            place.mkdir(parents=True)
            results[place.name] = outcome(functools.partial(run, place, with_orbax))
            flax.config.update("flax_use_orbax_checkpointing", with_orbax)
    print(json.dumps(results))
