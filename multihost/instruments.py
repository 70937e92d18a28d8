"""What other people's tools see of a job: events of `jax.monitoring`, and spans of OpenTelemetry
where its API is installed. docs/watching.md has the names.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import jax.monitoring

_log = logging.getLogger(__name__)


class Phase:
    """Something that takes time: its start, its seconds and how it ended go to `jax.monitoring`,
    and a span to OpenTelemetry.

    `trace` is what it has in common on all processes, such as the id of a save: their spans are
    then in one trace. Without it the span belongs to the phase around it. It begins when it is
    made, or at `began_s` of the monotonic clock, and ends with `end`, or with the block that it
    surrounds. Nothing here raises.
    """

    def __init__(
        self,
        name: str,
        *,
        trace: str = "",
        began_s: float | None = None,
        **attributes: str | int,
    ) -> None:
        self._name = name
        self._error: BaseException | None = None
        self._current = contextlib.ExitStack()
        self._began_s = time.monotonic() if began_s is None else began_s
        self._span = _start_span(name, trace, self._began_s, attributes)
        event(f"{name}/start")

    def failed(self, error: BaseException) -> None:
        """Notes that it does not end well."""
        self._error = error

    def end(self) -> None:
        """Ends it, now."""
        seconds(self._name, time.monotonic() - self._began_s)
        event(f"{self._name}/{'success' if self._error is None else 'failure'}")
        if self._span is not None:
            if self._error is not None:
                self._span.record_exception(self._error)
                self._span.set_status(_open_telemetry().StatusCode.ERROR, str(self._error))
            self._span.end()

    def __enter__(self) -> Self:
        if self._span is not None:
            self._current.enter_context(_open_telemetry().use_span(self._span))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._current.close()
        if error is not None:
            self.failed(error)
        self.end()


def event(name: str) -> None:
    """Counts something that has happened. Thread-safe; never raises, as those below."""
    _tell(jax.monitoring.record_event, name)


def seconds(name: str, duration_s: float) -> None:
    """Records how long something took."""
    _tell(jax.monitoring.record_event_duration_secs, f"{name}/secs", duration_s)


def amount(name: str, value: float) -> None:
    """Records a number, such as the bytes of a save."""
    _tell(jax.monitoring.record_scalar, name, value)


def _tell(record: Callable[..., None], name: str, *values: float) -> None:
    try:
        record(f"/holdfast/{name}", *values)
    except Exception as error:
        # A listener is the program's own. What it cannot take must not end a save.
        _log.warning("a listener of jax.monitoring failed at /holdfast/%s: %r", name, error)


def _start_span(name: str, trace: str, began_s: float, attributes: dict[str, str | int]) -> Any:
    tracer = _tracer()
    if tracer is None:
        return None
    named = {f"holdfast.{key}": value for key, value in attributes.items()}
    context = _common_parent(trace) if trace else None
    dotted = f"holdfast.{name.replace('/', '.')}"
    started_ns = time.time_ns() - int((time.monotonic() - began_s) * 1e9)
    return tracer.start_span(dotted, context=context, attributes=named, start_time=started_ns)


def _common_parent(trace: str) -> Any:
    """Returns a context whose trace all processes know by themselves; its span is nobody's."""
    api = _open_telemetry()
    digest = hashlib.sha256(trace.encode()).digest()
    parent = api.SpanContext(
        trace_id=int.from_bytes(digest[:16]),
        span_id=int.from_bytes(digest[16:24]),
        is_remote=True,
        trace_flags=api.TraceFlags(api.TraceFlags.SAMPLED),
    )
    return api.set_span_in_context(api.NonRecordingSpan(parent))


@functools.cache
def _tracer() -> Any:
    """Returns what makes spans, also for a provider that is set later; None without OpenTelemetry.

    To ask for it takes as long as a span.
    """
    api = _open_telemetry()
    return None if api is None else api.get_tracer("holdfast")


@functools.cache
def _open_telemetry() -> Any:
    """Returns its API; None where it is not installed, or is half imported for good: a child that
    was forked while its parent imported it.
    """
    try:
        api = importlib.import_module("opentelemetry.trace")
    except ImportError:
        return None
    return api if hasattr(api, "use_span") else None  # which it defines last


class Compilations:
    """Counts what jax compiles in this process, or loads because a run before has compiled it."""

    def __init__(self) -> None:
        self._programs = 0
        self._loaded = 0
        self._seconds = 0.0
        jax.monitoring.register_event_listener(self._note)
        jax.monitoring.register_event_duration_secs_listener(self._note_seconds)

    def statistics(self) -> dict[str, float]:
        """Returns the programs that were compiled and loaded, and the seconds of both."""
        return {
            "compiled": self._programs - self._loaded,
            "loaded": self._loaded,
            "compile_s": round(self._seconds, 3),
        }

    def _note(self, event: str, **_: str | int) -> None:
        self._loaded += event == "/jax/compilation_cache/cache_hits"

    def _note_seconds(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self._programs += 1
            self._seconds += duration_secs


compilations = Compilations()
