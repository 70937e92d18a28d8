"""`orbax.checkpoint.path.step`: how the folders of steps are called, and the finding of them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from holdfast.checkpoint import CheckpointError, Structure, structure
from holdfast.checkpoint.format.step_folders import root_folders
from holdfast.checkpoint.layouts.detect import find_steps, layout_of, left_steps
from holdfast.checkpoint.storage.path import StorePath, open_storage

from ..metadata import nanoseconds
from ..own_handlers import to_path
from ..refusals import not_covered

TMP_DIR_SUFFIX = ".orbax-checkpoint-tmp"  # of Orbax's unfinished folders; holdfast has none
ALLOWED_STEP_NAME_PATTERN = r"(.+)_(\d+)"
TMP_DIR_STEP_PATTERN = r".*?_*?(\d+)\.orbax-checkpoint-tmp"
# Steps whose names tell a prefix and a width from any other rule.
_TRIED = (0, 7, 10, 12345, 98765432109)


@dataclass(frozen=True)
class Metadata:
    """A step that is there: its number and its folder. Times are Unix nanoseconds."""

    step: int
    path: Any

    def _structure(self) -> Structure:
        return structure(self.path)

    @property
    def init_timestamp_nsecs(self) -> int | None:
        """When its save began."""
        return nanoseconds(self._structure().started_s)

    @property
    def commit_timestamp_nsecs(self) -> int | None:
        """When it was committed."""
        return nanoseconds(self._structure().finished_s)

    @property
    def commit_timestamp(self) -> datetime:
        """When it was committed; of a step that does not say so, when its folder changed last."""
        time_s = self._structure().finished_s
        return datetime.fromtimestamp(time_s or self.path.stat().mtime, UTC)


class NameFormat:
    """The base of formats of names: `build_name`, `find_all` and `find_step`.

    A manager takes those that are a prefix and the number, with or without zeros in front.
    """

    def __class_getitem__(cls, kind: Any) -> Any:
        return cls

    def build_name(self, step: int) -> str:
        """Returns the name of a step's folder."""
        raise NotImplementedError(f"{type(self).__name__}.build_name")

    def find_all(self, base_path: Any) -> Iterator[Metadata]:
        """Yields the finished steps of a root that are called so, ascending."""
        for step, folder in _called(base_path, self).items():
            yield Metadata(step, to_path(base_path) / folder)

    def find_step(self, base_path: Any, step: int) -> Metadata:
        """Returns a finished step of a root. Raises ValueError."""
        name = self.build_name(step)
        if step not in _called(base_path, self):
            raise ValueError(
                f"{base_path}: step {step} is not there under the name {name!r} of {self}"
            )
        return Metadata(step, to_path(base_path) / name)


def _called(root: Any, names: NameFormat) -> dict[int, str]:
    """Returns the folders of the finished checkpoints of a root that are called so, ascending."""
    storage = open_storage(root)
    found = {}
    for folder in root_folders(storage):
        digits = re.search(r"[0-9]{1,18}$", folder)
        if digits is None or names.build_name(int(digits[0])) != folder:
            continue
        layout = layout_of(StorePath(storage, folder))
        if layout is not None and layout.keeps_roots:
            found[int(digits[0])] = folder
    return dict(sorted(found.items()))


@dataclass(frozen=True)
class StandardNameFormat(NameFormat):
    """A prefix with an underscore, and the number in at least so many digits."""

    step_prefix: str | None = None
    step_format_fixed_length: int | None = None
    single_host_load_and_broadcast: bool = False
    temporary_path_cls: Any = None
    atomicity_options: Any = None

    def build_name(self, step: int) -> str:
        """Returns the name of a step's folder."""
        number = f"{step:0{self.step_format_fixed_length or 1}d}"
        return step_prefix_with_underscore(self.step_prefix) + number

    def __str__(self) -> str:
        return f'StandardNameFormat("{self.build_name(1234)}")'


@dataclass(frozen=True)
class CompositeNameFormat(NameFormat):
    """Writes one format and finds several; of two that have a step the first one counts."""

    write_name_format: Any
    read_name_formats: Sequence[Any]

    def __post_init__(self) -> None:
        if self.write_name_format not in self.read_name_formats:
            shown = ",".join(map(str, self.read_name_formats))
            raise ValueError(
                f"write_name_format={self.write_name_format}: expected one of read_name_formats,"
                f" found {shown}"
            )

    def __str__(self) -> str:
        return f"Composite([{','.join(map(str, self.read_name_formats))}])"

    def build_name(self, step: int) -> str:
        """Returns the name of a step's folder, as it is written."""
        name: str = self.write_name_format.build_name(step)
        return name

    def find_all(self, base_path: Any) -> Iterator[Metadata]:
        """Yields the finished steps of a root, each once."""
        seen = set()
        for each in self.read_name_formats:
            for found in each.find_all(base_path):
                if found.path not in seen:
                    seen.add(found.path)
                    yield found

    def find_step(self, base_path: Any, step: int) -> Metadata:
        """Returns a finished step of a root. Raises ValueError."""
        errors = []
        for each in self.read_name_formats:
            try:
                found: Metadata = each.find_step(base_path, step)
            except ValueError as error:
                errors.append(str(error))
            else:
                return found
        raise ValueError("\n".join(errors))


def standard_name_format(**options: Any) -> StandardNameFormat:
    """Returns names of a prefix and a number: the options are the fields, by name."""
    return StandardNameFormat(**options)


def composite_name_format(
    write_name_format: Any, read_name_formats: Sequence[Any]
) -> CompositeNameFormat:
    """Returns names that are written in one format and found in several."""
    return CompositeNameFormat(write_name_format, read_name_formats)


def is_standard_name_format(name_format: Any) -> bool:
    """Says whether names are a prefix and a number."""
    return isinstance(name_format, StandardNameFormat)


def single_host_load_and_broadcast_name_format(name_format: Any) -> StandardNameFormat:
    """Returns the same names: one process lists in any case. Raises ValueError."""
    if not isinstance(name_format, StandardNameFormat):
        raise ValueError(
            f"single_host_load_and_broadcast: expected a StandardNameFormat, found {name_format}"
        )
    return dataclasses.replace(name_format, single_host_load_and_broadcast=True)


def step_format(name_format: Any) -> str:
    """Returns holdfast's `step_format` of Orbax's names.

    Raises NotImplementedError for names that are more than a prefix and the number.
    """
    names = [name_format.build_name(step) for step in _TRIED]
    digits = re.search(r"[0-9]+$", names[0])
    if digits is not None:
        prefix = names[0][: digits.start()]
        width = len(digits[0])
        if names == [f"{prefix}{step:0{width}d}" for step in _TRIED]:
            return f"{prefix}{{:0{width}d}}"
    raise not_covered(
        f"step_name_format={name_format!s:.60}, which calls step 7 {names[1]!r}",
        "give names of a prefix and the number: path.step.standard_name_format(step_prefix=...,"
        " step_format_fixed_length=...)",
    )


def step_prefix_with_underscore(step_prefix: str | None) -> str:
    """Returns what stands before a number."""
    return "" if step_prefix is None else f"{step_prefix}_"


def build_step_path(base_path: Any, name_format: Any, step: int) -> Any:
    """Returns the folder of a step, whether it is there or not."""
    return to_path(base_path) / name_format.build_name(step)


def find_step_path(
    base_path: Any, name_format: Any, *, step: int, include_uncommitted: bool = False
) -> Any:
    """Returns the folder of a step that is there: there are no others. Raises ValueError."""
    return name_format.find_step(base_path, step).path


def maybe_find_step_metadata(base_path: Any, name_format: Any, *, step: int) -> Any:
    """Returns a step that is there, or None."""
    try:
        return name_format.find_step(base_path, step)
    except ValueError:
        return None


def latest_step_metadata(root_path: Any, name_format: Any) -> Any:
    """Returns the newest step of a root, or None."""
    found = list(name_format.find_all(root_path))
    if not found:
        return None
    storage = open_storage(root_path)
    left = left_steps(storage, find_steps(storage))
    line = [each for each in found if each.step not in left]
    return max(line, default=None, key=lambda each: each.step)


def step_metadata_of_checkpoint_path(checkpoint_path: Any, name_format: Any) -> Any:
    """Returns the step in a folder. Raises ValueError."""
    path = to_path(checkpoint_path)
    for found in name_format.find_all(path.parent):
        if found.path.name == path.name:
            return found
    raise ValueError(f"{path}: {name_format} names no finished step so")


# More than five arguments: they are Orbax's.
def get_save_directory(  # noqa: PLR0917
    step: int,
    directory: Any,
    name: str | None = None,
    step_prefix: str | None = None,
    override_directory: Any = None,
    step_format_fixed_length: int | None = None,
    step_name_format: Any = None,
) -> Any:
    """Returns the folder of a step, or of an item in it, whether it is there or not."""
    if directory is None:
        raise ValueError("Directory cannot be None.")
    names = step_name_format or StandardNameFormat(step_prefix, step_format_fixed_length)
    folder = build_step_path(directory, names, step)
    if override_directory is not None:
        folder = to_path(override_directory)
    return folder if name is None else folder / name


def checkpoint_steps_paths(checkpoint_dir: Any) -> list[Any]:
    """Returns the folders of the finished steps of a root, ascending."""
    root = to_path(checkpoint_dir)
    return [root / name for name, _ in find_steps(open_storage(checkpoint_dir)).values()]


def step_from_checkpoint_name(name: str) -> int:
    """Returns the step of a folder's name. Raises ValueError."""
    if name.isdigit():
        return int(name)
    if match := re.fullmatch(ALLOWED_STEP_NAME_PATTERN, name):
        return int(match[2])
    if match := re.match(TMP_DIR_STEP_PATTERN, name):
        return int(match[1])
    raise ValueError(f"Unrecognized name format: {name}.")


def is_path_finalized(path: Any, **options: Any) -> bool:
    """Says whether a folder holds a whole checkpoint."""
    try:
        return layout_of(StorePath.of(path)) is not None
    except (CheckpointError, OSError):
        return False


def is_path_temporary(path: Any, **options: Any) -> bool:
    """Says whether a folder is one of Orbax's unfinished ones."""
    return TMP_DIR_SUFFIX in to_path(path).name


is_checkpoint_finalized = is_path_finalized
is_tmp_checkpoint = is_path_temporary


def tmp_checkpoints(checkpoint_dir: Any, **options: Any) -> list[str]:
    """Returns the names of Orbax's unfinished folders in a root: holdfast has none."""
    root = to_path(checkpoint_dir)
    return sorted(path.name for path in root.iterdir() if is_path_temporary(path))


__all__ = [
    "ALLOWED_STEP_NAME_PATTERN",
    "TMP_DIR_STEP_PATTERN",
    "TMP_DIR_SUFFIX",
    "Metadata",
    "NameFormat",
    "build_step_path",
    "checkpoint_steps_paths",
    "composite_name_format",
    "find_step_path",
    "get_save_directory",
    "is_checkpoint_finalized",
    "is_path_finalized",
    "is_path_temporary",
    "is_standard_name_format",
    "is_tmp_checkpoint",
    "latest_step_metadata",
    "maybe_find_step_metadata",
    "single_host_load_and_broadcast_name_format",
    "standard_name_format",
    "step_from_checkpoint_name",
    "step_metadata_of_checkpoint_path",
    "step_prefix_with_underscore",
    "tmp_checkpoints",
]
