"""The engine of this machine: what a newcomer sees of `holdfast run`, and that nothing is ever left
running.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import pickle
import re
import runpy
import signal
import socket
import stat
import struct
import subprocess
import sys
import termios
import threading
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO

import pytest
from click.testing import CliRunner

from holdfast.cli.entry import main
from holdfast.cli.own_jobs import running_jobs
from holdfast.coordination import Credentials
from holdfast.coordination.process.job_folder import job_folders
from holdfast.launch import (
    Preempted,
    RestartPolicy,
    RunSettings,
    StandbySettings,
    WorkerFailed,
    ray,
    run_local,
)
from holdfast.launch.engines import local
from holdfast.launch.engines.local import LocalEngine
from holdfast.launch.supervisor.job import (
    Exited,
    Kill,
    Launch,
    PrepareNext,
    Progressed,
    Rejoin,
    Release,
    Replace,
    Reserve,
)
from holdfast.launch.workers.process import CALL_RUNNER
from tests.support.cluster import CollectedOutput
from tests.support.inherited import WAYS, after
from tests.support.libraries import need, need_installed
from tests.support.paths import program
from tests.support.processes import descendants, wait_until, wait_until_ended

HOLDFAST = Path(sys.executable).parent / "holdfast"


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def plain(role: str, *arguments: object) -> list[str]:
    """Returns the command of a process that needs the standard library alone."""
    return [sys.executable, "-S", str(program("launched_plain")), role, *map(str, arguments)]


def joined(role: str, *arguments: object) -> list[str]:
    """Returns the command of a process that joins its coordinator."""
    return [sys.executable, str(program("launched_joined")), role, *map(str, arguments)]


@contextlib.contextmanager
def holdfast_run(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    popen = subprocess.Popen(
        [HOLDFAST, "run", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
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
    """Waits until nobody listens at `address`, a socket."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(address.removeprefix("unix:"))
            except OSError:
                return True
        time.sleep(0.02)
    return False


def test_every_process_knows_who_it_is() -> None:
    """The environment holds a ProcessSpec for each, with one coordinator for all; stale MEGASCALE_*
    values are gone and logged.
    """
    output = CollectedOutput()
    code = (
        "import os; print(*(os.environ.get(k) for k in ('HOLDFAST_PROCESS_ID',"
        " 'HOLDFAST_NUM_PROCESSES', 'HOLDFAST_JOB_ID',         'HOLDFAST_ATTEMPT',"
        " 'MEGASCALE_NUM_SLICES', 'HOLDFAST_COORDINATOR')))"
    )
    env = {**os.environ, "MEGASCALE_NUM_SLICES": "3"}
    result = run_local(python(code), 3, RunSettings(job_id="j", env=env), output=output)
    assert (result.outcome, result.exit_code, result.attempts) == ("done", 0, 1)
    assert sorted(text.rsplit(" ", 1)[0] for _, text in output.lines) == [
        f"{i} 3 j 1 None" for i in range(3)
    ]
    assert len({text.rsplit(" ", 1)[1] for _, text in output.lines}) == 1
    address = output.lines[0][1].rsplit(" ", 1)[1]
    assert output.said == [
        f"attempt 1, coordinator at {address}",
        "MEGASCALE_NUM_SLICES: '3' -> removed, the job has one slice",
        result.summary,
    ]
    assert result.summary.startswith("finished: all 3 processes are done, attempt 1; 1 attempt, ")


def test_the_coordinator_is_a_socket_of_this_user() -> None:
    """An unmodified jax program meets at it; it lies in a folder of mode 0700, which goes with it;
    no port is opened.
    """
    output = CollectedOutput()
    result = run_local(
        joined("run_unmodified_jax"),
        2,
        RunSettings(env=os.environ | {"JAX_PLATFORMS": "cpu"}),
        output=output,
    )
    assert result.outcome == "done", output.text
    (address,) = {text for _, text in output.lines if text.startswith("unix:/")}
    assert not Path(address.removeprefix("unix:")).parent.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_another_user_of_the_host_is_nobody(tmp_path: Path) -> None:
    """The user nobody can neither connect to a running job's coordinator nor look into its
    folder.
    """
    with holdfast_run(
        "-n",
        1,
        "--",
        *python("import os, time; print('pid', os.getpid(), flush=True); time.sleep(600)"),
    ) as popen:
        (pid,) = read_pids(popen, 1)
        environment = dict(
            entry.split("=", 1)
            for entry in Path(f"/proc/{pid}/environ").read_text().split("\0")
            if "=" in entry
        )
        address = environment["HOLDFAST_COORDINATOR"]
        assert stat.S_IMODE(Path(address.removeprefix("unix:")).parent.stat().st_mode) == 0o700
        said = subprocess.run(
            plain("look_as_nobody", address), capture_output=True, text=True, check=True
        ).stdout
        assert said.splitlines() == ["connect refused", "list refused"]


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.slow] * (way != "both")) for way in WAYS]
)
def test_signals_that_are_inherited_hide_no_end(way: str) -> None:
    """Who starts the launcher may ignore or block SIGCHLD: a process that fails, and one that is
    killed, is a failure all the same. Its own program gets SIGTERM and SIGCHLD as they come.
    """
    code = """
import os, signal, sys
assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(3)
"""
    for ending, expected in (("raised", 3), ("killed", 137)):
        run = [HOLDFAST, "run", "-n", 2, "--", *python(code), ending]
        done = subprocess.run(
            after(WAYS[way], *run), capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == expected and "holdfast: failed: process" in done.stderr


def test_a_blocked_sigterm_still_stops_a_job() -> None:
    """Who starts the launcher may block SIGTERM: the job is preempted all the same."""
    sleeper = "import os, time; print('pid', os.getpid(), flush=True); time.sleep(600)"
    run = [HOLDFAST, "run", "-n", 1, "--", *python(sleeper)]
    with subprocess.Popen(
        after(WAYS["blocked"], *run), stdout=subprocess.PIPE, text=True
    ) as launcher:
        (pid,) = read_pids(launcher, 1)
        launcher.terminate()
        assert launcher.wait(60) == 75 and wait_until_ended([pid])


def read_until(popen: subprocess.Popen[str], text: str) -> str:
    """Returns the output up to the line that has a text. No process may fail before."""
    assert popen.stdout is not None
    said = ""
    while text not in said:
        line = popen.stdout.readline()
        assert line and "Traceback" not in line, said
        said += line
    return said


def run_below_a_shell(root: Path, shell: str, *more: str) -> tuple[int, str]:
    """Runs two trainers below a shell, and stops them at a step after 10; returns exit code and
    output.
    """
    trainer = [sys.executable, program("below_a_shell"), root, *more]
    command = ["bash", "-c", shell, "-", *trainer]
    with holdfast_run("-n", 2, "--", *command) as popen:
        said = read_until(popen, "step 15")
        popen.terminate()
        out, errors = popen.communicate(timeout=60)
    return popen.returncode, said + out + errors


def test_a_notice_reaches_the_program_below_a_shell(tmp_path: Path) -> None:
    """A pipe, and a shell that goes on after the program, do not cost the save."""
    code, output = run_below_a_shell(tmp_path, '"$@" 2>&1 | cat; sleep 600')
    (step,) = set(re.findall(r"left at (\d+)", output))
    assert code == 75 and f"step {step}, step {step} saved, " in output
    assert (tmp_path / step).is_dir() and "the last saved step" not in output


def test_a_save_that_is_lost_is_told(tmp_path: Path) -> None:
    """A handler of SIGTERM that ends the program loses steps: the launcher and the status say which
    step is saved, and the code is still that of a preemption.
    """
    code, output = run_below_a_shell(tmp_path, 'exec "$@"', "exits")
    assert code == 75
    assert "the program's own handler of SIGTERM ends the process" in output
    told = re.search(r"preempted: .*; the last saved step is 10, the job was at 1\d; .*", output)
    assert told is not None, output


@pytest.mark.parametrize(
    "keeps",
    ["thread", *(pytest.param(each, marks=pytest.mark.slow) for each in ("executor", "hook"))],
)
def test_a_process_that_raised_and_does_not_end_is_ended(keeps: str) -> None:
    """Its exception is known at once, not when its threads and hooks let it end: the launcher ends
    it after --grace-s, and nobody waits for it for minutes.
    """
    command = [sys.executable, program("raises"), keeps]
    with holdfast_run("-n", 2, "--grace-s", 1, "--", *command) as popen:
        _, errors = popen.communicate(timeout=60)
    assert popen.returncode == 1
    why = "ValueError: the loss is NaN"
    assert f"process 1 has failed, and does not end: {why}; ending it" in errors
    assert f"failed: process 1 of 2 ended with exit code 1 in attempt 1: {why}; " in errors


@pytest.mark.slow
def test_a_call_that_raised_and_does_not_end_is_ended(tmp_path: Path) -> None:
    """What calls a function for Ray catches its exception itself, and the process ends with a code:
    it is the function's exception that the launcher names.
    """
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").touch()
    (tmp_path / "ray" / "cloudpickle.py").write_text("from pickle import *\n")
    # The program reads the first argument, which is the call's file here.
    call = (runpy.run_path, (str(program("raises")),), {})
    (tmp_path / "thread").write_bytes(pickle.dumps(call))
    here = ["env", "-C", tmp_path, f"PYTHONPATH={tmp_path}"]
    command = [*here, sys.executable, CALL_RUNNER, "thread", "result"]
    with holdfast_run("-n", 2, "--grace-s", 1, "--", *command) as popen:
        _, errors = popen.communicate(timeout=60)
    why = "ValueError: the loss is NaN"
    assert f"process 1 has failed, and does not end: {why}; ending it" in errors
    assert f"failed: process 1 of 2 ended with exit code 1 in attempt 1: {why}; " in errors


@pytest.mark.slow
@pytest.mark.parametrize("loader", ["torch_like", "grain"])
@pytest.mark.parametrize("way", ["ignores", "dies"])
def test_sigterm_to_the_whole_group(loader: str, way: str, tmp_path: Path) -> None:
    """As systemd sends it: to launcher, coordinator, programs and data workers at once. Workers
    that ignore it cost no save. Where they die, the last line says which step is saved.
    """
    if loader == "grain":
        need_installed("grain", "make setup")
    trainer = [sys.executable, program("data_workers"), loader, way, tmp_path]
    with holdfast_run("-n", 2, "--", *trainer) as popen:
        said = read_until(popen, "step 7")
        for pid in descendants(popen.pid):
            os.kill(pid, signal.SIGTERM)
        out, errors = popen.communicate(timeout=100)
    output = said + out + errors
    assert popen.returncode == 75, output
    assert "the coordinator was ended" not in output
    if way == "dies":
        assert "; the last saved step is 5, the job was at " in errors, output
        return
    (step,) = set(re.findall(r"left at (\d+)", output))
    assert f"step {step}, step {step} saved, " in errors and (tmp_path / step).is_dir()


def test_a_pipe_hides_no_exception() -> None:
    """A shell's pipe ends with 0 though the program before it has raised: that is a failure."""
    command = ["bash", "-c", '"$@" 2>&1 | cat', "-", sys.executable, program("raises"), "ends"]
    with holdfast_run("-n", 2, "--", *command) as popen:
        _, errors = popen.communicate(timeout=60)
    assert popen.returncode == 1
    assert "failed: process 1 of 2 ended with exit code 1 in attempt 1: ValueError: " in errors


def test_a_launcher_that_was_stopped_hears_how_its_job_ended(tmp_path: Path) -> None:
    """By Ctrl-Z, a debugger or a lid, for longer than its coordinator would linger: the job is
    done, once, and at the step that its processes reported while nobody looked.
    """
    go = tmp_path / "go"
    ended = [tmp_path / str(process) for process in range(2)]
    with holdfast_run("-n", 2, "--max-restarts", 2, "--", *joined("end_unseen", go)) as popen:
        assert popen.stdout is not None and popen.stdout.readline().endswith("ready\n")
        popen.send_signal(signal.SIGSTOP)
        go.touch()
        wait_until(lambda: all(file.exists() for file in ended))
        time.sleep(3)  # longer than a coordinator waits that ends once all have left
        popen.send_signal(signal.SIGCONT)
        _, errors = popen.communicate(timeout=60)
    assert popen.returncode == 0
    assert "finished: all 2 processes are done, attempt 1; 1 attempt, step 40, " in errors


def test_output_has_a_prefix_and_no_colour() -> None:
    """Lines of stdout and stderr carry their process's number; the exit code is 0 when all are
    done. The launcher says where it begins, and how it ended.
    """
    code = "import os, sys; print('out'); sys.stdout.flush(); print('err', file=sys.stderr)"
    done = subprocess.run(
        [HOLDFAST, "run", "-n", "2", "--", *python(code)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] err", "[0] out", "[1] err", "[1] out"]
    said = r"holdfast: attempt 1, coordinator at unix:/\S+\nholdfast: finished: all 2 .* code 0\n"
    assert re.fullmatch(said, done.stderr)


@pytest.mark.parametrize(
    ("how", "code"),
    [(-9, 137), (93, 93), *(pytest.param(code, code, marks=pytest.mark.slow) for code in (3, 124))],
)
def test_the_first_failure_decides_and_ends_the_others(how: int, code: int, tmp_path: Path) -> None:
    """The others, though they would wait for ever, are gone before the command ends."""
    with holdfast_run("-n", 3, "--", *plain("fail_when_all_are_there", tmp_path, how)) as popen:
        pids = read_pids(popen, 3)
        assert popen.wait(60) == code
        assert wait_until_ended(pids, within_s=0.5)


@pytest.mark.parametrize(("count", "why"), [(1, ""), (2, ": it had not joined the others (")])
def test_who_fails_before_it_joined_is_told(count: int, why: str) -> None:
    """As a program does that asks jax alone who it is; one by itself need not join."""
    output = CollectedOutput()
    command = [sys.executable, "-c", "raise SystemExit('jax knows no launcher')"]
    result = run_local(command, count, output=output)
    assert result.exit_code == 1
    assert f"of {count} ended with exit code 1 in attempt 1{why}" in result.reasons[-1]
    assert result.reasons[-1].endswith(")" * bool(why) or "attempt 1")


def test_what_ignores_sigterm_is_killed_later(tmp_path: Path) -> None:
    """SIGTERM first, SIGKILL after --grace-s."""
    output = CollectedOutput()
    settings = RunSettings(restart=RestartPolicy(grace_s=0.5))
    result = run_local(plain("ignore_sigterm", tmp_path / "ready"), 2, settings, output=output)
    assert result.exit_code == 1
    assert (1, "no") in output.lines
    assert isinstance(result.error, WorkerFailed)
    assert result.error.processes == (0,)


def test_a_time_may_be_infinite() -> None:
    """For what is left after a death, at the end of the job too, and after a notice."""
    forever = RestartPolicy(max_failures=1, grace_s=math.inf, commit_grace_s=math.inf, backoff_s=0)
    code = "import os, time; time.sleep(600 * (os.environ['HOLDFAST_PROCESS_ID'] == '0'))"
    code += "; raise SystemExit(3)"
    output = CollectedOutput()
    result = run_local(python(code), 2, RunSettings(restart=forever), output=output)
    assert (result.exit_code, result.attempts) == (3, 2), output.text
    command = ["--preemption-grace-s", "inf", "--", *plain("save_and_leave")]
    with holdfast_run("-n", 2, *command) as popen:
        read_pids(popen, 2)
        popen.send_signal(signal.SIGTERM)
        _, errors = popen.communicate(timeout=60)
        assert popen.returncode == 75, errors


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)]
)
def test_a_notice_to_the_launcher_reaches_every_process(number: int) -> None:
    """SIGTERM and SIGHUP become SIGTERM for each process; when they leave with 75 the command ends
    with 75 and restarts nothing.
    """
    with holdfast_run("-n", 3, "--max-restarts", 5, "--", *plain("save_and_leave")) as popen:
        read_pids(popen, 3)
        popen.send_signal(number)
        output, errors = popen.communicate(timeout=60)
        assert popen.returncode == 75
        assert sorted(output.split()) == ["[0]", "[1]", "[2]", "saved", "saved", "saved"]
        assert "asked to stop" in errors


def test_a_stalled_terminal_stops_no_signal(tmp_path: Path) -> None:
    """Nobody reads what the processes print: a SIGTERM reaches them all the same."""
    told = tmp_path / "told"
    with holdfast_run("-n", 2, "--", *plain("flood", told)) as popen:
        assert popen.stdout is not None
        wait_until(told.with_suffix(".waits").exists)
        wait_until(lambda: _unread_bytes(popen.stdout) > 60_000)
        popen.send_signal(signal.SIGTERM)
        wait_until(told.exists)
        popen.communicate(timeout=60)
        assert popen.returncode == 75


def _unread_bytes(pipe: IO[str]) -> int:
    (count,) = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4))
    return int(count)


def test_control_c_reaches_every_process_as_itself(tmp_path: Path) -> None:
    """SIGINT is passed on as SIGINT, and the command ends with 130, as the status that it leaves
    says too.
    """
    script = (
        "import os, time\ntry: print('pid', os.getpid(), flush=True); time.sleep(600)\nexcept"
        " KeyboardInterrupt: print('interrupted')"
    )
    with holdfast_run("-n", 2, "--log-dir", tmp_path, "--", *python(script)) as popen:
        read_pids(popen, 2)
        popen.send_signal(signal.SIGINT)
        output, _ = popen.communicate(timeout=60)
        assert popen.returncode == 130
        assert output.count("interrupted") == 2
    assert json.loads((tmp_path / "status.json").read_text())["ended"]["exit_code"] == 130


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSEGV, marks=pytest.mark.slow)]
)
def test_no_orphans_even_if_the_launcher_is_killed(number: int) -> None:
    """Neither the processes, nor what they started in whatever session, nor the coordinator outlive
    a launcher that could not clean up.
    """
    with holdfast_run("-n", 2, "--", *plain("start_others")) as popen:
        assert popen.stdout is not None
        said = [popen.stdout.readline().split() for _ in range(2)]
        coordinator = said[0][6]
        popen.send_signal(number)
        popen.wait(30)
        assert wait_until_ended([int(word) for words in said for word in words[2:6]])
        assert refuses(coordinator)


def test_what_a_process_left_behind_ends_with_it() -> None:
    """A process that ends well takes along what it started in the background, in a session of its
    own too.
    """
    output = CollectedOutput()
    script = (
        "import subprocess as s; print(s.Popen(['sleep', '600'], stdout=s.DEVNULL,"
        " stderr=s.DEVNULL, start_new_session=True).pid)"
    )
    assert run_local(python(script), 2, output=output).outcome == "done"
    pids = [int(text) for _, text in output.lines if text.isdigit()]
    assert len(pids) == 2 and wait_until_ended(pids)


def test_a_failed_group_is_started_again() -> None:
    """Each attempt has its number and a coordinator at an address of its own; the third one ends
    done.
    """
    output = CollectedOutput()
    policy = RestartPolicy(max_failures=1, max_preemptions=1, backoff_s=0.05, grace_s=2)
    result = run_local(plain("end_by_attempt"), 2, RunSettings(restart=policy), output=output)
    assert (result.outcome, result.attempts) == ("done", 3)
    said = {
        text for _, text in output.lines if len(text.split()) == 2
    }  # one that is ended in the middle of a line says less
    assert [text.split()[0] for text in sorted(said)] == ["1", "2", "3"]


def test_a_preempted_job_says_so() -> None:
    """Exit code 75 with no budget left: the outcome is "preempted", not done and not failed."""
    result = run_local(python("import sys; sys.exit(75)"), 2, output=CollectedOutput())
    assert (result.outcome, result.exit_code) == ("preempted", 75)
    with pytest.raises(Preempted, match="all 2 processes have left after notice from process"):
        result.raise_for_outcome()


def test_the_capacity_file_shrinks_and_grows_a_job(tmp_path: Path) -> None:
    """Four processes, then two when the file says 2, then four again, without any budget; each time
    they get SIGTERM and leave with 75.
    """
    room = tmp_path / "room"
    output = CollectedOutput()
    policy = RestartPolicy(grow_after_s=0)
    settings = RunSettings(min_processes=2, restart=policy, capacity_file=room)
    result = run_local(plain("change_room", room), 4, settings, output=output)
    assert (result.outcome, result.attempts) == ("done", 3)
    assert sorted(text for _, text in output.lines) == ["1 4"] * 4 + ["2 2"] * 2 + ["3 4"] * 4


def test_an_unreadable_capacity_file_ends_no_job(tmp_path: Path) -> None:
    """What it last said holds, which is said once."""
    output = CollectedOutput()
    settings = RunSettings(min_processes=1, capacity_file=tmp_path)
    result = run_local(python("import time; time.sleep(1.2)"), 2, settings, output=output)
    assert result.outcome == "done"
    assert [text for text in output.said if "capacity" in text] == [
        f"capacity file {tmp_path} cannot be read: Is a directory; until it can there is room for"
        " all processes, as it last said"
    ]


def test_a_start_that_fails_half_way_is_undone() -> None:
    """Some processes are there when the files that this process may open are used up: they are
    ended, and the error says why, and what to do.
    """
    done = subprocess.run(
        [sys.executable, program("launched_half_way")],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    *lines, ended = done.stdout.splitlines()
    assert ended.startswith("failed 1 attempt 1 could not start: OSError: [Errno 24] Too many")
    assert "two for each process: raise its limit (ulimit -n)" in ended
    assert wait_until_ended([int(line.split()[-1]) for line in lines])


def test_a_foreign_sigterm_before_joining_is_a_preemption() -> None:
    """A process that somebody's SIGTERM ends before it could hear of notices: all are told to
    leave, and the job ends with 75.
    """
    script = (
        "import os, signal, time\nif os.environ['HOLDFAST_PROCESS_ID'] == '1': os.kill(os.getpid(),"
        " signal.SIGTERM)\ntime.sleep(600)"
    )
    result = run_local(python(script), 2, output=CollectedOutput())
    assert (result.outcome, result.exit_code) == ("preempted", 75)
    assert any(
        "notice from process 1 (SIGTERM before it had joined)" in reason
        for reason in result.reasons
    )


def test_a_foreign_sigterm_after_joining_is_a_failure() -> None:
    """It had a handler then, or none on purpose."""
    result = run_local(joined("get_sigterm"), 2, output=CollectedOutput())
    assert (result.outcome, result.exit_code) == ("failed", 143)


def test_without_a_coordinator_the_job_ends_at_once(short_path: Path) -> None:
    """No temporary folder: that sentence, exit code 1, no second attempt and no story of
    processes.
    """
    env = os.environ | {"TMPDIR": str(short_path)}
    (short_path / f"holdfast-{os.getuid()}").write_text("in the way")
    done = subprocess.run(
        [HOLDFAST, "run", "-n", "2", "--", "true"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert re.fullmatch(
        rf"holdfast: failed: the coordinator cannot start: .*{short_path}/holdfast-\d+: .*; set"
        r" TMPDIR .*\n",
        done.stderr,
    ), done.stderr


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_coordinator_that_is_killed_ends_the_attempt(number: int) -> None:
    """Processes that need it are ended at once and not after a time-out of theirs; the budget for
    failures pays for the next attempt.
    """
    result = run_local(
        joined("signal_coordinator", int(number)),
        2,
        RunSettings(
            restart=RestartPolicy(max_failures=1, backoff_s=0.05),
            standby=StandbySettings(wanted=False),
        ),
        output=CollectedOutput(),
    )
    assert (result.outcome, result.attempts) == ("done", 2), result.reasons
    assert any(
        re.search(
            f"the coordinator was ended by signal {int(number)} while 2 of 2 processes ran", reason
        )
        for reason in result.reasons
    )


def coordinators(job_id: str) -> dict[int, str]:
    """Returns the addresses of a job's coordinators that run, by attempt."""
    jobs = [folder.job() for folder in job_folders()]
    running = [job for job in jobs if job is not None and job.runs and job.job_id == job_id]
    return {job.attempt: job.address for job in running}


def test_a_coordinator_ends_with_its_attempt() -> None:
    """Also where SIGKILL has not ended a process of the attempt by the time the next one starts."""
    policy = RestartPolicy(grace_s=0)
    settings = RunSettings(env=os.environ, restart=policy)
    command = python("import time; time.sleep(600)")
    engine = LocalEngine(command, "fenced", settings, CollectedOutput())
    try:
        engine.carry_out(Launch(1, 1))
        (left,) = engine._workers.values()
        engine.carry_out(Release())
        assert coordinators("fenced").keys() == {1}, "a process lives"
        engine.carry_out(Launch(2, 1))
        assert coordinators("fenced").keys() == {2}
    finally:
        left.kill()
        engine.carry_out(Kill())
        engine.close()
    assert left.wait(20)
    assert not coordinators("fenced")


def test_the_next_coordinator_is_there_before_its_attempt(tmp_path: Path) -> None:
    """Prepared during the back-off, it is the one that the attempt gets; for another number of
    processes another takes its place.
    """
    output = CollectedOutput()
    engine = LocalEngine(
        python("import time; time.sleep(600)"),
        "prepared",  # no other test's: the folders of all jobs of this machine are looked through
        RunSettings(env=os.environ, restart=RestartPolicy(grace_s=0)),
        output,
    )

    def running() -> dict[int, str]:
        return coordinators("prepared")

    try:
        engine.carry_out(PrepareNext(2, 2))
        prepared = running()
        engine.carry_out(Launch(2, 2))
        assert prepared.keys() == {2} and running() == prepared
        assert output.said[0] == f"attempt 2, coordinator at {prepared[2]}"
        engine.carry_out(PrepareNext(3, 2))
        other = running()[3]
        engine.carry_out(Kill())
        while not isinstance(engine.events(10)[0], Exited) or any(
            worker.alive for worker in engine._workers.values()
        ):
            pass
        engine.carry_out(Release())
        engine.carry_out(Launch(3, 1))
        assert running().keys() == {3} and running()[3] != other
        engine.carry_out(PrepareNext(4, 1))
    finally:
        engine.carry_out(Kill())
        engine.close()
    assert running() == {}


def test_a_status_grows_older_without_a_coordinator(tmp_path: Path) -> None:
    """Between two attempts too: whoever is told when no step comes is told then."""
    engine = LocalEngine(
        joined("report_until", tmp_path / "go"),
        "ages",
        RunSettings(env=os.environ, restart=RestartPolicy(grace_s=0)),
        CollectedOutput(),
    )

    def ages() -> list[float]:
        status = engine.status()
        return [
            *(task.step_age_s for task in status.tasks),
            *(task.heartbeat_age_s for task in status.tasks),
            sum(status.goodput_s.values()),
        ]

    try:
        engine.carry_out(Launch(2, 1))
        wait_until(lambda: engine.status().tasks and min(ages()) >= 0)
        engine.carry_out(Kill())
        while not isinstance(engine.events(10)[0], Exited):
            pass
        engine.carry_out(Release())
        last = ages()
        wait_until(lambda: all(now > then for now, then in zip(ages(), last, strict=True)))
    finally:
        engine.close()


@pytest.mark.slow
def test_where_processes_can_stay_the_next_coordinator_waits() -> None:
    """From the first step on; `holdfast status` finds the one whose attempt runs. One that has died
    while it waited is not used.
    """
    engine = LocalEngine(
        python("import time; time.sleep(600)"),
        "waits",
        RunSettings(env=os.environ, restart=RestartPolicy(grace_s=0, max_failures=3)),
        CollectedOutput(),
    )

    def found() -> list[int]:
        return [job.attempt for job, _ in running_jobs() if job.job_id == "waits"]

    try:
        engine.carry_out(Launch(1, 2))
        engine._queue.put(Progressed(1, step=1))
        engine.events(10)
        assert coordinators("waits").keys() == {1}, "nobody can stay"
        for attempt in (1, 2):
            engine._has_stepped = False
            engine._queue.put(Progressed(attempt, step=1, restartable=frozenset({0, 1})))
            while attempt + 1 not in coordinators("waits"):
                engine.events(10)
            assert found()[-1] == attempt
            following = coordinators("waits")[attempt + 1]
            if attempt == 2:
                (prepared,) = engine._coordinators._ahead.values()
                os.kill(prepared.pid, signal.SIGKILL)
                prepared._service.wait(10)
            engine.carry_out(Rejoin(attempt + 1, 2, frozenset({0, 1}), "a process died"))
            assert found()[-1] == attempt + 1
            assert (coordinators("waits")[attempt + 1] == following) == (attempt == 1)
    finally:
        engine.carry_out(Kill())
        engine.close()


@pytest.mark.parametrize(
    ("end", "outcome"), [("multihost.shutdown()", "done"), ("raise ValueError", "failed")]
)
def test_the_last_step_of_one_that_leaves_is_known(end: str, outcome: str, tmp_path: Path) -> None:
    """Without a save, and though it leaves, or an exception ends it, before it has reported of
    itself.
    """
    code = (
        "import time\nfrom holdfast import multihost\nmultihost.initialize()\nfor step in range(8):"
        " multihost.reached_preemption(step); time.sleep(0.5 * (step == 1))"  # the first is told
        f"\n{end}"
    )
    (tmp_path / "program.py").write_text(code)
    result = run_local([sys.executable, str(tmp_path / "program.py")], 1, output=CollectedOutput())
    assert (result.outcome, result.step) == (outcome, 7), result.reasons


def test_log_dir_has_a_file_of_each_process(tmp_path: Path) -> None:
    """Lines with their time, of all attempts; what the launcher said; when the coordinator came and
    why it went.
    """
    result = run_local(
        python("import os; print('I am', os.environ['HOLDFAST_PROCESS_ID'])"),
        2,
        RunSettings(log_dir=tmp_path / "logs"),
        output=CollectedOutput(),
    )
    logs = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir() if path.is_file()}
    assert set(logs) == {
        "process-0.log",
        "process-1.log",
        "launcher.log",
        "coordinator.log",
        "status.json",
    }
    assert json.loads(logs["status.json"])["outcome"].startswith("done: ")
    assert re.fullmatch(r"\S+ \S+ I am 1\n", logs["process-1.log"])
    assert "attempt 1, coordinator at unix:" in logs["launcher.log"]
    assert logs["launcher.log"].endswith(f" {result.summary}\n")
    assert re.search(
        r"serves at unix:/\S+, process \d+\n.* ends: SIGINT\n", logs["coordinator.log"]
    )


def test_metrics_go_on_through_all_attempts(tmp_path: Path) -> None:
    """One address from the start to the end, which says which attempt it is; afterwards nobody
    listens there.
    """
    need("prometheus_client", "make setup")
    options = ["-n", 1, "--max-restarts", 1, "--no-standby", "--metrics-port", 0]
    command = [*options, "--", *joined("report_until", tmp_path / "go")]
    with holdfast_run(*command) as popen:
        assert popen.stderr is not None
        line = next(line for line in popen.stderr if "metrics at " in line)
        url = line.split("metrics at ")[1].strip()
        deadline = time.monotonic() + 60
        text = ""
        while not {"holdfast_attempt 2.0", 'holdfast_step{process="0"} 14.0'} <= set(
            text.splitlines()
        ):
            assert time.monotonic() < deadline, text
            with urllib.request.urlopen(url, timeout=20) as page:
                text = page.read().decode()
        (tmp_path / "go").touch()
        assert popen.wait(60) == 0
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=20)


def test_a_taken_port_is_said_before_the_start() -> None:
    """With the port and what to do."""
    need("prometheus_client", "make setup")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with holdfast_run("-n", 1, "--metrics-port", port, "--", "echo", "started") as popen:
            printed, said = popen.communicate(timeout=60)
    assert (
        f"cannot serve metrics at 127.0.0.1:{port}: Address already in use; choose another"
        " --metrics-port"
        in said
        and not printed
    )


def test_the_heartbeat_timeout_is_the_coordinators() -> None:
    """60 s unless --heartbeat-timeout-s says otherwise; a silent process is lost after it."""
    options = ["--heartbeat-timeout-s", "2", "--grace-s", "0.5"]
    done = subprocess.run(
        [HOLDFAST, "run", "-n", "2", *options, "--", *joined("stand_still")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 7 and "[0] ProcessLost" in done.stdout, done.stdout + done.stderr


def test_bad_input_is_one_clear_error() -> None:
    """A command that is not there, and counts that do not fit."""
    done = subprocess.run(
        [HOLDFAST, "run", "-n", "1", "--", "no-such-command"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 127
    assert "[0] holdfast: cannot run 'no-such-command': No such file or directory\n" in done.stdout
    for options, sentence in (
        (
            ["--min-processes", "2", "--capacity-file", "room"],
            "a job needs 1 <= min_processes <= num_processes, found 2 and 1",
        ),
        (["--grace-s", "-5"], "Invalid value for '--grace-s': -5.0 is not in the range x>=0"),
    ):
        refused = CliRunner().invoke(main, ["run", "-n", "1", *options, "--", "true"])
        assert refused.exit_code == 2 and sentence in refused.stderr


def test_no_process_at_all_is_no_number_of_them() -> None:
    """Nobody who asks for 0 at least gets a job that needs all."""
    for job in (partial(RunSettings(min_processes=0).job, 2), partial(ray.JobSpec(2, 0).job, "j")):
        with pytest.raises(ValueError, match="found 0 and 2"):
            job()


def engine_of(count: int, *command: str) -> LocalEngine:
    """Returns an engine whose first attempt runs."""
    settings = RunSettings(restart=RestartPolicy(max_failures=1, grace_s=1), env=dict(os.environ))
    engine = LocalEngine(command, "j", settings, CollectedOutput())
    engine.carry_out(Reserve(1, count, count))
    engine.carry_out(Launch(1, count))
    return engine


def exits(engine: LocalEngine, count: int) -> list[Exited]:
    """Returns the next ends of processes that the engine reports."""
    seen: list[Exited] = []
    deadline = time.monotonic() + 30
    while len(seen) < count and time.monotonic() < deadline:
        seen += [event for event in engine.events(1.0) if isinstance(event, Exited)]
    return seen


def test_a_survivor_that_ends_while_the_next_attempt_opens_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its end is of the life that it has had: whichever attempt is being opened."""
    engine = engine_of(2, "sleep", "600")
    opens = engine._open_watch

    def open_late(address: str, credentials: Credentials | None = None) -> None:
        worker = engine._workers[0]
        worker.kill()
        assert worker.wait(30)
        opens(address, credentials)

    monkeypatch.setattr(engine, "_open_watch", open_late)
    with contextlib.closing(engine):
        engine._workers[1].kill()
        assert [(end.process, end.life) for end in exits(engine, 1)] == [(1, 1)]
        engine.carry_out(Rejoin(2, 2, frozenset({0}), "process 1 has died"))
        assert [(end.process, end.life) for end in exits(engine, 1)] == [(0, 1)]


def test_the_loop_goes_on_while_a_process_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at one that is late takes seconds: Ctrl-C is heard meanwhile, and then nothing more is
    started. Without it the replacement starts as soon as there is room.
    """
    looked = threading.Event()
    monkeypatch.setattr(local, "place_of", lambda process, pid: str(looked.wait(30)))
    for is_stopped in (False, True):
        looked.clear()
        engine = engine_of(2, "sleep", "600")
        with contextlib.closing(engine):
            engine._workers[1].kill()
            exits(engine, 1)
            late = engine._workers[0]
            engine.carry_out(Rejoin(2, 2, frozenset({0}), "process 1 has died"))
            engine.carry_out(Replace(2, frozenset({1})))
            began = time.monotonic()
            engine.carry_out(Replace(2, frozenset({0})))
            assert time.monotonic() - began < 1.0 and late.alive
            if is_stopped:
                engine.carry_out(Kill())
                ends = {(end.process, end.life) for end in exits(engine, 2)}
                assert ends == {(0, 2), (1, 2)}
            looked.set()
            assert late.wait(30)
            while engine._workers[0] is late and not is_stopped:
                assert engine.events(1.0) is not None
            assert engine._workers[0].alive is not is_stopped
