"""The tutorials do what their pages say: here, and from a wheel in an empty environment. All is
typed in a terminal, and each program twice.
"""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.support.doc_pages import BLOCK, parts, program_of
from tests.support.paths import EXAMPLES, ROOT
from tests.support.wheel import EmptyEnvironment, build_wheel

_INSTALLING = 3  # commands: a virtual environment, its activation, pip install
_TRAINER = ROOT / "docs" / "trainer.md"
_HANG = ROOT / "docs" / "watching.md"
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# What the second run prints: that it goes on, or that nothing is left to do.
_AGAIN = {
    "README.md": "begins after step 30",
}
_TEMPORARY = re.compile(r"/\S*/tmp\w+")
# A training that goes on from its last step prints the same end again.
_SAME_END = ("libraries.md: Equinox", "libraries.md: grain", "concepts.md")

_OWN_JOBS: dict[str, str] = {}


class Here:
    """The environment of the tests themselves."""

    _commands = Path(sys.executable).parent
    variables: Mapping[str, str] = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PATH": f"{_commands}:{os.environ['PATH']}",
    }

    @staticmethod
    def command(name: str) -> str:
        """Returns the path of a command of the environment."""
        return str(Here._commands / name)


Place = Here | EmptyEnvironment


@pytest.fixture(autouse=True)
def _only_own_jobs() -> Iterator[None]:
    """`holdfast status` finds the jobs of this test alone: its folder is short, for sockets."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        _OWN_JOBS["TMPDIR"] = folder
        yield


class Terminal(AbstractContextManager["Terminal"]):
    """One command in a terminal of its own, and all that it has printed, without colours."""

    def __init__(self, place: Place, folder: Path, *command: str) -> None:
        self._ours, self._theirs = pty.openpty()
        # Whoever leads a session and opens a terminal has its keys: Ctrl-C becomes SIGINT.
        opened = ["sh", "-c", 'exec "$@" <"$0" >"$0" 2>&1', os.ttyname(self._theirs)]
        self.process = subprocess.Popen(
            [*opened, place.command(command[0]), *command[1:]],
            cwd=folder,
            env={**place.variables, **_OWN_JOBS, "TERM": "xterm", "COLUMNS": "200"},
            start_new_session=True,
        )
        self.text = ""
        self._output = os.fdopen(self._ours, "rb")
        self._timer = threading.Timer(150, self.process.kill)
        self._timer.start()
        threading.Thread(target=self._close_at_end).start()

    def _close_at_end(self) -> None:
        self.process.wait()
        os.close(self._theirs)

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self.process.kill()
        self.process.wait()
        self._output.close()

    def type(self, keys: str) -> None:
        """Types, as a person does."""
        os.write(self._ours, keys.encode())

    def read_until(self, words: str) -> None:
        """Reads until a line has the words."""
        for line in self._lines():
            if words in line:
                return
        raise AssertionError(f"{words!r} was never printed:\n{self.text}")

    def read_to_end(self) -> int:
        """Reads all that is printed, and returns the exit code."""
        for _ in self._lines():
            pass
        assert "Traceback" not in self.text, self.text
        return self.process.wait()

    def _lines(self) -> Iterator[str]:
        try:
            while line := _COLOURS.sub("", self._output.readline().decode()):
                self.text += line
                yield line
        except OSError:  # Linux: nobody has the other end any more
            pass


def _typed(place: Place, folder: Path, *command: str) -> str:
    """Runs a command to its good end, and returns what it printed."""
    with Terminal(place, folder, *command) as terminal:
        code = terminal.read_to_end()
    assert code == 0, f"{command}:\n{terminal.text}"
    return terminal.text


def _processes_of(job: subprocess.Popen[bytes], folder: Path) -> list[int]:
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


def _libraries_of(*names: str) -> list[str]:
    pages = [page for page in parts() if page.name in names or (not names and page.program)]
    return sorted({library for page in pages for library in page.libraries})


def _commands_of(page: Path) -> list[str]:
    return [
        line
        for kind, text in BLOCK.findall(page.read_text())
        if not kind
        for line in text.splitlines()
    ]


def _kill_one_of_a_job(place: Place, folder: Path) -> None:
    """Types what the page says: a job, of which process 1 is killed, Ctrl-C when it is back, the
    same job as four processes, and what is there.
    """
    (folder / "train.py").write_text(program_of(_TRAINER))
    start, status, _, again, *looks = [line.split() for line in _commands_of(_TRAINER)]
    with Terminal(place, folder, *start) as job:
        job.read_until("process 1: step 12")
        pids = _processes_of(job.process, folder)
        seen = _typed(place, folder, *status)
        assert any(str(process) in seen for process in pids), seen
        for process in pids:
            os.kill(process, signal.SIGKILL)
        job.read_until("resumed from step")
        job.text = ""  # process 0 may have raised: its collective had lost process 1
        job.read_until("process 1: step 40")
        job.type("\x03")
        assert job.read_to_end() == 130, job.text
    with Terminal(place, folder, *again) as job:
        job.read_until("resumed from step 4")
        job.type("\x03")
        assert job.read_to_end() == 130, job.text
    for look in looks:
        _typed(place, folder, *look)


def _hang(place: Place, folder: Path) -> None:
    """Runs a job that hangs: its log names the process, the function and the line."""
    (folder / "hang.py").write_text(program_of(_HANG, "py"))
    start, *_ = _commands_of(_HANG)
    with Terminal(place, folder, *start.split()) as job:
        code = job.read_to_end()
    assert code == 124, job.text
    assert re.search(r"hang: process 1 .*load_batch", job.text), job.text
    lines = re.findall(r"hang\.py:\d+", _HANG.read_text())
    assert len(lines) == 2 and all(line in job.text for line in lines), job.text


@pytest.mark.slow
def test_a_trainer_from_one_process_to_several(tmp_path: Path) -> None:
    """A process is killed, and the job is back; it ends with Ctrl-C, and goes on with four."""
    _kill_one_of_a_job(Here(), tmp_path)


def test_debug_a_hang(tmp_path: Path) -> None:
    """The job ends with code 124, and its log names the process, the function and the line."""
    _hang(Here(), tmp_path)


def _end_of(text: str) -> str:
    """Returns the last line, whatever the folder is called there."""
    return _TEMPORARY.sub("folder", text.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_pages_run_from_a_wheel(tmp_path: Path) -> None:
    """In an empty environment: from `pip install` to a job that was killed and is back takes ten
    minutes and eight commands at most. Then the program of each page and the examples run there,
    all in one folder, twice.
    """
    wheel = build_wheel(tmp_path, timeout_s=600)
    assert _INSTALLING + len(_commands_of(_TRAINER)) <= 8
    began_s = time.monotonic()
    place = EmptyEnvironment(tmp_path)
    place.install(wheel, *_libraries_of("trainer.md"))
    installed_s = time.monotonic() - began_s
    folder = tmp_path / "folder"
    folder.mkdir()
    _kill_one_of_a_job(place, folder)
    took_s = time.monotonic() - began_s
    print(
        f"from pip install to a job that is back: {_INSTALLING + len(_commands_of(_TRAINER))}"
        f" commands, {took_s:.0f} s, of which the installation {installed_s:.0f} s"
    )
    assert took_s < 600
    for _ in range(2):  # the second job goes on to the same step
        _hang(place, folder)

    place.install(*(each.replace("holdfast-jax", str(wheel)) for each in _libraries_of()))
    for page in filter(lambda part: part.program, parts()):
        (folder / "page.py").write_text(page.program)
        once, again = (_typed(place, folder, "python", "page.py") for _ in range(2))
        print(f"{page.name}: {again}")
        assert _AGAIN.get(page.name, "") in again
        assert page.name not in _SAME_END or _end_of(again) == _end_of(once) != "", (once, again)
    digits = [str(EXAMPLES / "train_digits.py"), "--directory", "digits"]
    job = ["holdfast", "run", "-n", "2", "--", "python", *digits]
    _typed(place, folder, *job)
    assert "resumed from step 300" in _typed(place, folder, "python", *digits)
    for _ in range(2):
        assert "process 3 of 4" in _typed(place, folder, "python", str(EXAMPLES / "demo.py"))
