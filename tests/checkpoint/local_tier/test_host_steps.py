"""What people see of local steps on one host: listed, verified, swept; by the library and by the
commands.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from holdfast.checkpoint import CheckpointError, Corrupt, StepNotFound
from holdfast.checkpoint.local_tier.host_steps import list_host_steps, sweep_host, verify_host_step
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.cli.entry import main
from tests.support.local_hosts import job


@pytest.fixture
def saved(tmp_path: Path) -> tuple[LocalStorage, Path]:
    """Two lives on two hosts; host 1 was away in the second, so that it has a dead step, and host 0
    a living one.
    """
    root = tmp_path / "root"
    hosts = [tmp_path / "host0", tmp_path / "host1", tmp_path / "host2"]
    with job(root, hosts[:2], every=4) as first:
        first.save(4)
        first.save(9)
    shutil.rmtree(hosts[0])
    with job(root, [hosts[0], hosts[2]]) as second:
        second.restore(4)
        second.save(5)
    return LocalStorage(root), tmp_path


def _ran(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    return done.exit_code, done.stdout


def test_a_link_is_not_swept(saved: tuple[LocalStorage, Path]) -> None:
    """Whoever sweeps: nothing behind a link in place of a run's folder is deleted."""
    root, folder = saved
    run = next(path for path in (folder / "host1").iterdir() if path.is_dir())
    outside = run.rename(folder / "outside")
    run.symlink_to(outside)
    there = sorted(outside.rglob("*"))
    with pytest.raises(CheckpointError, match=f"{run} is a link; expected a folder of user"):
        sweep_host(root, str(folder / "host1"))
    assert sorted(outside.rglob("*")) == there


def test_a_host_shows_its_parts_and_what_is_dead(saved: tuple[LocalStorage, Path]) -> None:
    """Which steps, whose parts, and why one may not come back."""
    root, folder = saved
    (living,) = list_host_steps(root, str(folder / "host0"))
    assert (living.key.step, [found.process for found in living.parts], living.dead) == (
        5,
        [0, 1],
        "",
    )
    (dead,) = list_host_steps(root, str(folder / "host1"))
    assert (dead.key.step, dead.dead) == (9, "branch 2 went on from step 4, without it")
    code, text = _ran("ls", root.root, "--local", folder / "host1", "--json")
    assert code == 0
    assert [(row["step"], row["state"]) for row in json.loads(text)["steps"]] == [
        (4, "whole"),
        (9, "dead"),
    ]
    assert (
        "parts of processes 0, 1 of 2 are here; branch 2 went on"
        in _ran("ls", root.root, "--local", folder / "host1")[1]
    )


def test_a_host_says_what_it_knows_of_copies_and_what_not(saved: tuple[LocalStorage, Path]) -> None:
    """With all parts it needs no other host; with some, only the job can say how many hosts may be
    lost.
    """
    root, folder = saved
    all_of_it = (
        "parts of processes 0, 1 of 2 are here: all, so that it survives the loss of every other"
        " host"
    )
    assert all_of_it in _ran("ls", root.root, "--local", folder / "host0")[1]
    next((folder / "host0").rglob("part-00001.json")).unlink()
    some_of_it = (
        "parts of processes 0 of 2 are here; whether other hosts have the rest, or copies of these,"
        " is not known here: `holdfast status`"
    )
    assert some_of_it in _ran("ls", root.root, "--local", folder / "host0")[1]
    rows = json.loads(_ran("ls", root.root, "--local", folder / "host0", "--json")[1])["steps"]
    assert [(row["parts"], row["processes"]) for row in rows if row["state"] == "local"] == [
        ([0], 2)
    ]


def test_a_root_of_local_steps_alone_says_where_they_are(tmp_path: Path) -> None:
    """With its run, and the command that lists them; which does so."""
    with job(tmp_path / "root", [tmp_path / "host"], every=4) as only:
        only.save(1)
    (run,) = (path.name for path in (tmp_path / "host").iterdir())
    done = CliRunner().invoke(main, ["ls", str(tmp_path / "root")])
    assert done.exit_code == 3
    assert f"has no step of its own, but local steps on the hosts of its job: below {run} in" in (
        done.stderr
    )
    assert f"`holdfast ls {tmp_path / 'root'} --local FOLDER` lists those of a host" in done.stderr
    code, text = _ran("ls", tmp_path / "root", "--local", tmp_path / "host", "--json")
    assert code == 0
    assert [row["step"] for row in json.loads(text)["steps"]] == [1]


def test_a_host_without_anything_of_the_root_says_so(saved: tuple[LocalStorage, Path]) -> None:
    """Another folder, another root: exit code 3."""
    root, folder = saved
    with pytest.raises(StepNotFound, match="there is nothing of"):
        list_host_steps(root, str(folder))
    with pytest.raises(StepNotFound, match="was never used with a local tier"):
        list_host_steps(LocalStorage(folder / "other"), str(folder / "host0"))
    assert _ran("ls", root.root, "--local", folder)[0] == 3
    assert _ran("verify", root.root, "--local", folder / "host0", "--step", 77)[0] == 3


def test_each_flipped_byte_is_found(saved: tuple[LocalStorage, Path]) -> None:
    """In the header, in the data; the command names the file."""
    root, folder = saved
    (step,) = list_host_steps(root, str(folder / "host0"))
    assert verify_host_step(root, str(folder / "host0"), step) == 2
    assert _ran("verify", root.root, "--local", folder / "host0")[0] == 0
    pack = sorted((folder / "host0").rglob("*.safetensors"))[1]
    data = pack.read_bytes()
    for at in (9, 300, len(data) // 2, len(data) - 1):
        pack.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        with pytest.raises(Corrupt, match="checksum"):
            verify_host_step(root, str(folder / "host0"), step)
    code, text = _ran("verify", root.root, "--local", folder / "host0", "--json")
    assert code == 4
    assert json.loads(text)["steps"][0]["file"] == str(pack)


def test_a_sweep_takes_what_is_dead_and_leaves_what_may_come_back(
    saved: tuple[LocalStorage, Path],
) -> None:
    """On each host; a second one finds nothing."""
    root, folder = saved
    assert sweep_host(root, str(folder / "host0")) == []
    code, text = _ran("sweep", root.root, "--local", folder / "host1", "--json")
    assert code == 0
    assert len(json.loads(text)["deleted"]) == 1
    assert "0 dead or torn local steps" in _ran("sweep", root.root, "--local", folder / "host1")[1]
    assert not list((folder / "host1").rglob("*.safetensors"))
    with job(folder / "root", [folder / "host0", folder / "host2"]) as third:
        assert third.restore() == 5


def test_a_sweep_leaves_a_living_job_alone(tmp_path: Path) -> None:
    """What a writer with a claim has begun is its own, torn or not."""
    with job(tmp_path / "root", [tmp_path / "a", tmp_path / "b"]) as first:
        first.save(3)
        part = next((tmp_path / "a").rglob("part-*.json"))
        part.write_bytes(b"torn")
        assert sweep_host(LocalStorage(tmp_path / "root"), str(tmp_path / "a")) == []
    assert len(sweep_host(LocalStorage(tmp_path / "root"), str(tmp_path / "a"))) == 0, (
        "its other part may still come back"
    )
