"""Roots that two libraries write to: Orbax, Flax and Keras before holdfast and beside it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from click.testing import CliRunner

from holdfast.checkpoint import CheckpointManager, load, structure, verify
from holdfast.cli.entry import main
from tests.support.libraries import need


def run(*words: object, code: int = 0) -> str:
    """Runs a command; returns what it says."""
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == code, (words, result.output, result.exception)
    return result.output


def answer(*words: object) -> Any:
    return json.loads(run(*words, "--json"))


def tree(value: float) -> dict[str, Any]:
    return {"w": jnp.full(4, value, jnp.float32)}


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        os.fspath(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("prefix", [None, "checkpoint"])
def test_a_migrated_root_through_all_commands(prefix: str | None, tmp_path: Path) -> None:
    """Orbax's step 1, and 2 and 3 of ours: every command has the three, in both ways of names, and
    Orbax's is never changed.
    """
    root = tmp_path / "run"
    options = ocp.CheckpointManagerOptions(step_prefix=prefix)
    with ocp.CheckpointManager(root, options=options) as orbax:
        orbax.save(1, args=ocp.args.StandardSave(tree(1)))
    (name,) = os.listdir(root)
    theirs = files_of(root / name)
    with CheckpointManager(root) as manager:
        assert np.all(manager.restore(None, tree(0))["w"] == 1)
        for step in (2, 3):
            manager.save(step, tree(step))
    rows = answer("ls", root)["steps"]
    assert [(row["step"], row["layout"]) for row in rows] == [
        (1, "orbax"),
        (2, "holdfast"),
        (3, "holdfast"),
    ]
    assert answer("show", root)["step"] == 3 and answer("show", root, "--step=1")["step"] == 1
    assert [each["step"] for each in answer("verify", root, "--all")["steps"]] == [1, 2, 3]
    run("diff", root / name, root / "2", "--item=default", code=2)
    run("diff", root / "3", root / "3")
    run("cp", root, tmp_path / "copy")
    assert [row["step"] for row in answer("ls", tmp_path / "copy")["steps"]] == [1, 2, 3]
    for layout in ("holdfast", "orbax", "safetensors"):
        run("convert", root, tmp_path / layout, f"--to={layout}", "--all")
        assert [row["step"] for row in answer("ls", tmp_path / layout)["steps"]] == [1, 2, 3]
    assert load(root / name)["w"][0] == 1 and structure(root, 1).layout == "orbax"
    assert load(root)["w"][0] == 3 and verify(root).step == 3
    run("sweep", root)
    assert answer("prune", root, "--keep=last:1")["deleted"] == [2]
    with CheckpointManager(root) as manager:
        assert manager.all_steps() == [1, 3]
        manager.delete(3)
        assert manager.all_steps() == [1] and manager.latest_step() == 1
    assert files_of(root / name) == theirs
    with ocp.CheckpointManager(root, options=options) as orbax:
        assert orbax.latest_step() == 1


@pytest.mark.filterwarnings("ignore")
def test_flax_beside_holdfast(tmp_path: Path) -> None:
    """Flax's folders of Orbax's are steps, before our first one and after it; its files of msgpack
    are none. Flax goes on with its own.
    """
    flax = need("flax", "make slow-libraries")
    checkpoints = need("flax.training.checkpoints", "make slow-libraries")
    root = tmp_path / "run"

    def save_by_flax(step: int, orbax: bool) -> None:
        flax.config.update("flax_use_orbax_checkpointing", orbax)
        checkpoints.save_checkpoint(os.fspath(root), tree(step), step, keep=9)

    uses_orbax = flax.config.flax_use_orbax_checkpointing
    try:
        save_by_flax(0, orbax=True)
        with CheckpointManager(root) as manager:
            assert manager.all_steps() == [0]
            assert manager.restore(None, tree(9))["w"][0] == 0
            manager.save(1, tree(1))
        save_by_flax(2, orbax=True)
        save_by_flax(5, orbax=False)
    finally:
        flax.config.update("flax_use_orbax_checkpointing", uses_orbax)
    assert (root / "checkpoint_5").is_file()
    with CheckpointManager(root) as manager:
        assert manager.all_steps() == [0, 1, 2]
        assert manager.restore(None, tree(9))["w"][0] == 2
    assert load(root)["w"][0] == 2 and load(root / "1")["w"][0] == 1
    assert checkpoints.latest_checkpoint(os.fspath(root)) == os.fspath(root / "checkpoint_5")
    found = checkpoints.restore_checkpoint(os.fspath(root), None, step=2)
    assert np.asarray(found["w"]).tolist() == [2, 2, 2, 2]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_keras_beside_holdfast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keras's callback saves by Orbax, and its own files lie in the same folder: the steps are
    Orbax's, and ours.
    """
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    keras = need("keras", "make slow-libraries")
    root = tmp_path / "run"
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile(optimizer="sgd", loss="mse")
    x = np.ones((8, 4), np.float32)
    callback = keras.callbacks.OrbaxCheckpoint(os.fspath(root), max_to_keep=2)
    model.fit(x, x[:, :1], epochs=2, verbose=0, callbacks=[callback])
    model.save(root / "model.keras")
    model.save_weights(root / "epoch_9.weights.h5")
    steps = sorted(int(name) for name in os.listdir(root) if name.isdigit())
    theirs = {step: files_of(root / str(step)) for step in steps}
    assert steps
    with CheckpointManager(root) as manager:
        assert manager.all_steps() == steps
        manager.save(steps[-1] + 1, tree(7))
    assert [row["step"] for row in answer("ls", root)["steps"]] == [*steps, steps[-1] + 1]
    assert load(root)["w"][0] == 7
    assert theirs == {step: files_of(root / str(step)) for step in steps}
    keras.saving.load_model(root / "model.keras")
    for step in steps:
        verify(root / str(step))
