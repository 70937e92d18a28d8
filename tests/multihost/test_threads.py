"""Work on a thread of its own."""

from __future__ import annotations

import threading

import pytest

from holdfast.multihost.threads import on_thread


def test_what_it_returns_or_raises_is_the_futures() -> None:
    """On a daemon thread of our name; an end of the interpreter is no exception there."""

    def leave() -> None:
        raise SystemExit(3)

    thread = on_thread("work", threading.current_thread).result(10)
    assert thread.daemon and thread.name == "holdfast-work"
    with pytest.raises(SystemExit):
        on_thread("work", leave).result(10)


def test_who_waits_gives_up_in_time() -> None:
    """The work goes on by itself."""
    over = threading.Event()
    work = on_thread("work", lambda: over.wait(10))
    with pytest.raises(TimeoutError):
        work.result(0.01)
    over.set()
    assert work.result(10)
