"""A process that did not hear how a local save ended: nothing is deleted until a survey."""

from __future__ import annotations

import secrets
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.checkpoint import CheckpointManager, StepGone, StepNotFound
from holdfast.checkpoint.agreement.group_record import MESSAGE_BYTES
from holdfast.checkpoint.agreement.save_protocol import (
    BranchStart,
    Effect,
    Event,
    Failed,
    Hear,
    Tell,
)
from holdfast.checkpoint.local_tier.local_steps import LocalSteps
from holdfast.checkpoint.saving.commit import EffectPerformer
from holdfast.checkpoint.step_catalog import StepCatalog
from holdfast.multihost import ClusterGroup
from tests.support.local_hosts import Job, job, state
from tests.support.told_stores import told_url


def parts(host: Path) -> list[int]:
    """Returns the steps of which a host has parts."""
    return sorted(int(path.parent.name.partition("-")[0]) for path in host.rglob("part-00000.json"))


def is_unsure(first: Job) -> list[bool]:
    """Returns of each rank whether it waits for a survey."""
    tiers = [manager._catalog.tier for manager in first.managers]
    return [isinstance(tier, LocalSteps) and tier.is_unsure for tier in tiers]


def test_structure_of_a_step_not_heard_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that did not hear how a local save ended asks the hosts with all others. So does
    each for a step that there is not.
    """
    hear = EffectPerformer._hear

    def fail_to_hear(performer: EffectPerformer) -> Event:
        hear(performer)
        raise TimeoutError("the coordinator is gone")

    with job(tmp_path / "root", [tmp_path / "host0", tmp_path / "host1"]) as first:
        first.save(5)
        with monkeypatch.context() as patch:
            patch.setattr(EffectPerformer, "_hear", fail_to_hear)
            first.save(6)
        assert first.each(lambda rank, manager: manager.local_steps()) == [[6], [5]]
        assert first.each(lambda rank, manager: manager.structure(6).step) == [6, 6]
        assert first.each(lambda rank, manager: manager.local_steps()) == [[5, 6]] * 2
        with pytest.raises(StepNotFound, match="the hosts have no step 9 any more"):
            first.each(lambda rank, manager: manager.structure(9))


def test_structure_of_a_step_that_is_being_committed(tmp_path: Path) -> None:
    """One process asks before the commit and one after it: both wait for the save, and read the
    store. Neither goes to the hosts alone.
    """
    never = threading.Event()

    def before(verb: str, name: str, end_s: float) -> None:
        if verb == "commit" and name == "4/checkpoint.json":
            never.wait(1)  # process 0 asks meanwhile

    url = told_url(tmp_path / "root", before)
    with job(url, [tmp_path / "host0", tmp_path / "host1"], every=4) as first:

        def look(rank: int, manager: CheckpointManager) -> int:
            first.begin(rank, 4, state(4, rank))
            if rank:
                manager.wait_until_finished()
            return manager.structure(4).step

        assert first.each(look) == [4, 4]


def test_a_local_step_that_a_durable_save_has_left_is_gone(tmp_path: Path) -> None:
    """Between the choice of a local step and its opening: that is StepGone, for the restore to
    choose again.
    """
    with job(tmp_path / "root", [tmp_path / "host0"], replicas=0) as first:
        first.save(5)
        tier = first.managers[0]._catalog.tier
        (key,) = tier.found()
        tier.leave(BranchStart(key.branch + 1, 4))
        with (
            pytest.raises(StepGone, match="local step 5 is no longer one of the root's"),
            tier.opened(key, "1"),
        ):
            pass


def test_what_is_deleted_is_served_no_more(tmp_path: Path) -> None:
    """What a survey found of an earlier life goes with a later save, and so does its place in the
    server: its tables do not grow.
    """
    hosts = [tmp_path / "host0", tmp_path / "host1"]
    with job(tmp_path / "root", hosts, keep=1) as first:
        first.save(5)
    with job(tmp_path / "root", hosts, keep=1) as second:
        second.save(6)
        second.save(7)
        servers = [manager._catalog.tier._place.meeting.server for manager in second.managers]
        names = [server.statistics()["names"] for server in servers]
        assert names == [4, 4]  # a part and its pack: own, and a copy


def test_structure_of_a_step_that_lands_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit whose end nobody knows lands once one process has looked, and before the primary
    does: the primary's look is everybody's, and all read the store.
    """
    looked = threading.Event()
    real = StepCatalog._is_stored

    def is_stored(catalog: StepCatalog, step: int) -> bool:
        found = real(catalog, step)
        looked.set()
        return found

    monkeypatch.setattr(StepCatalog, "_is_stored", is_stored)
    with CheckpointManager(tmp_path / "other") as other:
        other.save(9, {"w": np.arange(3)})
    with job(tmp_path / "root", [tmp_path / "host0", tmp_path / "host1"]) as first:

        def look(rank: int, manager: CheckpointManager) -> int:
            if rank == 0:
                assert looked.wait(20)
                shutil.copytree(tmp_path / "other" / "9", tmp_path / "root" / "9")
            return manager.structure(9).step

        assert first.each(look) == [9, 9]


def test_a_large_record_comes_from_the_primary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One service would send it to all: each process fetches it from the primary's part server."""
    sent: list[int] = []
    broadcast = ClusterGroup.broadcast

    def count(group: ClusterGroup, name: str, value: Any, **options: Any) -> bytes:
        told = broadcast(group, name, value, **options)
        sent.append(len(told))
        return told

    names = [secrets.token_hex(64) for _ in range(4000)]
    with job(tmp_path / "root", [tmp_path / "host0", tmp_path / "host1"]) as first:

        def save(rank: int, manager: CheckpointManager) -> None:
            first.begin(rank, 5, dict.fromkeys(names, 7))
            manager.wait_until_finished()

        first.each(save)
        monkeypatch.setattr(ClusterGroup, "broadcast", count)
        found = first.each(lambda rank, manager: manager.restore())
        assert found == [dict.fromkeys(names, 7)] * 2
    assert max(sent) < MESSAGE_BYTES


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
        is_lost = isinstance(asked, effect) and performer._save.step in deaf
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
