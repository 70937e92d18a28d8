"""Signals as a source of notices, which a busy main thread cannot hide."""

from __future__ import annotations

import signal
import time

from tests.support.cluster import Processes, run_processes

HEAD = """
import os, signal, sys, threading, time
from holdfast.multihost.preemption.signals import Signals
seen = threading.Event()
def notify(notice):
    if notice:
        print(notice.reason, flush=True)
        seen.set()
"""


def test_a_main_thread_in_native_code_does_not_hide_the_notice() -> None:
    """The notice comes while the main thread sits in a native call that no signal interrupts, and
    the user's handler runs after it.
    """
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
def announce():  # once the main thread waits for this very mutex: before, its own handler could come first
    while hex(ctypes.addressof(mutex)) not in open(f"/proc/self/task/{os.getpid()}/syscall").read():
        time.sleep(0.01)
    print("busy", flush=True)
Signals().start(notify_and_release)
threading.Thread(target=announce, daemon=True).start()
libc.pthread_mutex_lock(mutex)  # no signal interrupts it, and only the notice ends it
print("back", flush=True)
"""
    )
    with Processes(script, 1) as processes:
        processes.wait_for(0, "busy")
        processes.kill(0, signal.SIGTERM)
        finished = processes.wait()[0]
    assert finished.code == 0
    assert (
        finished.output.index("SIGTERM received")
        < finished.output.index("the user's handler True")
        < finished.output.index("back")
    )


def test_a_later_handler_of_the_program_and_another_wakeup_descriptor_are_served_too() -> None:
    """The notice comes although the program set its own handler later; a wake-up descriptor that
    stood before still gets its bytes.
    """
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
    """Repeated while the program asks nothing, SIGTERM ends it with exit code 143 and all stacks;
    at once after the first it does not.
    """
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
    """A program that goes on asking about steps is not stuck, however often SIGTERM comes."""
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
