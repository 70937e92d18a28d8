"""Where a save stands among the steps, decided without a look at any store."""

from __future__ import annotations

import pytest

from holdfast.checkpoint import StepOutOfOrder
from holdfast.checkpoint.steps.left_behind import NOTHING
from holdfast.checkpoint.steps.lineage import Position, StepOrder


def place(order: StepOrder, step: int, newest: int, *, overwrite: bool = False) -> tuple[int, bool]:
    """Returns the base of a save, and whether it begins a branch."""
    found = order.place(step, newest, overwrite=overwrite)
    return found.base, found.is_branch


def test_a_save_above_the_newest_goes_on_from_it() -> None:
    """Whatever was restored for a look; then that is forgotten."""
    order = StepOrder("root")
    assert place(order, 0, NOTHING) == (NOTHING, False)
    order.restored(100)
    found = order.place(301, 300, overwrite=False)
    assert found == Position(300, is_newest=True, restores=1)
    order.begun(found)
    assert not order.has_restored
    with pytest.raises(StepOutOfOrder):
        order.place(250, 301, overwrite=False)


def test_one_at_or_below_it_goes_on_from_the_highest_restored_step_below() -> None:
    """Until its save is there: one that failed is made again from the same step."""
    order = StepOrder("root")
    for step in (100, 200, 300):
        order.restored(step)
    assert place(order, 300, 300) == (200, True)
    found = order.place(250, 300, overwrite=False)
    order.begun(found)
    assert place(order, 260, 300) == (200, True)
    order.saved(found)
    with pytest.raises(StepOutOfOrder) as raised:
        order.place(240, 250, overwrite=False)
    assert raised.value.newest == 250


def test_what_is_restored_while_the_branch_is_saved_counts_for_the_next_one() -> None:
    """Also the step that the branch itself goes on from."""
    order = StepOrder("root")
    order.restored(200)
    found = order.place(250, 300, overwrite=False)
    order.begun(found)
    order.restored(100)
    order.restored(200)
    order.saved(found)
    assert place(order, 110, 250) == (100, True)
    assert place(order, 210, 250) == (200, True)


def test_an_earlier_save_that_ends_late_forgets_nothing() -> None:
    """It was begun before the restore."""
    order = StepOrder("root")
    earlier = order.place(300, 200, overwrite=False)
    order.begun(earlier)
    order.restored(200)
    order.saved(earlier)
    assert place(order, 210, 300) == (200, True)


def test_overwriting_begins_nothing_and_forgets_nothing() -> None:
    """At or below the newest; above it, it is a save as any other."""
    order = StepOrder("root")
    order.restored(100)
    found = order.place(200, 300, overwrite=True)
    assert not found.is_branch
    order.begun(found)
    assert order.may_go_back(250)
    order.begun(order.place(400, 300, overwrite=True))
    assert not order.has_restored


def test_without_an_order_everything_may_be_saved() -> None:
    """And nothing is gone back to."""
    order = StepOrder("root", has_order=False)
    assert place(order, 10, 300) == (300, False)
    order.restored(5)
    assert place(order, 10, 300) == (300, False)
    assert not order.may_go_back(10)
