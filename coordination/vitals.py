"""What a process shows of itself: the stacks of its threads, the file in memory by which others of
its host look at it, and its standard streams.
"""

from __future__ import annotations

import os
import platform
import signal
import sys
import threading
import time
import traceback

from .names import on_the_wire

LOOK_SIGNAL = int(getattr(signal, "SIGRTMAX", 64)) - 2
"""Has a process of a job write its stacks from C into its file of vitals, though some thread holds
its interpreter.
"""
VITALS_INTERVAL_S = 0.5
"""So often a process whose interpreter runs touches its file of vitals."""
ASLEEP = "  (asleep in C++)"
"""The line after a thread's frames that says that its latest call has not returned from C++."""

ENDS_WITH = "the process ends with "
"""Begins what a process reports that ends by an exception: its class and sentence follow."""
LEAVES_AS_ASKED = "the process leaves as a notice has asked it to"

_PROBE_S = 0.01
_FUTEX = {"x86_64": "202", "aarch64": "98"}  # the system call in which a thread waits for another


def vitals_file(process_id: int, thread: int) -> str:
    """Returns the name of the file in memory by which a process lets others of its host look at it;
    `thread` takes LOOK_SIGNAL.
    """
    return f"holdfast-vitals-{process_id}-{thread}"


def stacks() -> str:
    """Returns where each thread of this process is, the main thread last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] == main)
    text = "\n".join(
        f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in frames
    )
    return on_the_wire(f"{text}{ASLEEP}\n" if main_sleeps() else text)


def main_sleeps() -> bool:
    """Returns whether the main thread is asleep until another thread wakes it. Blocks for 10 ms.

    Python frames do not show a wait inside C++, such as that for a device. A thread that computes,
    reads a file or sleeps for a time is in another system call, or in none. False where the system
    does not tell.
    """
    main = threading.main_thread().ident
    futex = _FUTEX.get(platform.machine())
    if sys.platform != "linux" or main is None or futex is None:
        return False
    clock = time.pthread_getcpuclockid(main)
    began = time.clock_gettime(clock)
    # A thread that wants the interpreter sleeps like that, too, but gets it meanwhile.
    time.sleep(_PROBE_S)
    if time.clock_gettime(clock) - began > _PROBE_S / 10:
        return False
    try:
        with open(f"/proc/self/task/{os.getpid()}/syscall") as file:
            return file.read().partition(" ")[0] == futex
    except OSError:
        return False


def fill_standard_streams() -> None:
    """Opens the null device for each standard stream that is closed, for this process and others.

    The next socket or file would get its number, and with it whatever the process, or a library in
    C++, prints. Call it before either is opened. Does nothing where all three are open.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
            continue
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
        if null == number:
            os.set_inheritable(number, True)
        else:
            os.dup2(null, number)
            os.close(null)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
