"""Worker processes, on real processes."""

from __future__ import annotations

import os
import queue
import signal
import sys
from pathlib import Path

from holdfast.launch.workers.process import WorkerProcess
from tests.support.processes import wait_until_ended

# An expression: a process in the background that holds no stream open.
SLEEPER = "subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)"


class Started:
    """A worker process whose lines and exit code a test takes in order."""

    def __init__(self, code: str, **env: str) -> None:
        self.events: queue.Queue[str | int] = queue.Queue()
        command = [sys.executable, "-S", "-c", code]
        self.process = WorkerProcess(
            command,
            os.environ | env,
            on_line=self.events.put,
            on_exit=self.events.put,
            cwd=Path(__file__).parent,
        )

    def next(self) -> str | int:
        return self.events.get(timeout=30)


def test_both_streams_come_before_the_exit_code() -> None:
    """Environment and folder are as given; the last line comes before the exit code, also without a
    newline.
    """
    code = """
import os, sys
print(os.environ["GREETING"], os.path.basename(os.getcwd()), flush=True)
sys.stderr.write("last")
sys.exit(3)
"""
    started = Started(code, GREETING="hello")
    assert [started.next() for _ in range(3)] == ["hello workers", "last", 3]
    assert started.process.wait(10) and not started.process.alive


def test_a_progress_bar_is_one_line() -> None:
    """What overwrites itself is shown as it is in the end; CRLF ends a line; others stay as is."""
    code = """
import sys, time
for step in range(200):
    sys.stderr.write(f"\\r{step / 2:3.0f}% ü")
    sys.stderr.flush()
    time.sleep(0.001)
sys.stderr.write("\\r100%\\nand\\r\\n\\nso on\\rkilled at 7%\\r")
"""
    started = Started(code)
    said = [started.next() for _ in range(5)]
    assert said == ["100%", "and", "", "killed at 7%", 0]


def test_a_signal_reaches_a_process_that_starts() -> None:
    """It is not lost between the start of the process and that of the command."""
    started = [Started("import time; time.sleep(600)") for _ in range(8)]
    for each in started:
        each.process.signal(signal.SIGTERM)
    try:
        assert [each.next() for each in started] == [-signal.SIGTERM] * 8
    finally:
        for each in started:
            each.process.kill()


def test_a_signal_reaches_the_process() -> None:
    """`signal` is for the process alone, `kill` for all of its group; both do nothing
    afterwards.
    """
    started = Started("import signal; print('ready', flush=True); signal.pause()")
    assert started.next() == "ready" and started.process.alive
    assert not started.process.wait(0)
    started.process.signal(signal.SIGTERM)
    assert started.next() == -signal.SIGTERM
    started.process.signal(signal.SIGTERM)
    started.process.kill()


def test_a_late_signal_loses_no_exit_code() -> None:
    """Only the waiter reaps: a process that is signalled again and again while it ends is reported
    all the same.
    """
    for _ in range(5):
        started = Started("import signal; signal.signal(15, signal.SIG_IGN)")
        while started.process.alive:
            started.process.signal(signal.SIGTERM)
        assert started.next() in (0, -signal.SIGTERM)


def test_what_it_started_is_killed_with_it() -> None:
    """A background process of its group is gone when the exit code is reported."""
    started = Started(f"import subprocess; print({SLEEPER}.pid)")
    pid = int(started.next())
    assert f"so process {pid} (sleep 600), which it has left in the background, is" in str(
        started.next()
    )
    code = started.next()
    assert code == 0
    assert wait_until_ended([pid])


def test_kill_ends_a_process_and_its_group() -> None:
    """SIGKILL reaches the process and what it started."""
    code = f"""
import signal, subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print({SLEEPER}.pid, flush=True)
while True: signal.pause()
"""
    started = Started(code)
    pid = int(started.next())
    started.process.signal(signal.SIGTERM)
    started.process.kill()
    assert started.next() == -signal.SIGKILL
    assert wait_until_ended([pid])


def test_a_line_without_an_end_comes_in_pieces() -> None:
    """3 MB without a newline take no more memory than a piece; the next line is a line of its
    own.
    """
    started = Started(
        "import sys; sys.stdout.write('x' * 3_000_000 + '\\n'); sys.stdout.flush();"
        " sys.stdout.buffer.write(b'caf\\xe9\\n')"
    )
    pieces = [started.next() for _ in range(3)]
    assert [len(str(piece)) for piece in pieces[:3]] == [1_000_000] * 3
    assert [started.next(), started.next()] == ["caf\ufffd", 0]
