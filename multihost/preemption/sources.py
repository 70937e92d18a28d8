"""Where notices of preemption come from: signals, a watched file, GCE's metadata server, Slurm's end time, and whatever implements
Source.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Notice:
    """Says that this machine is to be given back: why, and by when (`deadline_unix_s`; None: not known)."""

    reason: str
    deadline_unix_s: float | None = None


# Gives a source's notice as it now stands; None withdraws it. May be called from any thread, as often as one likes.
Notify = Callable[[Notice | None], None]


class Source(Protocol):
    """Is all that the sync point needs of a place where notices come from. `name` tells sources of one process apart."""

    @property
    def name(self) -> str: ...
    def start(self, notify: Notify) -> None:
        """Begins to watch, in the background, and to call `notify` with each change."""

    def close(self) -> None:
        """Stops watching. May be called twice."""


class Polled:
    """Asks `look` every `every_s` seconds, in a thread of its own: the notice as it now stands, or None.

    A `look` that raises is logged, once per run of failures, and leaves the notice as it was. Launchers derive their sources from it.
    """

    def __init__(self, name: str, look: Callable[[], Notice | None], *, every_s: float) -> None:
        self.name = name
        self._look = look
        self._every_s = every_s
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, notify: Notify) -> None:
        """Begins to ask, at once and then periodically."""
        self._thread = threading.Thread(target=self._run, args=(notify,), name=f"holdfast-notice-{self.name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops asking; waits at most a second for a question under way."""
        self._closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _run(self, notify: Notify) -> None:
        standing: Notice | None = None
        failing = False
        while not self._closed.is_set():
            try:
                seen = self._look()
                failing = False
            except Exception as error:
                _log.log(
                    logging.DEBUG if failing else logging.WARNING, "source %s of preemption notices: %s; asking again", self.name, error
                )
                seen, failing = standing, True
            if seen != standing and not self._closed.is_set():
                standing = seen
                notify(seen)
            self._closed.wait(self._every_s)


class WatchedFile(Polled):
    """Takes the existence of a file for a notice (its first line is the reason), and its removal for the withdrawal."""

    def __init__(self, path: str | os.PathLike[str], *, every_s: float = 0.5) -> None:
        self.path = Path(path)
        super().__init__(f"file {self.path}", self._read, every_s=every_s)

    def _read(self) -> Notice | None:
        try:
            with self.path.open(encoding="utf-8", errors="replace") as file:
                line = file.readline(1000).strip()
        except FileNotFoundError:
            return None
        return Notice(f"{self.path} exists" + (f": {line}" if line else ""))


class GceMetadata(Polled):
    """Asks Google Compute Engine's metadata server whether this machine is being preempted or about to be terminated.

    Source: cloud.google.com/compute/docs, "Handle preemption" and "Live migrate maintenance notices": `instance/preempted` turns TRUE, and
    stays, 30 s before the end; `instance/maintenance-event` is TERMINATE_ON_HOST_MAINTENANCE from a minute before until it is over or
    called off.
    """

    def __init__(self, *, host: str | None = None, every_s: float = 1.0) -> None:
        self._host = host or os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
        self._standing: Notice | None = None
        super().__init__("gce", self._ask, every_s=every_s)

    def _ask(self) -> Notice | None:
        notice: Notice | None = None
        if self._get("preempted") == "TRUE":
            notice = Notice("GCE preempts this machine", time.time() + 30)
        elif self._get("maintenance-event").startswith("TERMINATE"):
            notice = Notice("GCE terminates this machine for maintenance", time.time() + 60)
        if notice is None or self._standing is None or notice.reason != self._standing.reason:
            self._standing = notice  # the deadline counts from when we first saw it
        return self._standing

    def _get(self, path: str) -> str:
        request = urllib.request.Request(f"http://{self._host}/computeMetadata/v1/instance/{path}", headers={"Metadata-Flavor": "Google"})
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the metadata server is never behind a proxy
        with direct.open(request, timeout=5) as answer:
            text: str = answer.read(1000).decode()
            return text.strip()

    @staticmethod
    def is_here() -> bool:
        """Says whether this machine is one of GCE's, without asking the network."""
        try:
            return Path("/sys/class/dmi/id/product_name").read_text().strip() == "Google Compute Engine"
        except OSError:
            return False


class SlurmEnd(Polled):
    """Takes the time when Slurm will end the job, less `lead_s`, for a notice. Source: SLURM_JOB_END_TIME, in srun(1)'s output
    environment.
    """

    def __init__(self, end_unix_s: float, *, lead_s: float = 120.0, every_s: float = 1.0) -> None:
        self._notice = Notice("Slurm's time limit", end_unix_s)
        self._from_unix_s = end_unix_s - lead_s
        super().__init__("slurm", lambda: self._notice if time.time() >= self._from_unix_s else None, every_s=every_s)


# Added to a signal's number where the byte comes from the Python handler and not from the C handler. Numbers end at 64.
_HANDLED = 128


class Signals:
    """Takes signals for a notice that is never withdrawn. Owns their handlers, and calls whatever handler stood before after its own.

    The C-level handler writes the signal's number into a socket (`signal.set_wakeup_fd`) that a reader thread waits on, so a main thread
    inside XLA does not hide the notice. A handler that the program sets later replaces only the Python half: the notice still comes.
    `asyncio` takes the wake-up descriptor too: then the notice comes from the Python handler, when the main thread gets to it.

    A repeat ends the process, with all stacks on stderr and exit code 128 + number, if it comes at least `repeat_s` after the first and
    `seconds_idle()` (since the program last asked about a step) is at least that too: a process that still asks is not stuck.
    """

    name = "signal"

    def __init__(
        self,
        numbers: Sequence[int] = (signal.SIGTERM,),
        *,
        grace_s: float | None = None,
        repeat_s: float = 10.0,
        seconds_idle: Callable[[], float] = lambda: float("inf"),
    ) -> None:
        self.numbers = tuple(signal.Signals(number) for number in numbers)
        self.seconds_idle = seconds_idle
        self._grace_s = grace_s
        self._repeat_s = repeat_s
        self._notify: Notify = lambda notice: None
        self._first_s: float | None = None
        self._read = False  # the C handler writes to us: what the Python handler says is no news
        self._previous: dict[int, Any] = {}
        self._earlier_fd = -1
        self._ours: socket.socket | None = None
        self._theirs: socket.socket | None = None

    def start(self, notify: Notify) -> None:
        """Installs the handlers. Python allows that in the main thread only: elsewhere it says so in the log and does nothing."""
        if threading.current_thread() is not threading.main_thread():
            _log.warning("signals %s are not watched: started outside the main thread", [s.name for s in self.numbers])
            return
        self._notify = notify
        self._ours, self._theirs = socket.socketpair()
        self._theirs.setblocking(False)
        threading.Thread(target=self._reader, args=(self._ours,), name="holdfast-signals", daemon=True).start()
        self._earlier_fd = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        for number in self.numbers:
            self._previous[number] = signal.signal(number, self._handle)
            if self._previous[number] is None:
                _log.warning("%s was handled in C (JAX's preemption service); from here on it feeds holdfast's sync point", number.name)

    def close(self) -> None:
        """Puts the earlier handlers back where ours still stand. Outside the main thread they stay and only pass signals on."""
        self._notify = lambda notice: None
        if self._theirs is None or self._ours is None or threading.current_thread() is not threading.main_thread():
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
                        self._read = True
                        self._arrived(number)
                    elif number - _HANDLED in self.numbers and not self._read:
                        self._arrived(number - _HANDLED)
                raw = bytes(number for number in numbers if number < _HANDLED)
                if self._earlier_fd != -1 and raw:
                    with contextlib.suppress(OSError):  # as the C handler would: a full or closed pipe loses the byte
                        os.write(self._earlier_fd, raw)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Only a byte: this may have interrupted code of the main thread that holds one of our locks.
        if self._theirs is not None:
            with contextlib.suppress(OSError):
                self._theirs.send(bytes([_HANDLED + number]))
        previous = self._previous.get(number)
        if callable(previous):
            previous(number, frame)

    def _arrived(self, number: int) -> None:
        now, name = time.monotonic(), signal.Signals(number).name
        if self._first_s is None:
            self._first_s = now
            self._notify(Notice(f"{name} received", None if self._grace_s is None else time.time() + self._grace_s))
        elif now - self._first_s >= self._repeat_s and self.seconds_idle() >= self._repeat_s:
            os.write(2, f"holdfast: {name} again after {now - self._first_s:.0f} s, and the program asks nothing: ending it\n".encode())
            faulthandler.dump_traceback(all_threads=True)
            os._exit(128 + number)


def default_sources(environment: Mapping[str, str] = os.environ) -> list[Source]:
    """Returns the sources that fit this machine: SIGTERM, Slurm's end time inside a Slurm job, GCE's metadata on GCE."""
    sources: list[Source] = [Signals()]
    if environment.get("SLURM_JOB_END_TIME", "").isdigit():
        sources.append(SlurmEnd(float(environment["SLURM_JOB_END_TIME"])))
    if GceMetadata.is_here():
        sources.append(GceMetadata())
    return sources
