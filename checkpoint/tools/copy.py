"""Copies checkpoints between stores, file by file: what is there already is not copied again, and
the record comes last.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from holdfast.multihost import Solo

from ..errors import CheckpointError, Corrupt, StepExists, StepGone, StepNotFound
from ..format.record import parse_record, read_record
from ..format.step_folders import (
    has_record,
    list_steps,
    note_foreign_prefix,
    other_step,
    prefix_of,
    read_foreign_prefix,
    read_step_names,
)
from ..layouts.base import files_below
from ..layouts.detect import layout_of, open_if_finished, while_it_is_there
from ..layouts.holdfast import HoldfastCheckpoint
from ..layouts.orbax import metadata as orbax
from ..options import Options
from ..steps.claims import FOLDER, Claims, this_writer, writer_of
from ..steps.garbage import fence_others
from ..steps.left_behind import read_marks
from ..steps.opening import open_root
from ..steps.refusals import refuse_root_of_steps
from ..storage.base import Entry, NameTaken, Part, Storage
from ..storage.path import StorePath
from ..storage.threads import run_side_by_side
from ..storage.tombstone import RECORD_NAME
from .conversion import Progress
from .repack import CopyJob, repack

READ_BYTES = 16 << 20  # at a time
_LAST = (
    orbax.MARKER,
    orbax.CHECKPOINT_METADATA,
    orbax.COMMITTED,
)  # what makes a folder of Orbax's count as finished


@dataclass
class Copied:
    """The report of a copy: files written, files that were there already, bytes written."""

    written: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    bytes: int = 0

    def wrote(self, nbytes: int) -> None:
        """Counts the bytes of a file that was written."""
        self.bytes += nbytes


def copy_checkpoint(
    source: StorePath,
    target: StorePath,
    claims: Claims,
    progress: Progress = lambda done_bytes: None,
) -> Copied:
    """Copies the checkpoint in `source` to `target`, in whose store `claims` are, and verifies the
    copy by reading it back.

    Files that are there already are kept, so a copy that was cut off goes on where it was: packs of
    the right size, which are verified afterwards, and of another layout, which has no checksums,
    files of the same bytes. One of other bytes that was not cut off is of another checkpoint. A
    step of ours is verified before it gets its record: a damaged one never appears. Where the
    target takes no files as long as a pack, its chunks go into more. Where the source is deleted
    meanwhile, what was begun goes too.
    Blocks; raises StepExists, Corrupt naming the file that does not fit, StepGone, the stores'
    OSErrors.
    """
    done = Copied()
    try:
        with while_it_is_there(source):
            _copy(source, target, claims, done, progress)
    except StepGone:
        if layout_of(target) is None:  # nobody can go on with it
            begun = [(target / name).name for name in (*done.written, *done.skipped)]
            target.storage.delete([*begun, *target.folders_of(begun)])
        raise
    return done


def _copy(
    source: StorePath, target: StorePath, claims: Claims, done: Copied, progress: Progress
) -> None:
    there = layout_of(target)
    layout = layout_of(source)
    if layout is None:
        raise StepNotFound(f"{source} holds no checkpoint", path=str(source))
    if there is not None and there.name != layout.name:
        raise StepExists(
            f"{target} holds a checkpoint in another layout ({there.name}) than {source}"
            f" ({layout.name}); choose another place",
            path=str(target),
        )
    if not target.name:
        refuse_root_of_steps(target.storage, list_steps(target.storage))
    if layout.name == "holdfast":
        _copy_ours(source, target, claims, done, progress)
    else:
        _copy_others(source, target, done, progress)


def _copy_others(source: StorePath, target: StorePath, done: Copied, progress: Progress) -> None:
    """Copies a checkpoint of another library's layout."""
    jobs = [CopyJob(name, name, size) for name, size in file_sizes(source).items()]
    jobs.sort(key=lambda job: (job.name in _LAST, job.name))
    there_already = _same_files(source, target, jobs)
    for job in jobs:
        _check_size(target, job)
        copy_file(source, target, job, done, progress, is_there=job.name in there_already)
    copy = open_if_finished(target)
    if copy is None:
        raise CheckpointError(
            f"{target} is not a checkpoint after the copy of {source}: is the source one?",
            path=str(target),
        )
    copy.verify()


def copy_step_names(
    source: Storage, target: Storage, claims: Claims, folders: Sequence[str]
) -> None:
    """Makes a root call its steps as the source does, before it gets steps from these folders.

    Raises CheckpointError where the target calls its steps otherwise.
    """
    names = read_step_names(source)
    ours = [folder for folder in folders if has_record(source, folder)]
    prefix = read_foreign_prefix(source)
    others = {prefix_of(folder) for folder in folders if folder not in ours} - {""}
    if prefix is None and others and list_steps(target):
        prefix = others.pop()
    is_called_so = not ours or names == read_step_names(target)
    if is_called_so and prefix in (None, read_foreign_prefix(target)):
        return
    options = Options() if is_called_so else Options(step_format=names.format)
    root = open_root(target, claims, Solo(), options)
    try:
        if prefix is not None:
            note_foreign_prefix(target, prefix, root.writer.claim)
    finally:
        claims.fence(root.writer.id)


def copy_marks(source: Storage, target: Storage, claims: Claims) -> None:
    """Copies what says which steps were left behind, before they are copied: none of them is ever
    the newest of the copy.
    """
    marks = read_marks(source)
    if not marks:
        return
    root = open_root(target, claims, Solo(), Options())
    try:
        for mark in marks:
            # It is named after a save, so that what is there already says the same.
            with contextlib.suppress(NameTaken, FileExistsError):
                target.commit(mark.file_name, mark.to_bytes(), root.writer.claim)
    finally:
        claims.fence(root.writer.id)


def _copy_ours(
    source: StorePath, target: StorePath, claims: Claims, done: Copied, progress: Progress
) -> None:
    original = HoldfastCheckpoint(source.storage, source.name)
    record = original.record
    if other_step(record.step, target.storage, target.name) is not None:
        raise CheckpointError(
            f"{target} is called as another step than {source}, which is step {record.step}; choose"
            " another name",
            path=str(target),
        )
    limit = target.storage.max_file_bytes
    jobs, data = repack(source, record, source.fetch(RECORD_NAME), limit)
    copied = parse_record(data, f"{target}/{RECORD_NAME}")
    copy = HoldfastCheckpoint(target.storage, target.name, copied)
    is_there = RECORD_NAME in target.names()
    if is_there:
        _refuse_other(target, source, data)
    with _claimed(source, target, claims, record.writer_id) as claim:
        for job in jobs:
            copy_file(source, target, job, done, progress, is_there=has_size(target, job))
        _verify(original, copy)
        if not is_there:
            try:
                target.storage.commit((target / RECORD_NAME).name, data, claim)
            except (NameTaken, FileExistsError):
                _refuse_other(target, source, data)
            done.written.append(RECORD_NAME)


@contextlib.contextmanager
def _claimed(source: StorePath, target: StorePath, claims: Claims, save_id: str) -> Iterator[str]:
    """Holds a claim to commit by, and one by the name that is in the packs.

    By the second no sweep takes the packs for a dead writer's.
    """
    me = this_writer()
    holder = replace(me, id=writer_of(save_id))
    fence_others(claims, me)
    claims.forget_fenced()
    if holder.id in claims.standing():
        raise CheckpointError(
            f"somebody else is copying {source} to {target}, or saving there; wait until they are"
            " done",
            path=str(target),
        )
    claims.take(me)
    try:
        claims.take(holder)
        yield me.claim
    finally:
        claims.fence(holder.id)
        claims.fence(me.id)
        target.storage.delete([f"{FOLDER}/"])


def _verify(original: HoldfastCheckpoint, copy: HoldfastCheckpoint) -> None:
    """Reads the copy back; the error says which of the two is damaged."""
    try:
        copy.verify()
    except Corrupt as error:
        original.verify()  # raises if it is the source
        message = f"{error}. The source is whole: delete this file of the copy and copy again"
        raise Corrupt(message, path=error.path, file=error.file, leaf=error.leaf) from error
    # A record that was rewritten may name chunks that are whole, and not those of the source.
    for name, item in original.record.items.items():
        is_rewritten = copy.record.items[name].files != item.files
        if is_rewritten and copy.reader(name).checksums() != original.reader(name).checksums():
            raise Corrupt.at(
                copy.info.path,
                f"the item {name!r} would have other values than {original.info.path}: it got no"
                " record",
            )


def copy_file(
    source: StorePath,
    target: StorePath,
    job: CopyJob,
    done: Copied,
    progress: Progress,
    *,
    is_there: bool,
) -> None:
    if is_there:
        done.skipped.append(job.name)
        progress(job.size)
        return
    done.written.append(job.name)
    target.storage.write((target / job.name).name, job.size, _parts(source, job, progress))
    done.wrote(job.size)


def file_sizes(folder: StorePath, entries: Sequence[Entry] | None = None) -> dict[str, int]:
    """Returns the files of a checkpoint with their sizes; `entries` is all that is in the folder.

    Where a listing has no sizes, they come from the record, or from the store.
    """
    files = files_below(folder, entries).items()
    sizes = {name: entry.size for name, entry in files if not name.startswith(f"{FOLDER}/")}
    unknown = [name for name, size in sizes.items() if size is None]
    if RECORD_NAME in unknown:
        return _sizes_in_record(folder)
    known = {name: size for name, size in sizes.items() if size is not None}
    return known | _ask_sizes(folder, unknown)


def _ask_sizes(folder: StorePath, names: Sequence[str]) -> dict[str, int]:
    stored = [(folder / name).name for name in names]
    asked = run_side_by_side(folder.storage.size, stored, folder.storage.max_concurrency)
    return dict(zip(names, asked, strict=True))


def _sizes_in_record(folder: StorePath) -> dict[str, int]:
    record = read_record(folder.storage, folder.name)
    files = [file for item in record.items.values() for file in item.files]
    return {file.name: file.size for file in files} | {RECORD_NAME: 0}


def has_size(target: StorePath, job: CopyJob) -> bool:
    """Returns whether the target has a file of exactly the job's size, by one read: of an object
    `Storage.size` makes many.
    """
    return _bytes_from_last(target, job) == (1 if job.size else 0)


def _bytes_from_last(target: StorePath, job: CopyJob) -> int:
    """Returns how many bytes the target's file has from the job's last one on, of two; -1 where
    there is no file.
    """
    end = memoryview(bytearray(2))
    try:
        return target.read(job.name, max(0, job.size - 1), [end])
    except (FileNotFoundError, NotADirectoryError):
        return -1


def _same_files(source: StorePath, target: StorePath, jobs: Iterable[CopyJob]) -> set[str]:
    """Returns the files that the target has already, by their bytes. One that is shorter was cut
    off. Raises StepExists where one is of another checkpoint.
    """
    same = set()
    for job in jobs:
        if _is_same(source, target, job):
            same.add(job.name)
        elif _bytes_from_last(target, job) > 0:
            raise StepExists(
                f"{target / job.name} has other bytes than the file of {source}; choose another"
                " place, or delete it to have it copied again",
                path=str(target),
            )
    return same


def _is_same(source: StorePath, target: StorePath, job: CopyJob) -> bool:
    """Returns whether the target has a file of the very bytes; reads both files."""
    if not has_size(target, job):
        return False
    for offset, (data,) in _parts(source, job, lambda done_bytes: None):
        there = bytearray(len(data))
        if target.read(job.name, offset, [memoryview(there)]) != len(data) or there != data:
            return False
    return True


def _refuse_other(target: StorePath, source: StorePath, data: bytes) -> None:
    if target.fetch(RECORD_NAME) != data:
        raise StepExists(
            f"{target} is another checkpoint than {source}; choose another place or delete it"
            " first",
            path=str(target),
        )


def _check_size(target: StorePath, job: CopyJob) -> None:
    limit = target.storage.max_file_bytes
    if limit is not None and job.size > limit:
        hint = "--to safetensors" if job.name.endswith(".safetensors") else "--to orbax"
        message = (
            f"{job.name} has {job.size} bytes, and {target} takes files of at most {limit}: use"
            f" `holdfast convert {hint}`, which divides them"
        )
        raise CheckpointError(message, path=str(target))


def _parts(source: StorePath, job: CopyJob, progress: Progress) -> Iterable[Part]:
    if job.head:
        yield 0, [memoryview(job.head)]
    for at in range(0, job.length, READ_BYTES):
        data = _read(source, job.source, job.offset + at, min(READ_BYTES, job.length - at))
        yield len(job.head) + at, [data]
        progress(len(data))


def _read(source: StorePath, file: str, offset: int, size: int) -> memoryview:
    """Returns bytes of a file that has them. Raises Corrupt."""
    path = f"{source}/{file}"
    buffer = memoryview(bytearray(size))
    try:
        got = source.read(file, offset, [buffer])
    except FileNotFoundError:
        raise Corrupt.at(path, "the file is missing, and the record names it") from None
    if got != size:
        raise Corrupt(
            f"{path} ends after {offset + got} bytes; it was longer when it was written",
            path=path,
            file=path,
        )
    return buffer
