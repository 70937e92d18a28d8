"""Folders, streams and names as a shell or a supervisor leaves them: jobs run in them, whole."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from holdfast.checkpoint import CheckpointManager, Options, verify
from tests.support.cgroups import limit_file, memory_cgroup
from tests.support.paths import program

TRAINER = str(program("surroundings_trainer"))
HOLDFAST = str(Path(sys.executable).parent / "holdfast")


def run(command: list[str], cwd: Path, shell: str = "", **variables: str) -> int:
    """Runs a command after a line of shell; returns its exit code."""
    line = f'{shell}\nexec "$@"' if shell else 'exec "$@"'
    return subprocess.run(
        ["/bin/bash", "-c", line, "bash", *command],
        cwd=cwd,
        env=os.environ | variables,
        timeout=100,
        check=False,
    ).returncode


def assert_whole(root: Path) -> None:
    """The three steps, with nothing in a file that somebody printed."""
    with CheckpointManager(root, options=Options(read_only=True)) as manager:
        assert manager.all_steps() == [0, 1, 2]
    verify(root)
    for path in root.rglob("*"):
        assert not path.is_file() or b"prints" not in path.read_bytes(), path


@pytest.mark.parametrize("launched", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_deleted_folder_and_no_streams(launched: bool, tmp_path: Path) -> None:
    """The working folder is gone, and all three streams are closed: no file gets their number."""
    command = [sys.executable, TRAINER, str(tmp_path / "root")]
    if launched:
        command = [HOLDFAST, "run", "-n", "2", "--", *command]
    (tmp_path / "gone").mkdir()
    shell = f"rmdir {tmp_path}/gone; exec <&- >&- 2>&-"
    assert run(command, tmp_path / "gone", shell) == 0
    assert_whole(tmp_path / "root")


@pytest.mark.slow
def test_names_that_are_not_utf_8(tmp_path: Path) -> None:
    """A root, an argument, a log folder; and a temporary folder whose bytes are too many."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    temporary = Path(tempfile.mkdtemp(prefix="ü" * 40, dir="/tmp"))
    folder.mkdir()
    try:
        command = [HOLDFAST, "run", "-n", "2", f"--log-dir={folder}/logs", "--"]
        command += [sys.executable, TRAINER, f"{folder}/root", folder.name]
        assert run(command, folder, TMPDIR=str(temporary)) == 0
    finally:
        temporary.rmdir()
    assert_whole(folder / "root")
    shown = subprocess.run(
        [HOLDFAST, "ls", f"{folder}/root"], capture_output=True, timeout=60, check=True
    )
    assert len(shown.stdout.splitlines()) == 5
    refused = subprocess.run(
        [HOLDFAST, "convert", f"{folder}/root/1", f"{folder}/other", "--to", "orbax"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert refused.returncode == 5
    assert "takes no path that is not valid UTF-8" in refused.stderr


def test_a_relative_path_in_a_deleted_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the path, and says that it is not the path that is missing."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(
        FileNotFoundError, match=r"the current folder was deleted, .*give an absolute one: 'runs/a'"
    ):
        CheckpointManager("runs/a")


def test_the_oom_killer_is_named(tmp_path: Path) -> None:
    """A process that takes more than its cgroup has is ended by the kernel: the reason says so."""
    program = tmp_path / "takes.py"
    program.write_text(
        "import os\nif os.environ['HOLDFAST_PROCESS_ID'] == '1':\n    b'1' * (1 << 30)\n"
    )
    with memory_cgroup("holdfast-oom") as folder:
        limit_file(folder).write_text(str(400 << 20))
        swap = folder / "memory.swap.max"
        if swap.exists():
            swap.write_text("0")
        ended = subprocess.run(
            ["/bin/bash", "-c", f'echo $$ > {folder}/cgroup.procs; exec "$@"', "bash"]
            + [HOLDFAST, "run", "-n", "2", "--", sys.executable, "-S", str(program)],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert ended.returncode == 137
    why = "process 1 of 2 was ended by signal 9 in attempt 1: the kernel's OOM killer has ended"
    assert why in ended.stderr, ended.stderr
