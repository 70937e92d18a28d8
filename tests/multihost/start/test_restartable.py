"""What a process that outlives attempts does by itself.

`tests/launch/engines/test_rejoin.py` has the job around it.
"""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import threading

import jax
import pytest

from holdfast.checkpoint import SaveFailed, StepNotFound
from holdfast.checkpoint.agreement.messages import SentError
from holdfast.checkpoint.agreement.save_protocol import SaveKey, SaveReport, reported_error
from holdfast.checkpoint.errors import failure_of
from holdfast.coordination import ProcessLost
from holdfast.multihost import AttemptOver, Fatal, StartupFailed
from holdfast.multihost.job import Job
from holdfast.multihost.peers.peer_connection import PeerFailed
from holdfast.multihost.start.restartable import _chain, _clear_frames, _may_come_from_another

ALONE = """
import gc
from holdfast.checkpoint import SaveFailed, StepNotFound
from holdfast.coordination import ProcessLost
from holdfast.multihost import run_restartable
calls = []
assert run_restartable(lambda: calls.append(1) or "done") == "done"
assert gc.get_freeze_count() > 100_000  # what was imported is not searched when an attempt is left
def fails():
    calls.append(2)
    raise ProcessLost("process 1 is gone")
try:
    run_restartable(fails)
except ProcessLost:
    print(calls)
"""


LET_GO_LATE = """
import gc, weakref
import jax, jax.numpy as jnp
from jax._src import xla_bridge
from holdfast.multihost.start.restartable import _drop_backends, _keep_out_of_collections
class Save:
    pass
save = Save()
save.itself = save
save.array = jax.block_until_ready(jnp.ones(3))
(backend,) = map(weakref.ref, xla_bridge.backends().values())
for attempt in range(2):
    _drop_backends()
    _keep_out_of_collections()
    if attempt == 0:
        assert backend() is not None
        save = None  # by a thread that was late; what it held is a cycle, and no longer searched
        gc.collect()
        assert backend() is not None
assert backend() is None
"""


def test_what_was_let_go_late_is_kept_for_one_attempt() -> None:
    """A backend that an attempt leaves behind, with its sockets and threads, goes with the next."""
    subprocess.run(
        [sys.executable, "-c", LET_GO_LATE],
        check=True,
        timeout=60,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )


def test_alone_it_is_called_once() -> None:
    """It returns what the function returned, and raises what it raised."""
    ran = subprocess.run(
        [sys.executable, "-c", ALONE], check=True, capture_output=True, text=True, timeout=60
    )
    assert ran.stdout == "[1, 2]\n", ran.stderr


@pytest.mark.parametrize(
    ("error", "may"),
    [
        (ProcessLost("process 1 is gone"), True),
        (jax.errors.JaxRuntimeError("INTERNAL: gloo"), True),
        (ValueError("UNKNOWN: Gloo all-reduce failed: closed by peer"), True),
        (AttemptOver("attempt 1 is over"), True),
        (ValueError("a shape that does not fit"), False),
        (Fatal("no such data"), False),
        (StepNotFound("step 7 is not there"), False),
        (SaveFailed("process 1 is gone"), True),
        (StartupFailed("process 1 is gone"), True),
        (KeyError("loss"), False),
    ],
)
def test_an_error_of_ones_own_waits_for_nobody(error: BaseException, may: bool) -> None:
    """Nor one that it has led to."""
    assert _may_come_from_another(error) == may


def test_an_error_that_is_its_own_cause_ends_the_program_too() -> None:
    """As `raise error from error` leaves it: whoever looks for its causes comes to an end."""
    error = ValueError("mine")
    with pytest.raises(ValueError, match="mine"):
        raise error from error
    assert list(itertools.islice(_chain(error), 3)) == [error]


def test_a_full_disk_waits_for_nobody() -> None:
    """No death fills a disk: the primary does not wait to hear of one, whose disk it may be."""
    full = OSError(28, "No space left on device")
    theirs = SaveReport(1, SaveKey("save", 1, 3), error=SentError.of(full))
    lost = SaveReport(
        1, SaveKey("save", 1, 3), error=SentError.of(ProcessLost("process 0 is gone"))
    )
    assert not _may_come_from_another(failure_of(full, 3, process=0))
    assert not _may_come_from_another(reported_error(theirs))
    silent = PeerFailed("process 1 has closed the connection")
    late = SaveReport(1, SaveKey("save", 1, 3), error=SentError.of(silent))
    for error in (ProcessLost("process 1 is gone"), silent):
        assert _may_come_from_another(failure_of(error, 3, process=0))
    for report in (lost, late):
        assert _may_come_from_another(reported_error(report))


RAISES = """
from holdfast import multihost
from holdfast.coordination import ProcessLost
def train():
    raise {}
multihost.run_restartable(train)
"""


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        ("multihost.Fatal('mine')", False),
        pytest.param("ProcessLost('gone')", True, marks=pytest.mark.slow),
    ],
)
def test_what_may_come_from_another_is_waited_for(error: str, waits: bool) -> None:
    """And the log says so, since it may last for the heartbeat timeout."""
    run = [sys.executable, "-c", "from holdfast.cli import main; main()", "run", "-n", "1"]
    options = ["--heartbeat-timeout-s=1", "--max-restarts=0", "--", sys.executable, "-c"]
    ended = subprocess.run(
        [*run, *options, RAISES.format(error)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert (
        ended.returncode == (1 if waits else 93)
        and error.partition("(")[0].split(".")[-1] in ended.stderr
    )
    said = "waiting for at most 2 s until the launcher says whether a death has caused"
    assert (said in ended.stdout) == waits, ended.stdout


EXITS = """
import sys, time
import jax
from holdfast import multihost
def train():
    if jax.process_index():
        time.sleep(60)
    sys.exit(3)
multihost.run_restartable(train)
"""


def test_who_exits_with_a_code_waits_for_nobody() -> None:
    """The others are where they are: it fails at once, and not after a barrier in vain."""
    run = [sys.executable, "-c", "from holdfast.cli import main; main()", "run", "-n", "2"]
    ended = subprocess.run(
        [*run, "--", sys.executable, "-c", EXITS],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert ended.returncode == 3
    assert "process 0 of 2 ended with exit code 3 in attempt 1: SystemExit: 3;" in ended.stderr
    assert "leaving without the others" not in ended.stdout


def test_what_the_frames_hold_is_let_go() -> None:
    """Arrays of a backend that ends must not be kept by the error."""

    class Held:
        """What a frame of the program refers to."""

    def fails() -> None:
        held = Held()
        raise RuntimeError(f"{held}")

    try:
        fails()
    except RuntimeError as error:
        _clear_frames(error)
        gc.collect()
        assert not [each for each in gc.get_objects() if isinstance(each, Held)]


def test_the_end_of_an_attempt_is_raised_once_and_on_one_thread() -> None:
    """Threads of ours would not know what to do with it; a second one would break the unwinding."""
    job = Job()
    job.note_over("attempt 1 is over")
    job.raise_if_over()
    job.outlive()
    thread = threading.Thread(target=job.raise_if_over)
    thread.start()
    thread.join()
    with pytest.raises(AttemptOver, match="attempt 1 is over"):
        job.raise_if_over()
    job.raise_if_over()


def test_what_is_there_is_closed_with_the_attempt() -> None:
    """The latest first; an object that is gone is not kept for it."""
    closed: list[str] = []

    class Opened:
        """Something that is closed at the end."""

        def __init__(self, name: str) -> None:
            self.name = name

        def close(self) -> None:
            """Says so."""
            closed.append(self.name)

    job = Job()
    kept = [Opened("first"), Opened("second")]
    for each in [*kept, Opened("gone")]:
        job.at_end(each.close)
    del each
    gc.collect()
    job.end()
    assert closed == ["second", "first"]
