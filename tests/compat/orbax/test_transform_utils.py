"""Transforms: the same programs on Orbax's and on holdfast's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.orbax_programs import outcome, run_both

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")  # Orbax's own


def test_trees_are_transformed(tmp_path: Path) -> None:
    """Renamed, by regular expressions too, computed, left alone, and with both defaults."""

    def program(ocp: Any, root: Path) -> Any:
        transform = ocp.Transform
        original = {"a": 1, "b": {"c": 5, "d": [0, 1]}, "b1": {"c": 2}, "b2": {"c": 3}}
        rules = {
            "a1": transform(original_key="a"),
            "b": {"c": transform(value_fn=lambda value: value * 2)},
            r"x(\d.*)": transform(original_key=r"b\1"),
            "sum": transform(multi_value_fn=lambda path, tree: tree["a"] + sum(tree["b"]["d"])),
            "own": transform(use_fallback=True),
        }
        new = {"a1": 0, "b": {"c": 0}, "x1": {"c": 0}, "x2": {"c": 0}, "sum": 0, "own": 9, "f": 7}
        missing = {"x3": {"c": 0}} | new
        return [
            ocp.apply_transformations(original, rules, new),
            ocp.apply_transformations(original, {}, {"a": 7, "z": 8}, default_to_original=False),
            outcome(lambda: ocp.apply_transformations(original, rules, missing)),
        ]

    run_both(program, tmp_path)


def test_a_restore_is_transformed(tmp_path: Path) -> None:
    """Only what the new tree needs is read; the rest of it stays as it was given."""

    def program(ocp: Any, root: Path) -> Any:
        checkpointer = ocp.PyTreeCheckpointer()
        saved = {"old": {"w": jnp.arange(4.0), "n": np.arange(3)}, "same": 2.5, "out": jnp.ones(2)}
        checkpointer.save(root / "a", saved)
        item = {"new": {"w": jnp.zeros(4), "n": np.zeros(3)}, "same": 0.0, "own": 7, "twice": 0}
        args = ocp.checkpoint_utils.construct_restore_args(item)
        double = ocp.RestoreTransform(
            multi_value_fn=lambda path, tree, args: tree["same"] * 2,
            multi_value_fn_input_args={"same": ocp.RestoreArgs()},
        )
        transforms = {
            r"new/(.*)": ocp.Transform(original_key=r"old/\1"),
            "twice": double,
        }
        return [
            checkpointer.restore(root / "a", item=item, restore_args=args, transforms=transforms),
            checkpointer.restore(root / "a", item=item, restore_args=args, transforms={}),
            outcome(lambda: checkpointer.restore(root / "a", transforms=transforms)),
        ]

    run_both(program, tmp_path)
