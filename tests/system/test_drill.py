"""A drill: nine faults in a job that trains, and what the first line of `holdfast status` says of each."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.drill import HOLDFAST, drill, line_of

HANGING = """import os, threading
from holdfast import multihost
multihost.initialize()
def load_batch():
    if os.environ["HOLDFAST_PROCESS_ID"] == "2":
        threading.Event().wait()
with multihost.watchdog(3, exit=True):
    load_batch()
    multihost.sync_global_processes("step")
"""
WHO = f"process 2 (host {socket.gethostname()})"


def test_a_loader_that_sleeps_on_one_host(tmp_path: Path) -> None:
    """Before it, rows say what they should; then process, host, line, and where the others wait."""
    with drill(tmp_path) as job:
        job.wait_for_step(6)
        rows = [line for line in job.status().splitlines() if " CONNECTED " in line]
        assert len(rows) == 3 and all("GiB" in row and "%" in row and "of 2 s" in row for row in rows), rows
        job.begin("loader")
        line = job.first_line(f"load_batch, train.py:{line_of('LOADER')}, no step for")
        assert line.startswith(f"{WHO} is in load_batch, train.py:{line_of('LOADER')}, no step for "), line
        assert f"; the other 2 wait in process_allgather at all_reduce, train.py:{line_of('REDUCE')}" in line, line
        found = job.json()["diagnosis"][0]
        assert (found["processes"], found["function"], found["line"]) == ([2], "load_batch", line_of("LOADER"))


@pytest.mark.slow
def test_a_stopped_process(tmp_path: Path) -> None:
    """It is stopped, and how to let it go on."""
    with drill(tmp_path) as job:
        job.wait_for_step(3)
        os.kill(pid := job.pid(2), signal.SIGSTOP)
        line = job.first_line("is stopped")
        assert line.startswith(f"{WHO} is stopped, by a signal or a debugger") and f"kill -CONT {pid}" in line, line


@pytest.mark.slow
def test_dropped_packets(tmp_path: Path) -> None:
    """A process that runs, but of which nothing reaches the coordinator any more, is cut off; it says where it is all the same."""
    with drill(tmp_path, under_launcher=False) as job:
        job.wait_for_step(3)
        job.drop_packets()  # type: ignore[attr-defined]
        line = job.first_line("is cut off from the coordinator")
        assert line.startswith(f"{WHO} is in ") and "train.py:" in line and "but is cut off from the coordinator" in line, line


@pytest.mark.slow
def test_a_full_disk(tmp_path: Path) -> None:
    """A job that goes on without its saves says which failed, where and why."""
    (root := tmp_path / "root").mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(root)], capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"needs a file system of its own: {mounted.stderr}")
    try:
        with drill(tmp_path) as job:
            job.wait_for_step(12)
            try:
                with open(root / "filler", "wb", buffering=0) as filler:
                    while filler.write(bytes(1 << 20)):
                        pass
            except OSError:
                pass
            line = job.first_line("was not saved")
            assert line.startswith("process ") and f"(host {socket.gethostname()}): step " in line and "[Errno 28]" in line, line
    finally:
        subprocess.run(["umount", "-l", str(root)], check=True)


@pytest.mark.slow
def test_one_step_ahead(tmp_path: Path) -> None:
    """Two barriers that wait for each other, and who is alone at which."""
    with drill(tmp_path) as job:
        job.wait_for_step(3)
        job.begin("ahead")
        line = job.first_line(f"(in train, train.py:{line_of('BARRIER')})")
        assert line.startswith(f"{WHO} waits at barrier 'step ") and "while the other 2 wait for it at 'step " in line, line


@pytest.mark.slow
def test_a_python_loop(tmp_path: Path) -> None:
    """The function that never returns."""
    with drill(tmp_path) as job:
        job.wait_for_step(3)
        job.begin("loop")
        line = job.first_line("no step for")
        assert line.startswith(f"{WHO} is in spin, train.py:"), line


@pytest.mark.slow
def test_c_code_that_holds_the_interpreter(tmp_path: Path) -> None:
    """The line that called into C, though no Python can run in that process."""
    with drill(tmp_path) as job:
        job.wait_for_step(3)
        job.begin("gil")
        line = job.first_line("holds its interpreter")
        assert line.startswith(f"{WHO} is in load_batch, train.py:{line_of('GIL')}, in C code that holds its interpreter for "), line


@pytest.mark.slow
def test_a_skipped_collective(tmp_path: Path) -> None:
    """The one that is past the collective in which all others wait."""
    with drill(tmp_path) as job:
        job.wait_for_step(3)
        job.begin("skip")
        line = job.first_line(f"train.py:{line_of('BARRIER')}")
        assert line.startswith(f"{WHO} waits in ") and f"train, train.py:{line_of('BARRIER')}" in line, line
        assert f"all_reduce, train.py:{line_of('REDUCE')}" in line, line


@pytest.mark.slow
def test_a_host_that_is_three_times_slower(tmp_path: Path) -> None:
    """Steps move, and all are as slow as the slowest: the one that never waits, and where it spends its time."""
    with drill(tmp_path) as job:
        job.wait_for_step(60)
        job.begin("slow")
        line = job.first_line(f"{WHO} keeps the others waiting")
        assert line.startswith(f"{WHO} keeps the others waiting for ") and "load_batch, train.py:" in line, line


@pytest.mark.slow
def test_the_launcher_says_why_a_job_hangs(tmp_path: Path) -> None:
    """Whichever watchdog ends its process first, the log names the one that the others waited for."""
    script = tmp_path / "train.py"
    script.write_text(HANGING)
    command = [*HOLDFAST, "run", "-n", "3", "--", sys.executable, str(script)]
    ended = subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=False, timeout=100)
    assert ended.returncode == 124, ended.stderr
    said = next(line for line in ended.stderr.splitlines() if line.startswith("holdfast: hang: "))
    assert (
        said.startswith(f"holdfast: hang: {WHO} is in load_batch, train.py:6") and "sync_global_processes at <module>, train.py:9" in said
    ), said
