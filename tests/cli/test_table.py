"""Each command as a new user would try it, on every kind of path: a sentence that helps, the right
exit code, no traceback.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import jax.numpy as jnp
import pytest
from click.testing import CliRunner

from holdfast.checkpoint import CheckpointManager, Json
from holdfast.cli.entry import main

HOLDFAST = str(Path(sys.executable).parent / "holdfast")
COMMANDS = {
    "ls": "ls PATH",
    "show": "show PATH",
    "show --stats": "show PATH --stats",
    "verify": "verify PATH",
    "verify --all": "verify PATH --all",
    "diff": "diff GOOD PATH",
    "convert --to holdfast": "convert PATH TARGET --to holdfast",
    "convert --to orbax": "convert PATH TARGET --to orbax",
    "convert --to safetensors": "convert PATH TARGET --to safetensors",
    "prune": "prune PATH --keep last:1",
    "prune --dry-run": "prune PATH --keep last:1 --dry-run",
    "sweep": "sweep PATH",
    "cp": "cp PATH TARGET",
}


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_help_lists_every_command_in_its_group(columns: int) -> None:
    """By one verb each, in one form, and whole at any width."""
    ran = CliRunner().invoke(main, ["--help"], terminal_width=columns)
    assert ran.exit_code == 0, ran.exception
    said = ran.output
    assert "..." not in said.partition("Checkpoints:")[2]
    parts = re.split(r"^(Checkpoints|Jobs|Clusters):$", said, flags=re.MULTILINE)
    listed = {
        title: re.findall(r"^  (\w+) +([A-Z]\w+) ", text, re.MULTILINE)
        for title, text in zip(parts[1::2], parts[2::2], strict=True)
    }
    assert [len(commands) for commands in listed.values()] == [8, 4, 4]
    for name, verb in itertools.chain.from_iterable(listed.values()):
        assert not verb.endswith("s")
        command = main.get_command(click.Context(main), name)
        assert command is not None and command.help is not None
        assert command.help.split()[0] == verb, name


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("name", main.list_commands(click.Context(main)))
def test_the_help_of_a_command_fits_a_terminal(name: str, columns: int) -> None:
    """At any width. Examples are not wrapped, so that they can be copied; they have 80 columns."""
    ran = CliRunner().invoke(main, [name, "--help"], terminal_width=columns)
    assert ran.exit_code == 0
    wide = [line for line in ran.output.splitlines() if len(line) > columns]
    examples = ("holdfast ", "#SBATCH ", "A map is JSON: ", '[["layers')
    assert [line for line in wide if not line.strip().startswith(examples)] == []
    assert [line for line in wide if len(line) > 80] == []


@pytest.mark.parametrize("name", ["ray", "run", "slurm"])
def test_a_launchers_options_stand_in_groups(name: str) -> None:
    """Each in one, with its help; what decides of restarts stands together."""
    command = main.get_command(click.Context(main), name)
    assert command is not None
    said = CliRunner().invoke(main, [name, "--help"], terminal_width=120).output
    parts = re.split(r"^(\w+):$", said, flags=re.MULTILINE)
    listed = {
        title: re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.MULTILINE)
        for title, text in zip(parts[1::2], parts[2::2], strict=True)
    }
    assert [*listed] == ["Launching", "Restarting", "Watching", "Options"]
    assert listed["Options"] == ["--help"]
    shown = sorted(itertools.chain.from_iterable(listed.values()))
    options = [each for each in command.params if isinstance(each, click.Option)]
    assert shown == sorted([each.opts[-1] for each in options if not each.hidden] + ["--help"])
    assert {"--max-restarts", "--grace-s", "--stall-timeout-s"} <= {*listed["Restarting"]}


NOTHING = {  # kind: what the sentence says
    "empty": "is empty: no checkpoint was saved there",
    "file": "is a file and no checkpoint: expected a folder, or a file that ends in .safetensors",
    "folder": (
        "is no checkpoint that holdfast knows (its own, Orbax's, safetensors); it holds notes.txt"
    ),
    "missing": "; {parent} holds",
}
DAMAGED = {  # kind: what the sentence says of it, to those that read it
    "record broken": "3/checkpoint.json: the record's checksum does not fit its bytes",
    "record flipped": "3/checkpoint.json: the record's checksum does not fit its bytes",
    "pack truncated": "",
    "pack flipped": (
        "the checksum of 'w' does not fit: its bytes are not what was written (leaf 'w')"
    ),
    "pack missing": "the file is missing, and the record names it",
}
READ_NO_ARRAYS = ("ls", "show", "prune", "prune --dry-run", "sweep")
GO_AROUND = ("ls", "prune", "prune --dry-run", "sweep")  # what is damaged, as long as they can tell


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of two items, with metrics."""
    path = tmp_path_factory.mktemp("table") / "good"
    with CheckpointManager(path) as manager:
        for k in (1, 2, 3):
            items = {
                "state": {"w": jnp.ones((64, 64)) * k, "b": jnp.zeros(64)},
                "config": Json({"lr": k}),
            }
            manager.save(k, items=items, metrics={"loss": 1 / k})
            manager.wait_until_finished()
    return path


def make(kind: str, good: Path, path: Path) -> None:
    """Makes a path of some kind."""
    if kind == "empty":
        path.mkdir()
    elif kind == "file":
        path.write_text("mine")
    elif kind == "folder":
        path.mkdir()
        (path / "notes.txt").write_text("mine")
    elif kind != "missing":
        shutil.copytree(good, path)
    if kind.startswith("record"):
        record = path / "3/checkpoint.json"
        data = record.read_bytes()
        record.write_bytes(
            b"{" if kind == "record broken" else data[:200] + bytes([data[200] ^ 1]) + data[201:]
        )
    if kind.startswith("pack"):
        (pack,) = (path / "3/state").iterdir()
        data = pack.read_bytes()
        at = len(data) - 300  # in the last chunks: those of "w"
        pack.write_bytes(
            data[:at]
            if kind == "pack truncated"
            else data[: at - 300] + bytes([data[at - 300] ^ 1]) + data[at - 299 :]
        )
        if kind == "pack missing":
            pack.unlink()


def expected(command: str, kind: str) -> tuple[int, str]:
    """Returns the exit code, and something that the output says."""
    if kind == "good":
        return 0, ""
    if kind in NOTHING:
        return 3, NOTHING[kind]
    if command in GO_AROUND or (command in READ_NO_ARRAYS and kind.startswith("pack")):
        seen = kind != "pack flipped" and command not in ("sweep", "show")
        return 0, "damaged" if seen else ""
    return 4, DAMAGED[kind]


def snapshot(path: Path) -> dict[str, bytes]:
    if path.is_file():
        return {"": path.read_bytes()}
    return {
        str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()
    }


@pytest.mark.parametrize("kind", ["good", *NOTHING, *DAMAGED])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_on_every_kind_of_path(
    command: str, kind: str, good: Path, tmp_path: Path
) -> None:
    """With and without --json: exit code, sentence, valid JSON, nothing half-made, and nobody's
    files touched.
    """
    code, saying = expected(command, kind)
    for as_json in (False, True):
        path = tmp_path / f"path{as_json:d}"
        target = tmp_path / f"target{as_json:d}"
        make(kind, good, path)
        before = snapshot(path)
        words = {"PATH": str(path), "GOOD": str(good), "TARGET": str(target)}
        arguments = [words.get(word, word) for word in COMMANDS[command].split()] + [
            "--json"
        ] * as_json
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == code, (arguments, result.output, result.exception)
        assert result.exception is None or isinstance(result.exception, SystemExit), (
            result.exception
        )
        assert (
            "Traceback" not in result.output and saying.format(parent=tmp_path) in result.output
        ), result.output
        if code:
            assert result.stderr.startswith("Error: ") and str(path) in result.stderr
            assert ("cannot be mended" in result.stderr) == (code == 4)
        if as_json:
            found = json.loads(result.stdout)
            assert not code or "error" in result.stdout
            if code == 3:
                assert found["exit_code"] == 3 and found["error"] in result.stderr
        elif code:
            assert result.stdout == "" or command in ("verify --all", "cp")  # the whole steps
        if command not in ("prune", "sweep"):
            assert snapshot(path) == before
        if command == "prune" and kind in (
            "record broken",
            "record flipped",
            "pack truncated",
            "pack missing",
        ):
            assert (path / "2/checkpoint.json").exists(), (
                "the newest whole step was deleted in favour of a damaged one"
            )
        if command.startswith("convert") and code:
            assert not target.exists() or os.listdir(target) == []
        if command == "cp" and code == 4:
            assert (
                not (target / "3/checkpoint.json").exists()
                and (target / "2/checkpoint.json").exists()
            )


@pytest.mark.parametrize(
    "command",
    [
        command if command == "ls" else pytest.param(command, marks=pytest.mark.slow)
        for command in COMMANDS
    ],
)
def test_the_installed_command(command: str, good: Path, tmp_path: Path) -> None:
    """The same as real processes: a good path and a missing one."""
    words = {"PATH": str(tmp_path / "no"), "GOOD": str(good), "TARGET": str(tmp_path / "target")}

    def start() -> subprocess.Popen[str]:
        typed = [HOLDFAST, *(words.get(word, word) for word in COMMANDS[command].split())]
        return subprocess.Popen(typed, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    missing = start()
    shutil.copytree(good, tmp_path / "good")
    words |= {"PATH": str(tmp_path / "good"), "TARGET": str(tmp_path / "other")}
    found = start()
    out, error = missing.communicate(timeout=60)
    assert (
        missing.returncode == 3
        and out == ""
        and "there is nothing at" in error
        and "Traceback" not in error
    )
    out, error = found.communicate(timeout=60)
    assert found.returncode == 0 and out and "Traceback" not in error, error
