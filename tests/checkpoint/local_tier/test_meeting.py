"""What the processes of a local tier tell each other when they meet."""

from __future__ import annotations

import functools
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.checkpoint import EveryNSteps, Local
from holdfast.checkpoint.local_tier.meeting import MARK_AGE_S, Attendance, Peer, meet
from holdfast.coordination.mounts import boot_id
from holdfast.multihost import Solo
from tests.support.checkpointing import at_once, groups

PEER = Peer("host", "machine", 0, mark="mark-1", address="10.0.0.1:7")


def test_all_hear_of_all() -> None:
    """Each says who it is, and the list of all survives the wire."""
    peers = (PEER, replace(PEER, host="other", error="a link"))
    attendance = Attendance([Peer.from_bytes(peer.to_bytes()) for peer in peers])
    assert [*attendance.peers] == [*peers]
    assert Attendance.from_bytes(attendance.to_bytes()) == attendance


def test_one_process_meets_itself(tmp_path: Path) -> None:
    """It needs no part server, lists its own folder, and its mark is gone once it has looked."""
    local = Local(tmp_path, save_policy=EveryNSteps(1))
    meeting = meet(local, Solo(), "meet", None)
    assert meeting.is_lister and meeting.holders() == [[0]] and meeting.hosts == [boot_id()]
    assert (meeting.why_off, meeting.server) == ("", None)
    assert not list(tmp_path.iterdir())
    meeting.close()
    assert not list(tmp_path.iterdir())


def test_the_first_of_a_host_lists_the_folder_that_they_share(tmp_path: Path) -> None:
    """Another has a folder of its own; a link that leads to the same folder changes nothing."""
    (tmp_path / "host").mkdir()
    (tmp_path / "by another way").symlink_to(tmp_path / "host")
    paths = ["alone/tier", "host/tier", "by another way/tier", "host/tier"]
    locals_ = [
        Local(tmp_path / path, save_policy=EveryNSteps(1), address="localhost") for path in paths
    ]
    with groups(4) as members:
        meetings = at_once(
            [
                functools.partial(meet, local, member, "meet", tls=None)
                for local, member in zip(locals_, members, strict=True)
            ]
        )
        for meeting in meetings:
            meeting.close()
    assert [meeting.listers for meeting in meetings] == [[0, 1, 1, 1]] * 4
    assert [meeting.why_off for meeting in meetings] == [""] * 4


def test_marks_of_dead_processes_go(tmp_path: Path) -> None:
    """A process that was killed as it met left one. After a day whoever comes takes it away, and
    nothing else.
    """
    names = ["mark-0123456789abcdef", "mark-fedcba9876543210", "mark-of-mine"]
    for name in names:
        (tmp_path / name).touch()
    for name in (names[0], names[2]):
        os.utime(tmp_path / name, (0, time.time() - MARK_AGE_S - 60))
    meet(Local(tmp_path, save_policy=EveryNSteps(1)), Solo(), "meet", None).close()
    assert {path.name for path in tmp_path.iterdir()} == {*names[1:]}


def test_machines_of_one_rack_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders of two machines are two, and each lists its own. One folder that both see, as here,
    is refused.
    """
    machines = iter(["a" * 32, "b" * 32])
    monkeypatch.setattr("holdfast.checkpoint.local_tier.meeting.boot_id", lambda: next(machines))
    local = Local(tmp_path, save_policy=EveryNSteps(1), failure_domain="rack", address="localhost")
    with groups(2) as members:
        meetings = at_once(
            [functools.partial(meet, local, member, "meet", tls=None) for member in members]
        )
        for meeting in meetings:
            meeting.close()
    assert [meeting.lister for meeting in meetings] == [0, 1]
    assert all("is shared by the hosts rack (" in meeting.why_off for meeting in meetings)
