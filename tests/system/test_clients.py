"""Programs of libraries that save with Orbax, such as Flax, Keras, Brax and grain: on Orbax and on
holdfast, unedited, with the same results.

Each program saves, loads what it has saved, and loads the checkpoints that it is given besides:
those that the other one has saved.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.layouts.detect import open_checkpoint
from holdfast.checkpoint.storage.path import StorePath
from holdfast.checkpoint.tools.convert import convert
from tests.support.libraries import need_installed
from tests.support.paths import program

ON_HOLDFAST = ("-m", "holdfast.compat.orbax")

KERAS = program("clients_keras")

BRAX = program("clients_brax")

FLAX = program("clients_flax")


GRAIN = program("clients_grain")


def run(program: Path, *arguments: object, on: tuple[str, ...] = ()) -> Any:
    """Runs a program as its user does; returns what its last line says."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, *on, program, *arguments]
    ran = subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=program.parent,
        env=environment,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_keras(tmp_path: Path) -> None:
    """The callback, `model.save`, `load_model` and `load_weights`; losses after a restart too, and
    each reads the other's checkpoints.
    """
    need_installed("keras", "make slow-libraries")
    program = tmp_path / "program.py"
    program.write_text(KERAS.read_text())
    run(program, tmp_path / "ours", on=ON_HOLDFAST)
    assert (tmp_path / "ours/3/checkpoint.json").exists()
    convert(open_checkpoint(tmp_path / "ours"), StorePath.of(tmp_path / "ours as Orbax's"), "orbax")
    theirs = run(program, tmp_path / "theirs", tmp_path / "ours as Orbax's")
    ours = run(program, tmp_path / "ours again", tmp_path / "theirs", on=ON_HOLDFAST)
    assert ours == theirs and ours["steps"] == ["2", "3"]
    assert ours["checkpoints"] == [ours["saved"]] * 2 and ours["weights"] == [ours["saved"][0]] * 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_flax(tmp_path: Path) -> None:
    """What users of flax.training.checkpoints do, with Orbax as its backend and without, and what
    those of nnx do: the same results, and the same kinds of errors.
    """
    need_installed("flax", "make slow-libraries")
    program = tmp_path / "program.py"
    program.write_text(FLAX.read_text())
    theirs = run(program, tmp_path / "theirs")
    ours = run(program, tmp_path / "ours", on=ON_HOLDFAST)
    assert len(theirs) == 52
    differ = {name: (ours[name], theirs[name]) for name in theirs if ours[name] != theirs[name]}
    assert not differ


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_brax(tmp_path: Path) -> None:
    """PPO's checkpoint: the policy acts as the one that was saved, its parameters are the same, and
    each reads the other's.
    """
    need_installed("brax", "make slow-libraries")
    program = tmp_path / "program.py"
    program.write_text(BRAX.read_text())
    run(program, tmp_path / "ours", on=ON_HOLDFAST)
    saved = tmp_path / "ours/000000000020"
    convert(open_checkpoint(saved), StorePath.of(tmp_path / "ours as Orbax's"), "orbax")
    converted = tmp_path / "ours as Orbax's/0/default"
    shutil.copy(saved / "ppo_network_config.json", converted)
    theirs = run(program, tmp_path / "theirs", converted)
    ours = run(program, tmp_path / "ours again", tmp_path / "theirs/000000000020", on=ON_HOLDFAST)
    assert ours == theirs and ours["steps"] == ["000000000010", "000000000020"]
    assert (
        ours["actions"][0] == ours["actions"][1]
        and ours["params"][0] == ours["params"][1]
        and len(ours["params"][0]) >= 8
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_grain(tmp_path: Path) -> None:
    """Its own handler of Orbax's saves the state of a data iterator, and gives it back; that of
    Orbax's checkpoint too.
    """
    need_installed("grain", "make slow-libraries")
    program = tmp_path / "program.py"
    program.write_text(GRAIN.read_text())
    theirs = run(program, tmp_path / "theirs")
    ours = run(program, tmp_path / "ours", tmp_path / "theirs", on=ON_HOLDFAST)
    assert ours == [theirs[0]] * 3 and theirs == [theirs[0]] * 2 and len(theirs[0]) == 22
