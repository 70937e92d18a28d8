"""The programs of the tutorials do under `holdfast run` what the pages say."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

from tests.support.paths import ROOT

_PROGRAM = re.compile(r"^```python notest\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _program(page: str) -> str:
    (found,) = _PROGRAM.findall((ROOT / "docs" / page).read_text())
    return str(found)


def _command(folder: Path, *options: str) -> subprocess.Popen[str]:
    """Starts the program of a tutorial as two processes."""
    launcher = Path(sys.executable).parent / "holdfast"
    return subprocess.Popen(
        [launcher, "run", "-n", "2", *options, "--", sys.executable, "program.py"],
        cwd=folder,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _processes_of(job: subprocess.Popen[str], folder: Path) -> list[int]:
    """Returns the processes that run the program in `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == job.pid:
            continue
        try:
            command = (entry / "environ").read_bytes()
            place = os.readlink(entry / "cwd")
        except OSError:
            continue
        if place == str(folder) and b"HOLDFAST_PROCESS_ID=1\0" in command:
            found.append(int(entry.name))
    return found


def test_from_nothing_to_several_machines(tmp_path: Path) -> None:
    """A process is killed, and the job is back and goes to its end."""
    (tmp_path / "program.py").write_text(_program("tutorial-machines.md"))
    with _command(tmp_path, "--max-restarts", "5", "--no-standby") as job:
        killed = False
        lines = []
        timer = threading.Timer(100, job.kill)
        timer.start()
        assert job.stdout is not None
        for line in job.stdout:
            lines.append(line)
            if not killed and "process 1: step 12" in line:
                killed = True
                for process in _processes_of(job, tmp_path):
                    os.kill(process, signal.SIGKILL)
        timer.cancel()
    text = "".join(lines)
    assert job.returncode == 0, text
    assert killed and "resumed from step" in text, text
    assert "process 1: step 60" in text, text


def test_debug_a_hang(tmp_path: Path) -> None:
    """The job ends with code 124, and its log names the process, the function and the line."""
    (tmp_path / "program.py").write_text(_program("tutorial-hang.md"))
    with _command(tmp_path, "--stall-timeout-s", "5") as job:
        text, _ = job.communicate(timeout=100)
    assert job.returncode == 124, text
    assert re.search(r"hang: process 1 .*load_batch", text), text
