"""The shims, run as scripts as the engines run them."""

from __future__ import annotations

import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

from holdfast.launch import DO_NOT_RESTART, HANG, PREEMPTED
from holdfast.launch.workers.process import CALL_RUNNER
from holdfast.multihost import Fatal, Hang, Preempted
from tests.support.processes import wait_until_ended

SHIMS = CALL_RUNNER.parent


def shim(name: str, *arguments: object) -> list[str]:
    return [sys.executable, "-I", "-S", str(SHIMS / name), *map(str, arguments)]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(shim("exec_with_pdeathsig.py", *arguments), capture_output=True, text=True, check=False, timeout=30)


def test_it_becomes_the_command() -> None:
    """Same process id, the command's own output and exit code."""
    done = run(os.getpid(), sys.executable, "-S", "-c", "import sys; print('here'); sys.exit(7)")
    assert (done.returncode, done.stdout) == (7, "here\n")


def test_a_command_that_cannot_run_is_127_or_126(tmp_path: Path) -> None:
    """As a shell says it: 127 for one that is not there, 126 for one that may not be executed."""
    plain = tmp_path / "plain"
    plain.write_text("")
    for command, code, why in (("no-such-command", 127, "No such file or directory"), (plain, 126, "Permission denied")):
        done = run(os.getpid(), command)
        assert (done.returncode, done.stderr) == (code, f"holdfast: cannot run {str(command)!r}: {why}\n")


def test_it_does_not_start_when_its_parent_is_dead_already() -> None:
    """A parent that died before prctl would never be noticed: nothing is executed."""
    done = run(1, sys.executable, "-S", "-c", "print('here')")
    assert (done.returncode, done.stdout) == (127, "")


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_the_command_dies_with_its_parent() -> None:
    """SIGKILL of the parent, which runs no handler, ends the command too."""
    code = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-I", "-S", {str(SHIMS / "exec_with_pdeathsig.py")!r}, str(os.getpid()), "sleep", "600"])
print(child.pid, flush=True)
child.wait()
"""
    with subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
        parent.wait(30)
    assert wait_until_ended([pid])


def test_the_reaper_ignores_the_signals_that_end_its_parent() -> None:
    """SIGTERM, SIGINT and SIGHUP do not stop it from killing the listed group at the end of its input."""
    listed = subprocess.Popen(["sleep", "600"], start_new_session=True)
    reaper = subprocess.Popen(shim("process_group_reaper.py"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert reaper.stdin is not None
    reaper.stdin.write(f"+{listed.pid}\n+999999999\n")
    reaper.stdin.flush()
    status = Path(f"/proc/{reaper.pid}/status")
    wanted = sum(1 << (number - 1) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    while wanted & ~int(next(line for line in status.read_text().splitlines() if line.startswith("SigIgn")).split()[1], 16):
        assert reaper.poll() is None
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        reaper.send_signal(number)
    reaper.communicate(timeout=30)
    assert (reaper.returncode, listed.wait(30)) == (0, -signal.SIGKILL)


@pytest.fixture
def call_runner(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The script as a module, with pickle in the place of Ray's, which is not always installed."""
    monkeypatch.setitem(sys.modules, "ray.cloudpickle", pickle)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    spec = importlib.util.spec_from_file_location("call_runner", CALL_RUNNER)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stop(kind: type[Exception]) -> None:
    raise kind("said so")


@pytest.mark.parametrize(("kind", "code"), [(Preempted, PREEMPTED), (Fatal, DO_NOT_RESTART), (Hang, HANG), (KeyError, 1)])
def test_an_error_of_a_call_is_its_exit_code(call_runner: types.ModuleType, kind: type[Exception], code: int) -> None:
    """75 preempted, 93 do not restart, 124 hang, else 1."""
    assert call_runner.exit_code_of(kind("said so")) == code


def test_a_call_leaves_its_value_or_its_error(call_runner: types.ModuleType, tmp_path: Path) -> None:
    """The result file holds what the call returned or raised, and TypeError where that cannot be pickled."""
    call, result = tmp_path / "call", tmp_path / "result"

    def outcome(function: object, *arguments: object) -> tuple[int, str, object]:
        call.write_bytes(pickle.dumps((function, arguments, {})))
        code = call_runner.main(str(call), str(result))
        return (code, *pickle.loads(result.read_bytes()))

    assert outcome(max, 1, 5) == (0, "value", 5)
    code, kind, error = outcome(int, "five")
    assert (code, kind, type(error)) == (1, "error", ValueError)
    code, kind, error = outcome(memoryview, b"x")
    assert (code, kind) == (1, "error") and "the result cannot be pickled" in str(error)
