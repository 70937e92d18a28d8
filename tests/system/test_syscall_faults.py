"""An error at any system call of a save, an overwrite, a deletion or a conversion: nothing is lost,
nothing unreadable, nothing hangs.
"""

from __future__ import annotations

import errno
import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults import ERRORS, OPERATIONS, TIMES, Fault, inject
from tests.support.killpoints import build

ALL = [Fault(error, times, after) for error in ERRORS for times in TIMES for after in (False, True)]
FEW = [Fault(errno.EIO, 2, True), Fault(errno.EIO, 1000, True), Fault(errno.ENOENT, 1, False)]
FEWEST_CALLS = 60  # of any of the operations
EVERY = 52


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("killpoint"))


def check(trials: list[dict[str, Any]], every: int) -> None:
    """Asserts that each trial ended in success or one typed error, and that the next process found
    the root whole, and left it clean.
    """
    print(f"{sum(trial['reached'] for trial in trials)} injected errors")
    wrong = [trial for trial in trials if trial["wrong"]]
    assert not wrong, (
        f"{len(wrong)} of {len(trials)}, among them {wrong[0]['calls']} at"
        f" {wrong[0]['point']}:\n{wrong[0]['wrong']}"
    )
    untyped = [trial for trial in trials if trial["untyped"]]
    assert not untyped, (
        f"{len(untyped)} of {len(trials)}, among them at"
        f" {untyped[0]['point']}:\n{untyped[0]['untyped'][0]}"
    )
    assert not any(trial["left"] for trial in trials), [trial for trial in trials if trial["left"]][
        :3
    ]
    ends = [trial for trial in trials if not trial["reached"]]
    assert all(trial["point"] + every > FEWEST_CALLS for trial in ends) and ends, (
        "the walk did not come to the end of the operation"
    )
    assert all(set(trial["calls"].values()) == {"done"} for trial in ends), (
        "without a fault it is done"
    )


@pytest.mark.parametrize("operation", ["save", pytest.param("delete", marks=pytest.mark.slow)])
def test_a_fault_at_some_calls(library: Path, operation: str) -> None:
    """One call in so many that touch the root, reading ones too: what is there is exact, what was
    acknowledged is there.
    """
    first = sum(map(ord, operation)) % EVERY
    check(inject(library, operation, FEW, first=first, every=EVERY), EVERY)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ALL, ids=str)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_fault_at_each_call_of_a_sixth(
    library: Path, operation: str, fault: Fault, drawn: random.Random
) -> None:
    """Each of them in turn fails, before it is made or after, alone or with those that follow: 0
    unreadable, 0 lost, 0 hang, 0 untyped. Every call's turn comes, on one day or another.
    """
    check(inject(library, operation, [fault], first=drawn.randrange(6), every=6), 6)
