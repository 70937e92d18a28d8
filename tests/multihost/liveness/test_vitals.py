"""What a process says of itself: its step, its memory, how much it waits; and nothing of it
disturbs the program.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from holdfast.coordination import CoordinationClient, CoordinationService, StatusClient
from holdfast.coordination.process.local_look import look
from holdfast.coordination.vitals import LOOK_SIGNAL, VITALS_INTERVAL_S
from holdfast.multihost.job import current_job
from holdfast.multihost.liveness.vitals import Vitals, note_step
from tests.support.paths import program
from tests.support.processes import no_file_can_be_opened


def test_the_coordinator_knows_step_memory_and_waiting() -> None:
    """Within a few seconds, without a call of the program; how often it reports is part of it."""
    with (
        CoordinationService.spawn(1) as service,
        CoordinationClient(service.address, 0) as client,
        StatusClient(service.address) as status,
    ):
        current_job().put(Vitals(client, 0, 1))
        try:
            note_step(7)
            note_step(8)
            while not (task := status.status().tasks[0]).progress.HasField("step"):
                threading.Event().wait(0.05)
        finally:
            current_job().close(Vitals)
        values = task.progress.values
        assert (
            task.progress.step == 8
            and values["memory_bytes"] > 10 << 20
            and values["report_interval_s"] == 2.0
        )
        assert 0 <= values["waiting_share"] <= 1 and task.step_age_s >= 0


def test_the_first_step_is_reported_at_once() -> None:
    """Whatever waits for it, such as the launcher's standbys, does not wait for the interval."""
    with (
        CoordinationService.spawn(1) as service,
        CoordinationClient(service.address, 0) as client,
        StatusClient(service.address) as status,
    ):
        vitals = Vitals(client, 0, 15_360)  # which report once a minute
        try:
            vitals.note_step(1)
            deadline = time.monotonic() + 20
            while not (task := status.status().tasks[0]).progress.HasField("step"):
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            vitals.close()
        assert task.progress.step == 1


def test_a_wait_in_the_runtime_counts() -> None:
    """The share rises while this thread is in a call of ours, and it is the user's code
    otherwise.
    """
    with CoordinationService.spawn(1) as service, CoordinationClient(service.address, 0) as client:
        vitals = Vitals(client, 0, 1)
        try:
            with pytest.raises(Exception, match="was not set"):
                client.blocking_key_value_get("never", int(6 * VITALS_INTERVAL_S * 1000))
            waited = vitals.statistics()["waiting_share"]
            assert waited > 0.3
            while vitals.statistics()["waiting_share"] >= waited:
                threading.Event().wait(0.05)
        finally:
            vitals.close()


def test_a_wait_in_cpp_counts_and_work_does_not() -> None:
    """The main thread waits for a computation on another thread, with no frame of jax's; then it
    computes itself, and sleeps.
    """
    run = [sys.executable, program("vitals_waits")]
    done = subprocess.run(run, capture_output=True, text=True, check=True, timeout=60)
    shares = dict(line.split() for line in done.stdout.splitlines())
    assert float(shares["waits"]) > 0.5, done.stdout
    assert float(shares["computes"]) < 0.2 and float(shares["sleeps"]) < 0.2, done.stdout


def test_a_signal_in_use_is_left_alone() -> None:
    """Then others of the host cannot look at it; the reports go on."""

    def handler(number: int, frame: object) -> None:
        pass

    before = signal.signal(LOOK_SIGNAL, handler)
    try:
        vitals = Vitals(_Nobody(), 0, 1)
        threading.Event().wait(2 * VITALS_INTERVAL_S)
        assert look(0, os.getpid()) is None and signal.getsignal(LOOK_SIGNAL) is handler
        vitals.close()
    finally:
        signal.signal(LOOK_SIGNAL, before)


def test_a_step_after_the_end_is_nobodys() -> None:
    """Outside a job a step is noted nowhere."""
    vitals = Vitals(_Nobody(), 0, 1)
    current_job().put(vitals)
    current_job().close(Vitals)
    note_step(3)
    assert vitals.statistics()["step"] is None
    assert current_job().get(Vitals) is None


def test_the_step_is_told_though_no_file_can_be_opened() -> None:
    """The memory is left out: it keeps the value that it had."""
    vitals = Vitals(_Nobody(), 0, 1)
    vitals.note_step(3)
    with no_file_can_be_opened():
        told = vitals.statistics()
    vitals.close()
    assert told["step"] == 3 and "memory_bytes" not in told


class _Nobody:
    def report(self, **values: float) -> None:
        pass
