"""One case of signals as a source of notices. argv: index, count, case."""

from __future__ import annotations

import asyncio
import ctypes
import io
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from holdfast import multihost
from holdfast.multihost import Notice
from holdfast.multihost.preemption import preemption
from holdfast.multihost.preemption.signals import Signals

seen = threading.Event()


def notify(notice: Notice | None) -> None:
    if notice:
        print(notice.reason, flush=True)
        seen.set()


def native() -> None:
    """The main thread sits in a lock of libc's, which no signal interrupts."""
    signal.signal(
        signal.SIGTERM, lambda number, frame: print(f"user's handler {seen.is_set()}", flush=True)
    )
    libc = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)

    def notify_and_release(notice: Notice | None) -> None:
        notify(notice)
        libc.pthread_mutex_unlock(mutex)

    def announce() -> None:
        # Once the main thread waits for this very mutex: before, its own handler could come first.
        syscall = Path(f"/proc/self/task/{os.getpid()}/syscall")
        while hex(ctypes.addressof(mutex)) not in syscall.read_text():
            time.sleep(0.01)
        print("busy", flush=True)

    Signals().start(notify_and_release)
    threading.Thread(target=announce, daemon=True).start()
    libc.pthread_mutex_lock(mutex)
    print("back", flush=True)


def later_handler() -> None:
    """The program sets a handler later, and had a wake-up descriptor before."""
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


def in_asyncio() -> None:
    """A loop of asyncio has the wake-up descriptor."""
    Signals().start(notify)

    async def main() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.to_thread(seen.wait, 30)

    asyncio.run(main())
    assert seen.is_set()


def stuck() -> None:
    """The program got its notice twice at once, and asks nothing any more. What it has put in the
    place of sys.stderr is no file.
    """
    sys.stderr = io.StringIO()
    preemption.start(None, sources=[Signals(repeat_s=0.5)])
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    multihost.reached_preemption(0)
    print("stuck", flush=True)
    threading.Event().wait()


def asking() -> None:
    """The program goes on asking, for longer than a repeat has to be apart."""
    preemption.start(None, sources=[Signals(repeat_s=2)])
    end_s = time.monotonic() + 3
    step = 0
    while time.monotonic() < end_s:
        os.kill(os.getpid(), signal.SIGTERM)
        multihost.reached_preemption(step)
        step += 1
        time.sleep(0.01)


def ctrl_c() -> None:
    """A source that has SIGINT, too."""
    Signals((signal.SIGINT, signal.SIGTERM)).start(notify)
    os.kill(os.getpid(), signal.SIGINT)
    assert seen.wait(30)


def in_handler() -> None:
    """A handler of the program's notifies, at whatever line of a call that does so, too."""
    calls = []

    def handle(number: int, frame: object) -> None:
        calls.append(number)
        multihost.notify_preemption(Notice("by the handler"))

    def interrupt(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        if event == "line":
            signal.raise_signal(signal.SIGUSR1)
        return interrupt

    multihost.initialize()
    signal.signal(signal.SIGUSR1, handle)
    sys.settrace(interrupt)
    multihost.notify_preemption(Notice("by the loop"))
    sys.settrace(None)
    assert len(calls) > 10 and multihost.reached_preemption(0)


def again() -> None:
    """A source that got a signal, and was closed, is started anew: the next is no repeat."""
    source = Signals()
    for _ in range(2):
        seen.clear()
        source.start(notify)
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen.wait(30)
        source.close()


CASES = {
    "native": native,
    "later handler": later_handler,
    "asyncio": in_asyncio,
    "stuck": stuck,
    "asking": asking,
    "again": again,
    "ctrl-c": ctrl_c,
    "in a handler": in_handler,
}
CASES[sys.argv[3]]()
