"""Completion in the shells: click's own, without an import of the commands."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import get_completion_class

from holdfast.cli.entry import main

VARIABLE = "_HOLDFAST_COMPLETE"
BASH = shutil.which("bash")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_script(shell: str) -> None:
    """It has the shell call the command, with the words typed so far."""
    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(main, {}, "holdfast", VARIABLE).source()
    assert f"{VARIABLE}={shell}_complete" in script and "_holdfast_completion" in script


def completed(*words: str, of: str) -> dict[str, str]:
    """Returns what may follow some words, with its kind."""
    kind = get_completion_class("zsh")
    assert kind is not None
    found = kind(main, {}, "holdfast", VARIABLE).get_completions(list(words), of)
    return {item.value: item.type for item in found}


def test_commands_options_choices_and_folders_are_completed() -> None:
    """Each where it stands."""
    assert set(completed(of="s")) == {"show", "status", "slurm", "sweep"}
    assert set(completed("ls", of="--")) == {"--local", "--json", "--help"}
    assert set(completed("convert", "a", "b", "--to", of="")) == {
        "holdfast",
        "orbax",
        "safetensors",
    }
    assert completed("ls", of="/ck") == {"/ck": "dir"}
    assert completed("run", "-n", "2", of="tr") == {"tr": "file"}


@pytest.mark.skipif(BASH is None, reason="bash is not installed")
def test_bash_completes_a_command(tmp_path: Path) -> None:
    """The installed command's script, in a real shell; no command is imported for it."""
    assert BASH is not None
    script = f"""
        eval "$({VARIABLE}=bash_source holdfast)"
        COMP_WORDS=(holdfast kub)
        COMP_CWORD=1
        PYTHONVERBOSE=1 _holdfast_completion holdfast kub holdfast 2> {tmp_path}/imported
        echo "${{COMPREPLY[@]}}"
    """
    folder = Path(sys.executable).parent
    done = subprocess.run(
        [BASH, "-c", script],
        env=os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert done.stdout.split() == ["kubernetes"], done.stderr
    imported = (tmp_path / "imported").read_text()
    assert "import 'holdfast.cli.entry'" in imported
    assert "import 'holdfast.cli.kubernetes'" not in imported and "import 'jax'" not in imported
