"""The worker in the background."""

from __future__ import annotations

import logging
import threading

import pytest

from holdfast.checkpoint.steps.background import KEPT_FAILURES, BackgroundWorker


def test_jobs_run_one_after_the_other(caplog: pytest.LogCaptureFixture) -> None:
    """In the order they were put, off the caller's thread; `wait` says whether all are done; a new
    job starts a new thread.
    """
    worker = BackgroundWorker()
    gate = threading.Event()
    done = list[int]()
    assert worker.wait(0)
    worker.put("first", lambda: gate.wait(60))
    for number in range(3):
        worker.put("more", lambda number=number: done.append(number))
    assert not worker.wait(0.01) and done == []
    gate.set()
    assert worker.wait(60) and done == [0, 1, 2] and not caplog.records
    worker.put("later", lambda: done.append(threading.get_ident()))
    assert worker.wait(60) and done[3] != threading.get_ident()


def test_a_failed_job_is_tried_with_the_next(caplog: pytest.LogCaptureFixture) -> None:
    """A failure is logged by the job's name and does not stop the others; the job comes again
    before the next one, once.
    """
    worker = BackgroundWorker()
    ran = list[str]()

    def fail() -> None:
        ran.append("failing")
        raise OSError("busy")

    with caplog.at_level(logging.WARNING):
        worker.put("deleting step 3", fail)
        assert worker.wait(60) and ran == ["failing"]
        worker.put("next", lambda: ran.append("next"))
        assert worker.wait(60) and ran == ["failing", "failing", "next"]
    assert [record.message for record in caplog.records] == [
        "deleting step 3 failed, it is tried again later: busy"
    ] * 2


def test_failures_are_bounded_and_jobs_can_be_dropped() -> None:
    """No more than KEPT_FAILURES jobs are tried again; `drop` forgets those that have not begun."""
    worker = BackgroundWorker()
    ran = list[int]()
    gate = threading.Event()

    def fail(number: int) -> None:
        ran.append(number)
        raise OSError

    for number in range(KEPT_FAILURES + 5):
        worker.put("job", lambda number=number: fail(number))
        assert worker.wait(60)
        ran.clear() if number < KEPT_FAILURES + 4 else None
    assert len(ran) == KEPT_FAILURES + 1
    worker = BackgroundWorker()
    worker.put("holds", lambda: gate.wait(60))
    worker.put("never", lambda: ran.append(-1))
    worker.drop()
    gate.set()
    assert worker.wait(60) and -1 not in ran
