"""Bytes are taken once they are free, never above the bound, and come back whatever happens."""

from __future__ import annotations

import contextlib
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.checkpoint.storage.path import open_storage
from holdfast.checkpoint.storage.threads import ByteBudget
from tests.support.ctrl_c import is_interrupted

MIB = 1 << 20


def test_who_takes_several_has_what_is_free() -> None:
    budget = ByteBudget(6)
    with budget.taken(1, 4) as first:
        with budget.taken(1, 4) as second:
            assert (first, second) == (4, 2)
        with budget.taken(1) as third:
            assert third == 1
    with budget.taken(1, 9) as all_of_them:
        assert all_of_them == 6
    with budget.taken(0) as nothing:
        assert nothing == 0


def test_who_finds_nothing_free_waits() -> None:
    """One that is larger than all there is has it for itself; the spare bytes are not its."""
    budget = ByteBudget(30, 10)

    def take(nbytes: int) -> int:
        with budget.taken(nbytes) as taken:
            return taken

    with ThreadPoolExecutor(2) as pool:
        with budget.taken(15):
            larger = pool.submit(take, 1000)
            large = pool.submit(take, 6)
            assert budget.try_take(budget, 10)
            assert not budget.try_take(budget, 6)
            budget.give(budget)
            assert not larger.done()
            assert not large.done()
        assert (larger.result(30), large.result(30)) == (20, 6)


def test_an_error_gives_back() -> None:
    budget = ByteBudget(2)
    for _ in range(3):
        with contextlib.suppress(OSError), budget.taken(1, 2) as taken:
            assert taken == 2
            raise OSError("broken")


def test_half_of_what_the_host_has_left_is_taken() -> None:
    """Small takers do not ask; one that is larger passes when no other has any."""
    budget = ByteBudget(100 * MIB, free_bytes=lambda: 8 * MIB)
    with budget.taken(3 * MIB), budget.taken(4 * MIB):
        assert budget.try_take(budget, 92 * MIB)
        budget.give(budget)
    with budget.taken(50 * MIB) as taken:
        assert taken == 4 * MIB
    full = ByteBudget(100 * MIB, free_bytes=lambda: 0)
    with full.taken(1 << 10), full.taken(1 << 10):
        assert full.try_take(full, 100 * MIB - (2 << 10))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_locks_no_store_up() -> None:
    """At whatever moment of its requests: the next one is answered, and nothing stays taken."""
    storage = open_storage("memory://ctrl-c")
    data = memoryview(bytes(MIB))
    rng = random.Random(7)

    def ask() -> None:
        end = time.monotonic() + 0.02  # a callback of a weak reference may swallow it
        while time.monotonic() < end:
            storage.write("a", MIB, [(0, [data])])
            storage.read("a", 0, [memoryview(bytearray(MIB))])
            storage.list("")

    interrupted = sum(is_interrupted(rng.uniform(0.0001, 0.002), ask) for _ in range(400))
    assert interrupted > 300
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(storage.fetch, "a", MIB)
        assert len(asked.result(20)) == MIB
