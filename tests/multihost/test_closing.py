"""What closes when its block ends."""

from __future__ import annotations

import pytest

from holdfast.multihost.closing import Closing


class _Door(Closing):
    closings = 0

    def close(self) -> None:
        self.closings += 1


def test_it_closes_after_a_block_that_raises_too() -> None:
    """The block has the very object, and its error comes out."""
    door = _Door()
    with door as given:
        assert given is door and not door.closings
    with pytest.raises(KeyError), door:
        raise KeyError
    assert door.closings == 2
