"""Who waits for the exception of one process, and ends it where it does not end."""

from __future__ import annotations

import queue
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from holdfast.coordination import (
    CoordinationClient,
    CoordinationService,
    JobIdentity,
    StatusClient,
    Timeouts,
)
from holdfast.coordination.names import LAST_WORDS
from holdfast.coordination.vitals import ENDS_WITH
from holdfast.launch.workers import raised
from holdfast.launch.workers.coordinator import Coordinator
from holdfast.launch.workers.raised import Grace, RaisedWatch
from holdfast.multihost.group.group import SaveStage


def test_one_process_is_waited_for() -> None:
    """The exception of another is nothing to its watch. A save of its own that is in flight is
    ended first.
    """
    ended: queue.Queue[str] = queue.Queue()
    with ExitStack() as stack:
        coordinator = Coordinator("j", 1, 2)
        stack.callback(coordinator.close)
        watch = RaisedWatch(coordinator.address, 1, ended.put, Grace(0.0, 600.0))
        stack.callback(watch.close)
        job = JobIdentity(num_processes=2, name="j", attempt=1)
        clients = [
            CoordinationClient(
                coordinator.address, process, job=job, timeouts=Timeouts(shutdown_s=2)
            )
            for process in range(2)
        ]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda client: client.connect(), clients))
        for client in clients:
            stack.callback(client.close)
        clients[1].report(save=1, save_stage=SaveStage.WRITING)
        for process in range(2):
            assert watch.said() == ""
            words = f"{ENDS_WITH}ValueError: of {process}\nmore"
            clients[process].key_value_set(f"{LAST_WORDS}/{process}", words)
        assert watch.said() == "ValueError: of 1"
        with pytest.raises(queue.Empty):
            ended.get(timeout=1.5)
        clients[1].report(save_stage=SaveStage.SETTLED)
        assert ended.get(timeout=30) == "ValueError: of 1"


def test_what_a_former_life_has_said_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launcher has reported its end, or the job has begun anew: the next life is not ended for
    it, and has all its time once it raises itself.
    """
    monkeypatch.setattr(raised, "_LOOK_S", 0.05)
    ended: queue.Queue[str] = queue.Queue()
    with CoordinationService.spawn(2, recoverable=True) as service, ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(2))
        launcher = stack.enter_context(StatusClient(service.address))

        def live() -> list[CoordinationClient]:
            clients = [CoordinationClient(service.address, process) for process in range(2)]
            for client in clients:
                stack.callback(client.close)
            list(pool.map(lambda client: client.connect(), clients))
            return clients

        def watch() -> RaisedWatch:
            made = RaisedWatch(service.address, 1, ended.put, Grace(1.0, 600.0))
            stack.callback(made.close)
            return made

        former = live()
        former[1].key_value_set(f"{LAST_WORDS}/1", f"{ENDS_WITH}ValueError: of the first")
        early = watch()
        assert early.said() == "ValueError: of the first"
        for process, client in enumerate(former):
            client.close()
            launcher.report_exit(process, 1)
        assert watch().said() == ""
        first, second = live()
        with pytest.raises(queue.Empty):
            ended.get(timeout=1.5)
        second.key_value_set(f"{LAST_WORDS}/1", f"{ENDS_WITH}ValueError: of the second")
        raised_s = time.monotonic()
        assert ended.get(timeout=30) == ended.get(timeout=30) == "ValueError: of the second"
        assert time.monotonic() - raised_s >= 1.0
        assert first.key_value_try_get_bytes(f"{LAST_WORDS}/1")
