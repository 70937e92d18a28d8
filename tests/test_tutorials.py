"""The tutorials do what their pages say: here, and from a wheel in an empty environment."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.wheel import EmptyEnvironment, build_wheel

_INSTALLING = 3  # commands: a virtual environment, its activation, pip install
_LIBRARIES = {"tutorial-policies.md": (), "tutorial-trainer.md": ("flax", "optax", "grain")}
_PROGRAM = re.compile(r"^```py\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _program(page: str) -> str:
    (found,) = _PROGRAM.findall((ROOT / "docs" / page).read_text())
    return str(found)


_OWN_JOBS: dict[str, str] = {}
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


class Here:
    """The environment of the tests themselves."""

    variables: Mapping[str, str] = os.environ | {"JAX_PLATFORMS": "cpu"}

    @staticmethod
    def command(name: str) -> str:
        """Returns the path of a command of the environment."""
        return str(Path(sys.executable).parent / name)


Place = Here | EmptyEnvironment


@pytest.fixture(autouse=True)
def _only_own_jobs() -> Iterator[None]:
    """`holdfast status` finds the jobs of this test alone: its folder is short, for sockets."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        _OWN_JOBS["TMPDIR"] = folder
        yield


def _command(place: Place, folder: Path, *options: str) -> subprocess.Popen[str]:
    """Starts the program of a tutorial as two processes."""
    run = [place.command("holdfast"), "run", "-n", "2", *options, "--"]
    return subprocess.Popen(
        [*run, place.command("python"), "program.py"],
        cwd=folder,
        env={**place.variables, **_OWN_JOBS},
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


def _kill_one_of_a_job(place: Place, folder: Path) -> str:
    """Runs the program of the page, and kills process 1; returns all that the job printed."""
    (folder / "program.py").write_text(_program("tutorial-machines.md"))
    status = ""
    with _command(place, folder, "--max-restarts", "5", "--no-standby") as job:
        lines = []
        timer = threading.Timer(100, job.kill)
        timer.start()
        assert job.stdout is not None
        for line in job.stdout:
            lines.append(line)
            if not status and "process 1: step 12" in line:
                pids = _processes_of(job, folder)
                status = subprocess.run(
                    [place.command("holdfast"), "status"],
                    env={**place.variables, **_OWN_JOBS},
                    capture_output=True,
                    text=True,
                    timeout=60,
                ).stdout
                for process in pids:
                    os.kill(process, signal.SIGKILL)
                assert any(str(process) in status for process in pids), status
        timer.cancel()
    text = "".join(lines)
    assert job.returncode == 0, text
    assert status and "resumed from step" in text, text
    assert "process 1: step 60" in text, text
    return text


def _hang(place: Place, folder: Path) -> None:
    """Runs a job that hangs: its log names the process, the function and the line."""
    (folder / "program.py").write_text(_program("tutorial-hang.md"))
    with _command(place, folder, "--stall-timeout-s", "5") as job:
        text, _ = job.communicate(timeout=100)
    assert job.returncode == 124, text
    assert re.search(r"hang: process 1 .*load_batch", text), text


@pytest.mark.slow
def test_from_nothing_to_several_machines(tmp_path: Path) -> None:
    """A process is killed, and the job is back and goes to its end."""
    _kill_one_of_a_job(Here(), tmp_path)


def test_debug_a_hang(tmp_path: Path) -> None:
    """The job ends with code 124, and its log names the process, the function and the line."""
    _hang(Here(), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_tutorials_run_from_a_wheel(tmp_path: Path) -> None:
    """In an empty environment: from `pip install` to a job that was killed and is back takes ten
    minutes and eight commands at most. The other pages run there too.
    """
    wheel = build_wheel(tmp_path, timeout_s=600)
    page = (ROOT / "docs" / "tutorial-machines.md").read_text()
    typed = [line for kind, text in _BLOCK.findall(page) if not kind for line in text.splitlines()]
    assert _INSTALLING + len(typed) <= 8, typed
    began_s = time.monotonic()
    place = EmptyEnvironment(tmp_path)
    place.install(wheel)
    installed_s = time.monotonic() - began_s
    _kill_one_of_a_job(place, tmp_path)
    for command in typed[-2:]:  # holdfast ls, holdfast show
        name, *words = command.split()
        subprocess.run(
            [place.command(name), *words],
            cwd=tmp_path,
            env={**place.variables, **_OWN_JOBS},
            check=True,
            timeout=60,
        )
    took_s = time.monotonic() - began_s
    print(
        f"from pip install to a job that is back: {_INSTALLING + len(typed)} commands,"
        f" {took_s:.0f} s, of which the installation {installed_s:.0f} s"
    )
    assert took_s < 600
    _hang(place, tmp_path)
    for name, libraries in _LIBRARIES.items():
        if libraries:
            place.install(*libraries)
        blocks = [text for kind, text in _BLOCK.findall((ROOT / "docs" / name).read_text()) if kind]
        folder = tmp_path / name
        folder.mkdir()
        (folder / "page.py").write_text("\n".join(blocks))
        four = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
        subprocess.run(
            [place.command("python"), "page.py"],
            cwd=folder,
            env={**place.variables, **_OWN_JOBS, **four},
            check=True,
            timeout=100,
        )
