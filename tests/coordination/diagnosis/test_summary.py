"""What the command line and the page both say of a status."""

from __future__ import annotations

from holdfast.coordination.diagnosis.summary import (
    checkpoint_roots,
    describe_goodput,
    describe_staying,
    printable,
)
from holdfast.proto import session_pb2


def test_the_share_of_new_steps_comes_first() -> None:
    """A job without time has no share."""
    assert describe_goodput({"stepping_s": 3.0, "ending_s": 1.0}).startswith(
        "goodput 75% of 4.0 s: new steps 3.0, waiting for machines 0.0"
    )
    unknown = describe_goodput({"starting_s": 4.0})
    assert unknown.startswith(
        "goodput is not known, because no two reports of steps came in 4.0 s: new steps 0.0"
    )


def test_who_stayed_is_counted_and_who_was_replaced_is_named() -> None:
    """Of many, the first; of an attempt of new processes alone, that all were started."""
    attempt = session_pb2.Attempt(num_processes=4, stayed=3, replaced=[1])
    assert describe_staying(attempt) == "3 stayed, replaced 1"
    attempt = session_pb2.Attempt(num_processes=90, stayed=1, replaced=range(2))
    assert describe_staying(attempt) == "1 stayed, replaced 0, 1 and 87 more"
    assert describe_staying(session_pb2.Attempt(num_processes=4)) == "all 4 started"
    assert describe_staying(session_pb2.Attempt()) == "none started"


def test_nothing_steers_a_terminal() -> None:
    """Control characters of both sets, and those that turn the direction of writing, are shown as
    escapes; letters of all scripts stay.
    """
    assert printable("a\x1b[31m\x9b\u202e\u2066\r\x00") == r"a\x1b[31m\x9b\u202e\u2066\r\x00"
    assert printable("Zürich 東京 🙂") == "Zürich 東京 🙂"
    assert printable("one\n\ttwo\r") == r"one\n\ttwo\r"
    assert printable("one\n\ttwo\r", lines=True) == "one\n\ttwo\\r"


def test_only_who_reports_a_root_has_one() -> None:
    """The other processes have progress without it."""
    status = session_pb2.StatusResponse()
    status.tasks.add().progress.step = 3
    status.tasks.add().progress.root.path = "/ckpt"
    assert [root.path for root in checkpoint_roots(status)] == ["/ckpt"]
