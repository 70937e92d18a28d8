"""Where notices come from: signals that a busy main thread cannot hide, a file, GCE's metadata, Slurm's end time."""

from __future__ import annotations

import queue
import signal
import time
from pathlib import Path

import pytest

from holdfast.multihost import GceMetadata, Notice, Polled, SlurmEnd, Source, WatchedFile
from holdfast.multihost.preemption.preemption import default_sources, merge
from tests.support.cluster import Processes, run_processes
from tests.support.metadata import metadata_server

HEAD = """
import os, signal, sys, threading, time
from holdfast.multihost.preemption.signals import Signals
seen = threading.Event()
def notify(notice):
    if notice:
        print(notice.reason, flush=True)
        seen.set()
"""


class Watched:
    """Starts a source and hands out what it says, in order."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._said: queue.Queue[Notice | None] = queue.Queue()
        source.start(self._said.put)

    def next(self) -> Notice | None:
        return self._said.get(timeout=30)

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *error: object) -> None:
        self.source.close()
        assert self._said.empty()


def test_a_watched_file_raises_and_its_removal_withdraws(tmp_path: Path) -> None:
    """The notice carries the file's first line; removing the file withdraws it; and again."""
    path = tmp_path / "drain"
    with Watched(WatchedFile(path, every_s=0.01)) as watched:
        for reason in ("spot", "again"):
            fresh = tmp_path / "fresh"
            fresh.write_text(f"{reason}\nmore\n")
            fresh.rename(path)
            assert watched.next() == Notice(f"{path} exists: {reason}")
            path.unlink()
            assert watched.next() is None


def test_gce_preemption_and_maintenance_are_told_apart_and_withdrawn() -> None:
    """`preempted` gives 30 s, a TERMINATE maintenance event 60 s; a migration is none; an event called off withdraws."""
    with metadata_server() as server, Watched(GceMetadata(host=server.address, every_s=0.01)) as watched:
        server.values["maintenance-event"] = "MIGRATE_ON_HOST_MAINTENANCE"
        server.values["maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"
        notice = watched.next()
        assert notice is not None and notice.reason == "GCE terminates this machine for maintenance"
        assert notice.deadline_unix_s is not None and 50 < notice.deadline_unix_s - time.time() <= 60
        server.values["maintenance-event"] = "NONE"
        assert watched.next() is None
        server.values["preempted"] = "TRUE"
        notice = watched.next()
        assert notice is not None and notice.reason == "GCE preempts this machine"
        assert notice.deadline_unix_s is not None and 20 < notice.deadline_unix_s - time.time() <= 30


def test_a_source_that_fails_keeps_its_notice_and_asks_again(caplog: pytest.LogCaptureFixture) -> None:
    """Errors are logged once and change nothing; the next answer counts."""
    notice = Notice("going")
    answers = iter([notice, OSError("no route"), OSError("no route"), notice, None])
    done = queue.Queue[bool]()

    def look() -> Notice | None:
        answer = next(answers, "end")
        if isinstance(answer, Exception):
            raise answer
        if answer == "end":
            done.put(True)
            return None
        return answer  # type: ignore[return-value]

    with Watched(Polled("engine", look, every_s=0.001)) as watched:
        assert [watched.next(), watched.next()] == [notice, None]
        done.get(timeout=30)
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert [record.getMessage() for record in warnings] == ["source engine of preemption notices: no route; asking again"]


def test_slurms_end_time_is_a_notice_ahead_of_it() -> None:
    """The notice comes `lead_s` before the end, with the end as its deadline; inside a Slurm job it is there by default."""
    end = time.time() + 60.2
    with Watched(SlurmEnd(end, lead_s=60, every_s=0.01)) as watched:
        assert watched.next() == Notice("Slurm's time limit", end)
        assert time.time() >= end - 60
    names = [source.name for source in default_sources({"SLURM_JOB_END_TIME": "1800000000"})]
    assert names[:2] == ["signal", "slurm"]
    assert "slurm" not in [source.name for source in default_sources({})]


def test_notices_merge_to_the_earliest_deadline() -> None:
    """The earliest deadline wins over later ones and over none."""
    early, late, open_ended = Notice("a", 10.0), Notice("b", 20.0), Notice("c")
    assert merge([open_ended, late, early]) == early
    assert merge([open_ended]) == open_ended
    assert merge([]) is None


def test_a_main_thread_in_native_code_does_not_hide_the_notice() -> None:
    """The notice comes while the main thread sits in a native call that no signal interrupts, and the user's handler runs after it."""
    script = (
        HEAD
        + """
signal.signal(signal.SIGTERM, lambda number, frame: print(f"the user's handler {seen.is_set()}", flush=True))
import ctypes
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
libc.pthread_mutex_lock(mutex)
def notify_and_release(notice):
    notify(notice)
    libc.pthread_mutex_unlock(mutex)
Signals().start(notify_and_release)
print("busy", flush=True)
libc.pthread_mutex_lock(mutex)  # no signal interrupts it, and only the notice ends it
print("back", flush=True)
"""
    )
    with Processes(script, 1) as processes:
        processes.wait_for(0, "busy")
        processes.kill(0, signal.SIGTERM)
        finished = processes.wait()[0]
    assert finished.code == 0
    assert finished.output.index("SIGTERM received") < finished.output.index("the user's handler True") < finished.output.index("back")


def test_a_later_handler_of_the_program_and_another_wakeup_descriptor_are_served_too() -> None:
    """The notice comes although the program set its own handler later; a wake-up descriptor that stood before still gets its bytes."""
    script = (
        HEAD
        + """
import socket
mine, theirs = socket.socketpair()
theirs.setblocking(False)
signal.set_wakeup_fd(theirs.fileno())
source = Signals((signal.SIGTERM, signal.SIGUSR1))
source.start(notify)
signal.signal(signal.SIGTERM, lambda number, frame: print("later handler", flush=True))
os.kill(os.getpid(), signal.SIGTERM)
assert seen.wait(30)
assert mine.recv(1) == bytes([signal.SIGTERM])
source.close()
assert signal.set_wakeup_fd(-1) == theirs.fileno()
assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
"""
    )
    output = run_processes(script, 1)[0]
    assert "later handler" in output and "SIGTERM received" in output


def test_asyncio_takes_the_wakeup_descriptor_and_the_notice_still_comes() -> None:
    """With an asyncio loop that watches another signal, our handler gives the notice."""
    script = (
        HEAD
        + """
import asyncio
Signals().start(notify)
async def main():
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print)
    os.kill(os.getpid(), signal.SIGTERM)
    while not seen.is_set():
        await asyncio.sleep(0.01)
asyncio.run(main())
"""
    )
    assert "SIGTERM received" in run_processes(script, 1)[0]


def test_a_second_sigterm_ends_a_stuck_process_with_its_stacks() -> None:
    """Repeated while the program asks nothing, SIGTERM ends it with exit code 143 and all stacks; at once after the first it does not."""
    script = (
        HEAD
        + """
from holdfast import multihost
from holdfast.multihost.preemption import preemption as notices
notices.start(None, sources=[Signals(repeat_s=0.5)])
os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGTERM)
multihost.reached_preemption(0)
print("stuck", flush=True)
threading.Event().wait()
"""
    )
    with Processes(script, 1) as processes:
        processes.wait_for(0, "stuck")
        deadline = time.monotonic() + 60
        while processes.popens[0].poll() is None and time.monotonic() < deadline:
            processes.kill(0, signal.SIGTERM)
            time.sleep(0.1)
        finished = processes.wait()[0]
    assert finished.code == 128 + signal.SIGTERM
    assert "SIGTERM again after" in finished.output and "most recent call first" in finished.output


def test_a_second_sigterm_does_not_end_a_process_that_still_asks() -> None:
    """A program that goes on asking about steps is not stuck, however often it is told."""
    script = (
        HEAD
        + """
from holdfast import multihost
from holdfast.multihost.preemption import preemption as notices
notices.start(None, sources=[Signals(repeat_s=2)])
end = time.monotonic() + 3
step = 0
while time.monotonic() < end:
    os.kill(os.getpid(), signal.SIGTERM)
    multihost.reached_preemption(step)
    step += 1
    time.sleep(0.01)
"""
    )
    run_processes(script, 1)
