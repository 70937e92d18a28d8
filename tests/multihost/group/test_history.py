"""How often a job has failed, as its coordinator knows it from the launcher."""

from __future__ import annotations

import pytest

from holdfast.coordination import CoordinationService, JobIdentity, StatusClient
from holdfast.multihost.group import history
from holdfast.multihost.group.history import JobHistory, job_history
from holdfast.multihost.spec import ProcessSpec
from holdfast.proto import session_pb2


def test_the_launcher_accounts_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The starts after the first are failures; without a launcher, a coordinator or a job nothing
    is known.
    """
    assert job_history() is None
    job = JobIdentity(name="j", attempt=4)
    with CoordinationService.spawn(1, job=job) as service:
        spec = ProcessSpec(process_id=0, num_processes=1, coordinator=service.address)
        monkeypatch.setattr(history, "current_spec", lambda: spec)
        assert job_history() is None
        with StatusClient(service.address, spec.new_credentials()) as client:
            client.report_launcher(session_pb2.Launcher(), {"stepping_s": 70.0, "saving_s": 2.0})
        assert job_history() == JobHistory(3, 72.0)
    assert job_history() is None
