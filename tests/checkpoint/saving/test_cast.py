"""What is cast at save, and what stays; and what comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holdfast.checkpoint import CheckpointManager, Json, TreeMismatch, load, save, structure
from holdfast.checkpoint.format.tree import FlatTree
from holdfast.checkpoint.saving.cast import cast_tree


def for_params(path: str) -> Any:
    return jnp.bfloat16 if path.startswith("params.") else None


def state() -> dict[str, Any]:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), "d")
    w = jax.device_put(
        jnp.arange(1 << 16, dtype=jnp.float32).reshape(8, -1) / 3,
        jax.NamedSharding(mesh, jax.P("d")),
    )
    return {
        "params": {"w": w, "ids": jnp.arange(3), "host": np.ones(3, np.float32)},
        "opt": {"mu": jnp.ones(4)},
        "lr": 0.1,
        "step": 3,
    }


def test_params_in_half_restore_with_a_cast(tmp_path: Path) -> None:
    """A predicate on paths says which: half as many bytes on disk, the optimizer whole; without
    `cast` the difference is an error.
    """
    tree = state()
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, tree).wait()
        manager.save(2, tree, dtype=for_params).wait()
        whole, half = (
            sum(file.stat().st_size for file in (tmp_path / str(step)).rglob("*.safetensors"))
            for step in (1, 2)
        )
        assert half < 0.52 * whole
        saved = manager.structure(2).items["state"].tree
        assert (
            saved["params"]["w"].dtype == jnp.bfloat16 and saved["opt"]["mu"].dtype == jnp.float32
        )
        with pytest.raises(TreeMismatch, match="bfloat16"):
            manager.restore(2, tree)
        back = manager.restore(2, tree, cast=True)
    want = tree["params"]["w"].astype(jnp.bfloat16).astype(jnp.float32)
    assert (
        back["params"]["w"].dtype == jnp.float32
        and back["params"]["w"].sharding == tree["params"]["w"].sharding
    )
    assert (
        (back["params"]["w"] == want).all()
        and back["lr"] == 0.1
        and back["params"]["ids"].dtype == jnp.int32
    )


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.float16, np.dtype(np.float16)])
def test_a_dtype_is_for_all_floating_point_arrays(dtype: Any) -> None:
    """Integers, keys, Python's numbers and what has the dtype already stay the objects that they
    were.
    """
    tree = state() | {
        "key": jax.random.key(0),
        "scalar": np.float32(1.5),
        "there": np.ones(2, jnp.dtype(dtype)),
    }
    flat = FlatTree.of(tree)
    cast = cast_tree(flat, dtype).tree()
    assert all(cast["params"][name].dtype == jnp.dtype(dtype) for name in ("w", "host")) and cast[
        "scalar"
    ].dtype == jnp.dtype(dtype)
    assert (
        isinstance(cast["params"]["host"], np.ndarray)
        and cast["params"]["w"].sharding == tree["params"]["w"].sharding
    )
    assert (
        cast["params"]["ids"] is tree["params"]["ids"]
        and cast["key"] is tree["key"]
        and cast["there"] is tree["there"]
    )
    assert type(cast["lr"]) is float and cast_tree(flat, None) is flat


def test_a_dtype_without_floating_point_is_refused(tmp_path: Path) -> None:
    """The leaf and what was given are named, and nothing is saved."""
    for dtype in (jnp.int8, lambda path: "text"):
        with pytest.raises(
            ValueError,
            match=r"save: dtype=.* for the leaf 'opt\.mu': expected a floating-point dtype",
        ):
            save(tmp_path / "a", state(), dtype=dtype)
    assert not (tmp_path / "a" / "checkpoint.json").exists()


@pytest.mark.parametrize(
    ("number", "dtype"), [(1e6, "float16"), (-np.inf, "float8_e4m3fn"), (3.4e38, "bfloat16")]
)
def test_a_number_that_the_dtype_cannot_hold_is_refused(
    number: float, dtype: str, tmp_path: Path
) -> None:
    """In arrays of numpy, and in its scalars, by the leaf; what is inf or nan already is saved
    where the dtype has it.
    """
    for leaf in (np.array([1, number], np.float32), np.float32(number)):
        with pytest.raises(ValueError, match=r"save: dtype=.*'a\.w': it holds .* cannot hold"):
            save(tmp_path, {"a": {"w": leaf}}, dtype=dtype)
    save(tmp_path, {"w": np.array([np.inf, np.nan, 1e-30], np.float32)}, dtype="float16")
    assert np.array_equal(load(tmp_path)["w"], np.array([np.inf, np.nan, 0]), equal_nan=True)


def test_a_single_save_casts_in_either_layout(tmp_path: Path) -> None:
    """JSON items are no trees; Orbax's layout has the cast arrays too."""
    save(tmp_path / "a", items={"model": state(), "config": Json({"lr": 0.1})}, dtype=for_params)
    assert load(tmp_path / "a", item="model")["params"]["w"].dtype == jnp.bfloat16 and load(
        tmp_path / "a", item="config"
    ) == {"lr": 0.1}
    save(tmp_path / "b", state(), dtype=for_params, layout="orbax")
    assert structure(tmp_path / "b").items["default"].tree["params"]["w"].dtype == jnp.bfloat16
