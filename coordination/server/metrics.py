"""The metrics of a job for Prometheus, served by its coordinator or its launcher. Needs the extra
`metrics`; on loopback by default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, Self

from holdfast.proto import coordination_pb2, session_pb2

from ..distribution import install_command

_Task = session_pb2.TaskStatus
_Job = session_pb2.StatusResponse


def _reported(name: str) -> Callable[[_Task], float | None]:
    """Returns what reads a value that a process reports of itself."""

    def read(task: _Task) -> float | None:
        return task.progress.values.get(name)

    return read


def _age_s(task: _Task) -> float | None:
    return task.heartbeat_age_s if task.heartbeat_age_s >= 0 else None


def _steps_per_second(task: _Task) -> float | None:
    return task.steps_per_second if task.step_age_s >= 0 else None


def _missing(status: _Job) -> float:
    return len({process for barrier in status.barriers for process in barrier.missing})


_BY_PROCESS: Sequence[tuple[str, str, Callable[[_Task], float | None]]] = (
    ("heartbeat_age_seconds", "Since a process was last heard of", _age_s),
    (
        "step",
        "Step that a process last reported",
        lambda task: task.progress.step if task.progress.HasField("step") else None,
    ),
    ("steps_per_second", "Steps of the last ten seconds", _steps_per_second),
    (
        "saved_step",
        "Last saved step that a process reported",
        lambda task: task.progress.saved_step if task.progress.HasField("saved_step") else None,
    ),
    (
        "waiting_share",
        "Share of its time in which a main thread waits for devices or other processes",
        _reported("waiting_share"),
    ),
    ("memory_bytes", "Resident memory of a process", _reported("memory_bytes")),
    (
        "checkpoint_peak_bytes",
        "Most memory of the host that saves and restores of a process have held at a time",
        _reported("checkpoint_peak_bytes"),
    ),
    (
        "save_blocked_seconds",
        "How long saves have held a program, in all",
        _reported("save_blocked_s"),
    ),
    (
        "save_waited_seconds",
        "How long saves have waited for arrays that steps had yet to compute, in all",
        _reported("save_waited_s"),
    ),
    ("programs_compiled", "Programs that jax has compiled", _reported("compiled")),
    ("programs_loaded", "Programs compiled before that jax has loaded", _reported("loaded")),
    ("compile_seconds", "How long both took, in all", _reported("compile_s")),
    (
        "saves_missed",
        "Saves in a row that failed while the program went on",
        _reported("saves_missed"),
    ),
)
"""Name, text, and what reads the value of a process, None where it is not known."""

_GAUGES: Sequence[tuple[str, str, Callable[[_Job], float]]] = (
    (
        "processes_in_trouble",
        "Processes that have reported trouble, such as a failed save",
        lambda status: sum(bool(task.progress.trouble) for task in status.tasks),
    ),
    ("processes_missing", "Processes that others wait for at a barrier", _missing),
    ("attempt", "Which start of the job this is", attrgetter("attempt")),
    ("keys", "Keys held", attrgetter("keys")),
    ("key_bytes", "Bytes of keys and values", attrgetter("key_bytes")),
    ("barriers_open", "Barriers that processes wait at", lambda status: len(status.barriers)),
    ("up_seconds", "For how long the service is up", attrgetter("up_s")),
)
_COUNTERS: Sequence[tuple[str, str, Callable[[_Job], float]]] = (
    ("barriers_passed", "Barriers passed", attrgetter("barriers_passed")),
    ("barriers_failed", "Barriers failed", attrgetter("barriers_failed")),
    ("calls", "Calls and frames taken", attrgetter("calls")),
)


class _Collector:
    """Turns a status into metrics when it is scraped."""

    def __init__(self, status: Callable[[], _Job]) -> None:
        self._status = status

    def collect(self) -> Iterable[Any]:
        """Returns all metrics."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        status = self._status()
        yield _by_state(status)
        for name, text, of_task in _BY_PROCESS:
            family = GaugeMetricFamily(f"holdfast_{name}", text, labels=["process"])
            for task in status.tasks:
                value = of_task(task)
                if value is not None:
                    family.add_metric([str(task.task_id)], value)
            yield family
        yield from _of_the_job(status)
        for name, text, of_job in _GAUGES:
            yield GaugeMetricFamily(f"holdfast_{name}", text, of_job(status))
        for name, text, of_job in _COUNTERS:
            yield CounterMetricFamily(f"holdfast_{name}", text, of_job(status))


def _by_state(status: _Job) -> Any:
    from prometheus_client.core import GaugeMetricFamily

    states = [coordination_pb2.TaskState.Name(task.state).lower() for task in status.tasks]
    family = GaugeMetricFamily(
        "holdfast_processes", "Processes of the job by state", labels=["state"]
    )
    for state in ("uninitialized", "connected", "disconnected", "error"):
        family.add_metric([state], states.count(state))
    return family


def _of_the_job(status: _Job) -> Iterable[Any]:
    """Returns what is there only once processes make steps, or a launcher gives account."""
    from prometheus_client.core import GaugeMetricFamily

    moved = [task.step_age_s for task in status.tasks if task.step_age_s >= 0]
    if moved:
        text = "Since any process last made a step"
        yield GaugeMetricFamily("holdfast_step_age_seconds", text, min(moved))
    if status.goodput_s:
        text = "Where the time of the job went, as its launcher says"
        parts = GaugeMetricFamily("holdfast_goodput_seconds", text, labels=["part"])
        for part, seconds in status.goodput_s.items():
            parts.add_metric([part.removesuffix("_s")], seconds)
        yield parts


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
