"""Notices that a process makes no progress, and says where each of its threads is.

Three clocks, because a hang may hold the GIL. A Python thread acts after T: stacks to the log and
to the coordinator, exit 124 if asked. Where it cannot run, because some thread holds the GIL,
faulthandler's C timer writes the stacks to the log after 1.25 T, and a POSIX timer that calls
`_exit(124)` in a thread of libc ends the process after 1.25 T + 5 s.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from typing import Any

from holdfast.coordination import CoordinationError, StatusClient
from holdfast.coordination.diagnosis.findings import diagnose
from holdfast.coordination.process.diagnose import gather
from holdfast.coordination.vitals import stacks

from ..group.late import tell_once
from ..group.runtime import (
    current_client,
    current_group_client,
    current_spec,
    distributed_process_id,
)
from ..threads import on_thread, start_daemon

_log = logging.getLogger(__name__)

HANG_EXIT_CODE = 124
STACKS_PREFIX = "holdfast/stacks/"
_HANGS_PREFIX = "holdfast/hangs/"
# What one process may put on the coordinator: the stacks of about 200 threads. All together leave
# room for the keys that saves need.
_STACKS_BYTES = 256 * 1024
_ALL_STACKS_BYTES = 64 * 1024 * 1024
_LAST_RESORT_S = 5.0
# Of these, for a process that ends: to find out why.
_WHY_S = 4.0
# For a process that stays: to wait for what another finds out.
_ANOTHER_S = 60.0
_MOST_FINDINGS = 5


@contextmanager
def watchdog(timeout_s: float, *, exit: bool = False) -> Iterator[Watchdog]:
    """Watches over a block, and reports the stacks of all threads where it makes no progress.

    After `timeout_s` seconds they go to the log and to the coordinator. Progress is the entry,
    `progress()` on what it gives, and every `reached_preemption(step)`. After a hang was reported
    it waits for the next progress before it reports again. After `initialize()` the log also says
    why the job hangs, in the words of `holdfast status`. With `exit` it then ends the process with
    exit code 124, which launchers take for a hang. The stacks stay with the coordinator under
    `holdfast/stacks/<task>`, for `holdfast status --stacks`. Blocks may nest, in any thread.
    """
    dog = Watchdog(timeout_s, exit=exit)
    try:
        yield dog
    finally:
        dog.close()


class Watchdog:
    """Watches from its construction until `close()`; see `watchdog`. Thread-safe."""

    def __init__(self, timeout_s: float, *, exit: bool = False) -> None:
        if timeout_s <= 0:
            raise ValueError(f"watchdog: expected a timeout_s above 0, found {timeout_s}")
        self.timeout_s = timeout_s
        self._exit = exit
        self._progress_s = time.monotonic()
        self._reported_s: float | None = None
        self._closed = threading.Event()
        self._pauses: list[None] = []
        self.hangs = 0
        # Before the block begins: it may take the GIL at once and never give it back.
        _watch_list.add(self)
        self._thread = start_daemon("watchdog", self._watch)

    def progress(self) -> None:
        """Records progress of the program. Takes less than a microsecond."""
        self._progress_s = time.monotonic()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Surrounds a wait that has a time limit of its own: however long, it is no hang."""
        self.progress()
        self._pauses.append(None)
        try:
            yield
        finally:
            self.progress()
            self._pauses.pop()

    def close(self) -> None:
        """Stops watching. Waits for a report that is being written, for a few seconds at most."""
        self._closed.set()
        _watch_list.remove(self)
        self._thread.join(_LAST_RESORT_S)

    @property
    def c_timer_at_s(self) -> float:
        """When the timers of C may act for it: later than its own thread does."""
        return self._progress_s + 1.25 * self.timeout_s

    @property
    def ends_process(self) -> bool:
        """Whether a hang ends the process."""
        return self._exit

    @property
    def has_reported(self) -> bool:
        """Whether it has reported a hang, and there was no progress since."""
        return self._reported_s == self._progress_s

    def statistics(self) -> dict[str, Any]:
        """Returns the seconds since the last progress and how many hangs were reported."""
        return {"idle_s": time.monotonic() - self._progress_s, "hangs": self.hangs}

    def _watch(self) -> None:
        while True:
            if self._pauses:
                self.progress()
            idle_s = time.monotonic() - self._progress_s
            hanging = idle_s >= self.timeout_s
            if hanging and not self.has_reported:
                self._reported_s = self._progress_s
                self._hang(idle_s)
            # Four checks in T keep the C timers, which cannot see progress, at least T away from
            # the last one.
            check_s = self.timeout_s / 4
            if self._closed.wait(check_s if hanging else min(self.timeout_s - idle_s, check_s)):
                return
            _watch_list.arm()

    def _hang(self, idle_s: float) -> None:
        self.hangs += 1
        text = f"no progress for {idle_s:.0f} s (watchdog of {self.timeout_s:g} s)"
        all_stacks = stacks()
        _log.error("%s; stacks of all threads:\n%s", text, all_stacks)
        reporter = start_daemon("stacks", _report_hang, text, all_stacks, self._exit)
        if self._exit:
            reporter.join(_LAST_RESORT_S)
            os.write(2, f"holdfast: {text}: exit {HANG_EXIT_CODE}\n{all_stacks}\n".encode())
            os._exit(HANG_EXIT_CODE)


def progress() -> None:
    """Records progress with all watchdogs of this process."""
    _watch_list.progress()


def _report_hang(text: str, all_stacks: str, ending: bool) -> None:
    """Reports the stacks to the coordinator, and its end where the process ends; logs why.

    Does nothing where there is no coordinator.
    """
    with suppress(Exception):
        client: Any = current_client()
        task = distributed_process_id()
        spec = current_spec()
        count = 1 if spec is None else spec.num_processes
        most = min(_STACKS_BYTES, _ALL_STACKS_BYTES // count)
        body = json.dumps({"unix_s": time.time(), "why": text, "stacks": all_stacks[-most:]})
        client.key_value_set(f"{STACKS_PREFIX}{task}", body, True)
        # Why comes first: once the others learn that this process ends, they are elsewhere.
        wait([on_thread("why", _log_why)], _WHY_S)
        if ending and hasattr(client, "report_error"):
            client.report_error(f"hang: {text}")


def _log_why() -> None:
    """Logs why the job hangs, in the words of `holdfast status`, where a coordinator can tell.

    The first process that hangs in a minute finds out, and asks all others where they are, which
    thousands at once must not do.
    """
    spec = current_spec()
    if spec is None:
        return

    def find() -> str:
        with StatusClient(spec.coordinator, spec.new_credentials()) as status:
            findings = diagnose(gather(status, hangs=True))
        return "; ".join(finding.text for finding in findings[:_MOST_FINDINGS])

    folder = f"{_HANGS_PREFIX}{int(time.time() // 60)}"
    with suppress(CoordinationError):
        if why := tell_once(current_group_client(), folder, find, _ANOTHER_S):
            _log.error("why the job hangs: %s", why)


class _WatchList:
    """The watchdogs of this process, whatever job it is in, and the two timers of C for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the rest
        self._watching: list[Watchdog] = []
        self._exit_timer: ctypes.c_void_p | None = None

    def add(self, dog: Watchdog) -> None:
        """Watches, with timers of C too."""
        with self._lock:
            self._watching.append(dog)
        self.arm()

    def remove(self, dog: Watchdog) -> None:
        """Watches no more."""
        with self._lock:
            if dog in self._watching:
                self._watching.remove(dog)
        self.arm()

    def progress(self) -> None:
        """Records progress with all."""
        for dog in self._watching:
            dog.progress()

    def before_fork(self) -> None:
        """Stops faulthandler's timer, and holds it until `after_fork`.

        It is a thread that a child does not have: the child's first call of faulthandler's would
        wait for it for ever.
        """
        self._lock.acquire()
        if self._watching:
            faulthandler.cancel_dump_traceback_later()

    def after_fork(self) -> None:
        """Sets the timer again."""
        self._lock.release()
        if self._watching:
            self.arm()

    def forget(self) -> None:
        """Leaves the parent's watchdogs to the parent: a forked child has none of their threads."""
        self._watching.clear()
        self._exit_timer = None
        self._lock.release()

    def arm(self) -> None:
        """Sets both timers for the watchdog that would act first, or stops them."""
        with self._lock:
            now_s = time.monotonic()
            dumping = [dog.c_timer_at_s for dog in self._watching if not dog.has_reported]
            if dumping:
                faulthandler.dump_traceback_later(max(0.1, min(dumping) - now_s), file=2)
            else:
                faulthandler.cancel_dump_traceback_later()
            ending = [dog.c_timer_at_s for dog in self._watching if dog.ends_process]
            self._set_exit_timer(max(0.1, min(ending) - now_s) + _LAST_RESORT_S if ending else 0.0)

    def _set_exit_timer(self, after_s: float) -> None:
        """Makes libc call `_exit(124)` after so many seconds, without the GIL (0: never).

        Does nothing but on Linux.
        """
        if sys.platform != "linux" or (self._exit_timer is None and not after_s):
            return
        libc: Any = ctypes.CDLL(None)
        if self._exit_timer is None:
            function = ctypes.cast(libc._exit, ctypes.c_void_p)
            event = _SigEvent(value=HANG_EXIT_CODE, notify=_SIGEV_THREAD, function=function)
            timer = ctypes.c_void_p()
            if libc.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)):
                return
            self._exit_timer = timer
        whole_s = int(after_s)
        spec = _TimerSpec(value=(whole_s, int((after_s - whole_s) * 1e9)))
        libc.timer_settime(self._exit_timer, 0, ctypes.byref(spec), None)


_SIGEV_THREAD = 2  # which calls function(value)


class _SigEvent(ctypes.Structure):
    """Linux's `struct sigevent` with SIGEV_THREAD: sigevent(7)."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("padding", ctypes.c_char * 32),
    )


class _TimerSpec(ctypes.Structure):
    """`struct itimerspec`: an interval, left 0, and the time until the one expiry."""

    _fields_ = (("interval", ctypes.c_long * 2), ("value", ctypes.c_long * 2))


_watch_list = _WatchList()


os.register_at_fork(
    before=_watch_list.before_fork,
    after_in_parent=_watch_list.after_fork,
    after_in_child=_watch_list.forget,
)
