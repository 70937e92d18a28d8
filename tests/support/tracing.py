"""Logs what a real run does to a root: the effects that the rules of the exhaustive search judge.

Nobody logs without HOLDFAST_TESTS_TRACES, and then those programs of tests alone that call `trace`.
Calls on names below the root, and requests
to its bucket, are made and logged as one step of all processes, by a lock, so that a log is in the
order in which things have come true. A process that is killed inside of a call has not made it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import mmap
import os
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from holdfast.checkpoint import CheckpointManager
from holdfast.checkpoint.agreement.save_protocol import SaveResult
from holdfast.checkpoint.format.item_report import FILE_NAME
from holdfast.checkpoint.format.record import parse_record
from holdfast.checkpoint.saving.save import StepSaver
from holdfast.checkpoint.saving.stager import OneSave
from holdfast.checkpoint.steps.index import StepIndex
from holdfast.checkpoint.storage.bucket import BucketStorage
from tests.model.exhaustive.rules import (
    FAILED,
    SAVED,
    UNKNOWN,
    Began,
    Decides,
    Durable,
    Effect,
    GoesBack,
    Gone,
    May,
    Named,
    Told,
    Took,
)

_KINDS = {kind.__name__: kind for kind in (Began, Decides, Durable, GoesBack, Gone, May, Named)}
_KINDS |= {kind.__name__: kind for kind in (Told, Took)}
_CALLS = (
    *("open", "close", "pwritev", "ftruncate", "fsync"),
    *("link", "rename", "replace", "unlink", "rmdir", "mkdir"),
)
_REAL = {name: getattr(os, name) for name in _CALLS}
_MOST_BYTES = 1 << 24  # of a log, which takes room as far as it is written
_SIZE = struct.Struct("<q")


def read_log(log: Path) -> list[Effect]:
    """Returns the effects of a log, in the order in which they have come true."""
    with log.open("rb") as file:
        text = file.read(_SIZE.unpack(file.read(_SIZE.size))[0]).decode()
    return [effect_of(line) for line in text.splitlines()]


def line_of(effect: Effect) -> str:
    """Returns an effect as a line: of bytes that are no JSON their number alone."""
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(effect):
        value = getattr(effect, field.name)
        if isinstance(value, bytes):
            value = value.decode() if value.startswith(b"{") else len(value)
        fields[field.name] = value
    return json.dumps([type(effect).__name__, fields])


def effect_of(line: str) -> Effect:
    """Returns the effect of a line."""
    kind, fields = json.loads(line)
    if "data" in fields:
        data = fields["data"]
        fields["data"] = bytes(data) if isinstance(data, int) else data.encode()
    effect: Effect = _KINDS[kind](**fields)
    return effect


class Trace:
    """The log of one root, for one process that adds to it."""

    def __init__(self, root: str, log: Path, who: str) -> None:
        self.root = root.rstrip("/")
        self.who = who
        self._lock = threading.RLock()
        self._depth = 0
        self._file = _REAL["open"](log, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        if not os.fstat(self._file).st_size:
            os.ftruncate(self._file, _MOST_BYTES)
        # Memory, since what kills a process at its calls would count those of the log.
        self._log = mmap.mmap(self._file, _MOST_BYTES)
        self.names: dict[int, str] = {}  # by descriptor
        self._before: list[tuple[Any, str, Any]] = []

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Surrounds what is made and logged at once."""
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                fcntl.lockf(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                self._depth -= 1
                if not self._depth:
                    fcntl.lockf(self._file, fcntl.LOCK_UN)

    def note(self, *effects: Effect) -> None:
        """Logs what has come true."""
        with self.step():
            lines = "".join(f"{line_of(each)}\n" for each in effects).encode()
            begin = _SIZE.size + _SIZE.unpack_from(self._log)[0]
            self._log[begin : begin + len(lines)] = lines
            _SIZE.pack_into(self._log, 0, begin + len(lines) - _SIZE.size)

    def name(self, path: Any, folder: int | None = None) -> str | None:
        """Returns a path relative to the root, None where it is not below it."""
        if isinstance(path, int):
            return None
        path = os.fspath(path)
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        if folder is not None and not os.path.isabs(path):
            path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
        if path == self.root:
            return ""
        return path[len(self.root) + 1 :] if path.startswith(self.root + "/") else None

    def named(self, name: str, source: str = "") -> Named:
        """Returns what a file's name stands for now."""
        file = _REAL["open"](f"{self.root}/{name}", os.O_RDONLY)
        try:
            data = os.pread(file, _MOST_BYTES, 0)
        finally:
            _REAL["close"](file)
        return Named(self.who, name, data, durable=False, source=source)

    def there(self) -> None:
        """Logs what is there before the run, all of it durable, and that its writers have left."""
        files = sorted(path for path in Path(self.root).rglob("*") if path.is_file())
        packs = filter(None, (FILE_NAME.fullmatch(path.name) for path in files))
        claims = {f".holdfast/{pack[3][:8]}/claim.json" for pack in packs}
        self.note(*(Named(self.who, claim, b"{}") for claim in sorted(claims)))
        for path in sorted(files, key=lambda path: path.name == "checkpoint.json"):
            name = str(path.relative_to(self.root))
            self.note(dataclasses.replace(self.named(name), durable=True))
        self.note(*(Gone(self.who, claim) for claim in sorted(claims)))

    # --- calls on a disk

    def _opened(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: Any = None) -> int:
        name = self.name(path, dir_fd)
        if name is None:
            file: int = _REAL["open"](path, flags, mode, dir_fd=dir_fd)
            return file
        with self.step():
            is_new = bool(flags & os.O_CREAT) and not os.path.exists(f"{self.root}/{name}")
            file = _REAL["open"](path, flags, mode, dir_fd=dir_fd)
            self.names[file] = name
            if is_new:
                self.note(self.named(name))
        return file

    def _closed(self, file: int) -> None:
        self.names.pop(file, None)
        _REAL["close"](file)

    def _filed(self, call: str, file: int, *arguments: Any) -> Any:
        """Makes a call on a descriptor."""
        name = self.names.get(file)
        if name is None:
            return _REAL[call](file, *arguments)
        with self.step():
            found = _REAL[call](file, *arguments)
            if call == "fsync":
                self.note(Durable(self.who, name))
            else:
                with contextlib.suppress(FileNotFoundError):  # it has lost its name
                    self.note(self.named(name))
        return found

    def _changed(self, call: str, path: Any, *arguments: Any, dir_fd: Any = None) -> None:
        """Makes a call that makes or removes one name."""
        name = self.name(path, dir_fd)
        if name is None:
            _REAL[call](path, *arguments, dir_fd=dir_fd)
            return
        with self.step():
            _REAL[call](path, *arguments, dir_fd=dir_fd)
            if call == "mkdir":
                self.note(Named(self.who, f"{name}/", durable=False))
            else:
                self.note(Gone(self.who, name if call == "unlink" else f"{name}/"))

    def _moved(self, call: str, source: Any, target: Any, **options: Any) -> None:
        """Makes a call that gives another name."""
        old = self.name(source)
        new = self.name(target)
        if new is None:
            _REAL[call](source, target, **options)
            return
        with self.step():
            is_folder = os.path.isdir(source)
            _REAL[call](source, target, **options)
            names = [""]
            if is_folder:
                self.note(Named(self.who, f"{new}/", durable=False))
                paths = sorted(path for path in Path(target).rglob("*") if path.is_file())
                names = [f"/{path.relative_to(target)}" for path in paths]
            for name in names:
                own = f"{old}{name}" if old is not None else ""
                self.note(self.named(f"{new}{name}", source=own))
                if call != "link" and own:
                    self.note(Gone(self.who, own))

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def close(self) -> None:
        """Logs nothing any more."""
        while self._before:
            setattr(*self._before.pop())
        self._log.close()
        _REAL["close"](self._file)

    def watch_disk(self) -> None:
        """Logs this process's calls from now on."""
        self._replace(os, "open", self._opened)
        self._replace(os, "close", self._closed)
        for call in ("pwritev", "ftruncate", "fsync"):
            self._replace(os, call, functools.partial(self._filed, call))
        for call in ("unlink", "rmdir", "mkdir"):
            self._replace(os, call, functools.partial(self._changed, call))
        for call in ("link", "rename", "replace"):
            self._replace(os, call, functools.partial(self._moved, call))

    # --- requests to a bucket

    def watch_bucket(self) -> None:
        """Logs this process's requests from now on: one that raises is taken to have done nothing,
        so that a store that fails is no place for it.
        """
        put = BucketStorage.put
        write = BucketStorage.write
        delete = BucketStorage.delete

        def puts(storage: Any, name: str, data: Any, *arguments: Any, **more: Any) -> bool:
            with self.step():
                done = put(storage, name, data, *arguments, **more)
                if done:
                    self.note(Named(self.who, name, bytes(data)))
            return done

        def writes(storage: Any, name: str, size: int, parts: Iterable[Any]) -> None:
            write(storage, name, size, parts)
            is_json = name.endswith(".json")
            data = storage.fetch(name, _MOST_BYTES) if is_json else bytes(size)
            self.note(Named(self.who, name, data))

        def deletes(storage: Any, names: Sequence[str]) -> None:
            with self.step():
                delete(storage, names)
                self.note(*(Gone(self.who, name) for name in names))

        self._replace(BucketStorage, "put", puts)
        self._replace(BucketStorage, "write", writes)
        self._replace(BucketStorage, "delete", deletes)

    # --- events

    def watch_steps(self) -> None:
        """Logs what saves, policies and readers of this process do from now on."""
        run = StepSaver.run
        remove = StepIndex.remove
        superfluous = StepIndex.superfluous
        restore = CheckpointManager.restore

        def runs(saver: StepSaver, save: OneSave) -> SaveResult:
            place = save.place
            if place is not None and place.replaces:
                self.note(May(self.who, save.step))
            if place is not None and place.is_branch:
                self.note(GoesBack(self.who, save.key.save_id, place.base))
            result = run(saver, save)
            how = UNKNOWN
            if result.error is None:
                how = SAVED
            elif result.deletable:
                how = FAILED
            self.note(Told(self.who, save.key.save_id, save.step, how))
            return result

        def removes(index: StepIndex, steps: Sequence[int], **more: Any) -> Any:
            self.note(*(May(self.who, step) for step in steps))
            return remove(index, steps, **more)

        def decides(index: StepIndex, new: Any, **more: Any) -> list[int]:
            steps = superfluous(index, new, **more)
            self.note(Decides(self.who, steps))
            return steps

        def restores(manager: Any, step: int | None = None, *arguments: Any, **more: Any) -> Any:
            self.note(Began(self.who))
            chosen = manager.latest_step() if step is None else step
            found = restore(manager, step, *arguments, **more)
            data = manager._root.storage.fetch(f"{chosen}/checkpoint.json", _MOST_BYTES)
            save = parse_record(data, "").writer_id
            self.note(Took(self.who, chosen, save, as_newest=step is None))
            return found

        self._replace(StepSaver, "run", runs)
        self._replace(StepIndex, "remove", removes)
        self._replace(StepIndex, "superfluous", decides)
        self._replace(CheckpointManager, "restore", restores)


TRACES = "HOLDFAST_TESTS_TRACES"
"""A folder for the logs of the programs that ask for them. Without it there are none."""


def _log_of(root: Any) -> Path | None:
    folder = os.environ.get(TRACES)
    if folder is None:
        return None
    return Path(folder) / f"{hashlib.sha256(str(root).encode()).hexdigest()[:16]}.trace"


def log_there(root: Any) -> None:
    """Logs what is in a root before its run, where logs are wanted."""
    log = _log_of(root)
    if log is not None:
        Trace(str(root), log, "before").there()


def trace(root: Any, who: str) -> Trace | None:
    """Has this process log what it does to a root from now on, where logs are wanted."""
    log = _log_of(root)
    if log is None:
        return None
    made = Trace(str(root), log, who)
    if "://" in str(root):
        made.watch_bucket()
    else:
        made.watch_disk()
    made.watch_steps()
    return made
