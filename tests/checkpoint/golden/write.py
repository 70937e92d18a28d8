"""Writes the golden checkpoints: `python write.py FOLDER` makes `root`, `oneshot`, `incremental`,
`left` and `two` there. What is committed stays as it is.

Every value is a pure function of its name and step, so a reader makes it again and compares bit by
bit.
"""

from __future__ import annotations

import hashlib
import math
import os
import socket
import subprocess
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from holdfast.checkpoint import CheckpointManager, Json, Options, save

STEPS = (1, 20)
INCREMENTAL_STEPS = (1, 2, 3)
LEFT_STEPS = (100, 200, 300)
METADATA = {
    "run": "golden",
    "seeds": [1, 2, 3],
    "note": "ключ",
    "none": None,
    "deep": {"a": [True, 0.5, {}]},
}
CONFIG = {
    "learning_rate": 1e-3,
    "layers": [16, 32],
    "name": "ключ",
    "none": None,
    "empty": {},
    "on": True,
}
MESH = {"x": 4, "y": 2}
FLOATS = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"]
DTYPES = [*FLOATS, "int4", "uint4", "int8", "int32", "uint32", "bool"]
WIDE = ["float64", "int64", "uint64", "complex128"]  # numpy's own: jax makes them narrower


class Pair(NamedTuple):
    """A namedtuple, as a node of trees."""

    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclass
class Net:
    """A dataclass, as a node of trees."""

    kernel: Any
    bias: Any
    scale: Any


# A record names classes by module; the name must not change with the place from which this file is
# run or imported.
Pair.__module__ = Net.__module__ = "golden"


@dataclass(frozen=True)
class Put:
    """A leaf that is saved from devices: its value on the host (of typed PRNG keys their data) and
    the axes of the mesh that divide it.
    """

    value: np.ndarray[Any, Any]
    spec: tuple[Any, ...] = ()
    impl: str | None = None


def numbers(name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Returns an array of any bits, NaNs among them, that depends on the name alone."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    count = math.prod(shape)
    data = hashlib.shake_128(name.encode()).digest(count * kind.itemsize)
    if dtype == "bool":
        return (np.frombuffer(data, np.uint8) % 2).astype(kind).reshape(shape)
    if dtype in ("int4", "uint4"):
        return (
            (np.frombuffer(data, np.uint8).astype(np.int8) % 16 - 8 * (dtype == "int4"))
            .astype(kind)
            .reshape(shape)
        )
    return np.frombuffer(data, kind).reshape(shape)


def state(step: int) -> dict[str, Any]:
    """Returns the item "state" of a step of `root`: Put where it is saved from devices, other
    leaves as they are.
    """

    def put(
        name: str, dtype: str, shape: tuple[int, ...], *spec: Any, impl: str | None = None
    ) -> Put:
        return Put(numbers(f"{step}/{name}", dtype, shape), spec, impl)

    return {
        "params": Net(
            put("kernel", "float32", (16, 24), "x", "y"),
            put("bias", "bfloat16", (24,), ("x", "y")),
            put("", "float32", ()),
        ),
        "moments": Pair(
            put("first", "bfloat16", (16, 24), None, "x"),
            put("second", "float32", (16, 24), ("y", "x")),
        ),
        "dtypes": {dtype: put(dtype, dtype, (8, 6), "x", "y") for dtype in DTYPES},
        "numpy": {dtype: numbers(f"{step}/{dtype}", dtype, (3, 5)) for dtype in WIDE + DTYPES},
        "scalars": {
            "f32": np.float32(step + 0.5),
            "i64": np.int64(-step),
            "bf16": ml_dtypes.bfloat16(step),
            "bool": np.bool_(True),
        },
        "none": {"array": put("none", "float32", (0, 3)), "numpy": np.zeros((2, 0), np.int16)},
        "keys": {
            "one": put("one", "uint32", (2,), impl="threefry2x32"),
            "many": put("many", "uint32", (8, 2), "x", impl="threefry2x32"),
            "rbg": put("rbg", "uint32", (4,), impl="rbg"),
        },
        "python": {
            "bool": [True, False],
            "int": [0, -1, step, 1 << 200],
            "float": [0.0, -0.0, 0.1, math.inf, -math.inf, math.nan, 5e-324],
            "complex": [1 + 2j, complex(-0.0, math.inf)],
            "str": ["", "ключ", 'new\nline "quoted" \\ \x00', str(step)],
            "bytes": [b"", bytes(range(256))],
        },
        "holes": {
            "none": None,
            "list": [],
            "tuple": (),
            "dict": {},
            "both": (None, [], {"": None}),
        },
        "names": {
            "": 1,
            "a.b": 2,
            "c[0:1]": 3,
            "back\\slash": 4,
            "__metadata__": np.arange(3),
            "new\nline": 5,
            "ключ": np.arange(2),
        },
        "kinds": (
            OrderedDict(z=1, a=np.ones(2)),
            defaultdict(int, {"d": 2}),
            {0: "zero", 10: np.zeros(1)},
            [[np.ones(1)], (7,)],
        ),
    }


def oneshot() -> dict[str, Any]:
    """Returns the item "params" of `oneshot`."""
    return {
        "w": Put(numbers("oneshot/w", "float32", (8, 8)), ("x", "y")),
        "b": numbers("oneshot/b", "bfloat16", (8,)),
        "count": 3,
        "empty": None,
    }


def shared() -> dict[str, Any]:
    """Returns what the two processes of `two` have in common."""
    return {
        "w": Put(numbers("two/w", "bfloat16", (8, 16)), ("x",)),
        "r": Put(numbers("two/r", "float32", (5,))),
        "name": "net",
        "n": 7,
    }


def own(index: int) -> dict[str, Any]:
    """Returns what process `index` of `two` keeps for itself."""
    name = f"two/{index}"
    return {
        "at": 1000 + index,
        "seen": numbers(f"{name}/seen", "int64", (3, 2)),
        "half": numbers(f"{name}/half", "bfloat16", (5,)),
        "small": numbers(f"{name}/small", "int4", (7,)),
        "scale": np.float32(index + 0.5),
        "name": f"process {index}",
        "raw": bytes([index, 255]),
        "empty": np.zeros((0, 2)),
    }


class Reader:
    """A data iterator: what it gives as its state, it takes back."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        self.state = state


def reader_state(step: int) -> dict[str, Any]:
    """Returns the state of the iterator in the item "data" of a step of `root`."""
    return {
        "at": step,
        "file": b"\x00\xff",
        "pair": (1, "two"),
        "order": numbers(f"{step}/order", "int64", (5,)),
        3: None,
    }


def placed(tree: Any, sharding: Callable[[Put], Any]) -> Any:
    """Returns the tree with each Put as an array on devices."""

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, Put):
            return leaf
        array = jax.make_array_from_callback(
            leaf.value.shape,
            sharding(leaf),
            lambda index: leaf.value[index],
            dtype=leaf.value.dtype,
        )
        return array if leaf.impl is None else jax.random.wrap_key_data(array, impl=leaf.impl)

    return jax.tree.map(place, tree)


def on_mesh(leaf: Put) -> NamedSharding:
    """Returns the sharding of a leaf of `root` and `oneshot`, over 8 devices."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(tuple(MESH.values())), tuple(MESH))
    return NamedSharding(mesh, PartitionSpec(*leaf.spec))


def write_alone(folder: Path) -> None:
    """Writes `root` and `oneshot`, as one process with 8 devices."""
    assert jax.device_count() == 8
    with CheckpointManager(folder / "root") as manager:
        for step in STEPS:
            items = {
                "state": placed(state(step), on_mesh),
                "config": Json(CONFIG),
                "data": Reader(reader_state(step)),
            }
            manager.save(
                step, items=items, metrics={"loss": 1 / step, "steps": step}, metadata=METADATA
            )
    save(folder / "oneshot", placed(oneshot(), on_mesh), item="params", step=5, metadata=METADATA)


def changing(step: int) -> dict[str, Any]:
    """Returns the state of a step of `incremental`: most of it is the same in every step."""
    return {
        "base": numbers("base", "float32", (64, 64)),
        "frozen": numbers("frozen", "bfloat16", (512,)),
        "adapter": numbers(f"{step}/adapter", "float32", (7,)),
        "step": step,
    }


def write_incremental(folder: Path) -> None:
    """Writes `incremental`: its later steps link the file of the first."""
    with CheckpointManager(folder / "incremental", options=Options(incremental=True)) as manager:
        for step in INCREMENTAL_STEPS:
            manager.save(step, changing(step)).wait()


def branching(step: int, *, is_branch: bool) -> dict[str, Any]:
    """Returns the state of a step of `left`, of its branch or of what that left behind."""
    name = f"{step}/{'branch' if is_branch else 'line'}"
    return {"w": numbers(name, "float32", (4, 3)), "name": name, "step": step}


def write_left(folder: Path) -> None:
    """Writes `left`: a job that has saved 100, 200 and 300 went back to 100, and saved 200 anew."""
    with CheckpointManager(folder / "left") as manager:
        for step in LEFT_STEPS:
            manager.save(step, branching(step, is_branch=False)).wait()
        manager.restore(LEFT_STEPS[0])
        manager.save(LEFT_STEPS[1], branching(LEFT_STEPS[1], is_branch=True)).wait()


def write_together(folder: Path, index: int, port: str) -> None:
    """Writes `two`, as one of two processes with 4 devices each."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"127.0.0.1:{port}", 2, index, coordinator_bind_address=f"127.0.0.1:{port}"
    )
    mesh = Mesh(np.array(jax.devices()), ("x",))
    tree = placed(shared(), lambda leaf: NamedSharding(mesh, PartitionSpec(*leaf.spec))) | {
        "reader": own(index)
    }
    with CheckpointManager(
        folder / "two", options=Options(per_process=lambda path: path.startswith("reader."))
    ) as manager:
        manager.save(1, tree, metrics={"loss": 0.25}, metadata=METADATA)


def main(folder: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    jobs = [
        [(8, "alone")],
        [(1, "incremental")],
        [(1, "left")],
        [(4, "together", "0", port), (4, "together", "1", port)],
    ]
    for job in jobs:
        started = [
            subprocess.Popen(
                [sys.executable, __file__, str(folder), *words],
                env=os.environ
                | {
                    "JAX_PLATFORMS": "cpu",
                    "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
                },
            )
            for devices, *words in job
        ]
        codes = [process.wait(120) for process in started]
        if any(codes):
            raise SystemExit("a process failed")


if __name__ == "__main__":
    match sys.argv[2:]:
        case ["alone"]:
            write_alone(Path(sys.argv[1]))
        case ["incremental"]:
            write_incremental(Path(sys.argv[1]))
        case ["left"]:
            write_left(Path(sys.argv[1]))
        case ["together", index, port]:
            write_together(Path(sys.argv[1]), int(index), port)
        case _:
            main(Path(sys.argv[1]))
