"""Claims on a POSIX root: who may write, and who lives."""

from __future__ import annotations

import functools
import json
import math
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.checkpoint import CheckpointError, CheckpointManager, Options
from holdfast.checkpoint.steps.claims import Writer, parse_writer, this_writer
from holdfast.checkpoint.steps.local_claims import LocalClaims
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.coordination import Fenced, mounts
from tests.support.paths import program


def test_a_claim_lives_as_long_as_its_process(tmp_path: Path) -> None:
    """A killed writer's claim is free at once, even if a forked child of it lives on; a living
    one's is not.
    """
    for kind in ("plain", "fork"):
        root = tmp_path / kind
        with subprocess.Popen(
            [sys.executable, str(program("claim_holder")), str(root), kind],
            stdout=subprocess.PIPE,
            text=True,
        ) as holder:
            assert holder.stdout is not None
            writer_id = holder.stdout.readline().strip()
            claims = LocalClaims(LocalStorage(root))
            assert claims.standing() == {writer_id} and [
                dead for _, dead in claims.others("me")
            ] == [False]
            child = _children(holder.pid)
            holder.kill()
            holder.wait()
            try:
                assert [(writer.id, dead) for writer, dead in claims.others("me")] == [
                    (writer_id, True)
                ]
            finally:
                for pid in child:
                    os.kill(pid, 9)
        with CheckpointManager(root) as manager:
            assert manager._root.claims.standing() == {manager._root.writer.id}
        assert os.listdir(root / ".holdfast") == []


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_the_first_claim_of_a_root_may_come_while_others_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of claims is not there at the first look into it, and there when the root is
    listed for it: a sweep looks again, and raises nothing.
    """
    writer = this_writer()
    root = LocalStorage(tmp_path)
    real = os.scandir, os.listdir

    def appears(call: int, path: Any) -> Any:
        try:
            return real[call](path)
        except FileNotFoundError:
            LocalClaims(root).take(writer)
            raise

    monkeypatch.setattr(os, "scandir", functools.partial(appears, 0))
    monkeypatch.setattr(os, "listdir", functools.partial(appears, 1))
    assert LocalClaims(root).standing() == {writer.id}


def test_a_higher_attempt_takes_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempt 1 of a job fences attempt 0 though it lives; attempt 0 gets Fenced at its commit, and
    when it opens again.
    """
    spec = {
        "HOLDFAST_JOB_ID": "j",
        "HOLDFAST_PROCESS_ID": "0",
        "HOLDFAST_NUM_PROCESSES": "1",
        "HOLDFAST_COORDINATOR": "127.0.0.1:1",
    }
    for name, value in spec.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOLDFAST_ATTEMPT", "0")
    first = CheckpointManager(tmp_path)
    first.save(1, {"w": np.ones(3)})
    first.wait_until_finished()
    monkeypatch.setenv("HOLDFAST_ATTEMPT", "1")
    with CheckpointManager(tmp_path) as second:
        first.save(2, {"w": np.ones(3)})
        with pytest.raises(
            Fenced, match="was taken away: another writer has fenced this one, or somebody"
        ):
            first.wait_until_finished()
        monkeypatch.setenv("HOLDFAST_ATTEMPT", "0")
        with pytest.raises(Fenced, match="attempt 1 of job 'j' writes here"):
            CheckpointManager(tmp_path)
        first.close()
        second._state.worker.wait(30)  # the sweep removes what is left of a fenced claim
        assert second.all_steps() == [1] and len(list((tmp_path / ".holdfast").iterdir())) == 1
        second.save(2, {"w": np.zeros(3)})
        second.wait_until_finished()
        assert np.array_equal(second.restore(2)["w"], np.zeros(3))


def test_links_that_do_not_hold_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where link() is refused, opening for writing fails unless a single writer is promised; then a
    commit is a rename.
    """

    def refused(source: object, target: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    with pytest.raises(
        CheckpointError,
        match=r"link\(\) is refused: Operation not permitted.*Options\(single_writer=True\)",
    ):
        CheckpointManager(tmp_path)
    assert os.listdir(tmp_path / ".holdfast") == []
    with CheckpointManager(tmp_path, options=Options(single_writer=True)) as manager:
        manager.save(1, {"w": np.ones(3)})
        manager.wait_until_finished()
        assert manager.all_steps() == [1]


def test_a_claim_that_cannot_be_read_is_nobodys(tmp_path: Path) -> None:
    """Damage to claim.json is no error: the lock still says who lives."""
    assert parse_writer(b"{", "0a0b0c0d") == parse_writer(b"[]", "0a0b0c0d") == Writer("0a0b0c0d")
    assert parse_writer(json.dumps({"job": "j"}).encode(), "0a0b0c0d") == Writer("0a0b0c0d")
    hostile = [b"[" * 50_000, json.dumps(asdict(this_writer()) | {"pid": math.inf}).encode()]
    assert {parse_writer(data, "0a0b0c0d") for data in hostile} == {Writer("0a0b0c0d")}
    claims = LocalClaims(LocalStorage(tmp_path))
    writer = this_writer()
    claims.take(writer)
    (tmp_path / ".holdfast" / writer.id / "claim.json").write_text("{")
    assert claims.others("") == [(Writer(writer.id), False)]
    claims.fence(writer.id)
    assert claims.others("") == [] and os.listdir(tmp_path / ".holdfast") == []


def test_where_locks_are_local_other_hosts_are_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its writer is not fenced, and the log says why; a dead one of this host is fenced all the
    same.
    """
    for writer in (
        Writer("0a0b0c0d", host="elsewhere"),
        Writer("0a0b0c0e", host=socket.gethostname()),
    ):
        folder = tmp_path / ".holdfast" / writer.id
        folder.mkdir(parents=True)
        (folder / "lock").touch()
        (folder / "claim.json").write_text(json.dumps(asdict(writer)))
    claims = LocalClaims(LocalStorage(tmp_path))
    assert [dead for _, dead in claims.others("me")] == [True, True]
    (tmp_path / "mounts").write_text(
        f"31 22 0:44 / {tmp_path} rw - lustre 10.0.0.1@tcp:/fs rw,localflock\n"
    )
    monkeypatch.setattr(mounts, "MOUNTINFO", tmp_path / "mounts")
    assert [dead for _, dead in claims.others("me")] == [False, True]
    assert "hold on one host alone" in caplog.text and "sweep --force" in caplog.text
