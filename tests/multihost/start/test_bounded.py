"""The start of jax ends in time, by name, whoever dies or dawdles between joining and the
backend.
"""

from __future__ import annotations

import signal

from holdfast.coordination import CoordinationService, ServiceTimeouts
from tests.support.cluster import free_port, run_processes
from tests.support.starting import script

BETWEEN = """
from holdfast.multihost.start import start
start_jax = start.start_jax
def between(*arguments, **options):
    if index == 1:
        {what}
    start_jax(*arguments, **options)
start.start_jax = between
begun_s = time.monotonic()
try:
    multihost.initialize(sys.argv[3], count, index, timeout_s={timeout_s}, heartbeat_timeout_s={heartbeat_s})
except (ProcessLost, StartupTimeout) as error:
    who = error.process if isinstance(error, ProcessLost) else error.processes
    print("ended", type(error).__name__, who, "in time", time.monotonic() - begun_s < {timeout_s} + 5, error, flush=True)
assert not multihost.is_initialized()
"""


def test_a_process_that_dies_before_its_backend_is_named_when_the_time_is_over() -> None:
    """Killed after it had joined, and long before its heartbeat timeout: the others' initialize()
    ends in its time with ProcessLost.
    """
    text = BETWEEN.format(what="os.kill(os.getpid(), 9)", timeout_s=8, heartbeat_s=60)
    outputs = run_processes(
        script(text), 3, arguments=[f"127.0.0.1:{free_port()}"], codes=[0, -signal.SIGKILL, 0]
    )
    for index in (0, 2):
        assert "ended ProcessLost 1 in time True" in outputs[index], outputs[index]


def test_a_process_that_fails_before_its_backend_ends_the_others_at_once() -> None:
    """Its error is reported, and the others do not wait for the end of their own time."""
    text = BETWEEN.format(what="raise OSError('no accelerator')", timeout_s=60, heartbeat_s=60)
    with CoordinationService.spawn(
        2, timeouts=ServiceTimeouts(heartbeat_s=60), recoverable=True, survivable=True
    ) as service:
        outputs = run_processes(script(text), 2, arguments=[service.address], codes=[0, 1])
    assert "ended ProcessLost 1 in time True" in outputs[0] and "no accelerator" in outputs[0], (
        outputs[0]
    )


def test_a_process_that_dawdles_before_its_backend_is_named() -> None:
    """It lives and has not begun to start jax: StartupTimeout with its number."""
    text = BETWEEN.format(what="time.sleep(20); os._exit(0)", timeout_s=6, heartbeat_s=60)
    outputs = run_processes(script(text), 2, arguments=[f"127.0.0.1:{free_port()}"], codes=[0, 0])
    assert "ended StartupTimeout (1,) in time True" in outputs[0], outputs
    assert (
        "jax did not start in 6 s: all have joined the job, and it waits for process 1"
        in outputs[0]
    )
