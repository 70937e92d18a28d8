"""A coordinator that is killed and restarted with its journal is itself again."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.coordination import CoordinationClient, CoordinationError, CoordinationService
from tests.support.cluster import Processes

OUR_STEPS = """
import sys
from holdfast.coordination import CoordinationClient
index, count, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
client = CoordinationClient(address, index)
client.connect()
for step in range(200):
    client.wait_at_barrier(f"step/{step % 7}", 60_000)
    client.key_value_set(f"came/{step}/{index}", "1", allow_overwrite=True)
    if step % 50 == 0:
        print("step", step, flush=True)
client.wait_at_barrier("end", 60_000)
print("keys", len(client.key_value_dir_get("came")), flush=True)
client.shutdown()
"""

JAX_STEPS = """
import sys, time
import jax
index, count, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
jax.config.update("jax_enable_recoverability", True)
jax.distributed.initialize(address, count, index, heartbeat_timeout_seconds=1000)
from jax._src import distributed
client = distributed.global_state.client
for step in range(200):
    deadline = time.monotonic() + 60
    while True:
        try:
            client.wait_at_barrier(f"step/{step % 7}", 60_000)
            break
        except jax.errors.JaxRuntimeError as error:
            assert "UNAVAILABLE" in str(error) and time.monotonic() < deadline, error
            time.sleep(0.05)
    if step % 50 == 0:
        print("step", step, flush=True)
print("all steps", flush=True)
jax.distributed.shutdown()
"""


@contextmanager
def restarted_in_the_middle(script: str, journal: Path, count: int = 3) -> Iterator[list[str]]:
    """Runs `script` on `count` processes, kills the coordinator at step 100, restarts it on its port, and yields the outputs."""
    options = {"journal": str(journal), "recoverable": True, "survivable": True}
    with CoordinationService.spawn(count, **options) as first:  # type: ignore[arg-type]
        port = int(first.address.rsplit(":", 1)[1])
        env = {"JAX_COORDINATOR_BIND_ADDRESS": "127.0.0.1:0"}
        with Processes(script, count, arguments=[first.address], env=env) as processes:
            processes.wait_for(0, "step 100")
            os.kill(first.pid, signal.SIGKILL)
            assert first.wait(10) == -signal.SIGKILL
            with CoordinationService.spawn(count, port=port, **options) as second:  # type: ignore[arg-type]
                finished = processes.wait(90)
                assert [each.code for each in finished] == [0] * count, [each.output for each in finished]
                assert second.wait(30) == 0
            yield [each.output for each in finished]


def test_our_clients_ride_through_a_restart(tmp_path: Path) -> None:
    """SIGKILL and restart in the middle of 200 steps with a barrier each: the job finishes, no barrier is lost or doubled, no key lost."""
    with restarted_in_the_middle(OUR_STEPS, tmp_path / "journal") as outputs:
        assert all(f"keys {200 * 3}" in output for output in outputs), outputs


def test_unmodified_jax_clients_live_through_a_restart(tmp_path: Path) -> None:
    """The same with jaxlib's clients, which must ask again (UNAVAILABLE) while there is no coordinator: none of them aborts."""
    with restarted_in_the_middle(JAX_STEPS, tmp_path / "journal") as outputs:
        assert all("all steps" in output for output in outputs), outputs


def test_a_job_that_has_finished_leaves_an_empty_journal(tmp_path: Path) -> None:
    """The next run on the same journal begins anew, with nothing of the last."""
    journal = str(tmp_path / "journal")
    for _ in range(2):
        with CoordinationService.spawn(1, journal=journal, recoverable=True) as service:
            client = CoordinationClient(service.address, 0)
            client.connect()
            client.key_value_set("once", "1")
            client.shutdown()
            assert service.wait(30) == 0


def test_a_second_coordinator_on_the_journal_is_refused_by_name(tmp_path: Path) -> None:
    """It exits, naming the first: address, host and process id."""
    journal = str(tmp_path / "journal")
    with CoordinationService.spawn(2, journal=journal) as first:
        with pytest.raises(CoordinationError, match=rf"held by the coordinator at {first.address} \(host .*, pid {first.pid}\)"):
            CoordinationService.spawn(2, journal=journal)


def test_a_journal_of_another_job_is_refused(tmp_path: Path) -> None:
    """Job, attempt and number of processes must be those that the journal was begun with."""
    journal = str(tmp_path / "journal")
    with CoordinationService.spawn(2, journal=journal, job="a", attempt=1):
        pass
    for job, attempt, count in (("b", 1, 2), ("a", 2, 2), ("a", 1, 3)):
        with pytest.raises(CoordinationError, match="of another job: expected job"):
            CoordinationService.spawn(count, journal=journal, job=job, attempt=attempt)


@pytest.mark.parametrize("content", [b"not a database" * 100, b"\x00" * 5000])
def test_a_file_that_is_no_journal_is_refused(tmp_path: Path, content: bytes) -> None:
    """A foreign file is left as it is, with one sentence."""
    journal = tmp_path / "journal"
    journal.write_bytes(content)
    with pytest.raises(CoordinationError, match="not a journal of a coordinator"):
        CoordinationService.spawn(2, journal=str(journal))
    assert journal.read_bytes() == content


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    """The journal's path and the reason are named."""
    with pytest.raises(CoordinationError, match=r"cannot be opened: No such file or directory; expected a folder that can be written"):
        CoordinationService.spawn(2, journal=str(tmp_path / "none" / "journal"))
