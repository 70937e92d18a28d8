"""Metrics: what Prometheus scrapes is the status of the job."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from holdfast.coordination.server.metrics import MetricsServer
from holdfast.proto import coordination_pb2, session_pb2
from tests.support.paths import ROOT


def test_prometheus_scrapes_the_service(tmp_path: Path) -> None:
    """`--metrics-port` serves processes by state, heartbeat ages, keys, barriers and calls on
    loopback.
    """
    command = [
        sys.executable,
        "-m",
        "holdfast.coordination",
        "coordinator",
        "-n",
        "2",
        "--metrics-port",
        "0",
    ]
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
    assert (
        'holdfast_processes{state="uninitialized"} 2.0' in text
        and "holdfast_barriers_passed_total 0.0" in text
    )


VALUES = {
    "waiting_share": 0.25,
    "memory_bytes": 1024,
    "checkpoint_peak_bytes": 512,
    "save_blocked_s": 1.5,
    "save_waited_s": 0.5,
    "saves_missed": 2,
    "compiled": 3,
    "loaded": 4,
    "compile_s": 5.5,
}
FULL = session_pb2.ReportRequest(step=7, saved_step=5, values=VALUES, trouble="disk full")


def test_every_figure_is_the_statuss() -> None:
    """States, ages, steps, keys, barriers, calls and uptime, each under its name; what is not known
    is left out.
    """
    state = coordination_pb2.TaskState
    tasks = [
        session_pb2.TaskStatus(
            task_id=0,
            state=state.CONNECTED,
            heartbeat_age_s=1.5,
            progress=FULL,
            step_age_s=2.5,
            steps_per_second=4,
        ),
        session_pb2.TaskStatus(task_id=1, state=state.ERROR, heartbeat_age_s=-1, step_age_s=-1),
    ]
    status = session_pb2.StatusResponse(
        tasks=tasks,
        attempt=2,
        keys=3,
        key_bytes=40,
        calls=9,
        barriers_passed=4,
        barriers_failed=1,
        up_s=2.0,
    )
    status.goodput_s.update({"stepping_s": 7.5, "saving_s": 0.5})
    status.barriers.add(barrier_id="b", missing=[1])
    with (
        MetricsServer(lambda: status, 0) as server,
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=20) as page,
    ):
        lines = {line for line in page.read().decode().splitlines() if line.startswith("holdfast")}
    assert lines == {
        'holdfast_processes{state="uninitialized"} 0.0',
        'holdfast_processes{state="connected"} 1.0',
        'holdfast_processes{state="disconnected"} 0.0',
        'holdfast_processes{state="error"} 1.0',
        'holdfast_heartbeat_age_seconds{process="0"} 1.5',
        'holdfast_step{process="0"} 7.0',
        'holdfast_saved_step{process="0"} 5.0',
        'holdfast_steps_per_second{process="0"} 4.0',
        'holdfast_waiting_share{process="0"} 0.25',
        'holdfast_memory_bytes{process="0"} 1024.0',
        'holdfast_checkpoint_peak_bytes{process="0"} 512.0',
        'holdfast_save_blocked_seconds{process="0"} 1.5',
        'holdfast_save_waited_seconds{process="0"} 0.5',
        'holdfast_saves_missed{process="0"} 2.0',
        'holdfast_programs_compiled{process="0"} 3.0',
        'holdfast_programs_loaded{process="0"} 4.0',
        'holdfast_compile_seconds{process="0"} 5.5',
        "holdfast_step_age_seconds 2.5",
        "holdfast_processes_in_trouble 1.0",
        "holdfast_processes_missing 1.0",
        'holdfast_goodput_seconds{part="stepping"} 7.5',
        'holdfast_goodput_seconds{part="saving"} 0.5',
        "holdfast_attempt 2.0",
        "holdfast_keys 3.0",
        "holdfast_key_bytes 40.0",
        "holdfast_barriers_open 1.0",
        "holdfast_barriers_passed_total 4.0",
        "holdfast_barriers_failed_total 1.0",
        "holdfast_calls_total 9.0",
        "holdfast_up_seconds 2.0",
    }


def test_a_port_that_is_taken_is_an_error() -> None:
    """OSError, as for the service's own port; once it is free again it can be had."""
    with MetricsServer(session_pb2.StatusResponse, 0) as server:
        port = server.port
        with pytest.raises(OSError) as raised:
            MetricsServer(session_pb2.StatusResponse, port)
        assert (
            str(raised.value)
            == f"cannot serve metrics at 127.0.0.1:{port}: Address already in use; choose another"
            " --metrics-port"
        )
    MetricsServer(session_pb2.StatusResponse, port).close()


def test_the_dashboard_asks_for_nothing_else() -> None:
    """Every metric in the panels of docs/grafana.json is one that is served."""
    status = session_pb2.StatusResponse(
        tasks=[session_pb2.TaskStatus(task_id=0, progress=FULL, step_age_s=1)],
        goodput_s={"saving_s": 1},
    )
    with (
        MetricsServer(lambda: status, 0) as server,
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=20) as page,
    ):
        served = set(re.findall(r"^(holdfast_\w+)", page.read().decode(), re.MULTILINE))
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for each in panel["targets"]
        for name in re.findall(r"holdfast_\w+", each["expr"])
    }
    assert asked <= served and len(asked) >= 10, asked - served
