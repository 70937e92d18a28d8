"""A drill: nine faults in a job that trains, and what `holdfast status` says of each, and the page
where there is a browser.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.drill import HOLDFAST, SAID_WITHIN_S, Drill, drill, line_of
from tests.support.pages import page
from tests.support.paths import program

HANGING = program("drill_hanging")
HOST = rf"\(host {re.escape(socket.gethostname())}\)"
WHO = rf"process 2 {HOST}"


class Watched:
    """A job whose page stands in a browser's tab, where there is one."""

    def __init__(self, job: Drill, tab: Any) -> None:
        self._job = job
        self._tab = tab

    def says(self, pattern: str) -> None:
        """Asserts that the first sentences of the status and of the page come to match."""
        sentence = self._job.first_sentence(pattern)
        print(f"first sentence: {sentence}")
        assert re.fullmatch(pattern, sentence), sentence
        if self._tab is not None:
            first = self._tab.locator("#findings li:first-child")
            first.filter(has_text=re.compile(f"^{pattern}$")).wait_for(timeout=1000 * SAID_WITHIN_S)
            assert self._tab.locator("#row-list tr").count() == 3


@contextmanager
def watched(job: Drill, tab: Any) -> Iterator[Watched]:
    """Opens the page of a job that runs."""
    if tab is None:
        yield Watched(job, None)
        return
    with page(job.find_address()) as url:
        tab.goto(url)
        tab.get_by_text("all 3 processes get on").wait_for()
        yield Watched(job, tab)


@pytest.mark.slow
def test_a_loader_that_sleeps_on_one_host(tmp_path: Path, tab_if_any: Any) -> None:
    """Before it, rows say what they should; then process, host, line, and where the others wait."""
    with drill(tmp_path) as job:
        job.wait_for_step(6)
        rows = [line for line in job.status().splitlines() if " CONNECTED " in line]
        assert len(rows) == 3 and all(
            "GiB" in row and "%" in row and "of 2 s" in row for row in rows
        ), rows
        with watched(job, tab_if_any) as both:
            job.begin("loader")
            both.says(
                rf"{WHO} is in load_batch, train\.py:{line_of('LOADER')}, no step for \d+ s; "
                r"the other 2 wait in process_allgather at all_reduce,"
                rf" train\.py:{line_of('REDUCE')}"
            )
        found = job.json()["diagnosis"][0]
        assert (found["processes"], found["function"], found["line"]) == (
            [2],
            "load_batch",
            line_of("LOADER"),
        )


@pytest.mark.slow
def test_a_stopped_process(tmp_path: Path, tab_if_any: Any) -> None:
    """It is stopped, and how to let it go on."""
    with drill(tmp_path) as job:
        job.wait_for_step(3)
        with watched(job, tab_if_any) as both:
            os.kill(pid := job.pid(2), signal.SIGSTOP)
            both.says(
                rf"{WHO} is stopped, by a signal or a debugger \(.*\): kill -CONT {pid} lets it"
                r" go on"
            )


@pytest.mark.slow
def test_dropped_packets(tmp_path: Path, tab_if_any: Any) -> None:
    """A process that runs, but of which nothing reaches the coordinator any more, is cut off; it
    says where it is all the same.
    """
    with drill(tmp_path, under_launcher=False) as job:
        job.wait_for_step(3)
        with watched(job, tab_if_any) as both:
            job.drop_packets()  # type: ignore[attr-defined]
            both.says(
                rf"{WHO} is in \w+, train\.py:\d+, but is cut off from the coordinator \(.*\): look"
                r" at the network between the two"
            )


@pytest.mark.slow
def test_a_full_disk(tmp_path: Path, tab_if_any: Any) -> None:
    """The status says where the checkpoints are; a job that goes on without its saves says which
    failed, where and why.
    """
    (root := tmp_path / "root").mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(root)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"needs a file system of its own: {mounted.stderr}")
    try:
        with drill(tmp_path) as job:
            job.wait_for_step(12)
            found = job.json()["tasks"][0]["progress"]["root"]
            assert (found["path"], found["steps"][-1]["bytes"]) == (str(root), 400000), found
            with watched(job, tab_if_any) as both:
                try:
                    with open(root / "filler", "wb", buffering=0) as filler:
                        while filler.write(bytes(1 << 20)):
                            pass
                except OSError:
                    pass
                both.says(rf"process \d {HOST}: step \d+ .*was not saved.*\[Errno 28\].*")
    finally:
        subprocess.run(["umount", "-l", str(root)], check=True)


@pytest.mark.slow
def test_one_step_ahead(tmp_path: Path, tab_if_any: Any) -> None:
    """Two barriers that wait for each other, and who is alone at which."""
    with drill(tmp_path) as job:
        job.wait_for_step(3)
        with watched(job, tab_if_any) as both:
            job.begin("ahead")
            both.says(
                rf"{WHO} waits at barrier 'step \d+' \(in train, train\.py:{line_of('BARRIER')}\), "
                r"while the other 2 wait for it at 'step \d+'"
            )


@pytest.mark.slow
def test_a_python_loop(tmp_path: Path, tab_if_any: Any) -> None:
    """The function that never returns."""
    with drill(tmp_path) as job:
        job.wait_for_step(3)
        with watched(job, tab_if_any) as both:
            job.begin("loop")
            both.says(
                rf"{WHO} is in spin, train\.py:({line_of('LOOP')}|{line_of('LOOP') + 1}), no step"
                r" for \d+ s; .*"
            )


@pytest.mark.slow
def test_c_code_that_holds_the_interpreter(tmp_path: Path, tab_if_any: Any) -> None:
    """The line that called into C, though no Python can run in that process."""
    with drill(tmp_path) as job:
        job.wait_for_step(3)
        with watched(job, tab_if_any) as both:
            job.begin("gil")
            both.says(
                rf"{WHO} is in load_batch, train\.py:{line_of('GIL')}, in C code that holds its"
                r" interpreter for \d+ s"
            )


@pytest.mark.slow
def test_a_skipped_collective(tmp_path: Path, tab_if_any: Any) -> None:
    """The one that is past the collective in which all others wait."""
    with drill(tmp_path) as job:
        job.wait_for_step(3)
        with watched(job, tab_if_any) as both:
            job.begin("skip")
            both.says(
                rf"{WHO} waits in \w+ at train, train\.py:{line_of('BARRIER')}, no step for \d+ s; "
                rf"the other 2 wait in \w+ at all_reduce, train\.py:{line_of('REDUCE')}"
            )


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_a_host_that_is_three_times_slower(tmp_path: Path, tab_if_any: Any, compiled: bool) -> None:
    """Steps move, and all are as slow as the slowest: the one that never waits, and where it spends
    its time. Waiting inside C++ counts.
    """
    with drill(tmp_path, compiled=compiled) as job:
        job.wait_for_step(60)
        with watched(job, tab_if_any) as both:
            job.begin("slow")
            both.says(
                rf"{WHO} keeps the others waiting for \d+% of their time \(in load_batch,"
                rf" train\.py:{line_of('SLOW')}\).*"
            )


@pytest.mark.slow
def test_a_skipped_compiled_collective(tmp_path: Path, tab_if_any: Any) -> None:
    """The others wait inside C++, with no frame of jax's: they are not blamed for that."""
    with drill(tmp_path, compiled=True) as job:
        job.wait_for_step(3)
        with watched(job, tab_if_any) as both:
            job.begin("skip")
            both.says(
                rf"{WHO} waits in \w+ at train, train\.py:{line_of('BARRIER')}, no step for \d+ s; "
                rf"the other 2 wait in C\+\+ at <lambda>, train\.py:{line_of('COMPILED')}"
            )


@pytest.mark.slow
def test_the_launcher_says_why_a_job_hangs(tmp_path: Path) -> None:
    """Whichever watchdog ends its process first, the log names the one that the others waited
    for.
    """
    script = tmp_path / "train.py"
    script.write_text(HANGING.read_text())
    command = [*HOLDFAST, "run", "-n", "3", "--", sys.executable, str(script)]
    ended = subprocess.run(
        command,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert ended.returncode == 124, ended.stderr
    said = next(line for line in ended.stderr.splitlines() if line.startswith("holdfast: hang: "))
    assert re.match(rf"holdfast: hang: {WHO} is in load_batch, train\.py:15", said), said
    assert "sync_global_processes at <module>, train.py:20" in said, said
    why = rf"ended with exit code 124 in attempt 1: {WHO} is in load_batch, train\.py:15; "
    assert re.match(rf"holdfast: failed: process \d of 3 {why}", ended.stderr.splitlines()[-1]), (
        ended.stderr
    )
