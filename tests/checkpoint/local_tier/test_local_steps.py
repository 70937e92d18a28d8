"""A process that did not hear how a local save ended: nothing is deleted until a survey."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.agreement.save_protocol import Effect, Event, Failed, Hear, Tell
from holdfast.checkpoint.local_tier.tier import LocalTier
from holdfast.checkpoint.saving.commit import EffectPerformer
from tests.support.local_hosts import Job, job


def parts(host: Path) -> list[int]:
    """Returns the steps of which a host has parts."""
    return sorted(int(path.parent.name.partition("-")[0]) for path in host.rglob("part-00000.json"))


def is_unsure(first: Job) -> list[bool]:
    """Returns of each rank whether it waits for a survey."""
    tiers = [manager._catalog.tier for manager in first.managers]
    return [isinstance(tier, LocalTier) and tier._steps.is_unsure for tier in tiers]


@pytest.mark.parametrize(("effect", "unsure"), [(Hear, [False, True]), (Tell, [True, False])])
def test_what_was_not_heard_deletes_nothing(
    effect: type[Effect], unsure: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older step stays where the outcome was not heard, or could not be told; the next save
    has all survey, and the one after that cleans up.
    """
    hosts = [tmp_path / "host0", tmp_path / "host1"]
    perform = EffectPerformer.perform
    deaf = {6}

    def performed(performer: EffectPerformer, asked: Effect) -> Event:
        event = perform(performer, asked)
        is_lost = isinstance(asked, effect) and performer._target.key.step in deaf
        return Failed(TimeoutError("the coordinator is gone")) if is_lost else event

    monkeypatch.setattr(EffectPerformer, "perform", performed)
    with job(tmp_path / "root", hosts) as first:
        first.save(5)
        first.save(6)
        assert is_unsure(first) == unsure
        kept: list[Any] = [parts(host) for host in hosts]
        assert kept[unsure.index(True)] == [5, 6] and kept[unsure.index(False)] == [6]
        first.save(7)
        assert is_unsure(first) == [False, False]
        assert first.each(lambda rank, manager: manager.local_steps()[-1]) == [7, 7]
        first.save(8)
        assert [parts(host) for host in hosts] == [[8], [8]]
        assert first.restore() == 8
