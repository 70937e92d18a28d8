"""Programs on v1's functions: each runs on Orbax and on holdfast, with the same results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as real_v0
import pytest
from orbax.checkpoint.experimental import v1 as real

from holdfast.checkpoint import load, save, structure
from holdfast.compat.orbax import v1 as ours
from tests.support.orbax_programs import assert_equal, outcome, run_both

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")  # Orbax's own


def state() -> dict[str, Any]:
    params = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3, jnp.bfloat16)}
    return {
        "params": params,
        "opt": optax.adam(1e-3).init(params),
        "step": 3,
        "lr": 0.5,
        "name": "net",
        "empty": {"d": {}, "t": ()},
    }


def test_a_tree(tmp_path: Path) -> None:
    """Saved, loaded without a target, with one and by its metadata, replaced on request,
    deleted.
    """

    def program(ocp: Any, root: Path) -> Any:
        path = str(root / "a")
        ocp.save(path, state(), custom_metadata={"run": 1})
        again = outcome(lambda: ocp.save(path, state()))
        ocp.save(path, state() | {"step": 4}, overwrite=True, custom_metadata={"run": 2})
        about = ocp.metadata(path)
        restored = ocp.load(path, state())
        assert isinstance(restored["opt"][0], optax.ScaleByAdamState)
        shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), about.metadata["params"])
        missing = (
            outcome(lambda: ocp.load(root / "none")),
            outcome(lambda: ocp.load(path, {"x": 1})),
        )
        found = (
            again,
            ocp.load(path),
            restored,
            shapes,
            about.metadata["step"],
            about.custom_metadata,
            missing,
            ocp.is_orbax_checkpoint(path),
        )
        return (
            *found,
            ocp.load(path, about)["params"],
            ocp.delete(path),
            outcome(lambda: ocp.delete(path)),
            ocp.delete(path, missing_ok=True),
        )

    run_both(program, tmp_path, v1=True)


def test_several_trees_and_responses(tmp_path: Path) -> None:
    """Checkpointables by name, some or all; asynchronous calls give their results."""

    def program(ocp: Any, root: Path) -> Any:
        response = ocp.save_checkpointables_async(
            root / "w", {"a": {"w": jnp.ones(2)}, "b": {"z": 1}}
        )
        response.result()
        assert ocp.save_async(root / "v", {"w": jnp.ones(2)}).result() is None
        some = ocp.load_checkpointables(root / "w", {"a": {"w": jnp.zeros(2)}})
        named = outcome(lambda: ocp.load_checkpointables(root / "w", {"no": None}))
        about = ocp.checkpointables_metadata(root / "w").metadata
        return ocp.load_checkpointables(root / "w"), some, named, about["b"]

    run_both(program, tmp_path, v1=True)
    assert_equal(
        ours.load_async(tmp_path / "holdfast" / "v").result(), {"w": jnp.ones(2)}
    )  # Orbax has it for safetensors alone


def test_a_partial_load(tmp_path: Path) -> None:
    """Context(pytree_options=...) leaves out what the target lacks; outside of it that is an
    error.
    """

    def program(ocp: Any, root: Path) -> Any:
        ocp.save(root / "a", state())
        target = {"params": state()["params"]}
        with ocp.Context(
            pytree_options=ocp.options.PyTreeOptions(
                loading=ocp.options.PyTreeOptions.Loading(partial_load=True)
            )
        ):
            part = ocp.load(root / "a", target)
        return part, outcome(lambda: ocp.load(root / "a", target))

    run_both(program, tmp_path, v1=True)


def test_each_reads_the_checkpoints_of_the_other_side(tmp_path: Path) -> None:
    """Orbax's v0 and v1 checkpoints load here; ours are holdfast's."""
    real.save(tmp_path / "v1", state())
    with real_v0.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "v0", {"w": jnp.ones(2)})
    assert_equal(ours.load(tmp_path / "v1", state()), real.load(tmp_path / "v1", state()))
    assert_equal(ours.load(tmp_path / "v0"), {"w": jnp.ones(2)})
    ours.save(tmp_path / "ours", state())
    assert (
        structure(tmp_path / "ours").layout == "holdfast" and load(tmp_path / "ours")["step"] == 3
    )


def test_what_is_not_covered_says_what_to_do(tmp_path: Path) -> None:
    """Parts of a checkpoint."""
    refused = {
        r"delete of an item": lambda: ours.delete(tmp_path / "a", checkpointable_name="x"),
    }
    for message, call in refused.items():
        with pytest.raises(NotImplementedError, match=rf"{message}.*docs/from-orbax\.md"):
            call()
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("beside", ["export", "model.safetensors"])
def test_a_root_of_steps_is_not_deleted(beside: str, tmp_path: Path) -> None:
    """What lies beside the steps makes no checkpoint of their root: `delete` finds none."""
    root = tmp_path / "root"
    save(root / "1", {"n": 1}, step=1)
    if beside == "export":
        save(tmp_path / "made", {"a": jnp.ones(2)}, layout="orbax")
        (tmp_path / "made/default").rename(root / beside)
    else:
        (root / beside).write_bytes(bytes(8))
    with pytest.raises(FileNotFoundError):
        ours.delete(root)
    assert load(root) == {"n": 1}
