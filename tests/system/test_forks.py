"""A forked child of a process that has joined a job is nobody: it says nothing to the coordinator,
and takes no signal for the job.
"""

from __future__ import annotations

import signal
from contextlib import ExitStack

import pytest

from holdfast.coordination import CoordinationService
from tests.support.cluster import Processes, run_processes
from tests.support.paths import program


def test_a_child_of_fork_leaves_the_job_alone() -> None:
    """It has no client, and its exit, with everything that runs then, sends nothing: the parent's
    session and task go on.
    """
    with CoordinationService.spawn(2, recoverable=True, survivable=True) as service:
        run_processes(
            program("forks_child_fork_leaves_job"),
            2,
            arguments=[service.address],
        )
        assert service.wait(30) == 0


@pytest.mark.slow
def test_a_child_forked_in_initialize_is_no_process() -> None:
    """Forked in the handler of a signal while its parent waits for the last process: it ends by
    itself, and the job starts.
    """
    text = program("forks_child_fork_initialize_leaves")
    with (
        CoordinationService.spawn(2, recoverable=True, survivable=True) as service,
        ExitStack() as stack,
    ):
        first = stack.enter_context(Processes(text, 1, arguments=[service.address]))
        first.wait_for(0, "INFO 1 of 2 processes, waiting for 1")
        first.kill(0, signal.SIGUSR1)
        last = stack.enter_context(Processes(text, 1, arguments=[service.address, "the last"]))
        finished = [*first.wait(), *last.wait()]
    assert [each.code for each in finished] == [0, 0], finished


def test_forked_workers_that_end_are_no_preemption() -> None:
    """Workers of a data loader, forked by multiprocessing, die by their SIGTERM, and the job hears
    of no notice.
    """
    with CoordinationService.spawn(2, recoverable=True, survivable=True) as service:
        outputs = run_processes(
            program("forks_workers_forked_terminated_no"),
            2,
            arguments=[service.address],
        )
    assert "ended by [-15, -15, -15]" in outputs[0], outputs[0]
    assert not any("preemption notice" in output for output in outputs), outputs


def test_grpc_does_nothing_at_a_fork() -> None:
    """Its own handlers restart threads in the child, which at times waits for one of them for ever,
    before any code of Python. They are off, so each child begins.
    """
    with CoordinationService.spawn(1) as service:
        (output,) = run_processes(program("forks_of_client"), 1, arguments=[service.address])
    assert output == "all have ended\n"
