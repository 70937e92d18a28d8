"""What the processes of a job are told agrees, whatever the network and the coordinator do."""

from __future__ import annotations

import functools

import pytest

from tests.support.checkpointing import at_once

from ..campaign import check_lives

lives = functools.partial(check_lives, "tests.model.multihost")


def lives_at_once(*arguments: object, first: int = 0, timeout_s: float = 110) -> None:
    """Lives them in three processes: each waits most of its time."""
    shares = [
        functools.partial(
            lives, *arguments, "--first", first + share, "--every", 3, timeout_s=timeout_s
        )
        for share in range(3)
    ]
    at_once(shares)


def test_lives_that_once_diverged_agree() -> None:
    """Each is the shortest that showed a defect."""
    lives_at_once("--found")


def test_some_lives_agree() -> None:
    """With calls and faults by chance."""
    lives_at_once("--lives", 3)


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_many_lives_agree() -> None:
    """Other ones."""
    lives_at_once("--lives", 400, first=1000, timeout_s=900)
