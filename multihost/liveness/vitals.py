"""What a process says of itself all the time: its step, memory, waiting, and that it runs.

One thread looks twice a second, another reports to the coordinator every two seconds, or less often
in large jobs, and at the first step. For others of this host there is a file in memory
(`coordination/process/local_look.py` reads it through /proc): the time of the last look is when the
interpreter last ran, and whoever writes into it gets the stacks of all threads. A process whose
interpreter some thread holds for good answers a signal instead, from C: faulthandler writes the
stacks.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import FrameType
from typing import Any

from holdfast.coordination import CoordinationError
from holdfast.coordination.diagnosis.stacks import Frame, Thread
from holdfast.coordination.vitals import (
    LOOK_SIGNAL,
    VITALS_INTERVAL_S,
    main_sleeps,
    stacks,
    vitals_file,
)

from ..instruments import compilations
from ..job import current_job
from ..threads import start_daemon

_REPORT_INTERVAL_S = 2.0
_REPORTS_PER_S = 256  # of all processes together
_MEMORY = 0.1  # weight of one look in the share of waiting: that of the last five seconds, about


class Vitals:
    """Reports on this process until `close()`. Thread-safe.

    Never raises for a coordinator that does not answer.
    """

    def __init__(self, client: Any, process_id: int, num_processes: int) -> None:
        self._client = client
        self._interval_s = max(_REPORT_INTERVAL_S, num_processes / _REPORTS_PER_S)
        self._step: int | None = None
        self._asks_preemption = False
        self._for_devices_s: float | None = None  # since when a save waits
        self._waiting_share = 0.0
        self._closed = threading.Event()
        self._due = threading.Event()  # a report, before its interval is over
        self._process_id = process_id
        self._before = compilations.statistics()  # in an attempt that this process has outlived
        self._looker = start_daemon("vitals", self._look)
        start_daemon("vitals-report", self._report)

    def note_step(self, step: int) -> None:
        """Notes the step that the program is at. Takes less than a microsecond."""
        first = self._step is None
        self._step = step
        if first:  # the launcher waits for it, to start standbys
            self._due.set()

    def note_asked(self) -> None:
        """Notes that the program asks whether it is to save and stop."""
        self._asks_preemption = True

    @contextmanager
    def for_devices(self) -> Iterator[None]:
        """Surrounds a save's wait for what the devices compute."""
        self._for_devices_s = time.monotonic()
        try:
            yield
        finally:
            self._for_devices_s = None

    def statistics(self) -> dict[str, Any]:
        """Returns the step, the resident memory, and the share of time in which it waits.

        That is: in which the main thread waits for devices or for others; and for how long a save
        has waited for devices, and what was compiled in this attempt.
        """
        since_s = self._for_devices_s
        return {
            "for_devices_s": 0.0 if since_s is None else time.monotonic() - since_s,
            "step": self._step,
            "asks_preemption": self._asks_preemption,
            **_memory(),
            "waiting_share": round(self._waiting_share, 3),
            **{
                name: number - self._before[name]
                for name, number in compilations.statistics().items()
            },
        }

    def close(self) -> None:
        """Stops; the coordinator keeps what was reported."""
        self._closed.set()
        self._due.set()
        self._looker.join()

    def _look(self) -> None:
        main = threading.main_thread().ident
        file = _open_file(self._process_id)
        while not self._closed.wait(VITALS_INTERVAL_S):
            waits = _waits(sys._current_frames().get(main or 0), main_sleeps())
            self._waiting_share += _MEMORY * (waits - self._waiting_share)
            if file is not None:
                _answer(file)
        if file is not None:
            faulthandler.unregister(LOOK_SIGNAL)
            os.close(file)

    def _report(self) -> None:
        # On a thread of its own: a coordinator that does not answer must not stop the looks.
        while True:
            self._due.wait(self._interval_s)
            self._due.clear()
            if self._closed.is_set():
                return
            with suppress(CoordinationError):
                self._client.report(**self.statistics(), report_interval_s=self._interval_s)


def _waits(frame: FrameType | None, asleep: bool) -> bool:
    calls = []
    while frame is not None:
        calls.append(Frame(frame.f_code.co_filename, 0, frame.f_code.co_name))
        if calls[-1].library != "python":
            break
        frame = frame.f_back
    return bool(Thread("", tuple(reversed(calls)), asleep).waits)


def _open_file(process_id: int) -> int | None:
    """Returns the file in memory, None where this system has none or the signal is another's.

    This thread will take the signal.
    """
    if sys.platform != "linux" or signal.getsignal(LOOK_SIGNAL) is not signal.SIG_DFL:
        return None
    file = os.memfd_create(vitals_file(process_id, threading.get_native_id()))
    # The reader truncates the file: what is written next has to begin at its new end.
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
    faulthandler.register(LOOK_SIGNAL, file=file, all_threads=True, chain=False)
    signal.siginterrupt(LOOK_SIGNAL, False)
    return file


def _answer(file: int) -> None:
    """Says that the interpreter runs, and answers whoever has asked for stacks."""
    if os.pread(file, 2, 0) == b"?":
        os.ftruncate(file, 0)
        os.write(file, f"{stacks()}\n.".encode())
    else:
        os.utime(file)


def _memory() -> dict[str, int]:
    # Where no file can be opened, the coordinator keeps what it knows.
    with suppress(OSError), open("/proc/self/statm") as file:
        return {"memory_bytes": int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")}
    return {}


def last_vitals() -> dict[str, Any]:
    """Returns what a process that leaves says of itself last; {} where nothing is reported."""
    vitals = current_job().get(Vitals)
    return {} if vitals is None else vitals.statistics()


def note_asked() -> None:
    """Notes, for the reports, that the program asks whether it is to save and stop."""
    vitals = current_job().get(Vitals)
    if vitals is not None:
        vitals.note_asked()


def note_step(step: int) -> None:
    """Notes the step that the program is at, for the reports. Takes less than a microsecond."""
    vitals = current_job().get(Vitals)
    if vitals is not None:
        vitals.note_step(step)


def waiting_for_devices() -> AbstractContextManager[None]:
    """Surrounds a save's wait for what the devices compute, for the reports."""
    vitals = current_job().get(Vitals)
    return nullcontext() if vitals is None else vitals.for_devices()
