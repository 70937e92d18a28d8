"""Copies checkpoints between stores, file by file: what is there already is not copied again, and the record comes last."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from . import _orbax_metadata as orbax
from ._claims import FOLDER, Claims, this_writer
from ._errors import CheckpointError, StepExists
from ._layouts import RECORD_NAME, recognise
from ._place import Place
from ._restore import read_record
from ._storage import Part, Storage

PIECE_BYTES = 16 << 20
_LAST = (orbax.MARKER, orbax.CHECKPOINT_METADATA, orbax.COMMITTED)  # what makes a folder of Orbax's count as finished


@dataclass
class Copied:
    """What a copy did: files written, files that were there already, bytes written."""

    written: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    bytes: int = 0


def copy_checkpoint(source: Place, target: Place, claims: Claims, progress: Callable[[int], None] = lambda done_bytes: None) -> Copied:
    """Copies the checkpoint in `source` to `target`, in whose store `claims` are, and verifies the copy by reading it back.

    Files of the right size that are there already are kept, so a copy that was cut off goes on where it was; the verification finds
    those that are not right. Blocks; raises StepExists, Corrupt naming the file that does not fit, the stores' OSErrors.
    """
    files = file_sizes(source)
    there = {entry.name.removeprefix(f"{target.name}/") for entry in target.storage.list(target.name, recursive=True)}
    if RECORD_NAME in there:
        _refuse_other(source, target)
    done = Copied()
    for name in sorted(files, key=lambda name: (name in _LAST, name)):
        if name == RECORD_NAME:
            continue
        if name in there and _has_size(target, name, files[name]):
            done.skipped.append(name)
            progress(files[name])
            continue
        _check_size(target, name, files[name])
        target.storage.write((target / name).name, files[name], _pieces(source.storage, (source / name).name, files[name], progress))
        done.written.append(name)
        done.bytes += files[name]
    if RECORD_NAME in files and RECORD_NAME not in there:
        _commit(source, target, claims)
        done.written.append(RECORD_NAME)
    copy = recognise(target)
    if copy is None:
        raise CheckpointError(f"{target} is not a checkpoint after the copy of {source}: is the source one?", path=str(target))
    copy.verify()
    return done


def file_sizes(place: Place) -> dict[str, int]:
    """Returns the files of a checkpoint with their sizes; where listings tell none (object stores), the record's, or by reading them."""
    sizes = {entry.name.removeprefix(f"{place.name}/"): entry.size for entry in place.storage.list(place.name, recursive=True)}
    sizes = {name: size for name, size in sizes.items() if not name.startswith(f"{FOLDER}/")}
    if "://" not in place.storage.root:
        return sizes
    if RECORD_NAME in sizes:
        record = read_record(place.storage, place.name)
        return {file.name: file.size for item in record.items.values() for file in item.files} | {RECORD_NAME: 0}
    return {name: len(place.fetch(name)) for name in sizes}


def _has_size(place: Place, name: str, size: int) -> bool:
    """Tells whether a file ends exactly after `size` bytes."""
    end = memoryview(bytearray(2))
    return place.read(name, max(0, size - 1), [end]) == (1 if size else 0)


def _refuse_other(source: Place, target: Place) -> None:
    if source.fetch(RECORD_NAME) != target.fetch(RECORD_NAME):
        raise StepExists(f"{target} is another checkpoint than {source}; choose another place or delete it first", path=str(target))


def _check_size(target: Place, name: str, size: int) -> None:
    limit = target.storage.max_file_bytes
    if limit is not None and size > limit:
        message = (
            f"{name} has {size} bytes, and {target} takes files of at most {limit}: use `holdfast convert --to holdfast`, which splits them"
        )
        raise CheckpointError(message, path=str(target))


def _pieces(storage: Storage, name: str, size: int, progress: Callable[[int], None]) -> Iterable[Part]:
    for offset in range(0, size, PIECE_BYTES):
        buffer = memoryview(bytearray(min(PIECE_BYTES, size - offset)))
        got = storage.read(name, offset, [buffer])
        if got != len(buffer):
            raise CheckpointError(f"{storage.root}/{name} became shorter while it was copied", path=name)
        yield offset, [buffer]
        progress(len(buffer))


def _commit(source: Place, target: Place, claims: Claims) -> None:
    writer = this_writer()
    claims.take(writer)
    try:
        target.storage.commit((target / RECORD_NAME).name, source.fetch(RECORD_NAME), f"{FOLDER}/{writer.id}")
    except FileExistsError:
        _refuse_other(source, target)
    finally:
        claims.release(writer)


__all__ = ["Copied", "copy_checkpoint"]
