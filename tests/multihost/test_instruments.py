"""What other people's tools see: events of jax.monitoring, and spans of OpenTelemetry's own SDK."""

from __future__ import annotations

import logging
from typing import Any

import jax
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from holdfast.multihost.instruments import Phase, amount

_HEARD: list[str] = []
_SPANS = InMemorySpanExporter()


def _hear(name: str, *values: float, **labels: Any) -> None:
    if name.startswith("/holdfast/broken"):
        raise RuntimeError("the listener's own")
    if name.startswith("/holdfast/"):  # Orbax's names are told too, where compat is imported
        _HEARD.append(name)


@pytest.fixture(scope="module", autouse=True)
def _listeners() -> None:
    """A listener for each kind of event, and the process's provider: neither can be taken back."""
    jax.monitoring.register_event_listener(_hear)
    jax.monitoring.register_event_duration_secs_listener(_hear)
    jax.monitoring.register_scalar_listener(_hear)
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(_SPANS))
    trace.set_tracer_provider(provider)


@pytest.fixture(autouse=True)
def _empty() -> None:
    _HEARD.clear()
    _SPANS.clear()
    return


def test_a_phase_that_ends_well_has_a_start_seconds_and_a_success() -> None:
    with Phase("save", trace="5f2a", step=7):
        amount("save/bytes", 12)
    assert _HEARD == [
        "/holdfast/save/start",
        "/holdfast/save/bytes",
        "/holdfast/save/secs",
        "/holdfast/save/success",
    ]
    (span,) = _SPANS.get_finished_spans()
    assert (span.name, dict(span.attributes or {})) == ("holdfast.save", {"holdfast.step": 7})
    assert span.status.is_unset or span.status.is_ok


@pytest.mark.parametrize("is_raised", [True, False])
def test_a_phase_that_fails_says_so_once(is_raised: bool) -> None:
    """Whether its error is raised, or is in a result."""
    try:
        with Phase("save", trace="5f2a") as phase:
            if is_raised:
                raise OSError("the disk is full")
            phase.failed(OSError("the disk is full"))
    except OSError:
        assert is_raised
    assert _HEARD == ["/holdfast/save/start", "/holdfast/save/secs", "/holdfast/save/failure"]
    (span,) = _SPANS.get_finished_spans()
    assert not span.status.is_ok
    assert [event.name for event in span.events] == ["exception"]


def test_what_has_one_name_on_all_processes_is_one_trace() -> None:
    """A part belongs to the phase around it, and a phase to the trace of its name."""
    for process in range(2):
        with Phase("save", trace="5f2a", process=process):
            with Phase("save/write"):
                pass
    with Phase("save", trace="5f2b"):
        pass
    spans = _SPANS.get_finished_spans()
    traces = [span.context.trace_id for span in spans]
    assert len(set(traces[:4])) == 1
    assert traces[4] != traces[0]
    parts = {span.parent.span_id for span in spans if span.name == "holdfast.save.write"}
    wholes = {span.context.span_id for span in spans[:4] if span.name == "holdfast.save"}
    assert parts == wholes


def test_a_listener_that_raises_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), Phase("broken"):
        pass
    assert "a listener of jax.monitoring failed at /holdfast/broken/secs" in caplog.text


def test_without_its_api_there_are_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.multihost import instruments

    monkeypatch.setattr(instruments, "_tracer", lambda: None)
    with Phase("save", trace="5f2a"):
        pass
    assert "/holdfast/save/success" in _HEARD
    assert _SPANS.get_finished_spans() == ()
