"""Where notices come from: a file, GCE's metadata, Slurm's end time."""

from __future__ import annotations

import os
import queue
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.multihost import GceMetadata, Notice, Polled, SlurmEnd, Source, WatchedFile
from tests.support.metadata import metadata_server
from tests.support.processes import wait_until


class Watched:
    """Starts a source and hands out what it says, in order."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._said: queue.Queue[Notice | None] = queue.Queue()
        source.start(self._said.put)

    def next(self) -> Notice | None:
        return self._said.get(timeout=30)

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *error: object) -> None:
        self.source.close()
        assert self._said.empty()


def test_a_watched_file_raises_and_its_removal_withdraws(tmp_path: Path) -> None:
    """The notice carries the file's first line; removing the file withdraws it; and again."""
    path = tmp_path / "drain"
    with Watched(WatchedFile(path, every_s=0.01)) as watched:
        for reason in ("spot", "again"):
            fresh = tmp_path / "fresh"
            fresh.write_text(f"{reason}\nmore\n")
            fresh.rename(path)
            assert watched.next() == Notice(f"{path} exists: {reason}")
            path.unlink()
            assert watched.next() is None


def test_gce_tells_preemption_from_maintenance() -> None:
    """`preempted` gives 30 s, a TERMINATE maintenance event 60 s; a migration is none; an event
    called off withdraws.
    """
    with (
        metadata_server() as server,
        Watched(GceMetadata(host=server.address, every_s=0.01)) as watched,
    ):
        server.values["maintenance-event"] = "MIGRATE_ON_HOST_MAINTENANCE"
        server.values["maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"
        notice = watched.next()
        assert notice is not None and notice.reason == "GCE terminates this machine for maintenance"
        assert (
            notice.deadline_unix_s is not None and 50 < notice.deadline_unix_s - time.time() <= 60
        )
        server.values["maintenance-event"] = "NONE"
        assert watched.next() is None
        server.values["preempted"] = "TRUE"
        notice = watched.next()
        assert notice is not None and notice.reason == "GCE preempts this machine"
        assert (
            notice.deadline_unix_s is not None and 20 < notice.deadline_unix_s - time.time() <= 30
        )


def test_a_failing_source_keeps_its_notice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Errors are logged once and change nothing; the next answer counts."""
    notice = Notice("going")
    answers = iter([notice, OSError("no route"), OSError("no route"), notice, None])
    done = queue.Queue[bool]()

    def poll() -> Notice | None:
        answer = next(answers, "end")
        if isinstance(answer, Exception):
            raise answer
        if answer == "end":
            done.put(True)
            return None
        return answer  # type: ignore[return-value]

    with Watched(Polled("engine", poll, every_s=0.001)) as watched:
        assert [watched.next(), watched.next()] == [notice, None]
        done.get(timeout=30)
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert [record.getMessage() for record in warnings] == [
        "source engine of preemption notices: no route; asking again"
    ]


def test_slurms_end_is_a_notice_before_it() -> None:
    """The notice comes `lead_s` before the end, with the end as its deadline."""
    end = time.time() + 60.2
    with Watched(SlurmEnd(end, lead_s=60, every_s=0.01)) as watched:
        assert watched.next() == Notice("Slurm's time limit", end)
        assert time.time() >= end - 60


def test_an_end_of_slurms_in_the_past_is_no_notice(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time limit of yesterday's allocation, still in the environment, is ignored, and said."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with (
        Watched(SlurmEnd(time.time() - 86_400, every_s=0.01)) as watched,
        Watched(SlurmEnd(time.time() + 0.2, lead_s=0.2, every_s=0.01)) as of_today,
    ):
        assert of_today.next() is not None
    assert watched.source is not None  # and has said nothing, as leaving the block has checked
    assert "Slurm's time limit was over 86400 s ago" in caplog.text


@pytest.mark.parametrize(
    ("squeue", "notices"),
    [
        ("echo $(( $(date +%s) + 600 ))", 0),  # the limit was extended
        ("echo NONE", 0),  # and taken away
        ("exit 1", 1),  # Slurm does not say: what is known holds
        ("true", 1),
    ],
)
def test_slurm_is_asked_again_before_a_notice(
    squeue: str, notices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job whose limit was extended goes on; where Slurm does not answer, the notice comes."""
    asked = tmp_path / "asked"
    program = tmp_path / "squeue"
    program.write_text(f'#!/bin/sh\necho "$SLURM_TIME_FORMAT $*" >> {asked}\n{squeue}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    end = time.time() + 50
    with Watched(SlurmEnd(end, lead_s=60, every_s=0.01)) as watched:
        wait_until(lambda: asked.exists() and asked.read_text())
        for _ in range(notices):
            assert watched.next() == Notice("Slurm's time limit", end)
    assert asked.read_text() == "%s --noheader --jobs=77 --format=%e\n"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"reason": OSError("gone")}, "reason=OSError('gone'): expected a text, found a OSError"),
        ({"deadline_unix_s": np.float32(7)}, "expected seconds since 1970 as a float, or None"),
        ({"deadline_unix_s": True}, "deadline_unix_s=True: expected seconds since 1970"),
    ],
)
def test_a_notice_that_cannot_be_passed_on_is_refused(
    fields: dict[str, Any], sentence: str
) -> None:
    """Where it is made: the other processes are told as JSON, on a thread that could only log."""
    with pytest.raises(TypeError, match=re.escape(sentence)):
        Notice(**{"reason": "mine"} | fields)
    assert Notice("mine", np.float64(7)) == Notice("mine", 7)
