"""One question for all viewers, and the diagnosis beside it."""

from __future__ import annotations

import json
import queue
import threading

from holdfast.coordination import CoordinationService, Credentials, JobIdentity
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
        assert shown["findings"][0]["text"].startswith(
            "process 1 (host b1) has not come to barrier 'save/100'"
        ), shown["findings"]
        clients[1].wait_at_barrier("save/100", 60_000)
        waiting.join(30)
