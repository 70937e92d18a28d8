"""The shims, run as scripts as the engines run them."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import re
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.launch import DO_NOT_RESTART, HANG, PREEMPTED
from holdfast.launch.workers.process import CALL_RUNNER
from holdfast.multihost import Fatal, Hang, Preempted
from tests.support.processes import wait_until, wait_until_ended

SHIMS = CALL_RUNNER.parent


def shim(name: str, *arguments: object) -> list[str]:
    return [sys.executable, "-I", "-S", str(SHIMS / name), *map(str, arguments)]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    with subprocess.Popen(
        shim("subreaper.py", *arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as popen:
        assert popen.stdout is not None and popen.stderr is not None
        said = popen.stdout.read()
        errors = popen.stderr.read()  # not communicate(), which would close its input
        return subprocess.CompletedProcess(popen.args, popen.wait(30), said, errors)


@pytest.mark.parametrize(
    ("how", "code"),
    [("sys.exit(7)", 7), ("os.kill(os.getpid(), 15)", -15), ("os.kill(os.getpid(), 9)", -9)],
)
def test_it_ends_as_the_command_does(how: str, code: int) -> None:
    """The command's own output, and its exit code or signal."""
    done = run(
        os.getpid(), sys.executable, "-S", "-c", f"import os, sys; print('here', flush=True); {how}"
    )
    assert (done.returncode, done.stdout) == (code, "here\n")


def test_the_command_finds_signals_as_usual() -> None:
    """Nothing that Python ignores stays ignored, and no signal is blocked; but a hangup that the
    starter ignores stays so (nohup).
    """
    show = ["grep", "-E", "SigIgn|SigBlk", "/proc/self/status"]
    masks = [int(line.split()[1], 16) for line in run(os.getpid(), *show).stdout.splitlines()]
    assert [mask & 0x7FFFFFFF for mask in masks] == [0, 0]  # above are libc's own
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        said = run(os.getpid(), *show).stdout
    finally:
        signal.signal(signal.SIGHUP, before)
    assert int(said.split("SigIgn:")[1].split()[0], 16) & 0x7FFFFFFF == 1


def test_a_command_that_cannot_run_is_127(tmp_path: Path) -> None:
    """As a shell says it: 127 for one that is not there, 126 for one that may not be executed."""
    plain = tmp_path / "plain"
    plain.write_text("")
    for command, code, why in (
        ("no-such-command", 127, "No such file or directory"),
        (plain, 126, "Permission denied"),
    ):
        done = run(os.getpid(), command)
        assert (done.returncode, done.stderr) == (
            code,
            f"holdfast: cannot run {str(command)!r}: {why}\n",
        )


def test_it_does_not_start_without_a_parent() -> None:
    """A parent that died before prctl would never be noticed: nothing is executed."""
    done = run(1, sys.executable, "-S", "-c", "print('here')")
    assert (done.returncode, done.stdout) == (127, "")


SAVES = """
import os, signal, sys, threading, time
if sys.argv[1] == "joined":  # as holdfast.multihost marks a process that has joined
    os.memfd_create(f"holdfast-vitals-0-{threading.get_native_id()}")
def save(*_):
    time.sleep(0.2)
    print("saved", flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGUSR1, lambda *_: print("usr1", flush=True))
print("ready", flush=True)
while True:
    time.sleep(600)
"""
SHELLS = {
    "alone": '"$@"',
    "pipe": '"$@" 2>&1 | cat',
    "code": '"$@"; code=$?; echo $code; exit $code',
    "wrapped twice": 'env A=b bash -c \'"$@"; exit $?\' - "$@"; exit $?',
    "timeout": 'timeout 600 "$@"; exit $?',
    "more to do": '"$@"; sleep 600',
    "setsid": 'setsid "$@"',
    "background": '"$@" & exit 0',
    "again and again": 'while true; do "$@"; done',
}


@contextlib.contextmanager
def below_a_shell(shell: str, kind: str) -> Iterator[subprocess.Popen[str]]:
    """Runs a program that saves at SIGTERM below a shell below a subreaper."""
    program = [sys.executable, "-S", "-c", SAVES, kind]
    command = shim("subreaper.py", os.getpid(), *["bash", "-c", shell, "-", *program])
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as popen:
        assert popen.stdin is not None and popen.stdout is not None
        assert popen.stdout.readline() == "ready\n"
        yield popen


def send(popen: subprocess.Popen[str], number: int) -> None:
    assert popen.stdin is not None
    popen.stdin.write(f"signal {number}\n")
    popen.stdin.flush()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.parametrize("shell", SHELLS.values(), ids=SHELLS)
def test_a_shell_does_not_hide_a_notice(shell: str) -> None:
    """The process that has joined gets the signal, wherever it is below the command, and has its
    time. The command gets it after that, and the exit code says that it was preempted.
    """
    with below_a_shell(shell, "joined") as popen:
        assert popen.stdout is not None
        send(popen, signal.SIGUSR1)
        assert popen.stdout.readline() == "usr1\n"
        send(popen, signal.SIGTERM)
        assert popen.stdout.readline() == "saved\n"
        assert popen.wait(30) == PREEMPTED


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_shell_gets_the_signal_where_nobody_has_joined() -> None:
    """Before a process has joined there is nothing to save: the command gets the signal."""
    with below_a_shell(SHELLS["code"], "not joined") as popen:
        send(popen, signal.SIGTERM)
        assert popen.wait(30) == -signal.SIGTERM


LEAVES_THREE = """
import os, subprocess, sys, time
sleeper = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
own_session = subprocess.Popen(sleeper, start_new_session=True)
start = f"subprocess.Popen({sleeper}, start_new_session=True, stdout=2)"
daemon = [sys.executable, "-S", "-c", f"import subprocess; print({start}.pid)"]
orphan = subprocess.run(daemon, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
print(os.getpid(), own_session.pid, orphan, flush=True)
"""


@contextlib.contextmanager
def leaves_three(then: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Runs a command below a subreaper that starts two processes, one of them a daemon; yields the
    subreaper and all three.
    """
    command = shim("subreaper.py", os.getpid(), sys.executable, "-S", "-c", LEAVES_THREE + then)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as popen:
        assert popen.stdout is not None
        yield popen, list(map(int, popen.stdout.readline().split()))


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
@pytest.mark.parametrize("order", ["", "kill\n"])
def test_all_ends_with_the_starter(order: str) -> None:
    """At the end of its input, and at `kill`, sessions of their own and daemons end too."""
    with leaves_three("time.sleep(600)") as (popen, pids):
        assert len(pids) == 3 and popen.stdin is not None
        popen.stdin.write(order)
        popen.stdin.flush() if order else popen.stdin.close()
        assert popen.wait(30) == -signal.SIGKILL
        assert wait_until_ended(pids, within_s=0.1)


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_what_the_command_left_ends_with_it() -> None:
    """An exit code comes when nothing of the command is left."""
    with leaves_three("sys.exit(4)") as (popen, pids):
        assert popen.wait(30) == 4
        assert wait_until_ended(pids, within_s=0.1)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.parametrize("wrapper", [["setsid"], ["bash", "-c", 'setsid "$@" & exit', "-"]])
def test_a_wrapper_that_does_not_wait_hides_no_end(wrapper: list[str]) -> None:
    """The program goes on as the command: it is not killed as what the command has left."""
    code = "import sys, time; time.sleep(0.3); print('here', flush=True); sys.exit(3)"
    done = run(os.getpid(), *wrapper, sys.executable, "-S", "-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (3, "here\n", "")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.parametrize("wrapper", ['exec setsid "$@"', 'setsid "$@" & exit'])
def test_an_end_before_the_first_look_is_not_lost(wrapper: str) -> None:
    """Wrapper and program have both ended when the subreaper, which stands still, goes on."""
    code = "import os, sys; print(os.getpid(), flush=True); sys.exit(3)"
    command = ["bash", "-c", f"kill -STOP $PPID; {wrapper}", "-", sys.executable, "-S", "-c", code]
    with subprocess.Popen(
        shim("subreaper.py", os.getpid(), *command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as popen:
        assert popen.stdout is not None
        stat = Path(f"/proc/{int(popen.stdout.readline())}/stat")
        left = ["Z", str(popen.pid)]  # a zombie, and nobody's child but the subreaper's
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[:2] == left)
        popen.send_signal(signal.SIGCONT)
        assert popen.wait(30) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_program_that_a_wrapper_cannot_run_is_127() -> None:
    """setsid ends with 0 before the program that it forks for is found to be missing."""
    assert run(os.getpid(), "setsid", "no-such-command").returncode == 127


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_what_is_killed_in_the_background_is_named() -> None:
    """A command that is done and leaves something else says so; not what a program that has joined
    leaves.
    """
    leaves = "sleep 600 & HOLDFAST_JOINED=null sleep 601 & (sleep 602) & sleep 0.2; true"
    done = run(os.getpid(), "bash", "-c", leaves)
    assert done.returncode == 0
    named = re.findall(r"process \d+ \((.*)\), which it has left in the background", done.stderr)
    assert sorted(named) == ["sleep 600", "sleep 602"], done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.parametrize("joins", ["", "os.memfd_create(f'holdfast-vitals-0-{os.getpid()}'); "])
def test_a_program_that_goes_into_the_background_is_named(joins: str) -> None:
    """It has forked, and ended with 0: the fork is killed, and that is said. Of a program that has
    joined a fork is no program.
    """
    program = f"import os, time; {joins}os.fork() and os._exit(0); time.sleep(600)"
    done = run(os.getpid(), sys.executable, "-S", "-c", program)
    is_named = f"-c {program}), which it has left in the background, is ended" in done.stderr
    assert (done.returncode, is_named) == (0, not joins), done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_another_holder_of_the_pipe_keeps_nothing() -> None:
    """SIGKILL of the starter ends all, though a process that it has forked still holds the other
    end of the subreaper's input.
    """
    code = f"""
import os, subprocess, sys, time
subreaper, command = {str(SHIMS / "subreaper.py")!r}, {LEAVES_THREE + "time.sleep(600)"!r}
program = [sys.executable, "-S", "-c", command]
command = [sys.executable, "-I", "-S", subreaper, str(os.getpid()), *program]
child = subprocess.Popen(command, stdin=subprocess.PIPE)
if not (fork := os.fork()):
    time.sleep(600)
print(fork, flush=True)
child.wait()
"""
    with subprocess.Popen(
        [sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        lines = sorted((parent.stdout.readline().split() for _ in range(2)), key=len)
        parent.kill()
        parent.wait(30)
        try:
            assert wait_until_ended([int(pid) for pid in lines[1]])
        finally:
            os.kill(int(lines[0][0]), signal.SIGKILL)


def test_signals_for_its_parent_leave_it() -> None:
    """SIGTERM, SIGINT, SIGHUP, SIGUSR1 to the subreaper itself change nothing; `signal` reaches the
    command alone.
    """
    code = (
        "import signal; signal.signal(15, lambda *_: print('15', flush=True)); print('ready',"
        " flush=True); signal.pause(); signal.pause()"
    )
    command = shim("subreaper.py", os.getpid(), sys.executable, "-S", "-c", code)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as popen:
        assert popen.stdin is not None and popen.stdout is not None
        assert popen.stdout.readline() == "ready\n"
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            popen.send_signal(number)
        popen.stdin.write("signal 15\n")
        popen.stdin.flush()
        assert popen.stdout.readline() == "15\n"
        popen.stdin.close()
        assert popen.wait(30) == -signal.SIGKILL


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


@pytest.mark.parametrize(
    ("kind", "code"), [(Preempted, PREEMPTED), (Fatal, DO_NOT_RESTART), (Hang, HANG), (KeyError, 1)]
)
def test_an_error_of_a_call_has_a_code(
    call_runner: types.ModuleType, tmp_path: Path, kind: type[Exception], code: int
) -> None:
    """75 preempted, 93 do not restart, 124 hang, else 1."""
    call = tmp_path / "call"
    call.write_bytes(pickle.dumps((stop, (kind,), {})))
    assert call_runner.main(str(call), str(tmp_path / "result")) == code


class Picky(Exception):
    """Cannot be made again from its message alone, as many exceptions of libraries."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")


def picky() -> None:
    raise Picky(7, "no")


def test_an_error_beyond_pickle_is_text(call_runner: types.ModuleType, tmp_path: Path) -> None:
    """The launcher reads its type and message, and does not fail itself."""
    call = tmp_path / "call"
    result = tmp_path / "result"
    call.write_bytes(pickle.dumps((picky, (), {})))
    assert call_runner.main(str(call), str(result)) == 1
    kind, error = pickle.loads(result.read_bytes())
    assert kind == "error" and str(error) == "the error cannot be pickled; it was Picky: 7: no"


def test_a_call_leaves_its_value_or_its_error(
    call_runner: types.ModuleType, tmp_path: Path
) -> None:
    """The result file holds what the call returned or raised, and TypeError where that cannot be
    pickled.
    """
    call = tmp_path / "call"
    result = tmp_path / "result"

    def outcome(function: object, *arguments: object) -> tuple[int, str, object]:
        call.write_bytes(pickle.dumps((function, arguments, {})))
        code = call_runner.main(str(call), str(result))
        return (code, *pickle.loads(result.read_bytes()))

    assert outcome(max, 1, 5) == (0, "value", 5)
    code, kind, error = outcome(int, "five")
    assert (code, kind, type(error)) == (1, "error", ValueError)
    code, kind, error = outcome(memoryview, b"x")
    assert (code, kind) == (1, "error") and "the result cannot be pickled" in str(error)
