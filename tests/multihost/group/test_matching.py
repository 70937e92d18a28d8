"""What is said of calls that do not match; tests/system/test_collectives.py makes them."""

from __future__ import annotations

from holdfast.multihost.group.group_client import Deadline
from holdfast.multihost.group.matching import _difference, check_match


def test_who_differs_from_most_is_named() -> None:
    """Not whoever has another number than process 0: where that one is alone, it is named."""
    usual = "call\na\nb"
    odd = "call\na\nc"
    assert _difference([odd, usual, usual]) == (
        "call: process 0 and process 1 do not call it alike: process 0 has c, process 1 has b;"
        " expected the same of every process"
    )
    several = _difference([usual, odd, usual, "call", usual])
    assert "processes 1, 3 and process 0 do not" in several
    assert "process 1 has nothing more, process 0 has b" in _difference([usual, "call\na"])


def test_alone_there_is_nothing_to_compare() -> None:
    """One process asks nobody, and may have no source."""
    check_match("call", ["a"], Deadline(1.0), source="")
