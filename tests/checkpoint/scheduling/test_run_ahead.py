"""A program that never waits for its devices is kept within a few steps of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from holdfast.checkpoint import CheckpointManager, EveryNSteps, Options
from holdfast.checkpoint.scheduling.run_ahead import RunAhead

STEPS = 12
STEP_S = 0.05


def _burn(array: jax.Array, rounds: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, rounds, lambda _, each: jnp.sin(each) + 1e-3, array)


@pytest.fixture(scope="module")
def rounds() -> jax.Array:
    """How many rounds of `_burn` take STEP_S here."""
    array = jnp.zeros(1 << 12)
    tried = 200
    burn = jax.jit(_burn)
    burn(array, tried).block_until_ready()
    began_s = time.perf_counter()
    burn(array, tried).block_until_ready()
    return jnp.int32(tried * STEP_S / (time.perf_counter() - began_s) + 1)


def most_ahead(rounds: jax.Array, note: Callable[[int, Any], object], **constant: Any) -> int:
    """Makes steps that donate their state, without ever waiting; returns by how many the devices
    were behind at most.
    """

    def advance(state: Any, rounds: jax.Array) -> tuple[Any, jax.Array]:
        state = state | {"w": _burn(state["w"], rounds), "n": state["n"] + 1}
        return state, state["n"] * 2

    step_of = jax.jit(advance, donate_argnums=0)
    state: Any = {"n": jnp.int32(0), "w": jnp.zeros(1 << 12)}
    jax.block_until_ready(step_of(state, jnp.int32(1)))
    state = {"n": jnp.int32(0), "w": jnp.zeros(1 << 12)}
    made: list[Any] = []
    most = 0
    for step in range(STEPS):
        state, made_it = step_of(state, rounds)
        made.append(made_it)
        note(step, constant | state)
        most = max(most, sum(not each.is_ready() for each in made))
    jax.block_until_ready(state)
    return most


def test_a_loop_that_never_waits_stays_near_its_devices(tmp_path: Path, rounds: jax.Array) -> None:
    """Two steps, by `save` with the state as by `should_save` without; with None as many as jax
    takes, so the steps are long enough for this to tell.
    """
    policy = EveryNSteps(1000)
    with CheckpointManager(tmp_path / "a", save_policy=policy) as manager:
        assert 1 <= most_ahead(rounds, manager.save) <= 3
        assert 1 <= most_ahead(rounds, lambda step, _: manager.should_save(STEPS + step)) <= 3
        asked = 2 * STEPS
        assert 1 <= most_ahead(rounds, lambda n, _: manager.reached_preemption(asked + n)) <= 3
    unbounded = Options(max_steps_ahead=None)
    with CheckpointManager(tmp_path / "b", save_policy=policy, options=unbounded) as manager:
        assert most_ahead(rounds, manager.save) > 6


def test_what_a_step_leaves_as_it_is_tells_nothing(rounds: jax.Array) -> None:
    """Weights that are not trained come first in a state, and there are keys in it."""
    frozen = {"a": {str(number): jnp.zeros(2) for number in range(40)}, "key": jax.random.key(0)}
    assert most_ahead(rounds, RunAhead(2).made, **frozen) <= 3
    assert most_ahead(rounds, RunAhead(4).made, **frozen) in (4, 5)


def test_a_step_that_is_noted_twice_is_one(rounds: jax.Array) -> None:
    """Once without its state, as where a loop asks first whether it is to stop."""
    ahead = RunAhead(2)

    def note(step: int, state: Any) -> None:
        ahead.made(step, state)
        ahead.made(step)
        ahead.made(step, state)

    assert 2 <= most_ahead(rounds, note) <= 3


def test_what_no_computation_makes_is_not_waited_for() -> None:
    """numpy, what was deleted, what is no tree, and what cannot be saved at all."""
    deleted = jnp.zeros(3)
    deleted.delete()
    ahead = RunAhead(1)
    odd = [{"a": np.zeros(3), 1: "text"}, {"x": deleted}, None, (), object(), {"x": jnp.nan}]
    with jax.debug_nans(True), jax.transfer_guard("disallow"):
        for step, state in enumerate(odd):
            ahead.made(step, state)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "2"])
def test_a_bound_that_is_none(wrong: Any) -> None:
    """Refused with what was found."""
    with pytest.raises(ValueError, match=r"max_steps_ahead must be a whole number above 0"):
        Options(max_steps_ahead=wrong)
