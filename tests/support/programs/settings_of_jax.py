"""Saves and restores under each setting of jax, on 8 devices; prints what it has found, as JSON by
claim.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from claims import print_claims
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from holdfast.checkpoint import SAVED, CheckpointManager, load, load_async, save
from holdfast.compat.orbax.args import SaveArgs, cast

folder = Path(sys.argv[3])
devices = np.array(jax.devices())
spec: Any = PartitionSpec
every = Mesh(devices.reshape(4, 2), ("x", "y"))
explicit = Mesh(devices.reshape(4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
pair = Mesh(devices[:2], ("d",))
numbers = np.arange(32, dtype=np.float32).reshape(8, 4) / 3
numbers[0, 0] = np.nan
numbers[0, 1] = np.inf


def state() -> dict[str, Any]:
    """Arrays that were made before a setting was made, on many, some, and single devices."""
    return {
        "all": jax.device_put(numbers, NamedSharding(every, spec("x", "y"))),
        "explicit": jax.device_put(numbers, NamedSharding(explicit, spec("x"))),
        "two": jax.device_put(numbers, NamedSharding(pair, spec("d"))),
        "one": jax.device_put(numbers, devices[3]),
        "anywhere": jnp.asarray(numbers),
        "keys": jax.device_put(
            jax.random.split(jax.random.key(3), 8), NamedSharding(pair, spec("d"))
        ),
        "host": numbers,
    }


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "transfer_guard": lambda: jax.transfer_guard("disallow"),
    "transfer_guard of explicit transfers": lambda: jax.transfer_guard("disallow_explicit"),
    "debug_nans": lambda: jax.debug_nans(True),
    "debug_infs": lambda: jax.debug_infs(True),
    "enable_x64": lambda: jax.enable_x64(True),
    "default_device": lambda: jax.default_device(devices[5]),
    "set_mesh": lambda: jax.set_mesh(every),
    "set_mesh, explicit": lambda: jax.set_mesh(explicit),
    "set_mesh of some devices": lambda: jax.set_mesh(pair),
    "disable_jit": lambda: jax.disable_jit(True),
    "numpy_rank_promotion": lambda: jax.numpy_rank_promotion("raise"),
    "numpy_dtype_promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "debug_key_reuse": lambda: jax.debug_key_reuse(True),
    "checking_leaks": jax.checking_leaks,
}


def data_of(leaf: Any) -> np.ndarray[Any, Any]:
    return np.asarray(
        jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    )


def same(found: dict[str, Any], wanted: dict[str, Any], *, in_half: bool) -> None:
    for name, leaf in wanted.items():
        value = data_of(leaf)
        if in_half and value.dtype == np.float32:
            value = value.astype(jnp.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(data_of(found[name]), value, name)
        if getattr(leaf, "committed", False):
            assert found[name].sharding == leaf.sharding, (name, found[name].sharding)


def under(setting: Callable[[], AbstractContextManager[Any]], path: Path) -> None:
    """A save, one that casts, and a restore in each way, in each layout."""
    wanted = state()
    for layout in ("holdfast", "orbax"):
        for dtype in (None, jnp.bfloat16):
            saved = path / f"{layout} {dtype is None}"
            with setting():
                save(saved, wanted, dtype=dtype, layout=layout)
                found = load(saved, wanted, cast=True)
                load(saved)
                as_saved = load(saved, SAVED)
            same(found, wanted, in_half=dtype is not None)
            np.testing.assert_array_equal(
                data_of(as_saved["all"]).astype(np.float32), data_of(found["all"])
            )


def global_guard(path: Path) -> None:
    """A guard that is the whole process's, in the threads of a manager too."""
    wanted = state()
    config: Any = jax.config
    config.update("jax_transfer_guard", "disallow_explicit")
    try:
        with CheckpointManager(path) as manager:
            manager.save(1, wanted, dtype=jnp.bfloat16).wait()
            found = manager.restore(1, wanted, cast=True)
    finally:
        config.update("jax_transfer_guard", "allow")
    same(found, wanted, in_half=True)


def casts_stay(path: Path) -> None:
    """An array is cast where it is: on its devices, in its memory; 64 bits stay 64."""
    in_host_memory = SingleDeviceSharding(devices[1], memory_kind="unpinned_host")
    wanted = {"w": jax.device_put(numbers, in_host_memory), "one": state()["one"]}
    save(path / "memory", wanted, dtype=jnp.float16)
    found = load(path / "memory", SAVED)
    assert found["w"].sharding == in_host_memory, found["w"].sharding
    assert found["one"].sharding == wanted["one"].sharding
    with jax.set_mesh(pair):
        moved = cast(wanted["one"], SaveArgs(dtype=jnp.bfloat16))
    assert moved.sharding == wanted["one"].sharding, moved.sharding
    with jax.enable_x64(True):
        wide = jnp.arange(4.0) / 3
    assert wide.dtype == np.float64
    save(path / "wide", {"w": wide}, dtype=jnp.bfloat16)
    assert load(path / "wide")["w"].dtype == jnp.bfloat16
    save(path / "wider", {"w": state()["one"]}, dtype=np.float64)
    assert load(path / "wider")["w"].dtype == np.float64


def settings_travel(path: Path) -> None:
    """A load on a thread of its own gives what a load here gives."""
    with jax.enable_x64(True):
        wide = {"w": jnp.arange(4.0) / 3}
        save(path, wide)
        assert load_async(path, wide).result(60)["w"].dtype == np.float64
        with jax.default_device(devices[5]):
            assert load_async(path, wide).result(60)["w"].devices() == {devices[5]}
    assert jax.sharding.get_mesh().empty  # nothing is left behind


CLAIMS: dict[str, Callable[[Path], None]] = {
    name: lambda path, setting=setting: under(setting, path)  # type: ignore[misc]
    for name, setting in SETTINGS.items()
}
CLAIMS |= {
    "a guard of the process": global_guard,
    "casts stay where they are": casts_stay,
    "settings travel": settings_travel,
}

print_claims(CLAIMS, folder)
