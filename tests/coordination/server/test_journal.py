"""A coordinator that is killed and restarted with its journal is itself again."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.coordination import (
    CoordinationClient,
    CoordinationError,
    CoordinationService,
    JobIdentity,
)


def test_a_finished_job_leaves_an_empty_journal(tmp_path: Path) -> None:
    """The next run on the same journal begins anew, with nothing of the last."""
    journal = str(tmp_path / "journal")
    for _ in range(2):
        with CoordinationService.spawn(1, journal=journal, recoverable=True) as service:
            client = CoordinationClient(service.address, 0)
            client.connect()
            client.key_value_set("once", "1")
            client.shutdown()
            assert service.wait(30) == 0


def test_a_second_coordinator_is_refused_by_name(tmp_path: Path) -> None:
    """It exits, naming the first: address, host and process id."""
    journal = str(tmp_path / "journal")
    with CoordinationService.spawn(2, journal=journal) as first:
        with pytest.raises(
            CoordinationError,
            match=rf"held by the coordinator at {first.address} \(host .*, pid {first.pid}\)",
        ):
            CoordinationService.spawn(2, journal=journal)


def test_a_journal_of_another_job_is_refused(tmp_path: Path) -> None:
    """Job, attempt and number of processes must be those that the journal was begun with."""
    journal = str(tmp_path / "journal")
    with CoordinationService.spawn(2, job=JobIdentity(name="a", attempt=1), journal=journal):
        pass
    for job, attempt, count in (("b", 1, 2), ("a", 2, 2), ("a", 1, 3)):
        with pytest.raises(CoordinationError, match="of another job: expected job"):
            CoordinationService.spawn(
                count, job=JobIdentity(name=job, attempt=attempt), journal=journal
            )


@pytest.mark.parametrize("content", [b"not a database" * 100, b"\x00" * 5000])
def test_a_file_that_is_no_journal_is_refused(tmp_path: Path, content: bytes) -> None:
    """A foreign file is left as it is, with one sentence."""
    journal = tmp_path / "journal"
    journal.write_bytes(content)
    with pytest.raises(CoordinationError, match="not a journal of a coordinator"):
        CoordinationService.spawn(2, journal=str(journal))
    assert journal.read_bytes() == content


def test_a_folder_without_permission_is_an_error(tmp_path: Path) -> None:
    """The journal's path and the reason are named."""
    with pytest.raises(
        CoordinationError,
        match=r"cannot be opened: No such file or directory; expected a folder that can be written",
    ):
        CoordinationService.spawn(2, journal=str(tmp_path / "none" / "journal"))
