"""The engine of this machine: what a newcomer sees of `holdfast run`, and that nothing is ever left running."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.launch import Preempted, RestartPolicy, WorkerFailed, run_local
from tests.support.cluster import CollectedOutput
from tests.support.processes import wait_until_ended

HOLDFAST = Path(sys.executable).parent / "holdfast"


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


@contextlib.contextmanager
def holdfast_run(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    popen = subprocess.Popen(
        [HOLDFAST, "run", *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield popen
    finally:
        popen.kill()
        popen.communicate()


def read_pids(popen: subprocess.Popen[str], count: int) -> list[int]:
    """Reads lines "[i] pid N" until each of `count` processes has printed one."""
    assert popen.stdout is not None
    pids: dict[str, int] = {}
    while len(pids) < count:
        line = popen.stdout.readline()
        assert line, "the output ended"
        prefix, *words = line.split()
        if words and words[0] == "pid":
            pids[prefix] = int(words[1])
    return [pids[key] for key in sorted(pids)]


def refuses(address: str, within_s: float = 20) -> bool:
    """Waits until nobody listens at `address`."""
    deadline = time.monotonic() + within_s
    host, _, port = address.rpartition(":")
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except ConnectionRefusedError:
            return True
        time.sleep(0.02)
    return False


def test_every_process_knows_who_it_is() -> None:
    """The environment holds a ProcessSpec for each, with one coordinator for all; stale MEGASCALE_* values are gone and logged."""
    output = CollectedOutput()
    code = "import os; print(*(os.environ.get(k) for k in ('HOLDFAST_PROCESS_ID', 'HOLDFAST_NUM_PROCESSES', 'HOLDFAST_JOB_ID', \
        'HOLDFAST_ATTEMPT', 'MEGASCALE_NUM_SLICES', 'HOLDFAST_COORDINATOR')))"
    result = run_local(python(code), 3, job_id="j", env={**os.environ, "MEGASCALE_NUM_SLICES": "3"}, output=output)
    assert (result.outcome, result.exit_code, result.attempts) == ("done", 0, 1)
    assert sorted(text.rsplit(" ", 1)[0] for _, text in output.lines) == [f"{i} 3 j 1 None" for i in range(3)]
    assert len({text.rsplit(" ", 1)[1] for _, text in output.lines}) == 1
    assert output.said == ["MEGASCALE_NUM_SLICES: '3' -> removed, the job has one slice"]


def test_output_has_a_prefix_and_no_colour_without_a_terminal() -> None:
    """Lines of stdout and stderr carry their process's number; the exit code is 0 when all are done."""
    code = "import os, sys; print('out'); sys.stdout.flush(); print('err', file=sys.stderr)"
    done = subprocess.run([HOLDFAST, "run", "-n", "2", "--", *python(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] err", "[0] out", "[1] err", "[1] out"]
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("how", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137), ("sys.exit(93)", 93), ("sys.exit(124)", 124)]
)
def test_the_first_that_fails_decides_and_the_others_are_ended(how: str, code: int, tmp_path: Path) -> None:
    """The others, though they would wait for ever, are gone before the command ends."""
    script = f"""
import os, sys, time
print("pid", os.getpid(), flush=True)
open(os.path.join({str(tmp_path)!r}, os.environ["HOLDFAST_PROCESS_ID"]), "w")
if os.environ["HOLDFAST_PROCESS_ID"] == "1":
    while len(os.listdir({str(tmp_path)!r})) < 3: time.sleep(0.01)
    {how}
time.sleep(600)
"""
    with holdfast_run("-n", 3, "--", *python(script)) as popen:
        pids = read_pids(popen, 3)
        assert popen.wait(60) == code
        assert wait_until_ended(pids, within_s=0.5)


def test_what_ignores_sigterm_is_killed_after_the_grace_time(tmp_path: Path) -> None:
    """SIGTERM first, SIGKILL after --grace-s."""
    script = f"""
import os, signal, sys, time
ready = {str(tmp_path / "ready")!r}
signal.signal(signal.SIGTERM, lambda *_: print("no", flush=True))
if os.environ["HOLDFAST_PROCESS_ID"] == "0":
    while not os.path.exists(ready): time.sleep(0.01)
    sys.exit(1)
open(ready, "w")
while True: time.sleep(1)
"""
    output = CollectedOutput()
    result = run_local(python(script), 2, restart=RestartPolicy(grace_s=0.5), output=output)
    assert result.exit_code == 1
    assert (1, "no") in output.lines
    assert isinstance(result.error, WorkerFailed)
    assert result.error.processes == (0,)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_notice_to_the_launcher_reaches_every_process(number: int) -> None:
    """SIGTERM and SIGHUP become SIGTERM for each process; when they leave with 75 the command ends with 75 and restarts nothing."""
    script = """
import os, signal, sys
print("pid", os.getpid(), flush=True)
signal.sigwait({signal.SIGTERM})
print("saved", flush=True)
sys.exit(75)
"""
    block = f"import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGTERM}})\n{script}"
    with holdfast_run("-n", 3, "--max-restarts", 5, "--", *python(block)) as popen:
        read_pids(popen, 3)
        popen.send_signal(number)
        output, errors = popen.communicate(timeout=60)
        assert popen.returncode == 75
        assert sorted(output.split()) == ["[0]", "[1]", "[2]", "saved", "saved", "saved"]
        assert "asked to stop" in errors


def test_control_c_reaches_every_process_as_itself() -> None:
    """SIGINT is passed on as SIGINT, and the command ends with 130."""
    script = "import os, time\ntry: print('pid', os.getpid(), flush=True); time.sleep(600)\nexcept KeyboardInterrupt: print('interrupted')"
    with holdfast_run("-n", 2, "--", *python(script)) as popen:
        read_pids(popen, 2)
        popen.send_signal(signal.SIGINT)
        output, _ = popen.communicate(timeout=60)
        assert popen.returncode == 130
        assert output.count("interrupted") == 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_no_orphans_even_if_the_launcher_is_killed(number: int) -> None:
    """Neither the processes, nor what they started, nor the coordinator outlive a launcher that had no chance to clean up."""
    script = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
print("pid", os.getpid(), child.pid, os.environ["HOLDFAST_COORDINATOR"], flush=True)
time.sleep(600)
"""
    with holdfast_run("-n", 2, "--", *python(script)) as popen:
        assert popen.stdout is not None
        said = [popen.stdout.readline().split() for _ in range(2)]
        coordinator = said[0][4]
        popen.send_signal(number)
        popen.wait(30)
        assert wait_until_ended([int(word) for words in said for word in words[2:4]])
        assert refuses(coordinator)


def test_what_a_process_left_behind_ends_with_it() -> None:
    """A process that ends well takes along what it started in the background."""
    output = CollectedOutput()
    script = "import subprocess, sys; print(subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid)"
    assert run_local(python(script), 2, output=output).outcome == "done"
    assert wait_until_ended([int(text) for _, text in output.lines])


def test_a_failed_group_is_started_again() -> None:
    """Each attempt has its number and a coordinator at an address of its own; the third one ends done."""
    script = """
import os, sys
attempt = int(os.environ["HOLDFAST_ATTEMPT"])
print(attempt, os.environ["HOLDFAST_COORDINATOR"])
sys.exit({1: 9, 2: 75, 3: 0}[attempt])
"""
    output = CollectedOutput()
    policy = RestartPolicy(max_failures=1, max_preemptions=1, backoff_s=0.05, grace_s=2)
    result = run_local(python(script), 2, restart=policy, output=output)
    assert (result.outcome, result.attempts) == ("done", 3)
    said = {text for _, text in output.lines if len(text.split()) == 2}  # one that is ended in the middle of a line says less
    assert [text.split()[0] for text in sorted(said)] == ["1", "2", "3"]


def test_a_preempted_job_says_so() -> None:
    """Exit code 75 with no budget left: the outcome is "preempted", not done and not failed."""
    result = run_local(python("import sys; sys.exit(75)"), 2, output=CollectedOutput())
    assert (result.outcome, result.exit_code) == ("preempted", 75)
    with pytest.raises(Preempted, match="all 2 processes left after notice from process"):
        result.raise_for_outcome()


def test_the_capacity_file_shrinks_and_grows_a_job(tmp_path: Path) -> None:
    """Four processes, then two when the file says 2, then four again; each time they get SIGTERM and leave with 75."""
    room = tmp_path / "room"
    script = f"""
import os, signal, sys
from pathlib import Path
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGTERM}})
attempt, me = int(os.environ["HOLDFAST_ATTEMPT"]), os.environ["HOLDFAST_PROCESS_ID"]
print(attempt, os.environ["HOLDFAST_NUM_PROCESSES"], flush=True)
if attempt == 3: sys.exit(0)
if me == "0": Path({str(room)!r}).write_text({{1: "2", 2: "4"}}[attempt])
signal.sigwait({{signal.SIGTERM}})
sys.exit(75)
"""
    output = CollectedOutput()
    policy = RestartPolicy(max_preemptions=1, backoff_s=0.05, grow_after_s=0)
    result = run_local(python(script), 4, min_processes=2, restart=policy, output=output, capacity_file=room)
    assert (result.outcome, result.attempts) == ("done", 3)
    assert sorted(text for _, text in output.lines) == ["1 4"] * 4 + ["2 2"] * 2 + ["3 4"] * 4


def test_bad_input_is_one_clear_error() -> None:
    """A command that is not there, and counts that do not fit."""
    done = subprocess.run([HOLDFAST, "run", "-n", "1", "--", "no-such-command"], capture_output=True, text=True, check=False)
    assert done.returncode == 127
    assert "[0] holdfast: cannot run 'no-such-command': No such file or directory\n" in done.stdout
    done = subprocess.run([HOLDFAST, "run", "-n", "1", "--min-processes", "2", "--", "true"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "a job needs 1 <= min_processes <= num_processes, found 2 and 1" in done.stderr
