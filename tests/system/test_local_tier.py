"""The local tier in jobs of real processes: killed, stopped, lost with their hosts, and started
again in other numbers.
"""

from __future__ import annotations

import errno
import json
import random
import re
import shutil
import signal
from pathlib import Path

import pytest

from holdfast.checkpoint.steps.lineage import KEPT_BRANCHES
from holdfast.coordination import CoordinationService, Endpoint
from tests.support.checkpointing import run_together, together
from tests.support.cluster import run_processes
from tests.support.killpoints import build, walk_local
from tests.support.paths import program

# Each process is a host of its own: argv[5] is where their folders are, argv[6] the names of their
# hosts.


TRAIN = program("local_tier_train")

RESTORE = program("local_tier_restore")


def _restored(outputs: list[str]) -> int:
    """Returns the step that all have restored."""
    found = {int(step) for output in outputs for step in re.findall(r"restored (\d+)", output)}
    assert len(found) == 1, outputs
    return found.pop()


def _names(count: int) -> str:
    return ",".join(f"h{index}" for index in range(count))


@pytest.mark.slow
def test_a_job_goes_on_in_another_shape(tmp_path: Path) -> None:
    """Three processes save every other step; one host is lost, and two processes go on from the
    newest local step, resharded.
    """
    root = tmp_path / "root"
    folders = tmp_path / "hosts"
    outputs = run_together(TRAIN, 3, root, folders, _names(3), 30, devices=2)
    newest = {re.findall(r"local (\d+)", output)[-1] for output in outputs}
    assert len(newest) == 1
    shutil.rmtree(folders / "h1")
    outputs = run_together(RESTORE, 2, root, folders, "h2,h0", devices=3)
    assert _restored(outputs) == int(newest.pop())
    assert '"local_off": ""' in outputs[0]


def test_a_damaged_item_is_read_alone(tmp_path: Path) -> None:
    """One process's copy of the second item is damaged: it reads another copy of it."""
    script = program("local_tier_damaged_item")
    outputs = run_together(script, 2, tmp_path / "root", tmp_path / "hosts", _names(2))
    assert "another copy is read instead" in outputs[1]


def test_hosts_at_a_unix_socket_reach_each_other(tmp_path: Path) -> None:
    """All of its processes are on this machine, as with `holdfast run`: nobody has to name an
    address.
    """
    script = program("local_tier_hosts_job_at_unix")
    with CoordinationService.spawn(2, endpoint=Endpoint(host=f"unix:{tmp_path}/s")) as service:
        run_processes(script, 2, arguments=[service.address, tmp_path])


def _kill_at(
    root: Path, folders: Path, count: int, acknowledged: int, moment: random.Random
) -> int:
    """Runs a job, kills all its processes soon after so many local steps; returns the newest step
    that one of them knew.
    """
    with together(TRAIN, count, root, folders, _names(count), 100_000) as processes:
        processes.wait_for(0, f"acknowledged {acknowledged}:", 60)
        victims = list(processes.popens)
        moment.shuffle(victims)
        for victim in victims:
            victim.send_signal(signal.SIGKILL)
        finished = processes.wait(30)
    return max(
        int(step)
        for each in finished
        for step in re.findall(r"acknowledged \d+: (\d+)\n", each.output)
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_killed_at_any_moment_nothing_acknowledged_is_lost(seed: int, tmp_path: Path) -> None:
    """Killed again and again while they write and pull, with a host of each group lost in between:
    each life goes on where all were.
    """
    moment = random.Random(seed)
    root = tmp_path / "root"
    folders = tmp_path / "hosts"
    for _ in range(3):
        known = _kill_at(root, folders, 2, moment.randint(1, 6), moment)
        if moment.random() < 0.5:
            shutil.rmtree(folders / f"h{moment.randrange(2)}")
        assert _restored(run_together(RESTORE, 2, root, folders, _names(2))) >= known


@pytest.mark.slow
def test_a_late_writer_of_an_attempt_revives_nothing(tmp_path: Path) -> None:
    """An attempt is stopped, another goes on from its step, and then the first runs on: its later
    steps are of a dead branch.
    """
    root = tmp_path / "root"
    folders = tmp_path / "hosts"
    with together(TRAIN, 2, root, folders, _names(2), 100_000) as late:
        late.wait_for(0, "acknowledged 2:", 60)
        late.wait_for(1, "acknowledged 2:", 60)
        for index in range(2):
            late.kill(index, signal.SIGSTOP)
        outputs = run_together(TRAIN, 2, root, folders, _names(2), 12)
        newest = int(re.findall(r"local (\d+)", outputs[0])[-1])
        before = late.output(0).count("acknowledged")
        for index in range(2):
            late.kill(index, signal.SIGCONT)
        late.wait_for(0, f"acknowledged {before + 12}:", 60)
        for index in range(2):
            late.kill(index)
        assert int(re.findall(r"acknowledged \d+: (\d+)", late.output(0))[-1]) > newest
    assert _restored(run_together(RESTORE, 2, root, folders, _names(2))) == newest


MANY_SAVES = program("local_tier_many_saves")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saves", "early"),
    [(150, 50), pytest.param(10_000, 1_000, marks=pytest.mark.timeout(900))],
)
def test_many_local_saves_leave_nothing_behind(saves: int, early: int, tmp_path: Path) -> None:
    """Two processes save locally over and over, durably and restoring now and then: what each holds
    late is what it held early.
    """
    outputs = run_together(
        MANY_SAVES, 2, tmp_path / "root", tmp_path / "hosts", saves, early, timeout_s=850
    )
    for output in outputs:
        first, last, closed = (
            json.loads(re.search(rf"^{when} (.*)", output, re.MULTILINE)[1])
            for when in ("early", "late", "closed")
        )
        assert last["files"] == first["files"] <= 12, (
            output
        )  # of keep + 1 steps, pack and part of one's own and of the ward, and a mark
        assert last["of the root"] <= KEPT_BRANCHES + 4, output
        assert len(last["keys"]) < 32, output
        assert (
            abs(last["descriptors"] - first["descriptors"]) <= 3
            and abs(last["threads"] - first["threads"]) <= 3
        ), output
        assert last["resident"] - first["resident"] < 16 << 20, output
        assert (closed["files"], closed["keys"]) == (8, []), output


MOST_POINTS = 1000
_FINE = 12


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("killpoint"))


ERRORS = {"SIGKILL": 0, "ENOSPC": errno.ENOSPC, "EIO": errno.EIO}


def walks(*coarse: tuple[str, int, int, int, int]) -> pytest.MarkDecorator:
    """Parametrises by (error, processes, victim, first point, every how many): coarse walks, and
    slow ones to a third of the calls, another each day: of one process, of the second of two, owner
    and ward, and of the first, which decides besides.
    """
    fine = [
        (processes, victim, at, _FINE)
        for processes, victim in ((1, 0), (2, 1), (2, 0))
        for at in range(0, _FINE, 3)
    ]
    names = ("error", "processes", "victim", "first", "every")
    marks = [pytest.mark.slow, pytest.mark.timeout(300)]
    slow = [pytest.param(error, *walk, marks=marks) for error in ERRORS for walk in fine]
    return pytest.mark.parametrize(names, [*coarse, *slow])


@walks(("SIGKILL", 1, 0, 5, 61))
def test_local_saves_at_each_system_call(
    library: Path,
    error: str,
    processes: int,
    victim: int,
    first: int,
    every: int,
    drawn: random.Random,
) -> None:
    """Killed at, or refused, each call below the host's folder, from branch to closing: what was
    known is there, to the bit, and the next local save leaves nothing else behind. Of two it is
    there although one host is lost besides.

    A refused call fails one local save at most, of all processes alike; the others succeed, but
    where the tier could not be opened. Who outlives the other ends too.
    """
    first += drawn.randrange(3) if every == _FINE else 0
    found = walk_local(library, processes, victim, ERRORS[error], range(first, MOST_POINTS, every))
    assert not found[-1]["reached"] and len(found) * every > 100 * processes, (
        "the walk did not come to the end"
    )
    assert all(point["killed"] == (error == "SIGKILL") for point in found[:-1])
    for point in found:
        ended = point["ended"]
        if point["killed"]:
            assert all(each["ended"] in ("", "ProcessLost") for each in ended), point
        else:
            assert len(ended) == processes and not any(each["ended"] for each in ended), point
            assert len({(each["saved"], each["failed"], each["off"]) for each in ended}) == 1, point
            assert ended[0]["off"] or (
                ended[0]["failed"] <= 1 and ended[0]["saved"] + ended[0]["failed"] in (3, 4)
            ), point
