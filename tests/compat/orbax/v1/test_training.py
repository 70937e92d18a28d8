"""Programs on v1's training.Checkpointer: each runs on Orbax and on holdfast, with the same
results.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from holdfast.checkpoint import SaveFailed
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.compat.orbax import v1 as ours
from tests.support.orbax_programs import outcome, run_both

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")  # Orbax's own


def test_steps_are_saved_kept_and_loaded(tmp_path: Path) -> None:
    """Policies choose and keep the same steps; metrics, metadata and errors are the same."""

    def program(ocp: Any, root: Path) -> Any:
        save = ocp.training.save_decision_policies
        keep = ocp.training.preservation_policies
        policies = {
            "save_decision_policy": save.FixedIntervalPolicy(2),
            "preservation_policy": keep.LatestN(2),
        }
        with ocp.training.Checkpointer(root, **policies) as checkpointer:
            nothing = checkpointer.latest, outcome(lambda: checkpointer.load())
            saved = [
                checkpointer.save(
                    step, {"w": jnp.full(2, step), "n": step}, metrics={"loss": 1.0 * step}
                )
                for step in range(7)
            ]
            existing = outcome(lambda: checkpointer.save(6, {"w": jnp.ones(2)}))
            response = checkpointer.save_async(
                8, {"w": jnp.zeros(2), "n": 8}, custom_metadata={"a": 1}
            )
            done = response.result(), checkpointer.save_async(9, {"w": jnp.zeros(2)})
            steps = [about.step for about in checkpointer.checkpoints], checkpointer.latest.step
            loads = (
                checkpointer.load(),
                checkpointer.load(6, {"w": jnp.zeros(2), "n": 0}),
                outcome(lambda: checkpointer.load(1)),
            )
            about = checkpointer.metadata(6)
            facts = (
                about.metadata["w"].shape,
                about.metrics,
                about.step,
                checkpointer.metadata(8).custom_metadata,
            )
            return nothing, saved, existing, done, steps, loads, facts

    run_both(program, tmp_path, v1=True)


def test_a_step_during_another_save_is_passed_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a policy no save waits for the one in flight, as v1 has it."""
    opened = threading.Event()
    write = LocalStorage.write

    def write_later(self: LocalStorage, name: str, *args: Any) -> None:
        if name.endswith(".safetensors"):
            assert opened.wait(60)
        write(self, name, *args)

    monkeypatch.setattr(LocalStorage, "write", write_later)
    tree = {"w": jnp.zeros(2)}
    with ours.training.Checkpointer(tmp_path / "run") as checkpointer:
        first = checkpointer.save_async(1, tree)
        second = checkpointer.save_async(2, tree)
        opened.set()
        assert first is not None and first.result()
        assert second is None
        assert checkpointer.save(3, tree)
        assert [about.step for about in checkpointer.checkpoints] == [1, 3]


def test_a_step_that_another_saved_is_there(tmp_path: Path) -> None:
    """It is refused as one of its own is, though it was not listed."""
    with ours.training.Checkpointer(tmp_path) as checkpointer:
        with ours.training.Checkpointer(tmp_path) as other:
            other.save(1, {"x": 1})
        with pytest.raises(ours.training.errors.StepAlreadyExistsError, match="already in"):
            checkpointer.save(1, {"x": 2})
        assert checkpointer.load(1) == {"x": 1}


def test_several_trees_in_a_step(tmp_path: Path) -> None:
    """Checkpointables by name, loaded by name or all; a step is replaced and deleted on request."""

    def program(ocp: Any, root: Path) -> Any:
        with ocp.training.Checkpointer(root) as checkpointer:
            checkpointer.save_checkpointables(0, {"model": {"w": jnp.ones(2)}, "opt": {"n": 1}})
            checkpointer.save_checkpointables(1, {"model": {"w": jnp.ones(2)}, "opt": {"n": 2}})
            every = checkpointer.load_checkpointables()
            one = checkpointer.load_checkpointables(0, {"opt": {"n": 0}})
            replaced = checkpointer.save_checkpointables(
                1, {"model": {"w": jnp.zeros(2)}}, overwrite=True
            )
            again = checkpointer.load_checkpointables(1)
            deleted = (
                checkpointer.delete(0),
                outcome(lambda: checkpointer.delete(0)),
                checkpointer.delete(0, missing_ok=True),
            )
            return (
                every,
                one,
                replaced,
                again,
                deleted,
                [about.step for about in checkpointer.checkpoints],
            )

    run_both(program, tmp_path, v1=True)


def test_what_is_not_covered_says_what_to_do(tmp_path: Path) -> None:
    """Parts of a step."""
    with (
        ours.training.Checkpointer(tmp_path) as checkpointer,
        pytest.raises(NotImplementedError, match=r"delete.*whole step"),
    ):
        checkpointer.delete(0, checkpointable_name="x")


def _refused(*given: Any, **more: Any) -> None:
    raise PermissionError("not here")


def test_a_response_is_of_its_own_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises the error of a save that failed, though `wait` has raised it, and another one has
    ended since.
    """
    tree = {"w": jnp.zeros(2)}
    with ours.training.Checkpointer(tmp_path / "run") as checkpointer:
        with monkeypatch.context() as patched:
            patched.setattr(LocalStorage, "write", _refused)
            failed = checkpointer.save_async(1, tree)
            with pytest.raises(SaveFailed, match="not here"):
                checkpointer.wait()
        assert checkpointer.save(2, tree)
        assert failed is not None
        for _ in range(2):
            with pytest.raises(SaveFailed, match="not here"):
                failed.result()


def test_a_step_that_is_not_wanted_is_not_prepared(tmp_path: Path) -> None:
    """Nothing of it is looked at."""

    def program(ocp: Any, root: Path) -> Any:
        policy = ocp.training.save_decision_policies.FixedIntervalPolicy(2)
        with ocp.training.Checkpointer(root, save_decision_policy=policy) as checkpointer:
            checkpointer.save(0, {"w": jnp.ones(2)})
            bad: Any = {"metrics": {"loss": object()}}
            state = {"w": jnp.ones(2)}
            return checkpointer.save(1, state, **bad), checkpointer.save_async(3, state, **bad)

    assert run_both(program, tmp_path, v1=True) == (False, None)
