"""Leaves kept per process: one process's view of what is stored for all."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.checkpoint.format.record import ItemRecord, LeafRecord
from holdfast.checkpoint.restoring.per_process import (
    PerProcessSelection,
    leaves_of_process,
    read_process,
)
from holdfast.checkpoint.restoring.reader import ReadRequest
from holdfast.checkpoint.restoring.view_reader import fresh
from tests.support.array_readers import MemoryReader, record_of

ROWS = np.arange(12, dtype=np.int32).reshape(3, 2, 2)
ITEM = ItemRecord(
    "state",
    "tree",
    (),
    None,
    (
        LeafRecord("seed", "int", value=(5, 6, 7), per_process=True),
        record_of("rng", ROWS, per_process=True),
        record_of("w", ROWS[0]),
    ),
)


@pytest.mark.parametrize("process", [0, 1, 2])
def test_a_process_sees_its_own_copies(process: int) -> None:
    """A value is that process's, an array loses its first axis, and other leaves stay as they
    are.
    """
    seed, rng, w = leaves_of_process(ITEM, PerProcessSelection(process, 3)).leaves
    assert (
        (seed.value, seed.refusal) == (5 + process, "")
        and rng.shape == (2, 2)
        and w is ITEM.leaves[2]
    )
    reader = read_process(MemoryReader({"rng": ROWS, "w": ROWS[0]}), ITEM, process)
    reads = [ReadRequest(rng, ((0, 2), (1, 2))), ReadRequest(w, ((0, 1), (0, 2)))]
    reader.fill(reads, fresh)
    assert reads[0].array is not None and reads[0].array.tolist() == ROWS[process, :, 1:].tolist()
    assert reads[1].array is not None and reads[1].array.tolist() == ROWS[0, :1].tolist()


REFUSED = [
    (PerProcessSelection(3), "of process 3"),
    (PerProcessSelection(0, 4), "for each of 4 processes"),
]


@pytest.mark.parametrize(("selection", "wanted"), REFUSED)
def test_a_copy_that_is_not_there_is_refused_when_it_is_wanted(
    selection: PerProcessSelection, wanted: str
) -> None:
    """The leaf has no value but a reason that says how many copies there are and what to do."""
    seed, rng, w = leaves_of_process(ITEM, selection).leaves
    for leaf in (seed, rng):
        assert (
            "is there for 3 processes" in leaf.refusal
            and wanted in leaf.refusal
            and "process=0 to 2" in leaf.refusal
        )
    assert seed.value is None and w.refusal == ""
