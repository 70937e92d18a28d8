"""What the command line and the page both say of a status."""

from __future__ import annotations

from holdfast.coordination.diagnosis.summary import checkpoint_roots, describe_goodput
from holdfast.proto import session_pb2


def test_the_share_of_new_steps_comes_first() -> None:
    """A job without time has no share."""
    assert describe_goodput({"stepping_s": 3.0, "ending_s": 1.0}).startswith(
        "goodput 75% of 4.0 s: new steps 3.0, starting 0.0"
    )
    assert describe_goodput({}).startswith("goodput 0% of 0.0 s")


def test_only_who_reports_a_root_has_one() -> None:
    """The other processes have progress without it."""
    status = session_pb2.StatusResponse()
    status.tasks.add().progress.step = 3
    status.tasks.add().progress.root.path = "/ckpt"
    assert [root.path for root in checkpoint_roots(status)] == ["/ckpt"]
