"""Runs in the processes of tests/system/test_drift.py: a bit of one replica of one leaf is flipped,
and found at that save.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import joined
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from holdfast import checkpoint
from holdfast.checkpoint import CheckpointManager, EveryNSteps, Local, Options, ReplicasDiffer
from holdfast.checkpoint.saving import replicas

if sys.argv[6] == "program":
    # As on devices with memory of their own.
    replicas._is_host = lambda devices: False
index = joined.index
mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("half", "odd", "device"))
strange = np.array([np.nan, -0.0, 0.0, np.inf, 1e-45, -np.nan, 2.0, 3.0] * 8, np.float32)
values: dict[str, tuple[np.ndarray, P]] = {
    "all": (strange, P()),
    "of_half": (strange.astype(ml_dtypes.bfloat16), P("odd")),
    "of_device": (np.arange(64, dtype=np.int8).astype(ml_dtypes.int4), P("device")),
    "flags": (strange > 0, P("half")),
    "waves": (strange.astype(np.complex64), P()),
    "cut": (np.arange(64, dtype=np.float32), P(("half", "odd", "device"))),
    "none": (np.zeros((0, 4), np.float32), P()),
    "scalar": (np.float32(1.5).reshape(()), P()),
}


def put(value: np.ndarray, spec: P) -> jax.Array:
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(value.shape, sharding, lambda cut: value[cut])


def state() -> dict[str, Any]:
    arrays = {name: put(*value) for name, value in values.items()}
    own = jnp.int32(7)
    return arrays | {"own": own, "host": np.arange(3), "name": "net"}


def flip(array: jax.Array, devices: tuple[int, ...] = (0, 1)) -> jax.Array:
    """Returns the array with a bit of its last element flipped on some devices here."""
    parts = []
    for slot, shard in enumerate(array.addressable_shards):
        data = np.array(shard.data)
        if slot in devices:
            data.reshape(-1).view(np.uint8)[-1] ^= 1
        parts.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def drifted(leaf: str, process: int, devices: tuple[int, ...] = (0, 1)) -> dict[str, Any]:
    tree = state()
    if index == process:
        tree[leaf] = flip(tree[leaf], devices)
    return tree


class Heard(logging.Handler):
    """Keeps the warnings about replicas."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "replicas" in record.getMessage():
            self.texts.append(record.getMessage())

    def take(self) -> list[str]:
        texts = self.texts
        self.texts = []
        return texts


heard = Heard()
steps = itertools.count(1)
logging.getLogger("holdfast").addHandler(heard)
donate = jax.jit(lambda tree: jax.tree.map(lambda a: a * 1, tree), donate_argnums=0)


def save_next(manager: CheckpointManager, tree: dict[str, Any]) -> None:
    """Begins a save of the next step that is saved: a local save may leave some out."""
    while not manager.save(next(steps), tree):
        pass


def save_clean(manager: CheckpointManager) -> None:
    """Saves a state whose replicas are equal, and gives its memory away at once."""
    tree = state()
    save_next(manager, tree)
    donate({name: tree[name] for name in values})
    manager.wait_until_finished()
    assert not heard.take()


def expect(save: Callable[[dict[str, Any]], object], case: tuple[Any, ...]) -> None:
    leaf, process, devices, want = case
    save(drifted(leaf, process, devices))
    texts = heard.take()
    assert len(texts) == (index == 0), texts
    for text in texts:
        print(text, flush=True)
        assert f"'{leaf}'" in text and want in text and "host " in text, text
        assert "item 'state': replicas of 1 leaves have drifted" in text, text


CASES = [
    ("all", 3, (0, 1), "process 3 ("),
    ("of_half", 3, (0, 1), "process 3 ("),
    ("of_device", 2, (1,), "process 2 ("),
    ("flags", 1, (0, 1), "process 1 ("),
    ("waves", 0, (0, 1), "process 0 ("),
    ("scalar", 1, (0, 1), "process 1 ("),
    ("all", 1, (1,), "process 1 ("),
]
options = Options(save_timeout_s=30, incremental=sys.argv[5] == "incremental")
local = None
if sys.argv[5] == "local":
    local = Local(f"{joined.root}/host{index}", save_policy=EveryNSteps(1), replicas=0)
policy = EveryNSteps(1000) if local is not None else None
with CheckpointManager(
    f"{joined.root}/run", options=options, save_policy=policy, local=local
) as manager:

    def save(tree: dict[str, Any]) -> None:
        save_next(manager, tree)
        manager.wait_until_finished()

    save_clean(manager)
    for case in CASES:
        expect(save, case)
    save_clean(manager)
    if local is None:
        assert manager.statistics()["replicas_differed"] == len(CASES), manager.statistics()
        assert manager.all_steps() == list(range(1, len(CASES) + 3)), manager.all_steps()

if sys.argv[5] == "durable":
    refusing = Options(
        save_timeout_s=30, on_replicas_differ="raise", may_differ=lambda path: path == "waves"
    )
    with CheckpointManager(f"{joined.root}/refused", options=refusing) as manager:
        handle = manager.save(1, drifted("all", 2))
        try:
            handle.wait()
        except ReplicasDiffer as error:
            assert (error.leaf, error.process, error.step) == ("all", 2, 1), vars(error)
        else:
            raise SystemExit("no ReplicasDiffer")
        assert manager.all_steps() == []
        # What may differ is not looked at.
        manager.save(2, drifted("waves", 1))
        manager.wait_until_finished()
        assert manager.all_steps() == [2]
    expect(lambda tree: checkpoint.save(f"{joined.root}/one", tree), CASES[0])
    ignoring = Options(on_replicas_differ="ignore")
    with CheckpointManager(f"{joined.root}/ignored", options=ignoring) as manager:
        manager.save(1, drifted("all", 2))
        manager.wait_until_finished()
        assert not heard.take() and not manager.statistics()["replicas_differed"]
