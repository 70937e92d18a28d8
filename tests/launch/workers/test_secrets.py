"""What a job that leaves the machine proves itself by: made for it alone, shown by relays, seen by
nobody else.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.coordination import CoordinationError, Credentials, StatusClient
from holdfast.coordination.process.job_folder import JobFolder, job_folders
from holdfast.launch.supervisor.job import RestartPolicy
from holdfast.launch.workers.coordinator import Coordinator
from holdfast.launch.workers.secrets import JobSecrets, spawn_relay
from tests.launch.workers.test_progress_watch import new_watch
from tests.support.cluster import run_processes
from tests.support.jax_program import BIND, JAX_PROGRAM, preempted_at
from tests.support.paths import program

LOOPBACK = "127.0.0.1"


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, short_path: Path) -> None:
    """Coordinators of other tests lie elsewhere."""
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))


@pytest.fixture
def coordinator(own_folder: None) -> Iterator[Coordinator]:
    """The secured coordinator of a job of four."""
    found = Coordinator("j", 1, 4, host=LOOPBACK, secrets=JobSecrets.create([LOOPBACK]))
    yield found
    found.close()


@pytest.mark.slow
def test_unmodified_jax_runs_behind_two_relays(coordinator: Coordinator) -> None:
    """Four processes, two at each relay, hold no secret; the launcher, which holds them, reads
    progress and notices.
    """
    assert coordinator.secrets is not None
    watching = new_watch(
        coordinator.address,
        1,
        lambda event: None,
        coordinator.credentials,
        policy=RestartPolicy(),
        say=print,
    )
    with contextlib.closing(watching) as watch:
        with (
            spawn_relay(coordinator.address, coordinator.secrets, [0, 1]) as one,
            spawn_relay(coordinator.address, coordinator.secrets, [2, 3]) as two,
        ):
            outputs = run_processes(
                JAX_PROGRAM,
                4,
                env=BIND,
                env_of=lambda index: {
                    "JAX_COORDINATOR_ADDRESS": (one if index < 2 else two).address
                },
            )
            assert len(preempted_at(outputs)) == 1, outputs
            assert len(job_folders()) == 1, "the coordinator's"
        watch.refresh()
        assert watch.joined == {0, 1, 2, 3}


def test_a_stranger_gets_nothing() -> None:
    """Neither without certificates nor with those of another job."""
    own, other = (
        Coordinator("j", 1, 1, host=LOOPBACK, secrets=JobSecrets.create([LOOPBACK]))
        for _ in range(2)
    )
    try:
        for credentials in (Credentials(), other.credentials):
            with (
                StatusClient(own.address, credentials, timeout_s=2) as client,
                pytest.raises(CoordinationError),
            ):
                client.status()
        with StatusClient(own.address, own.credentials) as client:
            assert client.status().job == "j"
    finally:
        own.close()
        other.close()


def test_secrets_go_by_environment_or_by_files() -> None:
    """What a task takes out of its environment is what was put in, without what only the
    coordinator needs.
    """
    secrets = JobSecrets.create(["host", "10.0.0.1"])
    environment = {"A": "b"} | secrets.to_env()
    assert secrets.server_key not in str(environment)
    taken = JobSecrets.take_from_env(environment)
    assert (
        taken is not None
        and taken.files_of_client() == secrets.files_of_client()
        and environment == {"A": "b"}
    )
    assert JobSecrets.take_from_env(environment) is None
    folder = JobFolder.create()
    try:
        for name, content in secrets.files_of_client().items():
            (folder.path / name).write_text(content)
        assert JobSecrets.from_folder(folder.path) == taken
    finally:
        folder.remove()
    assert secrets.token not in repr(secrets)


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_another_user_sees_no_secret() -> None:
    """The user nobody reads arguments, environments and temporary folders of coordinator and relay,
    and finds no token, key or PEM.
    """
    with contextlib.closing(
        Coordinator("j", 1, 1, host=LOOPBACK, secrets=JobSecrets.create([LOOPBACK]))
    ) as coordinator:
        _look_for_secrets(coordinator)


def _look_for_secrets(coordinator: Coordinator) -> None:
    secrets = coordinator.secrets
    assert secrets is not None
    with spawn_relay(coordinator.address, secrets, [0]) as relay:
        with StatusClient(relay.address) as client:
            assert client.status().job == "j", "its own user asks by the relay"
        (folder,) = [
            each.path
            for each in job_folders()
            if (job := each.job()) is not None and job.pid == coordinator.pid
        ]
        pids = f"{coordinator.pid},{relay.pid}"
        seen = subprocess.run(
            [sys.executable, "-S", program("look_for_secrets"), pids, str(folder.parent)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert "coordinator" in seen, "it saw the arguments, which all may see"
        for secret in (secrets.token, secrets.key, "PRIVATE KEY", "BEGIN CERTIFICATE"):
            assert secret not in seen
        assert {
            path.stat().st_mode & 0o077 for path in folder.iterdir() if path.name not in ("job",)
        } == {0}


def test_without_cryptography_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before anything is started."""
    monkeypatch.setitem(sys.modules, "cryptography.x509", None)
    with pytest.raises(
        ImportError, match=r"need cryptography: pip install 'holdfast-jax\[tls\]', or --insecure"
    ):
        JobSecrets.create(["h"])


def test_a_relay_that_cannot_start_leaves_no_folder() -> None:
    """Nothing of the secrets stays on the disk of a host, whether its relay started or not."""
    secrets = JobSecrets("", "", "", "", "", "", "")
    with pytest.raises(CoordinationError, match="is empty"):
        spawn_relay("127.0.0.1:1", secrets, [0])
    assert job_folders() == []
