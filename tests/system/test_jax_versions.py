"""jax 0.9 speaks profile B: alone, and in one cluster with the installed jax over profile A."""

from __future__ import annotations

import fcntl
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from holdfast.coordination import CoordinationService, Relay
from tests.support.cluster import Processes, run_processes
from tests.support.jax_program import BIND, JAX_PROGRAM, preempted_at
from tests.support.paths import ROOT, program
from tests.support.secured import secure

KEYS_AND_BARRIERS = program("jax_versions_keys_and_barriers")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture(scope="module")
def old_python() -> str:
    """Makes (once) a virtual environment with jax 0.9 under build/, and returns its interpreter."""
    folder = ROOT / "build" / "venvs" / "jax-0.9"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "jax-0.9.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / ".ready").exists():
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            subprocess.run(
                [
                    folder / "bin" / "python",
                    "-m",
                    "pip",
                    "install",
                    "-q",
                    "--disable-pip-version-check",
                    "jax==0.9.*",
                ],
                check=True,
            )
            (folder / ".ready").touch()
    return str(folder / "bin" / "python")


@pytest.mark.slow
def test_jax_0_9_runs_on_four_processes(old_python: str) -> None:
    """Every path of jax.distributed over profile B."""
    with CoordinationService.spawn(4) as service:
        outputs = run_processes(
            JAX_PROGRAM, 4, arguments=[service.address], env=BIND, python=old_python
        )
        assert len(preempted_at(outputs)) == 1 and all(
            "jax 0.9." in output for output in outputs
        ), outputs
        assert service.wait(20) == 0


@pytest.mark.slow
def test_jax_0_9_runs_through_a_relay(old_python: str, tmp_path: Path) -> None:
    """The same against mTLS and token: an agent of profile B takes a relay's socket for an address,
    too.
    """
    security = secure(tmp_path)
    with CoordinationService.spawn(4, arguments=security.arguments) as service:
        with Relay.spawn(service.address, security.member(), range(4)) as relay:
            outputs = run_processes(
                JAX_PROGRAM, 4, arguments=[relay.address], env=BIND, python=old_python
            )
            assert len(preempted_at(outputs)) == 1 and all(
                "jax 0.9." in output for output in outputs
            ), outputs
            assert service.wait(20) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [KEYS_AND_BARRIERS, JAX_PROGRAM], ids=["keys and barriers", "the full jax path"]
)
@pytest.mark.parametrize("first", ["jax 0.9", "the installed jax"])
def test_two_profiles_are_one_cluster(old_python: str, program: str, first: str) -> None:
    """Two processes of jax 0.9 and two of the installed jax share keys, barriers, the live set,
    device collectives, the sync point and the shutdown, whichever has process 0. (On jaxlib's own
    service the other half aborts: it does not speak its profile.)
    """
    pythons = [old_python, sys.executable] if first == "jax 0.9" else [sys.executable, old_python]
    with CoordinationService.spawn(4) as service, ExitStack() as stack:
        halves = [
            stack.enter_context(
                Processes(
                    program, 2, arguments=[service.address, 2 * half, 4], env=BIND, python=python
                )
            )
            for half, python in enumerate(pythons)
        ]
        finished = [each for half in halves for each in half.wait()]
        outputs = [each.output for each in finished]
        assert [each.code for each in finished] == [0] * 4, outputs
        if program is JAX_PROGRAM:
            assert len(preempted_at(outputs)) == 1 and len(set(versions(outputs))) == 2, outputs
        assert service.wait(20) == 0


def versions(outputs: list[str]) -> list[str]:
    """Returns the version of jax that each process has printed."""
    return [line for output in outputs for line in output.splitlines() if line.startswith("jax ")]


JOIN = program("jax_versions_join")


@pytest.mark.slow
def test_jaxlibs_own_service_has_no_such_cluster(old_python: str) -> None:
    """The same two halves over the service inside jaxlib, in process 0: each process aborts."""
    with ExitStack() as stack:
        address = f"127.0.0.1:{free_port()}"
        halves = [
            stack.enter_context(Processes(JOIN, 2, arguments=[address, 2 * half, 4], python=python))
            for half, python in enumerate([old_python, sys.executable])
        ]
        finished = [each for half in halves for each in half.wait()]
    assert all(each.code == -signal.SIGABRT for each in finished), finished
