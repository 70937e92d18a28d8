"""Orbax's names of events, for dashboards that know them: each is told once, where ours that means
the same is.
"""

from __future__ import annotations

import jax

_SECONDS = {
    "/holdfast/save/blocked/secs": (
        "/jax/checkpoint/write/async/blocking_duration_secs",
        "/jax/orbax/write/async/blocking_duration_secs",
    ),
    "/holdfast/save/secs": (
        "/jax/checkpoint/write/async/total_duration_secs",
        "/jax/orbax/write/async/total_duration_secs",
    ),
    "/holdfast/restore/secs": ("/jax/orbax/read/total_duration_secs",),
}
_EVENTS = {
    "/holdfast/save/start": "/jax/orbax/write/async/start",
    "/holdfast/save/success": "/jax/orbax/write/success",
    "/holdfast/restore/start": "/jax/orbax/read/start",
    "/holdfast/restore/success": "/jax/orbax/read/success",
}
_BYTES = {"/holdfast/save/bytes": "/jax/orbax/write/gbytes"}
_GIB = 1 << 30


def _tell_seconds(event: str, duration_secs: float, **_: str | int) -> None:
    for theirs in _SECONDS.get(event, ()):
        jax.monitoring.record_event_duration_secs(theirs, duration_secs)


def _tell_event(event: str, **_: str | int) -> None:
    if event in _EVENTS:
        jax.monitoring.record_event(_EVENTS[event])


def _tell_bytes(event: str, value: float, **_: str | int) -> None:
    if event in _BYTES:
        jax.monitoring.record_scalar(_BYTES[event], value / _GIB)


jax.monitoring.register_event_duration_secs_listener(_tell_seconds)
jax.monitoring.register_event_listener(_tell_event)
jax.monitoring.register_scalar_listener(_tell_bytes)
