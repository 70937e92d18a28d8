"""A coordinator that is killed and restarted with its journal is itself again."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import signal
import stat
from pathlib import Path
from typing import Any

import grpc
import pytest

from holdfast.coordination import (
    CoordinationClient,
    CoordinationError,
    CoordinationService,
    CoordinatorLost,
    Endpoint,
    JobIdentity,
    ServiceTimeouts,
    StatusClient,
)
from holdfast.coordination.address import connect
from holdfast.coordination.names import PROFILE_B
from holdfast.coordination.wire.frames import PREAMBLE
from holdfast.proto import coordination_b_pb2
from tests.support.cluster import free_port
from tests.support.processes import wait_until


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


def test_nobody_else_reads_a_journal(tmp_path: Path) -> None:
    """It holds the job's keys: its files are of mode 0600, also one that was there before."""
    journal = tmp_path / "journal"
    journal.touch(mode=0o644)
    with CoordinationService.spawn(1, journal=str(journal)):
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(("journal", "journal.lock", "journal-wal"), 0o600)


def test_a_full_disk_removes_the_journal(tmp_path: Path) -> None:
    """A stale one would repeat what is over: the coordinator goes on without it, says so, and
    writes a whole new one once there is room.
    """
    journal = tmp_path / "journal"
    endpoint = Endpoint(port=free_port())
    options: dict[str, Any] = {"endpoint": endpoint, "journal": str(journal), "recoverable": True}
    service = CoordinationService.spawn(1, **options)
    with StatusClient(service.address) as status, CoordinationClient(service.address, 0) as client:
        client.key_value_set("keys/before", "1")
        resource.prlimit(service.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        client.key_value_set("keys/meanwhile", "2")
        client.wait_at_barrier("once", 5_000)
        assert not journal.exists()
        assert f"{journal} is not written: " in status.status().journal
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(service.pid, resource.RLIMIT_FSIZE, unlimited)
        wait_until(lambda: status.status().journal == str(journal))
        client.key_value_set("keys/after", "3")
        os.kill(service.pid, signal.SIGKILL)
        service.close()
        with CoordinationService.spawn(1, **options):
            names = [name for name, _ in client.key_value_dir_get("keys")]
            assert names == ["keys/after", "keys/before", "keys/meanwhile"]
            client.wait_at_barrier("once", 5_000)
            client.shutdown()


def test_a_journal_that_can_be_neither_written_nor_removed_ends_the_coordinator(
    tmp_path: Path,
) -> None:
    """What the journal does not hold is not answered."""
    options: dict[str, Any] = {
        "endpoint": Endpoint(port=free_port()),
        "journal": str(tmp_path / "journal"),
        "recoverable": True,
        "timeouts": ServiceTimeouts(heartbeat_s=2),
    }
    with CoordinationService.spawn(1, **options) as service:
        client = CoordinationClient(service.address, 0)
        client.connect()
        (tmp_path / "journal-shm").mkdir()  # which no unlink removes
        resource.prlimit(service.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        with pytest.raises(CoordinatorLost, match="has been silent"):
            client.key_value_set("key", "1")
        assert service.wait(20) == 1
        client.close()


def test_what_is_answered_while_a_coordinator_stops_is_in_its_journal(tmp_path: Path) -> None:
    """A client that does not leave keeps it for a second, in which agents still call."""
    options: dict[str, Any] = {
        "endpoint": Endpoint(port=free_port()),
        "journal": str(tmp_path / "journal"),
        "recoverable": True,
    }
    answered: list[str] = []
    with (
        CoordinationService.spawn(1, **options) as first,
        CoordinationClient(first.address, 0) as client,
        connect(first.address, 20) as staying,
        grpc.insecure_channel(first.address) as channel,
    ):
        staying.sendall(PREAMBLE)
        assert staying.recv(len(PREAMBLE)) == PREAMBLE
        insert = channel.unary_unary(PROFILE_B + "InsertKeyValue")
        with contextlib.suppress(grpc.RpcError):
            for number in itertools.count():
                key = f"keys/{number:06}"
                request = coordination_b_pb2.InsertKeyValueRequest(kv={"key": key})
                insert(request.SerializeToString(), timeout=20)
                answered.append(key)
                if number == 0:
                    os.kill(first.pid, signal.SIGINT)
        assert first.wait(20) == -signal.SIGINT
        with CoordinationService.spawn(1, **options):
            found = [key for key, _ in client.key_value_dir_get("keys")]
            assert found[: len(answered)] == answered
            client.shutdown()
