"""The local tier on hosts of their own, each a network namespace with a tmpfs, by real processes:
what happens to them, row by row.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.checkpoint.local_tier.local_steps import LocalSteps
from holdfast.checkpoint.local_tier.placement import Member, group_hosts
from holdfast.multihost.peers.part_server import (
    ABSENT,
    ANSWER,
    REQUEST,
    THERE,
    PartServer,
    receive_bytes,
)
from holdfast.multihost.peers.peer_connection import PeerConnection
from tests.support.host_jobs import (
    HostJob,
    Hosts,
    Program,
    begin,
    delete,
    hosts,
    logged,
    restore,
    save,
    statistics,
    steps,
    wait,
    wait_locally,
)

slow = pytest.mark.slow
COMMIT = "checkpoint.saving.commit"
COPIER = "checkpoint.local_tier.part_copier"
FOLDER = "checkpoint.local_tier.host_folder"
SERVER = "multihost.peers.part_server"
WAITS = True  # a request for the text of a part, which may wait for it
READS = False
LARGE = 70_000  # columns: a process of two has 8 MB to send


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def whole_steps(hosts: Hosts) -> list[int]:
    """Returns the steps of which all parts lie on hosts, by the names of the files."""
    found: dict[str, set[str]] = {}
    for path in (path for folder in hosts.folders for path in folder.rglob("part-*.json")):
        found.setdefault(path.parent.name, set()).add(path.name)
        count = json.loads(path.read_bytes())["key"][-1]
    return [int(name.partition("-")[0]) for name, parts in found.items() if len(parts) == count]


# --- hosts are lost


@slow
@pytest.mark.parametrize(("count", "replicas"), [(3, 1), (4, 1), (5, 1), (4, 2), (5, 2), (6, 2)])
@pytest.mark.timeout(300)
def test_whatever_is_lost_what_is_covered_returns(
    count: int, replicas: int, root: Path, tmp_path: Path
) -> None:
    """All processes are killed, and every set of hosts is lost with all that they had: of each
    group at most `replicas`, the local step

    comes back, resharded onto those that are left; where a part is nowhere any more, the step of
    the store does.
    """
    with hosts(count, tmp_path / "hosts") as found:
        with HostJob(found, root, every=4, local={"replicas": replicas}) as job:
            job.each(save, 4, 5)
            assert job.statistics("survives") == [min(replicas, count - 1)] * count
            job.kill(*job.ranks)
        kept = found.copy(tmp_path / "kept")
        everybody = range(count)
        groups = group_hosts([Member(str(index)) for index in everybody], replicas)
        lost_sets = [
            set(lost)
            for size in range(1, count)
            for lost in itertools.combinations(everybody, size)
        ]
        for lost in lost_sets:
            found.put_back(kept)
            found.lose(*lost)
            is_whole = 5 in whole_steps(found)
            assert is_whole or any(
                len({int(host) for host in group} & lost) > replicas for group in groups
            )
            with HostJob(found, root, [index for index in everybody if index not in lost]) as job:
                assert job.restore() == (5 if is_whole else 4), f"lost: {lost}"


@slow
@pytest.mark.parametrize("lost", [(0, 1), (2, 3)])
def test_a_whole_slice_may_be_lost(lost: tuple[int, int], root: Path, tmp_path: Path) -> None:
    """Two slices of two hosts: what one had is on the other, and the job goes on there as one
    slice.
    """
    with hosts(4, tmp_path / "hosts") as found:
        with HostJob(found, root, num_slices=2) as job:
            job.each(save, 5)
            job.kill(*job.ranks)
        found.lose(*lost)
        with HostJob(found, root, [index for index in range(4) if index not in lost]) as job:
            assert job.restore() == 5
            job.each(save, 6)
            assert job.restore() == 6


MOMENTS = {
    "writing": (FOLDER, "HostFolder.publish", 1),
    "pulling": (COPIER, "copy_file", 1),
    "a copy is there but for its name": (FOLDER, "HostFolder.publish", 2),
    "reporting": (COMMIT, "EffectPerformer._gather", 1),
}


@slow
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("rank", [0, 2])
def test_killed_in_the_middle_of_a_save(rank: int, moment: str, root: Path, tmp_path: Path) -> None:
    """One process dies while it writes or pulls; the others learn so, and the job dies. The step is
    there if all its parts are.

    With a host of each group lost besides, the one before still is.
    """
    with hosts(4, tmp_path / "hosts") as found:
        with HostJob(found, root, every=4, local={"timeout_s": 20}) as job:
            job.each(save, 4, 5)
            job.hold(rank, *MOMENTS[moment])
            others = [each for each in job.ranks if each != rank]
            for each in job.ranks:
                job.begin(each, save, 6)
            job.wait_for(rank, f"at {MOMENTS[moment][1]}")
            job.kill(rank)
            for each in others:
                job.answer(each)
                assert job.call(each, statistics)["local_saves_failed"] == 1
            job.kill(*others)
        kept = found.copy(tmp_path / "kept")
        there = max([4, *whole_steps(found)])
        assert there == 5 if moment == "writing" else there in (5, 6)
        with HostJob(found, root) as job:
            assert job.restore() == there
        for lost in ((0, 1), (2, 3)):
            found.put_back(kept)
            found.lose(*lost)
            assert (there := max([4, *whole_steps(found)])) >= 5
            with HostJob(found, root) as job:
                assert job.restore() == there


@slow
def test_the_primary_dies_between_gather_and_broadcast(root: Path, tmp_path: Path) -> None:
    """Nobody has heard that the step is whole, and it is: the parts decide."""
    with hosts(2, tmp_path / "hosts") as found:
        with HostJob(found, root) as job:
            job.each(save, 5)
            job.hold(0, COMMIT, "EffectPerformer._tell")
            for rank in job.ranks:
                job.begin(rank, save, 6)
            job.wait_for(0, "at EffectPerformer._tell")
            job.kill(0)
            job.answer(1)
            assert job.call(1, steps) == ([5], [5])
            job.kill(1)
        found.lose(0)
        with HostJob(found, root, [1]) as job:
            assert job.restore() == 6


# --- hosts are cut off


@pytest.mark.parametrize(
    "fault", ["parted", *(pytest.param(fault, marks=slow) for fault in ("unplugged", "stopped"))]
)
@pytest.mark.parametrize("moment", ["reads", pytest.param("waits", marks=slow)])
def test_a_host_cut_off_fails_a_save_only(
    fault: str, moment: str, root: Path, tmp_path: Path
) -> None:
    """While a peer waits for its part, or has half of its bytes: the save fails on all in bounded
    time.

    Out of reach of its peers alone, where durable saves go on all the while; unplugged; stopped.
    Back again, local saves and copies are as before, in the same life.
    """
    with hosts(2, tmp_path / "hosts") as found:
        with HostJob(found, root, every=4, columns=LARGE, local={"timeout_s": 3}) as job:
            job.each(save, 4, 5)
            cut, mend = {
                "parted": (
                    lambda: found.network.part(0, 1),
                    lambda: found.network.part(0, 1, parted=False),
                ),
                "unplugged": (lambda: found.network.unplug(1), lambda: found.network.plug(1)),
                "stopped": (
                    lambda: job.signal(1, signal.SIGSTOP),
                    lambda: job.signal(1, signal.SIGCONT),
                ),
            }[fault]
            if moment == "waits":
                job.hold(1, SERVER, "PartServer._find")
            found.network.throttle(1, 20)
            for rank in job.ranks:
                job.begin(rank, save, 6)
            if moment == "waits":
                job.wait_for(1, "at PartServer._find")
            else:
                found.network.wait_until_sent(1, 1 << 20)
            cut()
            job.go_on(1)
            job.answer(0)
            if fault == "parted":
                job.answer(1)
                job.each(save, 8)
                mend()
            else:  # without the coordinator it can do nothing until it is back
                mend()
                job.answer(1)
                job.each(save, 8)
            found.network.throttle(1, None)
            assert job.statistics("saves_failed") == [1, 1]
            assert job.each(steps) == [([4, 5, 8], [5])] * 2
            job.each(save, 9)
            assert job.statistics("saves_failed") == [1, 1]
            assert job.restore() == 9
            job.kill(0, 1)
        found.lose(1)
        with HostJob(found, root, columns=LARGE) as job:
            assert job.restore() == 9


@slow
@pytest.mark.parametrize("fault", ["parted", "unplugged"])
def test_a_host_cut_off_while_read_from(fault: str, root: Path, tmp_path: Path) -> None:
    """A process without a part of its own has half of its bytes from a peer when that is cut off:
    the next copy serves.
    """
    with hosts(3, tmp_path / "hosts") as found:
        with HostJob(found, root, columns=LARGE, local={"replicas": 2}) as job:
            job.each(save, 5)
            job.kill(*job.ranks)
        found.lose(0)
        with HostJob(found, root, columns=LARGE, local={"timeout_s": 3}) as job:
            found.network.throttle(1, 20)
            for rank in job.ranks:
                job.begin(rank, restore)
            found.network.wait_until_sent(1, 1 << 20)
            if fault == "parted":
                found.network.part(0, 1)
            else:
                found.network.unplug(1)
                found.network.wait_until_sent(2, 4 << 20)  # all that the process reads
                found.network.plug(1)
            assert [job.answer(rank) for rank in job.ranks] == [5] * 3
            assert any(
                "is read from another copy than rank 1's" in line for line in job.call(0, logged)
            )


# --- copies are damaged, or are not what they seem


def flip(folder: Path, name: str, at: int) -> None:
    """Flips a bit in each file of a host that is called so."""
    found = list(folder.rglob(name))
    assert found, f"{folder} has no {name}"
    for path in found:
        data = bytearray(path.read_bytes())
        data[at] ^= 4
        path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("kind", "at"),
    [
        ("safetensors", -100),
        *(
            pytest.param(*where, marks=slow)
            for where in (("safetensors", 30), ("json", -100), ("json", 30))
        ),
    ],
)
def test_flipped_bits_in_one_copy_and_in_all(
    kind: str, at: int, root: Path, tmp_path: Path
) -> None:
    """In a process's own, in the copy when the own is lost, in all: the other copy, the older local
    step, the store; on all alike.
    """

    def name(step: int) -> str:
        file = "state/00001-*.safetensors" if kind == "safetensors" else "part-00001.json"
        return f"{step}-*/{file}"

    with hosts(3, tmp_path / "hosts") as found:
        with HostJob(found, root, every=4, local={"keep": 2}) as job:
            job.each(save, 4, 5, 6)
            assert job.each(steps) == [([4, 5, 6], [5, 6])] * 3
            job.kill(*job.ranks)
        kept = found.copy(tmp_path / "kept")
        keeper = next(index for index in (0, 2) if list(found.folders[index].rglob(name(6))))
        with HostJob(found, root) as job:
            for damaged, step in (
                (((1, 6),), 6),
                (((keeper, 6),), 6),
                (((1, 6), (keeper, 6)), 5),
                ([(1, 6), (keeper, 6), (1, 5), (keeper, 5)], 4),
            ):
                found.put_back(kept)
                for host, number in damaged:
                    flip(found.folders[host], name(number), at)
                job.each(Program.reopen)
                assert job.restore() == step, f"damaged: {damaged}"
            found.put_back(kept)
            shutil.rmtree(next(found.folders[1].glob("*/*")))
            flip(found.folders[keeper], name(6), at)
            job.each(Program.reopen)
            assert job.restore() == 5, "the own is lost, and its copy is damaged"


@slow
def test_torn_files_on_all_hosts_mean_the_store(root: Path, tmp_path: Path) -> None:
    """What a power cut leaves on disks: files of the right name that are cut, empty, or of the
    right size and zeros.
    """
    tears: list[Callable[[Path], object]] = [
        lambda path: os.truncate(path, path.stat().st_size // 2),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(bytes(path.stat().st_size)),
    ]
    with hosts(2, tmp_path / "hosts") as found:
        with HostJob(found, root, every=4) as job:
            job.each(save, 4, 5)
            job.kill(*job.ranks)
        kept = found.copy(tmp_path / "kept")
        with HostJob(found, root) as job:
            for tear, pattern in itertools.product(tears, ("*.safetensors", "part-*.json")):
                found.put_back(kept)
                for path in [path for folder in found.folders for path in folder.rglob(pattern)]:
                    tear(path)
                job.each(Program.reopen)
                assert job.restore() == 4


def pretend(program: Program, kind: str) -> None:
    """Lets a process, which knows the secret, answer as no peer does; "" ends it."""
    PartServer._answer = _liar(kind) if kind else _ANSWER  # type: ignore[method-assign]


_ANSWER = PartServer._answer
LIES: dict[
    str, tuple[bool, int, Callable[[socket.socket, int], None]]
] = {  # to what, from which offset on, the lie
    "a part without end": (
        WAITS,
        0,
        lambda peer, size: peer.sendall(ANSWER.pack(THERE, 1 << 62)),
    ),
    "noise for a part": (
        WAITS,
        0,
        lambda peer, size: peer.sendall(ANSWER.pack(THERE, 5000) + os.urandom(5000)),
    ),
    "an answer that there is none of": (
        WAITS,
        0,
        lambda peer, size: peer.sendall(ANSWER.pack(9, 0)),
    ),
    "half of a part, and silence": (
        WAITS,
        0,
        lambda peer, size: peer.sendall(ANSWER.pack(THERE, 5000) + bytes(2500)),
    ),
    "more bytes than asked for": (
        READS,
        0,
        lambda peer, size: peer.sendall(ANSWER.pack(THERE, 2 * size) + bytes(2 * size)),
    ),
    "fewer bytes than asked for": (
        READS,
        0,
        lambda peer, size: peer.sendall(ANSWER.pack(THERE, size // 2) + bytes(size // 2)),
    ),
    "other bytes": (
        READS,
        0,
        lambda peer, size: peer.sendall(ANSWER.pack(THERE, size) + bytes(size)),
    ),
    "other bytes behind an honest beginning": (
        READS,
        1,
        lambda peer, size: peer.sendall(ANSWER.pack(THERE, size) + bytes(size)),
    ),
    "no bytes": (READS, 0, lambda peer, size: peer.sendall(ANSWER.pack(ABSENT, 0))),
    "a byte now and then": (READS, 0, lambda peer, size: _drip(peer, size)),
}


def _drip(peer: socket.socket, size: int) -> None:
    peer.sendall(ANSWER.pack(THERE, size))
    while True:
        peer.sendall(b"x")
        time.sleep(0.1)


def _liar(kind: str) -> Callable[[PartServer, socket.socket, bytes], None]:
    waits, first, lie = LIES[kind]

    def answer(server: PartServer, peer: socket.socket, request: bytes) -> None:
        length, wait_ms, offset, size = REQUEST.unpack(request)
        if waits == (wait_ms > 0) and offset >= first:
            receive_bytes(peer, length, 60)
            lie(peer, size)
        else:
            _ANSWER(server, peer, request)

    return answer


@slow
def test_a_peer_that_lies_in_a_save(root: Path, tmp_path: Path) -> None:
    """It knows the secret, and says anything: each local save fails on all, in time, and leaves no
    copy; the step before and durable saves

    are as ever, and so is the tier once the peer is honest.
    """
    with (
        hosts(2, tmp_path / "hosts") as found,
        HostJob(found, root, every=100, local={"timeout_s": 2}) as job,
    ):
        job.each(save, 5)
        for failed, kind in enumerate(LIES, 1):
            job.call(1, pretend, kind)
            job.each(save, 100 * failed - 50)
            assert job.statistics("saves_failed") == [failed] * 2, kind
            assert not list(found.folders[0].rglob(f"{100 * failed - 50}-*/part-*")), kind
            job.each(save, 100 * failed)
        assert job.restore(5) == 5
        job.call(1, pretend, "")
        job.each(save, 9999)
        assert job.restore() == 9999
        assert job.statistics("saves_failed") == [len(LIES)] * 2


@slow
def test_a_peer_that_lies_in_a_restore(root: Path, tmp_path: Path) -> None:
    """Who has nothing of its own reads from the next copy, whatever the first one says; where all
    lie, all get the store's step.
    """
    with hosts(3, tmp_path / "hosts") as found:
        with HostJob(found, root, every=4, local={"replicas": 2}) as job:
            job.each(save, 4, 5)
            job.kill(*job.ranks)
        found.lose(0)
        with HostJob(found, root, local={"timeout_s": 2}) as job:
            lies = [kind for kind, (asked, *_) in LIES.items() if asked == READS]
            for kind in lies:
                job.call(1, pretend, kind)
                assert job.restore() == 5, kind
            job.call(2, pretend, "other bytes")
            job.call(1, pretend, "other bytes")
            assert job.restore() == 4
            assert job.statistics("restores_failed") == [1] * 3


def pry(program: Program, address: str, names: list[str]) -> list[str]:
    """Asks a peer for names with this job's secret; returns those for which there was anything."""
    tier = program.manager._catalog.tier
    assert isinstance(tier, LocalSteps)
    got = []
    for name in names:
        for ask in (
            lambda peer, name=name: peer.wait(name, 0.2),
            lambda peer, name=name: peer.read(name, 0, [memoryview(bytearray(9))], 5),
        ):
            with (
                contextlib.suppress(OSError),
                PeerConnection(address, tier._place.meeting.secret) as peer,
            ):
                ask(peer)
                got.append(name)
    return got


def server_address(program: Program) -> str:
    """Returns where the process's part server listens."""
    tier = program.manager._catalog.tier
    assert isinstance(tier, LocalSteps) and tier._place.meeting.server is not None
    return tier._place.meeting.server.address


def test_a_peer_gets_nothing_but_parts(root: Path, tmp_path: Path) -> None:
    """Whatever names one asks for that knows the secret; and a process of another job, which does
    not, gets not even those of parts.
    """
    with hosts(2, tmp_path / "hosts") as found, HostJob(found, root) as job:
        job.each(save, 5)
        (found.folders[0] / "private").write_text("private")
        own = found.folders[0]
        part = str(
            next(own.rglob("part-00000.json"))
            .relative_to(own)
            .relative_to(next(own.glob("*/")).name)
        )
        address = job.call(0, server_address)
        names = [
            "../private",
            str(own / "private"),
            "/etc/passwd",
            f"{part}/../../../../private",
            f"./{part}",
            "x" * 600,
            "private",
        ]
        assert job.call(1, pry, address, [*names, part]) == [part] * 2
        with HostJob(found, tmp_path / "other", [1]) as other:
            assert other.call(0, pry, address, [part]) == []
        job.each(save, 6)
        assert job.restore() == 6


# --- no space


def fill(folder: Path, kind: str) -> Callable[[], None]:
    """Takes all bytes of a host's memory, or all its inodes; returns what gives them back."""
    filler = folder / "filler"
    filler.mkdir()
    with contextlib.suppress(OSError):
        if kind == "inodes":
            for number in itertools.count():
                (filler / str(number)).touch()
        with open(filler / "bytes", "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
    return lambda: shutil.rmtree(filler)


@pytest.mark.parametrize(
    "kind",
    ["bytes while it pulls", *(pytest.param(kind, marks=slow) for kind in ("bytes", "inodes"))],
)
def test_a_host_without_space_fails_a_save_only(kind: str, root: Path, tmp_path: Path) -> None:
    """The save fails on all, and says where and why; the one before stays, durable saves go on, and
    local ones with space again.
    """
    with (
        hosts(2, tmp_path / "hosts", 16 << 20) as found,
        HostJob(found, root, every=4, columns=8000, local={"timeout_s": 20}) as job,
    ):
        job.each(save, 4, 5)
        if kind == "bytes while it pulls":
            job.hold(1, COPIER, "copy_file")
            for rank in job.ranks:
                job.begin(rank, save, 6)
            job.wait_for(1, "at copy_file")
            free = fill(found.folders[1], "bytes")
            job.go_on(1)
            for rank in job.ranks:
                job.answer(rank)
        else:
            free = fill(found.folders[1], kind)
            job.each(save, 6)
        assert job.statistics("saves_failed") == [1, 1]
        reason = (  # at the process whose host it is, and not that others got nothing from it
            "process 1 failed: OSError: [Errno 28]"
        )
        assert all(any(reason in line for line in lines) for lines in job.each(logged)), job.each(
            logged
        )
        job.each(save, 8)
        assert job.each(steps) == [([4, 5, 8], [5])] * 2
        assert job.restore(5) == 5
        free()
        job.each(save, 9)
        assert job.restore() == 9
        assert job.statistics("saves_failed") == [1, 1]


@slow
def test_another_run_that_takes_the_space_is_named(root: Path, tmp_path: Path) -> None:
    """The root was made anew, and nobody deletes what the hosts have of the old one: it is not
    offered but named, and may be deleted.
    """
    with hosts(2, tmp_path / "hosts", 12 << 20) as found:
        with HostJob(found, root, columns=20_000) as job:
            job.each(save, 5)
            job.kill(*job.ranks)
        old = [path.name for path in found.folders[0].iterdir() if path.is_dir()]
        shutil.rmtree(root)
        with HostJob(found, root, columns=20_000) as job:
            assert job.each(steps) == [([], [])] * 2
            job.each(save, 6, 7)
            assert job.statistics("saves_failed") == [1, 1]
            assert any(
                f"folders of other runs hold some: {old[0]}" in line for line in job.call(0, logged)
            )
            for folder in found.folders:
                shutil.rmtree(folder / old[0])
            job.each(save, 8)
            assert job.restore() == 8


# --- the job comes back in another shape, or twice


@slow
def test_ranks_permuted_fewer_and_more(root: Path, tmp_path: Path) -> None:
    """One life after the other, each on other hosts, in another order or number, and killed: each
    goes on where the last one was.
    """
    shapes = [
        [0, 1, 2, 3],
        [3, 1, 0, 2],
        [1, 0],
        [5, 4, 3, 2, 1, 0],
        [0, 0, 1, 1, 2],
        [2, 1],
        [1, 5, 2],
    ]
    with hosts(6, tmp_path / "hosts") as found:
        for step, places in enumerate(shapes, 5):
            with HostJob(found, root, places) as job:
                if step > 5:
                    assert job.restore() == step - 1
                job.each(save, step)
                job.kill(*job.ranks)


def test_a_zombie_brings_nothing_back(root: Path, tmp_path: Path) -> None:
    """A job is stopped and given up, another goes on from its step on the same hosts, and then the
    first runs on: its steps, acknowledged

    as they are, are of a dead branch, it gets nothing from the new job's servers, and takes nothing
    away.
    """
    with hosts(2, tmp_path / "hosts") as found, HostJob(found, root) as zombie:
        zombie.each(save, 5)
        for rank in zombie.ranks:
            zombie.signal(rank, signal.SIGSTOP)
        with HostJob(found, root) as job:
            assert job.restore() == 5
            job.each(save, 6)
            for rank in zombie.ranks:
                zombie.signal(rank, signal.SIGCONT)
            zombie.each(save, 20, 21)
            assert zombie.each(steps) == [([21], [21])] * 2
            part = next(path for path in found.folders[0].rglob("6-*/part-00000.json"))
            name = str(part.relative_to(found.folders[0]).relative_to(part.parents[2].name))
            assert zombie.call(1, pry, job.call(0, server_address), [name]) == []
            job.each(save, 7)
            assert job.restore() == 7
            zombie.each(save, 22)
            assert job.restore() == 7
            job.kill(*job.ranks)
        zombie.kill(*zombie.ranks)
        with HostJob(found, root) as job:
            assert job.restore() == 7


# --- branches that were left


def restored_an_older(found: Hosts, root: Path) -> None:
    with HostJob(found, root, every=2) as job:
        assert job.restore(4) == 4
        job.each(save, 5)


def deleted_the_newest(found: Hosts, root: Path) -> None:
    with HostJob(found, root, every=2) as job:
        job.each(delete, 4)


def deleted_a_local_one(found: Hosts, root: Path) -> None:
    with HostJob(found, root, every=2) as job:
        job.each(delete, 7)


def ran_without_a_tier(found: Hosts, root: Path) -> None:
    with HostJob(found, root, every=1, local=None) as job:
        assert job.restore() == 4
        job.each(save, 5)


def lost_its_hosts_and_went_on_locally(found: Hosts, root: Path) -> None:
    found.lose(0, 1)
    with HostJob(found, root, every=2) as job:
        assert job.restore() == 4
        job.each(save, 5)
        job.kill(*job.ranks)
    found.lose(0, 1)


def saved_nothing(found: Hosts, root: Path) -> None:
    found.lose(0, 1)
    with HostJob(found, root, every=2) as job:
        assert job.restore() == 4


BETWEEN: dict[Callable[[Hosts, Path], None], int] = {
    restored_an_older: 4,  # what was saved after it was on the hosts that were put back
    deleted_the_newest: 7,  # of the durable ones: a newer local step stays
    deleted_a_local_one: 4,
    ran_without_a_tier: 5,
    lost_its_hosts_and_went_on_locally: 4,
    saved_nothing: 7,
}


@pytest.mark.parametrize(
    "between",
    [
        pytest.param(each, marks=() if each is restored_an_older else slow, id=each.__name__)
        for each in BETWEEN
    ],
)
def test_folders_once_away_revive_no_abandoned_branch(
    between: Callable[[Hosts, Path], None], root: Path, tmp_path: Path
) -> None:
    """All that the hosts had of step 7 is put back: it is there if no life went on without it."""
    with hosts(2, tmp_path / "hosts") as found:
        with HostJob(found, root, every=2) as job:
            job.each(save, 2, 4, 7)
            job.kill(*job.ranks)
        kept = found.copy(tmp_path / "kept")
        between(found, root)
        for _ in range(2):  # before a save, and after one
            found.put_back(kept)
            with HostJob(found, root, every=2) as job:
                assert job.restore() == BETWEEN[between]
                assert job.each(steps)[0][1] == [7] * (BETWEEN[between] == 7)


@slow
def test_one_host_put_back_harms_no_step(root: Path, tmp_path: Path) -> None:
    """A stale copy of one host beside the others' newer ones: the newest that is whole serves, and
    with both hosts stale the older one.
    """
    with hosts(2, tmp_path / "hosts") as found:
        with HostJob(found, root) as job:
            job.each(save, 5)
            kept = found.copy(tmp_path / "kept")
            job.each(save, 6)
            job.kill(*job.ranks)
        found.put_back(kept, 1)
        with HostJob(found, root) as job:
            assert job.restore() == 6
            job.kill(*job.ranks)
        found.put_back(kept, 0)
        with HostJob(found, root) as job:
            assert job.restore() == 5


# --- two lanes


def test_local_saves_go_on_while_the_store_stalls(root: Path, tmp_path: Path) -> None:
    """One process's durable write takes its time: local saves on all hosts begin and end meanwhile,
    and the durable one ends well.
    """
    with hosts(2, tmp_path / "hosts") as found, HostJob(found, root, every=100) as job:
        job.each(save, 5)
        job.hold(1, "checkpoint.storage.local", "LocalStorage.write")
        job.each(begin, 100)
        job.wait_for(1, "at LocalStorage.write")
        for step in range(101, 105):
            job.each(begin, step)
            job.each(wait_locally)
            assert job.each(steps) == [([step], [step])] * 2
        assert job.statistics("saves") == [5, 5]
        job.go_on(1)
        job.each(wait)
        assert job.each(steps) == [([100, 104], [104])] * 2
        assert job.restore() == 104
