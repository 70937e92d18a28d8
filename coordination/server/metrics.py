"""The metrics of a job for Prometheus, served by its coordinator or its launcher. Needs the extra
`metrics`; on loopback by default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self

from holdfast.proto import coordination_pb2, session_pb2

from ..distribution import install_command

_VALUES = {
    "holdfast_waiting_share": (
        "waiting_share",
        "Share of its time in which a main thread waits for devices or other processes",
    ),
    "holdfast_memory_bytes": ("memory_bytes", "Resident memory of a process"),
    "holdfast_save_blocked_seconds": (
        "save_blocked_s",
        "How long saves have held a program, in all",
    ),
}


def _by_process(status: session_pb2.StatusResponse) -> Iterable[Any]:
    """Returns what processes report of themselves; what one does not report is left out."""
    from prometheus_client.core import GaugeMetricFamily

    pace = GaugeMetricFamily(
        "holdfast_steps_per_second", "Steps of the last ten seconds", labels=["process"]
    )
    saved = GaugeMetricFamily(
        "holdfast_saved_step", "Last saved step that a process reported", labels=["process"]
    )
    for task in status.tasks:
        if task.step_age_s > 0:
            pace.add_metric([str(task.task_id)], task.steps_per_second)
        if task.progress.HasField("saved_step"):
            saved.add_metric([str(task.task_id)], task.progress.saved_step)
    yield from (pace, saved)
    for name, (key, text) in _VALUES.items():
        family = GaugeMetricFamily(name, text, labels=["process"])
        for task in status.tasks:
            if key in task.progress.values:
                family.add_metric([str(task.task_id)], task.progress.values[key])
        yield family


class _Collector:
    """Turns a status into metrics when it is scraped."""

    def __init__(self, status: Callable[[], session_pb2.StatusResponse]) -> None:
        self._status = status

    def collect(self) -> Iterable[Any]:
        """Returns all metrics."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        status = self._status()
        states = [coordination_pb2.TaskState.Name(task.state).lower() for task in status.tasks]
        tasks = GaugeMetricFamily(
            "holdfast_processes", "Processes of the job by state", labels=["state"]
        )
        for state in ("uninitialized", "connected", "disconnected", "error"):
            tasks.add_metric([state], states.count(state))
        ages = GaugeMetricFamily(
            "holdfast_heartbeat_age_seconds",
            "Since a process was last heard of",
            labels=["process"],
        )
        steps = GaugeMetricFamily(
            "holdfast_step", "Step that a process last reported", labels=["process"]
        )
        for task in status.tasks:
            if task.heartbeat_age_s >= 0:
                ages.add_metric([str(task.task_id)], task.heartbeat_age_s)
            if task.progress.HasField("step"):
                steps.add_metric([str(task.task_id)], task.progress.step)
        yield from (tasks, ages, steps)
        yield from _by_process(status)
        moved = [task.step_age_s for task in status.tasks if task.step_age_s >= 0]
        if moved:
            yield GaugeMetricFamily(
                "holdfast_step_age_seconds", "Since any process last made a step", min(moved)
            )
        if status.goodput_s:
            parts = GaugeMetricFamily(
                "holdfast_goodput_seconds",
                "Where the time of the job went, as its launcher says",
                labels=["part"],
            )
            for part, seconds in status.goodput_s.items():
                parts.add_metric([part.removesuffix("_s")], seconds)
            yield parts
        trouble = sum(bool(task.progress.trouble) for task in status.tasks)
        yield GaugeMetricFamily(
            "holdfast_processes_in_trouble",
            "Processes that have reported trouble, such as a failed save",
            trouble,
        )
        missing = len({process for barrier in status.barriers for process in barrier.missing})
        yield GaugeMetricFamily(
            "holdfast_processes_missing", "Processes that others wait for at a barrier", missing
        )
        yield GaugeMetricFamily(
            "holdfast_attempt", "Which start of the job this is", status.attempt
        )
        yield GaugeMetricFamily("holdfast_keys", "Keys held", status.keys)
        yield GaugeMetricFamily("holdfast_key_bytes", "Bytes of keys and values", status.key_bytes)
        yield GaugeMetricFamily(
            "holdfast_barriers_open", "Barriers that processes wait at", len(status.barriers)
        )
        yield CounterMetricFamily(
            "holdfast_barriers_passed", "Barriers passed", status.barriers_passed
        )
        yield CounterMetricFamily(
            "holdfast_barriers_failed", "Barriers failed", status.barriers_failed
        )
        yield CounterMetricFamily("holdfast_calls", "Calls and frames taken", status.calls)
        yield GaugeMetricFamily(
            "holdfast_up_seconds", "For how long the service is up", status.up_s
        )


class MetricsServer:
    """Serves http://host:port/metrics on a thread of its own; `port` is where. `status` must be
    safe to call from it. A context manager.

    Raises OSError, saying what to do, without prometheus_client and for a port that is taken.
    """

    def __init__(
        self, status: Callable[[], session_pb2.StatusResponse], port: int, host: str = "127.0.0.1"
    ) -> None:
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError:
            raise OSError(
                f"--metrics-port needs prometheus_client: {install_command('metrics')}"
            ) from None
        registry = CollectorRegistry()
        registry.register(_Collector(status))
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise OSError(
                f"cannot serve metrics at {host}:{port}: {error.strerror}; choose another"
                " --metrics-port"
            ) from None
        self.port = int(self._server.server_port)

    def close(self) -> None:
        """Ends it."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
