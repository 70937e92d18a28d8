"""Programs on checkpointers of single folders: each runs on Orbax and on holdfast, with the same
results.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as real
import pytest

from holdfast.checkpoint import structure
from holdfast.compat import orbax as ours
from tests.support.orbax_programs import assert_equal, outcome, run_both

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")  # Orbax's own


def state() -> dict[str, Any]:
    return {
        "w": jnp.arange(6.0).reshape(2, 3),
        "opt": [jnp.ones(2, jnp.bfloat16), {"n": 3}],
        "b": np.arange(2),
    }


def test_trees(tmp_path: Path) -> None:
    """StandardCheckpointer and PyTreeCheckpointer: saved once, replaced by force, restored with and
    without a target.
    """

    def program(ocp: Any, root: Path) -> Any:
        found = []
        for name in ("StandardCheckpointer", "PyTreeCheckpointer"):
            with getattr(ocp, name)() as checkpointer:
                wait = getattr(checkpointer, "wait_until_finished", lambda: None)
                by_name = (
                    {"state": state()} if name == "StandardCheckpointer" else {"item": state()}
                )
                checkpointer.save(root / name, **by_name)
                wait()
                again = outcome(
                    lambda checkpointer=checkpointer, path=root / name: checkpointer.save(
                        path, state()
                    )
                )
                checkpointer.save(root / name, state() | {"b": np.zeros(2)}, force=True)
                wait()
                missing = outcome(
                    lambda checkpointer=checkpointer: checkpointer.restore(root / "none")
                )
                about = checkpointer.metadata(root / name).item_metadata
                found += [
                    checkpointer.restore(root / name),
                    checkpointer.restore(root / name, state()),
                    again,
                    missing,
                    about["w"].shape,
                ]
        return found

    run_both(program, tmp_path)


def test_generic_checkpointers(tmp_path: Path) -> None:
    """Checkpointer and AsyncCheckpointer take a handler, and arguments in each of their forms;
    composites have several items.
    """

    def program(ocp: Any, root: Path) -> Any:
        with ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            checkpointer.save(root / "a", args=ocp.args.StandardSave(state()))
            checkpointer.wait_until_finished()
            standard = checkpointer.restore(root / "a", args=ocp.args.StandardRestore(state()))
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save(root / "b", state())
            tree = checkpointer.restore(root / "b", args=ocp.args.PyTreeRestore(state()))
        with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as checkpointer:
            checkpointer.save(root / "c", {"a": [1, "x"]})
            value = checkpointer.restore(root / "c")
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            items = ocp.args.Composite(
                state=ocp.args.StandardSave(state()), meta=ocp.args.JsonSave({"a": 1})
            )
            checkpointer.save(root / "d", items)
            wanted = ocp.args.Composite(
                state=ocp.args.StandardRestore(), meta=ocp.args.JsonRestore()
            )
            several = checkpointer.restore(root / "d", wanted)
        return standard, tree, value, dict(several.items())

    run_both(program, tmp_path)


def test_a_folder_of_orbax_is_read(tmp_path: Path) -> None:
    """What Orbax's checkpointers wrote restores here; ours is holdfast's layout."""
    real.PyTreeCheckpointer().save(tmp_path / "a", state())
    assert_equal(ours.PyTreeCheckpointer().restore(tmp_path / "a", state()), state())
    ours.PyTreeCheckpointer().save(tmp_path / "b", state())
    assert structure(tmp_path / "b").layout == "holdfast" and ours.StandardCheckpointer().structure(
        tmp_path / "b"
    )["w"].shape == (2, 3)


def test_metadata_makes_arguments_for_leaves(tmp_path: Path) -> None:
    """As Brax does: numbers too come back as the arrays that are asked for, cast where that is."""

    def program(ocp: Any, root: Path) -> Any:
        checkpointer = ocp.PyTreeCheckpointer()
        checkpointer.save(root / "a", ({"x": 0.5, "n": 3, "w": np.arange(3.0)}, {"b": True}))
        about = checkpointer.metadata(root / "a").item_metadata
        found = []
        for dtype in (None, np.float32):
            wanted = jax.tree.map(
                lambda _, dtype=dtype: ocp.RestoreArgs(restore_type=np.ndarray, dtype=dtype), about
            )
            found.append(
                checkpointer.restore(
                    root / "a", ocp.args.PyTreeRestore(restore_args=wanted), item=None
                )
            )
        return found

    run_both(program, tmp_path)


def test_what_is_no_handler_is_refused() -> None:
    """By name, with what it lacks."""

    class Mine:
        pass

    for call in (
        lambda: ours.Checkpointer(Mine()),
        lambda: ours.CompositeCheckpointHandler(data=Mine()),
    ):
        with pytest.raises(
            NotImplementedError,
            match=r"handler Mine.*save\(directory, args=\.\.\.\).*docs/from-orbax\.md",
        ):
            call()
