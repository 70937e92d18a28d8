"""Who waits for the exception of one process, and ends it where it does not end."""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from holdfast.coordination import CoordinationClient, JobIdentity, Timeouts
from holdfast.coordination.names import RAISED_FOLDER
from holdfast.coordination.vitals import ENDS_WITH
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
            clients[process].key_value_set(f"{RAISED_FOLDER}/{process}", words)
        assert watch.said() == "ValueError: of 1"
        with pytest.raises(queue.Empty):
            ended.get(timeout=1.5)
        clients[1].report(save_stage=SaveStage.SETTLED)
        assert ended.get(timeout=30) == "ValueError: of 1"
