"""Where notices of preemption come from: a file, GCE, Slurm, Ray Train, and any Source."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..ray_train import is_worker, own_preemption
from ..threads import start_daemon

_log = logging.getLogger(__name__)

_SQUEUE_S = 10.0


@dataclass(frozen=True)
class Notice:
    """This machine is to be given back: why, and by when (`deadline_unix_s`; None: not known).

    Raises TypeError for a reason that is no text, or a time that is no number: no other process
    could be told.
    """

    reason: str
    deadline_unix_s: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str):
            raise TypeError(
                f"Notice: reason={self.reason!r}: expected a text, found a"
                f" {type(self.reason).__name__}; write Notice(str(...))"
            )
        at = self.deadline_unix_s
        if at is not None and (isinstance(at, bool) or not isinstance(at, int | float)):
            raise TypeError(
                f"Notice: deadline_unix_s={at!r}: expected seconds since 1970 as a float, or None,"
                f" found a {type(at).__name__}; write Notice(reason, float(...))"
            )


# Takes a source's notice as it now stands; None withdraws it. May be called from any thread, as
# often as one likes.
Notify = Callable[[Notice | None], None]


class Source(Protocol):
    """All that the sync point needs of a place where notices come from.

    The sources of one process differ by `name`.
    """

    @property
    def name(self) -> str: ...
    def start(self, notify: Notify) -> None:
        """Begins to watch, in the background, and to call `notify` with each change."""

    def close(self) -> None:
        """Stops watching. May be called twice."""


class Polled:
    """Calls `poll` every `every_s` seconds, in a thread of its own.

    `poll()` returns the notice as it now stands, or None. A `poll` that raises, or returns
    something else, is logged, once per run of failures, and leaves the notice as it was. Launchers
    derive their sources from it.
    """

    def __init__(self, name: str, poll: Callable[[], Notice | None], *, every_s: float) -> None:
        self.name = name
        self._poll = poll
        self._every_s = every_s
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, notify: Notify) -> None:
        """Begins to poll, at once and then periodically."""
        closed = self._closed = threading.Event()  # of this thread: it may be started again
        self._thread = start_daemon(f"notice-{self.name}", self._run, notify, closed)

    def close(self) -> None:
        """Stops polling; waits at most a second for a call under way."""
        self._closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _run(self, notify: Notify, closed: threading.Event) -> None:
        standing: Notice | None = None
        failing = False
        while not closed.is_set():
            try:
                seen = self._poll()
                if seen != standing and not closed.is_set():
                    notify(seen)
                    standing = seen
                failing = False
            except Exception as error:
                _log.log(
                    logging.DEBUG if failing else logging.WARNING,
                    "source %s of preemption notices: %s; asking again",
                    self.name,
                    error,
                )
                failing = True
            closed.wait(self._every_s)


class WatchedFile(Polled):
    """Takes the existence of a file for a notice, and its removal for the withdrawal.

    The first line of the file is the reason.
    """

    def __init__(self, path: str | os.PathLike[str], *, every_s: float = 0.5) -> None:
        # Looked at for as long as the program runs, whatever its current folder is by then.
        self.path = Path(path).expanduser().absolute()
        super().__init__(f"file {self.path}", self._read, every_s=every_s)

    def _read(self) -> Notice | None:
        try:
            with self.path.open(encoding="utf-8", errors="replace") as file:
                line = file.readline(1000).strip()
        except FileNotFoundError:
            return None
        return Notice(f"{self.path} exists" + (f": {line}" if line else ""))


class GceMetadata(Polled):
    """Asks Google Compute Engine's metadata server whether this machine is taken away.

    Source: cloud.google.com/compute/docs, "Handle preemption" and "Live migrate maintenance
    notices": `instance/preempted` turns TRUE, and stays, 30 s before the end;
    `instance/maintenance-event` is TERMINATE_ON_HOST_MAINTENANCE from a minute before until it is
    over or called off.
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
        request = urllib.request.Request(
            f"http://{self._host}/computeMetadata/v1/instance/{path}",
            headers={"Metadata-Flavor": "Google"},
        )
        # The metadata server is never behind a proxy.
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(request, timeout=5) as answer:
            text: str = answer.read(1000).decode()
            return text.strip()

    @staticmethod
    def is_here() -> bool:
        """Returns whether this machine is one of GCE's, without asking the network."""
        try:
            product = Path("/sys/class/dmi/id/product_name").read_text()
        except OSError:
            return False
        return product.strip() == "Google Compute Engine"


class SlurmEnd(Polled):
    """Takes the time when Slurm will end the job, less `lead_s`, for a notice.

    A limit may be extended while the job runs, so `squeue` is asked again before the notice, and
    at the start where `end_unix_s` is over already. An end in the past that Slurm does not correct
    is another allocation's: it is ignored with a warning. Source: SLURM_JOB_END_TIME and
    SLURM_JOB_ID, in srun(1)'s output environment; SLURM_TIME_FORMAT, in squeue(1).
    """

    def __init__(self, end_unix_s: float, *, lead_s: float = 120.0, every_s: float = 1.0) -> None:
        self._end_unix_s = end_unix_s
        # Process 0 of a step is first. The job hears of its notice, so that few others ever ask,
        # and those one after another: a scheduler is not asked by thousands at once.
        process, tasks = (os.environ.get(key, "") for key in ("SLURM_PROCID", "SLURM_NTASKS"))
        share = int(process) / int(tasks) if process.isdigit() and tasks.isdigit() else 0.0
        self._lead_s = lead_s * (1 - share / 4)
        self._notice: Notice | None = None
        super().__init__("slurm", self._ask, every_s=every_s)
        if end_unix_s <= time.time() and self._ask_slurm() <= time.time():
            _log.warning(
                "Slurm's time limit was over %.0f s ago, as SLURM_JOB_END_TIME says: it is"
                " another allocation's, and is ignored",
                time.time() - end_unix_s,
            )
            self._end_unix_s = math.inf

    def _ask(self) -> Notice | None:
        if self._notice is None and time.time() >= self._end_unix_s - self._lead_s:
            self._end_unix_s = self._ask_slurm()
            if time.time() >= self._end_unix_s - self._lead_s:
                self._notice = Notice("Slurm's time limit", self._end_unix_s)
        return self._notice

    def _ask_slurm(self) -> float:
        """Returns the job's end as Slurm has it now; as it was known where Slurm does not say."""
        job = os.environ.get("SLURM_JOB_ID")
        if not job:
            return self._end_unix_s
        try:
            end = subprocess.run(
                ["squeue", "--noheader", f"--jobs={job}", "--format=%e"],
                env=os.environ | {"SLURM_TIME_FORMAT": "%s"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_SQUEUE_S,
                check=True,
            ).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return self._end_unix_s
        if end == "NONE":  # no limit
            return math.inf
        return float(end) if end.isdigit() else self._end_unix_s


class RayTrain(Polled):
    """Takes for a notice that Ray Train drains this worker's node, or another of its TPU slice."""

    def __init__(self, *, every_s: float = 0.5) -> None:
        super().__init__("ray train", self._ask, every_s=every_s)

    @staticmethod
    def _ask() -> Notice | None:
        preemption = own_preemption()
        return None if preemption is None else Notice(*preemption)

    @staticmethod
    def is_here() -> bool:
        """Returns whether this process is a worker of Ray Train."""
        return is_worker()
