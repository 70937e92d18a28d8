"""What the processes of a job are told agrees, whatever the network and the coordinator do."""

from __future__ import annotations

import functools

import pytest

from ..campaign import check_lives

lives = functools.partial(check_lives, "tests.model.multihost")


def test_lives_that_once_diverged_agree() -> None:
    """Each is the shortest that showed a defect."""
    lives("--found", timeout_s=110)


def test_some_lives_agree() -> None:
    """With calls and faults by chance."""
    lives("--lives", 5, timeout_s=110)


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("share", range(2))
def test_many_lives_agree(share: int) -> None:
    """Other ones."""
    lives(f"--first={1000 + share}", "--lives=400", "--every=2", timeout_s=900)
