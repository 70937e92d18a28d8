"""One question for all viewers, and the diagnosis beside it."""

from __future__ import annotations

import json
import queue
import sys
import threading
from pathlib import Path

import pytest

from holdfast.coordination import CoordinationService, Credentials, JobIdentity
from holdfast.coordination.process.job_folder import LaunchedJob
from holdfast.web import feed
from holdfast.web.feed import CoordinatorAddress, Feed
from tests.support.pages import processes


def test_a_feed_finds_the_job_wherever_it_is() -> None:
    """No coordinator, then one, then none: each is said, and what was known stays."""
    published: queue.SimpleQueue[str] = queue.SimpleQueue()
    target: list[CoordinatorAddress | None] = [None]
    with Feed(lambda: target[0], published.put) as feed:
        first = json.loads(published.get(timeout=30))
        assert (
            first["gone"].startswith("the job has no coordinator now")
            and feed.stacks(0) == "there is no coordinator now"
        )
        with CoordinationService.spawn(1, job=JobIdentity(name="j")) as service:
            target[0] = CoordinatorAddress(service.address, Credentials())
            while (shown := json.loads(published.get(timeout=30)))["gone"]:
                pass
            assert shown["job"] == "j" and shown["phase"] == "gathering"
            target[0] = None
            while not (shown := json.loads(published.get(timeout=30)))["gone"]:
                pass
            assert shown["job"] == "j"


def test_the_processes_of_a_range_are_as_the_snapshot_has_them() -> None:
    """Of a job that is gone nothing is told as if it were of now."""
    published: queue.SimpleQueue[str] = queue.SimpleQueue()
    target: list[CoordinatorAddress | None] = [None]
    with (
        CoordinationService.spawn(1, recoverable=True) as service,
        processes(service, 1) as clients,
        Feed(lambda: target[0], published.put) as feed,
    ):
        clients[0].report(step=3)
        target[0] = CoordinatorAddress(service.address, Credentials())
        while (shown := json.loads(published.get(timeout=30)))["gone"]:
            pass
        assert json.loads(feed.range(0))[0]["heard_s"] is not None
        target[0] = None
        while not (shown := json.loads(published.get(timeout=30)))["gone"]:
            pass
        assert json.loads(feed.range(0)) == shown["processes"]
        assert shown["processes"][0]["heard_s"] is None


def test_a_token_that_is_no_text_is_said(tmp_path: Path) -> None:
    """Each time, until it is one."""
    published: queue.SimpleQueue[str] = queue.SimpleQueue()
    (tmp_path / "token").write_bytes(b"\xff")
    target = CoordinatorAddress("127.0.0.1:1", Credentials(token_file=str(tmp_path / "token")))
    with Feed(lambda: target, published.put):
        for _ in range(2):
            assert (
                "token holds no token: expected one line of ASCII"
                in json.loads(published.get(timeout=30))["gone"]
            )


def test_the_diagnosis_comes_by_itself() -> None:
    """Who is missed at a barrier is found, with the place of those that answer, without a question
    of a viewer.
    """
    published: queue.SimpleQueue[str] = queue.SimpleQueue()
    with (
        CoordinationService.spawn(2, recoverable=True) as service,
        processes(service, 2) as clients,
    ):
        waiting = threading.Thread(target=clients[0].wait_at_barrier, args=("save/100", 60_000))
        waiting.start()
        with Feed(lambda: CoordinatorAddress(service.address, Credentials()), published.put):
            while not (shown := json.loads(published.get(timeout=30)))["findings"]:
                pass
            later = [json.loads(published.get(timeout=30)) for _ in range(3)]
        # The seconds go on, though processes are asked every ten seconds only.
        assert len({each["findings"][0]["text"] for each in (shown, *later)}) > 2
        assert shown["findings"][0]["text"].startswith(
            "process 1 (host b1) has not come to barrier 'save/100'"
        ), shown["findings"]
        clients[1].wait_at_barrier("save/100", 60_000)
        waiting.join(30)


def test_a_launcher_speaks_where_no_coordinator_does(tmp_path: Path) -> None:
    """A job waits for machines, and is over: neither needs a coordinator to be told."""
    published: queue.SimpleQueue[str] = queue.SimpleQueue()
    waiting = {
        "state": "scheduling",
        "waiting_for": "room for 1 of 2 processes",
        "attempts": [{"number": 1, "why": "start"}],
        "field_of_a_later_version": 1,
    }
    word = [LaunchedJob("j", 1, str(tmp_path), waiting, "")]
    (tmp_path / "process-0.log").write_text("a line\n" * 500 + "the \x1b[31mlast\n")
    with Feed(lambda: None, published.put, lambda job: word[0]) as feed:
        first = json.loads(published.get(timeout=30))["verdict"]
        attempts = json.loads(published.get(timeout=30))["attempts"]
        assert [attempt["number"] for attempt in attempts] == [1]
        assert (first["state"], first["text"]) == (
            "Waiting for machines",
            "room for 1 of 2 processes",
        )
        lines = feed.log(0).splitlines()
        assert len(lines) == 200 and lines[-1] == "the \\x1b[31mlast"
        assert feed.log(1) == f"{tmp_path}/process-1.log: No such file or directory"
        word[0] = LaunchedJob("j", 1, "", {"state": "finished", "why": "all are done"}, "")
        while (shown := json.loads(published.get(timeout=30))["verdict"])["state"] != "Finished":
            pass
        assert shown["over"] and shown["text"] == "all are done"
        assert feed.log(0).endswith("see --log-dir")


def test_a_job_that_ends_is_not_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its coordinator is gone before its launcher has said how it ended; one that stays away is
    told.
    """
    published: queue.SimpleQueue[str] = queue.SimpleQueue()
    target: list[CoordinatorAddress | None] = [None]
    running = {"state": "running", "why": "attempt 1 starts"}
    word: list[LaunchedJob | None] = [LaunchedJob("j", 1, "", running, "")]
    with CoordinationService.spawn(1) as service:
        target[0] = CoordinatorAddress(service.address, Credentials())
        with Feed(lambda: target[0], published.put, lambda job: word[0]):
            while json.loads(published.get(timeout=30))["gone"]:
                pass
            target[0] = None
            looks = [json.loads(published.get(timeout=30)) for _ in range(3)]
            word[0] = None  # it has taken its word back, and leaves the last one now
            looks += [json.loads(published.get(timeout=30)) for _ in range(2)]
            assert {shown["verdict"]["state"] for shown in looks} == {"Starting"}
            monkeypatch.setattr(feed, "_PASSING_S", 0.0)
            while (shown := json.loads(published.get(timeout=30)))["gone"] == "":
                pass
            assert shown["verdict"]["state"] == "Out of reach"


def test_the_history_of_a_process_is_bounded() -> None:
    """Each question to the coordinator adds a point; nobody's history is empty."""
    published: queue.SimpleQueue[str] = queue.SimpleQueue()
    with (
        CoordinationService.spawn(1, recoverable=True) as service,
        processes(service, 1) as clients,
        Feed(lambda: CoordinatorAddress(service.address, Credentials()), published.put) as feed,
    ):
        clients[0].report(step=3, memory_bytes=1024.0)
        while len(json.loads(feed.history(0))) < 2 or json.loads(feed.history(0))[-1][1] < 0:
            published.get(timeout=30)
        point = json.loads(feed.history(0))[-1]
        assert point[2:] == [1024.0, -1.0]
        assert feed.history(7) == "[]"


def test_a_history_is_read_while_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A viewer asks from a thread of its own; no answer breaks, and each is whole."""
    monkeypatch.setattr(feed, "_INTERVAL_S", 0.0)
    published: queue.SimpleQueue[str] = queue.SimpleQueue()
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with (
            CoordinationService.spawn(1) as service,
            Feed(lambda: CoordinatorAddress(service.address, Credentials()), published.put) as it,
        ):
            points: list[list[float]] = []
            while len(points) < 300:
                points = json.loads(it.history(0))
                assert all(len(point) == 4 for point in points)
    finally:
        sys.setswitchinterval(interval_s)


def test_another_job_at_the_address_begins_anew() -> None:
    """Its curve has nothing of the job before, nor have its processes."""
    published: queue.SimpleQueue[str] = queue.SimpleQueue()
    target: list[CoordinatorAddress | None] = [None]
    with (
        CoordinationService.spawn(1, job=JobIdentity(name="before")) as before,
        CoordinationService.spawn(1, job=JobIdentity(name="after")) as after,
        processes(before, 1) as clients,
        Feed(lambda: target[0], published.put) as it,
    ):
        clients[0].report(step=7)
        target[0] = CoordinatorAddress(before.address, Credentials())
        while not any(point[1] == 7 for point in json.loads(published.get(timeout=30))["samples"]):
            pass
        target[0] = CoordinatorAddress(after.address, Credentials())
        while (shown := json.loads(published.get(timeout=30)))["job"] != "after":
            pass
        assert all(point[1] < 0 for point in shown["samples"])
        assert len(json.loads(it.history(0))) <= 2
