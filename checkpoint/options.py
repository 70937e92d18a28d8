"""The settings of a manager that are no policy, and of its local tier; what it counts; how it shows
progress; and what the paths mean that callers give.
"""

from __future__ import annotations

import errno
import functools
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import unquote_to_bytes

from .errors import error_text
from .notebook import html_table
from .policy import SavePolicy, check_save_policy

_log = logging.getLogger(__name__)
T = TypeVar("T")
DAY_S = 24 * 3600.0
PROGRESS_S = 0.25
_KEEP_BEST = 'write keep_policy=KeepBest(3, "loss", mode="min"), and metrics={"loss": ...} to save'
_NAMED_LATER = (
    'leave it out: items are named where they are saved, save(step, items={"state": ...})'
)
_BACKGROUND = "leave it out: saves go on in the background, and `wait_until_finished` waits"
_MADE = "leave it out: a root is made when it is opened for writing"
# Words of Orbax's, and how holdfast spells them; {value} is what was given.
_SPELLED = {
    "max_to_keep": "write keep_policy=KeepLast({value})",
    "keep_period": "write keep_policy=KeepAnyOf(KeepLast(3), KeepEvery({value}))",
    "keep_time_interval": "write keep_policy=KeepEverySeconds(3600)",
    "save_interval_steps": "write save_policy=EveryNSteps({value})",
    "save_on_steps": "write save_policy=AtSteps({value})",
    "should_save_fn": "write save_policy=..., an object with a method `wants`",
    "save_decision_policy": "write save_policy=EveryNSteps(100)",
    "preservation_policy": "write keep_policy=KeepLast(3)",
    "best_fn": _KEEP_BEST,
    "best_mode": _KEEP_BEST,
    "step_prefix": 'write options=Options(step_format="step_{:d}")',
    "step_format_fixed_length": 'write options=Options(step_format="{:08d}")',
    "step_name_format": 'write options=Options(step_format="step_{:d}")',
    "create": _MADE,
    "enable_async_checkpointing": _BACKGROUND,
    "async_options": _BACKGROUND,
    "checkpointers": _NAMED_LATER,
    "item_names": _NAMED_LATER,
    "item_handlers": _NAMED_LATER,
}


@dataclass(frozen=True)
class Progress:
    """How far a save of this process is: `done_bytes` of its `total_bytes` are out.

    `phase` is "save".
    """

    step: int
    phase: str
    done_bytes: int
    total_bytes: int


@dataclass
class ProgressMeter:
    """Counts the bytes of one save, and passes its `Progress` on. Thread-safe.

    That is at most every PROGRESS_S seconds, and at the end.
    """

    step: int
    total_bytes: int
    listener: Callable[[Progress], None]
    _done_bytes: int = 0
    _passed_on_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, size: int) -> None:
        """Counts bytes that are out."""
        with self._lock:
            self._done_bytes = min(self._done_bytes + size, self.total_bytes)
            done = self._done_bytes
            now = time.monotonic()
            if now - self._passed_on_s < PROGRESS_S and done < self.total_bytes:
                return
            self._passed_on_s = now
        try:
            self.listener(Progress(self.step, "save", done, self.total_bytes))
        except Exception as error:
            self._passed_on_s = math.inf  # not again, but at the end
            _log.warning(
                "what was given to progress= failed at step %d: %s", self.step, error_text(error)
            )


class ProgressBar:
    """Shows the save in flight as a rich progress bar: `Options(progress=ProgressBar())`.
    Thread-safe.

    A bar appears with a save's first bytes and goes with its last, or with the first bytes of the
    next save where it has failed. Where there is no terminal, nothing is shown.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bar: Any = None

    def __call__(self, progress: Progress) -> None:
        """Redraws the bar."""
        shown = f"{progress.phase} step {progress.step}"
        with self._lock:
            bar = self._bar
            if bar is not None and bar.tasks[0].description != shown:
                bar.stop()
                bar = None
            if bar is None:
                bar = _rich_bar()
                if not bar.console.is_terminal:
                    return
                bar.add_task(shown, total=progress.total_bytes)
                bar.start()
            bar.update(bar.task_ids[0], completed=progress.done_bytes)
            if progress.done_bytes >= progress.total_bytes:
                bar.stop()
                bar = None
            self._bar = bar


def _rich_bar() -> Any:
    from rich import progress
    from rich.console import Console

    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )


@dataclass(repr=False)
class Statistics:
    """Counts saves, restores and deletions. Thread-safe."""

    saves: int = 0
    saves_failed: int = 0
    saves_missed: int = 0
    saves_skipped: int = 0
    replicas_differed: int = 0
    save_s: float = 0.0
    save_blocked_s: float = 0.0
    save_waited_s: float = 0.0
    save_bytes: int = 0
    save_written_bytes: int = 0
    save_linked_bytes: int = 0
    restores: int = 0
    restore_s: float = 0.0
    restore_bytes: int = 0
    restore_store_bytes: int = 0
    restore_peer_bytes: int = 0
    restore_peer_failures: int = 0
    steps_deleted: int = 0
    delete_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __repr__(self) -> str:
        counted = (f"{name}={amount:.6g}" for name, amount in self._counted().items())
        return f"Statistics({', '.join(counted)})"

    def _repr_html_(self) -> str:
        return html_table("Statistics", self._counted())

    def _counted(self) -> dict[str, Any]:
        """Returns the counters that are not 0."""
        return {name: amount for name, amount in self.to_dict().items() if amount}

    def add(self, **amounts: float) -> None:
        """Adds to counters, by name."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)

    def to_dict(self) -> dict[str, Any]:
        """Returns all counters, in JSON types."""
        with self._lock:
            return {
                name: getattr(self, name)
                for name in self.__dataclass_fields__
                if not name.startswith("_")
            }


def answers_foreign_words(other: str, others: Collection[str]) -> Callable[[type[T]], type[T]]:
    """Decorates a class: its call answers such a word with a TypeError that has the right spelling.

    `others` are words that belong into another call, `other` is how they are written there.
    """

    def decorate(cls: type[T]) -> type[T]:
        init: Callable[..., None] = cls.__init__

        @functools.wraps(init)
        def checked(self: T, *args: Any, **given: Any) -> None:
            for word in given.keys() & {*_SPELLED, *others}:
                spelled = other if word in others else _SPELLED[word]
                spelled = spelled.replace("{word}", word).replace("{value}", repr(given[word]))
                raise TypeError(f"{cls.__name__} has no {word}=: {spelled}")
            init(self, *args, **given)

        setattr(cls, "__init__", checked)  # noqa: B010  mypy wants no assignment to a method
        return cls

    return decorate


_WORDS = {
    "on_busy": '"wait" or "skip"',
    "on_save_error": '"raise" or "warn"',
    "on_replicas_differ": '"warn", "raise" or "ignore"',
}
_ABOVE_0 = (
    "save_timeout_s",
    "restore_timeout_s",
    "exit_timeout_s",
    "claim_age_s",
    "host_memory_bytes",
    "hang_timeout_s",
)
_WHOLE = ("max_missed_saves", "full_every", "max_steps_ahead")
_FUNCTIONS = ("may_differ", "per_process", "progress")


def _check_above_0(
    settings: Options | Local, names: Collection[str], *, whole: Collection[str]
) -> None:
    """Raises ValueError for a setting that is no number above 0, of `whole` no whole one. None is
    one where its type says so.
    """
    kind = type(settings)
    for name in [*names, *whole]:
        value = getattr(settings, name)
        if value is None and "None" in kind.__annotations__[name]:
            continue
        number: Any = Integral if name in whole else Real
        if not isinstance(value, number) or not value > 0:
            expected = "a whole number above 0" if name in whole else "above 0"
            raise ValueError(f"{kind.__name__}: {name} must be {expected}, found {value!r}")


@answers_foreign_words(
    "write CheckpointManager(directory, {word}={value})",
    ("directory", "save_policy", "keep_policy", "group", "local"),
)
@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of a CheckpointManager.

    save_timeout_s: the time from the call of `save` to the commit. A process that has not reported
        by then fails the save on all.
    restore_timeout_s: how long the processes of a group wait for each other in a restore. One that
        is so much slower fails the restore on all.
    exit_timeout_s: how long an interpreter that exits waits for a save in flight.
    on_busy: what `save` does while the last save is in flight: "wait" for it, or "skip" this one.
        In a group that skips, the processes agree on a later step.
    on_save_error: what a save that fails does, where a store or a time-out is to blame: "raise" its
        error at the next call, or "warn" and go on. Such a miss is in the log, in `holdfast status`
        and in `statistics()`, and the next save tries again. `wait`, `wait_until_finished` and
        `close` raise it nevertheless, if it was the last. Fenced, StepExists, CommitUnknown,
        mistakes of the caller and the save of a preemption always raise. All processes do alike.
    max_missed_saves: how many misses in a row there may be with "warn"; the next failure raises.
    on_replicas_differ: what a save does that finds different bytes in two replicas of an array, on
        processes or on devices of one: "warn" in the log and in `holdfast status`, "raise"
        ReplicasDiffer and commit nothing, or "ignore" them all. The primary's word holds. "warn"
        compares a share of the leaves, and all of them in 16 saves; "raise" all at each save.
    may_differ: says of a leaf's path whether its replicas differ on purpose, such as random
        generator state: `lambda path: path.startswith("rng.")`.
    host_memory_bytes: bounds the host memory that a snapshot holds; `save` blocks for the rest. In
        a restore it bounds what is on its way to devices. None: what the machine, or the cgroup,
        has left is divided among the job's processes there. On GPUs a snapshot then holds at most
        0.8 of XLA's pool of pinned memory, which has 64 GiB a process unless
        XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB says otherwise.
    single_writer: promises that nobody else writes to this root, where the store has no atomic
        create-if-absent.
    read_only: takes no claim. `save` and `delete` are errors, and nothing is written.
    check_free_space: refuses a save that does not fit on the disk before it begins.
    progress: is called with a `Progress` from background threads, at most four times a second. What
        it raises is logged.
    claim_age_s: on stores without locks, the age from which a claim that was not renewed counts as
        dead.
    per_process: says of a leaf's path whether each process keeps its own value: `lambda path:
        path.startswith("reader.")`. Such a leaf is a value of the host (numpy, Python, an array on
        this process's devices) of one shape and dtype everywhere. Without this it has to be equal
        on all processes. It comes back on as many processes, or by `restore(process=...)`.
    incremental: writes what has changed since this manager's last save, and links the files that
        have the rest. Every step stays whole by itself, and takes at most twice its size. On POSIX
        folders, and on s3://, where the store copies these files by itself. Needs the extra
        `incremental`.
    full_every: with `incremental`, how many saves share a file at most: every n-th save writes
        everything (None: no bound).
    step_format: how a new root calls the folders of its steps, "checkpoint_{:08d}". It is written
        down when the root is opened first, and holds for good. None: as the root has it, "{:d}" if
        the root is new.
    out_of_order: steps come in no order, as in a sweep that counts its runs: a save at or below the
        newest step is none to be refused, and none that leaves the steps above it behind.
    file_mode, folder_mode: the modes of the files and folders of steps, 0o640 and 0o750, on POSIX,
        whatever the umask (None: as the umask has them). A root that is made has `folder_mode`.
    max_steps_ahead: how many steps a program may be ahead of its devices: `save(step, state)` and
        `should_save(step)` wait for them, called at each step. A job that is preempted has to
        compute those steps before it can save. None: as many as jax takes.
    hang_timeout_s: without a question about a step or a save for so long, the stacks of all threads
        go to the log and to the coordinator (see `multihost.watchdog`). None: nobody watches.
    hang_exit: the process then ends with exit code 124.
    """

    save_timeout_s: float = 600.0
    restore_timeout_s: float = 600.0
    exit_timeout_s: float = 600.0
    on_busy: Literal["wait", "skip"] = "wait"
    on_save_error: Literal["raise", "warn"] = "raise"
    max_missed_saves: int = 3
    on_replicas_differ: Literal["warn", "raise", "ignore"] = "warn"
    may_differ: Callable[[str], bool] | None = None
    host_memory_bytes: int | None = None
    single_writer: bool = False
    read_only: bool = False
    check_free_space: bool = True
    progress: Callable[[Progress], None] | None = None
    claim_age_s: float = DAY_S
    per_process: Callable[[str], bool] | None = None
    incremental: bool = False
    full_every: int | None = None
    step_format: str | None = None
    out_of_order: bool = False
    file_mode: int | None = None
    folder_mode: int | None = None
    max_steps_ahead: int | None = 2
    hang_timeout_s: float | None = None
    hang_exit: bool = False

    def __post_init__(self) -> None:
        for name, words in _WORDS.items():
            value = getattr(self, name)
            if value not in words.split('"')[1::2]:
                raise ValueError(f"Options: {name} is {words}, not {value!r}")
        _check_above_0(self, _ABOVE_0, whole=_WHOLE)
        for name in _FUNCTIONS:
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise TypeError(f"Options: {name} expects a function, found {function!r}")
        if self.hang_exit and self.hang_timeout_s is None:
            raise ValueError("Options: hang_exit=True expects hang_timeout_s, the time until then")
        # The next save reads the files, and its sweep deletes in the folders.
        _check_mode(self, "file_mode", 0o400)
        _check_mode(self, "folder_mode", 0o700)
        if self.full_every is not None and not self.incremental:
            raise ValueError(f"Options: full_every={self.full_every!r} expects incremental=True")


def _check_mode(options: Options, name: str, needed: int) -> None:
    mode = getattr(options, name)
    if mode is None:
        return
    if not isinstance(mode, int) or mode & needed != needed or mode > 0o7777:
        raise ValueError(
            f"Options: {name} expects a mode that has at least {needed:#o}, found {mode!r}"
        )


@dataclass(frozen=True)
class Local:
    """Saves the steps that `save_policy` wants into a folder of each host, with copies elsewhere.

    path: this host's folder, on memory (tmpfs) or disk; it is made if it is missing.
    replicas: how many other hosts keep a copy of each part, and so how many may be lost at once.
    keep: how many local steps stay, beside the one that is being written.
    max_bytes: bounds what one process keeps, with its copies of others' parts and the step that is
        being written. Above it the tier ends, with a warning.
    rate_bytes_s: bounds what one process pulls of others in a second (None: as fast as it goes).
    timeout_s: bounds a local save.
    sync: what is saved survives a power cut, on hosts whose disks come back with them.
    strict: the next call raises the error of a local save that failed; a call of `save` does so
        once its own save has begun. Without it the error is logged and counted alone.
    address: this host's address for its peers (None: the one that reaches the coordinator).
    failure_domain: names what fails together (None: the machine, by its boot id).
    """

    path: str | os.PathLike[str]
    _: KW_ONLY
    save_policy: SavePolicy
    replicas: int = 1
    keep: int = 1
    max_bytes: int | None = None
    rate_bytes_s: float | None = None
    timeout_s: float = 120.0
    sync: bool = False
    strict: bool = False
    address: str | None = None
    failure_domain: str | None = None

    def __post_init__(self) -> None:
        check_save_policy(self.save_policy)
        object.__setattr__(self, "path", absolute(self.path))
        if "://" in str(self.path):
            raise ValueError(f"Local: {self.path}: expected a folder of this host, found a URL")
        if not isinstance(self.replicas, Integral) or self.replicas < 0:
            raise ValueError(
                f"Local: replicas must be a whole number of 0 or more, found {self.replicas!r}"
            )
        _check_above_0(self, ("timeout_s", "max_bytes", "rate_bytes_s"), whole=("keep",))


_URL = re.compile(r"[A-Za-z][A-Za-z0-9_+.-]*://")
_CUT_URL = re.compile(r"(gs|gcs_grpc|s3|az|memory|file):/(?!/)")


def absolute(path: str | os.PathLike[str]) -> str:
    """Returns a path that means the same folder whatever becomes of the current one: `~` is
    expanded, and no link is resolved but one that `..` leads out of. A URL stays, but for file://,
    which means a folder of this machine.

    Raises TypeError, ValueError for what is no path, and FileNotFoundError for a relative one where
    the current folder was deleted.
    """
    text = _text(path)
    if _URL.match(text):
        if not text.startswith("file://"):
            return text
        text = _path_in_url(text)
    if not text:
        raise ValueError(
            f"found the path {path!r}, which is empty; expected a folder or a URL (the current"
            " folder is '.')"
        )
    if cut := _CUT_URL.match(text):
        raise ValueError(
            f"found the path {text!r}; expected {cut[1]}://...: pathlib leaves one slash of a URL's"
            " two, so give the URL as text"
        )
    try:
        known = Path(os.path.expanduser(text)).absolute()
    except FileNotFoundError:
        what = "the current folder was deleted, and the path is relative: give an absolute one"
        raise FileNotFoundError(errno.ENOENT, what, text) from None
    return str(_without_dots(known))


def _without_dots(path: Path) -> Path:
    parts = path.parts
    if ".." not in parts:
        return path
    # What `..` leaves may be a link, whose own folder is meant then.
    last = len(parts) - parts[::-1].index("..")
    return Path(os.path.realpath(Path(*parts[:last])), *parts[last:])


def _path_in_url(url: str) -> str:
    """Returns the path of a folder of this machine, out of its URL."""
    host, slash, rest = url.removeprefix("file://").partition("/")
    if host not in ("", "localhost"):
        raise ValueError(
            f"found {url!r}, a folder of the host {host!r}; expected file:///folder for one of"
            " this machine, or its path without file://"
        )
    return slash + os.fsdecode(unquote_to_bytes(rest))


def _text(path: Any) -> str:
    try:
        text = os.fspath(path)
    except TypeError:
        text = None
    if isinstance(text, str):
        return text
    hint = ": write os.fsdecode(path)" if isinstance(text, bytes) else ""
    raise TypeError(
        f"found {type(path).__name__} {str(path)[:80]!r} as the path; expected text or a"
        f" pathlib.Path{hint}"
    )
