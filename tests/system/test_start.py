"""initialize() and shutdown() in real processes: who comes, who does not, and what the environment
says.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from holdfast.coordination import CoordinationService, JobIdentity, ServiceTimeouts
from holdfast.multihost import ProcessSpec
from tests.support.cluster import Processes, free_port, run_processes
from tests.support.paths import program
from tests.support.tls import Authority


def spec_env(coordinator: str, count: int, **fields: object) -> dict[str, object]:
    """Returns the options that give each process the environment of a launcher."""
    per_slice = count // int(str(fields.get("num_slices", 1)))
    return {
        "env_of": (
            lambda index: ProcessSpec(
                process_id=index,
                num_processes=count,
                coordinator=coordinator,
                slice_id=index // per_slice,
                **fields,  # type: ignore[arg-type]
            ).to_env()
        )
    }


def test_from_the_environment() -> None:
    """Under a launcher's environment initialize() takes no arguments; all are there, ids are known,
    and the job ends in order.
    """
    with CoordinationService.spawn(
        3, job=JobIdentity(name="j", attempt=4), recoverable=True, survivable=True
    ) as service:
        outputs = run_processes(
            program("start_from_environment"),
            3,
            devices=2,
            **spec_env(service.address, 3, job_id="j", attempt=4),
        )
        assert service.wait(30) == 0, "the coordinator ends by itself once all have left"
    assert all("INFO 3 of 3 processes" in output for output in outputs)


def test_process_0_starts_the_coordinator() -> None:
    """With the three arguments of jax.distributed.initialize, process 0 starts the coordinator
    there; whoever comes late is waited for.
    """
    outputs = run_processes(
        program("start_process_0_starts_coordinator"),
        2,
        arguments=[f"127.0.0.1:{free_port()}"],
    )
    assert "INFO 2 of 2 processes" in outputs[0]


@pytest.mark.slow
def test_nobody_joins_an_earlier_start() -> None:
    """After a crash, the program started again at the same address waits for the old coordinator to
    end, and starts one of its own.
    """
    port = free_port()
    crash = program("start_nobody_joins_earlier_start_crash")
    run_processes(crash, 2, arguments=[f"127.0.0.1:{port}"], codes=[9, 9])
    outputs = run_processes(
        program("start_nobody_joins_earlier_start"),
        2,
        arguments=[f"127.0.0.1:{port}"],
    )
    assert "belongs to an earlier start; waiting for it to end" in outputs[0], outputs


@pytest.mark.slow
def test_mpiexec_starts_jobs_side_by_side(tmp_path: Path) -> None:
    """Two jobs of a real MPICH at one time, of programs that give initialize() nothing: each is a
    job of its own; and one process is alone.
    """
    if shutil.which("mpiexec.mpich") is None:
        pytest.skip("MPICH is not installed: scripts/install_system_packages.sh")
    counts = {"a": 2, "b": 3, "c": 1}
    jobs = {}
    for name, count in counts.items():
        (tmp_path / name).mkdir()
        command = ["mpiexec.mpich", "-n", str(count), sys.executable]
        jobs[name] = subprocess.Popen(
            [*command, str(program("mpich_job")), str(tmp_path / name)],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
    assert [job.wait(110) for job in jobs.values()] == [0, 0, 0]
    places = set()
    for name, count in counts.items():
        for rank in range(count):
            said = (tmp_path / name / str(rank)).read_text().split(maxsplit=3)
            assert said[:3] == [str(rank), str(count), str(count - 1)]
            places.add(said[3])
    assert len(places) == 3 and "alone" in places


@pytest.mark.parametrize(
    "name",
    [
        "grpc_proxy",
        *(pytest.param(f"{web}_proxy", marks=pytest.mark.slow) for web in ("http", "https")),
    ],
)
def test_no_proxy_stands_between(name: str) -> None:
    """The way to the coordinator is past the environment's proxies, for jaxlib's agent too."""
    outputs = run_processes(
        program("start_process_0_starts_coordinator"),
        2,
        arguments=[f"127.0.0.1:{free_port()}"],
        env={name: f"http://127.0.0.1:{free_port()}", "no_proxy": "example.org"},
    )
    assert "INFO 2 of 2 processes" in outputs[0]


def test_a_process_that_never_comes_is_named() -> None:
    """StartupTimeout after the timeout names whom the others waited for, says how long, and which
    knob rules it.
    """
    with CoordinationService.spawn(3, recoverable=True, survivable=True) as service:
        outputs = run_processes(
            program("start_process_never_comes_named"),
            2,
            arguments=[service.address],
        )
    for output in outputs:
        assert (
            "missing (1,) knob timeout_s 3 in time True the job did not start in 3 s: 2 of 3"
            " processes, waiting for 1" in output
        )
        assert "INFO 2 of 3 processes, waiting for 1" in output


@pytest.mark.slow
def test_the_coordinator_sets_the_heartbeat_timeout() -> None:
    """By initialize() where process 0 starts it, and all have it; where somebody else did, another
    value is refused with a sentence.
    """
    ask = program("start_heartbeat_timeout_set_where_ask")
    outputs = run_processes(ask, 2, arguments=[f"127.0.0.1:{free_port()}", 1])
    assert all("heartbeat timeout 7.0" in output for output in outputs)
    with CoordinationService.spawn(2, timeouts=ServiceTimeouts(heartbeat_s=9)) as service:
        outputs = run_processes(ask, 2, arguments=[service.address, "none"])
    for output in outputs:
        assert (
            "refused: FAILED_PRECONDITION: the heartbeat timeout of the coordinator at"
            f" {service.address} is 9 s, not 7 s" in output
        )
        assert (
            "set it where the coordinator is started (--heartbeat-timeout-s), or give none here"
            in output
        )


@pytest.mark.slow
@pytest.mark.parametrize("late_timeouts", [0.5, 1.2, 3])
@pytest.mark.parametrize("client", ["ours", "jax's own"])
def test_the_last_process_may_be_late(client: str, late_timeouts: float) -> None:
    """By more than the heartbeat timeout, too: nobody is timed out of a job that has not gathered,
    and the job starts.
    """
    heartbeat_s = 4
    late_s = late_timeouts * heartbeat_s
    with CoordinationService.spawn(
        3, timeouts=ServiceTimeouts(heartbeat_s=heartbeat_s), recoverable=True, survivable=True
    ) as service:
        outputs = run_processes(
            program("start_last_may_be_late"), 3, arguments=[service.address, late_s, client]
        )
    assert all("started" in output for output in outputs)


def test_a_coordinator_that_is_not_there() -> None:
    """CoordinatorLost names the address and for how long it was tried."""
    address = f"127.0.0.1:{free_port()}"
    (output,) = run_processes(
        program("start_coordinator_not_there"),
        1,
        arguments=[address],
    )
    assert f"lost {address} True UNAVAILABLE: " in output


def test_another_attempt_is_refused() -> None:
    """A process of attempt 2 does not join the coordinator of attempt 3 (ENV-5)."""
    with CoordinationService.spawn(1, job=JobIdentity(name="j", attempt=3)) as service:
        (output,) = run_processes(
            program("start_another_attempt_refused"),
            1,
            **spec_env(service.address, 1, job_id="j", attempt=2),
        )
    assert "refused: " in output
    assert "attempt" in output


STALE = {
    "MEGASCALE_NUM_SLICES": "3",
    "MEGASCALE_SLICE_ID": "2",
    "MEGASCALE_COORDINATOR_ADDRESS": "10.9.9.9",
    "MEGASCALE_PORT": "9999",
}


@pytest.mark.parametrize("num_slices", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_stale_slices_never_reach_jax(num_slices: int) -> None:
    """Stale MEGASCALE_* variables are the launcher's, or gone, when jax's backend comes up; each
    replacement is logged once. The coordinator hears how many slices there are.
    """
    with CoordinationService.spawn(
        2, job=JobIdentity(name="j"), recoverable=True, survivable=True
    ) as service:
        outputs = run_processes(
            program("start_stale_slices_never_reach"),
            2,
            env=STALE,
            **spec_env(
                service.address, 2, job_id="j", num_slices=num_slices, slice_address="10.0.0.7"
            ),
        )
    for index, output in enumerate(outputs):
        wanted = {
            "MEGASCALE_NUM_SLICES": "2",
            "MEGASCALE_SLICE_ID": str(index),
            "MEGASCALE_COORDINATOR_ADDRESS": "10.0.0.7",
            "MEGASCALE_PORT": "8081",
        }
        seen = [line for line in output.splitlines() if line.startswith("at the backend:")]
        found = eval(seen[0].removeprefix("at the backend:"))
        assert found == (wanted if num_slices == 2 else {})
        assert [output.count(f"WARNING stale variable {key}: ") for key in STALE] == [
            1,
            1,
            1,
            1,
        ], output
        assert f"slices {num_slices}" in output
        assert f"reported {'2.0' if num_slices == 2 else 'None'}" in output


@pytest.mark.parametrize(
    ("last", "code"),
    [
        (0, 75),
        pytest.param(0, 0, marks=pytest.mark.slow),
        pytest.param(2, 0, marks=pytest.mark.slow),
    ],
)
def test_leaving_in_any_order(last: int, code: int) -> None:
    """Whoever finishes last, process 0 included, all leave with exit code 0, or that of a
    preemption, and none is taken for dead.
    """
    outputs = run_processes(
        program("start_leaving_any_order"),
        3,
        arguments=[f"127.0.0.1:{free_port()}", last, code],
        codes=[code] * 3,
    )
    assert not any("WARNING" in output or "ERROR" in output for output in outputs), outputs


def test_leaving_without_shutdown() -> None:
    """A program that forgets shutdown() leaves in order when it ends."""
    outputs = run_processes(
        program("start_leaves_without_shutdown"),
        2,
        arguments=[f"127.0.0.1:{free_port()}"],
    )
    assert not any("WARNING" in output or "ERROR" in output for output in outputs), outputs


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["calls", "forgets"])
def test_a_process_that_is_left_alone_ends_soon(ending: str) -> None:
    """Where another one died before the shutdown, the interpreter's end searches no cycles: a
    launcher waits for it. Where all are there, it does.
    """
    for fate, codes in (("death", [0, -signal.SIGKILL]), ("none", [0, 0])):
        outputs = run_processes(
            program("start_left_alone"),
            2,
            codes=codes,
            arguments=[f"127.0.0.1:{free_port()}", fate, ending],
        )
        assert ("searched" in outputs[0]) == (fate == "none"), outputs[0]
        assert ("leaving without the others" in outputs[0]) == (fate == "death"), outputs[0]


@pytest.mark.parametrize("ending", ["closes", pytest.param("dies", marks=pytest.mark.slow)])
def test_an_exception_ends_the_others_waits(ending: str) -> None:
    """Who dies of an exception does not wait for the others, also where it calls shutdown() in a
    `finally`: their barrier fails at once, naming it and its error.
    """
    outputs = run_processes(
        program("start_exception_ends_others_waits"),
        3,
        arguments=[f"127.0.0.1:{free_port()}", ending],
        codes=[0, 1, 0],
    )
    for index in (0, 2):
        assert "lost 1 True " in outputs[index], outputs[index]
        assert "bad batch" in outputs[index]


def test_an_interrupt_ends_the_wait_of_shutdown() -> None:
    """By Ctrl-C in its wait a process has left all the same, and the others hear why."""
    outputs = run_processes(program("start_interrupted"), 2, arguments=[f"127.0.0.1:{free_port()}"])
    assert "out" in outputs[0] and "KeyboardInterrupt" in outputs[1], outputs


def test_a_job_smaller_than_asked_for() -> None:
    """When jax sees one process where two were asked for, no process runs on (INIT-1): each says
    what was asked for and what was found.
    """
    outputs = run_processes(
        program("start_job_smaller_than_asked"),
        2,
        arguments=[f"127.0.0.1:{free_port()}"],
    )
    what = (  # found here, or reported by the other
        "2 processes were asked for, but jax sees 1: its platform 'cpu' has not joined"
    )
    assert all("refused: " in output and what in output for output in outputs), outputs


@pytest.mark.slow  # tests/system/test_relays.py has a token and mTLS
def test_a_secured_coordinator(tmp_path: Path) -> None:
    """With a token on, the whole path works, jaxlib's agent through a relay; a process without the
    token is refused.
    """
    token = tmp_path / "token"
    token.write_text("a secret of this job")
    secured = ("--token-file", str(token))
    with CoordinationService.spawn(
        2,
        job=JobIdentity(name="j", attempt=1),
        recoverable=True,
        survivable=True,
        arguments=secured,
    ) as service:
        (output,) = run_processes(
            program("start_secured_coordinator"),
            1,
            env_of=lambda index: ProcessSpec(
                process_id=0, num_processes=2, coordinator=service.address, job_id="j", attempt=1
            ).to_env(),
        )
        assert "refused: UNAUTHENTICATED" in output
        run_processes(
            program("start_secured_coordinator_2"),
            2,
            **spec_env(service.address, 2, job_id="j", attempt=1, token_file=str(token)),
        )


@pytest.mark.slow  # tests/system/test_relays.py has mTLS
def test_jaxs_own_tls(tmp_path: Path) -> None:
    """With certificates that name their processes jaxlib's agent speaks TLS itself, where it can:
    no relay, and the whole path works.
    """
    authority = Authority(tmp_path, "ours")
    server = authority.issue("server")
    pems = [
        authority.issue(f"process{index}", uris=[f"holdfast:process/{index}"]) for index in range(2)
    ]
    secured = (f"--tls-cert={server.cert}", f"--tls-key={server.key}", f"--tls-ca={server.ca}")
    with CoordinationService.spawn(
        2, job=JobIdentity(name="j"), recoverable=True, survivable=True, arguments=secured
    ) as service:
        outputs = run_processes(
            program("start_jaxs_own_tls"),
            2,
            env_of=lambda index: ProcessSpec(
                process_id=index,
                num_processes=2,
                coordinator=service.address,
                job_id="j",
                tls_cert=pems[index].cert,
                tls_key=pems[index].key,
                tls_ca=pems[index].ca,
            ).to_env(),
        )
    assert all(
        "relay False tls True" in output or "relay True tls False" in output for output in outputs
    ), outputs


def test_a_job_of_jaxs_own_is_not_come_to() -> None:
    """At an address where jaxlib's own service listens initialize() raises before it says a word
    there, whoever gave the address, and the job that is there goes on.
    """
    address = f"127.0.0.1:{free_port()}"
    jaxs = program("start_jax_alone")
    with ExitStack() as stack:
        first = stack.enter_context(Processes(jaxs, 2, arguments=[address]))
        for index in range(2):
            first.wait_for(index, "joined")
        outputs = run_processes(program("start_at_jaxlibs_service"), 2, arguments=[address])
        for output in outputs:
            assert output.count(f"refused: what listens at {address} is no coordinator of") == 2
        for index in range(2):
            first.kill(index, signal.SIGUSR1)
        finished = first.wait()
    assert [each.code for each in finished] == [0, 0], finished


def test_a_start_that_takes_long_is_said(tmp_path: Path) -> None:
    """At WARNING, so that it is seen without any set-up of logging, with who counted."""
    program = tmp_path / "waits.py"
    program.write_text(
        "import sys\n"
        "from holdfast import multihost\n"
        "from holdfast.multihost.start import start\n"
        "start.WARN_AFTER_S = 0.5\n"
        "multihost.initialize(sys.argv[1], 3, 0, timeout_s=2)\n"
    )
    command = [sys.executable, str(program), f"127.0.0.1:{free_port()}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    said = "1 of 3 processes, waiting for 1, 2; that there are 3 is said by initialize()"
    assert said in ended.stderr.splitlines(), ended.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="a host name of its own needs root")
@pytest.mark.slow
def test_a_host_whose_name_leads_nowhere_is_told(tmp_path: Path) -> None:
    """jax's gloo listens at the host's own name: the error has it, and where to put it."""
    python = sys.executable
    line = f"hostname nowhere-at-all; exec {Path(python).parent}/holdfast run -n 2 -- {python}"
    code = "from holdfast import multihost; multihost.initialize()"
    command = ["unshare", "--uts", "/bin/sh", "-c", f"{line} -c '{code}'"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 1
    said = "StartupFailed: this host's own name, 'nowhere-at-all', leads to no address"
    assert said in ended.stderr.splitlines()[-1], ended.stderr
    assert "/etc/hosts" in ended.stderr
