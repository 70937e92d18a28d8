"""Metrics: what Prometheus scrapes is the status of the job."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from holdfast.coordination.server.metrics import serve_metrics
from holdfast.proto import coordination_pb2, session_pb2


def test_prometheus_scrapes_the_service(tmp_path: Path) -> None:
    """`--metrics-port` serves processes by state, heartbeat ages, keys, barriers and calls on loopback."""
    command = [sys.executable, "-m", "holdfast.coordination", "coordinator", "-n", "2", "--metrics-port", "0"]
    with (tmp_path / "stderr").open("w+") as stderr:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            stderr.seek(0)
            url = stderr.read().split("metrics at ")[1].split()[0]
            with urllib.request.urlopen(url, timeout=20) as page:
                text = page.read().decode()
            process.terminate()
            process.wait(20)
    assert 'holdfast_processes{state="uninitialized"} 2.0' in text and "holdfast_barriers_passed_total 0.0" in text


def test_every_figure_is_the_statuss() -> None:
    """States, ages, steps, keys, barriers, calls and uptime, each under its name; what is not known is left out."""
    state = coordination_pb2.TaskState
    tasks = [
        session_pb2.TaskStatus(task_id=0, state=state.CONNECTED, heartbeat_age_s=1.5, progress=session_pb2.ReportRequest(step=7)),
        session_pb2.TaskStatus(task_id=1, state=state.ERROR, heartbeat_age_s=-1),
    ]
    status = session_pb2.StatusResponse(tasks=tasks, keys=3, key_bytes=40, calls=9, barriers_passed=4, barriers_failed=1, up_s=2.0)
    status.barriers.add(barrier_id="b")
    port = serve_metrics(lambda: status, 0)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as page:
        lines = {line for line in page.read().decode().splitlines() if line.startswith("holdfast")}
    assert lines == {
        'holdfast_processes{state="uninitialized"} 0.0',
        'holdfast_processes{state="connected"} 1.0',
        'holdfast_processes{state="disconnected"} 0.0',
        'holdfast_processes{state="error"} 1.0',
        'holdfast_heartbeat_age_seconds{process="0"} 1.5',
        'holdfast_step{process="0"} 7.0',
        "holdfast_keys 3.0",
        "holdfast_key_bytes 40.0",
        "holdfast_barriers_open 1.0",
        "holdfast_barriers_passed_total 4.0",
        "holdfast_barriers_failed_total 1.0",
        "holdfast_calls_total 9.0",
        "holdfast_up_seconds 2.0",
    }


def test_a_port_that_is_taken_is_an_error() -> None:
    """OSError, as for the service's own port."""
    port = serve_metrics(session_pb2.StatusResponse, 0)
    with pytest.raises(OSError, match="in use"):
        serve_metrics(session_pb2.StatusResponse, port)
