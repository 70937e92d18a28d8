"""The plan of who reads what for whom, whom a process asks, and how long it waits."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.agreement.messages import parsed
from holdfast.checkpoint.agreement.restore_verdict import RestoreReport
from holdfast.checkpoint.restoring.sharing import (
    KNOWN_READS,
    MOST_UNREACHED,
    PATIENCE_S,
    PATIENT_TIMES,
    Blocks,
    Demand,
    PeerTrust,
    plan_sharing,
    runs_of,
)

MIB = 1 << 20

sizes = st.lists(st.integers(0, 40 * MIB), min_size=1, max_size=5)


@given(sizes, st.integers(1, 64), st.data())
def test_each_shared_block_has_one_first_reader_among_those_that_need_it(
    of_files: list[int], processes: int, data: st.DataObject
) -> None:
    """So it is for any needs, and a block that one process needs has none."""
    blocks = Blocks(of_files, processes)
    count = sum(-(-size // blocks.block_bytes) for size in of_files)
    wanted = [
        data.draw(st.sets(st.integers(0, max(0, count - 1)))) if count else set()
        for _ in range(min(processes, 6))
    ]
    needs = [Demand(runs_of(each), address="10.0.0.1:1") for each in wanted]
    plan = plan_sharing(needs, blocks)
    for block in range(count):
        users = [rank for rank, each in enumerate(wanted) if block in each]
        if len(users) < 2:
            assert block not in plan
        else:
            assert set(plan[block].readers) <= set(users)
            assert len(set(plan[block].readers)) == len(plan[block].readers) >= 1
            assert plan[block].users == len(users)


@given(sizes, st.integers(1, 64))
def test_blocks_cover_each_file_once(of_files: list[int], processes: int) -> None:
    """The places of all blocks are the files, one stretch after the other."""
    blocks = Blocks(of_files, processes)
    for file, size in enumerate(of_files):
        places = [blocks.place(block) for block in blocks.within(file, 0, size)]
        assert [place[0] for place in places] == [file] * len(places)
        assert sum(stop - start for _, start, stop in places) == size
        assert all(one[2] == other[1] for one, other in itertools.pairwise(places))


def test_each_process_begins_with_its_own_and_all_have_turns() -> None:
    """The blocks of a reader have the turns 0, 1, 2 ...; neighbours go to one reader."""
    blocks = Blocks([1024 * MIB], 2)
    count = 1024 * MIB // blocks.block_bytes
    plan = plan_sharing([Demand(((0, count),), address="10.0.0.1:1")] * 2, blocks)
    for rank in range(2):
        own = [shared.turn for _, shared in sorted(plan.items()) if shared.readers[0] == rank]
        assert own == list(range(count // 2))
    changes = sum(
        plan[block].readers[0] != plan[block + 1].readers[0] for block in range(count - 1)
    )
    assert changes < 2 * 8 * 2


def test_who_cannot_be_reached_is_no_reader() -> None:
    """A process without an address, or with one of loopback while others are elsewhere."""
    blocks = Blocks([64 * MIB], 4)
    runs = ((0, 4),)
    needs = [
        Demand(runs, machine="a"),
        Demand(runs, machine="a", address="127.0.0.1:9"),
        Demand(runs, machine="b", address="10.0.0.2:9"),
    ]
    assert {shared.readers for shared in plan_sharing(needs, blocks).values()} == {(2,)}


def test_little_is_not_worth_it() -> None:
    """The plan is empty where it would spare the store less than it must."""
    blocks = Blocks([8 * MIB], 2)
    needs = [Demand(((0, 8),), address="10.0.0.1:1")] * 2
    assert plan_sharing(needs, blocks, worth_bytes=8 * MIB)
    assert not plan_sharing(needs, blocks, worth_bytes=8 * MIB + 1)


def test_needs_that_are_too_many_to_tell_are_left_out() -> None:
    """What each process tells is bounded, and what was told is read as it was."""
    many = Demand(tuple((2 * i, 2 * i + 1) for i in range(100_000)), address="a:1")
    assert many.told(16) == Demand(address="a:1")
    few = Demand(((1, 4), (9, 10)), machine="m")
    report = RestoreReport(0, "a call", "", shared=few.told(4096))
    assert parsed(Demand, RestoreReport.from_bytes(report.to_bytes()).shared) == few


@pytest.fixture
def trust() -> PeerTrust:
    return PeerTrust()


def test_two_failures_in_a_row_drop_a_rank(
    trust: PeerTrust, caplog: pytest.LogCaptureFixture
) -> None:
    """An answer between them begins anew; the drop is told once, and is of that rank alone."""
    trust.note_failure(1, "slow")
    trust.note_bytes(1)
    trust.note_failure(1, "slow")
    assert trust.may_ask(1) and not caplog.messages
    trust.note_failure(1, "silent")
    trust.note_failure(1, "gone")
    assert caplog.messages == ["this process asks rank 1 for no more blocks: silent"]
    assert not trust.may_ask(1)
    assert trust.may_ask(2)


def test_damage_counts_whatever_comes_between(trust: PeerTrust) -> None:
    """A peer that damages bytes now and then is dropped too."""
    trust.note_damage(1)
    trust.note_bytes(1)
    assert trust.may_ask(1)
    trust.note_damage(1)
    assert not trust.may_ask(1)


def test_where_nobody_is_reached_nobody_is_asked(trust: PeerTrust) -> None:
    """Behind a firewall a few ranks are waited for, not all; ranks that answer stay asked."""
    for rank in range(MOST_UNREACHED):
        assert trust.may_ask(99)
        trust.note_failure(rank, "slow")
        trust.note_failure(rank, "slow")
    assert not trust.may_ask(99)


def test_as_many_as_are_lost_may_be_reached(trust: PeerTrust) -> None:
    """Three dead ranks of many that answer end nothing for these."""
    for rank in range(10, 15):
        trust.note_bytes(rank)
    for rank in range(MOST_UNREACHED):
        trust.note_failure(rank, "slow")
        trust.note_failure(rank, "slow")
    assert trust.may_ask(10)
    assert not trust.may_ask(0)


def test_who_still_reads_has_as_long_as_the_store_may_take(trust: PeerTrust) -> None:
    """Four times this process's own slowest read of the last sixteen, and 5 s at least; while it
    has read nothing, as if a read took 5 s.
    """
    assert trust.patience_s == PATIENT_TIMES * PATIENCE_S
    trust.note_store_read(0.1)
    assert trust.patience_s == PATIENCE_S
    trust.note_store_read(8.0)
    for _ in range(KNOWN_READS - 1):
        trust.note_store_read(2.0)
    assert trust.patience_s == PATIENT_TIMES * 8.0
    trust.note_store_read(2.0)
    assert trust.patience_s == PATIENT_TIMES * 2.0
