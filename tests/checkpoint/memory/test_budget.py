from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.memory.budget import (
    UNASKED_BYTES,
    USE,
    HeldBytes,
    MemoryBudget,
    MemoryUse,
    Sharers,
    divide,
)
from holdfast.checkpoint.memory.levels import UNLIMITED_BYTES, MemoryLevel
from holdfast.checkpoint.memory.pool import POOL


@pytest.fixture(autouse=True)
def nothing_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What earlier tests have left of this process's own memory is not of the machines here."""
    monkeypatch.setattr(POOL, "reused_bytes", lambda: 0)


def level(free_bytes: int, folder: str = "") -> MemoryLevel:
    return MemoryLevel(folder or "this machine", 10 * free_bytes, free_bytes, free_bytes, folder)


def test_the_tightest_level_decides() -> None:
    """Two processes in a container of their own share its bound, and all eight the machine's."""
    sharers = Sharers(8, {"/pod": 2})
    free = divide([level(1600, "/pod"), level(8000)], sharers)
    assert free.nbytes == 700
    assert free.level is not None and free.level.folder == "/pod"
    assert divide([level(1600, "/pod"), level(4000)], sharers).nbytes == 437
    assert divide([], sharers).nbytes == UNLIMITED_BYTES


@given(
    free_bytes=st.integers(0, 10_000),
    asks=st.lists(st.integers(0, 7), max_size=40),
    takes=st.lists(st.floats(0, 1), min_size=40, max_size=40),
)
def test_in_whatever_order_they_ask_the_parts_add_up(
    free_bytes: int, asks: Sequence[int], takes: Sequence[float]
) -> None:
    """Processes that see what others have taken never take more than there was."""
    left = free_bytes
    for _, share in zip(asks, takes, strict=False):
        part = divide([level(left)], Sharers(8)).nbytes
        left -= int(part * share)
    assert 0 <= left <= free_bytes
    # All at once, none having seen another's.
    assert 8 * divide([level(free_bytes)], Sharers(8)).nbytes <= free_bytes


def test_a_bound_of_the_caller_is_the_only_one() -> None:
    budget = MemoryBudget(bound_bytes=1 << 50, look=lambda: [level(10)])
    assert budget.free().nbytes == (1 << 50) - USE.held_bytes
    assert budget.free().level is None


def test_a_process_speaks_for_all_only_where_all_share_its_bounds() -> None:
    """An eighth is left to the program: 1,000 bytes have room for 437 of each of two."""
    apart = MemoryBudget(Sharers(2), look=lambda: [level(1000)])
    together = MemoryBudget(Sharers(2, is_whole_job=True), look=lambda: [level(1000)])
    assert together.has_room_for_each(437) and not together.has_room_for_each(438)
    assert not apart.has_room_for_each(1)
    # A caller's bound is this process's alone.
    bound = MemoryBudget(Sharers(2, is_whole_job=True), 1 << 50, look=lambda: [level(1000)])
    assert not bound.has_room_for_each(438)


def test_a_little_is_taken_unasked() -> None:
    """To look at files of the kernel would cost more than a small save does."""
    tight = MemoryBudget(look=lambda: [level(80)])
    assert tight.free_for(UNASKED_BYTES).nbytes == UNLIMITED_BYTES
    assert tight.free_for(UNASKED_BYTES + 1).nbytes == 70
    bounded = MemoryBudget(bound_bytes=1 << 50)
    assert bounded.free_for(1).nbytes == (1 << 50) - USE.held_bytes
    assert tight.seen_levels(UNASKED_BYTES) == ()
    assert [seen.most_bytes for seen in tight.seen_levels(UNASKED_BYTES + 1)] == [80]


def test_memory_in_use_again_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel says that it were. Each of two processes takes it that the other has as much."""
    monkeypatch.setattr(POOL, "reused_bytes", lambda: 3 * UNASKED_BYTES)
    look = MemoryBudget(Sharers(2), look=lambda: [level(8 * UNASKED_BYTES)])
    assert look.free().nbytes == UNASKED_BYTES * 7 // 8
    (seen,) = look.seen_levels(UNASKED_BYTES + 1)
    assert seen.most_bytes == 2 * UNASKED_BYTES
    both = MemoryBudget(Sharers(2, is_whole_job=True), look=look.look)
    assert both.has_room_for_each(UNASKED_BYTES * 7 // 8)
    assert not both.has_room_for_each(UNASKED_BYTES * 7 // 8 + 1)
    assert MemoryBudget(look=lambda: [level(UNASKED_BYTES)]).free().nbytes == 0


def test_memory_in_use_again_that_the_kernel_has_seen_is_taken_off_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is on the lists of files no more, and among what is used: what there is of it on them is
    the most that is too much. Else a restore has no room beside what was restored before it.
    """
    monkeypatch.setattr(POOL, "reused_bytes", lambda: 3 * UNASKED_BYTES)
    seen = replace(level(8 * UNASKED_BYTES, "/job"), lazy_bytes=UNASKED_BYTES)
    budget = MemoryBudget(Sharers(4), look=lambda: [seen])
    assert [each.most_bytes for each in budget.seen_levels(UNASKED_BYTES + 1)] == [
        7 * UNASKED_BYTES
    ]


def test_what_is_held_is_counted() -> None:
    use = MemoryUse()
    with use.account() as one, use.account() as other:
        one.add(10)
        other.add(7)
        other.drop(2)
        assert (use.held_bytes, other.nbytes) == (15, 5)
    with pytest.raises(ValueError), use.account() as one:
        _fail_holding(one)
    assert (use.held_bytes, use.peak_bytes) == (0, 17)


def _fail_holding(held: HeldBytes) -> None:
    held.add(3)
    raise ValueError


def test_what_dies_holds_nothing() -> None:
    """A save that was interrupted does not release its snapshot."""
    use = MemoryUse()
    held = HeldBytes(use)
    held.add(5)
    assert use.held_bytes == 5
    del held
    assert use.held_bytes == 0
    assert use.peak_bytes == 5
