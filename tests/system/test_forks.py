"""A forked child of a process that has joined a job is nobody: it says nothing to the coordinator,
and takes no signal for the job.
"""

from __future__ import annotations

import signal
from contextlib import ExitStack

from holdfast.coordination import CoordinationService
from tests.support.cluster import Processes, run_processes
from tests.support.starting import script

FORK = """
import signal, warnings
warnings.simplefilter("ignore")  # jax's about fork
def fork(work):
    child = os.fork()
    if not child:
        work()
        sys.exit(0)  # with all that runs at an interpreter's end
    return child
def reap(child, within_s=30):
    end_s = time.monotonic() + within_s
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > end_s:
            os.kill(child, signal.SIGABRT)  # faulthandler prints where it is
            raise AssertionError("the child hangs")
        time.sleep(0.01)
def unharmed():
    statistics = multihost.current_client().statistics()
    assert (statistics["breaks"], statistics["reconnects"]) == (0, 0), statistics
    assert [info.state for info in multihost.current_client().process_info()] == ["CONNECTED"] * count
    multihost.sync_global_processes("unharmed", timeout=60)
"""


def test_a_child_of_fork_leaves_the_job_alone() -> None:
    """It has no client, and its exit, with everything that runs then, sends nothing: the parent's
    session and task go on.
    """
    with CoordinationService.spawn(2, recoverable=True, survivable=True) as service:
        run_processes(
            script(
                FORK
                + """
multihost.initialize(sys.argv[3], count, index, timeout_s=60)
client = multihost.current_client()
def work():
    assert not multihost.is_initialized()
    try:
        multihost.current_client()
        os._exit(7)
    except ValueError:
        pass
    try:
        client.key_value_set("from", "a child")
        os._exit(8)
    except CoordinationError as error:
        assert "was forked from the one that connected" in str(error) and error.code == "FAILED_PRECONDITION"
    client.close()
if index == 0:
    for _ in range(3):
        reap(fork(work))
unharmed()
assert client.key_value_dir_get("from") == []
multihost.shutdown()
"""
            ),
            2,
            arguments=[service.address],
        )
        assert service.wait(30) == 0


def test_a_child_of_fork_in_initialize_leaves_the_job_alone() -> None:
    """Forked in the handler of a signal while its parent waits for the last process: it ends by
    itself, and the job starts.
    """
    text = (
        FORK
        + """
count = 2
if len(sys.argv) > 4:
    index = 1
if index == 0:
    children = []
    signal.signal(signal.SIGUSR1, lambda number, frame: children.append(fork(lambda: None)))
multihost.initialize(sys.argv[3], count, index, timeout_s=60)
if index == 0:
    reap(children[0])
unharmed()
multihost.shutdown()
"""
    )
    with (
        CoordinationService.spawn(2, recoverable=True, survivable=True) as service,
        ExitStack() as stack,
    ):
        first = stack.enter_context(Processes(script(text), 1, arguments=[service.address]))
        first.wait_for(0, "INFO 1 of 2 processes, waiting for 1")
        first.kill(0, signal.SIGUSR1)
        last = stack.enter_context(
            Processes(script(text), 1, arguments=[service.address, "the last"])
        )
        finished = [*first.wait(), *last.wait()]
    assert [each.code for each in finished] == [0, 0], finished


def test_workers_that_are_forked_and_terminated_are_no_preemption() -> None:
    """Workers of a data loader, forked by multiprocessing, die by their SIGTERM, and the job hears
    of no notice.
    """
    with CoordinationService.spawn(2, recoverable=True, survivable=True) as service:
        outputs = run_processes(
            script(
                FORK
                + """
import multiprocessing
multihost.initialize(sys.argv[3], count, index, timeout_s=60)
if index == 0:
    context = multiprocessing.get_context("fork")
    ready = context.Semaphore(0)
    workers = [context.Process(target=lambda: (ready.release(), time.sleep(1000))) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        ready.acquire()
    for worker in workers:
        worker.terminate()
        worker.join(30)
    print("ended by", [worker.exitcode for worker in workers], flush=True)
unharmed()
assert not multihost.reached_preemption(1) and multihost.preemption_notice() is None
unharmed()
multihost.shutdown()
"""
            ),
            2,
            arguments=[service.address],
        )
    assert "ended by [-15, -15, -15]" in outputs[0], outputs[0]
    assert not any("preemption notice" in output for output in outputs), outputs
