"""Compiled programs go from host to host: real jobs whose processes have folders of their own, so
that each is a host, and peers that lie.
"""

from __future__ import annotations

import hashlib
import os
import re
import resource
import shutil
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from holdfast.coordination import CoordinationService
from holdfast.multihost.compiled import travel
from holdfast.multihost.compiled.folder import (
    COMPILE_CACHE,
    OFF,
    TORN_AFTER_S,
    Entry,
    folder_of,
    sealed,
    tend,
)
from holdfast.multihost.compiled.travel import fetch_all
from holdfast.multihost.peers.part_server import PartServer
from tests.support.cluster import Processes
from tests.support.paths import program
from tests.support.processes import wait_until

SECRET = b"s" * 32


def _folder(host: Path) -> Path:
    found = folder_of({COMPILE_CACHE: str(host)})
    assert found is not None
    return found


def _counted(text: str) -> list[int]:
    found = re.search(r"^counted (\d+) (\d+) (\d+)$", text, re.MULTILINE)
    assert found is not None, text
    return [int(number) for number in found.groups()]


def _run(tmp_path: Path, places: Sequence[Path | str], *, stays: bool) -> list[list[int]]:
    """Runs a job, a process a place; with `stays`, until all hosts have the same. Returns what each
    process asked for, was given, and wrote.
    """
    go_on = tmp_path / "go on"
    go_on.unlink(missing_ok=True)
    with CoordinationService.spawn(len(places)) as service:

        def environment(index: int) -> dict[str, str]:
            return {
                "HOLDFAST_PROCESS_ID": str(index),
                "HOLDFAST_NUM_PROCESSES": str(len(places)),
                "HOLDFAST_COORDINATOR": service.address,
                COMPILE_CACHE: str(places[index]),
            }

        file = program("compile_in_job")
        with Processes(file, len(places), arguments=[go_on], env_of=environment) as job:
            for index in range(len(places)):
                job.wait_for(index, "counted", timeout_s=90)
            if stays:
                written = sum(_counted(job.output(index))[2] for index in range(len(places)))
                folders = [_folder(Path(place)) for place in places]
                wait_until(lambda: all(len(sealed(each)) == written for each in folders))
            go_on.touch()
            return [_counted(each.output) for each in job.wait()]


def test_a_host_that_comes_new_compiles_nothing(tmp_path: Path) -> None:
    """What is compiled on one host comes to all. So a host with an empty folder in the place of
    another compiles nothing, and neither do those that stay. An entry that one host lacks is seen
    by none: with a host that keeps nothing, all compile.
    """
    hosts = [tmp_path / "a", tmp_path / "b"]
    for requested, given, written in _run(tmp_path, hosts, stays=True):
        assert requested > 1 and given == 0 and written == requested
    shutil.rmtree(hosts[1])
    for requested, given, written in _run(tmp_path, hosts, stays=False):
        assert (given, written) == (requested, 0)
    assert sealed(_folder(hosts[0])) == sealed(_folder(hosts[1]))
    assert not list(_folder(hosts[0]).glob("view-*"))
    (_, given, _), (_, without, _) = _run(tmp_path, [hosts[0], OFF], stays=False)
    assert given == without == 0


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[tuple[PartServer, Path]]:
    """What a peer serves, and from where."""
    folder = tmp_path / "peer"
    folder.mkdir()
    with PartServer("127.0.0.1", SECRET) as server:
        yield server, folder


def _served(peer: tuple[PartServer, Path], name: str, data: bytes, told: bytes) -> Entry:
    """Has a peer serve bytes, and tell that they are others."""
    server, folder = peer
    (folder / name).write_bytes(data)
    server.publish(folder, name, ())
    return Entry(name, len(told), hashlib.sha256(told).hexdigest())


def test_what_is_not_as_told_leaves_no_file(
    peer: tuple[PartServer, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Other bytes, too few and too many are refused by name, and the rest comes all the same; what
    the peer does not have is passed over.
    """
    own = tmp_path / "own"
    own.mkdir()
    data = os.urandom(3_000_000)
    good = _served(peer, "good-cache", data, data)
    wanted = [
        _served(peer, "other-cache", data[::-1], data),
        _served(peer, "short-cache", data[:-1], data),
        _served(peer, "absent-cache", data, data),
        good,
    ]
    (peer[1] / "absent-cache").unlink()
    at = [peer[0].address, SECRET.hex()]
    fetch_all(own, wanted, [at], time.monotonic() + 20)
    assert sealed(own) == {"good-cache": good}
    assert sorted(path.name for path in own.iterdir()) == ["good-cache", "index"]
    assert caplog.text.count(" is refused: ") == 2 and "other-cache" in caplog.text


def test_a_fetch_that_is_cut_off_leaves_no_file(
    peer: tuple[PartServer, Path], tmp_path: Path
) -> None:
    """At its time, with a server that nobody listens at first in the list."""
    own = tmp_path / "own"
    own.mkdir()
    entry = _served(peer, "good-cache", b"x" * 100, b"x" * 100)
    at = [peer[0].address, SECRET.hex()]
    fetch_all(own, [entry], [["127.0.0.1:1", "00"], at], time.monotonic() - 1)
    assert list(own.iterdir()) == []
    fetch_all(own, [entry], [["127.0.0.1:1", "00"], at], time.monotonic() + 20)
    assert sealed(own) == {"good-cache": entry}


def test_a_folder_that_takes_no_more_fails_no_start(
    peer: tuple[PartServer, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As at the end of a quota, which free space does not show: a sentence says so, and this host
    compiles what it lacks.
    """
    own = tmp_path / "own"
    own.mkdir()
    large = _served(peer, "large-cache", b"x" * 1_000_000, b"x" * 1_000_000)
    at = [peer[0].address, SECRET.hex()]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        fetch_all(own, [large], [at, at], time.monotonic() + 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(own.iterdir()) == []
    assert caplog.text.count(f"{own} takes no more compiled programs: ") == 1


@pytest.mark.parametrize(
    "told",
    [
        ["../a-cache", 1, "0"],
        [".a-cache", 1, "0"],
        ["a\n-cache", 1, "0"],
        ["a", 1, "0"],
        ["x" * 300 + "-cache", 1, "0"],
        ["a-cache", travel.OFFER_BYTES + 1, "0"],
        ["a-cache", 0, "0"],
    ],
)
def test_what_can_be_no_entry_is_not_asked_for(told: list[object]) -> None:
    """A name that leads elsewhere, or that is too long; a size that no host would offer."""
    assert travel._entries([told, ["b-cache", 1, "0"]]) == {"b-cache": Entry("b-cache", 1, "0")}


def test_one_host_or_none_exchanges_nothing() -> None:
    """Hosts with the same entries need not name them; of each host one process speaks."""
    one = {"host": "a", "kind": "k", "set": "1"}
    other = one | {"host": "b"}
    nothing = {"host": "", "kind": "", "set": ""}
    assert travel._plan([one, one]) is None and travel._plan([nothing] * 3) is None
    alike = travel._plan([one, one, other])
    assert alike is not None and alike["alike"] and alike["leaders"] == [0, 2]
    differing = travel._plan([one, other | {"set": "2"}, nothing])
    assert differing == {
        "alike": False,
        "leaders": [0, 1, 2],
        "holders": [[0], [1]],
    }


def test_what_a_killed_process_left_in_its_view_is_kept(tmp_path: Path) -> None:
    """Whoever tends the folder next moves it over, whole entries alone."""
    view = tmp_path / "view-dead"
    view.mkdir()
    whole = zlib.compress(os.urandom(1000))
    (view / "whole-cache").write_bytes(whole)
    (view / "torn-cache").write_bytes(whole[:-1])
    past = time.time() - TORN_AFTER_S - 1
    for path in (view / "torn-cache", view):
        os.utime(path, (past, past))
    tend(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index", "whole-cache"]
    assert list(sealed(tmp_path)) == ["whole-cache"]
