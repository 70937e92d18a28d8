"""How v1's contexts save and load arrays: cast, cut, padded, described; on both libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.orbax_programs import outcome, run_both

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sharding info not provided"),  # Orbax's own
    # A load of Orbax's that fails leaves coroutines behind.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

TREE = {"a": jnp.arange(4.0), "b": {"w": np.arange(3)}, "l": [jnp.ones((2, 3))], "t": "text"}


def test_arrays_are_cast_as_they_are_saved(tmp_path: Path) -> None:
    """By one dtype for all, and by one for each leaf, which counts first."""

    def program(ocp: Any, root: Path) -> Any:
        one_for_all = ocp.Context()
        one_for_all.array.saving.storage_options.dtype = jnp.float16
        with one_for_all:
            ocp.save(root / "all", TREE)
            ocp.partial.save(root / "parts", {"a": TREE["a"]})
            ocp.partial.save(root / "parts", {"b": TREE["b"]})
            ocp.partial.finalize(root / "parts")
        for_each = ocp.Context(one_for_all)
        options = ocp.options.ArrayOptions.Saving.StorageOptions
        for_each.array.saving.scoped_storage_options_creator = lambda keypath, value: (
            options(dtype=np.int16) if "w" in jax.tree_util.keystr(keypath) else None
        )
        with ocp.training.Checkpointer(root / "steps", context=for_each) as steps:
            steps.save(0, TREE)
        with for_each:
            ocp.save_checkpointables(root / "each", {"state": TREE, "more": TREE["b"]})
        loaded = [ocp.load(root / folder) for folder in ("all", "parts", "steps/0")]
        return [*loaded, ocp.load_checkpointables(root / "each")]

    run_both(program, tmp_path, v1=True)


def test_arrays_of_other_shapes_are_cut_and_padded(tmp_path: Path) -> None:
    """With the option, on the devices and in the dtype of the target; numpy's stay as saved, and so
    does what a target of types asks for.
    """
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def like(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=device)  # type: ignore[no-untyped-call]

    targets = [
        {"a": like(6), "b": {"w": np.zeros(5, int)}, "l": [like(3, 2)], "t": ""},
        {"a": like(2, dtype=jnp.int32), "b": {"w": np.zeros(3, int)}, "l": [like(1, 4)], "t": ""},
        {"a": like(2, 2), "b": {"w": np.zeros(3, int)}, "l": [like(2, 3)], "t": ""},
        {"a": like(6), "b": {"w": np.ndarray}, "l": [jax.Array], "t": str},
    ]

    def program(ocp: Any, root: Path) -> Any:
        ocp.save(root / "c", TREE)
        context = ocp.Context()
        context.array.loading.enable_padding_and_truncation = True
        with context:
            found = [outcome(lambda each=each: ocp.load(root / "c", each)) for each in targets]
        context.pytree.loading.partial_load = True
        with context:
            found.append(ocp.load(root / "c", {"a": like(6)}))
        return [*found, outcome(lambda: ocp.load(root / "c", targets[0]))]

    run_both(program, tmp_path, v1=True)


def test_metadata_says_how_arrays_lie(tmp_path: Path) -> None:
    """The chunks of arrays, which are their shards, and of numpy's arrays; it serves as a target
    with its leaves changed.
    """

    def program(ocp: Any, root: Path) -> Any:
        ocp.save(root / "c", TREE)
        known = ocp.metadata(root / "c").metadata
        arrays = [known["a"], known["b"]["w"], known["l"][0]]
        stored = [each.storage_metadata for each in arrays]
        return [
            [(each.chunk_shape, each.write_shape) for each in stored],
            ocp.load(root / "c", known),
            known["t"],
        ]

    run_both(program, tmp_path, v1=True)


def test_trees_are_merged(tmp_path: Path) -> None:
    """Leaves of several trees in one; a leaf of two is a ValueError, or the last one counts."""

    def program(ocp: Any, root: Path) -> Any:
        merge = ocp.tree.merge
        return [
            merge({"a": 1}, {"b": {"c": 2}}, {"b": {"d": 3}}),
            outcome(lambda: merge({"a": 1}, {"a": 2})),
            merge({"a": 1, "b": [1, 2]}, {"a": 2}, overwrite=True),
            merge(),
        ]

    run_both(program, tmp_path, v1=True)
