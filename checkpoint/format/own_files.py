"""Items that are folders of files, which a caller's handler writes and reads in scratch folders."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import HostileCheckpoint, TreeMismatch
from ..storage.local import scan_folder
from .limits import JSON_LIMIT_BYTES

MAX_FILES = 100_000  # of one process in an item: their numbers have five digits
# The name of each file, and its bytes in pieces.
FileContents: TypeAlias = Iterator[tuple[str, Iterator[memoryview]]]
OWN_NAME_LIMIT = 1024  # characters of the name that a file has for its owner


@dataclass(frozen=True)
class Files:
    """Marks an item of `save(items=...)` as files: `Files(tokenizer.save_pretrained)`; as a `like`
    it says who reads them back.

    `write(folder)` is called in `save`, with an empty pathlib.Path of this machine, and leaves
    there what is to be saved: regular files, in folders or not, and empty folders. In a group the
    primary's is called. With `per_process` every process's is, and each gets its own back, on as
    many processes as saved; with `shared` every process's is, as if in one folder, and each gets
    the files of all: no two may write one name, and empty folders are left out. `read(folder)` is
    called in a restore, with the files in a folder that is removed after it; what it returns is the
    item. Without a `like` an item of files comes back as a dict of their names and bytes; an empty
    folder has a name that ends in `/`, and no bytes.
    """

    write: Callable[[Path], object] | None = None
    read: Callable[[Path], Any] | None = None
    per_process: bool = False
    shared: bool = False

    def __post_init__(self) -> None:
        for name, function in (("write", self.write), ("read", self.read)):
            if function is not None and not callable(function):
                raise TypeError(
                    f"Files: {name}= expects a function of a folder, found {function!r}; for files"
                    " that are there: Files(lambda folder: shutil.copytree(PATH, folder / NAME))"
                )
        if self.per_process and self.shared:
            raise ValueError(
                "Files: per_process keeps the files of each process apart, and shared puts them"
                " together; expected one of both"
            )


@dataclass(frozen=True)
class StagedFiles:
    """Files of one process that are to be saved: those of these names below a scratch folder."""

    folder: Path
    names: tuple[str, ...]
    per_process: bool
    nbytes: int

    def release(self) -> None:
        """Removes them."""
        shutil.rmtree(self.folder, ignore_errors=True)


def stage_files(files: Files, *, writes: bool, max_file_bytes: int | None) -> StagedFiles:
    """Calls `files.write` with a new scratch folder, if this process `writes`.

    Returns the files that are there then. Raises ValueError for files that cannot be saved.
    """
    if files.write is None:
        raise ValueError("an item of files expects a `write`: Files(tokenizer.save_pretrained)")
    folder = _make_scratch_folder()
    try:
        if writes:
            files.write(folder)
            _check_scratch(folder)
        sizes = {
            name: 0 if is_folder_name(name) else (folder / name).stat().st_size
            for name in own_names(folder)
            if not (files.shared and is_folder_name(name))
        }
        for name, size in sizes.items():
            if max_file_bytes is not None and size > max_file_bytes:
                raise ValueError(
                    f"the file {name!r} has {size:,} bytes, and this store takes"
                    f" {max_file_bytes:,}; expected several files"
                )
        return StagedFiles(folder, tuple(sizes), files.per_process, sum(sizes.values()))
    except BaseException:
        _remove_scratch(folder)
        raise


def _check_scratch(folder: Path) -> None:
    """Raises ValueError unless the folder is still there: a link would lead to files elsewhere."""
    if folder.is_symlink() or not folder.is_dir():
        what = "is a link" if folder.is_symlink() else "is gone"
        raise ValueError(
            f"the handler was given the folder {folder}, which {what} after it; expected the files"
            " in that folder: write or copy them there"
        )


def _remove_scratch(folder: Path) -> None:
    """Removes a scratch folder, or what a handler has put in its place."""
    if folder.is_symlink() or folder.is_file():
        folder.unlink(missing_ok=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)


def _make_scratch_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="holdfast-files-"))


def give_files(like: Any, files: FileContents, where: str) -> Any:
    """Returns what `like.read` makes of files, or their bytes by name where `like` is no Files.

    `files` are names and pieces of bytes. Raises HostileCheckpoint, naming `where`, for files that
    cannot be beside each other, TreeMismatch for a file that is too long to be returned.
    """
    if not isinstance(like, Files):
        return {name: _join(name, pieces, where) for name, pieces in files}
    if like.read is None:
        raise ValueError(
            "a `like` of an item of files expects a `read`: Files(read=load_tokenizer)"
        )
    with scratch_folder() as folder:
        put_files(folder, files, where)
        return like.read(folder)


def _join(name: str, pieces: Iterable[memoryview], where: str) -> bytes:
    data = bytearray()
    for piece in pieces:
        data += piece
        if len(data) > JSON_LIMIT_BYTES:
            raise TreeMismatch(
                f"{where}: the file {name!r} has more than {JSON_LIMIT_BYTES:,} bytes, and is not"
                " returned as one object; pass a `like`: Files(read=...)",
                path=where,
                leaf=name,
                expected="Files(read=...)",
            )
    return bytes(data)


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Makes an empty folder of this machine, and removes it with its files after the block."""
    folder = _make_scratch_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def is_own_name(name: Any) -> bool:
    """Says whether a name may stand in a record: as a path, it stays below a folder."""
    if type(name) is not str or not 0 < len(name) <= OWN_NAME_LIMIT:
        return False
    if not name.isprintable() or "\\" in name:
        return False
    return not {"", ".", ".."} & set(name.removesuffix("/").split("/"))


def is_folder_name(name: str) -> bool:
    """Says whether a name among those of an item's files is that of an empty folder."""
    return name.endswith("/")


def own_names(folder: Path) -> list[str]:
    """Returns the names of the files and the empty folders below a folder, sorted.

    Raises ValueError for what is no file, or has a name that no record has.
    """
    names = []
    for path in sorted(_paths_below(folder)):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            raise ValueError(
                f"{name!r} is no file and no folder; expected files, copied instead of linked"
            )
        if not is_own_name(name):
            raise ValueError(
                f"{name!r} is no name for a file: expected printable characters, at most"
                f" {OWN_NAME_LIMIT}, and no backslash"
            )
        if path.is_file():
            names.append(name)
        elif not any(path.iterdir()):
            names.append(f"{name}/")
    if len(names) > MAX_FILES:
        raise ValueError(
            f"{len(names):,} files; expected at most {MAX_FILES:,} of a process in an item: pack"
            " them into archives"
        )
    return names


def _paths_below(folder: Path) -> Iterator[Path]:
    # Path.rglob passes over a folder that it cannot list.
    for entry in scan_folder(folder):
        yield Path(entry)
        if entry.is_dir(follow_symlinks=False):
            yield from _paths_below(Path(entry))


def put_files(folder: Path, files: FileContents, where: str) -> None:
    """Writes files below a new folder, by names of a record.

    Raises HostileCheckpoint where the name of one is a folder of another.
    """
    for name, pieces in files:
        path = folder.joinpath(*name.split("/"))
        try:
            if is_folder_name(name):
                path.mkdir(parents=True, exist_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("xb")
        except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
            raise HostileCheckpoint(
                f"{where}: {name!r} cannot be there beside the other files: {error.strerror}",
                path=where,
            ) from error
        with file:
            for piece in pieces:
                file.write(piece)
