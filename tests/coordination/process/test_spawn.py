"""Coordinators as processes of their own: how they start, outlive their spawner, and end by
themselves.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.coordination import (
    CoordinationClient,
    CoordinationError,
    CoordinationService,
    Endpoint,
    ServiceTimeouts,
)
from holdfast.coordination.process.spawn import SpawnedServer, start
from tests.support.cluster import run_processes
from tests.support.paths import program


def test_nobody_came() -> None:
    """A coordinator that no process comes to ends by itself."""
    with CoordinationService.spawn(2, timeouts=ServiceTimeouts(startup_s=0.5)) as service:
        assert service.wait(20) == 0


def test_all_are_dead() -> None:
    """A coordinator ends once every process has stayed dead for the time that was stated."""
    with CoordinationService.spawn(
        1, timeouts=ServiceTimeouts(heartbeat_s=1, linger_s=1), recoverable=True
    ) as service:
        sudden = program("sudden_exit").read_text()
        run_processes(sudden, 1, arguments=[service.address, 0])
        assert service.wait(30) == 0


def test_a_spawned_coordinator_outlives_who_spawned_it() -> None:
    """It is a session of its own: its spawner's end, and a signal to its group, do not reach it."""
    (output,) = run_processes(program("coordinator_spawner").read_text(), 1)
    pid, address = output.split()
    try:
        with CoordinationClient(address, 0) as client:
            client.key_value_set("a", "b")
            assert client.key_value_try_get("a") == "b"
    finally:
        os.kill(int(pid), signal.SIGTERM)


def test_a_programs_modules_stop_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the working folder a module may have the name of one that the coordinator imports."""
    (tmp_path / "secrets.py").write_text("raise SystemExit('the wrong secrets')\n")
    monkeypatch.chdir(tmp_path)
    with CoordinationService.spawn(1) as service, CoordinationClient(service.address, 0) as client:
        client.key_value_set("a", "b")


def test_a_program_with_many_files_starts_one() -> None:
    """More than `select` takes: 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        with CoordinationService.spawn(1) as service:
            assert service.address


def test_a_taken_port_is_refused() -> None:
    """The second server of a port does not start, and says why."""
    with CoordinationService.spawn(1) as service:
        port = int(service.address.rsplit(":", 1)[1])
        with pytest.raises(CoordinationError, match=f"cannot listen at 127.0.0.1:{port}"):
            CoordinationService.spawn(1, endpoint=Endpoint(port=port))


def test_a_coordinator_imports_neither_jax_nor_cli() -> None:
    """The program of a spawned coordinator holds no room above it, and has a help."""
    code = (
        "import sys, holdfast.coordination.__main__ as m; print({'jax', 'holdfast.cli'} &"
        " {*sys.modules}); m.main(['--help'])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (
        ran.stdout.startswith("set()\n") and "coordinator" in ran.stdout and "relay" in ran.stdout
    )


def test_one_that_does_not_start_says_why() -> None:
    """What it printed is in the error: a wrong option, a missing number."""
    with pytest.raises(
        CoordinationError,
        match=r"the coordinator did not start; it said: (?s:.*)No such option:? '?--nonsense",
    ):
        CoordinationService.spawn(1, arguments=("--nonsense",))
    with pytest.raises(CoordinationError, match="0 is not in the range"):
        CoordinationService.spawn(0)


def test_one_that_says_nothing_is_ended_in_time() -> None:
    """A server that prints no address within its time is killed, and the error says so."""
    with pytest.raises(
        CoordinationError, match=r"the sleeper did not start; it said nothing within 0\.2 s"
    ):
        start("sleeper", [sys.executable, "-c", "import time; time.sleep(600)"], 0.2)


def test_a_server_that_prints_much_goes_on() -> None:
    """A megabyte of errors before the address fills no pipe."""
    code = (
        "import sys; sys.stderr.write('x' * 2**20); print('talker at here', flush=True);"
        " sys.stdin.read()"
    )
    with SpawnedServer(*start("talker", [sys.executable, "-c", code], 30, settings=b"")) as server:
        assert server.address == "here"


def test_settings_reach_the_server_by_its_input() -> None:
    """What `start` writes is what the server reads; its input stays open until the object is
    closed.
    """
    code = (
        "import sys; print('echo at', sys.stdin.readline().strip(), flush=True); sys.stdin.read()"
    )
    with SpawnedServer(
        *start("echo", [sys.executable, "-c", code], 30, settings=b"secret\n")
    ) as server:
        assert server.address == "secret" and server._process.poll() is None
    assert server._process.poll() is not None


def test_a_coordinator_does_not_see_trainers_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Variables of gRPC, jax and XLA stay with the trainer; it reads its sockets on one thread."""
    for name in ("GRPC_VERBOSITY", "JAX_PLATFORMS", "XLA_FLAGS"):
        monkeypatch.setenv(name, "nonsense")
    with CoordinationService.spawn(1) as service, open(f"/proc/{service.pid}/environ") as environ:
        names = dict(entry.split("=", 1) for entry in environ.read().split("\0") if entry)
    assert not {"GRPC_VERBOSITY", "JAX_PLATFORMS", "XLA_FLAGS"} & names.keys()
    assert names["GRPC_EXPERIMENTS"] == "-event_engine_client,-event_engine_listener"


def test_sigterm_waits_for_the_processes() -> None:
    """A group that is signalled as a whole still needs its coordinator to save: it ends by SIGTERM
    once nobody is connected.
    """
    with CoordinationService.spawn(1) as service:
        with CoordinationClient(service.address, 0) as client:
            os.kill(service.pid, signal.SIGTERM)
            for number in range(20):
                client.key_value_set(f"saved/{number}", "yes")
            assert service.runs
        assert service.wait(20) == -signal.SIGTERM


def test_a_wait_has_an_end() -> None:
    """`wait` on a coordinator that serves is a TimeoutError with its address; `close` ends it by
    SIGINT, and again does nothing.
    """
    service = CoordinationService.spawn(1)
    with pytest.raises(
        TimeoutError, match=f"the coordinator at {service.address} still runs after 0.1 s"
    ):
        service.wait(0.1)
    service.close()
    service.close()
    assert service.wait(0) == -signal.SIGINT
