"""A cancel comes in time, or it does not."""

from __future__ import annotations

import pytest

from holdfast.checkpoint import SaveCancelled
from holdfast.checkpoint.saving.cancellation import Cancellation


def test_the_first_decides() -> None:
    """A cancel before the close is in time, however often it is called, and the close raises; one after it is not."""
    early, late = Cancellation(), Cancellation()
    early.check(3, 1)
    assert early.cancel() and early.cancel()
    for raises in (early.check, early.close):
        with pytest.raises(SaveCancelled, match="step 3 was not saved: process 1 called it off"):
            raises(3, 1)
    assert early.cancel()
    late.close(3, 1)
    late.close(3, 1)
    assert not late.cancel() and not late.cancel()
    late.check(3, 1)
