"""The local tier over real sockets and a real coordinator; a rank is a thread, a host a folder and
a name.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from holdfast.checkpoint import (
    CheckpointError,
    CheckpointManager,
    EveryNSteps,
    Files,
    Json,
    Local,
    Options,
    SaveCancelled,
    StepNotFound,
    StepOutOfOrder,
    TreeMismatch,
)
from holdfast.checkpoint.local_tier import host_place, meeting
from holdfast.checkpoint.local_tier.host_folder import HostFolder
from holdfast.checkpoint.local_tier.host_place import HostPlace
from holdfast.checkpoint.local_tier.local_steps import LocalSteps
from holdfast.checkpoint.local_tier.part_copier import Throttle
from holdfast.checkpoint.local_tier.parts import Part
from holdfast.checkpoint.saving.stager import SaveOrder
from holdfast.multihost.peers.peer_tls import PeerTls
from tests.support.local_hosts import Job, is_state, job, state
from tests.support.processes import wait_until
from tests.support.tls import Authority


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def hosts(tmp_path: Path) -> list[Path]:
    return [tmp_path / f"host{rank}" for rank in range(4)]


def lose(*folders: Path) -> None:
    """Takes hosts away with all that they had."""
    for folder in folders:
        shutil.rmtree(folder)


def packs(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def flip(path: Path, at: int = -100) -> None:
    """Flips a bit in the data of a pack."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def test_a_local_step_comes_back_from_the_own_folder(root: Path, hosts: list[Path]) -> None:
    """Each step is saved on the hosts alone, listed on all ranks, and restored without a byte from
    a peer.
    """
    with job(root, hosts[:2]) as first:
        first.save(0)
        first.save(7, metadata={"at": 7}, metrics={"loss": 0.5})
        assert (
            first.each(lambda rank, manager: (manager.all_steps(), manager.local_steps()))
            == [([0, 7], [7])] * 2
        )
        assert first.statistics("saves") == first.statistics("survives") == [1, 1]
        assert (
            first.each(lambda rank, manager: (manager.metadata(7), manager.metrics(7)))
            == [({"at": 7}, {"loss": 0.5})] * 2
        )
    assert not (root / "7").exists()
    with job(root, hosts[:2]) as second:
        assert second.each(lambda rank, manager: manager.latest_step()) == [7, 7]
        assert second.each(lambda rank, manager: manager.metadata(7)) == [{"at": 7}] * 2
        assert second.restore() == 7
        assert second.restore(7) == 7
        assert second.restore(0) == 0
        assert second.statistics("restores") == [2, 2]


def test_the_structure_of_a_local_step_is_that_of_a_durable_one(
    root: Path, hosts: list[Path]
) -> None:
    """Alike on all ranks, at once and in a later life without one of the hosts; a restore after it
    is in step.
    """
    with job(root, hosts[:2], every=4) as first:
        first.save(4, metadata={"at": 4}, metrics={"loss": 0.5})
        first.save(7, metadata={"at": 7}, metrics={"loss": 0.25})
        durable, local = (
            first.each(lambda rank, manager, step=step: manager.structure(step)) for step in (4, 7)
        )
        for found in local:
            assert (found.step, found.layout, found.metadata, found.metrics) == (
                7,
                "holdfast",
                {"at": 7},
                {"loss": 0.25},
            )
            tree = found.items["state"].tree
            assert tree == durable[0].items["state"].tree | {"step": 7}
            assert found.items["state"].nbytes == durable[0].items["state"].nbytes
        assert first.restore() == 7
        with pytest.raises(StepNotFound):
            first.each(lambda rank, manager: manager.structure(6))
    lose(hosts[0])
    with job(root, hosts[:2]) as second:
        assert [
            found.items for found in second.each(lambda rank, manager: manager.structure(7))
        ] == [local[0].items] * 2
        lose(hosts[1])
        with pytest.raises(StepNotFound, match="the hosts have no step 7 any more"):
            second.each(lambda rank, manager: manager.structure(7))
        assert second.restore() == 4


def test_the_copies_serve_when_a_host_is_lost(root: Path, hosts: list[Path]) -> None:
    """One host of each group lost, the step comes back whole, to whoever is there."""
    with job(root, hosts) as first:
        first.save(5)
    lose(hosts[0], hosts[3])
    with job(root, hosts) as second:
        assert second.restore() == 5
        assert second.statistics("survives") == [0] * 4


def test_a_host_without_room_for_its_folder_reads_from_the_others(
    root: Path, hosts: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the folder of the run cannot be made, that host counts as empty: the copies serve."""
    mkdir = os.mkdir

    def refuse(path: Any, mode: int = 0o777) -> None:
        if Path(path).parent == hosts[1]:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(path))
        mkdir(path, mode)

    with job(root, hosts[:2]) as first:
        first.save(5)
    lose(hosts[1])
    monkeypatch.setattr(os, "mkdir", refuse)
    with job(root, hosts[:2]) as second:
        assert second.restore() == 5


@pytest.mark.parametrize("rank", range(2))
def test_a_process_without_descriptors_ends_the_restore_of_all(
    rank: int, root: Path, hosts: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it cannot list may be there: no older step comes back in silence, and none is lost."""
    scandir = os.scandir

    def refuse(path: Any = ".") -> Any:
        if Path(path).parent == hosts[rank]:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        return scandir(path)

    with job(root, hosts[:2], every=4) as group:
        group.save(4)
        group.save(5)
        with monkeypatch.context() as patched:
            patched.setattr(os, "scandir", refuse)
            with pytest.raises(CheckpointError, match=f"process {rank} cannot list its local"):
                group.restore()
        assert group.restore() == 5


def test_a_whole_group_lost_means_the_store(root: Path, hosts: list[Path]) -> None:
    """Nobody has the part any more: the step is not listed, and the durable one comes back."""
    with job(root, hosts, every=4) as first:
        first.save(4)
        first.save(5)
    lose(hosts[0], hosts[2])
    with job(root, hosts) as second:
        assert second.each(lambda rank, manager: manager.all_steps()) == [[4]] * 4
        assert second.restore() == 4


@pytest.mark.parametrize("fallback", [False, True])
def test_a_flipped_bit_in_one_copy_is_read_from_another(
    fallback: bool, root: Path, hosts: list[Path]
) -> None:
    """Whichever copy is damaged, all get what was saved; damaged in all copies, all get the next
    older step alike.
    """
    with job(root, hosts[:2], every=4) as first:
        first.save(4)
        first.save(5)
    name = packs(hosts[0])[0].relative_to(hosts[0])
    flip(hosts[0] / name)
    with job(root, hosts[:2]) as second:
        assert second.restore(fallback=fallback) == 5
    flip(hosts[1] / name)
    with job(root, hosts[:2]) as third:
        assert third.restore(fallback=fallback) == 4
        assert third.statistics("restores_failed") == [1, 1]
        with pytest.raises(StepNotFound):
            third.restore(5)


def test_a_mistake_of_the_caller_is_no_damage(root: Path, hosts: list[Path]) -> None:
    """A `like` that does not fit is an error: no older step comes back in silence."""
    with job(root, hosts[:2], every=4) as first:
        first.save(4)
        first.save(5)
        with pytest.raises(TreeMismatch):
            first.each(lambda rank, manager: manager.restore(like={"other": 1}))


def test_ranks_may_come_back_in_another_order(root: Path, hosts: list[Path]) -> None:
    """Files are found by name, wherever they lie: each rank gets its own."""
    with job(root, hosts) as first:
        first.save(5)
    with job(root, hosts[::-1]) as second:
        assert second.restore() == 5


def test_fewer_and_more_processes_read_what_there_is(root: Path, hosts: list[Path]) -> None:
    """A job of another size reads the same step, and what each process had by its number."""
    with job(root, hosts[:3]) as first:
        first.save(5)
    for folders in (hosts[:2], hosts):
        with job(root, folders) as other:
            found = other.each(lambda rank, manager: manager.restore(process=2))
            assert all(is_state(each, 5, 2) for each in found)


def test_several_processes_of_one_host_are_one_to_lose(root: Path, hosts: list[Path]) -> None:
    """Two ranks share a host and its folder: the copies are on the other, and each folder is listed
    once.
    """
    folders = [hosts[0], hosts[0], hosts[1], hosts[1]]
    names = ["a", "a", "b", "b"]
    with job(root, folders, hosts=names) as first:
        first.save(5)
    assert len(packs(hosts[0])) == len(packs(hosts[1])) == 4
    lose(hosts[0])
    with job(root, folders, hosts=names) as second:
        assert second.restore() == 5


def test_rank_zero_with_its_head_may_be_lost(root: Path, hosts: list[Path]) -> None:
    """Structure, metrics and metadata come from the copy of process 0's part."""
    with job(root, hosts[:2]) as first:
        first.save(5, metadata="kept")
    lose(hosts[0])
    with job(root, hosts[:2]) as second:
        assert second.restore() == 5
        assert second.each(lambda rank, manager: manager.metadata(5)) == ["kept"] * 2


# --- what must not come back


def test_a_folder_that_was_away_does_not_bring_its_branch_back(
    root: Path, hosts: list[Path], tmp_path: Path
) -> None:
    """A branch committed only locally and its hosts were lost; the next went on from the store:
    nothing of the first returns.
    """
    with job(root, hosts[:2], every=4) as first:
        first.save(4)
        first.save(7)
    for rank in range(2):
        hosts[rank].rename(tmp_path / f"away{rank}")
    with job(root, hosts[:2], every=4) as second:
        assert second.restore() == 4
        second.save(5)
    lose(*hosts[:2])
    for rank in range(2):
        (tmp_path / f"away{rank}").rename(hosts[rank])
    with job(root, hosts[:2]) as third:
        assert third.each(lambda rank, manager: manager.local_steps()) == [[], []]
        assert third.restore() == 4


def test_a_folder_that_was_away_comes_back_if_nothing_went_on_without_it(
    root: Path, hosts: list[Path], tmp_path: Path
) -> None:
    """A life that saved nothing in between has left no branch."""
    with job(root, hosts[:2], every=4) as first:
        first.save(4)
        first.save(7)
    for rank in range(2):
        hosts[rank].rename(tmp_path / f"away{rank}")
    with job(root, hosts[:2]) as second:
        assert second.restore() == 4
    lose(*hosts[:2])
    for rank in range(2):
        (tmp_path / f"away{rank}").rename(hosts[rank])
    with job(root, hosts[:2]) as third:
        assert third.restore() == 7


def test_a_run_without_a_local_tier_in_between_counts(root: Path, hosts: list[Path]) -> None:
    """It went on from the store: what the hosts had above is dead."""
    with job(root, hosts[:2], every=4) as first:
        first.save(4)
        first.save(7)
    with job(root, [None, None], every=1) as second:
        assert second.restore() == 4
        second.save(5)
    with job(root, hosts[:2]) as third:
        assert third.each(lambda rank, manager: manager.all_steps()) == [[4, 5]] * 2


def test_the_restore_of_an_older_step_is_a_rollback(root: Path, hosts: list[Path]) -> None:
    """Once something is saved after it, the step that was left does not come back, in this life or
    the next.
    """
    with job(root, hosts[:2], every=4) as first:
        first.save(4)
        first.save(7)
        assert first.restore(4) == 4
        first.save(5)
        assert first.restore() == 5
    with job(root, hosts[:2]) as second:
        assert second.restore() == 5


def test_a_rollback_ends_what_it_left(root: Path, hosts: list[Path]) -> None:
    """With the first save after it, local or durable, the steps that were left are listed no more
    and take no place.
    """
    with job(root, hosts[:2], every=10, keep=3) as first:

        def local_steps() -> list[list[int]]:
            return first.each(lambda rank, manager: manager.local_steps())

        for step in (5, 6, 7):
            first.save(step)
        assert first.restore(5) == 5
        assert local_steps() == [[5, 6, 7]] * 2
        first.save(6)
        assert local_steps() == [[5, 6]] * 2
        # Above the newest a restore for a look changes nothing.
        assert first.restore(5) == 5
        first.save(8)
        assert local_steps() == [[5, 6, 8]] * 2
        first.save(11)
        assert local_steps() == [[6, 8, 11]] * 2
        assert first.restore(6) == 6
        first.save(10)
        assert local_steps() == [[6]] * 2


def test_a_later_life_keeps_as_many(root: Path, hosts: list[Path]) -> None:
    """Steps of the life before stay until newer ones take their places."""
    with job(root, hosts[:2], keep=3) as first:
        for step in (5, 6, 7):
            first.save(step)
    with job(root, hosts[:2], keep=3) as second:
        assert second.restore() == 7
        second.save(8)
        assert second.each(lambda rank, manager: manager.local_steps()) == [[6, 7, 8]] * 2
        assert second.restore(6) == 6
    with job(root, hosts[:2], keep=3) as third:
        assert third.each(lambda rank, manager: manager.local_steps()) == [[6, 7, 8]] * 2
        assert third.restore() == 8
        third.save(9)
        third.save(10)
        third.save(11)
        assert third.each(lambda rank, manager: manager.local_steps()) == [[9, 10, 11]] * 2
    assert [len(packs(folder)) for folder in hosts[:2]] == [6, 6]


def test_the_deletion_of_the_newest_step_is_a_rollback(root: Path, hosts: list[Path]) -> None:
    """Deleting the newest step, a local one, takes it away for good."""
    with job(root, hosts[:2], every=2) as first:
        for step in (2, 4, 7):
            first.save(step)
        first.each(lambda rank, manager: manager.delete(7))
        assert first.each(lambda rank, manager: manager.all_steps()) == [[2, 4]] * 2
        with pytest.raises(StepNotFound):
            first.each(lambda rank, manager: manager.delete(7))
    with job(root, hosts[:2]) as second:
        assert second.restore() == 4


@pytest.mark.parametrize("deleted", [2, 4])
def test_a_durable_step_below_may_be_deleted(deleted: int, root: Path, hosts: list[Path]) -> None:
    """That is no rollback, of the newest durable step either: the local step above stays."""
    with job(root, hosts[:2], every=2) as first:
        for step in (2, 4, 7):
            first.save(step)
        first.each(lambda rank, manager: manager.delete(deleted))
        left = sorted({2, 4, 7} - {deleted})
        assert first.each(lambda rank, manager: manager.all_steps()) == [left] * 2
    with job(root, hosts[:2]) as second:
        assert second.restore() == 7


def test_another_root_of_the_same_hosts_is_another_run(root: Path, hosts: list[Path]) -> None:
    """Neither a second root nor the same one made anew sees the other's steps, nor deletes them."""
    with job(root, hosts[:2]) as first:
        first.save(5)
    with job(root.parent / "other", hosts[:2]) as second:
        assert second.each(lambda rank, manager: manager.all_steps()) == [[], []]
        second.save(3)
    with job(root, hosts[:2]) as third:
        assert third.restore() == 5
    shutil.rmtree(root)
    with job(root, hosts[:2]) as fourth:
        assert fourth.each(lambda rank, manager: manager.all_steps()) == [[], []]


def test_a_copied_root_is_another_run(root: Path, hosts: list[Path]) -> None:
    """It goes on from its newest durable step. Neither root sees the other's local steps, nor
    deletes them; a root that was moved keeps its own.
    """
    copied = root.parent / "copied"
    with job(root, hosts[:2], every=4) as first:
        first.save(4)
        first.save(5)
        shutil.copytree(root, copied)
        first.save(6)
    with job(copied, hosts[:2], every=4) as second:
        assert second.each(lambda rank, manager: manager.all_steps()) == [[4], [4]]
        assert second.restore() == 4
        second.save(7)
    root.rename(root.parent / "moved")
    with job(root.parent / "moved", hosts[:2], every=4) as third:
        assert third.each(lambda rank, manager: manager.all_steps()) == [[4, 6], [4, 6]]
        assert third.restore() == 6
        third.save(9)
    with job(copied, hosts[:2], every=4) as fourth:
        assert fourth.restore() == 7


def test_torn_and_strange_files_are_passed_over(root: Path, hosts: list[Path]) -> None:
    """What a power cut leaves: cut packs, empty parts, noise. Nothing of it is offered, and the
    next save cleans up.
    """
    with job(root, hosts[:2], every=4) as first:
        first.save(4)
        first.save(5)
    for folder in hosts[:2]:
        for pack in packs(folder):
            os.truncate(pack, 100)
        run = next(path for path in folder.iterdir() if path.is_dir())
        for name in (
            "99/9-0000000000000001/part-00000.json",
            "1/8-0000000000000001/part-00001.json",
            "x/y-z/part-00000.json",
        ):
            (run / name).parent.mkdir(parents=True)
            (run / name).write_bytes(b"{noise")
    with job(root, hosts[:2], every=4) as second:
        assert second.restore() == 4
        second.save(6)
        assert second.restore() == 6
    for folder in hosts[:2]:
        run = next(path for path in folder.iterdir() if path.is_dir())
        assert sorted(
            str(path.relative_to(run)).partition("-")[0] for path in run.glob("*/*-*")
        ) == ["2/6", "99/9", "x/y"]


# --- what goes wrong in a save


def test_local_saves_go_on_while_a_durable_one_takes_its_time(
    root: Path, hosts: list[Path]
) -> None:
    """Two lanes: a durable save that stands still holds no local one up, nor its own end the other
    way round.
    """
    begun = threading.Event()
    goes_on = threading.Event()

    def stand_still(_: object) -> None:
        begun.set()
        assert goes_on.wait(60)

    local = Local(hosts[0], save_policy=EveryNSteps(1))
    with CheckpointManager(
        root, save_policy=EveryNSteps(10), options=Options(progress=stand_still), local=local
    ) as manager:
        slow = manager.save(10, state(10, 0))
        assert begun.wait(60)
        for step in range(11, 15):
            manager.save(step, state(step, 0)).wait(60)
            assert manager.local_steps() == [step]
        assert not slow.done()
        goes_on.set()
        manager.wait_until_finished()
        assert manager.all_steps() == [10, 14]


def test_a_cancelled_save_is_no_failed_one(
    root: Path,
    hosts: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What the caller calls off is neither counted nor logged as a failure."""
    goes_on = threading.Event()
    save = LocalSteps.save

    def held(steps: LocalSteps, request: Any) -> Any:
        assert goes_on.wait(60)
        return save(steps, request)

    monkeypatch.setattr(LocalSteps, "save", held)
    local = Local(hosts[0], save_policy=EveryNSteps(1))
    with CheckpointManager(root, save_policy=EveryNSteps(10), local=local) as manager:
        handle = manager.save(11, state(11, 0))
        assert handle.cancel()
        goes_on.set()
        with pytest.raises(SaveCancelled):
            handle.wait()
        assert manager.statistics()["local_saves_failed"] == 0 and manager.local_steps() == []
        assert "failed" not in caplog.text
        manager.save(12, state(12, 0)).wait()
        assert manager.local_steps() == [12]


def test_a_step_that_both_want_is_saved_durably_only(root: Path, hosts: list[Path]) -> None:
    """The local tier takes the steps that the store does not."""
    local = Local(hosts[0], save_policy=EveryNSteps(1))
    with CheckpointManager(root, save_policy=EveryNSteps(2), local=local) as manager:
        for step in range(2, 6):
            assert manager.should_save(step)
            manager.save(
                step, state(step, 0), dtype=lambda path: np.float16 if path == "mine" else None
            ).wait()
        assert manager.restore(5)["mine"].dtype == np.float16, "as a durable save would have it"
        assert (manager.all_steps(), manager.local_steps()) == ([2, 4, 5], [5])
        manager.save(7, state(7, 0), force=True).wait()
        assert (manager.all_steps(), manager.local_steps()) == ([2, 4, 5, 7], [5])
        assert manager.restore()["step"] == 7
        assert manager.statistics()["local_saves"] == 2
        assert not manager.save(7, state(7, 0))


def test_whether_to_save_locally_is_asked_without_the_store(root: Path, hosts: list[Path]) -> None:
    """At every step it would cost each of them a look; a step that was saved durably is known
    without, here and in a later life.
    """
    local = Local(hosts[0], save_policy=EveryNSteps(5))
    for life in range(2):
        with CheckpointManager(root, save_policy=EveryNSteps(1000), local=local) as manager:
            if not life:
                manager.save(5, state(5, 0), force=True).wait()
            shutil.move(root / "5", root / "away")
            assert [step for step in range(1, 12) if manager.should_save(step)] == [10]
            shutil.move(root / "away", root / "5")


def test_steps_come_and_go_and_leave_nothing_behind(root: Path, hosts: list[Path]) -> None:
    """However many are saved, a host has the files of `keep` + 1 steps, and those of the one before
    are written over.
    """
    with job(root, hosts[:2], keep=2) as first:
        for step in range(1, 4):
            first.save(step)
        inodes = [{path.stat().st_ino for path in packs(folder)} for folder in hosts]
        for step in range(4, 20):
            first.save(step)
            assert first.each(lambda rank, manager: manager.local_steps()) == [[step - 1, step]] * 2
        assert [{path.stat().st_ino for path in packs(folder)} for folder in hosts] == inodes
        assert [len(packs(folder)) for folder in hosts[:2]] == [6, 6]
        assert first.restore() == 19
        assert first.restore(18) == 18
    assert [len(packs(folder)) for folder in hosts[:2]] == [4, 4]
    assert not list(hosts[0].glob("mark-*"))


def test_what_one_process_cannot_save_is_a_failed_save_of_all(
    root: Path, hosts: list[Path]
) -> None:
    """The one before stays; the next one is saved."""
    with job(root, hosts[:2]) as first:
        first.save(5)

        def save(rank: int, manager: CheckpointManager) -> None:
            found = state(6, rank) | ({"bad": object()} if rank else {"bad": 1})
            if rank:
                with pytest.raises(CheckpointError, match="bad"):
                    first.begin(rank, 6, found)
            else:
                first.begin(rank, 6, found)
            manager.wait_until_finished()

        first.each(save)
        assert first.statistics("saves_failed") == [1, 1]
        assert first.each(lambda rank, manager: manager.local_steps()) == [[5], [5]]
        first.save(7)
        assert first.restore() == 7


def test_a_save_that_is_refused_leaves_no_step_behind(root: Path, hosts: list[Path]) -> None:
    """A program that begins anew, and restores nothing, finds the local steps of before there."""
    with job(root, hosts[:2]) as first:
        first.save(5)
    with job(root, hosts[:2]) as second:
        with pytest.raises(StepOutOfOrder, match=r"step 3 .* would come before step 5"):
            second.save(3)
        second.each(lambda rank, manager: manager.wait_until_finished())
        assert second.restore() == 5
    with job(root, hosts[:2]) as third:
        assert third.restore() == 5


def test_states_that_differ_are_no_step(root: Path, hosts: list[Path]) -> None:
    """A leaf that is one for all, and is not equal on all, fails the local save as it fails a
    durable one; strict says so.
    """
    with job(root, hosts[:2], strict=True) as first:
        first.save(5)

        def save(rank: int, manager: CheckpointManager) -> str:
            first.begin(rank, 6, state(6, rank) | {"step": rank})
            with pytest.raises(
                CheckpointError, match="'step' is local to each process and differs"
            ) as caught:
                manager.wait_until_finished()
            return str(caught.value)

        first.each(save)
        assert first.restore() == 5


def test_a_peer_that_is_gone_fails_the_save_in_time(
    root: Path, hosts: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Its part cannot be pulled: the save fails on all, is counted, and the one before stays. The
    sentence says whose, where and why.
    """
    with job(root, hosts[:2], timeout_s=5) as first:
        first.save(5)
        tier = first.managers[1]._catalog.tier
        assert isinstance(tier, LocalSteps)
        assert tier._place.meeting.server is not None
        tier._place.meeting.server.close()
        first.save(6)
        assert first.statistics("saves_failed") == [1, 1]
        sentence = (
            r"process 0 failed: PeerFailed: .*process 1's part was not copied: the part server at"
            r" \S+ could not be reached: .*refused"
        )
        assert re.search(sentence, caplog.text)
        assert first.each(lambda rank, manager: manager.local_steps()) == [[5], [5]]
        assert first.each(lambda rank, manager: manager.save(1000, state(1000, rank)).wait()) == [
            None,
            None,
        ]


LIES = {
    "a flipped bit": lambda peer: flip(peer["pack"]),
    "a shorter file": lambda peer: os.truncate(peer["pack"], 5000),
    "no file": lambda peer: peer["pack"].unlink(),
    "another run's part": (
        lambda peer: peer["part"].write_bytes(replace(peer["found"], run="1" * 32).to_bytes())
    ),
    "another process's part": (
        lambda peer: peer["part"].write_bytes(
            replace(peer["found"], key=peer["found"].key._replace(step=9)).to_bytes()
        )
    ),
    "noise": lambda peer: peer["part"].write_bytes(os.urandom(5000)),
}


@pytest.mark.parametrize("kind", LIES)
def test_a_peer_that_lies_fails_the_save_and_leaves_no_copy(
    kind: str, root: Path, hosts: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its ward gives is held against its checksums and against what was asked for, before any
    copy exists.
    """
    serve = HostPlace.serve

    def lie(place: HostPlace, found: Part, folder: HostFolder) -> None:
        if found.process == 1 and found.key.step == 6 and folder.path.parent == hosts[1]:
            pack = next((folder.path / found.key.folder).rglob("*.safetensors"))
            LIES[kind]({"pack": pack, "part": folder.path / found.name, "found": found})
        serve(place, found, folder)

    monkeypatch.setattr(HostPlace, "serve", lie)
    with job(root, hosts[:2], timeout_s=10) as first:
        first.save(5)
        first.save(6)
        assert first.statistics("saves_failed") == [1, 1]
        assert not list(hosts[0].rglob("6-*/part-*"))
        assert first.restore() == 5
        first.save(7)
        assert first.restore() == 7


def test_a_host_without_room_says_so(root: Path, hosts: list[Path], tmp_path: Path) -> None:
    """What is needed, what is free, who else holds some, and what to do; the step before stays, and
    strict raises it.
    """
    small = tmp_path / "small"
    small.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", small], check=False
        ).returncode
    ):
        pytest.skip("needs root, to mount a small tmpfs")
    try:
        (small / ("f" * 32)).mkdir()
        (small / ("f" * 32) / "other").write_bytes(bytes(180_000))
        with job(root, [hosts[0], small], strict=True) as first:
            first.save(5)
            sentence = (
                r"process 1 failed: OSError: \[Errno 28\] a local step and its copies need \d+,\d+"
                r" bytes here, \d+,\d+ are free; "
                rf"folders of other runs hold some: {'f' * 32}; make room, or name another folder:"
                rf" '{small}'"
            )
            with pytest.raises(CheckpointError, match=sentence):
                first.save(6)
            assert first.restore() == 5
    finally:
        subprocess.run(["umount", small], check=True)


def test_above_max_bytes_the_tier_ends(root: Path, hosts: list[Path]) -> None:
    """With a figure that says why; durable saves go on."""
    with job(root, hosts[:2], every=4, max_bytes=10_000) as first:
        first.save(5)
        sentence = (
            r"TierTooLarge: 2 local steps with the copies of 1 other processes need \d{3},\d{3}"
            r" bytes here, above max_bytes=10,000; "
            "raise it, or lower replicas or keep"
        )
        assert all(re.fullmatch(sentence, off) for off in _off(first)), _off(first)
        first.save(6)
        assert first.statistics("saves_failed") == [1, 1]
        first.save(8)
        assert first.each(lambda rank, manager: manager.all_steps()) == [[8], [8]]


def test_a_strict_tier_that_ends_is_one_error_and_no_more(root: Path, hosts: list[Path]) -> None:
    """The save that was too large says so; the store still serves, and takes what comes."""
    with job(root, hosts[:2], every=4, max_bytes=10_000, strict=True) as first:
        first.save(4)
        with pytest.raises(CheckpointError, match="above max_bytes=10,000"):
            first.save(5)
        assert first.restore() == 4
        first.save(8)
        assert first.restore() == 8


def test_a_strict_error_holds_no_save_up(root: Path, hosts: list[Path]) -> None:
    """A process that has heard of a failed local save, and one that has not, begin the same saves,
    durable and local: the error comes after that.
    """
    with job(root, hosts[:2], every=4, strict=True) as first:

        def fail(rank: int, step: int) -> None:
            manager = first.managers[rank]
            first.begin(rank, step, state(step, rank) | {"step": rank})
            first.managers[rank]._parts.lanes[1].join(60)
            if rank:
                with pytest.raises(CheckpointError, match="'step' is local to each process"):
                    manager.check_for_errors()

        def save(rank: int, step: int) -> None:
            if rank:
                first.begin(rank, step, state(step, rank))
            else:
                with pytest.raises(CheckpointError, match="'step' is local to each process"):
                    first.begin(rank, step, state(step, rank))
            first.managers[rank].wait_until_finished()

        for step in (8, 10):
            first.each(lambda rank, manager, step=step: fail(rank, step - 1))
            first.each(lambda rank, manager, step=step: save(rank, step))
        first.save(12)
        assert first.each(lambda rank, manager: manager.all_steps()) == [[8, 10, 12]] * 2


def test_copies_go_at_the_rate_that_is_given(
    root: Path, hosts: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte of a copy is counted; at a rate that takes longer than there is time, nothing is
    begun, and a sentence says so.
    """
    taken: list[int] = []
    take = Throttle.take

    def counted(throttle: Throttle, nbytes: int) -> None:
        take(throttle, nbytes)
        taken.append(nbytes)

    monkeypatch.setattr(Throttle, "take", counted)
    with job(root, hosts[:2], rate_bytes_s=1e9) as first:
        first.save(5)
        assert sum(taken) == sum(first.statistics("copied_bytes")) > 0
        assert first.restore() == 5
    taken.clear()
    with job(root, hosts[:2], rate_bytes_s=100, timeout_s=20, strict=True) as second:
        assert second.restore() == 5

        def save(rank: int, manager: CheckpointManager) -> None:
            second.begin(rank, 6, state(6, rank))
            with pytest.raises(
                CheckpointError,
                match=(
                    r"a copy of \d\d,\d+ bytes takes \d+ s at rate_bytes_s=100, .* of timeout_s=20;"
                    r" expected"
                ),
            ):
                manager.wait_until_finished()

        second.each(save)
        assert taken == []
        assert second.restore() == 5


def _off(first: Job) -> list[str]:
    return [manager.statistics()["local_off"] for manager in first.managers]


def test_tls_on_some_processes_alone_turns_the_tier_off(
    root: Path, hosts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those with it would not hear those without."""
    pems = Authority(tmp_path, "ours").issue("own")
    files = iter([PeerTls(pems.cert, pems.key, pems.ca), None])
    monkeypatch.setattr(
        host_place, "peer_tls", lambda: next(files)
    )  # the threads of one process have one environment
    with job(root, hosts[:2]) as first:
        assert all(
            re.search(
                r"process \d has the files of TLS, and process \d has none: set them for all", off
            )
            for off in _off(first)
        )


BAD_FOLDERS = {
    "a link": (
        lambda path: path.symlink_to(path.parent),
        r"{path} is a link; expected a folder of this host, or none",
    ),
    "a file": (
        lambda path: path.write_text(""),
        r"{path} cannot be written: File exists; expected a folder that this process may write",
    ),
    "in a file": (
        lambda path: path.parent.write_text(""),
        r"{path} cannot be written: Not a directory; expected a folder that this",
    ),
}


def _threads() -> set[int | None]:
    """Returns the threads that run, but for the one that a process has for notices.

    `threading` alone also lists threads that it was not told the end of.
    """
    running = sys._current_frames().keys()
    known = threading.enumerate()
    return {thread.ident for thread in known if thread.name != "holdfast-preemption"} & running


@pytest.mark.parametrize("kind", BAD_FOLDERS)
def test_a_folder_that_cannot_be_used_turns_the_tier_off(
    kind: str, root: Path, hosts: list[Path], tmp_path: Path
) -> None:
    """On all ranks alike, with the process and the reason; durable saves go on. Strict raises it,
    and leaves nothing behind.
    """
    make, sentence = BAD_FOLDERS[kind]
    folder = tmp_path / "other" / "folder"
    if kind != "in a file":
        folder.parent.mkdir()
    make(folder)
    threads = _threads()
    with pytest.raises(
        CheckpointError, match=r"the local tier of .*root cannot be used: process 1: "
    ):
        with job(root, [hosts[0], folder], strict=True):
            pass
    with job(root, [hosts[0], folder], every=4) as first:
        assert all(
            off.startswith(f"process 1: CheckpointError: {sentence.format(path=folder)}")
            for off in _off(first)
        ), _off(first)
        first.save(5)
        first.save(4, overwrite=True)
        assert first.each(lambda rank, manager: manager.all_steps()) == [[4], [4]]
    assert not list(hosts[0].glob("mark-*"))
    wait_until(lambda: _threads() <= threads)


def test_a_run_folder_that_is_a_link_is_left_alone(
    root: Path, hosts: list[Path], tmp_path: Path
) -> None:
    """Nothing behind it is listed, written or deleted: the tier is off, and says why."""
    with job(root, hosts[:2], every=4) as first:
        first.save(4)
        first.save(5)
    run = next(path for path in hosts[1].iterdir() if path.is_dir())
    outside = run.rename(tmp_path / "outside")
    run.symlink_to(outside)
    there = sorted(outside.rglob("*"))
    with job(root, hosts[:2], every=4) as second:
        assert all(
            off.startswith(
                f"process 1: CheckpointError: {run} is a link; expected a folder of user"
            )
            for off in _off(second)
        ), _off(second)
        second.save(6)
        second.save(8)
        assert second.each(lambda rank, manager: manager.all_steps()) == [[4, 8]] * 2
    assert sorted(outside.rglob("*")) == there


def test_a_run_folder_that_was_opened_to_others_fails_the_next_local_save(
    root: Path, hosts: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    """At once, and all processes name it: nobody waits in vain for the part of the one who saw."""
    with job(root, hosts[:2], every=4) as first:
        first.save(4)
        first.save(5)
        run = next(path for path in hosts[1].iterdir() if path.is_dir())
        run.chmod(0o755)
        first.save(6)
        first.save(8)
        assert first.each(lambda rank, manager: manager.all_steps()) == [[4, 5, 8]] * 2
        servers = [manager._catalog.tier._place.meeting.server for manager in first.managers]
        names = [server.statistics()["names"] for server in servers]
        assert names[0] == names[1], "the step that failed is still told of"
    failed = [record.getMessage() for record in caplog.records if "step 6" in record.getMessage()]
    assert len(failed) == 2
    assert all(
        f"process 1 failed: CheckpointError: {run} is a folder with mode 755" in message
        for message in failed
    ), failed


def test_an_address_that_is_not_this_hosts_turns_the_tier_off(
    root: Path, hosts: list[Path]
) -> None:
    """Peers would not reach it."""
    with job(root, hosts[:2], address="192.0.2.1") as first:
        sentence = (
            r"peers cannot be served at 192\.0\.2\.1: Cannot assign requested address.*; expected"
            r" an address of this host in Local\("
        )
        assert all(re.search(sentence, off) for off in _off(first)), _off(first)


@pytest.mark.skipif(not hasattr(jax.config, "jax_mtls_cert_file"), reason="this jax knows no TLS")
def test_certificates_that_do_not_serve_turn_the_tier_off(
    root: Path, hosts: list[Path], tmp_path: Path
) -> None:
    """Where jax was told to reach its coordinator by TLS, parts go by the same files; those that
    peers would refuse are named.
    """
    pems = Authority(tmp_path, "ours").issue("own", is_over=True)
    settings = {f"jax_mtls_{name}_file": getattr(pems, name) for name in ("cert", "key", "ca")}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        with job(root, hosts[:2], every=4) as first:
            assert all(
                f"the certificate {pems.cert} with the key {pems.key} does not pass" in off
                for off in _off(first)
            )
            first.save(4)
            first.save(5)
            assert first.each(lambda rank, manager: manager.all_steps()) == [[4], [4]]
    finally:
        for name in settings:
            jax.config.update(name, None)


def test_an_address_that_other_machines_cannot_reach_turns_the_tier_off(
    root: Path, hosts: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loopback, as a host's own name may stand for, is right on one machine alone."""
    machines = iter("ab")
    monkeypatch.setattr(meeting, "boot_id", lambda: next(machines))
    with job(root, hosts[:2], every=4) as first:
        assert all(
            "has the address 127.0.0.1:" in off and "pass Local(address=...)" in off
            for off in _off(first)
        )
        first.save(4)
        first.save(5)
        assert first.each(lambda rank, manager: manager.all_steps()) == [[4], [4]]


def test_a_folder_that_two_hosts_share_turns_the_tier_off(root: Path, hosts: list[Path]) -> None:
    """Copies there would be none; who gave a path on a shared file system is told so."""
    with job(root, [hosts[0], hosts[0]], every=4) as first:
        assert all(f"{hosts[0]} is shared by the hosts host" in off for off in _off(first))
        first.save(4)
        first.save(5)
        assert first.each(lambda rank, manager: manager.all_steps()) == [[4], [4]]


def test_files_and_casts_are_saved_locally_too(root: Path, hosts: list[Path]) -> None:
    """Files of the primary and of each process come back from a copy; what is cast at a durable
    save is at a local one.
    """

    def save(rank: int, manager: CheckpointManager) -> None:
        own = Files(lambda folder: (folder / "own").write_text(f"of {rank}"), per_process=True)
        shared = Files(lambda folder: (folder / "shared").write_text("text"))
        items = {
            "own": own,
            "shared": shared,
            "model": {"w": np.ones(3, np.float32)},
            "config": Json(1),
        }
        manager._parts.lanes[1].save(SaveOrder(5, items=items, dtype=np.float16))
        manager.wait_until_finished()

    with job(root, hosts[:2]) as first:
        first.each(save)
    lose(hosts[0])
    with job(root, hosts[:2]) as second:
        wanted = dict.fromkeys(("own", "shared", "model", "config"))
        for rank, found in enumerate(
            second.each(lambda rank, manager: manager.restore(5, items=wanted))
        ):
            assert (
                found["own"] == {"own": f"of {rank}".encode()}
                and found["shared"] == {"shared": b"text"}
                and found["config"] == 1
            )
            assert found["model"]["w"].dtype == np.float16
