"""Children that a process of a job starts are no processes of that job, whoever they think they
are.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from holdfast.coordination import CoordinationService, JobIdentity
from holdfast.multihost import ProcessSpec
from tests.support.cluster import free_port, run_processes
from tests.support.paths import program


@pytest.mark.slow
@pytest.mark.parametrize("told_by", ["a launcher", "arguments"])
def test_a_child_does_not_take_its_parents_place(told_by: str) -> None:
    """By spawn, forkserver and as a program of its own: initialize() at the module's level names
    the parent, and the parent's job goes on. A child that is alone saves as a writer of its own.
    """
    address = f"127.0.0.1:{free_port()}"
    with CoordinationService.spawn(
        2, job=JobIdentity(name="j"), recoverable=True, survivable=True
    ) as service:

        def env_of(index: int) -> dict[str, str]:
            return ProcessSpec(
                process_id=index, num_processes=2, coordinator=service.address, job_id="j"
            ).to_env()

        if told_by == "arguments":
            outputs = run_processes(program("children_join"), 2, arguments=[address])
        else:
            outputs = run_processes(program("children_join"), 2, env_of=env_of)
    for start in ("spawn", "forkserver", "joins"):
        assert f"{start} ended with 1" in outputs[0], outputs[0]
    assert outputs[0].count(") is a child of process 0 of job ") == 3, outputs[0]
    assert 'under `if __name__ == "__main__":`' in outputs[0]
    for line in ("alone 1\n", "saved 1\n", "alone ended with 0\n"):
        assert line in outputs[0], outputs[0]
    assert not any("process 0 was lost" in output for output in outputs)


JOINS = """
import os, time
from holdfast import multihost
multihost.initialize()
if not os.fork():
    time.sleep(600)
    os._exit(0)
print("joined", flush=True)
input()
multihost.shutdown()
print("left", flush=True)
os.killpg(0, 9)
"""


@pytest.mark.slow
def test_a_copied_environment_does_not_take_the_place() -> None:
    """The same program, started again with the HOLDFAST_* of a process that lives, is refused with
    its pid; the first goes on. Once it is killed the place is free: a fork of it holds nothing.
    """
    job = JobIdentity(name="j", attempt=2)
    with CoordinationService.spawn(1, job=job, recoverable=True, survivable=True) as service:
        spec = ProcessSpec(
            process_id=0, num_processes=1, coordinator=service.address, job_id="j", attempt=2
        )

        def start() -> subprocess.Popen[str]:
            return subprocess.Popen(
                [sys.executable, "-c", JOINS],
                env=os.environ | spec.to_env() | {"JAX_PLATFORMS": "cpu"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )

        first = start()
        assert first.stdout is not None and first.stdout.readline() == "joined\n"
        _, errors = start().communicate(timeout=60)
        lives = f"process 0 of job 'j', attempt 2, lives on this host already (pid {first.pid})"
        assert f"StartupFailed: {lives}" in errors
        first.kill()
        first.wait()
        said, errors = start().communicate("\n", timeout=60)
        assert said.split() == ["joined", "left"], errors
        os.killpg(first.pid, signal.SIGKILL)
        first.communicate()
