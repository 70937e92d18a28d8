"""The launcher's own signals: passed on inside a block, and handled as before outside it."""

from __future__ import annotations

import os
import queue
import signal
import threading
from types import FrameType

import pytest

from holdfast.launch.workers.signals import passing_on


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_inside_the_block_is_passed_on(number: int) -> None:
    """SIGUSR1 was asked for beside the three; the handler that stood before stands again
    afterwards.
    """
    earlier: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        earlier.append(number)

    before = signal.signal(number, handler)
    try:
        events: queue.SimpleQueue[int] = queue.SimpleQueue()
        with passing_on(events.put, signal.SIGUSR1):
            os.kill(os.getpid(), number)
            assert events.get(timeout=30) == number
        assert earlier == [] and signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_is_ignored_stays_so(number: int) -> None:
    """Under nohup SIGHUP, and in a background job of a script SIGINT, neither stops the job nor
    changes how it is handled.
    """
    before = signal.signal(number, signal.SIG_IGN)
    try:
        events: queue.SimpleQueue[int] = queue.SimpleQueue()
        with passing_on(events.put):
            os.kill(os.getpid(), number)
            assert signal.getsignal(number) is signal.SIG_IGN and events.empty()
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_blocks_may_nest() -> None:
    """The inner block takes the signal, and gives it back to the outer one at its end."""
    outer: queue.SimpleQueue[int] = queue.SimpleQueue()
    inner: queue.SimpleQueue[int] = queue.SimpleQueue()
    with passing_on(outer.put):
        with passing_on(inner.put):
            os.kill(os.getpid(), signal.SIGTERM)
            assert inner.get(timeout=30) == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGTERM)
        assert outer.get(timeout=30) == signal.SIGTERM
    assert inner.empty() and outer.empty()


def test_outside_the_main_thread_it_does_nothing() -> None:
    """Python allows handlers in the main thread only; the block runs all the same."""
    before = signal.getsignal(signal.SIGTERM)
    ran = threading.Event()

    def work() -> None:
        with passing_on(lambda number: None):
            assert signal.getsignal(signal.SIGTERM) is before
            ran.set()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ran.is_set()
