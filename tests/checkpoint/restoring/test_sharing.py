"""The plan of who reads what for whom, and whom a process asks, by a clock that the test turns."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.restoring.sharing import (
    LEAST_ANSWER_S,
    LEAST_BYTES_PER_S,
    MOST_UNREACHED,
    PATIENT_TIMES,
    Blocks,
    Demand,
    PeerTrust,
    plan_equally,
    plan_sharing,
    runs_of,
    servers_in_turn,
)
from holdfast.checkpoint.storage.hedges import SLOWEST_PEER_S, UNKNOWN_S

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


def test_half_the_speed_reads_half_as_much() -> None:
    """The shares are as the speeds."""
    blocks = Blocks([300 * MIB], 100)
    runs = ((0, 300),)
    speeds = [100.0, 100.0, 50.0]
    needs = [Demand(runs, address="10.0.0.1:1", bytes_per_s=speed) for speed in speeds]
    firsts = [shared.readers[0] for shared in plan_sharing(needs, blocks).values()]
    assert [firsts.count(rank) for rank in range(3)] == [
        pytest.approx(120, abs=1),
        pytest.approx(120, abs=1),
        pytest.approx(60, abs=1),
    ]


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


def test_without_a_word_of_the_silent_one_blocks_go_round() -> None:
    """All who can be reached read equally many blocks, and each process finds the same readers for
    those that it needs.
    """
    known = [Demand(address="" if rank == 2 else f"10.0.0.{rank}:1") for rank in range(5)]
    plan = plan_equally(known, range(400))
    firsts = [shared.readers[0] for shared in plan.values()]
    assert [firsts.count(rank) for rank in range(5)] == [100, 100, 0, 100, 100]
    assert all(len(set(shared.readers)) == 2 for shared in plan.values())
    assert {shared.turn for shared in plan.values()} == set(range(100))
    few = plan_equally(known, [7, 399])
    assert few == {block: plan[block] for block in (7, 399)}
    for block in range(8):
        assert tuple(servers_in_turn(known, block)[:2]) == plan[block].readers
    nobody = [Demand()] * 3
    assert plan_equally(nobody, range(4)) == {}


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
    assert Demand.from_text(many.to_text(16)) == Demand(address="a:1")
    few = Demand(((1, 4), (9, 10)), bytes_per_s=2.5, is_done=True)
    assert Demand.from_text(few.to_text(4096)) == few


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def trust(clock: Clock) -> PeerTrust:
    return PeerTrust(clock)


def test_two_failures_in_a_row_drop_a_rank(trust: PeerTrust) -> None:
    """An answer between them begins anew; the drop is told once, and is of that rank alone."""
    assert not trust.note_failure(1)
    trust.note_bytes(1, MIB, 0.1)
    assert not trust.note_failure(1)
    assert trust.may_ask(1)
    assert trust.note_failure(1)
    assert not trust.note_failure(1)
    assert not trust.may_ask(1)
    assert trust.may_ask(2)


def test_damage_counts_whatever_comes_between(trust: PeerTrust) -> None:
    """A peer that damages bytes now and then is dropped too."""
    assert not trust.note_damage(1)
    trust.note_bytes(1, MIB, 0.1)
    assert trust.note_damage(1)
    assert not trust.may_ask(1)


def test_where_nobody_is_reached_nobody_is_asked(trust: PeerTrust) -> None:
    """Behind a firewall a few ranks are waited for, not all; ranks that answer stay asked."""
    for rank in range(MOST_UNREACHED):
        assert trust.may_ask(99)
        trust.note_failure(rank)
        trust.note_failure(rank)
    assert not trust.may_ask(99)


def test_as_many_as_are_lost_may_be_reached(trust: PeerTrust) -> None:
    """Three dead ranks of many that answer end nothing for these."""
    for rank in range(10, 15):
        trust.note_bytes(rank, MIB, 0.1)
    for rank in range(MOST_UNREACHED):
        trust.note_failure(rank)
        trust.note_failure(rank)
    assert trust.may_ask(10)
    assert not trust.may_ask(0)


def test_an_answer_may_take_what_answers_take(trust: PeerTrust) -> None:
    """Before anything is known it has what its bytes take at a low speed; then twice what they
    take, and some at least.
    """
    assert trust.answer_limit_s(MIB) == LEAST_ANSWER_S + MIB / LEAST_BYTES_PER_S
    assert trust.answer_limit_s(16 * MIB) <= UNKNOWN_S
    for _ in range(4):
        trust.note_bytes(1, MIB, 0.01)
    assert trust.answer_limit_s(MIB) == LEAST_ANSWER_S
    for _ in range(4):
        trust.note_bytes(1, MIB, 3.0)
    assert trust.answer_limit_s(MIB) == 6.0


def test_peers_that_still_read_are_left_within_the_budget_of_hedges(
    trust: PeerTrust, clock: Clock
) -> None:
    """One slow peer is left at once, more only as reads come, or after PATIENT_TIMES as long."""
    for _ in range(4):
        trust.note_store_read(MIB, 2.0)
    for _ in range(5):
        trust.note_asked()
    clock.now_s = 3.9
    assert not trust.leaves(1, MIB, 0.0)
    clock.now_s = 4.0
    assert trust.leaves(1, MIB, 0.0)
    assert not trust.leaves(2, MIB, 0.0)
    clock.now_s = 4.0 * PATIENT_TIMES
    assert trust.leaves(2, MIB, 0.0)
    clock.now_s = 20.0
    for _ in range(60):
        trust.note_asked()
    assert trust.leaves(3, MIB, 15.0)


def test_the_last_rank_is_left_sooner(trust: PeerTrust, clock: Clock) -> None:
    """Where a process waits for nothing else, it does not wait as long as a slow read takes."""
    clock.now_s = SLOWEST_PEER_S
    assert not trust.leaves(1, MIB, 0.0)
    assert not trust.leaves(1, MIB, 0.1, is_last=True)
    assert trust.leaves(1, MIB, 0.0, is_last=True)


def test_the_blocks_of_a_rank_that_stands_still_spend_no_more_of_the_budget(
    trust: PeerTrust, clock: Clock
) -> None:
    """A second rank is left in time, though the first had many blocks."""
    for _ in range(20):
        trust.note_asked()
    clock.now_s = UNKNOWN_S
    for _ in range(8):
        assert trust.leaves(1, MIB, 0.0)
    assert trust.leaves(2, MIB, 0.0)
    assert not trust.leaves(3, MIB, 0.0)


@pytest.mark.parametrize("came", ["bytes", "own"])
def test_a_peer_that_was_left_is_left_with_all_its_blocks(
    trust: PeerTrust, clock: Clock, came: str
) -> None:
    """Its other blocks are left after the time, whatever the budget, until it brings one."""
    clock.now_s = UNKNOWN_S
    assert trust.leaves(1, MIB, 0.0)
    assert not trust.leaves(2, MIB, 0.0)
    assert trust.leaves(1, MIB, 0.0)
    assert not trust.leaves(1, MIB, clock.now_s - SLOWEST_PEER_S / 2)
    assert trust.leaves(1, MIB, clock.now_s - SLOWEST_PEER_S)
    if came == "bytes":
        trust.note_bytes(1, MIB, 0.1)
    else:
        trust.note_came(1)
    assert not trust.leaves(1, MIB, 0.0)
