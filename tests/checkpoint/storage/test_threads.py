"""Threads that Ctrl-C cannot break."""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Callable

import pytest

from holdfast.checkpoint.storage import threads
from holdfast.checkpoint.storage.threads import Latch, do_beside, run_side_by_side
from tests.support.cluster import run_processes
from tests.support.paths import program


def test_side_by_side_keeps_order_and_raises_first_error() -> None:
    """Results in the order of the items, on so many threads at most; an error waits for what runs
    beside it.
    """
    ended = list[int]()
    together = list[int]()
    most = list[int]()

    def work(item: int) -> int:
        together.append(item)
        most.append(len(together))
        if item in (3, 5):
            together.remove(item)
            raise ValueError(f"item {item}")
        ended.append(item)
        together.remove(item)
        return -item

    assert run_side_by_side(lambda item: -item, list(range(50)), 4) == [-item for item in range(50)]
    with pytest.raises(ValueError, match="item 3"):
        run_side_by_side(work, list(range(20)), 4)
    assert sorted(ended) == [item for item in range(20) if item not in (3, 5)] and max(most) <= 4


def test_work_is_done_here_where_no_thread_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that lacks memory for its first call says nothing; nor does one come too late."""
    late: list[Callable[[], object]] = []

    def start(work: Callable[..., object], arguments: tuple[object, ...]) -> int:
        late.append(lambda: work(*arguments))
        return 0

    monkeypatch.setattr(_thread, "start_new_thread", start)
    monkeypatch.setattr(threads, "LOOK_S", 0.01)
    done = list[int]()
    assert run_side_by_side(lambda item: -item, [1, 2, 3], 2) == [-1, -2, -3]
    do_beside(done.append, 4)
    for begin in late:
        begin()
    assert done == [4]


@pytest.mark.timeout(100)
def test_saves_end_in_a_process_without_memory_for_threads() -> None:
    """Of a real limit, at what the process has: each save is there, or raises."""
    run_processes(program("saves_without_memory"), 1)


def test_an_interrupt_waits_for_what_has_begun() -> None:
    """Ctrl-C while threads work: what has begun ends, what has not never begins, and it comes out
    as itself.
    """
    begun = list[int]()
    ended = list[int]()
    interrupted = threading.Event()

    def interrupt(*_: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    def work(item: int) -> None:
        begun.append(item)
        if item == 1:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        assert interrupted.wait(30)
        ended.append(item)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_side_by_side(work, list(range(10_000)), 2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert sorted(begun) == sorted(ended) and len(begun) < 10_000


def test_a_latch_lets_all_go_and_stays_open() -> None:
    """Several wait, each for its own time; who comes later does not wait at all."""
    latch = Latch()
    passed = list[bool]()
    assert not latch.wait(0.01) and not latch.is_set()
    threads = [threading.Thread(target=lambda: passed.append(latch.wait(30))) for _ in range(3)]
    for thread in threads:
        thread.start()
    latch.set()
    for thread in threads:
        thread.join(30)
    assert passed == [True] * 3 and latch.wait(0) and latch.is_set()
