"""Signals as a source of preemption notices, which a main thread inside XLA does not hide."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from ..threads import start_daemon
from .sources import Notice, Notify

_log = logging.getLogger(__name__)

# Added to a signal's number where the byte comes from the Python handler and not from the C
# handler. Numbers end at 64.
_HANDLED = 128
# A process that the job has just gathered with learns of it within this time.
_JOINING_S = 1.0
# What stands without a handler of the program's. Python's own one of Ctrl-C would end the loop by
# KeyboardInterrupt.
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)


class Signals:
    """Takes signals for a notice that is never withdrawn.

    Owns their handlers, and calls a handler of the program's that stood before after its own. The
    C-level handler writes the signal's number into a socket (`signal.set_wakeup_fd`) that a reader
    thread waits on, so a main thread inside XLA does not hide the notice. A handler that the
    program sets later replaces only the Python half: the notice still comes. `asyncio` takes the
    wake-up descriptor too: then the notice comes from the Python handler, when the main thread gets
    to it.

    A repeat ends the process, with all stacks on stderr and exit code 128 + number, if it comes at
    least `repeat_s` after the first and `seconds_idle()` (since the program last asked about a
    step) is at least that too: a process that still asks is not stuck.
    """

    def __init__(
        self,
        numbers: Sequence[int] = (signal.SIGTERM,),
        *,
        grace_s: float | None = None,
        repeat_s: float = 10.0,
        seconds_idle: Callable[[], float] = lambda: float("inf"),
    ) -> None:
        self.numbers = tuple(signal.Signals(number) for number in numbers)
        self.name = ", ".join(number.name for number in self.numbers)
        self._seconds_idle = seconds_idle
        self._joined: threading.Event | None = None
        self._grace_s = grace_s
        self._repeat_s = repeat_s
        self._notify: Notify = lambda notice: None
        self._first_s: float | None = None
        # Whether the C handler writes to our socket: then bytes of the Python handler are repeats.
        self._woken = False
        self._previous: dict[int, Any] = {}
        self._earlier_fd = -1
        self._ours: socket.socket | None = None
        self._theirs: socket.socket | None = None

    def ask_idle(self, seconds_idle: Callable[[], float]) -> None:
        """Learns from `seconds_idle()` when the program last asked about a step."""
        self._seconds_idle = seconds_idle

    def end_until(self, joined: threading.Event) -> None:
        """Lets the first signal before `joined` end the process as it would have without us.

        Nobody counts on the process yet.
        """
        self._joined = joined

    def start(self, notify: Notify) -> None:
        """Installs the handlers, once. Outside the main thread it logs a warning, and does nothing.

        Python allows handlers in the main thread only.
        """
        self._notify = notify
        if self._theirs is not None:
            return
        if threading.current_thread() is not threading.main_thread():
            _log.warning(
                "signals %s are not watched: started outside the main thread",
                [s.name for s in self.numbers],
            )
            return
        self._first_s = None  # of an earlier start
        self._ours, self._theirs = socket.socketpair()
        self._theirs.setblocking(False)
        start_daemon("signals", self._reader, self._ours)
        self._earlier_fd = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        for number in self.numbers:
            self._previous[number] = signal.signal(number, self._handle)
            if self._previous[number] is None:
                _log.warning(
                    "%s was handled in C (JAX's preemption service); from here on it feeds"
                    " holdfast's sync point",
                    number.name,
                )

    def close(self) -> None:
        """Puts the earlier handlers back where ours still stand.

        Outside the main thread ours stay, and only pass signals on.
        """
        self._notify = lambda notice: None
        if (
            self._theirs is None
            or self._ours is None
            or threading.current_thread() is not threading.main_thread()
        ):
            return
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if previous is None else previous)
        current = signal.set_wakeup_fd(-1)
        if current == self._theirs.fileno():
            signal.set_wakeup_fd(self._earlier_fd, warn_on_full_buffer=False)
            self._theirs.close()  # ends the reader, which closes the other end
        else:  # somebody has taken it over since, and may pass bytes on to ours: it stays open
            signal.set_wakeup_fd(current, warn_on_full_buffer=False)
        self._ours = self._theirs = None

    def _reader(self, ours: socket.socket) -> None:
        with ours:
            while numbers := ours.recv(256):
                for number in numbers:
                    if number in self.numbers:
                        self._woken = True
                        self._arrived(number)
                    elif number - _HANDLED in self.numbers and not self._woken:
                        self._arrived(number - _HANDLED)
                raw = bytes(number for number in numbers if number < _HANDLED)
                if self._earlier_fd != -1 and raw:
                    # A full or closed pipe loses the byte, as with the C handler.
                    with contextlib.suppress(OSError):
                        os.write(self._earlier_fd, raw)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Only a byte: this may have interrupted code of the main thread that holds one of our
        # locks.
        if self._theirs is not None:
            with contextlib.suppress(OSError):
                self._theirs.send(bytes([_HANDLED + number]))
        previous = self._previous.get(number)
        if callable(previous) and previous not in _DEFAULTS:
            try:
                previous(number, frame)
            except SystemExit:
                _log.warning(
                    "the program's own handler of %s ends the process: what is not saved is lost;"
                    " have it do nothing before the loop has left",
                    signal.Signals(number).name,
                )
                raise

    def _arrived(self, number: int) -> None:
        now_s = time.monotonic()
        name = signal.Signals(number).name
        if self._first_s is None:
            self._first_s = now_s
            if self._is_joining() and self._previous[number] in _DEFAULTS:
                _die_of(number)
            deadline_unix_s = None if self._grace_s is None else time.time() + self._grace_s
            self._notify(Notice(f"{name} received", deadline_unix_s))
            return
        since_s = now_s - self._first_s
        if since_s >= self._repeat_s and self._seconds_idle() >= self._repeat_s:
            line = (
                f"holdfast: {name} again after {since_s:.0f} s, and the program asks nothing:"
                " ending it\n"
            )
            os.write(2, line.encode())
            faulthandler.dump_traceback(file=2, all_threads=True)
            os._exit(128 + number)

    def _is_joining(self) -> bool:
        return self._joined is not None and not self._joined.wait(_JOINING_S)


def _die_of(number: int) -> None:
    """Ends the process by a signal's default action.

    Python sets a default action in the main thread only, which may be inside C++.
    """
    libc: Any = ctypes.CDLL(None)
    libc.signal(number, 0)  # SIG_DFL
    os.kill(os.getpid(), number)
