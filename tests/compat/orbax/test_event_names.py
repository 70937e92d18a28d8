"""Dashboards that know Orbax's names see holdfast: each name is told once, and Orbax has it too."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint
import pytest

from holdfast.compat import orbax as stand_in

_HEARD: Counter[str] = Counter()


@pytest.fixture(scope="module", autouse=True)
def _listeners() -> None:
    """Listeners of each kind: they cannot be taken back."""

    def hear(event: str, **labels: str | int) -> None:
        _HEARD[event] += 1

    def hear_value(event: str, value: float, **labels: str | int) -> None:
        _HEARD[event] += 1

    def hear_seconds(event: str, duration_secs: float, **labels: str | int) -> None:
        _HEARD[event] += 1

    jax.monitoring.register_event_listener(hear)
    jax.monitoring.register_scalar_listener(hear_value)
    jax.monitoring.register_event_duration_secs_listener(hear_seconds)


def _names_of(ocp: Any, root: Path) -> Counter[str]:
    """Returns the names of Orbax's that a save and a restore tell."""
    _HEARD.clear()
    with ocp.CheckpointManager(root) as manager:
        manager.save(1, args=ocp.args.StandardSave({"w": jnp.ones(4)}))
        manager.wait_until_finished()
        manager.restore(1, args=ocp.args.StandardRestore({"w": jnp.ones(4)}))
    return Counter(
        {
            name: count
            for name, count in _HEARD.items()
            if name.startswith(("/jax/orbax/write", "/jax/orbax/read", "/jax/checkpoint/write"))
        }
    )


def test_each_name_is_orbaxs_and_is_told_once(tmp_path: Path) -> None:
    theirs = _names_of(orbax.checkpoint, tmp_path / "theirs")
    ours = _names_of(stand_in, tmp_path / "ours")
    assert set(ours) <= set(theirs), set(ours) - set(theirs)
    assert set(ours.values()) == {1}
    assert {
        "/jax/checkpoint/write/async/blocking_duration_secs",
        "/jax/checkpoint/write/async/total_duration_secs",
        "/jax/orbax/write/gbytes",
        "/jax/orbax/write/success",
        "/jax/orbax/read/total_duration_secs",
    } <= set(ours)
