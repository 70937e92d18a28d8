"""Stacks as text, as values: threads, the user's frames, who waits in the runtime."""

from __future__ import annotations

import sysconfig

from holdfast.coordination.diagnosis.stacks import OURS, Frame, fold, parse, whole

LIBRARY = f"{sysconfig.get_path('stdlib')}"
SITE = f"{LIBRARY}/site-packages"

PYTHON = f"""Thread holdfast-watch:
  File "{LIBRARY}/threading.py", line 1014, in _bootstrap
    self._bootstrap_inner()
  File "{OURS[0]}multihost/x.py", line 5, in run
    wait()

Thread MainThread:
  File "/home/me/train.py", line 50, in main
    loss = float(step(batch))
                ^^^^^^^^^^^
  File "{SITE}/jax/_src/array.py", line 300, in _value
    self._wait()
"""

FAULTHANDLER = f"""Thread 0x00007f01 (most recent call first):
  File "{LIBRARY}/threading.py", line 331 in wait
  File "{LIBRARY}/threading.py", line 1014 in _bootstrap

Thread 0x00007f02 (most recent call first):
  File "/home/me/train.py", line 26 in load_batch
  File "/home/me/train.py", line 50 in <module>
"""


def test_both_kinds_of_stacks_are_read_alike() -> None:
    """The main thread first, the oldest call first, and source where there is one; faulthandler
    lists the main thread last.
    """
    main, ours = parse(PYTHON)
    assert (main.name, ours.name) == ("MainThread", "holdfast-watch")
    assert main.frames[0] == Frame("/home/me/train.py", 50, "main", "loss = float(step(batch))")
    main, _ = parse(FAULTHANDLER)
    assert [frame.function for frame in main.frames] == ["<module>", "load_batch"] and main.frames[
        -1
    ].line == 26


def test_the_place_is_the_users_own() -> None:
    """A call into jax waits at the user's line; the user's own code waits for nobody."""
    (waiting, _), (working, _) = parse(PYTHON), parse(FAULTHANDLER)
    assert (
        waiting.place is not None
        and waiting.place.place == "main, train.py:50"
        and waiting.waits == "_value"
    )
    assert (
        working.place is not None
        and working.place.place == "load_batch, train.py:26"
        and working.waits == ""
    )


def test_an_installed_program_has_a_place_too() -> None:
    """Where no frame is outside site-packages, that of the library which is neither runtime nor
    Python counts.
    """
    (thread,) = parse(
        f'Thread MainThread:\n  File "{SITE}/trainer/main.py", line 3, in main\n  File'
        f' "{LIBRARY}/queue.py", line 9, in get\n'
    )
    assert (
        thread.place is not None and thread.place.place == "main, main.py:3" and thread.waits == ""
    )


def test_threads_of_ours_are_folded() -> None:
    """One line counts them."""
    shown = fold(PYTHON)
    assert shown.startswith(
        'Thread MainThread:\n  File "/home/me/train.py", line 50, in main\n    loss ='
    )
    assert (
        shown.endswith("(1 more thread, of holdfast and the runtime)")
        and "holdfast-watch" not in shown
    )


def test_a_whole_stack_has_the_folded_ones_last() -> None:
    """After the line that counts them, so that a viewer can fold them there."""
    own, count, others = whole(PYTHON).partition("(1 more thread, of holdfast and the runtime)\n")
    assert count and "MainThread" in own
    assert others.startswith("Thread holdfast-watch:\n") and "x.py" in others
    assert whole("") == ""


def test_what_is_no_stack_has_no_threads() -> None:
    """Errors, half lines and hostile text are no threads, and no error either."""
    for text in (
        "",
        "UNAVAILABLE: process 2 has no Session now",
        "Thread",
        'File "x", line y, in z',
        "\x00\n    \n  File",
    ):
        assert parse(text) == () and fold(text) == ""
