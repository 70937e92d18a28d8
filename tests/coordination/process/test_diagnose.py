"""The evidence of a diagnosis: no stacks of a job that gets on, samples of one that does not."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.coordination import (
    CoordinationClient,
    CoordinationError,
    CoordinationService,
    Endpoint,
    StatusClient,
)
from holdfast.coordination.diagnosis.stacks import parse
from holdfast.coordination.process.diagnose import gather, whom_to_ask
from holdfast.proto import session_pb2
from tests.support.cluster import free_port


def test_stacks_are_sampled_where_they_are_called_for() -> None:
    """A healthy job costs one status. With stacks, each process that has a Session is sampled
    several times; one that left is not asked.
    """
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(CoordinationService.spawn(2, recoverable=True))
        clients = [CoordinationClient(service.address, process_id) for process_id in range(2)]
        for client in clients:
            stack.callback(client.close)
        threads = [threading.Thread(target=client.connect) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        with StatusClient(service.address) as status:
            healthy = gather(status)
            assert (len(healthy.status.tasks), healthy.stacks, healthy.looks) == (2, {}, {})
            clients[1].shutdown()
            evidence = gather(status, with_stacks=True)
        assert list(evidence.stacks) == [0]
        assert len(evidence.stacks[0]) == 4
        assert parse(evidence.stacks[0][0])[0].name == "MainThread"
        clients[0].shutdown()


class _Restarting(StatusClient):
    """Calls `restart` before it asks for stacks."""

    restart: Callable[[], object]

    def stacks(self, *what: Any, **how: Any) -> list[str | CoordinationError]:
        self.restart()
        return super().stacks(*what, **how)


def test_a_coordinator_that_is_restarted_meanwhile_blames_nobody(tmp_path: Path) -> None:
    """Its new status stands alone: no answer to the former one counts."""
    options: dict[str, Any] = {
        "endpoint": Endpoint(port=free_port()),
        "journal": str(tmp_path / "journal"),
        "recoverable": True,
    }
    with contextlib.ExitStack() as stack:
        former = stack.enter_context(CoordinationService.spawn(1, **options))
        client = stack.enter_context(CoordinationClient(former.address, 0))
        looker = stack.enter_context(_Restarting(former.address, wait_for_ready=True))

        def restart() -> None:
            os.kill(former.pid, signal.SIGKILL)
            former.close()
            stack.enter_context(CoordinationService.spawn(1, **options))
            looker.restart = lambda: None

        looker.restart = restart
        evidence = gather(looker, with_stacks=True)
        assert (len(evidence.status.tasks), evidence.stacks, evidence.looks) == (1, {}, {})
        client.shutdown()


def test_of_thousands_64_are_asked_for_stacks() -> None:
    """Those that are missed at a barrier, behind or silent for longest, and 16 others to compare
    them with, spread over all; of 64, all.
    """
    status = session_pb2.StatusResponse()
    for process in range(4_096):
        behind = process in (7, 4_000)
        status.tasks.add(
            task_id=process,
            heartbeat_age_s=30.0 if process % 1_000 == 500 else 1.0,
            progress=session_pb2.ReportRequest(step=90 if behind else 100),
        )
    status.barriers.add(barrier_id="b", missing=[3_001, 3_002])
    asked = whom_to_ask(status, status.tasks)
    assert len(asked) == 64 and asked == sorted(set(asked))
    assert {7, 500, 1_500, 2_500, 3_001, 3_002, 3_500, 4_000} <= set(asked)
    assert max(asked) - min(asked) > 3_000
    assert whom_to_ask(status, status.tasks[:64]) == list(range(64))
