"""The folders of steps: how a root names them, and which of them hold a step."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from ..errors import CheckpointError, Corrupt, HostileCheckpoint
from ..storage.base import Storage
from ..storage.path import join
from ..storage.threads import run_side_by_side
from ..storage.tombstone import RECORD_NAME, TOMBSTONE

LOOKS = 64  # at a root whose steps change meanwhile
_STEP_FOLDER = re.compile(r"0|[1-9][0-9]{0,17}")
_STEP_PREFIX = re.compile(r"[A-Za-z0-9_.-]{0,63}[A-Za-z_.-]|")  # that does not end in a digit
_STEP_FORMAT = re.compile(r"([^{}]*)\{(?::(?:0(\d+))?d)?\}")
STEP_NAMES = ".holdfast/steps.json"


def step_of(name: str) -> int | None:
    """Returns the step that a folder of this name holds; None for a name that is not a step's."""
    return int(name) if _STEP_FOLDER.fullmatch(name) else None


@dataclass(frozen=True)
class StepNames:
    """How a root calls the folders of its steps: a prefix, and the number with zeros before it up
    to `width` digits.
    """

    prefix: str = ""
    width: int = 1

    def name_of(self, step: int) -> str:
        return f"{self.prefix}{step:0{self.width}d}"

    def step_of(self, name: str) -> int | None:
        """Returns the step that a folder of this name holds; None for a name that is not a
        step's.
        """
        step = step_of(name.removeprefix(self.prefix).lstrip("0") or "0")
        return step if step is not None and self.name_of(step) == name else None

    def to_bytes(self) -> bytes:
        """Returns what stands in STEP_NAMES."""
        return json.dumps({"prefix": self.prefix, "width": self.width}).encode()

    def check(self) -> StepNames:
        """Returns itself. Raises ValueError for what no reader takes."""
        if (
            not _STEP_PREFIX.fullmatch(self.prefix)
            or self.prefix.startswith(".")
            or not 1 <= self.width <= 18
        ):
            raise ValueError(f"prefix {self.prefix!r}, width {self.width!r}")
        return self


PLAIN_NAMES = StepNames()


def parse_step_format(text: str) -> StepNames:
    """Returns the names that a format like "checkpoint_{:08d}" gives. Raises ValueError for one
    that is not of this form.
    """
    match = _STEP_FORMAT.fullmatch(text)
    try:
        if match is not None:
            return StepNames(match[1], int(match[2] or 1)).check()
    except ValueError:
        pass
    raise ValueError(
        f'step_format={text!r}: expected a name of at most 64 letters, digits, "_", "-" and ".",'
        ' which does not begin with "." or end in a digit, and then {:d}, or {:08d} for at'
        ' least 8 digits (at most 18): "checkpoint_{:08d}"'
    )


def read_step_names(storage: Storage) -> StepNames:
    """Returns how a root calls the folders of its steps, a fact that stands in STEP_NAMES; without
    it they are plain numbers.

    Raises HostileCheckpoint where that file is not one that holdfast writes.
    """
    try:
        found = json.loads(storage.fetch(STEP_NAMES, 1 << 16))
        prefix = found["prefix"]
        width = found["width"]
        if type(width) is not int:
            raise ValueError(f"width {width!r}")
        return StepNames(prefix, width).check()
    except (FileNotFoundError, NotADirectoryError):
        return PLAIN_NAMES
    except Corrupt:
        if not _is_listed(
            storage, STEP_NAMES
        ):  # it is not the file that is no file, but a folder above it
            return PLAIN_NAMES
        raise
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        path = join(storage.root, STEP_NAMES)
        message = (
            f"{path}: this does not say how the folders of steps are called: {error!r}; expected a"
            " prefix and a width of 1 to 18"
        )
        raise HostileCheckpoint(message, path=path, file=path) from error


def other_step(step: int, folder: str) -> int | None:
    """Returns the step that a folder is called after, if that is another than `step`; 0 fits
    everywhere, as one-shot saves have it.
    """
    number = step_of(folder.rstrip("/").rpartition("/")[2])
    return number if number != step and step else None


def _is_listed(storage: Storage, name: str) -> bool:
    try:
        return any(entry.name == name for entry in storage.list(name.rpartition("/")[0]))
    except OSError:
        return False


def step_folders(storage: Storage, names: StepNames | None = None) -> dict[int, str]:
    """Returns all folders that are named as the root's steps are, by their numbers, which ascend;
    `names` where they are known already.
    """
    folders = [entry.name[:-1] for entry in storage.list("") if entry.name.endswith("/")]
    names = names or read_step_names(storage)
    return dict(
        sorted((step, name) for name in folders if (step := names.step_of(name)) is not None)
    )


def has_record(storage: Storage, folder: str) -> bool:
    """Returns whether the checkpoint in a folder is there: whether its record is, readable or not.
    One small read.
    """
    head = bytearray(len(TOMBSTONE))
    try:
        storage.read(join(folder, RECORD_NAME), 0, [memoryview(head)])
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False
    except (CheckpointError, OSError):  # whoever opens the step is told what is wrong with it
        return True
    return head != TOMBSTONE


def list_steps(storage: Storage, names: StepNames | None = None) -> list[int]:
    """Returns the steps of a root, ascending; a folder without a record is no step. `names` as for
    `step_folders`.

    Beside a writer that keeps one step, all may be deleted between the two looks, each for a newer
    one: then it looks again.
    """
    folders: dict[int, str] = {}
    for _ in range(LOOKS):
        before, folders = folders, step_folders(storage, names)
        there = run_side_by_side(
            lambda folder: has_record(storage, folder),
            list(folders.values()),
            storage.max_concurrency,
        )
        steps = [step for step, is_there in zip(folders, there, strict=True) if is_there]
        if steps or folders == before:
            return steps
    return []
