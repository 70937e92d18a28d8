"""Limits bound each other sensibly, and a job's settings have the defaults that jax has."""

from __future__ import annotations

from dataclasses import fields

from holdfast.coordination.limits import Config, Limits


def test_the_largest_value_is_let_in() -> None:
    """gRPC's bound has room for the largest value, its key and the rest of the message."""
    limits = Limits()
    assert limits.value_bytes + limits.key_bytes < limits.message_bytes < 2**31
    assert limits.value_bytes <= limits.total_bytes and limits.message_bytes > limits.backlog_bytes


def test_every_limit_is_a_positive_number() -> None:
    """None of them is a switch."""
    assert all(
        isinstance(getattr(Limits(), field.name), int) and getattr(Limits(), field.name) > 0
        for field in fields(Limits)
    )


def test_the_defaults_are_jaxs() -> None:
    """100 s of silence, 300 s for the shutdown barrier; strict, and not survivable."""
    config = Config(4, 7)
    assert (
        config.heartbeat_timeout_s,
        config.shutdown_timeout_s,
        config.recoverable,
        config.survivable,
    ) == (100.0, 300.0, False, False)
    assert config.limits == Limits()
