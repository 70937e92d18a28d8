"""Checkpoints that are saved in parts: the same on Orbax and on holdfast."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holdfast.checkpoint import CheckpointError, structure, verify
from holdfast.compat.orbax import v1 as ours
from tests.support.orbax_programs import outcome, run_both

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")  # Orbax's own

PARTS = [
    {"w": jnp.arange(4.0), "n": 3},
    {"x": {"y": jnp.ones((2, 3)), "z": [jnp.zeros(2), 5]}},
    {"x": {"q": jnp.arange(6, dtype=jnp.int32)}, "a": np.arange(3.0)},
]


def test_parts_become_one_checkpoint(tmp_path: Path) -> None:
    """Nothing is at the path before `finalize`; then the tree has all parts, and later metadata
    counts.
    """

    def program(ocp: Any, root: Path) -> Any:
        path = root / "a"
        for number, part in enumerate(PARTS):
            ocp.partial.save(path, part, custom_metadata={"last": number, f"m{number}": number})
        before = path.exists()
        ocp.partial.finalize(path)
        beside = sorted(each.name for each in root.iterdir())
        return before, beside, ocp.load(path), ocp.metadata(path).custom_metadata

    found = run_both(program, tmp_path, v1=True)
    assert found[1] == ["a"] and set(found[2]) == {"a", "n", "w", "x"}
    assert verify(tmp_path / "holdfast" / "a").leaves == 7


def test_wrong_orders(tmp_path: Path) -> None:
    """No second checkpoint at a path, none without parts, and no leaf in two parts."""

    def program(ocp: Any, root: Path) -> Any:
        save = ocp.partial.save
        finalize = ocp.partial.finalize
        found = [outcome(lambda: finalize(root / "a"))]
        save(root / "a", PARTS[0])
        found.append(_kind(lambda: save(root / "a", {"w": jnp.zeros(4)})))
        save(root / "a", {"b": 1})
        response = ocp.partial.save_async(root / "a", {"c": jnp.ones(2)})
        response.result()
        finalize(root / "a")
        found += [
            outcome(lambda: finalize(root / "a")),
            outcome(lambda: save(root / "a", {"d": 1})),
        ]
        return [*found, sorted(ocp.load(root / "a"))]

    run_both(program, tmp_path, v1=True)


def test_a_part_that_fails_leaves_the_others(tmp_path: Path) -> None:
    """The error is told once; its leaves may be saved again, and `finalize` has all but that."""
    save = ours.partial.save
    path = tmp_path / "a"
    save(path, PARTS[0])
    (tmp_path / "a.partial_save" / "00001.part").write_text("a file, where a folder is to be")
    with pytest.raises(CheckpointError, match="Not a directory"):
        save(path, PARTS[2])
    with pytest.raises(ValueError, match="object"):
        save(path, {"b": object()})
    save(path, PARTS[2])
    save(path, {"b": 1})
    ours.partial.finalize(path)
    assert set(ours.load(path)) == {"a", "b", "n", "w", "x"}


def test_parts_lie_beside_the_checkpoint(tmp_path: Path) -> None:
    """In NAME.partial_save until `finalize`, which leaves the checkpoint alone."""

    def program(ocp: Any, root: Path) -> Any:
        def names() -> list[str]:
            return sorted(each.name for each in root.iterdir())

        ocp.partial.save(root / "a", {"x": 1})
        before = names()
        ocp.partial.finalize(root / "a")
        return before, names()

    assert run_both(program, tmp_path, v1=True) == (["a.partial_save"], ["a"])


def _kind(call: Any) -> str:
    with pytest.raises(Exception, match=r"previous partial save|earlier part of") as caught:
        call()
    return type(caught.value).__name__


@pytest.mark.parametrize("part", [{"x": 1}, {"x": {"y": {"deep": 1}}}, jnp.ones(2)])
def test_parts_that_do_not_fit(tmp_path: Path, part: Any) -> None:
    """A leaf above or below another, and what is no dict, are ValueErrors; the other parts stay."""
    ours.partial.save(tmp_path / "a", PARTS[1])
    with pytest.raises(ValueError, match=r"previous partial save|earlier part|expected a dict"):
        ours.partial.save(tmp_path / "a", part)
    ours.partial.finalize(tmp_path / "a")
    assert list(ours.load(tmp_path / "a")) == ["x"]


def test_a_sharded_leaf_keeps_its_sharding(tmp_path: Path) -> None:
    """Parts keep what they know of devices, and no part is a step of the root that it lies in."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    ours.partial.save(tmp_path / "5", {"w": jax.device_put(jnp.ones(4), sharding)})
    ours.partial.save(tmp_path / "5", {"v": jnp.zeros(3)})
    with ours.training.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.latest is None
    ours.partial.finalize(tmp_path / "5")
    assert structure(tmp_path / "5").items["state"].tree["w"].sharding == sharding


KILLED = """
import os, signal, sys
import jax.numpy as jnp
from holdfast.compat.orbax import v1 as ocp
for number in range(2):
    ocp.partial.save(sys.argv[1], {f"w{number}": jnp.ones(4)})
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_job_that_dies_leaves_nothing_to_load(tmp_path: Path) -> None:
    """Killed between two parts: they lie in NAME.partial_save, no step is listed, then or when the
    next job has begun anew, and its parts are not in the next one's checkpoint.
    """
    path = tmp_path / "3"
    command = [sys.executable, "-c", KILLED, str(path)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(command, env=environment, timeout=100, check=False)
    assert ran.returncode == -signal.SIGKILL
    assert [each.name for each in tmp_path.iterdir()] == ["3.partial_save"]
    with ours.training.Checkpointer(tmp_path) as checkpointer:
        assert list(checkpointer.checkpoints) == []
    with pytest.raises(FileNotFoundError, match="was not called for"):
        ours.partial.finalize(path)
    ours.partial.save(path, {"v": jnp.ones(2)})
    ours.partial.finalize(path)
    assert list(ours.load(path)) == ["v"]
    assert sorted(each.name for each in tmp_path.iterdir() if each.name[0] != ".") == ["3"]
