"""What a checkpoint of any layout is to its readers: a `CheckpointReader`.

A `CheckpointLayout` opens one.

A reader describes its items as our own record does (`ItemRecord`: a tree and its leaves) and fills
any region of any leaf. Nothing above this seam, neither tools nor the command line, knows files of
other people's layouts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from ..arrays.dtypes import HostArray
from ..errors import Corrupt, StepNotFound
from ..format.grid import Grid, Shape
from ..format.limits import MALFORMED
from ..format.own_files import FileContents
from ..format.record import ItemRecord, LeafRecord
from ..restoring.per_process import PerProcessSelection
from ..restoring.reader import Allocate, ArrayReader
from ..restoring.restore import VerifyReport
from ..restoring.view_reader import BATCH_BYTES, Wanted, fresh, read_in_order
from ..storage.base import Entry
from ..storage.path import StorePath

VERIFY_BATCH_BYTES = 128 << 20  # enough to keep every thread of tensorstore at work
PIECE_BYTES = 16 << 20  # of a file that is no array
Entries: TypeAlias = Mapping[str, Entry]  # of a folder, by their names there


@dataclass(frozen=True)
class CheckpointInfo:
    """The facts that a checkpoint states of itself. Times are Unix seconds.

    `items` are kinds by item name: "tree", "json" or "files". `save_id` tells a checkpoint from the
    one that overwrites it, where the layout has such an id. `owners` has the JSON items and items
    of files of which each process keeps its own, and how many these are. `processes` is how many
    saved it, where that is known.
    """

    layout: str
    path: str
    items: Mapping[str, str]
    step: int | None = None
    started_s: float | None = None
    finished_s: float | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    metadata: Any = None
    save_id: str = ""
    owners: Mapping[str, int] = field(default_factory=dict)
    processes: int | None = None

    def copies(self, item: str) -> list[int | None]:
        """Returns the processes that keep their own copy of an item.

        [None] stands for an item that is all processes'.
        """
        return list(range(self.owners[item])) if item in self.owners else [None]


class CheckpointReader(Protocol):
    """One opened checkpoint of some layout. All calls block and may come from several threads."""

    @property
    def info(self) -> CheckpointInfo: ...

    def item(self, name: str) -> ItemRecord:
        """Describes a tree item.

        Raises StepNotFound for an item that is not there, and Corrupt, which names the file that is
        missing or damaged.
        """

    def reader(self, name: str) -> ArrayReader:
        """Returns the reader of an item's arrays; it raises Corrupt naming file and leaf."""

    def json(self, name: str, process: int = 0) -> Any:
        """Returns the value of an item of kind "json".

        It is the value that `process` keeps, where each process keeps its own.
        """

    def files(self, name: str, selection: PerProcessSelection | None = None) -> FileContents:
        """Yields the name of each file of an item of kind "files", and its bytes in pieces.

        The names are those below the item.
        """

    def verify(self) -> VerifyReport:
        """Reads everything and checks it as well as the layout allows.

        Raises Corrupt, which names file and leaf.
        """


class CheckpointLayout(Protocol):
    """The seam for one layout: how its checkpoints are recognised, opened, and called in a root.

    `keeps_roots` says whether its library keeps roots of steps: a manager goes on with those.
    """

    name: str
    keeps_roots: bool

    def recognises(self, folder: StorePath, names: Entries) -> bool:
        """Says whether `folder`, which holds `names`, is a finished checkpoint of this layout."""

    def open(self, folder: StorePath) -> CheckpointReader:
        """Opens a checkpoint that `recognises` has accepted.

        Raises Corrupt or HostileCheckpoint where it cannot be opened.
        """

    def step_of(self, name: str) -> int | None:
        """Returns the step that a folder's name stands for in a root; None for no step."""


def find_named(info: CheckpointInfo, items: Mapping[str, Any], name: str) -> Any:
    """Returns items[name]; raises StepNotFound saying which items there are."""
    if name not in items:
        known = ", ".join(sorted(info.items)) or "none"
        raise StepNotFound(
            f"{info.path} has no item '{name}'; it has: {known}", path=info.path, step=info.step
        )
    return items[name]


def array_record(
    path: str, kind: str, shape: Shape, dtype: str, *, chunk_shape: Shape | None = None
) -> LeafRecord:
    """Returns the record of an array of another layout, of which a chunk (None: the whole array) is
    the least that is worth reading by itself.
    """
    grid = Grid(shape, shape, shape if chunk_shape is None else chunk_shape)
    return LeafRecord(path, kind, dtype, shape, grid=grid)


def leaves_below(item: ItemRecord, path: str) -> list[LeafRecord]:
    """Returns the leaf at `path` and those below it; "" is all of them."""
    return [
        leaf
        for leaf in item.leaves
        if not path or leaf.path == path or leaf.path.startswith(f"{path}.")
    ]


def arrays_of(item: ItemRecord) -> list[LeafRecord]:
    """Returns the leaves that are arrays."""
    return [leaf for leaf in item.leaves if leaf.grid is not None]


def total_bytes(checkpoint: CheckpointReader) -> int:
    """Returns the bytes of all arrays of a checkpoint."""
    return sum(
        leaf.nbytes
        for name, kind in checkpoint.info.items.items()
        if kind == "tree"
        for leaf in checkpoint.item(name).leaves
    )


def read_leaves(
    reader: ArrayReader,
    leaves: Sequence[LeafRecord],
    *,
    batch_bytes: int = BATCH_BYTES,
    allocate: Allocate = fresh,
) -> Iterator[tuple[LeafRecord, HostArray]]:
    """Yields the arrays of leaves, read in batches.

    One leaf at a time is in memory, or several of `batch_bytes` in all.
    """
    wholes = (tuple((0, size) for size in leaf.shape) for leaf in leaves)
    wanted = (Wanted(leaf, whole, whole) for leaf, whole in zip(leaves, wholes, strict=True))
    arrays = read_in_order(reader, wanted, batch_bytes=batch_bytes, allocate=allocate)
    for leaf in leaves:  # zip would keep the array before while the next one is read
        yield leaf, next(arrays)


def files_below(folder: StorePath, entries: Iterable[Entry] | None = None) -> Entries:
    """Returns the files in a folder and the folders below it, by their names from there.

    `entries` are they, where they were listed.
    """
    if entries is None:
        entries = folder.storage.list(folder.name, recursive=True)
    return {entry.name.removeprefix(f"{folder.name}/"): entry for entry in entries}


def contents_of(folder: StorePath, names: Iterable[str]) -> FileContents:
    """Yields the names of files below a folder, and their bytes in pieces that hold until the next.
    Nothing of a file is read before its pieces are asked for.
    """
    for name in names:
        yield name, _pieces_of(folder, name)


def _pieces_of(folder: StorePath, name: str) -> Iterator[memoryview]:
    memory = memoryview(bytearray(PIECE_BYTES))
    offset = 0
    while got := folder.read(name, offset, [memory]):
        yield memory[:got]
        offset += got


def verify_by_reading(checkpoint: CheckpointReader, files: int) -> VerifyReport:
    """Reads every leaf once, in bounded memory.

    No more can be checked where a layout keeps no checksums.
    """
    leaves = total = 0
    for name, kind in checkpoint.info.items.items():
        if kind == "json":
            checkpoint.json(name)
        if kind != "tree":
            continue
        item = checkpoint.item(name)
        reader = checkpoint.reader(name)
        for _, array in read_leaves(reader, arrays_of(item), batch_bytes=VERIFY_BATCH_BYTES):
            total += array.nbytes
        leaves += len(item.leaves)
    step = checkpoint.info.step or 0
    return VerifyReport(checkpoint.info.path, step, files, leaves, bytes=total)


@contextlib.contextmanager
def parsing(path: str) -> Iterator[None]:
    """Makes Corrupt, naming `path`, of whatever goes wrong in parsing what stands there."""
    try:
        yield
    except MALFORMED as error:
        raise Corrupt(
            f"{path} is damaged: what should describe its arrays does not ({error!r:.200})",
            file=path,
        ) from error
