"""The evidence of a diagnosis: no stacks of a job that gets on, samples of one that does not."""

from __future__ import annotations

import threading

from holdfast.coordination import CoordinationClient, CoordinationService, StatusClient
from holdfast.coordination.diagnosis.stacks import parse
from holdfast.coordination.process.diagnose import gather


def test_stacks_are_sampled_where_they_are_called_for() -> None:
    """A healthy job costs one status. With stacks, each process that has a Session is sampled
    several times; one that left is not asked.
    """
    with CoordinationService.spawn(2, recoverable=True) as service:
        clients = [CoordinationClient(service.address, process_id) for process_id in range(2)]
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
        assert list(evidence.stacks) == [0] and len(evidence.stacks[0]) == 4
        assert parse(evidence.stacks[0][0])[0].name == "MainThread"
        clients[0].shutdown()
